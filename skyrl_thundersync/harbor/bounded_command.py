"""A command whose output is bounded where it runs, for containers that are reached through somebody else's `exec`.

Such an `exec` collects all that a command prints before it returns, so what comes back must be small already there. Needs
bash and coreutils (or busybox) in the container, nothing else.
"""

from __future__ import annotations

import re
import shlex

_CUT = re.compile("\ufffd*(\n\\[[0-9]+ bytes cut\\]\n)\ufffd*")

# Three FIFOs: the command prints into `in`; `tee` deals it out to the keepers of head and tail and to the counter. Between
# them stands a relay: a child in the background may hold `in` open for ever, so when the command has ended and what it
# printed is through, the relay lets go of the keepers and reads on into nothing, as a reader that left would end that child
# at its next line. `dd` and plain `head` would do for the head alone, but busybox's `head` takes more than it prints.
_SCRIPT = """
exec 2>/dev/null
folder=$(mktemp -d) && mkfifo "$folder/in" "$folder/out" "$folder/h" "$folder/t" || {{
  {command} </dev/null 2>&1 | tail -c {tail}
  code=${{PIPESTATUS[0]}}
  rm -rf "$folder"
  exit "$code"
}}
cd "$folder" || exit
{{ head -c {head} >head; exec cat >/dev/null; }} <h & head=$!
tail -c {tail} <t >tail & tail=$!
tee h t <out | wc -c >count & counter=$!
{{ cat <&3 & cat=$!; trap 'kill $cat' USR1; wait $cat; exec cat <&3 >/dev/null; }} 3<in >out & relay=$!
( cd "$OLDPWD" && exec {command} ) </dev/null >in 2>&1
code=$?
for _ in $(seq 40); do kill -0 $relay || break; sleep 0.05; done
kill -USR1 $relay
wait $head $counter $tail
total=$(($(cat count)))
cat head
cut=$((total - {head} - {tail}))
if [ $cut -gt 0 ]; then printf '\\n[%s bytes cut]\\n' $cut; cat tail
elif [ $total -gt {head} ]; then tail -c $((total - {head})) tail
fi
cd / && rm -rf "$folder"
exit $code
"""


def bounded(command: str, limit_bytes: int) -> str:
    """Bash that runs the simple command `command` and prints the first and the last half of `limit_bytes` of its output.

    stdout and stderr come in the order written; between the halves a line says how many bytes were left out. Standard input
    is empty. The exit code is the command's. A child left in the background delays the return by two seconds at most and
    lives on. Where the container has no room left for two small files, the tail alone is printed.
    """
    if limit_bytes < 2:
        raise ValueError(f"output limit must be at least 2 bytes, got {limit_bytes}")
    tail = limit_bytes // 2
    script = _SCRIPT.format(command=command, head=limit_bytes - tail, tail=tail)
    return f"bash -c {shlex.quote(script)}"


def without_halves(text: str) -> str:
    """Decoded output of a `bounded` command without what is left of the characters that were cut in two."""
    return _CUT.sub(r"\1", text)
