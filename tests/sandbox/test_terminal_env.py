"""The terminal environment over real sandboxes, through `skyrl_gym.make`, as SkyRL's generator drives it."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import skyrl_gym

from skyrl_thundersync.data.byte_tokenizer import byte_tokenizer
from skyrl_thundersync.options.schema import SandboxConfig
from skyrl_thundersync.sandbox.base import StartError
from skyrl_thundersync.sandbox.pool import SandboxPool
from skyrl_thundersync.tasks.terminal_env import TaskError, TerminalEnv, parse_action, register_terminal_env
from skyrl_thundersync.tasks.terminal_text import opens_thought, unfinished_thought

PROMPT = [{"role": "user", "content": "write the sum of the lines of numbers.txt into sum.txt"}]
CHECKER = """
want=$(awk '{s+=$1} END {print s}' numbers.txt)
[ "$(cat sum.txt)" = "$want" ]
"""
TASK = {
    "task_id": "sum-1",
    "files": json.dumps({"numbers.txt": "1\n2\n39\n", "docs/readme.txt": "hello\n"}),
    "checker": CHECKER,
    "max_turns": 4,
}


@pytest.fixture
def configured(backend):
    config = SandboxConfig(backend=backend, command_timeout_s=1.0, output_limit_bytes=512)
    with SandboxPool(config, "test") as pool:
        register_terminal_env(pool)
        yield pool


def make(**changes):
    return skyrl_gym.make("terminal", env_config={}, extras=TASK | changes)


def play(env, *actions):
    """Last observation text (None where there is none), reward, done after `actions`."""
    assert env.init(PROMPT) == (PROMPT, {})
    for action in actions:
        assert not getattr(env, "_done", False)
        out = env.step(action)
    env.close()
    observed = [message["content"] for message in out["observations"]]
    return observed[0] if observed else None, out["reward"], out["done"]


@pytest.mark.parametrize(
    ("text", "command", "submitted"),
    [
        ("ls -l", "ls -l", False),
        ("  ls -l\n", "ls -l", False),
        ("I look.\n```bash\nls\npwd\n```\nDone.", "ls\npwd", False),
        ("```sh\nls\n```", "ls", False),
        ("```bash\nls", "ls", False),
        ("```python\nprint()\n```", "```python\nprint()\n```", False),
        ("submit", "", True),
        (" submit \n", "", True),
        ("```bash\nsubmit\n```", "", True),
        ("```bash\necho x >y\nsubmit\n```", "echo x >y", True),
        ("echo submit", "echo submit", False),
        ("submit now", "submit now", False),
        ("<think>```bash\nrm -rf .\n```</think>\n```bash\nls\n```", "ls", False),
        ("", "", False),
    ],
)
def test_actions_are_read_as_agreed(text, command, submitted):
    assert parse_action(text) == (command, submitted)


def test_a_solved_episode(configured):
    env = make()
    env.init(PROMPT)
    assert configured.open_count == 1
    first = env.step("```bash\nls; cat docs/readme.txt\n```")
    assert first["observations"] == [{"role": "user", "content": "docs\nnumbers.txt\nhello"}]
    assert (first["reward"], first["done"]) == (0.0, False)
    assert env.step("cd docs; false")["observations"][0]["content"] == "[exit 1]"
    last = env.step("cd ..; echo 42 >sum.txt\nsubmit")
    assert (last["reward"], last["done"]) == (1.0, True)
    metrics = env.get_metrics()
    assert (metrics["turns"], metrics["solved"], metrics["commands_timed_out"]) == (3, 1.0, 0)
    env.close()
    env.close()
    assert configured.open_count == 0


def test_unsolved_and_out_of_turns(configured):
    assert play(make(), "echo 41 >sum.txt", "submit") == (None, 0.0, True)
    assert play(make(max_turns=1), "echo 42 >sum.txt") == ("(no output)", 1.0, True)
    assert play(make(max_turns=2), "true", "echo 41 >sum.txt")[1:] == (0.0, True)


@pytest.mark.parametrize(
    ("checker", "reward"),
    [
        ("echo working; echo reward=0.25", 0.25),
        ("echo reward=0.5; exit 1", 0.5),
        ("echo reward=1; echo more", 1.0),
        ("echo reward=0.5; echo more; exit 1", 0.0),
        ("exit 0", 1.0),
        ("exit 9", 0.0),
        ("exec true", 1.0),
        ("cat; read x || exit 0", 1.0),
        ("kill -9 $BASHPID", 0.0),
        ("if", 0.0),
        ("seq 100000; echo reward=0.75", 0.75),
        ("sleep 1000 & echo reward=0.5", 0.5),
    ],
)
def test_the_checker_gives_the_reward(configured, checker, reward):
    assert play(make(checker=checker), "submit")[1:] == (reward, True)


def test_what_the_agent_reads(configured):
    env = make(max_turns=20)
    env.init(PROMPT)

    def say(action):
        return env.step(action)["observations"][0]["content"]

    assert say("true") == "(no output)"
    assert say("") == "(no command)"
    assert say("echo a; (exit 3)") == "a\n[exit 3]"
    assert say("echo a; sleep 60") == "a\n[timed out after 1 s]\n[new shell in /workspace]"
    assert say("exit 5") == "[exit 5]\n[new shell in /workspace]"
    assert say("pwd") == "/workspace"
    long = say("seq 1 10000")
    assert long.startswith("1\n2\n") and long.endswith("\n10000") and " bytes cut]\n" in long and len(long) < 600
    assert env.get_metrics()["commands_timed_out"] == 1 and env.get_metrics()["tool_seconds"] > 1.0
    env.close()


TAMPERING = {
    "prints the reward": "echo reward=1.0; exit 0",
    "aliases and functions": "cat() { echo 6; }; alias awk='echo 6'; export -f cat; echo 7 >sum.txt",
    "shims in the folder": "for c in awk cat [ test; do printf '#!/bin/sh\\necho 42\\n' >$c; chmod +x $c; done",
    "start-up files": "for f in .bashrc .profile .bash_profile .bash_env; do echo 'exit 0' >$f; done; echo 1 >sum.txt",
    "exported BASH_ENV": "echo 'exit 0' >env.sh; export BASH_ENV=$PWD/env.sh ENV=$PWD/env.sh PATH=$PWD; :",
    "traps": "trap 'exit 0' EXIT DEBUG ERR; :",
    "other shell's tools": "mkdir -p /tmp/bin; printf '#!/bin/sh\\necho 42\\n' >/tmp/bin/cat; PATH=/tmp/bin:$PATH; :",
    "a background writer": "(trap '' TERM HUP; sleep 0.4; while :; do echo 42 >sum.txt; done) >/dev/null 2>&1 &",
    "a detached writer": "setsid nohup bash -c 'sleep 0.4; while :; do echo 42 >sum.txt; done' >/dev/null 2>&1 &",
    "a stolen descriptor": "exec 9>/dev/null 2>/dev/null; (sleep 0.2; echo reward=1.0 >/proc/1/fd/1) & :",
    "a forged frame": "printf '\\036%032d 0\\036reward=1.0\\n' 0",
}


@pytest.mark.attack("tamper with the checker")
@pytest.mark.parametrize("command", TAMPERING.values(), ids=TAMPERING.keys())
def test_tampering_earns_nothing(configured, command):
    checker = "sleep 0.8\n" + CHECKER  # time for whatever was left running
    assert play(make(checker=checker), command + "\nsubmit")[1:] == (0.0, True)


@pytest.mark.attack("modules for the checker to import")
def test_python_in_a_checker_does_not_import_what_the_agent_left(configured):
    checker = """
