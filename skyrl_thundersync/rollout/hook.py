"""The per-turn hook: turns what the rollout engine just sampled into sources, before a tool runs.

It wraps SkyRL's inference client. `generate` sees the prompt ids, the sampled ids and the session of each turn: all
that a source needs; nothing is decoded, nothing upstream is patched. Off unless `armed`: evaluation passes through.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from skyrl_thundersync.stream.sources import Source, TrajectoryId
from skyrl_thundersync.telemetry import timeline


class TurnHook:
    """An inference client that reports each sampled turn to `sink` while armed.

    Args:
        client: SkyRL's client (hosts/skyrl/client.py without GPUs, SkyRL's own with them). Other attributes are its own.
        version: the policy version of the running update, which sampling is seeded by.
        seed: makes every turn's sampling repeatable: its own seed follows from this one, the policy version, the session
            and the turn, whatever order the requests arrive in.
        served_version: asks those who serve for their version, for clients that do not report one per answer.
    """

    def __init__(
        self,
        client,
        version: Callable[[], int],
        seed: int,
        served_version: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        self.client, self._seed = client, seed
        self._version, self._served_version = version, served_version
        self._sink: Callable[[Source], None] | None = None
        self._trajectory_of: dict[str, TrajectoryId] = {}
        self._tokens: dict[TrajectoryId, list[int]] = {}
        self._turns: dict[TrajectoryId, int] = {}
        self._answered: dict[str, float] = {}  # when each session's last answer came

    def __getattr__(self, name: str):
        return getattr(self.client, name)

    @contextmanager
    def armed(self, trajectories: list[TrajectoryId], sink: Callable[[Source], None]) -> Iterator[None]:
        """Report every turn of `trajectories` to `sink` while the context is open."""
        self._trajectory_of = {str(trajectory): trajectory for trajectory in trajectories}
        self._tokens = {trajectory: [] for trajectory in trajectories}
        self._turns = dict.fromkeys(trajectories, 0)
        self._answered = {}
        self._sink = sink
        try:
            yield
        finally:
            self._sink = None

    async def generate(self, input_batch: dict, model: str | None = None) -> dict:
        """As the wrapped client's `generate`; each answer is reported before it is returned.

        Raises:
            RuntimeError: a request of an unknown session, or an answer without the sampler's log-probs or version.
        """
        # The host may append to the lists it passed and to those it gets back: sources take copies.
        if self._sink is None:
            return await self.client.generate(input_batch, model=model)
        prompts = [tuple(ids) for ids in input_batch["prompt_token_ids"]]
        asked = time.perf_counter()
        output = await self.client.generate(self._seeded(input_batch), model=model)
        answered = time.perf_counter()
        if output.get("response_logprobs") is None:
            raise RuntimeError(
                "the rollout engine returned no log-probs of the sampled tokens; set generator.sampling_params.logprobs=1"
            )
        versions = output.get("policy_versions") or [await self._ask_version()] * len(prompts)
        for i, session in enumerate(input_batch["session_ids"]):
            if session not in self._trajectory_of:
                raise RuntimeError(f"a request of session {session!r} arrived, which is no trajectory of this batch")
            self._report(
                self._trajectory_of[session],
                prompts[i],
                tuple(output["response_ids"][i]),
                tuple(output["response_logprobs"][i]),
                output["stop_reasons"][i],
                versions[i],
            )
            replica = f"rollout-{output['replicas'][i]}" if "replicas" in output else "rollout"
            timeline.add(replica, "generate", asked, answered, of=session, tokens=len(output["response_ids"][i]))
            if (before := self._answered.get(session)) is not None:
                timeline.add("environment", "between turns", before, asked, of=session)
            self._answered[session] = answered
        return output

    async def _ask_version(self) -> int:
        if self._served_version is None:
            raise RuntimeError("the rollout engine does not say which policy version gave an answer")
        return await self._served_version()

    def _seeded(self, input_batch: dict) -> dict:
        sessions = input_batch["session_ids"]
        if len(sessions) != 1:
            raise RuntimeError(f"one request a turn is expected, got {len(sessions)}; set generator.batched=false")
        turn = self._turns.get(self._trajectory_of.get(sessions[0]), 0)
        key = f"{self._seed}/{self._version()}/{sessions[0]}/{turn}".encode()
        seed = int.from_bytes(hashlib.blake2s(key, digest_size=4).digest())
        return {**input_batch, "sampling_params": {**(input_batch.get("sampling_params") or {}), "seed": seed}}

    def _report(
        self,
        trajectory: TrajectoryId,
        prompt_ids: tuple[int, ...],
        action_ids: tuple[int, ...],
        logps: tuple[float, ...],
        finish_reason: str,
        version: int,
    ) -> None:
        held = self._tokens[trajectory]
        prefix = common_prefix(held, prompt_ids)
        source = Source(
            trajectory=trajectory,
            turn=self._turns[trajectory],
            prefix=prefix,
            context_ids=prompt_ids[prefix:],
            action_ids=action_ids,
            mask=(1,) * len(action_ids),
            sampler_logps=logps,
            finish_reason=finish_reason,
            policy_version=version,
        )
        self._tokens[trajectory] = [*prompt_ids, *action_ids]
        self._turns[trajectory] += 1
        self._sink(source)


def common_prefix(held: list[int], ids: tuple[int, ...]) -> int:
    """Number of leading tokens that `held` and `ids` share."""
    n = min(len(held), len(ids))
    if tuple(held[:n]) == ids[:n]:
        return n
    return next(i for i in range(n) if held[i] != ids[i])
