"""A run folder on a full disk: the log takes nothing more, and the screen still names the cause."""

import subprocess
import sys

RUN = """
import sys
from pathlib import Path
from types import SimpleNamespace

from skyrl_thundersync.hosts.skyrl import entrypoint

def fail(*_):
    raise RuntimeError("the cause")

entrypoint._train = fail
folder = Path(sys.argv[1])
(folder / "logs").mkdir()
(folder / "logs" / "driver.log").symlink_to("/dev/full")
cfg = SimpleNamespace(
    thundersync=SimpleNamespace(run_dir=str(folder), replace_run=False),
    trainer=SimpleNamespace(ckpt_path=str(folder), export_path=str(folder), resume_mode="none"),
)
raise SystemExit(entrypoint.train(cfg))
"""


def test_the_cause_is_on_the_screen_though_the_log_is_full(tmp_path):
    done = subprocess.run([sys.executable, "-c", RUN, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "RuntimeError: the cause" in done.stdout
    assert f"could not be written to {tmp_path}/logs/driver.log: No space left on device" in done.stdout
