"""Small terminal tasks, made from a seed: eight kinds, each with files, a checker and a reference solution.

Every kind wants a look before the act: the words and numbers that the later commands need stand in the output of
the earlier ones. Training and held-out tasks share the kinds, and of what varies only line counts, line numbers and
file extensions: each word and each two-digit number belongs to one of the two splits by its checksum. Beside its
solution a task carries a bad habit (commands that look right and fail the checker) and how to recover from it: a
teacher and a student are made from these.
"""

from __future__ import annotations

import itertools
import json
import shlex
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

SPLITS = ("train", "heldout")
SUBMIT = "submit"
MAX_TURNS = 6
EXTENSIONS = ("txt", "log", "md")


@dataclass(frozen=True)
class TerminalTask:
    """One task and what is known about it.

    Attributes:
        task_id: unique among the tasks of all splits and seeds' indices: kind, split, seed and index.
        kind: one of `KINDS`.
        instruction: the user message.
        files: relative path -> text, put into the working folder before the first turn.
        checker: bash script, run in the working folder after the agent finished; exit 0 = solved.
        solution: commands that solve it, one a turn, the last one `submit`.
        wrong: a bad habit, one command a turn, the last one `submit`; the checker fails it.
        recoveries: (n, commands): after the first n commands of `wrong`, of which the n-th is a wrong one, these still
            solve the task.
    """

    task_id: str
    kind: str
    instruction: str
    files: dict[str, str]
    checker: str
    solution: tuple[str, ...]
    wrong: tuple[str, ...]
    recoveries: tuple[tuple[int, tuple[str, ...]], ...]

    def row(self) -> dict[str, object]:
        """The dataset row that the terminal environment reads."""
        return {
            "prompt": [{"role": "user", "content": self.instruction}],
            "env_class": "terminal",
            "task_id": self.task_id,
            "files": json.dumps(self.files),
            "checker": self.checker,
            "max_turns": MAX_TURNS,
        }


def in_split(text: str, split: str) -> bool:
    """Whether a word or number belongs to `split`: a quarter of them is held out, by checksum."""
    return (zlib.crc32(text.encode()) % 4 == 0) == (split == "heldout")


SYLLABLES = ["".join(pair) for pair in itertools.product("bdfgklmnprstvz", "aeiou")]
_USED = ("done", "file", "line", "move", "name")
"""Words of the instructions themselves."""
_ALL_WORDS = [a + b for a in SYLLABLES for b in SYLLABLES if a != b and a + b not in _USED]
WORDS = {split: [word for word in _ALL_WORDS if in_split(word, split)] for split in SPLITS}
NUMBERS = {split: [n for n in range(10, 100) if in_split(str(n), split)] for split in SPLITS}


class _Draw:
    """Random words and numbers of one split; no word comes twice in a task."""

    def __init__(self, rng: Random, split: str):
        self.rng, self.split = rng, split
        self._words = iter(rng.sample(WORDS[split], 32))

    def word(self) -> str:
        return next(self._words)

    def name(self, extension: str | None = None) -> str:
        stem = self.word() if self.rng.random() < 0.5 else f"{self.word()}_{self.word()}"
        return f"{stem}.{extension or self.rng.choice(EXTENSIONS)}"

    def number(self) -> int:
        return self.rng.choice(NUMBERS[self.split])

    def lines(self, n: int) -> list[str]:
        return [f"{self.word()} {self.number()}" for _ in range(n)]


def _text(lines: list[str]) -> str:
    return "".join(line + "\n" for line in lines)


def _checker(present: dict[str, str], absent: tuple[str, ...] = ()) -> str:
    """A script that wants each file of `present` to hold that text, trailing newlines aside, and `absent` ones gone."""
    lines = ["set -u", 'holds() { [ -f "$1" ] && [ "$(< "$1")" = "$2" ]; }']
    lines += [f"holds {shlex.quote(path)} {shlex.quote(text.rstrip())} || exit 1" for path, text in present.items()]
    lines += [f"[ ! -e {shlex.quote(path)} ] || exit 1" for path in absent]
    return "\n".join([*lines, "exit 0", ""])


_Made = tuple[str, dict[str, str], str, tuple[str, ...], tuple[str, ...], tuple[tuple[int, tuple[str, ...]], ...]]


def _find(draw: _Draw) -> _Made:
    names = sorted(draw.name() for _ in range(4))
    files = {name: _text(draw.lines(2)) for name in names}
    target = draw.rng.choice(names[1:])
    wanted = files[target].split()[draw.rng.choice((0, 2))]
    look, act = f"grep -l {wanted} *", f"echo {target} > ans"
    return (
        f"Write the name of the file with the word {wanted} to ans.",
        files,
        _checker({"ans": target, **files}),
        (look, act, SUBMIT),
        ("ls", f"echo {names[0]} > ans", SUBMIT),
        ((1, (look, act, SUBMIT)), (2, (look, act, SUBMIT))),
    )


def _count(draw: _Draw) -> _Made:
    name, n = draw.name(), draw.rng.randint(2, 6)
    files = {name: _text(draw.lines(n))}
    look, act = f"wc -l {name}", f"echo {n} > ans"
    return (
        f"Write the number of lines of {name} to ans.",
        files,
        _checker({"ans": str(n), **files}),
        (look, act, SUBMIT),
        (f"wc -c {name}", f"echo {len(files[name])} > ans", SUBMIT),
        ((1, (look, act, SUBMIT)), (2, (look, act, SUBMIT))),
    )


