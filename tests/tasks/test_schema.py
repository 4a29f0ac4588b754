"""Every row of every format and environment is checked before anything starts, and means the same to check and run."""

import json

import polars
import pytest

from skyrl_thundersync.hosts.skyrl.dataset import TaskDataset
from skyrl_thundersync.quickstart.files import materialise
from skyrl_thundersync.tasks.rows import read_rows
from skyrl_thundersync.tasks.schema import TaskError, TaskRow
from skyrl_thundersync.tasks.scripts import unparsable
from skyrl_thundersync.tasks.survey import RowChecks, Surveyor

ROW = {
    "prompt": [{"role": "user", "content": "Make ans."}],
    "env_class": "terminal",
    "task_id": "t1",
    "files": {"a": "1\n"},
    "checker": "[ -e ans ]",
}


def rows(*changes: dict) -> list[dict]:
    made = [ROW | {"task_id": f"t{number}"} | change for number, change in enumerate(changes, 1)]
    return [{k: v for k, v in row.items() if v is not None} for row in made]


def write(path, made):
    if path.suffix == ".parquet":
        polars.DataFrame(made, infer_schema_length=None).write_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(made, indent=1))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return str(path)


def problems(path, option="data.train_data") -> list[str]:
    return Surveyor("terminal").survey(option, str(path)).problems


BAD = [
    ({"files": None}, "files", "is missing"),
    ({"files": "{"}, "files", "no valid JSON"),
    ({"files": "[1]"}, "files", "must map paths to texts"),
    ({"files": {"../x": ""}}, "files", "must be relative"),
    ({"files": {"a": 1}}, "files", "must hold text"),
    ({"task_id": None}, "task_id", "is missing"),
    ({"task_id": 7}, "task_id", "must be text, got 7"),
    ({"checker": None}, "checker", "a task without a checker has no reward"),
    ({"checker": "if true; then"}, "checker", "does not parse as bash: line 2"),
    ({"setup": "echo 'x"}, "setup", "does not parse as bash: line 1"),
    ({"max_turns": "four"}, "max_turns", "must be a whole number"),
    ({"max_turns": 0}, "max_turns", "at least 1"),
    ({"max_turn": 4}, "max_turn", "Did you mean 'max_turns'?"),
    ({"env_class": "terminl"}, "env_class", "Did you mean 'terminal'?"),
    ({"prompt": None}, "prompt", "must be a list of chat messages"),
    ({"prompt": "Make ans."}, "prompt", "must be a list of chat messages"),
    ({"prompt": [{"role": "usr", "content": "x"}]}, "prompt", "Did you mean 'user'?"),
    ({"prompt": [{"role": "user", "content": 3}]}, "prompt", "message 1 must have"),
    ({"collect": True}, "collect", "is for evaluation"),
    ({"needs": "gpu"}, "needs", "gpu: run it through Harbor"),
    ({"env": {"A B": "x"}}, "env", "no name of a variable"),
    ({"env": {"A": 1}}, "env", "must be text"),
    ({"tests": {"x": {"base64": "?"}}}, "tests", "neither text nor"),
    ({"agent_timeout_s": -1}, "agent_timeout_s", "positive number of seconds"),
    ({"workdir": "app"}, "workdir", "absolute path"),
    ({"image": 3}, "image", "must be text"),
    ({"partial_credit": "no"}, "partial_credit", "must be true or false"),
    ({"env_class": "gsm8k"}, "reward_spec.ground_truth", "is missing, which this environment needs"),
    ({"env_class": "gsm8k_multi_turn", "reward_spec": {"ground_truth": "1"}, "max_turns": "x"}, "max_turns", "whole"),
]


@pytest.mark.parametrize(("change", "field", "says"), BAD)
def test_a_bad_row_is_named_with_file_line_and_field(tmp_path, change, field, says):
    found = problems(write(tmp_path / "tasks.jsonl", rows({}, change)))
    assert len(found) == 1
    assert f"{tmp_path / 'tasks.jsonl'}, line 2" in found[0]
    assert f"`{field}` " in found[0]
    assert says in found[0]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(("change", "field"), [(change, field) for change, field, _ in BAD if field == "checker"])
def test_in_every_format(tmp_path, suffix, change, field):
    found = problems(write(tmp_path / f"tasks.{suffix}", rows({}, change)))
    assert len(found) == 1
    assert {"jsonl": ", line 2", "json": ", element 2", "parquet": ", row 2"}[suffix] in found[0]
    assert f"`{field}` " in found[0]


