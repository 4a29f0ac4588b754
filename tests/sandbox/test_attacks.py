"""What an agent's commands may not reach, exhaust or leave behind, on every backend."""

import contextlib
import os
import threading
import uuid
from pathlib import Path

import pytest

from skyrl_thundersync.sandbox.base import Limits
from skyrl_thundersync.sandbox.pool import SandboxPool

MIB = 1 << 20


def run(box, command, timeout_s=10.0):
    return box.run(command, timeout_s)


@pytest.mark.attack("reach a network, the host's sockets included")
def test_there_is_no_network(box):
    assert run(box, "cat /proc/net/route | wc -l; grep -c : /proc/net/dev").output == "1\n1\n", "only a loopback"
    for target in ("1.1.1.1/53", "127.0.0.1/22", "169.254.169.254/80"):
        assert run(box, f"exec 3<>/dev/tcp/{target}").exit_code != 0
    # Abstract Unix sockets belong to the network namespace: none of the host's may show.
    assert run(box, "tail -n +2 /proc/net/unix").output == ""


@pytest.mark.attack("read files of the host")
def test_host_files_are_out_of_reach(box, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("host-secret")
    secret.chmod(0o644)
    mine = Path("/root/.bashrc") if os.geteuid() == 0 else Path.home()
    for path in (secret, mine, "/var/run/docker.sock", "/run/docker.sock", "/var/lib/docker", Path.cwd()):
        assert run(box, f"ls {path}").exit_code != 0, path
    assert run(box, "cat /etc/shadow; cat /proc/1/root/etc/shadow; ls /proc/1/root/root/").exit_code != 0
    hashes = [line for line in run(box, "cat /etc/shadow").output.splitlines() if "$" in line]
    assert not hashes
    assert "host-secret" not in run(box, "grep -rs host-secret /tmp /home /var /mnt /srv /opt /root /run").output


@pytest.mark.attack("read the owner's environment")
def test_the_environment_holds_nothing_of_the_host(box, monkeypatch, pool):
    monkeypatch.setenv("SECRET_TOKEN", "host-secret")
    fresh = pool.create()
    seen = run(fresh, "env; cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'").output
    assert "host-secret" not in seen and "SECRET_TOKEN" not in seen


@pytest.mark.attack("write outside the working folders")
def test_only_the_working_folders_can_be_written(box):
    for path in ("/usr/x", "/etc/x", "/bin/x", "/x", "/dev/x", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger"):
        assert run(box, f"echo x >{path}").exit_code != 0, path
    for path in ("/workspace/x", "/tmp/x", "/dev/shm/x"):
        assert run(box, f"echo x >{path} && cat {path}").output == "x\n"


@pytest.mark.attack("gain rights: setuid, su, mount, chroot, mknod, user namespaces")
def test_there_is_no_way_to_more_rights(box):
    status = run(box, "grep -E '^(Cap(Prm|Eff|Bnd|Inh|Amb)|NoNewPrivs|Uid)' /proc/self/status").output
    values = dict(line.split(":\t", 1) for line in status.splitlines())
    assert values["NoNewPrivs"] == "1" and values["Uid"].split() == ["1000"] * 4
    assert all(int(values[name], 16) == 0 for name in values if name.startswith("Cap"))
    for command in (
        "unshare -Ur true",
        "mount -t tmpfs none /tmp",
        "chroot / true",
        "su -c true </dev/null",
        "chown 0 /workspace",
        "mknod /tmp/d b 254 0",
        "kill -9 1 && sleep 0.2 && ! kill -0 1",
        "cp /bin/bash /tmp/b && chmod u+s /tmp/b && /tmp/b -p -c 'test $EUID = 0'",
    ):
        assert run(box, command).exit_code != 0, command
    every = "find /usr -perm -4000 -type f 2>/dev/null"  # of a cold disk it takes its time
    suid = run(box, f"for f in $({every}); do $f --version; done </dev/null >/dev/null 2>&1; id -u", 60.0)
    assert suid.output == "1000\n"


@pytest.mark.attack("see processes of others")
def test_processes_of_others_do_not_show(box, pool):
    other = pool.create()
    run(other, "sleep 4242 & echo $!")
    assert "4242" not in run(box, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").output
    assert int(run(box, "ls -d /proc/[0-9]* | wc -l").output) < 12


@pytest.mark.attack("fork bomb")
@pytest.mark.timeout(120)
def test_a_fork_bomb_stays_inside_and_ends(box, pool):
    other = pool.create()
    run(box, "echo kept >file")
    before = len(os.listdir("/proc"))
    most = 0
    stop = threading.Event()

    def watch():
        nonlocal most
        while not stop.wait(0.05):
            most = max(most, len(os.listdir("/proc")))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = run(box, "bomb() { bomb | bomb & }; bomb; while :; do :; done", timeout_s=2.0)
        assert result.timed_out
        assert run(other, "echo fine").output == "fine\n"
    finally:
        stop.set()
        watcher.join()
    assert most < before + Limits().processes + 60
    assert run(box, "cat file; ls -d /proc/[0-9]* | wc -l").output.split()[0] == "kept"
    assert int(run(box, "ls -d /proc/[0-9]* | wc -l").output) < 12


@pytest.mark.attack("memory bomb, one large or many small")
@pytest.mark.timeout(120)
def test_a_memory_bomb_ends_the_command_only(config):
    with SandboxPool(config, "test", Limits(memory_bytes=128 * MIB, disk_bytes=64 * MIB)) as pool:
        box, other = pool.create(), pool.create()
        run(box, "echo kept >file")
        result = run(box, "python3 -c 'x = bytearray(1 << 30); print(len(x))'; echo $?", timeout_s=20.0)
        assert str(1 << 30) not in result.output
        assert run(box, "cat file").output == "kept\n"
        # Many small ones rather than one large.
        script = (
            "for i in 1 2 3 4 5 6; do python3 -c 'x = b\"1\" * (60 << 20); import time; time.sleep(1)' & done; wait"
        )
        run(box, script, timeout_s=20.0)
        assert run(box, "cat file").output == "kept\n"
        assert run(other, "echo fine").output == "fine\n"


@pytest.mark.attack("fill the disk")
def test_the_disk_is_bounded_everywhere(config):
    with SandboxPool(config, "test", Limits(memory_bytes=256 * MIB, disk_bytes=32 * MIB)) as pool:
        box = pool.create()
        for folder in ("/workspace", "/tmp", "/dev/shm"):
            result = run(box, f"head -c {100 * MIB} /dev/zero >{folder}/fill", timeout_s=20.0)
            assert "No space left" in result.output, folder
        size = sum(int(line.split()[0]) for line in run(box, "du -sk /workspace /tmp /dev/shm").output.splitlines())
        assert size <= (32 + 16 + 1) * 1024
        run(box, "rm /workspace/fill /tmp/fill /dev/shm/fill")
        assert run(box, "echo again >x && cat x").output == "again\n"


def resident_bytes(pids):
    """Memory of processes that runs can make grow: their own pages, not mapped files."""
    total = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            status = Path(f"/proc/{pid}/status").read_text()
            total += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:"))
    return total * 1024


def host_processes():
    """This process and, where there is one, the container engine with its helpers."""
    found = [os.getpid()]
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if (folder / "comm").read_text().startswith(("dockerd", "containerd")):
                found.append(int(folder.name))
    return found


@pytest.mark.attack("flood of output, 2 GiB of `yes`")
@pytest.mark.timeout(300)
def test_a_flood_of_output_costs_the_host_no_memory(box):
    run(box, "true")
    pids = host_processes()
    before = most = resident_bytes(pids)
    stop = threading.Event()

    def watch():
        nonlocal most
        while not stop.wait(0.1):
            most = max(most, resident_bytes(pids))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = run(box, "yes", timeout_s=2.0)
        assert result.timed_out and result.truncated and len(result.output) < 4096 + 40
        result = run(box, f"yes | head -c {2 << 30}; echo end", timeout_s=240.0)
        assert result.output.endswith("y\nend\n") and result.exit_code == 0 and result.truncated
    finally:
        stop.set()
        watcher.join()
    assert most - before < 64 * MIB
    # From the background it slows its own sandbox down, no more.
    run(box, "yes & sleep 0.1")
    assert run(box, "kill %1; echo stopped", timeout_s=20.0).output.endswith("stopped\n")
    run(box, "yes & sleep 0.1")
    assert box.check("echo graded", 20.0).output == "graded\n"


@pytest.mark.attack("shut itself out, kill everything")
def test_an_agent_that_shuts_itself_out_only_loses_its_own_sandbox(box, pool):
    run(box, "echo kept >file; chmod 000 /workspace; exit 0")
    assert run(box, "cat file").output == "kept\n", "the folder is opened again"
    run(box, "kill -9 -1")
    assert run(box, "cat file").output == "kept\n"
    assert run(pool.create(), "echo fine").output == "fine\n"


@pytest.mark.attack("links in the working folder")
def test_links_in_the_workspace_lead_no_write_out(box, tmp_path):
    run(box, f"ln -s {tmp_path} out; ln -s /etc etc; ln -s ../../../../tmp up; ln -s /proc/1/root root")
    name = f"written-{uuid.uuid4().hex}"
    for folder in ("out", "up", "etc", "root/etc"):
        try:
            box.write_files({f"{folder}/{name}": "x"})
        except RuntimeError:
            continue
        assert folder in ("out", "up")  # within the sandbox these are its own folders
    assert not list(tmp_path.iterdir()) and not Path("/etc", name).exists() and not Path("/tmp", name).exists()
