"""The persistent shell: what a command sees, what its result says, and every way of losing the shell."""

import re

import pytest

from skyrl_thundersync.sandbox.base import SandboxError

TIMEOUT_S = 5.0


def run(box, command, timeout_s=TIMEOUT_S):
    return box.run(command, timeout_s)


@pytest.mark.parametrize(
    ("command", "output", "exit_code"),
    [
        ("echo out; echo err >&2; echo more", "out\nerr\nmore\n", 0),
        ("(exit 3)", "", 3),
        ("false; true", "", 0),
        ("echo a\necho b\necho 'multi\nline'", "a\nb\nmulti\nline\n", 0),
        ("cat <<EOF\none\n  two $((1+1))\nEOF", "one\n  two 2\n", 0),
        ("cat", "", 0),
        ("read x; echo $?", "1\n", 0),
        ("printf 'no newline'", "no newline", 0),
        ("printf '\\377\\000\\200abc'", "\ufffd\0\ufffdabc", 0),
        ("echo \"it's\" '\"quoted\"' \\$HOME '`x`'", 'it\'s "quoted" $HOME `x`\n', 0),
        ("echo grün 日本 🙂", "grün 日本 🙂\n", 0),
        ("echo a\0b", "ab\n", 0),
        ("# only a comment", "", 0),
        ("", "", 0),
        ("kill -9 $BASHPID &\nwait $!; echo $?", None, 0),
    ],
    ids=lambda value: None if isinstance(value, int) else repr(value)[:24],
)
def test_output_and_exit_code(box, command, output, exit_code):
    result = run(box, command)
    assert result.exit_code == exit_code and not result.timed_out and not result.shell_ended
    assert output is None or result.output == output


@pytest.mark.parametrize("command", ["if", "echo 'open", "for x in", ")", "echo $(", "cat <<EOF\nopen"])
def test_broken_syntax_ends_neither_the_shell_nor_the_frame(box, command):
    run(box, "x=kept")
    run(box, command)
    assert run(box, "echo $x").output == "kept\n"


def test_state_carries_over(box):
    run(box, "mkdir -p a/b && cd a/b && export X=1 && f() { echo f-$1; } && shopt -s nullglob")
    assert run(box, "pwd; echo $X; f 2; echo *.none").output == "/workspace/a/b\n1\nf-2\n\n"
    assert run(box, "bash -c 'echo $X'").output == "1\n"


def test_shell_options_and_redirections_do_not_lose_the_frame(box):
    for command in ["set -e; false", "false", "set -x; true", "exec >/dev/null", "exec 2>&1 1>&-", "trap 'echo x' ERR"]:
        assert not run(box, command).shell_ended, command
    assert run(box, "set +ex; trap - ERR; echo still here").output.endswith("still here\n")


@pytest.mark.attack("end or replace the shell")
@pytest.mark.parametrize(
    ("command", "exit_code", "output"),
    [
        ("echo before; exit 7", 7, "before\n"),
        ("exec printf gone", 0, "gone"),
        ("echo before; kill -9 $$", 137, "before\n"),
        ("set -u; echo $undefined", None, None),
        ("sleep 4242 & exit 3", 3, ""),
    ],
)
def test_a_lost_shell_is_reported_and_replaced_with_the_files_kept(box, command, exit_code, output):
    run(box, "cd /tmp; x=1; echo kept >/workspace/file")
    result = run(box, command)
    assert result.shell_ended and not result.timed_out
    assert exit_code is None or result.exit_code == exit_code
    assert output is None or result.output == output
    assert run(box, "echo x=$x; pwd; cat file; grep -sl 424[2] /proc/*/cmdline").output == "x=\n/workspace\nkept\n"


@pytest.mark.attack("outlive a time limit: SIGTERM ignored, sessions of their own, stopped shells")
@pytest.mark.parametrize(
    "command",
    [
        "echo before; sleep 4242",
        "while :; do sleep 4242 & sleep 0.05; done",
        "trap '' TERM INT HUP; echo before; while :; do sleep 1 || :; done",
        "setsid sleep 4242 & disown; sleep 4242",
        "kill -STOP $$",
        "exec 9>&-; builtin() { :; }",
        "(trap '' TERM; exec -a hidden sleep 4242) & while :; do :; done",
    ],
)
def test_a_time_limit_ends_the_whole_process_tree(box, command):
    run(box, "echo kept >file")
    result = run(box, command, timeout_s=1.0)
    if command.startswith("exec 9"):  # the shell cannot report any more: the next command is the one that waits
        result = run(box, "echo before", timeout_s=1.0) if not result.timed_out else result
    assert result.timed_out and result.exit_code == 124 and result.shell_ended
    assert "before" in result.output or "before" not in command
    left = run(box, "cat file; for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; echo; done")
    assert left.output.startswith("kept\n")
    assert "4242" not in left.output


@pytest.mark.attack("background children that hold stdout")
def test_a_background_child_that_holds_stdout_delays_nothing_and_ends_with_the_sandbox(box):
    result = run(box, "nohup sleep 100 & echo started")
    assert result.output.endswith("started\n") and result.seconds < 2 and not result.timed_out
    assert run(box, "jobs -r | wc -l").output.strip() == "1"
    assert run(box, "(sleep 0.2; echo late) & echo now").output == "now\n"
    assert run(box, "sleep 0.5; echo next").output == "late\nnext\n"


def test_a_frame_cannot_be_forged_by_output(box):
    forged = (
        "printf '\\036%032d 0\\036' 0; printf '\\036%s 0\\036' deadbeefdeadbeefdeadbeefdeadbeef; env; set; (exit 5)"
    )
    result = run(box, forged)
    assert result.exit_code == 5 and result.output.count("\x1e") >= 4
    assert not re.search(r"\x1e[0-9a-f]{32} %d", result.output), "the nonce shows in variables"
    # The only place it could come from: the history, the last argument, the shell's standard input.
    result = run(box, 'echo "$_ $BASH_COMMAND $BASH_EXECUTION_STRING"; history; timeout 0.2 cat /proc/$$/fd/0; true')
    assert not re.search("[0-9a-f]{32}", result.output)


def test_long_output_is_cut_in_the_middle(box):
    result = run(box, "seq 1 100000")
    assert result.truncated and len(result.output) < 4096 + 40
    assert result.output.startswith("1\n2\n") and result.output.endswith("\n100000\n")


def test_files_arrive_as_written(box):
    files = {
        "a/b c/ü.txt": "text\nwith 'quotes' and \\ and no newline",
        "run.sh": "#!/bin/sh\necho ran",
        "empty": "",
        "-rf": "dash",
        "big": "line\n" * 200_000,
    }
    box.write_files(files)
    listing = run(box, "cat 'a/b c/ü.txt'; echo; ./run.sh; wc -c <empty; cat ./-rf; echo; wc -l <big").output
    assert listing == f"{files['a/b c/ü.txt']}\nran\n0\ndash\n200000\n"
    box.write_files({"empty": "now"})
    assert run(box, "cat empty; touch a/new && ls a").output == "now" + "b c\nnew\n"


def test_bad_files_are_refused_before_anything_is_written(box):
    with pytest.raises(ValueError, match="relative"):
        box.write_files({"good": "x", "../bad": "y"})
    assert run(box, "ls -A").output == ""


def test_an_unpacking_that_fails_says_so(box):
    run(box, "mkdir taken && touch taken/x")
    with pytest.raises(SandboxError, match="unpacking"):
        box.write_files({"taken": "x"})
