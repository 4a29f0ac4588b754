"""Every test of a sandbox runs on every backend: bubblewrap must be there, Docker where an engine answers.

Tests marked `attack` make up a table, printed at the end: what was tried on which backend, and whether it held. With
THUNDERSYNC_REQUIRE_DOCKER=1 (`make test-docker`) a missing engine is a failure.
"""

import os

import pytest

from skyrl_thundersync.options.schema import SandboxConfig
from skyrl_thundersync.sandbox import bubblewrap, docker_engine
from skyrl_thundersync.sandbox.pool import SandboxPool

BACKENDS = ("docker", "bubblewrap")


@pytest.fixture(scope="session", params=["bubblewrap", "docker"])
def backend(request):
    if request.param == "docker" and (reason := docker_engine.reason_unavailable()):
        unavailable = pytest.fail if os.environ.get("THUNDERSYNC_REQUIRE_DOCKER") == "1" else pytest.skip
        unavailable(f"Docker: {reason}")
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


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if mark := item.get_closest_marker("attack"):
        # An attack on what is common to the backends stands for both.
        params = getattr(getattr(item, "callspec", None), "params", {})
        on = (params["backend"],) if "backend" in params else BACKENDS
        report.user_properties.append(("attack", (mark.args[0], on)))


def pytest_terminal_summary(terminalreporter):
    """The table of attacks, in Markdown; nothing where none was tried."""
    verdicts = {}
    for outcome, verdict in (("passed", "held"), ("skipped", "not tried"), ("failed", "BROKEN"), ("error", "BROKEN")):
        for report in terminalreporter.stats.get(outcome, []):
            for name, (attack, backends) in getattr(report, "user_properties", []):
                if name == "attack" and report.when in ("setup", "call"):
                    for backend in backends:
                        verdicts.setdefault(attack, {}).setdefault(backend, []).append(verdict)
    if not verdicts:
        return
    terminalreporter.section("attacks tried")
    terminalreporter.write_line(f"| attack | {' | '.join(BACKENDS)} |")
    terminalreporter.write_line(f"|---|{'---|' * len(BACKENDS)}")
    for attack, by_backend in sorted(verdicts.items()):
        cells = [_cell(by_backend.get(backend, [])) for backend in BACKENDS]
        terminalreporter.write_line(f"| {attack} | {' | '.join(cells)} |")


def _cell(verdicts):
    """The worst of the verdicts; how many tests held where all did."""
    for verdict in ("BROKEN", "not tried"):
        if verdict in verdicts or (verdict == "not tried" and not verdicts):
            return verdict
    return "held" if len(verdicts) == 1 else f"held ({len(verdicts)} ways)"
