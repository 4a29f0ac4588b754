"""The verdict of `benchmarks.exactness`: right gradients pass by the computation's own rounding, wrong ones do not."""

import pytest
from plain import batch

from benchmarks import exactness
from skyrl_thundersync.learner.states import Adjoint


def rows(tmp_path, models, dtypes):
    policies = {"fused": exactness.POLICIES["fused"]}
    return list(exactness.table(models, policies, dtypes, (), "cpu", tmp_path, batch(seed=21, groups=3, samples=3)))


def test_right_gradients_pass_in_every_dtype(tmp_path):
    """The MoE family's FP32 errors are the largest, the monolithic computation's among them."""
    found = rows(tmp_path, ("qwen3", "qwen3_moe"), ("float64", "float32", "bfloat16"))
    assert len(found) == 12 and [row for row in found if not row.holds] == []


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_adjoints_that_are_off_by_a_ten_thousandth_do_not(tmp_path, monkeypatch, dtype):
    deposit = Adjoint.deposit
    monkeypatch.setattr(
        Adjoint, "deposit", lambda self, layer, part, value: deposit(self, layer, part, value * (1 + 1e-4))
    )
    assert [row.objective for row in rows(tmp_path, ("qwen3",), (dtype,)) if not row.holds] == ["opd", "grpo"]
