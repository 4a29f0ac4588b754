"""What must hold of a teacher before the first rollout: it means the same tokens, it is repeatable, it fits.

Vocabulary sizes are no evidence: models pad their rows to round numbers, and two tokenizers of one size can differ. The
id → token maps are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skyrl_thundersync.teacher.scores import TeacherScores


class PreflightError(ValueError):
    """The teacher cannot teach this student."""


def check_vocabularies(student: Any, teacher: Any, teacher_rows: int) -> None:
    """Every id that the student's tokenizer names must be the same token to the teacher, and have a row in its head.

    Ids that no tokenizer names (padded rows) and ids that only the teacher names are accepted: no text of the student's
    has them.

    Args:
        student, teacher: HF tokenizers.
        teacher_rows: vocabulary size of the teacher model.

    Raises:
        PreflightError: names the first differing id, with both tokens.
    """
    names_s = {index: token for token, index in student.get_vocab().items()}
    names_t = {index: token for token, index in teacher.get_vocab().items()}
    for index in sorted(names_s):
        if names_t.get(index) != names_s[index]:
            other = repr(names_t[index]) if index in names_t else "no token"
            raise PreflightError(
                f"token id {index} is {names_s[index]!r} to the student and {other} to the teacher: the teacher would score "
                "other text than the student wrote. Take a teacher with the student's tokenizer"
            )
    if (last := max(names_s)) >= teacher_rows:
        raise PreflightError(
            f"the teacher model has {teacher_rows} vocabulary rows and no one for token id {last} ({names_s[last]!r})"
        )


def check_context(replicas: Sequence[dict[str, Any]], longest: int) -> None:
    """Every teacher replica (as `ready` described it) must take trajectories of `longest` tokens."""
    for replica in replicas:
        if replica["max_len"] < longest:
            raise PreflightError(
                f"{replica['replica']} takes {replica['max_len']} tokens and a trajectory can have {longest}: lower "
                "generator.max_input_length or sampling_params.max_generate_length, or take a teacher with a longer context"
            )


async def check_scores(
    replicas: Sequence[Any],
    probe_ids: Sequence[int],
    tolerance: float,
    student_logps: Sequence[float] | None = None,
) -> float:
    """Every replica scores the probe twice: all answers must agree, and equal the student's if that is the same model.

    Args:
        replicas: teacher actors.
        probe_ids: n token ids, n ≥ 2; tokens from the second on are scored.
        tolerance: largest difference allowed at any position (nats). FP32: 1e-4; BF16: about 0.1.
        student_logps: the student's log-probs of `probe_ids[1:]`, given when student and teacher are one checkpoint:
            reverse KL must then be 0 within `tolerance`.

    Returns:
        The largest difference found.

    Raises:
        PreflightError: names the replica and the position.
    """
    probe = list(probe_ids)
    answers: list[tuple[str, TeacherScores]] = []
    for replica in replicas:
        name = (await replica.ready.remote())["replica"]
        for repeat in range(2):
            trajectory = f"preflight-{repeat}"
            answers.append((f"{name}, request {repeat + 1}", await replica.score.remote(trajectory, 0, probe, 1)))
            await replica.close.remote(trajectory)
    reference_name, reference = answers[0][0], answers[0][1].logps
    worst = max(_worst_gap(name, answer.logps, reference_name, reference, tolerance) for name, answer in answers)
    if student_logps is not None:
        worst = max(worst, _worst_gap(reference_name, reference, "the student", student_logps, tolerance))
    return worst


def _worst_gap(name: str, logps: Sequence[float], other_name: str, other: Sequence[float], tolerance: float) -> float:
    if len(logps) != len(other):
        raise PreflightError(f"{name} scored {len(logps)} probe tokens, {other_name} {len(other)}")
    gaps = [abs(a - b) for a, b in zip(logps, other, strict=True)]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    if not gaps[worst] <= tolerance:  # also when it is no number
        raise PreflightError(
            f"log-prob of probe token {worst + 1}: {logps[worst]:.6f} from {name}, {other[worst]:.6f} from {other_name}; "
            f"they must agree within {tolerance:g}"
        )
    return gaps[worst]


def same_checkpoint(student: str, teacher: str) -> bool:
    """Whether both names mean one checkpoint (one folder, or one hub name)."""
    if Path(student).is_dir() and Path(teacher).is_dir():
        return Path(student).resolve() == Path(teacher).resolve()
    return student == teacher
