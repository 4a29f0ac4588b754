"""A rollout replica: vLLM in one Ray actor, token ids in and out, every answer from exactly one policy version.

Unlike an inference server it never mixes versions: a publication is refused while any request is in the engine and a
request is refused while a publication runs, so the version captured at admission served the answer from end to end. The
acknowledgement is evidence, not a counter: the bits of the weights that the kernels read, and log-probs of a probe.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from skyrl_thundersync.engines.thread import (
    EngineSpec,
    EngineThread,
    RefusedRequestError,
    build_engine,
    kv_cache_gib,
    logprobs_of,
)
from skyrl_thundersync.engines.weight_bits import added
from skyrl_thundersync.process.heartbeat import at, doing
from skyrl_thundersync.process.logs import redirect

if TYPE_CHECKING:
    from skyrl_thundersync.hosts.skyrl.config import TrainConfig

LORA_NAME = "skyrl-lora"  # the name SkyRL's generator asks for


class PublishRefusedError(RuntimeError):
    """Weights were to be published while requests were in the engine."""


class PublishingError(RuntimeError):
    """A request arrived while weights were being published."""


@dataclass(frozen=True)
class Sample:
    """One sampled answer of n tokens.

    Attributes:
        ids: n sampled token ids, the end-of-sequence token included where it was sampled.
        logps: n log-probabilities (natural log) of those tokens under the raw distribution: temperature 1, no top-p.
        finish_reason: "stop", "length" or "abort".
        cached_tokens: prompt tokens read from the prefix cache.
        policy_version: version that was served from admission to the last token.
    """

    ids: list[int]
    logps: list[float]
    finish_reason: str
    cached_tokens: int
    policy_version: int


class Replica:
    """One replica; runs as the Ray actor `EngineReplica`. `name` is what errors and acknowledgements call it."""

    def __init__(self, name: str, spec: EngineSpec) -> None:
        if spec.log_path is not None:
            redirect(spec.log_path)
        self._name, self._spec = name, spec
        engine = build_engine(spec)
        self._max_model_len = engine.model_config.max_model_len
        self._vocab_size = engine.model_config.get_vocab_size()
        self._thread = EngineThread(engine, name)
        self._version = 0
        self._lora: Any = None
        self._publishing: int | None = None
        self._running = 0
        self._prompt_tokens = self._cached_tokens = self._sampled_tokens = self._served = 0
        at("waiting for requests")

    async def ready(self) -> dict[str, Any]:
        """Answers when the engine is up: its name, context limit and vocabulary size."""
        return {"replica": self._name, "max_model_len": self._max_model_len, "vocab_size": self._vocab_size}

    async def generate(
        self, request: str, prompt_ids: list[int], sampling: dict[str, Any], cache_salt: str | None = None
    ) -> Sample:
        """Sample one answer.

        Args:
            request: what errors call this request (its session).
            prompt_ids: the whole context, at least one token.
            sampling: vLLM `SamplingParams` fields; None means vLLM's default. `seed` makes the answer repeatable.
            cache_salt: K/V blocks are shared only between requests with the same salt.

        Raises:
            PublishingError: weights are being published.
            RefusedRequestError: the prompt is empty, too long or has ids outside the vocabulary, or vLLM refuses it.
            EngineFailedError: the engine's thread died.
        """
        if self._publishing is not None:
            raise PublishingError(
                f"{self._name}: request {request} came while version {self._publishing} was being published; "
                "sample only after every replica acknowledged"
            )
        self._check_prompt(request, prompt_ids)
        params = _sampling_params(sampling)
        prompt: dict[str, Any] = {"prompt_token_ids": list(prompt_ids)}
        if cache_salt is not None:
            prompt["cache_salt"] = cache_salt
        version = self._version
        self._running += 1
        try:
            with doing("sampling", f"for {request}"):
                output = await self._thread.submit(prompt, params, self._lora)
        finally:
            self._running -= 1
        answer = output.outputs[0]
        ids = list(answer.token_ids)
        self._served += 1
        self._prompt_tokens += len(prompt_ids)
        self._cached_tokens += output.num_cached_tokens or 0
        self._sampled_tokens += len(ids)
        return Sample(
            ids, logprobs_of(answer.logprobs, ids, 0), answer.finish_reason, output.num_cached_tokens or 0, version
        )

    async def publish(self, path: str, version: int, probe_ids: list[int]) -> dict[str, Any]:
        """Serve the weights (or, with `lora_rank`, the PEFT adapter) in folder `path` as policy `version`.

        Returns what `publication.publish` checks:
            replica, version, prefix_cache_reset (True).
            probe_logps: log-probs of `probe_ids[1:]`, each given all earlier probe tokens, computed through the engine after
                the reload, without its cache.
            bits: of the weights (the adapter) that its kernels read (engines/weight_bits.py). empty: modules of its own that
                took nothing of the adapter.

        Raises:
            PublishRefusedError: requests are running or waiting, or another publication is.
            FileNotFoundError: no weights in `path`.
            EngineFailedError: loading failed half-way; the replica serves nothing any more.
        """
        if self._publishing is not None or self._running:
            what = (
                f"{self._running} requests run" if self._running else f"version {self._publishing} is being published"
            )
            raise PublishRefusedError(f"{self._name}: version {version} cannot be published while {what}")
        if self._spec.published is not None:
            path = str(Path(self._spec.published) / Path(path).name)
        check_folder(path, adapter=bool(self._spec.lora_rank))
        self._check_prompt("probe", probe_ids)
        self._publishing = version
        with doing("loading", f"version {version}"):
            return await self._publish(path, version, probe_ids)

    async def _publish(self, path: str, version: int, probe_ids: list[int]) -> dict[str, Any]:
        try:
            if self._spec.lora_rank:
                from vllm.lora.request import LoRARequest

                self._lora = LoRARequest(LORA_NAME, version + 1, path)  # ids count from 1
                await self._thread.call(lambda engine: _swap_adapter(engine, self._lora))
            else:
                await self._thread.call(lambda engine: engine.collective_rpc("load_published", args=(path,)))
            reset = await self._thread.call(lambda engine: engine.reset_prefix_cache())
            if reset is not True:
                raise RuntimeError(f"{self._name}: vLLM did not reset its prefix cache before version {version}")
            self._version = version
            probe_logps = await self._score(probe_ids)
            held = await self._thread.call(self._held)
        finally:
            self._publishing = None
        return {
            "replica": self._name,
            "version": self._version,
            "probe_logps": probe_logps,
            "prefix_cache_reset": reset,
            **held,
        }

    def _held(self, engine: Any) -> dict[str, Any]:
        if self._lora is not None:
            return of_workers(engine.collective_rpc("held_adapter", args=(self._lora.lora_int_id,)))
        return of_workers([{"bits": bits, "empty": []} for bits in engine.collective_rpc("held_weights")])

    async def logps(self, ids: list[int]) -> list[float]:
        """Log-probs of `ids[1:]`, each given all before it, under what is served now; not from the cache.

        Raises as `generate`.
        """
        self._check_prompt("probe", ids)
        return await self._score(ids)

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached K/V; False when requests hold some of it."""
        return await self._thread.call(lambda engine: engine.reset_prefix_cache())

    async def stats(self) -> dict[str, Any]:
        """Since the start: requests served, steps, prompt, cached and sampled tokens. Now: version, running requests."""
        return {
            "replica": self._name,
            "version": self._version,
            "running": self._running,
            "steps": self._thread.steps,
            "served": self._served,
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self._cached_tokens,
            "sampled_tokens": self._sampled_tokens,
        }

    async def shutdown(self) -> None:
        """Stop stepping. Requests still in the engine fail."""
        await self._thread.stop()

    def _check_prompt(self, request: str, ids: list[int]) -> None:
        if not ids:
            raise RefusedRequestError(f"{self._name}: request {request} has an empty prompt")
        if len(ids) >= self._max_model_len:
            raise RefusedRequestError(
                f"{self._name}: request {request} has {len(ids)} prompt tokens and the context limit is "
                f"{self._max_model_len}: nothing can be sampled. Stop the trajectory before this request "
                "(generator.max_input_length), or raise the engine's max_model_len"
            )
        if not 0 <= min(ids) <= max(ids) < self._vocab_size:
            raise RefusedRequestError(
                f"{self._name}: request {request} has token ids from {min(ids)} to {max(ids)}; the vocabulary has "
                f"{self._vocab_size}"
            )

    async def _score(self, ids: list[int]) -> list[float]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, skip_reading_prefix_cache=True)
        output = await self._thread.submit({"prompt_token_ids": list(ids)}, params, self._lora)
        return logprobs_of(output.prompt_logprobs, list(ids), 1)


