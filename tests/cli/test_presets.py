"""Presets and options: what is merged, what is refused, and that a refusal names the origin and the nearest right name."""

from pathlib import Path

import pytest

from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.hosts.skyrl.compose import build_config
from skyrl_thundersync.hosts.skyrl.config import TrainConfig
from skyrl_thundersync.hosts.skyrl.defaults import HOST_DEFAULTS, apply_host_defaults
from skyrl_thundersync.hosts.skyrl.door import to_dotlist
from skyrl_thundersync.hosts.skyrl.validate import option_problems
from skyrl_thundersync.options.choices import CHOICES
from skyrl_thundersync.options.presets import leaf_keys, own_presets, preset_names, resolve


def merged(*args: str):
    return resolve(args, TrainConfig, own_presets(), HOST_DEFAULTS, CHOICES)


@pytest.mark.parametrize("name", preset_names(own_presets()))
def test_every_shipped_preset_is_accepted(name):
    """Every option exists, has its type, and nothing in it is refused at start-up."""
    values = {key: leaf.value for key, leaf in merged(f"+config={name}").items()}
    values["trainer.policy_mini_batch_size"] = values["trainer.train_batch_size"]
    cfg = TrainConfig.from_cli_overrides(values)
    apply_host_defaults(cfg)
    assert option_problems(cfg) == []


def test_command_line_wins_over_preset_wins_over_defaults(tmp_path):
    (tmp_path / "mine.yaml").write_text("trainer: {logger: console, seed: 1}\n")
    leaves = merged(f"+config={tmp_path / 'mine.yaml'}", "trainer.seed=2")
    assert (leaves["trainer.seed"].value, leaves["trainer.seed"].origin) == (2, "command line")
    assert leaves["trainer.logger"].value == "console"
    assert str(tmp_path / "mine.yaml") in leaves["trainer.logger"].origin
    assert leaves["trainer.algorithm.use_kl_loss"].value is False


def test_a_preset_extends_another():
    base, lora = merged("+config=opd/qwen3.8-27b"), merged("+config=opd/qwen3.8-27b-lora")
    assert lora["thundersync.teacher.replicas"].value == base["thundersync.teacher.replicas"].value
    assert lora["trainer.policy.model.lora.rank"].value == 32
    assert "trainer.policy.model.lora.rank" not in base


def test_free_form_blocks_are_merged_key_by_key():
    leaves = merged(
        "generator.inference_engine.engine_init_kwargs.a.x=1", "generator.inference_engine.engine_init_kwargs.a.y=2"
    )
    assert leaves["generator.inference_engine.engine_init_kwargs"].value == {"a": {"x": 1, "y": 2}}


def test_values_survive_skyrls_own_parser():
    """What the command line passes on to SkyRL reads back to the same values, text that looks like a number included."""
    args = ["trainer.run_name='1e5'", "trainer.tags=[a, 'null']", "trainer.policy.optimizer_config.lr=1e-6"]
    leaves = merged(*args)
    again = merged(*to_dotlist(leaves))
    assert {k: v.value for k, v in again.items()} == {k: v.value for k, v in leaves.items()}
    assert leaves["trainer.run_name"].value == "1e5"
    assert leaves["trainer.policy.optimizer_config.lr"].value == 1e-6


