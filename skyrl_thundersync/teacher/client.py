"""The teacher as the update sees it: one call a turn, whichever replica holds the trajectory's cache.

A failed request is tried again with backoff, on another replica where there is one; then the run fails and names the
source. A score that is no number is never tried again: it would be trained on the next time.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from skyrl_thundersync.errors import own_error
from skyrl_thundersync.stream.sources import Scores, Source, TrajectoryId
from skyrl_thundersync.teacher.scores import NeedContext, TeacherScores, TeacherSpec
from skyrl_thundersync.telemetry import timeline


class TeacherError(RuntimeError):
    """A source could not be scored."""


@dataclass
class TeacherCounts:
    """What scoring took since the counts were last taken.

    Attributes:
        trajectory_tokens: tokens that turns added to their trajectories, context and action, each once.
        computed_tokens: tokens that went through the teacher for them.
        wait_s: Σ over requests of the seconds from asking to the answer, retries included. Requests overlap.
        retries: failed tries.
    """

    trajectory_tokens: int = 0
    computed_tokens: int = 0
    wait_s: float = 0.0
    retries: int = 0

    @property
    def tokens_ratio(self) -> float:
        """Teacher tokens computed / trajectory tokens: 1 when every token is computed once; 0 when there were none."""
        return self.computed_tokens / self.trajectory_tokens if self.trajectory_tokens else 0.0


@dataclass
class _Trajectory:
    """An open trajectory: its ids, the replica that scores it, and how many ids that replica holds."""

    replica: int
    ids: list[int] = field(default_factory=list)
    sent: int = 0


class TeacherClient:
    """Scores sources on teacher replicas (`trainer.Teacher`).

    A replica that dies is done without: its trajectories move to another one, which reads them again. With the last one the
    run ends.

    Args:
        replicas: actor handles of `VllmTeacher` or `TransformersTeacher`.
        request_timeout_s: a request that takes longer counts as failed.
        max_retries: tries after the first failure.
        backoff_s: pause before the first retry; doubles with each.
        say: told of a replica that died.
    """

    def __init__(
        self,
        replicas: Sequence[Any],
        request_timeout_s: float,
        max_retries: int,
        backoff_s: float = 0.5,
        say: Callable[[str], None] | None = None,
    ) -> None:
        if not replicas:
            raise ValueError("a teacher client needs at least one replica")
        self.replicas = list(replicas)
        self._timeout_s, self._max_retries, self._backoff_s = request_timeout_s, max_retries, backoff_s
        self._open: dict[TrajectoryId, _Trajectory] = {}
        self._outstanding = [0] * len(self.replicas)
        self._say = say
        self._lost: set[int] = set()
        self._counts = TeacherCounts()

    async def ready(self) -> list[dict[str, Any]]:
        """Waits for every replica; what each says of itself (name, longest trajectory, vocabulary size)."""
        return list(await asyncio.gather(*(replica.ready.remote() for replica in self.replicas)))

    async def score(self, source: Source) -> Scores:
        """log π_T of each action token of `source` in its realised context. Called in turn order within a trajectory.

        Raises:
            TeacherError: every try failed, the teacher refuses the tokens, or a scored token's log-prob is not finite.
        """
        trajectory = self._open.get(source.trajectory)
        if trajectory is None:
            trajectory = self._open[source.trajectory] = _Trajectory(self._least_loaded(exclude=None))
        if source.prefix > len(trajectory.ids):
            raise TeacherError(
                f"{source.name} repeats {source.prefix} tokens of a trajectory of which {len(trajectory.ids)} were seen"
            )
        trajectory.ids = [*trajectory.ids[: source.prefix], *source.context_ids, *source.action_ids]
        trajectory.sent = min(trajectory.sent, source.prefix)
        self._counts.trajectory_tokens += len(source.context_ids) + len(source.action_ids)
        if not source.action_ids:
            return Scores(())
        begin = time.perf_counter()
        scores = await self._with_retries(source, trajectory)
        end = time.perf_counter()
        timeline.add(f"teacher-{trajectory.replica}", "score", begin, end, of=source.name)
        self._counts.wait_s += end - begin
        self._counts.computed_tokens += scores.computed_tokens
        self._check(source, scores)
        return Scores(scores.logps, scores.support)

    async def close(self, trajectory: TrajectoryId) -> None:
        """No turn can follow: the replica frees the trajectory's cache."""
        held = self._open.pop(trajectory, None)
        if held is not None and held.replica not in self._lost:
            try:
                await self.replicas[held.replica].close.remote(str(trajectory))
            except ActorDiedError:
                self._lose(held.replica)

    def take_counts(self) -> TeacherCounts:
        """The counts since the last call."""
        counts, self._counts = self._counts, TeacherCounts()
        return counts

    async def stats(self) -> list[dict[str, Any]]:
        return list(await asyncio.gather(*(replica.stats.remote() for replica in self.replicas)))

    async def teardown(self) -> None:
        """Kill the replicas."""
        for replica in self.replicas:
            ray.kill(replica)

    async def _with_retries(self, source: Source, trajectory: _Trajectory) -> TeacherScores:
        what = f"scoring {len(trajectory.ids):,} tokens of {source.name} failed"
        for attempt in range(self._max_retries + 1):
            try:
                return await self._once(source, trajectory)
            except (RayError, TimeoutError) as error:
                if isinstance(error, ValueError):  # the teacher refuses these tokens, and will again
                    raise TeacherError(f"{what}: {self._said(error)}") from error
                if isinstance(error, ActorDiedError):
                    self._lose(trajectory.replica)
                cause = error
            if len(self._lost) == len(self.replicas):
                last = f"the last replica, teacher-{trajectory.replica}, died"
                raise TeacherError(f"{what}, {last}: {self._said(cause)}") from cause
            self._counts.retries += 1
            if attempt < self._max_retries:
                await asyncio.sleep(self._backoff_s * 2**attempt)
                trajectory.replica = self._least_loaded(exclude=trajectory.replica)
                trajectory.sent = 0
        tries = "1 try" if self._max_retries == 0 else f"{self._max_retries + 1} tries"
        raise TeacherError(f"{what} in {tries}: {self._said(cause)}") from cause

    def _said(self, error: Exception) -> str:
        """What a try failed of, on one line where it is Ray's own: those go on with ids and addresses."""
        if isinstance(error, TimeoutError):
            return f"no answer within {self._timeout_s:g} s"
        cause = own_error(error)
        text = str(cause) if cause is not error else str(cause).partition("\n")[0]
        return f"{type(cause).__name__}: {text}"

    async def _once(self, source: Source, trajectory: _Trajectory) -> TeacherScores:
        if trajectory.replica in self._lost:
            trajectory.replica, trajectory.sent = self._least_loaded(exclude=None), 0
        ids, index = trajectory.ids, trajectory.replica
        first = len(ids) - len(source.action_ids)
        self._outstanding[index] += len(ids)
        try:
            answer = await self._ask(index, source, trajectory.sent, ids[trajectory.sent :], first)
            if isinstance(answer, NeedContext):
                answer = await self._ask(index, source, 0, ids, first)
        finally:
            self._outstanding[index] -= len(ids)
        trajectory.sent = len(ids)
        return answer

    async def _ask(
        self, index: int, source: Source, start: int, new_ids: list[int], first: int
    ) -> TeacherScores | NeedContext:
        reference = self.replicas[index].score.remote(str(source.trajectory), start, new_ids, first)
        try:
            return await asyncio.wait_for(reference, self._timeout_s)
        except (TimeoutError, asyncio.CancelledError):
            ray.cancel(reference)  # or the replica would go on computing what nobody waits for
            raise

    def _least_loaded(self, exclude: int | None) -> int:
        """The replica with the fewest outstanding, then the fewest held tokens; another than `exclude` if there is one."""
        held = [0] * len(self.replicas)
        for trajectory in self._open.values():
            held[trajectory.replica] += len(trajectory.ids)
        living = [i for i in range(len(self.replicas)) if i not in self._lost] or [0]
        candidates = [i for i in living if i != exclude] or living
        return min(candidates, key=lambda i: (self._outstanding[i], held[i]))

    def _lose(self, index: int) -> None:
        """Do without a replica from now on."""
        if index not in self._lost:
            self._lost.add(index)
            if self._say:
                left = len(self.replicas) - len(self._lost)
                self._say(f"[yellow]teacher-{index} died; {left} teacher replicas go on[/yellow]")

    def _check(self, source: Source, scores: TeacherScores) -> None:
        if len(scores.logps) != len(source.action_ids):
            raise TeacherError(f"{source.name}: {len(scores.logps)} scores for {len(source.action_ids)} action tokens")
        for index, (logp, scored) in enumerate(zip(scores.logps, source.mask, strict=True)):
            if scored and not math.isfinite(logp):
                raise TeacherError(
                    f"the teacher's log-prob of action token {index} (id {source.action_ids[index]}) of {source.name} is "
                    f"{logp}; the update stops before it is used"
                )


