"""Dockerfiles that only copy files over a base image, read without an engine.

Such an environment is its base image and a set of files, so it needs no build and runs in any sandbox. Everything else
(RUN above all) is left to `docker build`, and so is whatever a reader might take for something else than Docker does.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ESCAPE = re.compile(r"\A(?:[ \t]*#.*\n)*?[ \t]*#[ \t]*escape[ \t]*=[ \t]*`", re.IGNORECASE)
"""A parser directive that makes the backtick what the backslash is elsewhere: for paths of Windows."""
_CONTINUED = re.compile(r"(?:^|(?<=[^\\]))\\[ \t]*$")
_HEREDOC = re.compile(r"(?:^|\s)\d*<<(-?)([\"']?)(\w+)\2(?=\s|$)")
_WITH_HEREDOC = ("ADD", "COPY", "RUN", "ONBUILD")
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
    text = path.read_text(encoding="utf-8-sig")
    if _ESCAPE.match(text):
        raise NeedsBuildError("another escape character")
    for word, rest in _instructions(text):
        if word in _IGNORED or (word == "USER" and rest in ("root", "0", "0:0", "agent", "1000")):
            continue
        if _VARIABLE.search(rest):
            raise NeedsBuildError(f"{word} with a variable")
        if word == "FROM" and image is None and len(rest.split()) == 1:
            image = rest
        elif word == "WORKDIR":
            workdir = posixpath.normpath(posixpath.join(workdir, _unquoted(rest)))
        elif word == "ENV":
            env |= _env(rest)
        elif word == "COPY":
            files |= _copied(rest, workdir, path.parent)
        else:
            raise NeedsBuildError(f"{word} {rest[:40]}".strip())
    if image is None:
        raise NeedsBuildError("no FROM")
    return CopiedEnvironment(image, workdir, files, env)


def last_workdir(path: Path) -> str:
    """Where the last stage of any Dockerfile ends up, as far as its own WORKDIRs say; "/" without one."""
    workdir, name, stages = "/", "", {}
    for word, rest in _instructions(path.read_text(encoding="utf-8-sig")):
        if word == "FROM":
            stages[name] = workdir
            base, *named = [part for part in rest.split() if not part.startswith("--")] or [""]
            workdir = stages.get(base.lower(), "/")
            name = named[1].lower() if len(named) == 2 else ""
        elif word == "WORKDIR":
            workdir = posixpath.normpath(posixpath.join(workdir, rest.strip("\"'")))
    return workdir


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """Each instruction's word, in capitals, and its text on one line, as BuildKit reads them.

    Comments and empty lines may stand within a continued instruction. What follows a heredoc's mark is not of the file's own
    instructions, up to the heredoc's end.
    """
    lines, open_line = iter(text.split("\n")), ""
    for line in lines:
        line = line.rstrip("\r")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        open_line += line if open_line else line.lstrip()
        if _CONTINUED.search(open_line):
            open_line = _CONTINUED.sub("", open_line)
            continue
        word, _, rest = open_line.strip().replace("\t", " ").partition(" ")
        open_line = ""
        if word.upper() in _WITH_HEREDOC:
            for dash, _, name in _HEREDOC.findall(rest):
                for inner in lines:
                    if (inner.lstrip("\t") if dash else inner).rstrip("\r") == name:
                        break
        yield word.upper(), rest.strip()
    if open_line.strip():  # the file ends with a continuation
        word, _, rest = open_line.strip().partition(" ")
        yield word.upper(), rest.strip()


def _split(text: str, instruction: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise NeedsBuildError(f"{instruction} {text[:40]}: {error}") from error


def _unquoted(text: str, instruction: str = "WORKDIR") -> str:
    """A text without its quotes; what stands between words stays."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace = lexer.commenters = ""
    lexer.whitespace_split = True
    try:
        return "".join(lexer)
    except ValueError as error:
        raise NeedsBuildError(f"{instruction} {text[:40]}: {error}") from error


def _env(rest: str) -> dict[str, str]:
    name, _, value = rest.partition(" ")
    if "=" not in name:
        return {name: _unquoted(value.strip(), "ENV")}
    words = _split(rest, "ENV")
    if not all("=" in word for word in words):
        raise NeedsBuildError(f"ENV {rest[:40]}")
    return dict(word.split("=", 1) for word in words)


def _words(rest: str) -> list[str]:
    """Of COPY: a list in JSON, or what white space parts."""
    if rest.startswith("["):
        try:
            words = json.loads(rest)
        except json.JSONDecodeError:
            words = None
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            return words
    return [_unquoted(word, "COPY") for word in rest.split()]


def _copied(rest: str, workdir: str, context: Path) -> dict[str, Path]:
    if _HEREDOC.search(rest):
        raise NeedsBuildError("COPY with a heredoc")
    if any((context / name).exists() for name in (".dockerignore", "Dockerfile.dockerignore")):
        raise NeedsBuildError("COPY under a .dockerignore")
    while rest.startswith("--"):
        flag, _, rest = rest.partition(" ")
        rest = rest.strip()
        if not flag.startswith(("--chown=", "--chmod=")):
            raise NeedsBuildError(f"COPY {flag}")
    words = _words(rest)
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
            into_folder = given.endswith("/") or target == workdir or len(sources) > 1
            files[posixpath.join(target, found.name) if into_folder else target] = found
    return files
