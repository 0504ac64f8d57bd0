"""The launcher waits for the workers that answer, and for no other."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from sglang.srt.entrypoints.http_workers import HttpWorkers, worker_name
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.child_process import start_child, stop_children


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_worker_that_still_starts_holds_up_no_end(
    is_ready: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(0.7)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ready = {worker_name(1): 1} if is_ready else {}
    workers = HttpWorkers(ServerArgs(), tmp_path, ready, asyncio.Event())
    workers.children.append(start_child(worker_name(1), "sleeper", b"", kill_with_parent=True))
    began = time.monotonic()
    try:
        asyncio.run(workers.wait_gone(30.0))
        waited = time.monotonic() - began
        assert (waited > 0.5 and workers.children[0].exit_code() == 0) if is_ready else waited < 0.5
    finally:
        stop_children(workers.children, grace_s=0.0)
