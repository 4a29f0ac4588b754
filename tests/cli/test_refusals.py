"""What cannot run is refused by `train` and by `train --dry-run` with the same words, before anything is started."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from cases import write_model, write_tasks

from skyrl_thundersync.cli import app as cli
from skyrl_thundersync.hosts.skyrl.checks import HEAVY, LIGHT, checked_config


def spoiled(folder: Path, name: str, change) -> str:
    """A good model folder whose file `name` is what `change` makes of its bytes."""
    file = write_model(folder / "spoiled") / name
    file.write_bytes(change(file.read_bytes()))
    return str(file.parent)


def swapped(data: bytes) -> bytes:
    """A tokenizer that takes two ids for each other."""
    tokenizer = json.loads(data)
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    return json.dumps(tokenizer).encode()


def below_a_file(folder: Path) -> str:
    (folder / "file").write_text("")
    return str(folder / "file" / "run")


CASES = {
    "an option": (lambda folder: ["generator.batched=true"], "generator.batched=True is refused"),
    "a negative learning rate": (
        lambda folder: ["trainer.policy.optimizer_config.lr=-1"],
        "trainer.policy.optimizer_config.lr=-1 is refused",
    ),
    "a run folder below a file": (
        lambda folder: [f"thundersync.run_dir={below_a_file(folder)}"],
        "file is no folder, so nothing can be written below it",
    ),
    "a logger that is not installed": (lambda folder: ["trainer.logger=mlflow"], "mlflow needs the package mlflow"),
    "one logger of several": (
        lambda folder: ["trainer.logger=[console,swanlab]"],
        "swanlab needs the package swanlab",
    ),
    "a logger without its key": (lambda folder: ["trainer.logger=wandb"], "wandb needs a key"),
    "weights cut short": (
        lambda folder: [f"trainer.policy.model.path={spoiled(folder, 'model.safetensors', lambda data: data[:-4])}"],
        "spoiled/model.safetensors is not whole",
    ),
    "weights that are empty": (
        lambda folder: [f"thundersync.teacher.model={spoiled(folder, 'model.safetensors', lambda data: b'')}"],
        "spoiled/model.safetensors is not whole",
    ),
    "a corrupt tokenizer": (
        lambda folder: [f"thundersync.teacher.model={spoiled(folder, 'tokenizer.json', lambda data: data[:99])}"],
        "spoiled/tokenizer.json is no tokenizer",
    ),
    "a corrupt configuration": (
        lambda folder: [f"trainer.policy.model.path={spoiled(folder, 'config.json', lambda data: data[:9])}"],
        "spoiled/config.json is not JSON",
    ),
    "a teacher that swaps two ids": (
        lambda folder: [f"thundersync.teacher.model={spoiled(folder, 'tokenizer.json', swapped)}"],
        "token id 40 is",
    ),
    "tasks that are wrong": (
        lambda folder: [f"data.train_data=[{write_tasks(folder / 'tasks.jsonl', {}, {'max_turns': 'four'})}]"],
        "tasks.jsonl, line 2 (task make-2): `max_turns` must be a whole number",
    ),
    "too few tasks": (
        lambda folder: [f"data.train_data=[{write_tasks(folder / 'tasks.jsonl', {}, {})}]"],
        "2 tasks and trainer.train_batch_size=8",
    ),
    "nothing to resume from": (
        lambda folder: ["trainer.resume_mode=from_path", f"trainer.resume_path={folder / 'none'}"],
        "none",
    ),
    "SkyRL's own": (lambda folder: ["trainer.max_ckpts_to_keep=0"], "SkyRL's own validation refuses"),
    "an image that the sandbox lacks": (
        lambda folder: [
            f"data.train_data=[{write_tasks(folder / 'tasks.jsonl', *[{'image': 'local/none:9'}] * 9)}]",
            "thundersync.sandbox.backend=bubblewrap",
        ],
        "9 tasks need an image ('local/none:9')",
    ),
}


@pytest.fixture
def command(with_plugins, monkeypatch, capsys, arguments, tmp_path):
    """The console script in this process: exit status and what it printed. Where nothing refuses, nothing starts either."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    entered: list[list[str]] = []
    monkeypatch.setattr(cli, "enter_skyrl", entered.append)

    def run(*more: str) -> tuple[int, str, bool]:
        monkeypatch.setattr(sys, "argv", ["skyrl", "train", "+plugin=thundersync", *arguments, *more])
        checked_config.cache_clear()
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        said = capsys.readouterr()
        return exit_.value.code or 0, said.out + said.err, bool(entered)

    return run


@pytest.mark.parametrize("case", CASES)
def test_train_refuses_what_the_dry_run_refuses_and_starts_nothing(command, tmp_path, arguments, case):
    make, says = CASES[case]
    more = make(tmp_path)
    files = sorted(path for path in tmp_path.rglob("*"))
    for how in ([], ["--dry-run"]):
        status, said, started = command(*more, *how)
        assert status == 2, said
        assert says in said
        assert "Traceback" not in said
        assert not started
    assert sorted(path for path in tmp_path.rglob("*")) == files


def test_what_is_right_is_let_through_by_both(command):
    assert command("--dry-run")[::2] == (0, False)
    assert command()[::2] == (0, True)


def test_every_check_is_on_the_list_once():
    assert len({*LIGHT, *HEAVY}) == len(LIGHT) + len(HEAVY)


def test_a_dry_run_says_which_sandbox_auto_took(command):
    assert any(
        f"{name} (thundersync.sandbox.backend=auto)" in command("--dry-run")[1] for name in ("docker", "bubblewrap")
    )


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "say what to train"),
        (["+plugin=thundersync", "config=opd/quickstart"], "Did you mean '+config=opd/quickstart'?"),
        (["plugin=thundersync", "+config=opd/quickstart"], "Did you mean '+plugin=thundersync'?"),
        (["config=opd/quickstart"], "Did you mean '+config=opd/quickstart'?"),
    ],
)
def test_a_slip_on_the_command_line_is_one_message(with_plugins, monkeypatch, capsys, args, says):
    monkeypatch.setattr(sys, "argv", ["skyrl", "train", *args])
    monkeypatch.setattr(cli, "enter_skyrl", lambda arguments: pytest.fail("SkyRL was started"))
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    assert says in capsys.readouterr().err


def test_a_run_offline_needs_no_key_of_wandb(command, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert command("trainer.logger=[wandb,tensorboard]")[0] == 0
    monkeypatch.setenv("WANDB_MODE", "online")
    assert command("trainer.logger=[wandb,tensorboard]")[0] == 2


def test_an_index_names_the_weights_that_are_missing(command, tmp_path):
    folder = write_model(tmp_path / "model")
    index = {"weight_map": {"weight": "model.safetensors", "other": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    status, said, _ = command(f"trainer.policy.model.path={folder}")
    assert status == 2
    assert "names model-2.safetensors, which is not there" in said
    shutil.copy(folder / "model.safetensors", folder / "model-2.safetensors")
    assert command(f"trainer.policy.model.path={folder}")[0] == 0
