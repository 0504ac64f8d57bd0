"""Sockets between processes. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.server import server_environment

from sglang.srt.utils.ipc import Receiver, Sender, endpoint

FAILING = """
import os, sys
from pathlib import Path
from sglang.srt.utils.ipc import Receiver, Sender, close_sockets, endpoint
folder = Path(sys.argv[1])
receiver = Receiver(endpoint(folder, "its-own"), bytes)  # open until the end
nobody = Sender(endpoint(folder, "nobody"), bytes)
nobody.send(b"lost")
sender = Sender(endpoint(folder, "parent"), bytes)
sender.send(b"last words")
sender.close(linger_s=5.0)
close_sockets()
os._exit(7)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Shorter than ``tmp_path``, which a socket's path can't hold."""
    with tempfile.TemporaryDirectory(prefix="t") as path:
        yield Path(path)


def test_messages_arrive_in_order(folder: Path) -> None:
    sender = Sender(endpoint(folder, "a"), bytes)  # before anyone listens
    for number in range(100):
        sender.send(bytes([number]))
    receiver = Receiver(endpoint(folder, "a"), bytes)
    got: list[bytes] = []
    deadline = time.monotonic() + 10
    while len(got) < 100 and time.monotonic() < deadline:
        receiver.wait(0.1)
        got += receiver.receive_all()
    assert got == [bytes([number]) for number in range(100)]
    assert receiver.receive_all() == [] and not receiver.wait(0.0)
    sender.close()
    receiver.close()


def test_last_words_arrive_and_open_sockets_hold_nothing_up(folder: Path) -> None:
    receiver = Receiver(endpoint(folder, "parent"), bytes)
    command = [sys.executable, "-c", FAILING, str(folder)]
    done = subprocess.run(command, timeout=30, env=server_environment(folder))
    assert done.returncode == 7
    assert receiver.wait(5.0)
    assert receiver.receive_all() == [b"last words"]
    receiver.close()
