"""The run folder goes with the server, however that ends. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.server import server_environment

from sglang.srt.utils.run_folder import _LOCK, RunFolder, remove_abandoned

SERVER = """
import time
from sglang.srt.utils.run_folder import RunFolder
folder = RunFolder()
(folder.path / "socket").touch()
print(folder.path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def parent() -> Iterator[Path]:
    """Shorter than ``tmp_path``, which a socket's path can't hold."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield Path(folder)


@contextmanager
def running(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that has a run folder in ``folder``."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True, env=server_environment(folder)
    )
    try:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.kill()
        process.wait()


def test_the_next_start_removes_the_folder_of_a_killed_server(parent: Path) -> None:
    with running(parent) as (first, abandoned), running(parent) as (_, living):
        assert abandoned.parent == living.parent == parent
        first.kill()
        first.wait()
        assert (abandoned / "socket").exists()  # nobody was left to remove it
        remove_abandoned(parent)
        assert list(parent.iterdir()) == [living]
        assert (living / "socket").exists()
        with running(parent) as (_, third):
            assert set(parent.iterdir()) == {living, third}
    with running(parent) as (_, last):
        assert list(parent.iterdir()) == [last]


def test_other_folders_are_left_alone(parent: Path) -> None:
    kept = [parent / name for name in ("sglang-checkout", "other")]
    for folder in kept:
        folder.mkdir()
    (kept[0] / "lock").touch()  # somebody's own
    (kept[1] / _LOCK).touch()
    (parent / "sglang-linked").symlink_to(kept[1])
    remove_abandoned(parent)
    assert all(folder.is_dir() for folder in kept)
    assert (kept[0] / "lock").exists() and (kept[1] / _LOCK).exists()


def test_two_in_one_process(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(parent))
    first, second = RunFolder(), RunFolder()
    assert set(parent.iterdir()) == {first.path, second.path}
    first.remove()
    first.remove()
    assert list(parent.iterdir()) == [second.path]
    second.remove()


def test_a_long_temporary_folder_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    folder = RunFolder()
    try:
        assert folder.path.parent == Path("/tmp")
        assert folder.path.stat().st_mode & 0o777 == 0o700
    finally:
        folder.remove()
    assert not folder.path.exists()
