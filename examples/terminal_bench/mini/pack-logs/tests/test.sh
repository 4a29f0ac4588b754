#!/bin/bash
# Counts checks; the reward is 1 when all hold. ctrf.json carries the count, for partial credit in training.
cd /workspace || exit 1
total=0 passed=0
check() { total=$((total + 1)); if "$@"; then passed=$((passed + 1)); fi; }
holds() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

check [ "$(tar -tzf logs.tar.gz 2>/dev/null | sort)" = $'logs/old/db.log\nlogs/web.log' ]
check [ "$(tar -xzOf logs.tar.gz logs/old/db.log 2>/dev/null)" = down ]
check [ -z "$(find logs -name '*.log')" ]
check holds logs/readme.txt 'keep me'

mkdir -p /logs/verifier
printf '{"results": {"summary": {"tests": %d, "passed": %d, "failed": %d}}}\n' \
  "$total" "$passed" "$((total - passed))" >/logs/verifier/ctrf.json
[ "$passed" -eq "$total" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
