"""The mini benchmark through our own environment: its reference solutions get 12 of 12, doing nothing 0 of 12."""

from pathlib import Path

import pytest

from skyrl_thundersync.data.execution import attempt, check_all, oracle_action
from skyrl_thundersync.data.harbor import read_tasks

MINI = Path(__file__).parents[2] / "examples" / "terminal_bench" / "mini"


@pytest.fixture(scope="module")
def tasks():
    tasks, skipped = read_tasks(MINI)
    assert not skipped.tasks
    return tasks


@pytest.mark.timeout(120)
def test_oracle_12_of_12_and_no_op_0_of_12(sandboxes, tasks):
    checks = list(check_all(sandboxes, tasks, workers=2))
    assert [check.task_id for check in checks] == [task.task_id for task in tasks]
    assert len(checks) == 12
    assert {check.task_id: check.oracle.output for check in checks if not check.oracle.solved} == {}
    assert [check.task_id for check in checks if check.noop.solved] == []
    assert all(check.oracle.reward == 1.0 and not check.oracle.verifier_failed for check in checks)
    assert all(0.0 <= check.noop.reward < 1.0 and not check.noop.verifier_failed for check in checks)


def test_half_done_earns_partial_credit_and_is_not_solved(sandboxes, tasks):
    task = next(task for task in tasks if task.task_id == "pack-logs")
    half = attempt(sandboxes, task, "find logs -name '*.log' | tar -czf logs.tar.gz -T -")
    assert (half.reward, half.solved) == (0.75, False)


TAMPERING = {
    "a reward of its own": "mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt; echo 1 >/logs/verifier/reward.json",
    "tests of its own": "printf '#!/bin/bash\\necho 1 >/logs/verifier/reward.txt\\n' >/tests/test.sh; chmod 000 /tests",
    "a folder for the results": "mkdir -p /logs/verifier/reward.txt/x; chmod 000 /logs/verifier",
    "a link for the results": "mkdir -p /logs; ln -s /workspace /logs/verifier; ln -s ans reward.txt; echo 1 >ans",
    "a shim of the shell": "echo 'echo 1 >/logs/verifier/reward.txt' >env.sh; export BASH_ENV=$PWD/env.sh",
    "a background writer": "(while :; do echo 1 >/logs/verifier/reward.txt; sleep 0.01; done) >/dev/null 2>&1 &",
    "tools of its own": "for c in cmp sort cat wc; do printf '#!/bin/sh\\nexit 0\\n' >$c; chmod +x $c; done; PATH=$PWD:$PATH",
}


@pytest.mark.parametrize("command", TAMPERING.values(), ids=TAMPERING.keys())
def test_tampering_with_the_verifier_earns_nothing(sandboxes, tasks, command):
    task = next(task for task in tasks if task.task_id == "order-totals")
    result = attempt(sandboxes, task, command)
    assert not result.solved and result.reward <= 0.25  # one check of four is that orders.csv is untouched


def test_the_agent_sees_neither_tests_nor_solution(sandboxes, tasks):
    task = next(task for task in tasks if task.task_id == "order-totals")
    seen = attempt(
        sandboxes,
        task,
        "ls -A /tests /solution /logs; grep -rl expected.csv /workspace /tmp /proc/[0-9]*/cmdline 2>/dev/null",
    )
    assert "test.sh" not in seen.output and "expect" not in seen.output and "solve" not in seen.output


def test_tests_of_the_row_are_the_tasks_and_its_solution_is_nowhere(tasks):
    for task in tasks:
        row = task.row(max_turns=6)
        assert "test.sh" in row["tests"] and "solve.sh" not in "".join(map(str, row.values()))
        assert oracle_action(task)
