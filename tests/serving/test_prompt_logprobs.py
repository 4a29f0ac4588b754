"""Prompt log-probs of a prompt whose beginning is cached, as vLLM's two model runners return them.

V2 is the runner on CUDA. Its own class runs here; its two Triton functions are replaced by plain torch.
"""

import os
import types

import numpy as np
import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")

from skyrl_thundersync.engines.thread import logprobs_of  # noqa: E402

VOCABULARY, CHUNK, LENGTH = 50, 256, 1000


@pytest.fixture(scope="module")
def ids():
    return torch.randint(VOCABULARY, (LENGTH,), generator=torch.manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def logits_nV():
    return torch.randn(LENGTH, VOCABULARY, generator=torch.manual_seed(1))


def answered(rows, flat):
    """What vLLM's frontend makes of the tensors that a runner returned."""
    from vllm import SamplingParams
    from vllm.v1.engine.logprobs import LogprobsProcessor

    params = SamplingParams(prompt_logprobs=0, flat_logprobs=flat)
    processor = LogprobsProcessor.from_new_request(None, types.SimpleNamespace(sampling_params=params))
    processor._update_prompt_logprobs(rows)
    return processor.prompt_logprobs


def runner_v2(monkeypatch, ids, logits_nV, cached):
    from vllm import SamplingParams
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.sample import prompt_logprob

    at = {"done": cached}

    def next_ids(n, *_):
        return torch.tensor((ids + [0])[at["done"] + 1 : at["done"] + 1 + n])

    def scores(logits, _, chosen, **__):
        logps = torch.log_softmax(logits, -1).gather(-1, chosen[:, None])
        return LogprobsTensors(chosen[:, None], logps, torch.zeros(len(chosen)))

    monkeypatch.setattr(prompt_logprob, "get_prompt_logprobs_token_ids", next_ids)
    monkeypatch.setattr(prompt_logprob, "compute_topk_scores", scores)
    worker = prompt_logprob.PromptLogprobsWorker(4)
    worker.add_request("r", 0, SamplingParams(prompt_logprobs=0))
    found = {}
    while "r" not in found:
        done, n = at["done"], min(CHUNK, LENGTH - at["done"])
        batch = types.SimpleNamespace(
            idx_mapping_np=np.array([0]), num_computed_prefill_tokens_np=np.array([done]), num_tokens=n,
            prefill_len_np=np.array([LENGTH]), query_start_loc=None, idx_mapping=torch.tensor([0]), req_ids=["r"],
            num_scheduled_tokens=np.array([n]), query_start_loc_np=np.array([0, n]),
        )  # fmt: skip
        hidden = logits_nV[done : done + n]
        found = worker.compute_prompt_logprobs(lambda h: h, hidden, batch, None, None, np.array([LENGTH]))
        at["done"] += n
    return found["r"]


def runner_v1(_, ids, logits_nV, cached):
    """All positions, those of cached tokens without meaning: what `test_teacher.py` sees of the CPU build."""
    from vllm.v1.outputs import LogprobsTensors

    chosen = torch.tensor(ids[1:])
    logps = torch.log_softmax(logits_nV[:-1], -1).gather(-1, chosen[:, None])
    logps[:cached] = float("nan")
    return LogprobsTensors(chosen[:, None], logps, torch.zeros(LENGTH - 1))


@pytest.mark.parametrize("runner", [runner_v1, runner_v2])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(("cached", "first"), [(0, 1), (16, 17), (784, 785), (784, 990), (992, 999)])
def test_a_turns_log_probs_are_its_own_whatever_was_cached(monkeypatch, ids, logits_nV, runner, flat, cached, first):
    positions = answered(runner(monkeypatch, ids, logits_nV, cached), flat)
    expected = torch.log_softmax(logits_nV, -1)[range(first - 1, LENGTH - 1), ids[first:]].tolist()
    assert logprobs_of(positions, ids, first, cached) == pytest.approx(expected, abs=1e-6)


def test_positions_that_were_cached_are_never_read(monkeypatch, ids, logits_nV):
    positions = answered(runner_v2(monkeypatch, ids, logits_nV, 784), True)
    for first in (1, 784):
        with pytest.raises(
            RuntimeError, match=f"216 log-prob positions for 1000 tokens, 784 of them cached.* {first} on"
        ):
            logprobs_of(positions, ids, first, 784)
    with pytest.raises(RuntimeError, match="216 log-prob positions for 1000 tokens, 32 of them cached"):
        logprobs_of(positions, ids, 999, 32)
