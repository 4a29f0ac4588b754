"""What this plugin relies on in vLLM and vLLM does not promise (docs/seams.md), asked of a bare engine on the CPU build."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def facts(tmp_path_factory) -> dict:
    script = Path(__file__).with_name("vllm_facts.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path_factory.mktemp("vllm"))], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_an_engine_runs_in_its_callers_process(facts):
    assert facts["children"] == 0


def test_prompt_log_probs_are_those_of_the_model_and_have_no_first(facts):
    assert facts["first_position"] is None
    assert facts["plain_gap"] < 1e-4


def test_a_cached_prefix_is_read_for_scoring_when_asked_alone(facts):
    """And the CPU's runner answers with all positions then, those of the computed tokens right."""
    assert facts["cached_tokens"] >= 64
    assert facts["cached_positions"] == 100
    assert facts["cached_gap"] < 1e-4
    assert facts["cached_by_default"] == 0


def test_a_salt_keeps_prefixes_apart(facts):
    assert facts["cached_under_another_salt"] == 0


def test_samples_repeat_with_their_seed_and_bring_raw_log_probs(facts):
    assert facts["same_seed_same_tokens"]
    assert facts["sampled_gap"] < 1e-4


def test_a_request_too_long_is_refused_and_leaves_nothing(facts):
    assert {"ValueError", "VLLMClientError"} & set(facts["too_long"])
    assert facts["unfinished_after_refusal"] is False


def test_a_request_is_aborted_by_the_id_that_the_engine_gave_it(facts):
    assert facts["unfinished_after_abort"] is False


def test_the_prefix_cache_is_reset_when_nothing_runs_and_it_says_so(facts):
    assert facts["reset_while_running"] is False
    assert facts["reset_when_idle"] is True


def test_weights_are_reloaded_but_a_tied_heads_packed_copy(facts):
    """The second step in rollout/replica.py is for that; when vLLM mends it, the step may go."""
    assert facts["device"] == ["cpu"]
    assert facts["tied_head_is_stale_after_reload"] is True
    assert facts["gap_after_reload"] < 1e-4


def test_the_cpu_runner_keeps_its_generators_where_seeds_are_put_back(facts):
    assert facts["runner"]["class"].startswith("vllm.v1.worker.cpu_model_runner")
    assert facts["runner"]["has"] == [True] * 5


def test_an_adapter_is_swapped_by_number(facts):
    assert (facts["loras"], facts["loras_after_removal"]) == ([1], [])
    assert facts["adapted_gap"] < 1e-3


def test_an_adapter_with_other_names_is_dropped_or_refused(facts):
    """Dropped without a word: why a publication is proven and not believed."""
    assert facts.get("misnamed_refused") or facts["misnamed_gap_to_base"] < 1e-4
