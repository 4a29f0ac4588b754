"""The command: plugins by entry point, SkyRL's own way in, refusals without a traceback, a dry run that starts nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import write_model

from skyrl_thundersync.cli import app as cli
from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.hosts.skyrl import dry_run as dryrun
from skyrl_thundersync.options import registry as plugins


def skyrl(monkeypatch, capsys, *args: str) -> tuple[int, str, str]:
    """The console script in this process: exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["skyrl", *args])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    captured = capsys.readouterr()
    return exit_.value.code or 0, captured.out, captured.err


def test_the_entry_point_offers_the_plugin(with_plugins):
    plugin = plugins.find("thundersync")
    assert plugin.name == "thundersync"
    assert plugin.entrypoint == "skyrl_thundersync.hosts.skyrl.entrypoint"
    assert (plugin.presets / "opd" / "quickstart.yaml").is_file()


def test_plugins_and_presets_are_listed(with_plugins, monkeypatch, capsys):
    code, out, _ = skyrl(monkeypatch, capsys, "plugins")
    assert code == 0
    assert "thundersync" in out
    assert "opd/quickstart" in out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["+plugin=thundersink"], ["no plugin of that name", "'thundersync'"]),
        (["+plugin=thundersync", "+config=opd/quickstrt"], ["no such preset", "'opd/quickstart'"]),
        (["+plugin=thundersync", "trainer.sed=1"], ["'trainer.sed'", "'trainer.seed'"]),
        (["+plugin=thundersync", "+plugin=thundersync"], ["given twice"]),
        (["+config=opd/quickstart"], ["presets belong to a plugin", "+plugin=thundersync"]),
        (["+plugin=thundersync", "trainer.override_entrypoint=x"], ["already names the entry point"]),
        (["--dry-run"], ["needs a plugin"]),
        (["+plugin=thundersync", "--full"], ["--full belongs to --dry-run"]),
    ],
)
def test_a_mistake_is_one_message_and_exit_2(with_plugins, monkeypatch, capsys, args, says):
    code, _, err = skyrl(monkeypatch, capsys, "train", *args)
    assert code == 2
    assert err.startswith("error: ")
    assert "Traceback" not in err
    for part in says:
        assert part in err


def test_unknown_flags_are_refused(monkeypatch, capsys):
    code, _, err = skyrl(monkeypatch, capsys, "train", "--dry-rn")
    assert code == 2
    assert "--dry-run" in err


def test_help_is_light(site):
    """Neither help nor the list of plugins may load what takes seconds."""
    script = (
        "import sys\n"
        "from skyrl_thundersync.cli import app as cli\n"
        "from skyrl_thundersync.options import registry\n"
        "registry.find('thundersync')\n"
        "sys.argv = ['skyrl', 'train', '--help']\n"
        "try: cli.main()\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'vllm', 'skyrl', 'ray', 'transformers', 'deepspeed'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(site)},
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "+config=GROUP/NAME" in done.stdout


@pytest.mark.timeout(300)
def test_training_goes_in_through_skyrls_own_entry(tmp_path, site):
    """A third-party plugin's `main()` is called by SkyRL with the merged options, and SkyRL's own command does the same."""
    (tmp_path / "other.py").write_text(
        "import json, os, sys\n"
        "from pathlib import Path\n"
        "from skyrl_thundersync.options.registry import Plugin\n"
        "PLUGIN = Plugin('other', Path(__file__).parent / 'presets', 'other', 'skyrl.train.config:SkyRLTrainConfig')\n"
        "def main():\n"
        "    from skyrl.train.config import SkyRLTrainConfig\n"
        "    args = [a for a in sys.argv[1:] if not a.startswith('trainer.override_entrypoint=')]\n"
        "    cfg = SkyRLTrainConfig.from_cli_overrides(args)\n"
        "    print('RESULT', json.dumps([cfg.trainer.seed, cfg.trainer.run_name, cfg.generator.max_turns]))\n"
    )
    (tmp_path / "presets" / "group").mkdir(parents=True)
    (tmp_path / "presets" / "group" / "one.yaml").write_text("trainer: {run_name: '007', seed: 1}\n")
    metadata = tmp_path / "other-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[skyrl.plugins]\nother = other:PLUGIN\n")
    (tmp_path / "both.py").write_text(
        "import sys\n"
        "from skyrl_thundersync.cli import app as cli\n"
        "cli.run(['+plugin=other', '+config=group/one', 'trainer.seed=9'])\n"
        "sys.argv = ['main_base', 'trainer.override_entrypoint=other', \"trainer.run_name='007'\", 'trainer.seed=9']\n"
        "from skyrl.train.entrypoints import main_base\n"
        "main_base.main()\n"
    )
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{site}"}
    done = subprocess.run([sys.executable, "both.py"], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert [json.loads(line.removeprefix("RESULT ")) for line in results] == [[9, "007", 1]] * 2


@pytest.mark.timeout(200)
def test_what_a_user_can_put_right_is_one_line_through_skyrls_own_entry_too(tmp_path):
    command = [sys.executable, "-m", "skyrl.train.entrypoints.main_base"]
    command += ["trainer.override_entrypoint=skyrl_thundersync.hosts.skyrl.entrypoint", "trainer.sed=3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: unknown option 'trainer.sed' (command line). Did you mean")


def test_a_dry_run_checks_and_starts_nothing(arguments, capsys, monkeypatch):
    import ray

    assert dryrun.run(arguments) == 0
    out = capsys.readouterr().out
    run_dir = Path(next(a for a in arguments if a.startswith("thundersync.run_dir=")).partition("=")[2])
    assert not run_dir.exists()
    assert not ray.is_initialized()
    for part in (
        "trainer.train_batch_size=8",
        "opd/quickstart.yaml",
        "2 ranks",
        "1 replica ",
        "teacher",
        "sandbox",
        "can start",
    ):
        assert part in out
    assert "trainer.flash_attn" not in out
    dryrun.run(arguments, full=True)
    assert "trainer.flash_attn=True" in capsys.readouterr().out


def test_a_dry_run_names_every_problem_and_fails(arguments, capsys, tmp_path):
    from transformers import AutoTokenizer

    other = write_model(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    swapped = json.loads((other / "tokenizer.json").read_text())
    vocabulary = swapped["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(swapped))
    assert len(tokenizer) == len(AutoTokenizer.from_pretrained(other))
    code = dryrun.run([*arguments, f"thundersync.teacher.model={other}", "generator.batched=true"])
    out = capsys.readouterr().out
    assert code == 2
    assert "generator.batched=True is refused" in out
    assert "token id" in out
    assert "would not start" in out


def test_a_dry_run_of_options_that_cannot_be_read_is_a_refusal(arguments):
    with pytest.raises(ConfigError, match="trainer.sed"):
        dryrun.run([*arguments, "trainer.sed=1"])
