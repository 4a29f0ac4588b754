"""What of an objective is checked at start-up, and by what name it is found."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.hosts.skyrl.compose import build_config
from skyrl_thundersync.hosts.skyrl.defaults import apply_host_defaults
from skyrl_thundersync.hosts.skyrl.validate import option_problems
from skyrl_thundersync.objectives import registry
from skyrl_thundersync.objectives.check import problems
from skyrl_thundersync.objectives.contract import NONE, OWN, Objective
from skyrl_thundersync.objectives.grpo import LAWS, Grpo
from skyrl_thundersync.objectives.opd import Opd
from skyrl_thundersync.options.schema import OBJECTIVES

MINE = """
from dataclasses import dataclass
from skyrl_thundersync.objectives.opd import Opd

@dataclass
class Mine(Opd):
    strength: float = 1.0

    def loss(self, tokens):
        return self.strength * super().loss(tokens)

    def plain_weight(self, token):
        return self.strength * super().plain_weight(token)
"""


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("law", LAWS)
def test_our_own_keep_it(name, law):
    settings = registry.settings(name, {"law": law, "epsilon": 1e-6}, {})
    assert problems(registry.build(name, settings)) == []


@dataclass
class Reinforce(Objective):
    """The trajectory's own reward alone."""

    rewards = OWN
    divides_by_tokens = False

    def reward_loss(self, tokens, weight, n_scored):
        return -weight * tokens.logp_T

    def plain_weight(self, token):
        return token.reward


def test_one_of_its_own_reward_keeps_it():
    assert problems(Reinforce()) == []


class Normalised(Opd):
    def loss(self, tokens):
        whole = super().loss(tokens)
        return whole / whole.detach().std()


class Summed(Opd):
    def loss(self, tokens):
        return super().loss(tokens).sum()


class Frozen(Opd):
    def loss(self, tokens):
        return tokens.scores_T - tokens.logp_T.detach()


class OtherThanItSays(Opd):
    def plain_weight(self, token):
        return 2 * super().plain_weight(token)


class Silent(Objective):
    pass


class WeighsNothing(Reinforce):
    rewards = NONE


class NoRewardLoss(Opd):
    rewards = OWN


class Unheard(Opd):
    rewards = "some"


class Square(Reinforce):
    def reward_loss(self, tokens, weight, n_scored):
        return -(weight**2) * tokens.logp_T


class NotAffine(Grpo):
    def affine(self, rewards, origin):
        b, c = super().affine(rewards, origin)
        return b, c * (1 + origin)


class WithoutTeacher(Opd):
    needs_teacher = False


class Unsaid(Opd):
    def plain_weight(self, token):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (Normalised, "a token depends on others"),
        (Summed, "one differentiable number a token"),
        (Frozen, "not differentiable"),
        (OtherThanItSays, "says two things"),
        (Silent, "nothing to learn from"),
        (WeighsNothing, "nothing would weigh"),
        (NoRewardLoss, "has no `reward_loss`"),
        (Unheard, "rewards='some'"),
        (Square, "not linear in its weight"),
        (NotAffine, "depend on the origin"),
        (WithoutTeacher, "raised TypeError"),
        (Unsaid, "has no `plain_weight`"),
    ],
)
def test_what_breaks_it_is_named(broken, says):
    found = problems(broken())
    assert found and says in found[0] and broken.__name__ in found[0]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The working folder holds mine.py."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def config(*arguments):
    cfg = build_config(["+config=opd/qwen3.8-27b", *arguments])
    apply_host_defaults(cfg)
    return cfg


def test_a_class_in_the_working_folder_is_an_objective_with_options(mine):
    cfg = config("thundersync.objective=mine:Mine", "thundersync.objective_options.strength=2")
    assert registry.of(cfg.thundersync).strength == 2
    assert not [p for p in option_problems(cfg) if "objective" in p]


def test_an_installed_package_offers_one_by_name(mine):
    info = mine / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[skyrl_thundersync.objectives]\nstrong = mine:Mine\n")
    script = (
        "from skyrl_thundersync.hosts.skyrl.compose import build_config\n"
        "from skyrl_thundersync.objectives.registry import of\n"
        "print(of(build_config(['thundersync.objective=strong']).thundersync))"
    )
    root = Path(registry.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": f"{mine}:{root}"},
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert "Mine(strength=1.0)" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["thundersync.objective=odp"], ["'opd'", "module:Class", "command line"]),
        (["thundersync.objective=mine:Mien"], ["mine.py", "'Mine'"]),
        (["thundersync.objective=nothing_there:Mine"], ["'nothing_there'", "working folder"]),
        (["thundersync.objective=json:JSONDecoder"], ["is no objective", "Objective"]),
        (["thundersync.objective=mine:Mine", "thundersync.objective_options.strenght=2"], ["options.strength'"]),
        (["thundersync.objective=mine:Mine", "thundersync.objective_options.strength=much"], ["expected float"]),
        (["thundersync.objective_options.strength=2"], ["has: no options"]),
        (["thundersync.objective=mixed", "thundersync.objective_options.law=rloo"], ["thundersync.grpo.law"]),
        (["thundersync.objective=mixed", "thundersync.objective_options.beta=.inf"], ["must be finite"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_the_right_name(mine, arguments, says):
    with pytest.raises(ConfigError) as refusal:
        config(*arguments)
    for part in says:
        assert part in str(refusal.value)


def test_a_module_that_raises_is_said_to(mine):
    (mine / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match="'broken' cannot be imported: ZeroDivisionError"):
        config("thundersync.objective=broken:Mine")
