"""Every test of a sandbox runs on every backend: bubblewrap must be there, Docker where an engine answers."""

import pytest

from skyrl_thundersync.config import SandboxConfig
from skyrl_thundersync.sandbox import bubblewrap, docker
from skyrl_thundersync.sandbox.pool import SandboxPool


@pytest.fixture(scope="session", params=["bubblewrap", "docker"])
def backend(request):
    if request.param == "docker" and (reason := docker.reason_unavailable()):
        pytest.skip(f"Docker: {reason}")
    if request.param == "bubblewrap" and (reason := bubblewrap.reason_unavailable()):
        pytest.fail(f"bubblewrap: {reason}")
    return request.param


@pytest.fixture
def config(backend):
    return SandboxConfig(backend=backend, command_timeout_s=5.0)


@pytest.fixture
def pool(config):
    with SandboxPool(config, "test") as pool:
        yield pool
    assert pool.open_count == 0


@pytest.fixture
def box(pool):
    return pool.create()
