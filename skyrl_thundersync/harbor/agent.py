"""An agent for Harbor that samples token-in token-out from a served policy and emits each turn as it happens.

    harbor run -p TASKS -a skyrl_thundersync.harbor.agent:ThunderSyncAgent -m MODEL \
        --ak url=http://127.0.0.1:8000 --ak tokenizer=/path/to/model

`url` is a vLLM server (`vllm serve`, or SkyRL's inference servers) asked through /v1/completions with token ids; MODEL is
the name it serves. Unlike agents that speak the chat API, no text is ever encoded twice: the context of a turn is the context
of the turn before, the ids that were sampled, and the encoding of the observation alone. A chat template for which that is
not what it would have written itself is refused at set-up.

Commands are the terminal environment's: the first fenced bash block, `submit` ends the episode. Harbor runs every command
in a process of its own, so the agent keeps working directory and exported variables itself.

Each turn goes, as soon as it is sampled and before its command runs, to `turns.jsonl` in the agent's log folder, to
`on_turn` where a program set one, and at the end into Harbor's `rollout_details`. Imported by Harbor only; needs Harbor
0.25 and Transformers, neither torch nor SkyRL.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from harbor.models.agent.rollout_detail import RolloutDetail

from skyrl_thundersync import __version__
from skyrl_thundersync.harbor.bounded_command import bounded, without_halves
from skyrl_thundersync.tasks.conversation import Conversation
from skyrl_thundersync.tasks.terminal_text import describe_text, opens_thought, parse_action

STATE = "/tmp/.thundersync-state"
REQUEST_TIMEOUT_S = 1800.0


class PolicyError(RuntimeError):
    """The policy's server did not answer as agreed; says what it said."""


@dataclass(frozen=True)
class Turn:
    """One sampled turn: `prompt_ids` (context), `sampled_ids` and their natural log-probs, of the same length."""

    session: str
    turn: int
    prompt_ids: list[int]
    sampled_ids: list[int]
    logps: list[float]
    finish_reason: str
    at: float


class ThunderSyncAgent(BaseAgent):
    """See the module.

    Keyword arguments (`--ak name=value`): url, tokenizer (folder or hub name; default: the model name), max_turns,
    max_tokens (of a turn), max_context, temperature, command_timeout_s, output_limit_bytes. Defaults are the paper's limits.
    """

    on_turn: Callable[[Turn], None] | None = None
    """Set by a program that runs trials in its own process, to get each turn as it happens."""

    @staticmethod
    def name() -> str:
        return "thundersync"

    def version(self) -> str:
        return __version__

    def __init__(
        self,
        logs_dir: Path,
        model_name: str | None = None,
        *,
        url: str = "http://127.0.0.1:8000",
        tokenizer: str | None = None,
        max_turns: int = 300,
        max_tokens: int = 1024,
        max_context: int = 131072,
        temperature: float = 1.0,
        command_timeout_s: float = 180.0,
        output_limit_bytes: int = 16384,
        **kwargs: Any,
    ) -> None:
        super().__init__(logs_dir=logs_dir, model_name=model_name, **kwargs)
        if not model_name:
            raise ValueError("name the served model with -m")
        self._url, self._tokenizer_name = str(url).rstrip("/"), tokenizer or model_name
        self._max_turns, self._max_tokens, self._max_context = int(max_turns), int(max_tokens), int(max_context)
        self._temperature = float(temperature)
        self._command_timeout_s, self._output_limit = float(command_timeout_s), int(output_limit_bytes)
        self._turns: list[Turn] = []

    async def setup(self, environment: BaseEnvironment) -> None:
        """Load the tokenizer and check that its template only appends.

        Raises:
            ValueError: it does not; the message names the first token that differs. Or as `opens_thought`.
        """
        from transformers import AutoTokenizer

        self._tokenizer = await asyncio.to_thread(AutoTokenizer.from_pretrained, self._tokenizer_name)
        Conversation.check_template(self._tokenizer)
        self._thought_opened = opens_thought(self._tokenizer)

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Turns until `submit`, the limit of turns, or a context that leaves no room for one more turn."""
        talk = Conversation(self._tokenizer, [{"role": "user", "content": instruction}])
        self.logs_dir.mkdir(parents=True, exist_ok=True)
        try:
            with (self.logs_dir / "turns.jsonl").open("w", encoding="utf-8", buffering=1) as log:
                for number in range(self._max_turns):
                    if len(talk.ids) + self._max_tokens > self._max_context:
                        break
                    turn = await self._sample(number, talk.ids)
                    self._turns.append(turn)
                    log.write(json.dumps(asdict(turn)) + "\n")
                    if self.on_turn is not None:
                        self.on_turn(turn)
                    text = talk.add_sampled(turn.sampled_ids)
                    command, submitted = parse_action(text, self._thought_opened)
                    observation = await self._execute(environment, command) if command else "(no command)"
                    if submitted:
                        break
                    talk.add_observation(observation)
        finally:  # also when Harbor's time limit cancels this
            self._report(context)

    async def _sample(self, number: int, ids: list[int]) -> Turn:
        body = {
            "model": self.model_name,
            "prompt": ids,
            "max_tokens": self._max_tokens,
            "temperature": self._temperature,
            "logprobs": 0,
            "return_token_ids": True,
        }
        answer = await asyncio.to_thread(_post, f"{self._url}/v1/completions", body)
        choice = answer["choices"][0]
        sampled, logprobs = choice.get("token_ids"), choice.get("logprobs")
        if not sampled or logprobs is None or len(logprobs["token_logprobs"]) != len(sampled):
            raise PolicyError(
                f"{self._url} returned no token ids with their log-probs; it needs vLLM's return_token_ids"
            )
        session = str(self.context_id or self.session_id or self.logs_dir.parent.name)
        return Turn(
            session,
            number,
            list(ids),
            list(sampled),
            list(logprobs["token_logprobs"]),
            choice["finish_reason"],
            time.time(),
        )

    async def _execute(self, environment: BaseEnvironment, command: str) -> str:
        # Both limits are inside the container: Harbor's own ends the client and leaves the processes, and Harbor keeps all
        # that a command printed until it ends.
        keep = f'{{ export -p; echo "cd $(printf %q "$PWD")"; }} >{STATE}'
        inner = f"[ -f {STATE} ] && . {STATE}\ntrap {shlex.quote(keep)} EXIT\neval {shlex.quote(command)}"
        limited = f"timeout -k 5 {self._command_timeout_s:g} bash -c {shlex.quote(inner)}"
        result = await environment.exec(
            bounded(limited, self._output_limit), timeout_sec=int(self._command_timeout_s) + 30
        )
        return describe_text(
            without_halves(result.stdout or ""),
            result.return_code,
            timed_out=result.return_code in (124, 137),
            timeout_s=self._command_timeout_s,
        )

    def _report(self, context: AgentContext) -> None:
        context.n_input_tokens = sum(len(turn.prompt_ids) for turn in self._turns)
        context.n_output_tokens = sum(len(turn.sampled_ids) for turn in self._turns)
        context.rollout_details = [
            RolloutDetail(
                prompt_token_ids=[turn.prompt_ids for turn in self._turns],
                completion_token_ids=[turn.sampled_ids for turn in self._turns],
                logprobs=[turn.logps for turn in self._turns],
            )
        ]


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise PolicyError(f"{url}: HTTP {error.code}: {error.read()[:500].decode('utf-8', 'replace')}") from error
    except urllib.error.URLError as error:
        raise PolicyError(f"{url}: {error.reason}") from error