def test_every_option_of_every_block_is_a_known_key():
    keys = list(leaf_keys(TrainConfig))
    assert len(keys) == len(set(keys))
    assert "thundersync.learner.zero_stage" in keys
    assert "generator.inference_engine.num_engines" in keys


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("trainer.sed=1", ["'trainer.sed'", "command line", "'trainer.seed'"]),
        ("trainer.n_samples_per_prompt=4", ["'generator.n_samples_per_prompt'"]),
        ("thundersync.techer.model=x", ["'thundersync.teacher'"]),
        ("bogus=1", ["'bogus'", "thundersync"]),
        ("thundersync.schedule=snyc", ["command line", "sync, group, thundersync", "'sync'"]),
        ("thundersync.objective=odp", ["'opd'"]),
        ("trainer.logger=tensorbord", ["'tensorboard'"]),
        ("trainer.seed=abc", ["trainer.seed='abc'", "expected int"]),
        ("trainer.eval_before_train=1", ["expected bool"]),
        ("trainer.train_batch_size=true", ["expected int"]),
        ("data.train_data=a.jsonl", ["expected List[str]", "data.train_data=[a.jsonl]"]),
        ("trainer.run_name=5", ["expected str", "Quote"]),
        ("trainer=5", ["a block of options"]),
        ("trainer.seed", ["key=value"]),
        ("+seed=1", ["'+' is for +plugin=NAME and +config=GROUP/NAME only"]),
        ("++trainer.seed=1", ["leave the '+' out"]),
        ("trainer.tags=[a", ["cannot be parsed"]),
        ("+config=opd/quickstrt", ["no such preset", "'opd/quickstart'"]),
        ("+config=/nowhere/x.yaml", ["no such file", "/nowhere/x.yaml"]),
    ],
)
def test_a_wrong_argument_is_refused_with_its_origin_and_the_right_name(argument, says):
    with pytest.raises(ConfigError) as refusal:
        merged(argument)
    for part in says:
        assert part in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("trainer: {sed: 1}", ["'trainer.sed'", "'trainer.seed'"]),
        ("thundersync: {learner: {accumulator: exakt}}", ["'exact'"]),
        ("trainer: [", ["not valid YAML"]),
        ("- 1", ["must hold a mapping"]),
        ("extends: opd/nothing", ["no such preset"]),
    ],
)
def test_a_wrong_preset_is_refused_by_its_path(tmp_path, text, says):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        merged(f"+config={path}")
    for part in [*says, *([str(path)] if "extends" not in text else [])]:
        assert part in str(refusal.value)


def test_presets_that_extend_each_other_in_a_circle_are_refused(tmp_path):
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text(f"extends: {two}\n")
    two.write_text(f"extends: {one}\n")
    with pytest.raises(ConfigError, match="in a circle"):
        merged(f"+config={one}")


def test_a_batch_is_one_optimizer_step_unless_said_otherwise(arguments):
    assert build_config([*arguments, "trainer.train_batch_size=6"]).trainer.policy_mini_batch_size == 6


def test_unknown_quickstart_parts_are_refused():
    with pytest.raises(ConfigError, match="'student'"):
        build_config(["+config=opd/quickstart", "trainer.policy.model.path=quickstart:studnt"])


def test_host_defaults_leave_what_was_asked_for(arguments):
    cfg = build_config([*arguments, "trainer.ckpt_path=/tmp/elsewhere", "thundersync.device=cpu"])
    apply_host_defaults(cfg)
    assert cfg.trainer.ckpt_path == "/tmp/elsewhere"
    assert cfg.trainer.export_path.startswith(cfg.thundersync.run_dir)
    assert cfg.trainer.placement.policy_num_gpus_per_node == 1
    assert cfg.trainer.enable_ray_gpu_monitor is False
    once = repr(cfg)
    apply_host_defaults(cfg)
    assert repr(cfg) == once


def paper_rows():
    """(option, preset, value as written, reason) of each line of docs/paper.md."""
    page = (Path(__file__).parents[2] / "docs" / "paper.md").read_text(encoding="utf-8")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if "| `" in line]
    for _what, _paper, option, presets, value, reason in cells:
        for preset in presets.split(","):
            yield pytest.param(option.strip("`"), preset.strip(" `"), value.strip("`"), reason, id=f"{option}-{preset}")


@pytest.mark.parametrize(("option", "preset", "value", "reason"), list(paper_rows()))
def test_the_papers_table_is_what_presets_say(option, preset, value, reason):
    leaves = merged(f"+config={preset}")
    assert ("default" if option not in leaves else str(leaves[option].value)) == value
    assert value != "default" or reason


def test_every_preset_of_eight_gpus_is_in_the_papers_table():
    named = {row.values[1] for row in paper_rows()}
    assert {name for name in preset_names(own_presets()) if "qwen3.8" in name or "glm" in name} <= named


def test_every_open_trajectory_has_a_thread_for_its_tools():
    option = "environment.skyrl_gym.max_env_workers"
    sizes = ["+config=opd/quickstart", "trainer.train_batch_size=40", "generator.n_samples_per_prompt=6"]
    assert build_config(sizes).environment.skyrl_gym.max_env_workers == 240
    assert build_config([*sizes, "trainer.eval_batch_size=900"]).environment.skyrl_gym.max_env_workers == 900
    assert build_config([*sizes, f"{option}=7"]).environment.skyrl_gym.max_env_workers == 7
