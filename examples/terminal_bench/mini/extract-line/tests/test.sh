#!/bin/bash
# Counts checks; the reward is 1 when all hold. ctrf.json carries the count, for partial credit in training.
cd /workspace || exit 1
total=0 passed=0
check() { total=$((total + 1)); if "$@"; then passed=$((passed + 1)); fi; }
holds() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

check holds ans 'siba 71'
check [ "$(wc -l <puka.log)" = 4 ]

mkdir -p /logs/verifier
printf '{"results": {"summary": {"tests": %d, "passed": %d, "failed": %d}}}\n' \
  "$total" "$passed" "$((total - passed))" >/logs/verifier/ctrf.json
[ "$passed" -eq "$total" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
