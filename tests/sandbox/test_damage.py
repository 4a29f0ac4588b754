"""Whatever an agent does to its own sandbox or checker costs its own trajectory at most: no step raises."""

import io
import shlex
import tarfile

import docker as docker_sdk
import pytest
import skyrl_gym

from skyrl_thundersync.options.schema import SandboxConfig
from skyrl_thundersync.sandbox.pool import SandboxPool
from skyrl_thundersync.tasks.terminal_env import register_terminal_env

IMAGE = "thundersync-test/app:1"
TASK = {"task_id": "damaged", "files": "{}", "checker": "[ -e /workspace/made ]", "max_turns": 8}
APP = {"image": IMAGE, "workdir": "/app/src"}
HARBOR = {"checker": "bash /tests/test.sh", "tests": {"test.sh": "bash /workspace/check"}}


@pytest.fixture
def configured(backend):
    config = SandboxConfig(backend=backend, command_timeout_s=1.0, output_limit_bytes=512, warm=0)
    with SandboxPool(config, "test") as pool:
        register_terminal_env(pool)
        yield pool
        assert pool.open_count == 0


@pytest.fixture
def checked():
    """What a checker leaves is read the same way on every backend."""
    config = SandboxConfig(backend="bubblewrap", warm=0)
    with SandboxPool(config, "test") as pool:
        register_terminal_env(pool)
        yield


def play(*actions, **changes):
    """(last observation, reward, metrics) of an episode that ends by itself."""
    env = skyrl_gym.make("terminal", env_config={}, extras=TASK | changes)
    env.init([{"role": "user", "content": "go"}])
    try:
        said = None
        for action in actions:
            out = env.step(action)
            said = [message["content"] for message in out["observations"]] or [said]
            said = said[0]
            if out["done"]:
                break
        assert out["done"]
        return said, out["reward"], env.get_metrics()
    finally:
        env.close()


CLOSE_ALL = 'for f in /proc/$$/fd/*; do f=${f##*/}; eval "exec $f>&-"; done'
DAMAGE = {
    "no permission in the folder": "chmod -R 000 . ; sleep 60",
    "everything deleted": "rm -rf /workspace /tmp/* /dev/shm/* 2>/dev/null; sleep 60",
    "the disk filled": "head -c 400M /dev/zero >/tmp/a; head -c 400M /dev/zero >/workspace/a; sleep 60",
    "all names used": "i=0; while :; do : >/workspace/$((i++)); done",
    "no path": "PATH=/nowhere; export PATH; sleep 60; exit 3",
    "the shell killed": "kill -9 $$",
    "the shell stopped": "kill -STOP $$",
    "everything killed": "kill -9 -1",
    "standard output closed": "exec >&- 2>&-",
    "every descriptor closed": CLOSE_ALL,
    "every descriptor closed, and alive": f"{CLOSE_ALL}; while :; do :; done",
    "binary output": "head -c 100000 /dev/urandom",
    "endless output": "yes $'\\xff\\x1e\\x00'",
    "huge names": "touch $(printf 'x%.0s' {1..250}) $'\\xff\\n\\x1e'; ls; cd $(printf 'd/%.0s' {1..2000})",
    "deep folders": "for i in {1..800}; do mkdir dddddddd && cd dddddddd || break; done; sleep 60",
    "a process bomb": ":() { : | : & }; :; sleep 60",
    "sleepers up to the limit": "for i in {1..300}; do sleep 1000 & done; sleep 60",
    "memory": "python3 -c 'x = [bytes(1 << 20) for _ in range(4096)]'; exit 1",
    "builtins replaced": "builtin() { :; }; printf() { :; }; eval() { :; }; cd() { return 1; }; exit() { :; }",
    "builtins switched off": "enable -n builtin printf eval cd; true",
    "traps": "trap 'kill -9 $$' DEBUG ERR EXIT; true",
    "limits": "ulimit -u 1 -n 4 -f 0 -t 1; while :; do :; done",
}


