#!/bin/bash
set -e
cd /workspace
grep -l zuto *.* >ans
