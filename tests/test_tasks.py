"""The terminal tasks, the byte tokenizer and the quickstart's models hold what the quickstart stands on."""

import itertools
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_thundersync.data.byte_tokenizer import END_ID, PAD_ID, VOCAB_SIZE, byte_tokenizer
from skyrl_thundersync.data.terminal_tasks import (
    KINDS,
    MAX_TURNS,
    NUMBERS,
    SPLITS,
    SUBMIT,
    WORDS,
    tasks,
    write_dataset,
)
from skyrl_thundersync.quickstart.demonstrations import Shell, clean, recovery, render
from skyrl_thundersync.quickstart.files import ASSETS, materialise
from skyrl_thundersync.quickstart.prepare import batch


def some(split: str, n: int, seed: int = 0):
    return list(itertools.islice(tasks(split, seed), n))


def outcome(task, commands, folder: Path) -> int:
    """Exit code of the checker after `commands`, each in its own bash: independent of the package's Shell."""
    folder.mkdir(parents=True)
    for path, text in task.files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    for command in commands:
        if command != SUBMIT:
            subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, timeout=10)
    return subprocess.run(["bash", "-c", task.checker], cwd=folder, capture_output=True, timeout=10).returncode


# Tasks


def test_the_same_seed_gives_the_same_tasks_and_another_seed_others(tmp_path):
    first, again = (write_dataset(tmp_path / name, "train", 64, seed=5).read_text() for name in "ab")
    assert first == again
    assert some("train", 64, seed=5) != some("train", 64, seed=6)
    assert len({task.instruction for task in some("train", 64, seed=5)}) == 64


def test_training_and_held_out_tasks_share_no_word_and_no_number():
    assert not set(WORDS["train"]) & set(WORDS["heldout"])
    assert not set(NUMBERS["train"]) & set(NUMBERS["heldout"])
    seen = {}
    for split in SPLITS:
        texts = [" ".join([t.instruction, *t.files, *t.files.values()]) for t in some(split, 400)]
        words = {word for text in texts for word in re.findall("[A-Za-z]+", text)}
        seen[split] = words & {*WORDS["train"], *WORDS["heldout"]}
    assert len(seen["train"]) > 1000
    assert len(seen["heldout"]) > 1000
    assert not seen["train"] & seen["heldout"]


