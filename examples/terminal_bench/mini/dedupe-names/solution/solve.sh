#!/bin/bash
set -e
cd /workspace
LC_ALL=C sort -u names.txt >unique.txt
