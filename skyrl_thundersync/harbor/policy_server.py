"""The policy behind a loopback HTTP server, for agents that run in another process: Harbor's own, and any chat agent.

    POST /session/NAME/v1/completions        token ids in, token ids out (vLLM's return_token_ids)
    POST /session/NAME/v1/chat/completions   OpenAI's chat API: text in, text out, captured as token ids (chat_capture.py)

A session is a trajectory: its name goes to the inference client with every request. Where that client is the turn hook, each
answer becomes a source before it is returned, so that a trial of any agent streams into an update like a rollout of our own.

Unlike vLLM's own server, sampling is the run's and not the agent's: a request may ask for fewer tokens, and its temperature
and the like do not count, because the learner's log-probs are those of the run's distribution. A chat request that is
repeated word for word, as HTTP clients do after a lost connection, gets the answer that was sampled: it was released already.
"""

from __future__ import annotations

import asyncio
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from skyrl_thundersync.harbor.capture import (
    REWRITTEN,
    CapturedChat,
    MessageError,
    RewrittenHistoryError,
    plain_messages,
)
from skyrl_thundersync.tasks.conversation import Conversation
from skyrl_thundersync.tasks.plain_contents import PlainContents

MAX_REQUEST_BYTES = 64 << 20
HOST = "127.0.0.1"
NOT_OFFERED = ("stream", "tools", "tool_choice", "response_format", "logit_bias", "stop", "echo", "suffix")


@dataclass
class _Session:
    chat: CapturedChat
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    sampled_tokens: int = 0
    finished: bool = False
    answered: tuple[list[dict[str, str]], dict[str, Any]] | None = None


