#!/bin/bash
set -e
cd /workspace
sed -i s/luvi=14/luvi=58/ tano.cfg
