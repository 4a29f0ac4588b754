"""Several vLLM engines in one process, one used at a time: importing vLLM takes longer than all these tests."""

import importlib

import ray

KINDS = {
    "rollout": ("skyrl_thundersync.rollout.replica", "Replica"),
    "vllm teacher": ("skyrl_thundersync.teacher.vllm", "VllmReplica"),
    "transformers teacher": ("skyrl_thundersync.teacher.transformers", "TransformersReplica"),
}


@ray.remote(num_cpus=0, max_concurrency=256)
class Host:
    """Builds replicas as their Ray actors would and passes calls on to them."""

    def __init__(self):
        self._replicas = {}

    async def create(self, name, kind, spec):
        module, cls = KINDS[kind]
        self._replicas[name] = getattr(importlib.import_module(module), cls)(name, spec)

    async def call(self, name, method, *args):
        return await getattr(self._replicas[name], method)(*args)

    async def on_thread(self, name, function):
        return await self._replicas[name]._thread.call(function)


class _Method:
    def __init__(self, host, name, method):
        self._bound = (host, name, method)

    def remote(self, *args):
        host, name, method = self._bound
        return host.call.remote(name, method, *args)


class Hosted:
    """Looks like the actor handle of one replica in a host."""

    def __init__(self, host, name, kind, spec):
        self.host, self.name = host, name
        self._created = host.create.remote(name, kind, spec)

    def wait(self):
        ray.get(self._created)
        return self

    def __getattr__(self, method):
        return _Method(self.host, self.name, method)
