"""The cache folder of converted models: where it is, one writer at a time, whole folders or none."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_PARTIAL_PREFIX: Final = ".partial-"


def cache_root() -> Path:
    """``$SGLANG_CACHE_DIR``, else ``$XDG_CACHE_HOME/sglang-toggle``, else ``~/.cache/sglang-toggle``.

    A relative ``$XDG_CACHE_HOME`` counts as unset, as its specification says.
    """
    own = os.environ.get("SGLANG_CACHE_DIR")
    if own:
        return Path(own).expanduser().absolute()
    xdg = Path(os.environ.get("XDG_CACHE_HOME", "")).expanduser()
    base = xdg if xdg.is_absolute() else Path.home() / ".cache"
    return base / "sglang-toggle"


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold an advisory lock on the file ``path``; other threads and processes wait.

    The system drops the lock when its holder dies, so a killed conversion blocks nobody.
    """
    with open(path, "w", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def publish_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Make the folder ``target`` by calling ``fill`` on an empty one beside it, then renaming that.

    Call it under `exclusive_lock`: what an interrupted call left behind is removed first, and so is an
    incomplete ``target``. If ``fill`` raises, nothing is left and the error goes on.
    """
    parent = target.parent
    for leftover in parent.glob(f"{_PARTIAL_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=_PARTIAL_PREFIX, dir=parent))
    try:
        fill(partial)
        partial.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
