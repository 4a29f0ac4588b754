"""A teacher replica on Transformers: each trajectory's K/V persists, so each token goes through the model once.

Unlike a generation loop the cache ends one token early: a token is fed only when something follows it, so the predictor of
a turn's first token is always among the inputs. Logits exist for the scored positions only, never for the context.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import ray

from skyrl_thundersync.process.heartbeat import at, doing
from skyrl_thundersync.process.logs import redirect
from skyrl_thundersync.stream.sources import Support
from skyrl_thundersync.teacher.scores import Contexts, NeedContext, TeacherScores, TeacherSpec, check_range

if TYPE_CHECKING:
    from transformers import DynamicCache


class _Past:
    """The K/V of one trajectory and the ids it was computed from."""

    def __init__(self, cache: DynamicCache) -> None:
        self.cache = cache
        self.ids: list[int] = []
        self.bytes = 0  # as of the last `weigh`

    def weigh(self) -> None:
        states = (state for layer in self.cache.layers for state in vars(layer).values())
        tensors = (t for state in states for t in (state if isinstance(state, list) else [state]))
        self.bytes = sum(t.numel() * t.element_size() for t in tensors if hasattr(t, "element_size"))


class TransformersReplica:
    """One teacher replica; runs as the Ray actor `TransformersTeacher`. `name` is what errors call it.

    Requests run one after the other, in order of arrival.
    """

    def __init__(self, name: str, spec: TeacherSpec) -> None:
        if spec.log_path is not None:
            redirect(spec.log_path)
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(spec.threads)
        self._name = name
        self._model = (
            AutoModelForCausalLM.from_pretrained(spec.model, dtype=getattr(torch, spec.dtype))
            .to(spec.device)
            .eval()
            .requires_grad_(False)
        )
        config = self._model.config.get_text_config()
        self._vocab_size = config.vocab_size
        self._max_len = spec.max_model_len or config.max_position_embeddings
        self._chunk = spec.max_num_batched_tokens
        self._support = min(spec.support, self._vocab_size)
        self._budget = int(spec.cache_gib * 2**30)
        self._contexts = Contexts()
        self._pasts: OrderedDict[str, _Past] = OrderedDict()  # least recently used first; the worker thread's own
        self._evicted = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=name)
        at("waiting for requests")

    async def ready(self) -> dict[str, Any]:
        """Answers when the model is loaded: its name, longest trajectory and vocabulary size."""
        return {"replica": self._name, "max_len": self._max_len, "vocab_size": self._vocab_size}

    async def score(self, trajectory: str, start: int, new_ids: list[int], first: int) -> TeacherScores | NeedContext:
        """log π_T of the trajectory's tokens from index `first` on; arguments and errors as `VllmReplica.score`."""
        ids = self._contexts.extend(trajectory, start, new_ids)
        if isinstance(ids, NeedContext):
            return ids
        check_range(trajectory, ids, first, self._max_len, self._vocab_size)
        with doing("scoring", str(trajectory)):
            return await self._run(self._score, trajectory, ids, first)

    async def close(self, trajectory: str) -> None:
        """The trajectory is over: free its K/V."""
        self._contexts.close(trajectory)
        await self._run(self._pasts.pop, trajectory, None)

    async def stats(self) -> dict[str, Any]:
        """Open trajectories, bytes of K/V held, and how often a trajectory's K/V was dropped to stay in the budget."""
        held = await self._run(lambda: sum(past.bytes for past in self._pasts.values()))
        return {"replica": self._name, "open": len(self._contexts), "cache_bytes": held, "evicted": self._evicted}

    async def shutdown(self) -> None:
        self._worker.shutdown()

    async def _run(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *args)

    def _score(self, trajectory: str, ids: list[int], first: int) -> TeacherScores:
        import torch

        past = self._pasts.pop(trajectory, None) or self._new_past()
        past = self._cropped(past, ids[: first - 1])
        cached = len(past.ids)
        inputs = ids[cached:-1]
        logps: list[float] = []
        best: list[torch.return_types.topk] = []
        with torch.inference_mode():
            for begin in range(0, len(inputs), self._chunk):
                chunk = inputs[begin : begin + self._chunk]
                # Row r of this chunk predicts token cached + begin + r + 1: rows before that of `first` need no logits.
                skip = min(len(chunk), max(0, first - 1 - cached - begin))
                rows = torch.arange(skip, len(chunk), device=self._model.device)
                logits = self._model(
                    torch.tensor([chunk], device=self._model.device),
                    past_key_values=past.cache,
                    use_cache=True,
                    logits_to_keep=rows,
                ).logits[0]
                at = cached + begin + skip + 1
                targets = torch.tensor(ids[at : at + len(rows)], device=self._model.device)
                logps_rV = torch.log_softmax(logits.float(), -1)
                logps += logps_rV.gather(-1, targets[:, None])[:, 0].tolist()
                if self._support:
                    best.append(logps_rV.topk(self._support, -1))
        past.ids = ids[:-1]
        self._keep(trajectory, past)
        support = None
        if best:
            values, ids = (torch.cat(parts).cpu() for parts in zip(*best, strict=True))
            support = Support(ids.int().numpy(), values.numpy())
        return TeacherScores(tuple(logps), len(inputs), cached, support)

    def _new_past(self) -> _Past:
        from transformers import DynamicCache

        return _Past(DynamicCache(config=self._model.config))

    def _cropped(self, past: _Past, prefix: list[int]) -> _Past:
        """`past` cut down to what it shares with `prefix`; a new one where the architecture's state cannot be cut."""
        shared = min(len(past.ids), len(prefix))
        if past.ids[:shared] != prefix[:shared]:
            shared = next(i for i in range(shared) if past.ids[i] != prefix[i])
        surplus = len(past.ids) - shared
        if surplus == 0:
            return past
        from transformers.cache_utils import DynamicLayer

        if shared == 0 or any(type(layer) is not DynamicLayer for layer in past.cache.layers):
            return self._new_past()  # recurrent and sliding-window states forget: nothing to go back to
        past.cache.crop(-surplus)
        past.ids = past.ids[:shared]
        return past

    def _keep(self, trajectory: str, past: _Past) -> None:
        """Keep `past` as the most recently used, and drop others, oldest first, until the budget holds."""
        past.weigh()
        self._pasts[trajectory] = past
        total = sum(kept.bytes for kept in self._pasts.values())
        for name in list(self._pasts):
            if total <= self._budget:
                break
            total -= self._pasts.pop(name).bytes  # recomputed from its ids if it is asked for again
            self._evicted += 1


TransformersTeacher = ray.remote(num_cpus=0, max_concurrency=4096)(TransformersReplica)
