"""Split attention equals one masked softmax, forward and backward, on every route."""

import pytest
import torch
from plain import FAMILIES, batch, distance, make_rank, plain_gradient
from sizes import Sizes
from transformers import AutoConfig

from skyrl_thundersync.learner import attention, student
from skyrl_thundersync.learner.attention import Past, SplitCausal
from skyrl_thundersync.learner.kernel_choice import BOUND as KERNEL_BOUND
from skyrl_thundersync.learner.kernel_choice import Choice, choose, head_shape, probe
from skyrl_thundersync.learner.kernels import KERNELS, Kernel

BOUND = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 3e-2}


def masked(q, k, v, scale):
    """The textbook: repeated K/V, an explicit bottom-right causal mask, one softmax."""
    r, n, p = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(r, 1) for x in (k, v))
    hidden = torch.ones(n, p, dtype=torch.bool).triu(p - n + 1)
    return torch.softmax((q @ k.transpose(-1, -2) * scale).masked_fill(hidden, float("-inf")), -1) @ v


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("kernel", ["cpu_fused", "explicit"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("pasts", [(), (7,), (7, 1, 30)])
@pytest.mark.parametrize("inside", [0, 5])
@pytest.mark.parametrize("n", [1, 9])
def test_equals_one_masked_softmax(monkeypatch, dtype, kernel, heads, pasts, inside, n):
    monkeypatch.setattr(attention, "SPAN", 3)
    torch.manual_seed(0)
    (h, g), d = heads, 8
    q = torch.randn(1, h, n, d, dtype=dtype, requires_grad=True)
    parts = [[torch.randn(1, g, p, d, dtype=dtype, requires_grad=True) for _ in "kv"] for p in (*pasts, inside + n)]
    cotangent, scale = torch.randn(1, h, n, d, dtype=dtype), 0.3
    wide = [[x.detach().double().requires_grad_() for x in pair] for pair in parts]
    q_wide = q.detach().double().requires_grad_()
    expected = masked(q_wide, *(torch.cat([pair[i] for pair in wide], 2) for i in (0, 1)), scale)
    expected.backward(cotangent.double())
    deposits = [None] * len(pasts)

    def sink(i):
        return lambda dk, dv: deposits.__setitem__(i, (dk, dv))

    views = tuple(Past(k.detach(), v.detach(), sink(i)) for i, (k, v) in enumerate(parts[:-1]))
    out = SplitCausal.apply(q, *parts[-1], scale, views, KERNELS[kernel])
    out.backward(cotangent)
    close = {"rtol": BOUND[dtype], "atol": BOUND[dtype] * 3}
    torch.testing.assert_close(out.detach().double(), expected.detach(), **close)
    torch.testing.assert_close(q.grad.double(), q_wide.grad, **close)
    for (dk, dv), (k, v) in zip([*deposits, [x.grad for x in parts[-1]]], wide, strict=True):
        torch.testing.assert_close(dk.double(), k.grad, **close)
        torch.testing.assert_close(dv.double(), v.grad, **close)


def test_the_kernel_is_chosen_by_rule_on_a_cpu(folder_of):
    config = AutoConfig.from_pretrained(folder_of("qwen3"))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert choose(config, "cpu", dtype).name == "cpu_fused"
    assert choose(config, "meta", torch.bfloat16).name == "cuda_fused"
    assert choose(config, "meta", torch.float32).name == "explicit"


@pytest.mark.parametrize(
    ("family", "shape"), [("qwen3", (4, 2, 8)), ("llama", (4, 1, 8)), ("glm4_moe_lite", (4, 4, 12))]
)
def test_a_kernel_is_tried_in_the_models_own_head_shape(folder_of, family, shape):
    assert head_shape(AutoConfig.from_pretrained(folder_of(family))) == shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_probe_tells_a_right_kernel_from_wrong_ones(dtype):
    """Wrong in the forward, or in one gradient of the backward alone."""
    right = KERNELS["cpu_fused"]

    def off(grad, q, k, *rest):
        dq, dk, dv = right.backward(grad, q, k, *rest)
        return dq, dk * 1.1, dv

    def uncausal(q, k, v, causal, scale):
        return right.forward(q, k, v, False, scale)

    assert probe(right, "cpu", dtype, 4, 2, 16) < KERNEL_BOUND / 3
    assert probe(Kernel(right.forward, off), "cpu", dtype, 4, 2, 16) > KERNEL_BOUND
    assert probe(Kernel(uncausal, right.backward), "cpu", dtype, 4, 2, 16) > KERNEL_BOUND


def test_the_cuda_kernel_has_the_shapes_and_takes_no_scores():
    """On tensors without data, which is what can be seen of it without a GPU: a past is met without [n, past] scores."""
    n, p, h, g, d = 64, 4096, 8, 2, 128
    with torch.device("meta"):
        q, k, v = (torch.randn(1, heads, n, d, dtype=torch.bfloat16, requires_grad=True) for heads in (h, g, g))
        past = [torch.randn(1, g, p, d, dtype=torch.bfloat16) for _ in "kv"]
    shapes = []
    with Sizes() as sizes:
        before = Past(*past, lambda dk, dv: shapes.extend((dk.shape, dv.shape)))
        out = SplitCausal.apply(q, k, v, d**-0.5, (before,), KERNELS["cuda_fused"])
        out.sum().backward()
    assert out.shape == q.shape and shapes == [past[0].shape] * 2
    assert sizes.largest < h * n * p


@pytest.mark.parametrize("family", ["qwen3", "glm4_moe_lite"])
def test_whole_gradient_on_the_explicit_route(monkeypatch, folder_of, family):
    """The route that a device without the CPU kernel takes."""
    monkeypatch.setattr(student, "choose", lambda *_: Choice("explicit", "this test's"))
    works = batch(seed=3)
    plain, _ = plain_gradient(folder_of(family), works)
    rank = make_rank(folder_of(family))
    for work in works:
        rank.run(work)
    assert distance(rank.gradient(), plain) <= 1e-12


def test_values_narrower_than_keys_are_handled_exactly(folder_of):
    """MLA with value heads of another width than the keys."""
    folder = folder_of("glm4_moe_lite", v_head_dim=6)
    works = batch(seed=4)
    plain, _ = plain_gradient(folder, works)
    rank = make_rank(folder)
    for work in works:
        rank.run(work)
    assert distance(rank.gradient(), plain) <= 1e-12


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 0.25)])
def test_log_probs_through_cut_states_are_the_models_own(folder_of, family, dtype, bound):
    """Largest gap between the cut and the uncut forward on a sharp model; every rank measures it when it starts."""
    assert make_rank(folder_of(family), dtype=dtype).stats().cut_gap <= bound
