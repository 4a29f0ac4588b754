"""Harbor task folders (task.toml, instruction.md, environment/, tests/, solution/) as tasks of the terminal environment.

Follows Harbor 0.25. Differs from a Harbor run in three ways. The verifier's files travel in the dataset row and reach the
sandbox only at grading; the reference solution is in no row. Sandboxes have no network, so a task that says nothing about the
network runs closed, and one that asks for it is skipped. The agent is user 1000 and not root.

What cannot be run is never dropped in silence: `read_task` raises `Unsupported` with a reason from a closed list, and
`read_tasks` counts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from skyrl_thundersync.data.dockerfile import NeedsBuildError, last_workdir, read_dockerfile
from skyrl_thundersync.data.task_folder import (
    ENABLEABLE,
    Unsupported,
    folder_files,
    instruction_of,
    refuse_links_out,
    required,
    task_folders,
)
from skyrl_thundersync.sandbox.base import WORKSPACE

AGENT_TIMEOUT_S = 3600.0
"""Harbor leaves the agent's time open where task.toml does; a training episode has an end."""
VERIFIER_TIMEOUT_S = 600.0
TEST_COMMAND = "bash /tests/test.sh"
MAX_TEST_BYTES = 8 << 20
_FETCHES = re.compile(r"^[^#\n]*\b(apt-get|apt|curl|wget|pip3?|uvx?|npm|git clone)\b[^\n]*", re.MULTILINE)


@dataclass(frozen=True)
class HarborTask:
    """One task as read.

    Attributes:
        task_id: the folder's name.
        instruction: without canary lines.
        image: base image, or the tag that `docker build` of environment/ must give (`build`).
        host_tools: the task's author says that the programs of a plain Debian are enough: bubblewrap will do.
        workdir: where the agent starts.
        files: relative path -> text, put into /workspace.
        tests, solution: relative path -> bytes.
        env: variables of the agent's shell; verifier_env: of the verifier beside them.
        needs: reasons of `ENABLEABLE` that apply and were enabled.
        metadata: [metadata] of task.toml.
    """

    task_id: str
    folder: Path
    instruction: str
    image: str
    host_tools: bool
    workdir: str
    files: dict[str, str]
    tests: dict[str, bytes]
    solution: dict[str, bytes]
    env: dict[str, str]
    verifier_env: dict[str, str]
    agent_timeout_s: float
    verifier_timeout_s: float
    needs: tuple[str, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)

    def row(self, max_turns: int, partial_credit: bool = True) -> dict[str, Any]:
        """The dataset row that the terminal environment reads. Holds no solution.

        `partial_credit`: the training reward counts passed tests where the verifier reports them; what evaluation calls
        solved is the official reward alone, in either case.
        """
        return {
            "prompt": [{"role": "user", "content": self.instruction}],
            "env_class": "terminal",
            "task_id": self.task_id,
            "image": self.image,
            "image_optional": self.host_tools,
            "workdir": self.workdir,
            "env": json.dumps(self.env),
            "files": json.dumps(self.files),
            "checker": TEST_COMMAND,
            "tests": json.dumps(encoded(self.tests)),
            "verifier_env": json.dumps(self.verifier_env),
            "partial_credit": partial_credit,
            "agent_timeout_s": self.agent_timeout_s,
            "verifier_timeout_s": self.verifier_timeout_s,
            "max_turns": max_turns,
            "needs": ",".join(self.needs),
        }


def encoded(files: Mapping[str, bytes]) -> dict[str, Any]:
    """JSON form of files: text as it is, anything else as {"base64": …}."""
    return {path: _json_text(data) for path, data in sorted(files.items())}


def _json_text(data: bytes) -> Any:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


@dataclass
class Skipped:
    """What `read_tasks` left out: how many by reason, and each task's id, reason and detail."""

    counts: Counter[str] = field(default_factory=Counter)
    tasks: list[tuple[str, str, str]] = field(default_factory=list)


def read_tasks(root: Path, enabled: Collection[str] = ()) -> tuple[list[HarborTask], Skipped]:
    """All tasks below `root`, and what was skipped and why.

    Raises:
        FileNotFoundError: there is no task folder below `root`.
        ValueError: `enabled` names no reason of `ENABLEABLE`.
    """
    if unknown := set(enabled) - set(ENABLEABLE):
        raise ValueError(f"cannot enable {', '.join(sorted(unknown))}: one of {', '.join(ENABLEABLE)}")
    folders = task_folders(root)
    if not folders:
        raise FileNotFoundError(f"no Harbor task (a folder with task.toml) below {root}")
    tasks, skipped = [], Skipped()
    for folder in folders:
        try:
            tasks.append(read_task(folder, enabled))
        except Unsupported as problem:
            skipped.counts[problem.reason] += 1
            skipped.tasks.append((problem.task_id, problem.reason, problem.detail))
    return tasks, skipped


