"""Environments by name: the terminal, and classes of one's own, also where SkyRL sums up what episodes measured."""

import sys

import pytest
import skyrl_gym
from skyrl_gym.envs.registration import registry
from skyrl_gym.metrics import aggregate_for_environment

from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.tasks import environments
from skyrl_thundersync.tasks.survey import RowChecks
from skyrl_thundersync.tasks.terminal_env import ENV_ID, register_terminal_env

MINE = """
from skyrl_gym.envs.base_text_env import BaseTextEnv

class Mine(BaseTextEnv):
    def __init__(self, env_config, extras):
        super().__init__()

class Other:
    pass
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "my_env.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "my_env:Mine"
    sys.modules.pop("my_env", None)
    registry.pop("my_env:Mine", None)


def test_skyrl_sums_up_what_episodes_measured(mine):
    register_terminal_env(None)
    environments.require(mine)
    for name in (ENV_ID, mine):
        assert aggregate_for_environment(name, [{"turns": 1}, {"turns": 3}])["turns"] == 2


def test_a_class_of_ones_own_is_made_by_the_name_of_it(mine):
    assert RowChecks("terminal").check({"prompt": [{"role": "user", "content": "x"}], "env_class": mine}, True)[1] == []
    assert type(skyrl_gym.make(mine, env_config={}, extras={})).__name__ == "Mine"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("terminl", "'terminal'"),
        ("my_env:Mien", "'Mine'"),
        ("my_env:Other", "is no environment"),
        ("no_env:Mine", "'no_env' cannot be imported"),
    ],
)
def test_what_is_wrong_with_a_name_is_a_problem_of_its_rows(mine, name, says):
    with pytest.raises(ConfigError, match=says):
        environments.require(name)
    (problem,) = RowChecks(name).check({"prompt": [{"role": "user", "content": "x"}]}, True)[1]
    assert problem[0] == "env_class" and says in problem[1]
