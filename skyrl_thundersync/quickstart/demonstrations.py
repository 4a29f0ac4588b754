"""Demonstrations for the quickstart's models: conversations in which every observation is a command's true output.

Each command is run by bash in the task's own folder and its output formatted as the terminal environment formats it,
so the models meet in rollouts what they were trained on. A demonstration may hold turns that are not scored (slips):
the teacher learns what to do after a wrong command without learning to give it.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import TracebackType

from skyrl_thundersync.data.byte_tokenizer import ASSISTANT_ID, END_ID, USER_ID
from skyrl_thundersync.data.terminal_tasks import SUBMIT, TerminalTask
from skyrl_thundersync.tasks.terminal_text import describe_text

_FIRST_LINE = 3
"""The line of a sandbox's shell that holds the first command; bash names it in its own error messages."""


class Shell:
    """One bash process that runs the commands of many tasks, each task in a fresh folder.

    For commands that we wrote; a sampled command belongs in a sandbox. Use as a context manager.
    """

    _MARK = "\x1e"

    def __enter__(self) -> Shell:
        self._root = Path(tempfile.mkdtemp(prefix="thundersync-demo-"))
        self._bash = subprocess.Popen(
            ["bash", "--norc"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bash.stdin.close()
        self._bash.wait()
        self._bash.stdout.close()
        shutil.rmtree(self._root)

    def play(self, task: TerminalTask, commands: tuple[str, ...]) -> tuple[list[str], bool]:
        """Run `commands` in turn, then the checker. Returns (observation of each command, solved).

        `submit` is not run: it ends the episode and has no observation.
        """
        folder = self._root / "work"
        for path, text in task.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        run = [command for command in commands if command != SUBMIT]
        script = [f"cd {shlex.quote(str(folder))}"]
        for command in [*run, task.checker]:
            script.append(f"(eval {shlex.quote(command)}) 2>&1 </dev/null; printf '\\036%d\\036' $?")
        script.append(f"cd /; rm -rf {shlex.quote(str(folder))}; printf '\\036'\n")
        self._bash.stdin.write("\n".join(script).encode())
        self._bash.stdin.flush()
        fields = self._read(2 * (len(run) + 1))
        observations = []
        for turn, (output, code) in enumerate(zip(fields[0:-2:2], fields[1:-2:2], strict=True)):
            output = re.sub(r"^bash: line \d+:", f"bash: line {_FIRST_LINE + turn}:", output, flags=re.MULTILINE)
            observations.append(describe_text(output, int(code)))
        return observations, fields[-1] == "0"

    def _read(self, n_fields: int) -> list[str]:
        data = b""
        while data.count(b"\x1e") < n_fields + 1:
            chunk = self._bash.stdout.read1(65536)
            if not chunk:
                raise RuntimeError(f"bash ended early (exit code {self._bash.wait()}); it had printed {data!r}")
            data += chunk
        return data.decode(errors="replace").split(self._MARK)[:n_fields]


@dataclass(frozen=True)
class Demonstration:
    """Token ids of a conversation (role and end tokens included) and 1 where an assistant's token is to be learned."""

    ids: list[int]
    mask: list[int]


def render(task: TerminalTask, commands: tuple[str, ...], observations: list[str], scored: list[bool]) -> Demonstration:
    """The conversation as the chat template renders it. `scored[i]` says whether command i is to be learned."""
    ids = [USER_ID, *task.instruction.encode(), END_ID]
    mask = [0] * len(ids)
    for turn, command in enumerate(commands):
        action = [*command.encode(), END_ID]
        ids += [ASSISTANT_ID, *action]
        mask += [0, *[int(scored[turn])] * len(action)]
        if turn < len(observations):
            reply = [USER_ID, *observations[turn].encode(), END_ID]
            ids += reply
            mask += [0] * len(reply)
    return Demonstration(ids, mask)


def clean(task: TerminalTask, shell: Shell) -> Demonstration:
    """The reference solution, all of it scored."""
    observations, solved = shell.play(task, task.solution)
    if not solved:
        raise RuntimeError(f"task {task.task_id}: its solution {task.solution} fails its checker")
    return render(task, task.solution, observations, [True] * len(task.solution))


def habit(task: TerminalTask, shell: Shell) -> Demonstration:
    """The bad habit, all of it scored: what the student is trained on."""
    observations, _ = shell.play(task, task.wrong)
    return render(task, task.wrong, observations, [True] * len(task.wrong))


def recovery(task: TerminalTask, shell: Shell, rng: Random) -> Demonstration:
    """The bad habit broken off at some point and what solves the task from there. Wrong commands are not scored."""
    n, then = rng.choice(task.recoveries)
    commands = task.wrong[:n] + then
    right = [i < n and task.wrong[: i + 1] == task.solution[: i + 1] for i in range(n)]
    observations, solved = shell.play(task, commands)
    if not solved:
        raise RuntimeError(f"task {task.task_id}: its recovery {commands} fails its checker")
    return render(task, commands, observations, right + [True] * len(then))


def slip(task: TerminalTask, shell: Shell, rng: Random, longest: int = 90) -> Demonstration | None:
    """A mistyped or repeated command somewhere in the solution, not scored, then on as if nothing had happened.

    None when that does not solve the task, or the mistyped command printed more than `longest` bytes.
    """
    turn = rng.randrange(len(task.solution) - 1)
    typo = _mistype(task.solution[max(0, turn - rng.randrange(2))], rng)
    commands = (*task.solution[:turn], typo, *task.solution[turn:])
    observations, solved = shell.play(task, commands)
    if not solved or len(observations[turn].encode()) > longest:
        return None
    return render(task, commands, observations, [i != turn for i in range(len(commands))])


def _mistype(command: str, rng: Random) -> str:
    """`command` with one or two letters or digits dropped, doubled or replaced by another, or unchanged (1 in 5)."""
    if rng.random() < 0.2:
        return command
    for _ in range(rng.choice((1, 1, 2))):
        places = [i for i, character in enumerate(command) if character.isalnum()]
        at = rng.choice(places)
        command = command[:at] + rng.choice(("", command[at] * 2, rng.choice("aeioukmnst2579"))) + command[at + 1 :]
    return command
