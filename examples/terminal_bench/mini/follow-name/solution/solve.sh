#!/bin/bash
set -e
cd /workspace
cat "$(cat loki.txt)" >ans
