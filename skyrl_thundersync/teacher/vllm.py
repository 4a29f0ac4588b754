"""A teacher replica on vLLM: turn-wise prompt log-probs, earlier turns served from the prefix cache.

Stock vLLM prefills the whole context again for each request that wants prompt log-probs, which is quadratic in the turns.
Told to read its prefix cache (`skip_reading_prefix_cache=False`) it does not, but then the positions it read from there
come back as garbage (model runner V1, on CPUs) or not at all (V2, on CUDA): they are never used, and an answer that read the
cache beyond the first scored token's predecessor is thrown away and scored again without it.
"""

from __future__ import annotations

import itertools
from typing import Any

import ray
from transformers import AutoConfig

from skyrl_thundersync.engines.thread import EngineSpec, EngineThread, best_of, build_engine, logprobs_of
from skyrl_thundersync.process.heartbeat import at, doing
from skyrl_thundersync.process.logs import redirect
from skyrl_thundersync.teacher.scores import Contexts, NeedContext, TeacherScores, TeacherSpec, check_range


class VllmReplica:
    """One teacher replica; runs as the Ray actor `VllmTeacher`. `name` is what errors call it."""

    def __init__(self, name: str, spec: TeacherSpec) -> None:
        if spec.log_path is not None:
            redirect(spec.log_path)
        self._name = name
        self._prefix_cache = spec.prefix_cache
        engine = build_engine(
            EngineSpec(
                model=spec.model,
                dtype=spec.dtype,
                max_model_len=_context_limit(spec),
                max_num_seqs=spec.max_num_seqs,
                max_num_batched_tokens=spec.max_num_batched_tokens,
                prefix_caching=spec.prefix_cache,
                kv_cache_gib=spec.cache_gib,
                block_size=spec.block_size,
                tensor_parallel_size=spec.tensor_parallel_size,
                options={"max_logprobs": spec.support, **spec.engine_options} if spec.support else spec.engine_options,
                threads=spec.threads,
                device=spec.device,
            )
        )
        self._max_len = engine.model_config.max_model_len - 1
        self._vocab_size = engine.model_config.get_vocab_size()
        self._support = min(spec.support, self._vocab_size)
        self._thread = EngineThread(engine, name)
        self._contexts = Contexts()
        self._salts: dict[str, str] = {}
        self._opened = itertools.count()
        self._rescored = 0
        at("waiting for requests")

    async def ready(self) -> dict[str, Any]:
        """Answers when the engine is up: its name, longest trajectory and vocabulary size."""
        return {"replica": self._name, "max_len": self._max_len, "vocab_size": self._vocab_size}

    async def score(self, trajectory: str, start: int, new_ids: list[int], first: int) -> TeacherScores | NeedContext:
        """log π_T of the trajectory's tokens from index `first` on, each given all tokens before it.

        Args:
            start: how many of the trajectory's ids, as held here, stay; `new_ids` follow them.
            first: index, in the whole trajectory, of the first token to score (≥ 1).

        Raises:
            ValueError: see `scores.check_range`.
            EngineFailedError: the engine's thread died.
        """
        ids = self._contexts.extend(trajectory, start, new_ids)
        if isinstance(ids, NeedContext):
            return ids
        check_range(trajectory, ids, first, self._max_len, self._vocab_size)
        # One salt a trajectory: two samples that begin alike must not read each other's scored positions from the cache.
        salt = self._salts.setdefault(trajectory, f"{trajectory}#{next(self._opened)}")
        with doing("scoring", str(trajectory)):
            answer, cached = await self._request(ids, first, salt, read_cache=self._prefix_cache)
            computed = len(ids) - cached
            if answer is None:
                self._rescored += 1
                answer, cached = await self._request(ids, first, salt, read_cache=False)
                computed += len(ids) - cached
        logps = logprobs_of(answer, ids, first, cached)
        support = best_of(answer, ids, first, self._support, cached) if self._support else None
        return TeacherScores(tuple(logps), computed, cached, support)

    async def _request(self, ids: list[int], first: int, salt: str, read_cache: bool) -> tuple[Any | None, int]:
        """(vLLM's prompt log-probs, tokens read from the cache); None for log-probs that would be garbage."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=self._support,
            detokenize=False,
            flat_logprobs=True,
            skip_reading_prefix_cache=not read_cache,
        )
        output = await self._thread.submit({"prompt_token_ids": ids, "cache_salt": salt}, params)
        cached = output.num_cached_tokens or 0
        if cached >= first:
            if not read_cache:
                raise RuntimeError(f"{self._name}: vLLM read {cached} tokens from a cache that it was told not to read")
            return None, cached
        return output.prompt_logprobs, cached

    async def close(self, trajectory: str) -> None:
        """The trajectory is over; vLLM's blocks of it are free, and go when others need them."""
        self._contexts.close(trajectory)
        self._salts.pop(trajectory, None)

    async def stats(self) -> dict[str, Any]:
        """Open trajectories, and how often an answer was thrown away and scored again."""
        return {"replica": self._name, "open": len(self._contexts), "rescored": self._rescored}

    async def shutdown(self) -> None:
        await self._thread.stop()


VllmTeacher = ray.remote(num_cpus=0, max_concurrency=4096)(VllmReplica)


def _context_limit(spec: TeacherSpec) -> int | None:
    """vLLM samples one token more than it scores: one more than asked for, where the model has a position for it.

    Where it has none, `ready` reports the shorter limit and the preflight refuses the run.
    """
    if spec.max_model_len is None:
        return None
    positions = AutoConfig.from_pretrained(spec.model).get_text_config().max_position_embeddings
    return min(spec.max_model_len + 1, positions)