def test_ids_are_unique_over_all_files_of_an_option(tmp_path):
    first, second = write(tmp_path / "a.jsonl", rows({}, {})), write(tmp_path / "b.jsonl", rows({"task_id": "t2"}))
    surveyor = Surveyor("terminal")
    assert surveyor.survey("data.train_data", first).problems == []
    found = surveyor.survey("data.train_data", second).problems
    assert f"b.jsonl, line 1 (task t2): `task_id` is that of {first}, line 2, too" in found[0]
    assert surveyor.survey("data.val_data", first).problems == []


def test_rows_of_other_environments_may_hold_what_they_like(tmp_path):
    row = {"prompt": ROW["prompt"], "env_class": "gsm8k", "reward_spec": {"ground_truth": "1"}, "anything": 1}
    assert problems(write(tmp_path / "tasks.jsonl", [row, row])) == []
    assert problems(write(tmp_path / "more.jsonl", [{**row, "env_class": None}])) != []


def test_a_file_is_read_to_its_end_and_what_is_no_text_is_named(tmp_path):
    """A column that appears late, and half a surrogate pair, which JSON can write and UTF-8 cannot."""
    late = [*[{}] * 3000, {"setup": "true", "extra_info": {"source": "x"}}]
    made = rows(*late)
    path = tmp_path / "late.jsonl"
    write(path, made)
    assert problems(path) == []
    assert [row for _, row in read_rows(path)] == made
    half = tmp_path / "half.jsonl"
    half.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW | {"checker": "\ud800"}) + "\n")
    assert "half.jsonl, line 2 holds half a surrogate pair" in problems(half)[0]
    whole = tmp_path / "whole.jsonl"
    whole.write_text(json.dumps(ROW | {"checker": "echo 😀"}) + "\n")
    assert problems(whole) == []
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(json.dumps(ROW).encode() + b"\n" + '{"prompt": "é"}\n'.encode("latin-1"))
    assert "latin.jsonl, line 2 is not UTF-8" in problems(latin)[0]
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(b"PAR1")
    assert "torn.parquet is not a parquet file" in problems(torn)[0]


def test_check_environment_and_loader_read_a_table_as_they_read_lines(tmp_path):
    """A struct column holds the union of all rows' paths, with null where a row has no such file."""
    tokenizer = materialise(tmp_path / "quickstart", n_train=8, n_heldout=8).student
    made = rows({"files": {"a": "1"}}, {"files": {"b": "2"}, "env": {"X": "y"}}, {"max_turns": 3})
    files = [write(tmp_path / f"tasks.{suffix}", made) for suffix in ("jsonl", "json", "parquet")]
    assert [problems(file) for file in files] == [[], [], []]
    from transformers import AutoTokenizer

    loaded = [TaskDataset([file], "terminal", AutoTokenizer.from_pretrained(tokenizer), 512) for file in files]
    read = [[TaskRow.of(dataset[i][2]) for i in range(len(dataset))] for dataset in loaded]
    assert read[0] == read[1] == read[2]
    assert [row.files for row in read[2]] == [{"a": "1"}, {"b": "2"}, {"a": "1\n"}]
    assert [row.max_turns for row in read[2]] == [None, None, 3]
    assert loaded[0][0] == loaded[0][0]  # whoever took a row apart left the next one whole


@pytest.mark.parametrize("change", [change for change, field, says in BAD if "bash" not in says and field != "collect"])
def test_what_the_check_refuses_the_environment_refuses(change):
    row = rows(change)[0]
    if RowChecks("terminal").check(row, trained=True)[0] is None and row.get("env_class") == "terminal":
        wrong = [field for field, _ in RowChecks("terminal").check(row, trained=True)[1]]
        if wrong != ["prompt"]:
            with pytest.raises(TaskError, match=f"field '{wrong[0]}'"):
                TaskRow.of(row)


def test_many_bad_rows_are_summed_up(tmp_path):
    found = problems(write(tmp_path / "tasks.jsonl", rows(*[{"checker": ""}] * 10)))
    assert len(found) == 4
    assert "7 more of 10" in found[-1]


def test_scripts_are_parsed_together_and_each_is_judged_alone():
    good = ["[ -e ans ]", "# only a comment", "cat <<'E' >x\nit's\nE", "echo \\", "shopt -s extglob; ls !(a)", "exit 0"]
    bad = ["if true; then", "echo 'abc", 'echo "abc', "}", "fi", "( echo", "for x in; do", "$("]
    assert unparsable(good, 10) == {}
    for first in bad:
        for second in bad:
            found = unparsable([*good, first, *good, second, *good], 10)
            assert set(found) == {len(good), 2 * len(good) + 1}, (first, second)
    assert len(unparsable(bad, 3)) == 3
