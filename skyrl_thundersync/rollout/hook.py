"""The per-turn hook: turns what the rollout engine just sampled into sources, before any tool runs.

It wraps SkyRL's inference client. `generate` sees the prompt ids, the sampled ids and the session of every turn, which
is all a source needs; nothing is decoded, nothing upstream is patched. Off unless `armed`, so evaluation passes through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from skyrl_thundersync.stream.sources import Source, TrajectoryId


class TurnHook:
    """An inference client that reports each sampled turn to `sink` while armed.

    Args:
        client: SkyRL's client (rollout/client.py without GPUs, SkyRL's own with them). Every other attribute is its own.
        served_version: the policy version the client serves, for clients that do not report one per answer.
    """

    def __init__(self, client, served_version: Callable[[], int]) -> None:
        self.client = client
        self._served_version = served_version
        self._sink: Callable[[Source], None] | None = None
        self._trajectory_of: dict[str, TrajectoryId] = {}
        self._tokens: dict[TrajectoryId, list[int]] = {}
        self._turns: dict[TrajectoryId, int] = {}

    def __getattr__(self, name: str):
        return getattr(self.client, name)

    @contextmanager
    def armed(self, trajectories: list[TrajectoryId], sink: Callable[[Source], None]) -> Iterator[None]:
        """Report every turn of `trajectories` to `sink` while the context is open."""
        self._trajectory_of = {str(trajectory): trajectory for trajectory in trajectories}
        self._tokens = {trajectory: [] for trajectory in trajectories}
        self._turns = dict.fromkeys(trajectories, 0)
        self._sink = sink
        try:
            yield
        finally:
            self._sink = None

    async def generate(self, input_batch: dict, model: str | None = None) -> dict:
        """As the wrapped client's `generate`; each answer is reported before it is returned.

        Raises:
            RuntimeError: a request of an unknown session, or an answer without the sampler's log-probs.
        """
        # The host may append to the lists it passed and to those it gets back, so sources take copies.
        prompts = [tuple(ids) for ids in input_batch["prompt_token_ids"]] if self._sink else []
        output = await self.client.generate(input_batch, model=model)
        if self._sink is None:
            return output
        if output.get("response_logprobs") is None:
            raise RuntimeError(
                "the rollout engine returned no log-probs of the sampled tokens; set generator.sampling_params.logprobs=1"
            )
        versions = output.get("policy_versions") or [self._served_version()] * len(prompts)
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
        return output

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
