#!/bin/bash
# Counts checks; the reward is 1 when all hold. ctrf.json carries the count, for partial credit in training.
cd /workspace || exit 1
total=0 passed=0
check() { total=$((total + 1)); if "$@"; then passed=$((passed + 1)); fi; }
holds() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

check [ "$(python3 mean.py)" = 11.0 ]
check holds data.txt $'4\n8\n15\n17'
printf '1\n2\n' >/tmp/data.txt; cp mean.py /tmp/mean.py
check [ "$(cd /tmp && python3 mean.py)" = 1.5 ]

mkdir -p /logs/verifier
printf '{"results": {"summary": {"tests": %d, "passed": %d, "failed": %d}}}\n' \
  "$total" "$passed" "$((total - passed))" >/logs/verifier/ctrf.json
[ "$passed" -eq "$total" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
