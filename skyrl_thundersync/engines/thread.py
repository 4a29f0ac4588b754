"""One vLLM engine inside this process, stepped by one thread, behind awaitable calls.

vLLM's own asynchronous engine starts further processes, each importing vLLM again; `LLMEngine` without multiprocessing
does not, and batches continuously just the same: requests that arrive while a step runs join the next one. Unlike
vLLM's, this loop fails loudly: whatever its thread raises ends every waiting and every later call, with that traceback.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from skyrl_thundersync.stream.sources import Support

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.logprobs import FlatLogprobs
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine

    from skyrl_thundersync.hosts.skyrl.config import TrainConfig


class EngineFailedError(RuntimeError):
    """The engine's thread died; the message carries its original traceback."""


class RefusedRequestError(ValueError):
    """A request that vLLM cannot serve (its length, its ids, its parameters). The engine goes on."""


@dataclass(frozen=True)
class EngineSpec:
    """What one vLLM engine is built from.

    Attributes:
        model: folder (or hub name) of an HF checkpoint with its tokenizer.
        dtype: "bfloat16", "float32" or "auto".
        max_model_len: context limit in tokens, prompt and answer together; None takes the model's own.
        max_num_seqs: requests in one step at most.
        max_num_batched_tokens: tokens in one step at most; longer prompts are prefilled in chunks.
        prefix_caching, chunked_prefill: vLLM's switches.
        kv_cache_gib: size of the K/V cache (CPU only; on CUDA vLLM takes its usual share of the device).
        block_size: tokens a K/V block holds (CPU only: a multiple of 32). Prefixes are cached in whole blocks, so a
            turn recomputes half a block more than it adds, on average.
        seed: of the sampler, for requests without one of their own.
        lora_rank: rank of the adapters that will be published; 0: the weights themselves are.
        tensor_parallel_size: devices that the engine is split over, a process of its own each where it is more than one.
        options: further arguments of vLLM's engine; they come before those named here.
        threads: OpenMP threads (CPU only).
        enforce_eager: no compilation: starts sooner, decodes slower.
        device: "cpu" or "cuda".
        log_path: file for the process's output; None leaves it on the terminal.
        published: folder that its machine has the published versions in, by name; None: they are at the path that is given.
    """

    model: str
    dtype: str = "bfloat16"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    prefix_caching: bool = True
    chunked_prefill: bool = True
    kv_cache_gib: float = 1.0
    block_size: int = 32
    seed: int = 0
    lora_rank: int = 0
    tensor_parallel_size: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 1
    enforce_eager: bool = True
    device: str = "cpu"
    log_path: str | None = None
    published: str | None = None

    def with_log(self, path: str | Path | None) -> EngineSpec:
        return replace(self, log_path=None if path is None else str(path))


def _room_for(rank: int) -> int:
    """The least size of vLLM's that holds adapters of `rank`: it has buffers of a few sizes only."""
    from vllm.config.lora import MaxLoRARanks

    sizes = [size for size in get_args(MaxLoRARanks) if size >= rank]
    if not sizes:
        raise ValueError(f"vLLM serves adapters up to rank {max(get_args(MaxLoRARanks))}; this one has rank {rank}")
    return min(sizes)


