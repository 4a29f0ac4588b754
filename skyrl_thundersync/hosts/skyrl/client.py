"""SkyRL's inference-client interface over rollout replicas in Ray actors (no HTTP, no router).

Unlike SkyRL's remote client every answer also carries the policy version that served it, and the version this client
reports is the last one that every replica acknowledged, not a counter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, NoReturn, TypeVar

import ray
from ray.exceptions import RayActorError
from skyrl.backends.skyrl_train.inference_servers.base import (
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
)

from skyrl_thundersync.rollout.replica import LORA_NAME, Sample

T = TypeVar("T")


class LocalEngineClient(InferenceEngineInterface):
    """Spreads requests over replicas; a session stays with the replica that holds its prefix in its cache.

    A replica that dies is done without. Its open requests go to another one, with the context and the seed that they had:
    trajectories go on from their last whole turn, under the same policy version. With the last replica the run ends.

    Args:
        replicas: actor handles of `EngineReplica`.
        tokenizer: the model's HF tokenizer, to decode answers for the environment (never to encode them again).
        model_name: the name that requests may call the model by, beside `skyrl-lora`.
        say: told of a replica that died.
    """

    def __init__(
        self, replicas: Sequence[Any], tokenizer: Any, model_name: str, say: Callable[[str], None] | None = None
    ) -> None:
        if not replicas:
            raise ValueError("a rollout client needs at least one replica")
        self.replicas = list(replicas)
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._home: dict[Hashable, int] = {}
        self._running = [0] * len(self.replicas)
        self._say = say
        self._lost: set[int] = set()
        self._version = 0

    @property
    def model_name(self) -> str:
        return self._model_name

    @property
    def weight_version(self) -> int:
        """The last policy version that every replica acknowledged."""
        return self._version

    async def ready(self) -> list[dict[str, Any]]:
        """Waits for every replica; what each says of itself (name, context limit, vocabulary size)."""
        return list(await asyncio.gather(*(replica.ready.remote() for replica in self.replicas)))

    async def generate(self, input_batch: InferenceEngineInput, model: str | None = None) -> InferenceEngineOutput:
        """One answer per prompt, in order.

        Beside SkyRL's keys the output has `policy_versions` and `replicas`, one int per answer each. `response_logprobs`
        are those of the sampled tokens, of the raw distribution; None unless the sampling parameters ask for log-probs, as
        in SkyRL.
        A `seed` in the sampling parameters goes to every prompt of the batch.

        Raises:
            ValueError: no token ids, no sampling parameters, n > 1, or an unknown model name.
            RefusedRequestError, PublishingError, EngineFailedError: from the replica.
        """
        prompts = input_batch.get("prompt_token_ids")
        sampling = input_batch.get("sampling_params")
        if prompts is None:
            raise ValueError(
                "the rollout engine takes prompt_token_ids, not prompts: token ids are never encoded again"
            )
        if sampling is None:
            raise ValueError("generate needs sampling_params; vLLM's own defaults stop after 16 tokens")
        if sampling.get("n", 1) != 1:
            raise ValueError("n > 1 in the sampling parameters; set generator.n_samples_per_prompt instead")
        if model not in (None, self._model_name, LORA_NAME):
            raise ValueError(f"unknown model {model!r}; this engine serves {self._model_name!r}")
        sessions = input_batch.get("session_ids") or [None] * len(prompts)
        if len(sessions) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(sessions)} session ids")
        salt = input_batch.get("cache_salt")
        samples = await asyncio.gather(
            *(self._sample(s, list(p), dict(sampling), salt) for s, p in zip(sessions, prompts, strict=True))
        )
        ids = [sample.ids for sample in samples]
        return {  # type: ignore[typeddict-unknown-key]
            "responses": [self._tokenizer.decode(row, skip_special_tokens=True) for row in ids],
            "response_ids": ids,
            "stop_reasons": [sample.finish_reason for sample in samples],
            "response_logprobs": None if sampling.get("logprobs") is None else [sample.logps for sample in samples],
            "policy_versions": [sample.policy_version for sample in samples],
            "replicas": [self._home.get(session, 0) for session in sessions],
        }

    async def _sample(self, session: Hashable, prompt: list[int], sampling: dict[str, Any], salt: str | None) -> Sample:
        while True:
            index = self._place(session)
            self._running[index] += 1
            try:
                sample = await self.replicas[index].generate.remote(str(session), prompt, sampling, salt)
                break
            except RayActorError as error:
                self._lose(index, error)
            finally:
                self._running[index] -= 1
        if sample.finish_reason not in ("stop", "length", "abort"):
            raise RuntimeError(f"session {session}: vLLM ended the answer with {sample.finish_reason!r}")
        return sample

    def _place(self, session: Hashable) -> int:
        """The session's replica; for a new one that with the fewest sessions (then requests)."""
        if session in self._home:
            return self._home[session]
        held = [0] * len(self.replicas)
        for index in self._home.values():
            held[index] += 1
        living = (index for index in range(len(self.replicas)) if index not in self._lost)
        best = min(living, key=lambda i: (held[i], self._running[i]))
        if session is not None:
            self._home[session] = best
        return best

    def _lose(self, index: int, error: RayActorError) -> None:
        """Do without a replica from now on. Raises `error` when it was the last one."""
        if index in self._lost:
            return
        if len(self._lost) + 1 == len(self.replicas):
            raise error
        self._lost.add(index)
        ray.kill(self.replicas[index])  # one that only cannot be reached must not come back with old weights
        self._home = {session: home for session, home in self._home.items() if home != index}
        if self._say:
            self._say(
                f"[yellow]rollout-{index} died; {len(self.replicas) - len(self._lost)} rollout replicas go on[/yellow]"
            )

    async def _of_all(self, ask: Callable[[Any], Awaitable[T]]) -> list[T]:
        """What every replica that lives answers."""
        living = [index for index in range(len(self.replicas)) if index not in self._lost]
        answers = await asyncio.gather(*(ask(self.replicas[i]) for i in living), return_exceptions=True)
        for index, answer in zip(living, answers, strict=True):
            if isinstance(answer, RayActorError):
                self._lose(index, answer)
            elif isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if not isinstance(answer, RayActorError)]

    async def finish_session(self, session_id: Hashable) -> None:
        """The trajectory is over: its place counts no more."""
        self._home.pop(session_id, None)

    async def load_weights(self, path: str, version: int, probe_ids: list[int]) -> list[dict[str, Any]]:
        """Every replica loads `path` as `version`, all at once; what each answers (see `EngineReplica.publish`)."""
        return await self._of_all(lambda replica: replica.publish.remote(path, version, probe_ids))

    async def logps(self, ids: list[int]) -> list[list[float]]:
        """Log-probs of `ids[1:]`, each given all before it, under what every replica serves now."""
        return await self._of_all(lambda replica: replica.logps.remote(ids))

    def acknowledged(self, version: int) -> None:
        """Called by `rollout.publish` once every replica has proved that it serves `version`."""
        self._version = version

    async def stats(self) -> list[dict[str, Any]]:
        return await self._of_all(lambda replica: replica.stats.remote())

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> list[bool]:
        if reset_running_requests:
            raise ValueError("the rollout engine never preempts requests: reset the cache when none runs")
        return await self._of_all(lambda replica: replica.reset_prefix_cache.remote())

    async def teardown(self) -> None:
        """Kill the replicas. Requests still running fail."""
        for replica in self.replicas:
            ray.kill(replica)

    async def get_world_size(self) -> tuple[int, int]:
        return len(self.replicas), 1

    # Replicas share no device with the learner and weights are published at an empty barrier: nothing to free or pause.
    async def sleep(self, *args: Any, **kwargs: Any) -> None: ...

    async def wake_up(self, *args: Any, **kwargs: Any) -> None: ...

    async def is_sleeping(self) -> bool:
        return False

    async def pause_generation(self) -> None: ...

    async def resume_generation(self) -> None: ...

    def get_endpoint_url(self) -> str:
        self._refuse("an HTTP endpoint")

    async def chat_completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        self._refuse("chat_completion")

    async def render_chat_completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        self._refuse("render_chat_completion")

    async def completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        self._refuse("completion")

    async def update_named_weights(self, request: Any) -> None:
        self._refuse("update_named_weights (weights are published by skyrl_thundersync.rollout.publication)")

    async def load_lora_adapter(self, lora_name: str, lora_path: str) -> dict[str, Any]:
        self._refuse("load_lora_adapter (adapters are published by skyrl_thundersync.rollout.publication)")

    @staticmethod
    def _refuse(what: str) -> NoReturn:
        raise NotImplementedError(f"the in-process rollout engine takes and gives token ids only: it has no {what}")