@pytest.mark.timeout(120)
@pytest.mark.attack("end the run by damage to its own sandbox")
@pytest.mark.parametrize("command", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_costs_the_trajectory_at_most(configured, command):
    for changes in ({}, HARBOR):
        _, reward, metrics = play(command, "true", "pwd\nsubmit", **changes)
        assert reward == 0.0 and metrics["reason"]


@pytest.fixture
def app_image(backend):
    if backend != "docker":
        pytest.skip("working folders of their own need Docker")
    text = b"FROM local/bookworm-py:1\nRUN mkdir -p /app/src && chown -R 1000:1000 /app\n"
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        entry = tarfile.TarInfo("Dockerfile")
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text))
    client = docker_sdk.from_env()
    context.seek(0)
    client.images.build(fileobj=context, custom_context=True, tag=IMAGE, network_mode="none", rm=True)
    client.close()


WORKDIR = {
    "no permission": "chmod -R 644 .",
    "no permission above": "chmod 000 /app",
    "deleted": "cd /; rm -rf /app/src",
    "a file": "cd /; rm -rf /app/src; echo x >/app/src",
    "a link to nowhere": "cd /; rm -rf /app/src; ln -s /nowhere /app/src",
    "a link to itself": "cd /; rm -rf /app/src; ln -s src /app/src",
    "a pipe": "cd /; rm -rf /app/src; mkfifo /app/src",
}


@pytest.mark.timeout(120)
@pytest.mark.attack("end the run by damage to its working folder")
@pytest.mark.parametrize("ended_by", ["sleep 60", "exit 1"])
@pytest.mark.parametrize("command", WORKDIR.values(), ids=WORKDIR.keys())
def test_a_damaged_working_folder_costs_the_trajectory_at_most(configured, app_image, command, ended_by):
    _, _, metrics = play(f"{command}\n{ended_by}", "touch /workspace/made", "submit", **APP)
    assert metrics["sandbox_lost"] == 0.0 and metrics["turns"] == 3, "the episode goes on in a new shell"
    _, reward, _ = play(f"{command}\n{ended_by}", "submit", **(APP | HARBOR))
    assert reward == 0.0


@pytest.mark.attack("malformed rewards from a checker")
@pytest.mark.parametrize(
    "printed",
    [*("nan", "-inf", "1e308", "1e31", "much", "", "1 1", "1; rm", "0x1", "1" * 400, "1,0", "\\xff")],
)
def test_a_reward_that_is_none_costs_the_trajectory_and_says_so(checked, printed):
    _, reward, metrics = play("submit", checker=f"echo reward=0.5; printf 'reward={printed}\\n'")
    assert (reward, metrics["verifier_failed"]) == (0.0, 1.0)
    assert "the checker printed 'reward=" in metrics["reason"] and "finite number" in metrics["reason"]


@pytest.mark.attack("malformed rewards from a checker")
@pytest.mark.parametrize(
    "written",
    [*("nan", "1e308", "1" * 400, "1" * 5000, "[" * 8000, '{"reward": ' + "9" * 400 + "}", '{"reward": null}', "[1]")],
    ids=range(8),
)
@pytest.mark.parametrize("file", ["reward.json", "reward.txt"])
def test_a_reward_file_that_holds_none_costs_the_trajectory_and_says_so(checked, written, file):
    check = f"printf %s {shlex.quote(written)} >/logs/verifier/{file}"
    _, reward, metrics = play("submit", **(HARBOR | {"tests": {"test.sh": check}}))
    assert (reward, metrics["verifier_failed"]) == (0.0, 1.0) and file in metrics["reason"]


@pytest.mark.attack("malformed rewards from a checker")
@pytest.mark.parametrize(("tests", "passed"), [("9" * 5000, "1"), ("10", "9" * 400), ("0", "0"), ("4", "1")])
def test_counts_of_tests_that_are_none_give_no_partial_credit(checked, tests, passed):
    counts = f'{{"tests": {tests}, "passed": {passed}}}'
    check = f"echo 0 >/logs/verifier/reward.txt; echo '{counts}' >/logs/verifier/ctrf.json"
    _, reward, _ = play("submit", **(HARBOR | {"tests": {"test.sh": check}}))
    assert reward == (0.25 if tests == "4" else 0.0)
