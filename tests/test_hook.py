"""The version of a turn is the word of who served it."""

import asyncio

import pytest

from skyrl_thundersync.rollout.hook import TurnHook
from skyrl_thundersync.stream.ledger import Ledger, LedgerError
from skyrl_thundersync.stream.sources import TrajectoryId

TRAJECTORY = TrajectoryId("task", 0)


class Silent:
    """A client that reports no version with its answers, as SkyRL's over HTTP does."""

    async def generate(self, input_batch, model=None):
        return {"response_ids": [[7]], "response_logprobs": [[-1.0]], "stop_reasons": ["stop"], "responses": ["x"]}


def sampled(served_version):
    sources = []
    hook = TurnHook(Silent(), lambda: 7, 0, served_version)
    with hook.armed([TRAJECTORY], sources.append):
        asyncio.run(hook.generate({"prompt_token_ids": [[1, 2]], "session_ids": [str(TRAJECTORY)]}))
    return sources[0]


def test_a_server_that_is_behind_is_found_out_where_its_client_reports_no_version():
    async def behind():
        return 6

    source = sampled(behind)
    assert source.policy_version == 6
    with pytest.raises(LedgerError, match="6"):
        Ledger(7, {"task": 1}).sampled(source)


def test_nobody_to_ask_is_an_error():
    with pytest.raises(RuntimeError, match="does not say which policy version"):
        sampled(None)
