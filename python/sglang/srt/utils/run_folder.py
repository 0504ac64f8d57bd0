"""The private folder of one running server: its sockets and its metrics files.

It is removed by the last process of the server that ends in its own way. Where all of them are killed
together nobody is left to do it, so the next server that starts does. That a server lives is seen by a
lock on a file in its folder: the system drops it with the process, and, unlike a process id, it means
the same to every container that shares the folder above.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "sglang-"
_LOCK = "sglang-server.lock"  # a name that no folder of anything else has in it
_LONGEST_SOCKET_PATH = 90  # of 107 bytes that the system allows
_ROOM_FOR_NAMES = 20


class RunFolder:
    """Made by the server's first process, which holds the lock until it calls ``remove`` or ends."""

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        if len(str(parent / f"{_PREFIX}12345678")) > _LONGEST_SOCKET_PATH - _ROOM_FOR_NAMES:
            parent = Path("/tmp")
        remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = _make_lock(self.path)

    def remove(self) -> None:
        """May be called again."""
        remove_run_folder(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_run_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(parent: Path) -> None:
    """Remove the run folders in ``parent`` whose server is gone. Those of other users are left alone."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it has no lock, or it has just gone
            if folder.lstat().st_uid == os.getuid() and _is_free(folder / _LOCK):
                remove_run_folder(folder)


def _make_lock(folder: Path) -> int | None:
    """A descriptor that holds the lock; None on a file system without locks.

    The file gets its name only when it is locked: nobody may find it free before.
    """
    unnamed = folder / f"{_LOCK}.new"
    descriptor = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    unnamed.rename(folder / _LOCK)
    return descriptor


def _is_free(lock: Path) -> bool:
    descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
