"""Dockerfiles that only copy files over a base image, read without an engine.

Such an environment is its base image and a set of files, so it needs no build and runs in any sandbox. Everything else
(RUN above all) is left to `docker build`.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

_CONTINUED = re.compile(r"\\[ \t]*\n")
_VARIABLE = re.compile(r"\$")
_IGNORED = ("LABEL", "CMD", "ENTRYPOINT", "EXPOSE", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK")


class NeedsBuildError(ValueError):
    """The Dockerfile does more than copy files: says which instruction."""


@dataclass(frozen=True)
class CopiedEnvironment:
    """A base image and what is copied over it.

    Attributes:
        image: as in FROM.
        workdir: as the last WORKDIR says; "/" without one.
        files: absolute path inside -> file on the host.
        env: as ENV says.
    """

    image: str
    workdir: str
    files: dict[str, Path]
    env: dict[str, str]


def read_dockerfile(path: Path) -> CopiedEnvironment:
    """Read a Dockerfile of FROM, WORKDIR, COPY, ENV and instructions without effect on files.

    Raises:
        NeedsBuildError: there is anything else in it, or a path to copy that is not in its folder.
    """
    image, workdir, files, env = None, "/", {}, {}
    for line in _instructions(path.read_text(encoding="utf-8")):
        word, _, rest = line.partition(" ")
        word, rest = word.upper(), rest.strip()
        if word in _IGNORED or (word == "USER" and rest in ("root", "0", "0:0", "agent", "1000")):
            continue
        if _VARIABLE.search(rest):
            raise NeedsBuildError(f"{word} with a variable")
        if word == "FROM" and image is None and len(rest.split()) == 1:
            image = rest
        elif word == "WORKDIR":
            workdir = posixpath.normpath(posixpath.join(workdir, rest))
        elif word == "ENV":
            env |= _env(rest)
        elif word == "COPY":
            files |= _copied(rest, workdir, path.parent)
        else:
            raise NeedsBuildError(f"{word} {rest[:40]}".strip())
    if image is None:
        raise NeedsBuildError("no FROM")
    return CopiedEnvironment(image, workdir, files, env)


def _instructions(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = _CONTINUED.sub(" ", "\n".join(lines) + "\n")
    return [line.strip() for line in joined.splitlines() if line.strip()]


def _env(rest: str) -> dict[str, str]:
    words = shlex.split(rest)
    if all("=" in word for word in words):
        return dict(word.split("=", 1) for word in words)
    name, _, value = rest.partition(" ")
    return {name: value.strip()}


def _copied(rest: str, workdir: str, context: Path) -> dict[str, Path]:
    while rest.startswith("--"):
        flag, _, rest = rest.partition(" ")
        rest = rest.strip()
        if not flag.startswith(("--chown=", "--chmod=")):
            raise NeedsBuildError(f"COPY {flag}")
    words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    if len(words) < 2:
        raise NeedsBuildError(f"COPY {rest[:40]}")
    *sources, given = words
    target = posixpath.normpath(posixpath.join(workdir, given))
    files = {}
    for source in sources:
        if any(character in source for character in "*?["):
            raise NeedsBuildError(f"COPY {source}")
        found = (context / source).resolve()
        if not found.is_relative_to(context.resolve()) or not found.exists():
            raise NeedsBuildError(f"COPY {source}, which is not in {context.name}/")
        if found.is_dir():  # Docker copies what is in a folder, not the folder
            for file in sorted(found.rglob("*")):
                if not file.resolve().is_relative_to(context.resolve()):
                    raise NeedsBuildError(f"COPY {source}, in which {file.name} is a link out of {context.name}/")
                if file.is_file():
                    files[posixpath.join(target, file.relative_to(found).as_posix())] = file
        else:
            into_folder = given.endswith("/") or given in (".", "./") or len(sources) > 1
            files[posixpath.join(target, found.name) if into_folder else target] = found
    return files
