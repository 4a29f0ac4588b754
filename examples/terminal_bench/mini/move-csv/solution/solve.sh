#!/bin/bash
set -e
cd /workspace
mv sale.csv gira/
