"""What a teacher replica is built from, what it is asked and what it answers, whichever backend computes it.

A turn's whole context is never sent twice: the replica keeps each trajectory's token ids, a request carries the new ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_thundersync.stream.sources import Support


@dataclass(frozen=True)
class TeacherSpec:
    """One teacher replica.

    Attributes:
        model: folder (or hub name) of an HF checkpoint with its tokenizer.
        backend: "vllm" or "transformers".
        dtype: "bfloat16" or "float32"; log-softmax is FP32 either way.
        max_model_len: longest trajectory in tokens; None takes the model's own.
        prefix_cache: vLLM only. False scores each turn over its whole context again: quadratic in the number of turns.
        cache_gib: K/V kept between turns, per replica (on CUDA with vLLM, vLLM's usual share of the device instead).
        block_size: vLLM on CPU only: tokens a K/V block holds; a turn recomputes half a block on average.
        max_num_seqs, max_num_batched_tokens: vLLM's limits of one step. Transformers runs chunks of the latter.
        tensor_parallel_size: vLLM only: devices that the replica is split over.
        engine_options: vLLM only: further arguments of its engine.
        support: how many of its most probable tokens it answers at each position; 0: none.
        threads: OpenMP threads (CPU only).
        device: "cpu" or "cuda".
        log_path: file for the process's output; None leaves it on the terminal.
    """

    model: str
    backend: str = "vllm"
    dtype: str = "bfloat16"
    max_model_len: int | None = None
    prefix_cache: bool = True
    cache_gib: float = 1.0
    block_size: int = 32
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    tensor_parallel_size: int = 1
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    support: int = 0
    threads: int = 1
    device: str = "cpu"
    log_path: str | None = None


@dataclass(frozen=True)
class TeacherScores:
    """log π_T (natural log, temperature 1) of the trajectory's tokens from the request's `first` on.

    `computed_tokens` went through the model for this answer (a rescoring included), `cached_tokens` did not. `support`: at
    the same positions, as `stream.sources.Support`, where the spec asks for it.
    """

    logps: tuple[float, ...]
    computed_tokens: int
    cached_tokens: int
    support: Support | None = None


@dataclass(frozen=True)
class NeedContext:
    """The replica does not hold the first `start` ids of this trajectory; send it whole."""

    held: int


class Contexts:
    """The token ids of each open trajectory, as a replica holds them."""

    def __init__(self) -> None:
        self._ids: dict[str, list[int]] = {}

    def extend(self, trajectory: str, start: int, new_ids: list[int]) -> list[int] | NeedContext:
        """The trajectory's ids become its first `start` ones so far, followed by `new_ids`; returns all of them.

        A `start` below what is held is a branch: what followed is forgotten. Repeating a request changes nothing.
        """
        held = self._ids.get(trajectory, [])
        if start > len(held):
            return NeedContext(len(held))
        ids = self._ids[trajectory] = held[:start] + list(new_ids)
        return ids

    def close(self, trajectory: str) -> None:
        self._ids.pop(trajectory, None)

    def __len__(self) -> int:
        return len(self._ids)


def check_range(trajectory: str, ids: list[int], first: int, max_len: int, vocab_size: int) -> None:
    """Refuse what cannot be scored.

    Raises:
        ValueError: no context before `first`, nothing to score, too many tokens, or ids outside the vocabulary.
    """
    if not 1 <= first < len(ids):
        raise ValueError(
            f"{trajectory}: tokens {first}..{len(ids) - 1} cannot be scored: scoring needs a context of at least one token "
            "and at least one token after it"
        )
    if len(ids) > max_len:
        raise ValueError(
            f"{trajectory}: {len(ids)} tokens and the teacher's context limit is {max_len}; lower "
            "generator.max_input_length or take a teacher with a longer context"
        )
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        bad = max(ids) if max(ids) >= vocab_size else min(ids)
        raise ValueError(f"{trajectory}: token id {bad} is outside the teacher's vocabulary of {vocab_size}")