def read_task(folder: Path, enabled: Collection[str] = ()) -> HarborTask:
    """One task folder.

    Raises:
        Unsupported: it is broken, incomplete, or asks for what the terminal environment has not and `enabled` does not name.
    """
    name = folder.name
    refuse_links_out(folder)
    config = _config(folder)
    for problem in _unsupported(config):
        raise Unsupported(name, "unsupported", problem)
    required(folder, "instruction.md")
    instruction = instruction_of(folder)
    if not instruction:
        raise Unsupported(name, "incomplete", "instruction.md is empty")
    required(folder, "tests/test.sh")
    tests, solution = folder_files(folder, "tests"), folder_files(folder, "solution")
    if (size := sum(map(len, tests.values()))) > MAX_TEST_BYTES:
        raise Unsupported(name, "unsupported", f"tests/ holds {size} bytes, more than {MAX_TEST_BYTES}")
    needs = {}
    if compose := _compose_detail(folder):
        needs["compose"] = compose
    environment, verifier = config.get("environment", {}), config.get("verifier", {})
    if environment.get("gpus") or environment.get("gpu_types") or environment.get("tpu"):
        needs["gpu"] = "[environment] asks for an accelerator"
    if internet := _internet_detail(config, tests):
        needs["internet"] = internet
    place, build = _environment(folder, environment)
    if build:
        needs["build"] = build
    for reason, detail in needs.items():
        if reason not in enabled:
            raise Unsupported(name, reason, detail)
    env = _plain_env(name, "[environment.env]", environment.get("env", {}))
    return HarborTask(
        task_id=name,
        folder=folder,
        instruction=instruction,
        image=place.image,
        host_tools=config.get("metadata", {}).get("host_tools") is True and not build,
        workdir=place.workdir,
        files=place.files,
        tests=tests,
        solution=solution,
        env=place.env | env,
        verifier_env=_plain_env(name, "[verifier.env]", verifier.get("env", {})),
        agent_timeout_s=float(config.get("agent", {}).get("timeout_sec") or AGENT_TIMEOUT_S),
        verifier_timeout_s=float(verifier.get("timeout_sec") or VERIFIER_TIMEOUT_S),
        needs=tuple(reason for reason in ENABLEABLE if reason in needs),
        metadata=dict(config.get("metadata", {})),
    )


def image_tag(folder: Path) -> str:
    """The tag under which the image of a task's environment/ is kept: its name and a hash of everything in there."""
    digest = hashlib.sha256()
    for path, data in sorted(folder_files(folder, "environment").items()):
        digest.update(path.encode() + b"\0" + hashlib.sha256(data).digest())
    name = re.sub(r"[^a-z0-9_.-]", "-", folder.name.lower()).strip("-._") or "task"
    return f"thundersync-task/{name}:{digest.hexdigest()[:16]}"


@dataclass(frozen=True)
class _Place:
    image: str
    workdir: str
    files: dict[str, str]
    env: dict[str, str]


def _environment(folder: Path, environment: Mapping[str, Any]) -> tuple[_Place, str | None]:
    """The place where the agent works, and why its image must be built first (None: it need not)."""
    name, image = folder.name, environment.get("docker_image")
    dockerfile = folder / "environment" / "Dockerfile"
    if image and not dockerfile.is_file():
        return _Place(image, environment.get("workdir") or WORKSPACE, {}, {}), None
    if not dockerfile.is_file():
        raise Unsupported(name, "incomplete", "neither environment/Dockerfile nor [environment].docker_image")
    try:
        copied = read_dockerfile(dockerfile)
    except NeedsBuildError as problem:
        workdir = environment.get("workdir") or last_workdir(dockerfile)
        return _Place(image or image_tag(folder), workdir, {}, {}), None if image else str(problem)
    workdir = environment.get("workdir") or copied.workdir
    prefix = WORKSPACE + "/"
    if workdir != WORKSPACE or not all(path.startswith(prefix) for path in copied.files):
        return _Place(image_tag(folder), workdir, {}, {}), f"it works in {workdir} and not in {WORKSPACE}"
    files = {}
    for path, file in copied.files.items():
        try:
            files[path.removeprefix(prefix)] = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            raise Unsupported(name, "binary", f"environment/{file.name} is no text") from None
    return _Place(image or copied.image, WORKSPACE, files, copied.env), None


def _config(folder: Path) -> dict[str, Any]:
    file = required(folder, "task.toml")
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Unsupported(folder.name, "invalid", f"task.toml: {error}") from error


def _unsupported(config: Mapping[str, Any]) -> Iterator[str]:
    environment, verifier = config.get("environment", {}), config.get("verifier", {})
    if config.get("steps"):
        yield "several steps"
    if str(environment.get("os", "linux")).lower() != "linux":
        yield f"[environment].os = {environment['os']!r}"
    for name in ("mcp_servers", "healthcheck"):
        if environment.get(name):
            yield f"[environment].{name}"
    if verifier.get("environment") or verifier.get("environment_mode") == "separate":
        yield "a verifier in an environment of its own"
    if verifier.get("collect"):
        yield "[[verifier.collect]]"


def _compose_detail(folder: Path) -> str | None:
    """Why environment/docker-compose.yaml matters; None where it only builds the one image, or closes it."""
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        file = folder / "environment" / name
        if file.is_file():
            try:
                services = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("services") or {}
            except yaml.YAMLError as error:
                raise Unsupported(folder.name, "invalid", f"environment/{name}: {error}") from error
            main = services.get("main") or {}
            closed = main.get("network_mode", "none") == "none"
            if set(services) <= {"main"} and set(main) <= {"build", "network_mode"} and closed:
                return None
            return f"environment/{name}: services {', '.join(sorted(services))}"
    return None


def _internet_detail(config: Mapping[str, Any], tests: Mapping[str, bytes]) -> str | None:
    for section in ("environment", "agent", "verifier"):
        block = config.get(section, {})
        mode = block.get("network_mode")
        if mode in ("public", "allowlist"):
            return f'[{section}].network_mode = "{mode}"'
        if mode is None and block.get("allow_internet") is True:
            return f"[{section}].allow_internet = true"
    if fetch := _FETCHES.search(tests["test.sh"].decode("utf-8", "replace")):
        return f"tests/test.sh fetches: {fetch[0].strip()[:80]}"
    return None


def _plain_env(name: str, where: str, env: Mapping[str, Any]) -> dict[str, str]:
    for key, value in env.items():
        if "${" in str(value):
            raise Unsupported(name, "unsupported", f"{where} {key} takes a variable of the host")
    return {key: str(value) for key, value in env.items()}
