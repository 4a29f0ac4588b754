#!/bin/bash
set -e
cd /workspace
awk '{s += $1} END {print s}' viro.txt >ans
