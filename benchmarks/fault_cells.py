"""The cells of `make faults`: what happens, in which phase of an update, to which process, and how the run should end."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

from benchmarks.fault_phases import AT_WORK, DRIVER, ROLLOUT, TEACHER
from skyrl_thundersync.process.interrupts import PREEMPTING

LEARNER = "learner-1"

HANG_S = 10
"""thundersync.hang_timeout_s in all cells."""


@dataclass(frozen=True)
class Cell:
    """One fault in one phase.

    Attributes:
        fault: its name, in the table.
        victim: process that it hits; None where it is there from the start.
        watch: process whose being at the phase is waited for.
        event: a signal's number, "sockets" (its connections are shut) or "full" (a filesystem fills up).
        ends: exit statuses that are a clean end; 0: the run goes on to its last update.
        options: overrides.
        special: what else is prepared; see `Chain._prepared`.
        deadline_s: from the event to the run's end, where it ends.
        says: what the screen must name, as a pattern.
        within: a command that runs the run.
        tolerance: largest gap to the undisturbed run; 0: no bit may differ.
    """

    fault: str
    phase: str
    victim: str | None
    watch: str
    event: int | str | None
    ends: tuple[int, ...]
    options: tuple[str, ...] = ()
    special: str | None = None
    deadline_s: float = 60.0
    says: str = ""
    within: tuple[str, ...] = ()
    tolerance: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.fault}, {self.phase}".replace(" ", "-").replace(",", "")


def cells() -> list[Cell]:
    """All of them, in the order of the table."""
    return [
        *_killed(),
        *_stopped(),
        *_cut(),
        *(_whole("Ctrl-C", signal.SIGINT, 130, phase, "Stopped") for phase in AT_WORK),
        *(_whole("SIGTERM", signal.SIGTERM, 143, phase, "Stopped by SIGTERM") for phase in AT_WORK),
        *(
            replace(
                _whole(f"{number.name} to the process group", number, 128 + number, phase, f"Stopped by {number.name}"),
                special="group",
            )
            for number in PREEMPTING
            for phase in ("rollout", "finish", "checkpoint", "start-up")
        ),
        *(_whole("kill -9 of the run", signal.SIGKILL, -9, phase, "") for phase in AT_WORK),
        *_full(),
        *_limited(),
        *_poisoned(),
    ]


def _whole(fault: str, number: int, status: int, phase: str, says: str) -> Cell:
    """A signal to the run itself, while one of its processes is at the phase."""
    late = phase == "checkpoint" and number in PREEMPTING
    return Cell(
        fault,
        phase,
        DRIVER,
        AT_WORK[phase],
        number,
        (status,),
        options=EVALUATE if phase == "evaluation" else (),
        says=says,
        deadline_s=90.0 if late else 60.0,
    )


REFUSED = "the next update may write"
REFUSED_MEMORY = "of host memory are left"
EVALUATE = ("trainer.eval_before_train=true", "trainer.eval_interval=100")
RESTARTS = ("thundersync.learner.max_restarts=1",)
LITTLE_STATE = ("thundersync.learner.state_gib=0.0005",)
FP32_SUMS = ("thundersync.learner.accumulator=fp32",)
"""The default: another order of work gives other last bits."""
LITTLE_WORK = ("thundersync.learner.restart_gib=0.0000001",)
TWO_TEACHERS = ("thundersync.teacher.replicas=2",)
TWO_ENGINES = ("generator.inference_engine.num_engines=2",)


def _killed() -> list[Cell]:
    kill = signal.SIGKILL
    learner = Cell("learner rank killed", "", LEARNER, LEARNER, kill, (1,), says="(?i)learner")
    rollout = Cell("rollout replica killed", "", ROLLOUT, ROLLOUT, kill, (1,), says="(?i)rollout|replica")
    teacher = Cell("teacher replica killed", "", TEACHER, TEACHER, kill, (1,), says="(?i)teacher")
    two_engines = replace(
        rollout, fault="one of two rollout replicas killed", options=TWO_ENGINES, ends=(0,), says="rollout-0 died; 1 "
    )
    two_teachers = replace(
        teacher, fault="one of two teacher replicas killed", options=TWO_TEACHERS, ends=(0,), says="teacher-0 died; 1 "
    )
    again = replace(
        learner, fault="learner rank killed, may restart", options=RESTARTS, ends=(0,), says="died.*start again"
    )
    return [
        replace(
            again,
            fault=f"{again.fault}, FP32 sums",
            phase="sweep",
            options=RESTARTS + FP32_SUMS,
            special="apart",
            tolerance=1e-6,
        ),
        replace(again, phase="forward"),
        replace(again, phase="sweep"),
        replace(again, phase="teacher", watch=TEACHER),
        replace(again, fault=f"{again.fault}, little state", phase="sweep", options=RESTARTS + LITTLE_STATE),
        replace(
            again,
            fault=f"{learner.fault}, work not kept",
            phase="sweep",
            options=RESTARTS + LITTLE_WORK,
            ends=(1,),
            says="restart_gib(.|\n)*learner-1",
        ),
        replace(learner, phase="start-up"),
        replace(learner, phase="forward"),
        replace(learner, phase="sweep"),
        replace(learner, phase="finish"),
        replace(learner, phase="step"),
        # Its own part, writing the weights, is over within milliseconds: when the replica has begun to load them.
        replace(learner, phase="publish", victim="learner-0", watch=ROLLOUT),
        replace(learner, phase="checkpoint"),
        replace(rollout, phase="rollout"),
        replace(two_engines, phase="rollout"),
        replace(two_engines, phase="publish"),
        replace(rollout, phase="publish"),
        replace(rollout, phase="evaluation", options=EVALUATE),
        replace(teacher, phase="start-up"),
        replace(teacher, phase="teacher"),
        replace(two_teachers, phase="teacher"),
    ]


def _stopped() -> list[Cell]:
    stop = Cell("", "", None, "", signal.SIGSTOP, (1,), deadline_s=HANG_S + 30.0)
    found = []
    for process, phases in (
        (LEARNER, ("forward", "sweep", "finish", "checkpoint")),
        (ROLLOUT, ("start-up", "rollout", "publish")),
        (TEACHER, ("teacher",)),
    ):
        for phase in phases:
            name = f"{process.partition('-')[0]} stopped (hangs)"
            found.append(
                replace(stop, fault=name, phase=phase, victim=process, watch=process, says=f"HungActor.*{process}")
            )
    return found


def _cut() -> list[Cell]:
    cut = Cell("connections shut", "", None, "", "sockets", (1,))
    return [
        replace(
            cut, fault=f"{process.partition('-')[0]}'s connections shut", phase=phase, victim=process, watch=process
        )
        for process, phase in ((LEARNER, "forward"), (LEARNER, "finish"), (ROLLOUT, "rollout"), (TEACHER, "teacher"))
    ]


def _full() -> list[Cell]:
    full = Cell("", "", None, "", "full", (1,), says="(?i)no space|free")
    return [
        replace(full, fault="checkpoints' disk full", phase="rollout", watch=ROLLOUT, special="checkpoint disk"),
        replace(full, fault="checkpoints' disk full", phase="checkpoint", watch=LEARNER, special="checkpoint disk"),
        replace(full, fault="run folder's disk full", phase="rollout", watch=ROLLOUT, special="run disk"),
        replace(full, fault="run folder's disk full", phase="publish", watch=ROLLOUT, special="run disk"),
        # Between two updates: foreseen.
        replace(
            full, fault="run folder's disk full", phase="checkpoint", watch=LEARNER, special="run disk", says=REFUSED
        ),
        replace(
            full, fault="memory full", phase="checkpoint", watch=LEARNER, special="some memory", says=REFUSED_MEMORY
        ),
    ]


def _limited() -> list[Cell]:
    """What the machine or a container does not give. Foreseen: refused before anything starts."""
    refused = Cell("", "start-up", None, "", None, (2,))

    def small_shm(mib: int) -> tuple[str, ...]:
        script = f'mount -t tmpfs -o size={mib}m shm /dev/shm && exec "$@"'
        return ("unshare", "--mount", "sh", "-c", script, "sh")

    return [
        replace(refused, fault="/dev/shm small", within=small_shm(512), says="--shm-size"),
        replace(refused, fault="few open files", within=("prlimit", "--nofile=1024:1024"), says="ulimit -Hn"),
        replace(refused, fault="few processes", special="few processes", says="--pids-limit"),
        replace(refused, fault="little memory", special="little memory", says="of host memory together"),
        # Nothing as small as this job's messages is handed over through it.
        Cell("/dev/shm full", "rollout", None, ROLLOUT, "full", (0,), special="shm", within=small_shm(2048)),
    ]


def _poisoned() -> list[Cell]:
    nan = Cell("", "", None, "", None, (1,), deadline_s=240.0)
    return [
        replace(nan, fault="teacher gives NaN", phase="start-up", special="NaN teacher", says="(?i)nan|finite"),
        replace(nan, fault="teacher gives NaN", phase="teacher", special="NaN teacher later", says="(?i)nan|finite"),
        replace(nan, fault="student's weights NaN", phase="start-up", special="NaN student", says="(?i)nan|finite"),
        # An agent can bring that about: it costs its trajectory at most.
        replace(
            nan, fault="checker prints NaN", phase="rollout", special="NaN reward", ends=(0,), says="finite number"
        ),
        replace(
            nan, fault="newest checkpoint torn", phase="start-up", special="torn checkpoint", ends=(2,), says="torn"
        ),
    ]
