"""What this plugin relies on in Ray and Ray does not promise (docs/seams.md)."""

import os
import signal
import time

import pytest
import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError


@ray.remote(num_cpus=0)
class Actor:
    def pid(self) -> int:
        return os.getpid()

    def fail(self) -> None:
        raise KeyError("what the actor raised")

    def sleep(self) -> None:
        time.sleep(60)

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"SEAM": "job"}})
    yield
    ray.shutdown()


def test_an_actors_own_error_is_the_cause_of_what_ray_raises(cluster):
    actor = Actor.remote()
    with pytest.raises(RayTaskError) as raised:
        ray.get(actor.fail.remote())
    assert isinstance(raised.value.cause, KeyError)
    assert f"(pid={ray.get(actor.pid.remote())}" in str(raised.value)


def test_a_dead_actors_calls_fail_with_its_death(cluster):
    actor = Actor.remote()
    pid = ray.get(actor.pid.remote())
    call = actor.sleep.remote()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RayActorError) as raised:
        ray.get(call, timeout=60)
    assert isinstance(raised.value, ActorDiedError)


def test_an_actors_environment_adds_to_the_jobs(cluster):
    actor = Actor.options(runtime_env={"env_vars": {"OWN": "actor"}}).remote()
    assert ray.get([actor.variable.remote("SEAM"), actor.variable.remote("OWN")]) == ["job", "actor"]


def test_an_actor_without_cpus_takes_none(cluster):
    before = ray.available_resources().get("CPU")
    ray.get(Actor.remote().pid.remote())
    assert ray.available_resources().get("CPU") == before