def build_engine(spec: EngineSpec) -> LLMEngine:
    """Start vLLM in this process. Call it before anything imports torch: thread counts are read at import.

    Raises:
        FileNotFoundError: `spec.model` looks like a folder and is not there.
        RuntimeError: torch is here already, with another number of threads.
    """
    if spec.model.startswith(("/", ".", "~")) and not Path(spec.model).expanduser().is_dir():
        raise FileNotFoundError(f"no model folder {spec.model}")
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING", VLLM_NO_USAGE_STATS="1")
    if spec.options.get("enforce_eager", spec.enforce_eager):
        # vLLM compiles some helpers (log-prob ranks, for one) even so: half a minute at the first request on two cores.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    on_cpu: dict[str, Any] = {}
    if spec.device == "cpu":
        # Pinned threads of several engines would share a core while others idle: let the kernel place them.
        os.environ.update(OMP_NUM_THREADS=str(spec.threads), VLLM_CPU_OMP_THREADS_BIND="nobind")
        on_cpu = dict(kv_cache_memory_bytes=int(spec.kv_cache_gib * 2**30), block_size=spec.block_size)
    import torch

    if spec.device == "cpu" and torch.get_num_threads() != spec.threads:
        # Setting it now would reach this thread only, and vLLM's kernels check that all threads agree.
        raise RuntimeError(
            f"torch was imported with {torch.get_num_threads()} threads before an engine with {spec.threads}: start its "
            f"process with OMP_NUM_THREADS={spec.threads}"
        )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from skyrl_thundersync.engines.weight_worker import EXTENSION

    lora = {}
    if spec.lora_rank:
        lora = dict(enable_lora=True, max_lora_rank=_room_for(spec.lora_rank), max_loras=1, max_cpu_loras=2)
    arguments: dict[str, Any] = dict(
        model=spec.model,
        dtype=spec.dtype,
        max_model_len=spec.max_model_len,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        enable_prefix_caching=spec.prefix_caching,
        enable_chunked_prefill=spec.chunked_prefill,
        enforce_eager=spec.enforce_eager,
        seed=spec.seed,
        disable_log_stats=True,
        language_model_only=True,  # of a vision-language checkpoint; others have nothing else
        tensor_parallel_size=spec.tensor_parallel_size,
        worker_extension_cls=EXTENSION,
    )
    if spec.tensor_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"  # inside of a Ray actor vLLM would start actors of its own
    engine = LLMEngine.from_engine_args(EngineArgs(**{**arguments, **on_cpu, **lora, **spec.options}))
    if spec.device == "cpu":
        from skyrl_thundersync.engines.cpu_seeds import take_back_discarded

        engine.collective_rpc(take_back_discarded)
    return engine


@dataclass(frozen=True)
class _Request:
    """A request on its way to the thread; `done` is resolved on `loop`."""

    request_id: str
    prompt: dict[str, Any]
    params: SamplingParams
    lora: LoRARequest | None
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future


@dataclass(frozen=True)
class _Call:
    """A function of the engine to run between two steps."""

    function: Callable[[LLMEngine], Any]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future


@dataclass(frozen=True)
class _Abort:
    request_id: str


def _resolve(done: asyncio.Future, value: Any = None, error: BaseException | None = None) -> None:
    if done.done():  # cancelled by its caller
        return
    if error is None:
        done.set_result(value)
    else:
        done.set_exception(error)


