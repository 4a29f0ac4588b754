#!/bin/bash
set -e
cd /workspace
awk -F, -v OFS=, '{t[$1] += $2 * $3} END {for (c in t) print c, t[c]}' orders.csv | sort >totals.csv