class PolicyServer:
    """An async context manager; serves while it is open.

    Args:
        client: an inference client (`rollout.client`, or the turn hook around it), used on this event loop.
        tokenizer: the policy's.
        model: the name it is served by.
        sampling: the run's sampling parameters; `max_tokens` and `logprobs` among them.
        max_context: most tokens of context and answer together.
        rewritten: what to do about a chat history that does not extend what was said: "refuse" or "branch".
    """

    def __init__(
        self,
        client: Any,
        tokenizer: Any,
        model: str,
        sampling: Mapping[str, Any],
        max_context: int,
        rewritten: str = "refuse",
    ) -> None:
        """Raises ValueError for an unknown `rewritten`, or with "refuse" for a template that rewrites earlier messages."""
        if rewritten not in REWRITTEN:
            raise ValueError(f"rewritten={rewritten!r}: must be one of {', '.join(REWRITTEN)}")
        self._client, self._tokenizer, self._model = client, PlainContents.of(tokenizer), model
        self._sampling, self._max_context, self._rewritten = dict(sampling), max_context, rewritten
        try:
            Conversation.check_template(tokenizer)
            self._append_only = True
        except ValueError:
            if rewritten == "refuse":
                raise
            self._append_only = False
        self._sessions: dict[str, _Session] = {}
        self._failure: BaseException | None = None
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def __aenter__(self) -> PolicyServer:
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post("/session/{session}/v1/completions", self._answering(self._completions))
        app.router.add_post("/session/{session}/v1/chat/completions", self._answering(self._chat))
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, 0)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._runner.cleanup()

    def url(self, session: str) -> str:
        """Where an agent finds the policy for its trajectory; OpenAI clients append /v1 to it for their base URL."""
        return f"http://{HOST}:{self._port}/session/{urllib.parse.quote(session, safe='')}"

    def sampled_tokens(self, session: str) -> int:
        """Tokens sampled for a session so far; 0 for one that never asked."""
        return self._sessions[session].sampled_tokens if session in self._sessions else 0

    def branches(self, session: str) -> int:
        """How often a session went on from a rewritten history."""
        return self._sessions[session].chat.branches if session in self._sessions else 0

    async def finish(self, session: str) -> int:
        """No answer follows: wait for one under way, refuse any after it. Returns `sampled_tokens`.

        Raises:
            Exception: what went wrong in here, if anything did, for whatever session.
        """
        entry = self._session(session)
        async with entry.lock:
            entry.finished = True
        await self._client.finish_session(session)
        self.raise_failure()
        return entry.sampled_tokens

    def raise_failure(self) -> None:
        """Raise what ended a request other than by the agent's doing: an engine that failed, a history that was refused."""
        if self._failure is not None:
            raise self._failure

    def _session(self, name: str) -> _Session:
        if name not in self._sessions:
            self._sessions[name] = _Session(CapturedChat(self._tokenizer, self._append_only, self._rewritten))
        return self._sessions[name]

    def _answering(self, handler: Any) -> Any:
        async def handle(request: web.Request) -> web.Response:
            session = request.match_info["session"]
            entry = self._session(session)
            try:
                body = await request.json()
                for name in NOT_OFFERED:
                    if body.get(name):
                        raise MessageError(f"{name} is not offered")
                if body.get("n", 1) != 1:
                    raise MessageError("n > 1 is not offered: every answer is part of the trajectory")
                async with entry.lock:
                    if entry.finished:
                        return _error(410, "finished", f"the trajectory of session {session} is over")
                    return web.json_response(await handler(session, entry, body))
            except _ContextFull as error:
                return _error(400, "context_length_exceeded", str(error))
            except (MessageError, ValueError) as error:
                if isinstance(error, RewrittenHistoryError):
                    self._failure = self._failure or error
                return _error(400, "invalid_request_error", str(error))
            except Exception as error:  # goes to whoever waits for the trial, not only into an answer
                self._failure = self._failure or error
                return _error(500, "server_error", f"{type(error).__name__}: {error}")

        return handle

    async def _completions(self, session: str, entry: _Session, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body.get("prompt")
        if not isinstance(prompt, list) or not all(isinstance(token, int) for token in prompt):
            raise MessageError("prompt must be a list of token ids")
        ids, logps, reason = await self._sample(session, entry, prompt, body)
        choice = {
            "index": 0,
            "text": self._tokenizer.decode(ids, skip_special_tokens=True),
            "token_ids": ids,
            "logprobs": {"token_logprobs": logps},
            "finish_reason": reason,
        }
        return self._answer("text_completion", choice, len(prompt), len(ids))

    async def _chat(self, session: str, entry: _Session, body: dict[str, Any]) -> dict[str, Any]:
        messages = plain_messages(body.get("messages"))
        if entry.answered is not None and entry.answered[0] == messages:
            return entry.answered[1]
        context = list(entry.chat.context(messages))
        ids, _, reason = await self._sample(session, entry, context, body)
        message = {"role": "assistant", "content": entry.chat.sampled(ids)}
        choice = {"index": 0, "message": message, "finish_reason": reason}
        answer = self._answer("chat.completion", choice, len(context), len(ids))
        entry.answered = (messages, answer)
        return answer

    async def _sample(
        self, session: str, entry: _Session, prompt: list[int], body: Mapping[str, Any]
    ) -> tuple[list[int], list[float], str]:
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or self._sampling["max_tokens"]
        room = min(int(asked), self._sampling["max_tokens"], self._max_context - len(prompt))
        if room < 1:
            raise _ContextFull(
                f"This model's maximum context length is {self._max_context} tokens; the messages have {len(prompt)}."
            )
        output = await self._client.generate(
            {
                "prompt_token_ids": [prompt],
                "sampling_params": {**self._sampling, "max_tokens": room},
                "session_ids": [session],
            }
        )
        ids = list(output["response_ids"][0])
        entry.sampled_tokens += len(ids)
        return ids, list(output["response_logprobs"][0]), output["stop_reasons"][0]

    def _answer(self, kind: str, choice: dict[str, Any], prompt: int, sampled: int) -> dict[str, Any]:
        usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
        made = int(time.time())
        return {"id": f"{kind}-{made}", "object": kind, "created": made, "model": self._model} | {
            "choices": [choice],
            "usage": usage,
        }


class _ContextFull(ValueError):
    """The context leaves no room for an answer."""


def _error(status: int, code: str, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": code, "code": code}}, status=status)