class EngineThread:
    """The thread that owns an `LLMEngine`. All methods are called from one asyncio loop.

    `steps` counts the engine's steps: fewer than the tokens sampled, as far as requests ran together.
    """

    def __init__(self, engine: LLMEngine, name: str) -> None:
        self.engine = engine
        self.name = name
        self._inbox: queue.SimpleQueue[_Request | _Call | _Abort | None] = queue.SimpleQueue()
        self._waiting: dict[str, tuple[str, _Request]] = {}  # ours -> (vLLM's id, request); the thread's own
        self._pending: set[asyncio.Future] = set()  # the loop's own
        self._failure: str | None = None
        self._count = 0
        self.steps = 0
        self._thread = threading.Thread(target=self._run, name=f"{name}-steps", daemon=True)
        self._thread.start()

    async def submit(
        self, prompt: dict[str, Any], params: SamplingParams, lora: LoRARequest | None = None
    ) -> RequestOutput:
        """Serve one request; cancelling the call takes it out of the engine.

        Raises:
            RefusedRequestError: vLLM does not take this request.
            EngineFailedError: the thread died, before or meanwhile.
        """
        self._count += 1
        request_id = str(self._count)
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        try:
            return await self._post(_Request(request_id, prompt, params, lora, loop, done))
        except asyncio.CancelledError:
            self._inbox.put(_Abort(request_id))
            raise

    async def call(self, function: Callable[[LLMEngine], Any]) -> Any:
        """Run `function(engine)` on the thread between two steps. What it raises ends the engine: its state is open."""
        loop = asyncio.get_running_loop()
        return await self._post(_Call(function, loop, loop.create_future()))

    async def stop(self) -> None:
        """End the thread after the step it is in. Calls still waiting fail."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    async def _post(self, item: _Request | _Call) -> Any:
        if self._failure is not None:
            raise EngineFailedError(self._failure)
        self._pending.add(item.done)
        item.done.add_done_callback(self._pending.discard)
        self._inbox.put(item)
        return await item.done

    def _run(self) -> None:
        loop: asyncio.AbstractEventLoop | None = None
        try:
            while True:
                idle = not self.engine.has_unfinished_requests()
                while idle or not self._inbox.empty():
                    item = self._inbox.get()
                    if item is None:
                        raise SystemExit("the engine was shut down")
                    if isinstance(item, _Abort):
                        self._abort(item)
                    else:
                        loop = item.loop
                        self._admit(item) if isinstance(item, _Request) else self._execute(item)
                    idle = not self.engine.has_unfinished_requests()
                self.steps += 1
                for output in self.engine.step():
                    if output.finished:
                        _, request = self._waiting.pop(output.request_id)
                        request.loop.call_soon_threadsafe(_resolve, request.done, output)
        except BaseException:  # noqa: BLE001 - nothing may be lost: every caller gets this traceback
            failure = f"the engine {self.name} failed and serves nothing any more:\n{traceback.format_exc()}"
            if loop is None:
                self._failure = failure
            elif not loop.is_closed():
                loop.call_soon_threadsafe(self._fail_all, failure)

    def _fail_all(self, failure: str) -> None:
        self._failure = failure
        for done in list(self._pending):
            _resolve(done, error=EngineFailedError(failure))

    def _admit(self, request: _Request) -> None:
        from vllm.exceptions import VLLMClientError

        try:
            engine_id = self.engine.add_request(
                request.request_id, request.prompt, request.params, lora_request=request.lora
            )
        except (
            ValueError,
            TypeError,
            VLLMClientError,
        ) as error:  # vLLM's validation, before anything of the engine changed
            refusal = RefusedRequestError(f"the engine {self.name} refused a request: {error}")
            refusal.__cause__ = error
            request.loop.call_soon_threadsafe(_resolve, request.done, None, refusal)
            return
        self._waiting[request.request_id] = engine_id, request

    def _abort(self, abort: _Abort) -> None:
        if (entry := self._waiting.pop(abort.request_id, None)) is not None:
            self.engine.abort_request([entry[0]], internal=True)

    def _execute(self, call: _Call) -> None:
        call.loop.call_soon_threadsafe(_resolve, call.done, call.function(self.engine))


def logprobs_of(positions: Any, ids: list[int], first: int, cached: int = 0) -> list[float]:
    """log-probs (natural log) of `ids[first:]` out of vLLM's per-position prompt or sample log-probs.

    Of a prompt whose first `cached` tokens came from the prefix cache, vLLM's model runner V1 returns all positions, those of
    cached tokens without meaning; V2, the one on CUDA, leaves `cached` of them out. In both the last one is the last token's.

    Raises:
        RuntimeError: vLLM returned another number of positions, or a position without its id.
    """
    left_out = _left_out(positions, ids, first, cached)
    values = []
    for index in range(first, len(ids)):
        position = positions[index - left_out]
        if position is None or ids[index] not in position:
            raise RuntimeError(f"vLLM returned no log-prob of token {ids[index]} at position {index}")
        values.append(float(position[ids[index]].logprob))
    return values


def best_of(positions: FlatLogprobs, ids: list[int], first: int, k: int, cached: int = 0) -> Support:
    """The k most probable tokens at each position of `ids[first:]`, out of vLLM's flat prompt log-probs.

    Raises RuntimeError as `logprobs_of`, or where positions have another number of them.
    """
    import numpy as np

    begin = first - _left_out(positions, ids, first, cached)
    spans = list(zip(positions.start_indices[begin:], positions.end_indices[begin:], strict=True))
    widths = {end - start - 1 for start, end in spans}  # the token itself comes first, then the best, by rank
    if widths != {k}:
        raise RuntimeError(f"vLLM returned {sorted(widths)} most probable tokens a position, and {k} were asked for")
    at = [slice(start + 1, end) for start, end in spans]
    return Support(
        np.array([positions.token_ids[s] for s in at], dtype=np.int32),
        np.array([positions.logprobs[s] for s in at], dtype=np.float32),
    )


def _left_out(positions: Any, ids: list[int], first: int, cached: int) -> int:
    left_out = len(ids) - len(positions)
    if left_out not in (0, cached) or 0 < left_out >= first:
        raise RuntimeError(
            f"vLLM returned {len(positions)} log-prob positions for {len(ids)} tokens, {cached} of them cached, and those "
            f"from {first} on are needed"
        )
    return left_out


def kv_cache_gib(cfg: TrainConfig) -> float:
    """K/V cache of a rollout replica without GPUs: `kv_cache_memory_bytes`, the name that vLLM gives it, or the default."""
    given = cfg.generator.inference_engine.engine_init_kwargs.get("kv_cache_memory_bytes")
    return EngineSpec.kv_cache_gib if given is None else given / 2**30
