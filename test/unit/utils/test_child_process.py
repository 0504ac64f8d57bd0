"""Children end with their parent, however it ends. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers.server import server_environment

from sglang.srt.utils.child_process import describe_exit, start_child, stop_children

CHILD = """
import sys, time
from pathlib import Path
from sglang.srt.utils.child_process import end_with_parent, read_config
config = Path(read_config().decode())
end_with_parent(lambda: (config / "cleaned").touch())
(config / "started").touch()
while {busy}:
    {work}
"""
PARENT = """
import os, sys, time
from pathlib import Path
from sglang.srt.utils.child_process import start_child
folder = Path(sys.argv[1])
child = start_child("c", "child_module", str(folder).encode(), kill_with_parent=sys.argv[2] == "kill")
(folder / "pid").write_text(str(child.process.pid))
if sys.argv[3] == "fork" and os.fork() == 0:
    time.sleep(20)  # holds the pipe's end open
    os._exit(0)
time.sleep(60)
"""


def wait_for(path: Path, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.02)


@pytest.mark.parametrize(
    "how, fork, work",
    [
        ("watch", "alone", "time.sleep(1)"),
        ("watch", "fork", "time.sleep(1)"),
        ("kill", "alone", "time.sleep(1)"),
        ("kill", "alone", "sum(range(10**6))"),
    ],
)
def test_a_killed_parent_takes_its_child_along(tmp_path: Path, how: str, fork: str, work: str) -> None:
    (tmp_path / "child_module.py").write_text(CHILD.format(busy=True, work=work))
    (tmp_path / "parent.py").write_text(PARENT)
    env = server_environment(tmp_path)
    env["PYTHONPATH"] += f":{tmp_path}"
    command = [sys.executable, str(tmp_path / "parent.py"), str(tmp_path), how, fork]
    parent = subprocess.Popen(command, env=env)
    try:
        wait_for(tmp_path / "started")
        child = psutil.Process(int((tmp_path / "pid").read_text()))
        family = psutil.Process(parent.pid).children()
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs([child], timeout=3)
    for process in family:
        if process.is_running() and process.pid != child.pid:
            process.kill()
    assert not alive
    assert how == "kill" or (tmp_path / "cleaned").exists()


def test_a_child_that_does_not_listen_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    (tmp_path / "child_module.py").write_text(deaf + CHILD.format(busy=True, work="time.sleep(1)"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = start_child("deaf", "child_module", str(tmp_path).encode(), kill_with_parent=True)
    wait_for(tmp_path / "started")
    assert child.exit_code() is None
    began = time.monotonic()
    stop_children([child], grace_s=0.5)
    assert child.exit_code() == -9 and time.monotonic() - began < 5


def test_a_child_that_is_dead_at_once() -> None:
    child = start_child("none", "no_such_module_at_all", b"x" * 10**6, kill_with_parent=True)
    stop_children([child], grace_s=10)
    assert child.exit_code() == 1


def test_how_an_end_is_described() -> None:
    assert describe_exit("scheduler", -9) == "the scheduler process was killed by SIGKILL"
    assert describe_exit("scheduler", 3) == "the scheduler process ended with exit code 3"
    assert describe_exit("scheduler", -200) == "the scheduler process was killed by signal 200"