def start_teachers(spec: TeacherSpec, count: int, log_dir: str | Path | None = None) -> list[Any]:
    """Start `count` teacher replicas named teacher-0 …; returns their actor handles. Await `ready` on each.

    Raises as `start_teacher`.
    """
    return [start_teacher(spec, index, log_dir, {}) for index in range(count)]


def start_teacher(spec: TeacherSpec, index: int, log_dir: str | Path | None, placed: dict[str, Any]) -> Any:
    """Start the replica teacher-`index`. `placed`: Ray's options for where.

    Raises:
        ValueError: an unknown backend.
    """
    if spec.backend == "vllm":
        from skyrl_thundersync.teacher.vllm import VllmTeacher as Teacher
    elif spec.backend == "transformers":
        from skyrl_thundersync.teacher.transformers import TransformersTeacher as Teacher
    else:
        raise ValueError(f"unknown teacher backend {spec.backend!r}: vllm or transformers")
    name = f"teacher-{index}"
    return Teacher.options(**_actor_options(spec), **placed).remote(name, _with_log(spec, log_dir, name))


def _actor_options(spec: TeacherSpec) -> dict[str, Any]:
    options: dict[str, Any] = {"runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(spec.threads)}}}
    if spec.device == "cuda":
        options["num_gpus"] = spec.tensor_parallel_size
    return options


def _with_log(spec: TeacherSpec, log_dir: str | Path | None, name: str) -> TeacherSpec:
    return replace(spec, log_path=None if log_dir is None else str(Path(log_dir) / f"{name}.log"))
