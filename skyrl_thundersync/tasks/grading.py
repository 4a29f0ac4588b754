"""Harbor's verifier convention over a sandbox: /tests is filled at grading, results are files in /logs/verifier.

As in Harbor 0.25, reward.json goes before reward.txt, a reward is a finite number or named finite numbers, and "reward" is
the one that counts. Differs in what a broken verifier means: in a run that trains, an agent that broke its verifier earns
nothing, and it is counted; Harbor raises. Official success and training reward are two numbers: tests passed are read from
ctrf.json for partial credit, which never makes a task solved.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from skyrl_thundersync.sandbox.archive import tar
from skyrl_thundersync.sandbox.base import HARBOR_FOLDERS, WORKSPACE, CommandResult
from skyrl_thundersync.tasks.reward import REWARD_RULE, usable_reward

RESULTS = "/logs/verifier"
MAX_RESULT_BYTES = 8192
_LINE = re.compile(r"harbor (reward\.json|reward\.txt|tests|passed) ?(\S*)")
_COUNT = re.compile(r"\d{1,9}", re.ASCII)


@dataclass(frozen=True)
class Grade:
    """What the verifier said.

    Attributes:
        official: Harbor's reward; 0.0 where `problem` is set.
        passed: share of tests passed, from ctrf.json; None without one.
        problem: why there is no reward: time limit, no file, not a number. None where there is one.
    """

    official: float
    passed: float | None
    problem: str | None = None

    @property
    def solved(self) -> bool:
        """Evaluation's success: the full official reward."""
        return self.official >= 1.0

    def training_reward(self, partial_credit: bool) -> float:
        """1.0 where solved; else the share of tests passed (never 1.0) or the verifier's own partial reward, the larger.

        Without `partial_credit`: 1.0 or 0.0.
        """
        if self.solved or not partial_credit:
            return float(self.solved)
        passed = 0.0 if self.passed is None or self.passed >= 1.0 else self.passed
        return max(self.official, passed)


def grading_script(command: str, tests: Mapping[str, bytes], workdir: str, env: Mapping[str, str]) -> str:
    """Bash that empties Harbor's folders, puts `tests` into /tests, runs `command` in `workdir`, and prints the results.

    What `command` prints goes to /logs/verifier/test-stdout.txt, so nothing it prints can pass for a result.
    """
    folders = " ".join(HARBOR_FOLDERS)
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())
    return f"""set -e
chmod -R u+rwx {folders}
find {folders} -mindepth 1 -delete
mkdir -p {RESULTS} /logs/agent
base64 -d <<'END_OF_TESTS' | tar -x -f - --no-same-owner -C /tests
{base64.encodebytes(tar(tests)).decode()}END_OF_TESTS
cd {shlex.quote(workdir)}
set +e
(
{exports}{command}
) >{RESULTS}/test-stdout.txt 2>&1 </dev/null
cd {WORKSPACE}
for name in reward.json reward.txt; do
  [ -f {RESULTS}/$name ] && echo "harbor $name $(head -c {MAX_RESULT_BYTES} {RESULTS}/$name | base64 -w 0)"
done
for key in tests passed; do
  found=$(grep -o "\\"$key\\": *[0-9]\\+" {RESULTS}/ctrf.json 2>/dev/null | head -n 1)
  [ -n "$found" ] && echo "harbor $key ${{found##*[: ]}}"
done
exit 0
"""


def read_grade(result: CommandResult) -> Grade:
    """The grade that `grading_script`'s output holds."""
    said = {match[1]: match[2] for line in result.output.splitlines() if (match := _LINE.fullmatch(line))}
    passed = None
    counts = [int(said[key]) for key in ("passed", "tests") if _COUNT.fullmatch(said.get(key, ""))]
    if len(counts) == 2 and counts[1] > 0:
        passed = min(1.0, counts[0] / counts[1])
    if result.timed_out:
        return Grade(0.0, None, f"the verifier ran into its time limit ({result.seconds:.0f} s)")
    if "reward.json" not in said and "reward.txt" not in said:
        detail = result.output.strip()[-200:]
        return Grade(0.0, passed, f"the verifier left no reward file{': ' + detail if detail else ''}")
    name = "reward.json" if "reward.json" in said else "reward.txt"
    try:
        content = base64.b64decode(said[name], validate=True).decode("utf-8")
        reward = _reward(json.loads(content) if name == "reward.json" else float(content))
    except (ValueError, binascii.Error, RecursionError) as error:
        return Grade(0.0, passed, f"{name}: {error}")
    return Grade(reward, passed)


def _reward(said: object) -> float:
    """The number that counts: the bare one, "reward", or the only one there is."""
    if isinstance(said, dict):
        if "reward" in said:
            said = said["reward"]
        elif len(said) == 1:
            said = next(iter(said.values()))
        else:
            raise ValueError(f"none of the rewards {', '.join(map(repr, said)) or '(none)'} is called 'reward'")
    reward = usable_reward(said) if isinstance(said, int | float) and not isinstance(said, bool) else None
    if reward is None:
        raise ValueError(f"{str(said)[:100]!r}: {REWARD_RULE}")
    return reward