def _extract(draw: _Draw) -> _Made:
    name, lines = draw.name(), draw.lines(4)
    files, n = {name: _text(lines)}, draw.rng.randint(2, 4)
    look, act = f"sed -n {n}p {name}", f"echo {lines[n - 1]} > ans"
    return (
        f"Write line {n} of {name} to ans.",
        files,
        _checker({"ans": lines[n - 1], **files}),
        (look, act, SUBMIT),
        (f"head -n {n} {name}", f"echo {lines[0]} > ans", SUBMIT),
        ((1, (look, act, SUBMIT)), (2, (look, act, SUBMIT))),
    )


def _edit(draw: _Draw) -> _Made:
    name, keys = draw.name("cfg"), [draw.word() for _ in range(4)]
    old, new = [draw.number() for _ in keys], draw.number()
    which = draw.rng.randrange(4)
    while new == old[which]:
        new = draw.number()
    files = {name: _text([f"{k}={v}" for k, v in zip(keys, old, strict=True)])}
    look, change = f"grep {keys[which]} {name}", f"s/{keys[which]}={old[which]}/{keys[which]}={new}/ {name}"
    after = files[name].replace(f"{keys[which]}={old[which]}\n", f"{keys[which]}={new}\n")
    return (
        f"In {name} set {keys[which]} to {new}.",
        files,
        _checker({name: after}),
        (look, f"sed -i {change}", SUBMIT),
        (look, f"sed {change}", SUBMIT),
        ((2, (f"sed -i {change}", SUBMIT)),),
    )


def _move(draw: _Draw) -> _Made:
    folder, target, others = draw.word(), draw.name("csv"), [draw.name() for _ in range(3)]
    files = {name: _text(draw.lines(1)) for name in (target, *others)} | {
        f"{folder}/{draw.name()}": _text(draw.lines(1))
    }
    after = {f"{folder}/{target}" if name == target else name: text for name, text in files.items()}
    return (
        f"Move the csv file into {folder}/.",
        files,
        _checker(after, absent=(target,)),
        ("ls *.csv", f"mv {target} {folder}", SUBMIT),
        ("ls *.csv", f"cp {target} {folder}", SUBMIT),
        ((2, (f"rm {target}", SUBMIT)),),
    )


def _compute(draw: _Draw) -> _Made:
    name, numbers = draw.name(), draw.rng.sample(NUMBERS[draw.split], 3)
    files = {name: "".join(f"{n}\n" for n in numbers)}
    look, add, habit = (
        f"cat {name}",
        "expr " + " + ".join(map(str, numbers)),
        "expr " + " + ".join(map(str, numbers[:2])),
    )
    act = f"echo {sum(numbers)} > ans"
    return (
        f"Write the sum of the numbers in {name} to ans.",
        files,
        _checker({"ans": str(sum(numbers)), **files}),
        (look, add, act, SUBMIT),
        (look, habit, f"echo {sum(numbers[:2])} > ans", SUBMIT),
        ((2, (add, act, SUBMIT)), (3, (add, act, SUBMIT))),
    )


def _triage(draw: _Draw) -> _Made:
    name, folder, state = draw.name(), draw.word(), draw.rng.choice(("done", "open"))
    files = {name: f"{state}\n", f"{folder}/{draw.name()}": _text(draw.lines(1))}
    kept = {path: text for path, text in files.items() if path != name}
    moved = f"{folder}/{name}"
    if state == "done":
        act, habit, repair = f"rm {name}", f"mv {name} {folder}", f"rm {moved}"
        checker = _checker(kept, absent=(name, moved))
    else:
        act, habit, repair = f"mv {name} {folder}", f"cp {name} {folder}", f"rm {name}"
        checker = _checker({**kept, moved: files[name]}, absent=(name,))
    return (
        f"If {name} says done, delete it; if open, move it into {folder}/.",
        files,
        checker,
        (f"cat {name}", act, SUBMIT),
        (f"cat {name}", habit, SUBMIT),
        ((2, (repair, SUBMIT)),),
    )


def _follow(draw: _Draw) -> _Made:
    name, target, text = draw.name(), draw.name(), draw.lines(1)[0]
    files = {name: f"{target}\n", target: f"{text}\n", draw.name(): _text(draw.lines(1))}
    look, act = f"cat {target}", f"echo {text} > ans"
    return (
        f"{name} names a file. Write the text of that file to ans.",
        files,
        _checker({"ans": text, **files}),
        (f"cat {name}", look, act, SUBMIT),
        (f"cat {name}", f"echo {target} > ans", SUBMIT),
        ((2, (look, act, SUBMIT)),),
    )


_MAKERS: dict[str, Callable[[_Draw], _Made]] = {
    "find": _find,
    "count": _count,
    "extract": _extract,
    "edit": _edit,
    "move": _move,
    "compute": _compute,
    "triage": _triage,
    "follow": _follow,
}
KINDS = tuple(_MAKERS)


def tasks(split: str, seed: int = 0) -> Iterator[TerminalTask]:
    """Endless tasks of `split`, the kinds in turn. The same split and seed give the same tasks.

    Raises:
        ValueError: `split` is not one of `SPLITS`.
    """
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}; there are {', '.join(SPLITS)}")
    for index in itertools.count():
        kind = KINDS[index % len(KINDS)]
        instruction, *rest = _MAKERS[kind](_Draw(Random(f"{split}/{seed}/{index}"), split))
        yield TerminalTask(f"{kind}-{split}-{seed}-{index}", kind, instruction, *rest)


def write_dataset(path: str | Path, split: str, n: int, seed: int = 0) -> Path:
    """Write the first `n` tasks of `split` as JSON lines, one row of the terminal environment each. Returns `path`."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = (json.dumps(task.row()) + "\n" for task in itertools.islice(tasks(split, seed), n))
    path.write_text("".join(rows))
    return path