def _sampling_params(sampling: dict[str, Any]) -> Any:
    """vLLM's parameters: always the sampled tokens' own log-probs, and text only where a stop string needs it."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError

    fields = {key: value for key, value in sampling.items() if value is not None}
    fields.update(logprobs=0, detokenize=bool(fields.get("stop")))
    try:
        return SamplingParams(**fields)
    except (TypeError, ValueError, VLLMClientError) as error:
        raise RefusedRequestError(f"vLLM does not take the sampling parameters {fields}: {error}") from error


def check_folder(path: str, adapter: bool) -> None:
    """Raises FileNotFoundError when `path` holds no weights (no adapter) to publish."""
    wanted = "adapter_model.safetensors" if adapter else "*.safetensors"
    if not any(Path(path).glob(wanted)):
        raise FileNotFoundError(f"nothing to publish: no {wanted} in {path}")


def of_workers(answers: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What the workers of one engine hold together, out of what each answered ("bits" and "empty")."""
    answers = list(answers)
    bits = added((group, tuple(pair)) for answer in answers for group, pair in answer["bits"].items())
    empty = set.intersection(*(set(answer["empty"]) for answer in answers))
    return {"bits": bits, "empty": sorted(empty)}


def _swap_adapter(engine: Any, lora: Any) -> None:
    engine.collective_rpc("take_text_names")
    for old in engine.list_loras():
        engine.remove_lora(old)
    engine.add_lora(lora)
    if engine.list_loras() != {lora.lora_int_id}:
        raise RuntimeError(
            f"vLLM holds the adapters {engine.list_loras()} and not {lora.lora_int_id} of {lora.lora_path}"
        )