def test_an_unknown_split_is_refused_by_name():
    with pytest.raises(ValueError, match="no split 'test'; there are train, heldout"):
        next(tasks("test"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_solution_and_every_recovery_pass_the_checker_and_the_bad_habit_and_no_action_fail_it(kind, tmp_path):
    chosen = [t for split in SPLITS for t in some(split, 8 * 4, seed=3) if t.kind == kind]
    assert len(chosen) == 8
    for number, task in enumerate(chosen):
        folder = tmp_path / str(number)
        assert outcome(task, task.solution, folder / "solution") == 0, task
        assert outcome(task, task.wrong, folder / "wrong") != 0, task
        assert outcome(task, (), folder / "nothing") != 0, task
        for n, then in task.recoveries:
            assert outcome(task, task.wrong[:n] + then, folder / f"recovery{n}") == 0, (task, n)


def test_every_task_takes_two_to_five_turns_and_fits_the_turn_limit():
    for task in some("train", 200):
        assert 2 <= len(task.solution) <= 5
        assert task.solution[-1] == task.wrong[-1] == SUBMIT
        assert max(n + len(then) for n, then in task.recoveries) <= MAX_TURNS
        assert all("\n" not in command for command in task.solution + task.wrong)


def test_the_answer_must_be_read_from_output():
    """No argument of the last command is in the instruction alone for kinds that ask for a look."""
    for task in some("train", 200):
        if task.kind in ("find", "extract", "follow", "move"):
            argument = task.solution[-2].split()[1]
            assert argument not in task.instruction


def test_rows_have_the_fields_the_environment_reads(tmp_path):
    rows = [json.loads(line) for line in write_dataset(tmp_path / "x.jsonl", "heldout", 16).read_text().splitlines()]
    for row in rows:
        assert set(row) == {"prompt", "env_class", "task_id", "files", "checker", "max_turns"}
        assert row["env_class"] == "terminal"
        assert [message["role"] for message in row["prompt"]] == ["user"]
        assert all(isinstance(text, str) for text in json.loads(row["files"]).values())
    assert len({row["task_id"] for row in rows}) == 16


# Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_an_id_below_256_is_the_byte_and_text_survives_the_round_trip(tokenizer):
    for text in ("grep -l 'x y' *.txt", "tab\tnewline\n\n  spaces  ", "é漢🙂", "sed -i s/a=1/b=2/ f", ""):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
    assert len(tokenizer) == VOCAB_SIZE
    assert all(tokenizer.convert_ids_to_tokens(i) is not None for i in range(VOCAB_SIZE))
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (END_ID, PAD_ID)


CONVERSATION = [
    {"role": "user", "content": "Move the csv file into bodi/."},
    {"role": "assistant", "content": "ls"},
    {"role": "user", "content": "a.csv\nbodi"},
    {"role": "assistant", "content": "mv a.csv bodi"},
    {"role": "user", "content": "(no output)"},
    {"role": "assistant", "content": "submit"},
]


def test_the_template_only_appends(tokenizer):
    whole = tokenizer.apply_chat_template(CONVERSATION, return_dict=False)
    for n in range(1, len(CONVERSATION)):
        prefix = tokenizer.apply_chat_template(
            CONVERSATION[:n], add_generation_prompt=CONVERSATION[n]["role"] == "assistant", return_dict=False
        )
        assert whole[: len(prefix)] == prefix


def test_what_skyrls_generator_adds_turn_by_turn_is_the_template_over_the_whole_conversation(tokenizer):
    from skyrl.train.config import GeneratorConfig, SkyRLGymConfig
    from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator

    config = GeneratorConfig(use_conversation_multi_turn=True, batched=False)
    generator = SkyRLGymGenerator(config, SkyRLGymConfig(max_env_workers=0), None, tokenizer)
    ids = tokenizer.apply_chat_template(CONVERSATION[:1], add_generation_prompt=True, return_dict=False)
    for turn in range(1, len(CONVERSATION), 2):
        ids += [*CONVERSATION[turn]["content"].encode(), END_ID]
        last = turn + 1 == len(CONVERSATION)
        ids += generator.get_obs_ids_from_obs([] if last else [CONVERSATION[turn + 1]], last)
    assert ids == tokenizer.apply_chat_template(CONVERSATION, return_dict=False)


def test_an_unknown_role_is_refused(tokenizer):
    with pytest.raises(Exception, match="no role tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], return_dict=False)


def test_demonstrations_are_the_template_over_their_conversation_and_score_only_the_assistant(tokenizer):
    with Shell() as shell:
        for task in some("train", 8):
            observations, solved = shell.play(task, task.solution)
            assert solved
            messages = [{"role": "user", "content": task.instruction}]
            for turn, command in enumerate(task.solution):
                messages.append({"role": "assistant", "content": command})
                messages += [{"role": "user", "content": text} for text in observations[turn : turn + 1]]
            shown = render(task, task.solution, observations, [True] * len(task.solution))
            assert shown.ids == tokenizer.apply_chat_template(messages, return_dict=False)
            scored = [i for i, m in zip(shown.ids, shown.mask, strict=True) if m]
            assert tokenizer.decode(scored) == "".join(f"{command}<|im_end|>" for command in task.solution)
            assert len(shown.ids) < 400


# Models


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return materialise(tmp_path_factory.mktemp("quickstart") / "files", n_train=64, n_heldout=32)


def test_the_assets_are_small():
    assert sum(path.stat().st_size for path in ASSETS.iterdir()) <= 4 * 1024 * 1024


def test_materialising_again_changes_nothing_and_mends_a_broken_folder(files):
    folder = files.train.parent
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert materialise(folder, n_train=64, n_heldout=32) == files
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before
    (folder / "stamp").unlink()
    materialise(folder, n_train=64, n_heldout=32)
    assert {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()} == {
        path.relative_to(folder) for path in before
    }
    assert not [path for path in folder.parent.iterdir() if path != folder]
    assert len(files.train.read_text().splitlines()) == 64


def mean_log_prob(model, demonstrations) -> float:
    ids, labels = batch(demonstrations)
    with torch.no_grad():
        return -model(input_ids=ids, labels=labels).loss.item()


def test_the_teacher_finds_solutions_and_recoveries_likelier_than_the_student_and_the_student_its_habits(files):
    from random import Random

    from skyrl_thundersync.quickstart.demonstrations import habit

    teacher, student = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (files.teacher, files.student))
    rng = Random(0)
    with Shell() as shell:
        held_out = some("heldout", 32, seed=9)
        good = [clean(task, shell) for task in held_out]
        mended = [recovery(task, shell, rng) for task in held_out]
        habits = [habit(task, shell) for task in held_out]
    assert mean_log_prob(teacher, good) > -0.05
    assert mean_log_prob(teacher, mended) > -0.1
    assert mean_log_prob(student, good) < mean_log_prob(teacher, good) - 0.05
    assert mean_log_prob(student, habits) > mean_log_prob(teacher, habits)


def test_both_models_share_tokenizer_and_shape(files):
    first, second = (AutoTokenizer.from_pretrained(path) for path in (files.student, files.teacher))
    assert first.get_vocab() == second.get_vocab()
    configs = [json.loads((path / "config.json").read_text()) for path in (files.student, files.teacher)]
    assert configs[0] == configs[1]
    assert configs[0]["vocab_size"] == VOCAB_SIZE == len(first)
    assert configs[0]["architectures"] == ["Qwen3ForCausalLM"]
