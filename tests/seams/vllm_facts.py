"""What vLLM's CPU engine does where this plugin relies on it: prints one JSON object. Run in a process of its own.

    python vllm_facts.py FOLDER

FOLDER takes the checkpoints `old`, `new` (tied embeddings) and the adapters `adapter`, `misnamed` that the run makes.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    TORCHDYNAMO_DISABLE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    HF_HUB_OFFLINE="1",
)

import torch  # noqa: E402
from models import forward_logps, random_ids, save, tiny_qwen3  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

FOLDER = Path(sys.argv[1])
PROMPT = random_ids(0, 100)
SCORE = dict(max_tokens=1, prompt_logprobs=0, detokenize=False)


def engine(model: str, **more) -> LLMEngine:
    cpu = dict(kv_cache_memory_bytes=2**26, block_size=32, max_num_batched_tokens=64, max_num_seqs=8)
    return LLMEngine.from_engine_args(
        EngineArgs(model=model, dtype="float32", max_model_len=256, enforce_eager=True, seed=0, **cpu, **more)
    )


def ask(engine: LLMEngine, ids: list[int], lora=None, salt: str | None = None, **params):
    """The finished output of one request."""
    prompt = {"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {})
    engine.add_request("r", prompt, SamplingParams(**params), lora_request=lora)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                return output
    raise AssertionError("the engine has nothing to do and gave no answer")


def gap(output, expected: list[float], first: int = 1) -> float:
    """Largest difference of the prompt's log-probs from `first` on to a plain forward's (of tokens 1 …)."""
    found = [output.prompt_logprobs[i][PROMPT[i]].logprob for i in range(first, len(PROMPT))]
    return max(abs(a - b) for a, b in zip(found, expected[first - 1 :], strict=True))


def prompt_scores(facts: dict, llm: LLMEngine, expected: list[float]) -> None:
    plain = ask(llm, PROMPT, salt="a", skip_reading_prefix_cache=True, **SCORE)
    cached = ask(llm, PROMPT, salt="a", skip_reading_prefix_cache=False, **SCORE)
    by_default = ask(llm, PROMPT, salt="a", **SCORE)
    other = ask(llm, PROMPT, salt="b", skip_reading_prefix_cache=False, **SCORE)
    facts |= {
        "first_position": plain.prompt_logprobs[0],
        "plain_gap": gap(plain, expected),
        "cached_tokens": cached.num_cached_tokens,
        "cached_positions": len(cached.prompt_logprobs),
        "cached_gap": gap(cached, expected, first=cached.num_cached_tokens + 1),
        "cached_by_default": by_default.num_cached_tokens,
        "cached_under_another_salt": other.num_cached_tokens,
    }


def sampled(facts: dict, llm: LLMEngine) -> None:
    params = dict(max_tokens=8, logprobs=0, ignore_eos=True, detokenize=False, temperature=1.0)
    one = ask(llm, PROMPT[:32], seed=5, **params).outputs[0]
    two = ask(llm, PROMPT[:32], seed=5, **params).outputs[0]
    context = PROMPT[:32] + list(one.token_ids)
    expected = forward_logps(OLD, context)[31:]
    found = [position[token].logprob for position, token in zip(one.logprobs, one.token_ids, strict=True)]
    facts |= {
        "same_seed_same_tokens": list(one.token_ids) == list(two.token_ids),
        "sampled_gap": max(abs(a - b) for a, b in zip(found, expected, strict=True)),
    }


def refusals_and_aborts(facts: dict, llm: LLMEngine) -> None:
    try:
        llm.add_request("long", {"prompt_token_ids": PROMPT * 3}, SamplingParams(max_tokens=1))
        facts["too_long"] = None
    except Exception as error:  # what kind it is, is the fact
        facts["too_long"] = [cls.__name__ for cls in type(error).__mro__]
    facts["unfinished_after_refusal"] = llm.has_unfinished_requests()
    own = llm.add_request("mine", {"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=100, ignore_eos=True))
    llm.step()
    facts["reset_while_running"] = llm.reset_prefix_cache()
    llm.abort_request([own], internal=True)
    facts["unfinished_after_abort"] = llm.has_unfinished_requests()
    facts["reset_when_idle"] = llm.reset_prefix_cache()


def reload(facts: dict, llm: LLMEngine, folder: str) -> None:
    def weights():
        yield from load_file(Path(folder) / "model.safetensors").items()

    llm.collective_rpc(lambda worker: worker.model_runner.reload_weights(weights_iterator=weights()))
    llm.reset_prefix_cache()
    expected = forward_logps(NEW, PROMPT)
    facts["tied_head_is_stale_after_reload"] = gap(ask(llm, PROMPT, **SCORE), expected) > 1e-3
    facts["device"] = llm.collective_rpc(lambda worker: worker.device.type)
    llm.collective_rpc(
        lambda worker: dispatch_cpu_unquantized_gemm(worker.model_runner.get_model().lm_head, remove_weight=False)
    )
    llm.reset_prefix_cache()
    facts["gap_after_reload"] = gap(ask(llm, PROMPT, **SCORE), expected)


def runner(facts: dict, llm: LLMEngine) -> None:
    def look(worker) -> dict:
        runner = worker.model_runner
        return {
            "class": f"{type(runner).__module__}.{type(runner).__name__}",
            "has": [
                callable(runner._sample),
                hasattr(runner.discard_request_mask, "np"),
                isinstance(runner.input_batch.generators, dict),
                isinstance(runner.requests, dict),
                hasattr(runner.input_batch, "req_ids"),
            ],
        }

    facts["runner"] = llm.collective_rpc(look)[0]


def adapters(facts: dict, llm: LLMEngine, adapted: list[float], plain: list[float]) -> None:
    request = LoRARequest("seam", 1, str(FOLDER / "adapter"))
    llm.add_lora(request)
    facts["loras"] = sorted(llm.list_loras())
    facts["adapted_gap"] = gap(ask(llm, PROMPT, lora=request, **SCORE), adapted)
    llm.remove_lora(1)
    facts["loras_after_removal"] = sorted(llm.list_loras())
    misnamed = LoRARequest("seam", 2, str(FOLDER / "misnamed"))
    try:
        llm.add_lora(misnamed)
        facts["misnamed_gap_to_base"] = gap(ask(llm, PROMPT, lora=misnamed, **SCORE), plain)
    except Exception as error:  # what kind it is, is the fact
        facts["misnamed_refused"] = f"{type(error).__name__}: {error}"


OLD, NEW = tiny_qwen3(0, tied=True), tiny_qwen3(1, tied=True)


def make_adapters() -> list[float]:
    """Writes both adapters; the log-probs that the right one gives."""
    torch.manual_seed(3)
    base = tiny_qwen3(0, tied=True)
    adapted = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"]))
    for name, p in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, std=0.2)
    adapted.save_pretrained(FOLDER / "adapter")
    adapted.save_pretrained(FOLDER / "misnamed")
    file = FOLDER / "misnamed" / "adapter_model.safetensors"
    save_file({k.replace(".layers.", ".strata."): v for k, v in load_file(file).items()}, file)
    return forward_logps(adapted, PROMPT)


def main() -> None:
    facts: dict = {}
    old, new = save(OLD, FOLDER / "old"), save(NEW, FOLDER / "new")
    adapted = make_adapters()
    plain = forward_logps(OLD, PROMPT)
    llm = engine(old)
    facts["children"] = len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
    prompt_scores(facts, llm, plain)
    sampled(facts, llm)
    refusals_and_aborts(facts, llm)
    runner(facts, llm)
    reload(facts, llm, new)
    adapters(facts, engine(old, enable_lora=True, max_lora_rank=8, max_loras=1, max_cpu_loras=2), adapted, plain)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
