"""Publishing to SkyRL's own inference servers: the route for GPUs.

Not yet run on a GPU; checked on the CPU build of the same servers. The learner writes a checkpoint (or adapter) folder that
every server can read, and the servers load it through vLLM's own routes: no weight-transfer group to set up, at the price of
one write and one read of the weights an update. SkyRL's own client counts versions; here each server is asked what it
serves, and proves it by the bits that its workers hold and the log-probs of the probe, like any other replica.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.backends.utils import convert_vllm_prompt_logprobs

from skyrl_thundersync.rollout.replica import LORA_NAME, check_folder, of_workers

EXTENSION = "skyrl_thundersync.hosts.skyrl.server_worker.ServerWorker"
"""What the servers' workers must be extended by. Importing it here would patch vLLM in this process."""


class ServerError(RuntimeError):
    """An inference server answered a control request with an error."""


class ServerPublisher:
    """`rollout.publish.Publishable` over a `RemoteInferenceClient` whose servers run in vLLM's development mode.

    Args:
        client: SkyRL's client; its own weight version, which salts the prefix cache, advances with each publication.
        lora: adapters are published under the name `skyrl-lora`, not whole checkpoints.
        timeout_s: for each request to a server; loading weights is one of them.
    """

    def __init__(self, client: RemoteInferenceClient, lora: bool, timeout_s: float = 1800.0) -> None:
        self.client = client
        self._lora = lora
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._version = 0

    @property
    def weight_version(self) -> int:
        """The last policy version that every server acknowledged."""
        return self._version

    async def load_weights(self, path: str, version: int, probe_ids: list[int]) -> list[dict[str, Any]]:
        """Every server loads `path` as `version`, all at once; what each then proves (as `EngineReplica.publish`).

        A server first finishes what it is running and holds back what comes meanwhile, so no request sees two versions.

        Raises:
            FileNotFoundError: nothing to publish in `path`.
            ServerError: names the server, the route and what it said.
        """
        check_folder(path, adapter=self._lora)
        async with aiohttp.ClientSession(timeout=self._timeout) as http:
            return list(
                await asyncio.gather(*(self._publish(http, url, path, version, probe_ids) for url in self._urls()))
            )

    async def served_version(self) -> int:
        """The version that every server says it serves. Raises ServerError where they differ."""
        async with aiohttp.ClientSession(timeout=self._timeout) as http:
            answers = await asyncio.gather(*(_call(http, "GET", url, "/weight_info") for url in self._urls()))
        served = {url: answer["weight_version"] for url, answer in zip(self._urls(), answers, strict=True)}
        if len(set(served.values())) > 1:
            raise ServerError(f"the servers serve different versions: {served}")
        return int(answers[0]["weight_version"])

    def acknowledged(self, version: int) -> None:
        """Called by `rollout.publish` once every server has proved that it serves `version`."""
        self._version = version
        while self.client.weight_version < version:
            self.client.increment_weight_version()

    def _urls(self) -> list[str]:
        return list(self.client.server_urls)

    async def _publish(
        self, http: aiohttp.ClientSession, url: str, path: str, version: int, probe_ids: list[int]
    ) -> dict[str, Any]:
        await _call(http, "POST", url, "/pause", params={"mode": "wait"})
        if self._lora:
            await _workers(http, url, "take_text_names")
            await _call(
                http, "POST", url, "/skyrl/v1/load_lora_adapter", json={"lora_name": LORA_NAME, "lora_path": path}
            )
        else:
            await _workers(http, url, "load_published", path)
        reset = await _call(http, "POST", url, "/reset_prefix_cache", json={})
        await _call(http, "POST", url, "/update_weight_version", json={"new_version": str(version)})
        await _call(http, "POST", url, "/resume")
        probe = {
            "model": LORA_NAME if self._lora else self.client.model_name,
            "token_ids": probe_ids,
            "sampling_params": {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0},
        }
        answer = await _call(http, "POST", url, "/inference/v1/generate", json=probe)
        logps, _ = convert_vllm_prompt_logprobs(probe_ids, answer["prompt_logprobs"])
        if self._lora:
            held = await _workers(http, url, "held_adapter")
        else:
            held = [{"bits": bits, "empty": []} for bits in await _workers(http, url, "held_weights")]
        served = await _call(http, "GET", url, "/weight_info")
        return {
            **of_workers(held),
            "replica": url,
            "version": int(served["weight_version"]),
            "probe_logps": logps[1:],
            "prefix_cache_reset": reset.get("success"),  # vLLM's own route says; SkyRL's of the same path does not
        }


async def _workers(http: aiohttp.ClientSession, url: str, method: str, *args: Any) -> list[Any]:
    """What each worker of a server answers to a method of `ServerWorker`."""
    return (await _call(http, "POST", url, "/collective_rpc", json={"method": method, "args": args}))["results"]


async def _call(http: aiohttp.ClientSession, method: str, url: str, route: str, **request: Any) -> Any:
    async with http.request(method, url + route, **request) as response:
        if response.status >= 400:
            raise ServerError(f"{url}{route} answered {response.status}: {(await response.text())[:2000]}")
        if "json" in response.content_type:
            return await response.json()
        return await response.text()
