#!/bin/bash
set -e
cd /workspace
wc -l <melo.txt >ans
