#!/bin/bash
set -e
cd /workspace
find logs -name '*.log' | tar -czf logs.tar.gz -T -
find logs -name '*.log' -delete
