"""Real engines on tiny models, started once for all serving tests and torn down with them."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 lets anything else on the machine starve the engines

import ray  # noqa: E402
from models import byte_tokenizer, save, tiny_qwen3  # noqa: E402


@dataclass
class Checkpoint:
    """A tiny model in this process and the folder it was saved to."""

    model: Any
    folder: str


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, Checkpoint]:
    """Tied and untied students in two versions each, and one teacher."""
    made = {}
    for name, seed, tied in (("tied0", 0, True), ("tied1", 1, True), ("untied0", 2, False), ("untied1", 3, False)):
        model = tiny_qwen3(seed, tied)
        made[name] = Checkpoint(model, save(model, tmp_path_factory.mktemp(name)))
    return made


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    own = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    paths = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parent.parent), *own])
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    yield tmp_path_factory.mktemp("logs")
    ray.shutdown()


@pytest.fixture(scope="session")
def spec(checkpoints):
    from skyrl_thundersync.rollout.replica import EngineSpec

    return EngineSpec(model=checkpoints["tied0"].folder, dtype="float32", max_model_len=1024, kv_cache_gib=0.125)


@pytest.fixture(scope="session")
def host(cluster):
    from host import Host

    return Host.options(runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}}).remote()


@pytest.fixture(scope="session")
def replicas(cluster, spec, host):
    """Two rollout actors serving `tied0`; tests that publish put it back."""
    from skyrl_thundersync.rollout.replica import start_replicas

    actors = start_replicas(spec, 2, cluster)
    ray.get([actor.ready.remote() for actor in actors])
    return actors
