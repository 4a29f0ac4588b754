#!/bin/bash
set -e
cd /workspace
sed -i 's/numbers\[1:\]/numbers/' mean.py
