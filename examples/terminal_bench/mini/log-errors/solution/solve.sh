#!/bin/bash
set -e
cd /workspace
grep ' ERROR ' app.log | awk '{n[$2]++} END {for (s in n) print s, n[s]}' | sort -k2,2nr >errors.txt
