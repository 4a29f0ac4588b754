"""Task sets in the public schemas, made small; the sandboxes are real."""

from pathlib import Path

import pytest

from skyrl_thundersync.options.schema import SandboxConfig
from skyrl_thundersync.sandbox import bubblewrap, docker_engine
from skyrl_thundersync.sandbox.pool import SandboxPool

MINI = Path(__file__).parents[2] / "examples" / "terminal_bench" / "mini"


@pytest.fixture(scope="session", params=["bubblewrap", "docker"])
def backend_pool(request):
    """A pool of each backend: bubblewrap must be there, Docker where an engine answers."""
    if request.param == "docker" and (reason := docker_engine.reason_unavailable()):
        pytest.skip(f"Docker: {reason}")
    if request.param == "bubblewrap" and (reason := bubblewrap.reason_unavailable()):
        pytest.fail(f"bubblewrap: {reason}")
    config = SandboxConfig(backend=request.param, command_timeout_s=30.0)
    with SandboxPool(config, "test") as pool:
        yield pool


@pytest.fixture
def sandboxes(backend_pool):
    """Nothing may be left open."""
    yield backend_pool
    assert backend_pool.open_count == 0


TASK_TOML = '[environment]\nnetwork_mode = "no-network"\n'
TEST_SH = """#!/bin/bash
cd /workspace
[ "$(cat ans)" = yes ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
"""


@pytest.fixture
def make_task(tmp_path):
    """Write a Harbor task folder; keyword arguments replace files (None: leave out)."""

    def make(name="task", root="tasks", **changes):
        files = {
            "task.toml": TASK_TOML,
            "instruction.md": f"Write yes to ans ({name}).\n",
            "environment/Dockerfile": "FROM local/bookworm-py:1\nWORKDIR /workspace\n",
            "tests/test.sh": TEST_SH,
            "solution/solve.sh": "#!/bin/bash\necho yes >/workspace/ans\n",
        }
        folder = tmp_path / root / name
        for path, content in (files | changes).items():
            if content is None:
                continue
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return folder

    return make
