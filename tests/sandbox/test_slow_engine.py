"""Nothing survives a run whose engine answers too late, or not at all, or whose start-up breaks off anywhere."""

import contextlib
import threading
from dataclasses import replace

import docker as docker_sdk
import pytest
from slow_engine import SlowEngine

from skyrl_thundersync.options.schema import SandboxConfig
from skyrl_thundersync.sandbox import docker, docker_engine
from skyrl_thundersync.sandbox.base import SandboxError
from skyrl_thundersync.sandbox.pool import SandboxPool

CREATE, START, REMOVE = r"POST \S*/containers/create", r"POST \S*/containers/\S+/start", r"DELETE \S*/containers/"
RUN = "slow-engine"


@pytest.fixture
def engine(backend, tmp_path, monkeypatch):
    """The engine behind a slow way to it; requests are given up after five seconds."""
    if backend != "docker":
        pytest.skip("bubblewrap has no engine")
    monkeypatch.setattr(docker_engine, "REQUEST_TIMEOUT_S", 5.0)
    with SlowEngine(tmp_path / "engine.sock") as slow:
        slow.direct = docker_sdk.from_env()
        monkeypatch.setenv("DOCKER_HOST", slow.url)
        yield slow
        left = containers(slow)
        for name in left:
            slow.direct.api.remove_container(name, force=True)
        slow.direct.close()


@pytest.fixture
def pool(engine):
    return SandboxPool(SandboxConfig(backend="docker", command_timeout_s=5.0, warm=0), RUN)


def containers(engine):
    """What there is of this run, asked on the straight way."""
    found = engine.direct.api.containers(all=True, filters={"label": f"{docker_engine.LABEL}run={RUN}"})
    return {container["Names"][0] if container["Names"] else container["Id"]: container["State"] for container in found}


@pytest.mark.attack("an engine that answers too late")
def test_containers_whose_creation_was_not_answered_are_removed(engine, pool):
    engine.lose_answers(CREATE, 3)
    for _ in range(3):
        with pytest.raises(SandboxError, match=r"creating a container .* timed out"):
            pool.create()
        assert not containers(engine), "removed by the name that was chosen before"
    assert pool.create().run("echo works", 5.0).output == "works\n"
    pool.close_all()
    assert not containers(engine)


@pytest.mark.attack("an engine that answers too late")
def test_a_container_that_appears_after_it_was_given_up_is_removed(engine, pool):
    engine.hold_requests(CREATE, 1, 8.0)
    with pytest.raises(SandboxError, match="creating a container"):
        pool.create()
    assert not containers(engine), "it is not there yet"
    pool.close_all()
    assert engine.done.wait(30) and not containers(engine), "the run's end waited for it"


@pytest.mark.attack("an engine that answers too late")
def test_a_running_container_whose_first_removal_does_not_arrive_is_removed_with_the_next_start(engine, pool):
    engine.lose_answers(START, 1)
    engine.hold_requests(REMOVE, 1, 3600.0)
    with pytest.raises(SandboxError, match="starting a container"):
        pool.create()
    assert list(containers(engine).values()) == ["running"]
    box = pool.create()
    assert len(containers(engine)) == 1, "the first is gone, the second lives"
    box.close()
    pool.close_all()
    assert not containers(engine)


@pytest.mark.attack("an engine that answers too late")
def test_what_could_not_be_removed_is_removed_when_the_pool_closes(engine, pool):
    boxes = [pool.create() for _ in range(3)]
    engine.hold_requests(REMOVE, 1, 3600.0)
    boxes[0].close()
    assert len(containers(engine)) == 3, "an unanswered removal ends no run"
    pool.close_all()
    assert not containers(engine)


def test_a_silent_engine_is_not_asked_again_for_each_sandbox_at_the_end(engine, pool, monkeypatch):
    monkeypatch.setattr(docker_engine, "SETTLE_S", 1.0)
    boxes = [pool.create() for _ in range(5)]
    engine.hold_requests(REMOVE, 1000, 3600.0)
    asked = len(engine.seen)
    with pytest.raises(SandboxError, match=r"has not said that these containers are gone: thundersync-.*docker rm -f"):
        pool.close_all()
    assert sum(line.startswith("DELETE") for line in engine.seen[asked:]) <= 3, "not once for each of the five"
    assert len(containers(engine)) == len(boxes)


class Unforeseen(BaseException):
    """Neither the engine's error nor ours."""


@pytest.mark.parametrize("where", ["_new_shell", "_host_config"])
@pytest.mark.parametrize("error", [KeyError("Id"), KeyboardInterrupt(), Unforeseen()], ids=repr)
def test_whatever_breaks_a_start_off_leaves_no_container(engine, pool, monkeypatch, where, error):
    def fail(*_args, **_options):
        raise error

    with monkeypatch.context() as broken, pytest.raises(type(error)):
        broken.setattr(docker.DockerSandbox, where, fail)
        pool.create()
    assert not containers(engine)
    pool.close_all()


def test_a_start_under_way_in_another_thread_leaves_nothing_when_the_pool_closes(engine, pool):
    engine.hold_requests(CREATE, 1, 1.5)
    failed = []

    def start():
        with pytest.raises(SandboxError) as caught:
            pool.create()
        failed.append(caught.value)

    thread = threading.Thread(target=start)
    thread.start()
    while not any("create" in line for line in engine.seen):
        thread.join(0.02)
    pool.close_all()
    assert not containers(engine)
    thread.join(30)
    assert not thread.is_alive() and failed and not containers(engine)


def test_an_interrupt_while_one_sandbox_closes_leaves_none_of_the_others(engine, pool):
    boxes = [pool.create() for _ in range(3)]
    forget = boxes[1].on_close

    def interrupted():
        forget()
        raise KeyboardInterrupt

    boxes[1].on_close = interrupted
    with pytest.raises(KeyboardInterrupt):
        pool.close_all()
    assert not containers(engine)


def test_one_started_ahead_that_is_not_answered_is_removed(engine, pool):
    pool.close_all()
    engine.lose_answers(CREATE, 1)
    with SandboxPool(replace(SandboxConfig(backend="docker"), warm=2), RUN) as warm:
        warm.expect()
        with contextlib.suppress(SandboxError):
            warm.create()
    assert any("create" in line for line in engine.seen)
    assert not containers(engine)