# An async actor: its methods interleave on one loop, all blocking work is the engine thread's.
EngineReplica = ray.remote(num_cpus=0, max_concurrency=4096)(Replica)


def engine_spec(cfg: TrainConfig, longest: int, lora_rank: int, device: str) -> EngineSpec:
    """A replica of the policy as a configuration asks for it. `longest`: context limit in tokens, prompt and answers."""
    engine = cfg.generator.inference_engine
    return EngineSpec(
        model=cfg.trainer.policy.model.path,
        dtype=engine.model_dtype,
        max_model_len=longest,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        kv_cache_gib=kv_cache_gib(cfg),
        prefix_caching=engine.enable_prefix_caching,
        chunked_prefill=engine.enable_chunked_prefill,
        seed=cfg.trainer.seed,
        lora_rank=lora_rank,
        tensor_parallel_size=engine.tensor_parallel_size,
        device=device,
    )


def start_replicas(spec: EngineSpec, count: int, log_dir: str | Path | None = None) -> list[Any]:
    """Start `count` replicas named rollout-0 …; returns their actor handles. Await `ready` on each."""
    return [start_replica(spec, index, log_dir, {}) for index in range(count)]


def start_replica(spec: EngineSpec, index: int, log_dir: str | Path | None, placed: dict[str, Any]) -> Any:
    """Start the replica rollout-`index`. `placed`: Ray's options for where."""
    name = f"rollout-{index}"
    log = None if log_dir is None else Path(log_dir) / f"{name}.log"
    options: dict[str, Any] = {"runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(spec.threads)}}}
    if spec.device == "cuda":
        options["num_gpus"] = spec.tensor_parallel_size
    return EngineReplica.options(**options, **placed).remote(name, spec.with_log(log))