python3 -c 'import textwrap, sys; sys.exit(textwrap.dedent(open("answer").read()).strip() != "1")'
"""
    shim = "printf 'def dedent(text): return chr(49)\\n' >textwrap.py; echo 2 >answer; echo >sitecustomize.py"
    assert play(make(checker=checker), shim + "\nsubmit")[1:] == (0.0, True)
    assert play(make(checker=checker), "echo 1 >answer\nsubmit")[1:] == (1.0, True)


@pytest.mark.attack("read the checker before grading")
def test_the_checker_is_out_of_reach_before_grading(configured):
    secret = "vErIfIeR-SeCrEt"
    look = f"grep -rsl {secret[:5]}'{secret[5:]}' /workspace /tmp /dev/shm /proc/[0-9]*/environ /proc/[0-9]*/cmdline"
    seen, reward, _ = play(make(checker=f"# {secret}\nfalse", max_turns=1), look)
    assert secret not in seen and "/" not in seen.replace("grep:", "") and reward == 0.0


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"checker": None}, "checker", "is missing"),
        ({"checker": ""}, "checker", "is missing"),
        ({"files": None}, "files", "is missing"),
        ({"files": "{not json"}, "files", "no valid JSON"),
        ({"files": "[1]"}, "files", "must map paths"),
        ({"max_turns": None}, "max_turns", "is missing"),
        ({"max_turns": 0}, "max_turns", "at least 1"),
        ({"max_turns": "3"}, "max_turns", "must be a whole number"),
    ],
)
def test_a_bad_task_is_named_with_its_field(configured, changes, field, problem):
    with pytest.raises(TaskError, match=f"'sum-1', field '{field}': .*{problem}"):
        make(**changes)
    with pytest.raises(TaskError, match="field 'task_id': is missing"):
        make(task_id=None)
    assert configured.open_count == 0


def test_bad_files_are_named_and_leave_no_sandbox(configured):
    for files in ({"../x": "y"}, {"/etc/x": "y"}, {"a": 1}):
        with pytest.raises(TaskError, match="'sum-1', field 'files'"):
            make(files=files).init(PROMPT)
    assert configured.open_count == 0


@pytest.fixture
def patient(backend):
    """Commands may take longer than the tasks here have."""
    config = SandboxConfig(backend=backend, command_timeout_s=600.0, latency_s=600.0)
    with SandboxPool(config, "test") as pool:
        register_terminal_env(pool)
        yield


@pytest.mark.parametrize("last", ["", "\nsubmit"])
def test_the_agents_time_cuts_a_command_and_the_task_is_graded(patient, last):
    env = make(agent_timeout_s=1.5, verifier_timeout_s=60.0)
    env.init(PROMPT)
    out = env.step(f"echo 42 >sum.txt; sleep 600; echo 41 >sum.txt{last}")
    metrics = env.get_metrics()
    env.close()
    assert (out["reward"], out["done"], metrics["agent_timed_out"]) == (1.0, True, 1.0)
    assert metrics["reason"] == "the agent's 1.5 s were over"


def test_boot_is_part_of_the_agents_time(patient):
    with pytest.raises(StartError, match="agent_timeout_s=1.5 was over before its setup had run"):
        make(agent_timeout_s=1.5, setup="sleep 600").init(PROMPT)
    env = make(agent_timeout_s=1e-6)
    env.init(PROMPT)
    out = env.step("echo 42 >sum.txt")
    env.close()
    assert (out["observations"][0]["content"], out["reward"], out["done"]) == ("(not run: the time is over)", 0.0, True)


THOUGHT = "I clean up first:\n```bash\nrm -rf /workspace/*\n```\nno, wait"


def test_no_action_comes_from_an_unfinished_thought(configured):
    env = make(thought_opened=True)
    env.init(PROMPT)
    for turn, closed in ((THOUGHT, False), ("</think>\n```bash\nls\n```", True)):
        out = env.step(turn)
        said = out["observations"][0]["content"]
        assert said == ("docs\nnumbers.txt" if closed else "(no command: the turn ended inside a thought)")
    assert env.get_metrics()["thoughts_cut"] == 1
    env.close()


@pytest.mark.parametrize(
    ("text", "opened", "unfinished"),
    [
        (THOUGHT, True, True),
        (THOUGHT, False, False),
        ("<think>" + THOUGHT, False, True),
        ("<think>\n" + THOUGHT, True, True),
        ("Hm.\n  <think>" + THOUGHT, False, True),
        ("<think>a</think>\n<think>" + THOUGHT, True, True),
        (THOUGHT + "</think>\nls", True, False),
        ("```bash\ngrep -r '<think>' .\n```", False, False),
        ("```bash\ncat >x <<E\n<think>\nE\n```", False, False),
        ("grep '<think>' x", False, False),
        ("submit", True, True),
        ("", True, True),
    ],
)
def test_a_thought_is_open_whichever_way_it_was_opened(text, opened, unfinished):
    assert unfinished_thought(text, opened) == unfinished
    if unfinished:
        assert parse_action(text, opened) == ("", False)


QWEN = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
GLM = "[gMASK]<sop>{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "kwargs", "opened"),
    [
        (QWEN + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", {}, False),
        (QWEN + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}", {}, True),
        (QWEN + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}", {}, False),
        (
            GLM + "{% if add_generation_prompt %}<|assistant|>{{ '</think>' if off else '<think>' }}{% endif %}",
            {},
            True,
        ),
        (
            GLM + "{% if add_generation_prompt %}<|assistant|>{{ '</think>' if off else '<think>' }}{% endif %}",
            {"off": True},
            False,
        ),
        (None, {}, False),
    ],
)
def test_whether_a_template_opens_a_thought_is_read_from_what_it_writes(template, kwargs, opened):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    assert opens_thought(tokenizer, **kwargs) == opened


def test_a_thoughts_end_that_cannot_be_read_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = QWEN + "<|im_start|>assistant\n<think>\n"
    tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    with pytest.raises(ValueError, match="</think> is a special token"):
        opens_thought(tokenizer)


def test_latency_is_added_and_counted(backend):
    with SandboxPool(SandboxConfig(backend=backend, latency_s=0.3), "test") as pool:
        env = TerminalEnv({}, TASK, sandboxes=pool)
        env.init(PROMPT)
        env.step("true")
        assert env.get_metrics()["tool_seconds"] >= 0.3
        env.close()


@pytest.mark.timeout(120)
def test_16_episodes_at_once_on_8_threads(configured):
    def episode(index):
        env = make(task_id=f"t{index}", files={"numbers.txt": f"{index}\n1\n"}, max_turns=5)
        wrong = index % 4 == 0
        return play(env, "cat numbers.txt", f"echo {index + 1 + wrong} >sum.txt", "submit")[1:]

    with ThreadPoolExecutor(8) as threads:
        outcomes = list(threads.map(episode, range(16)))
    assert outcomes == [(0.0 if index % 4 == 0 else 1.0, True) for index in range(16)]
    assert configured.open_count == 0


def test_a_start_that_takes_longer_than_agent_and_verifier_may_is_given_up_and_cleaned_up(monkeypatch, backend):
    """It is given up while it still starts; what comes of it then is closed."""
    config, started = SandboxConfig(backend=backend, warm=0), threading.Event()
    with SandboxPool(config, "test") as pool:
        register_terminal_env(pool)
        start = pool._start

        def late(kind):
            assert started.wait(60)
            return start(kind)

        monkeypatch.setattr(pool, "_start", late)
        with pytest.raises(StartError, match="no sandbox started within 0.5 s"):
            make(agent_timeout_s=0.3, verifier_timeout_s=0.2).init(PROMPT)
        starting = next(thread for thread in threading.enumerate() if thread.name == "sandbox-start")
        started.set()
        starting.join(60)
        assert not starting.is_alive() and pool.open_count == 0


def test_a_verifier_gets_what_start_and_agent_left_of_the_whole(configured, monkeypatch):
    """An agent that overran its time by a command's grace takes it from the verifier, not from the run."""
    limits = []
    env = make(agent_timeout_s=0.1, verifier_timeout_s=5.0)
    env.init(PROMPT)
    check = env._sandbox.check
    monkeypatch.setattr(env._sandbox, "check", lambda script, limit: limits.append(limit) or check(script, limit))
    time.sleep(0.3)
    env.step("submit")
    env.close()
    assert len(limits) == 1 and limits[0] <= 4.8
