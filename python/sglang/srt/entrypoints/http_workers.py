"""Several processes that answer clients (``--tokenizer-worker-num``): their start and end, in the launcher.

The launcher listens no more then: every worker listens on the same port, and the system deals connections
out to them. The launcher starts, warms up, watches and ends; what is for all workers (a failure, the end)
goes to each of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from sglang.srt.managers.io_struct import Failed, StopWorker, ToPeer, encode
from sglang.srt.managers.tokenizer_manager import Limits, Peers
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.child_process import Child, start_child
from sglang.srt.utils.ipc import Sender
from sglang.srt.utils.routed_ids import prefix_of
from sglang.srt.utils.routes import tokenizer_endpoint

_MODULE: Final = "sglang.srt.entrypoints.http_worker"
_POLL_S: Final = 0.05
_ANSWER_S: Final = 3.0
"""For workers that have told their clients of the end: answers leave, then they go."""


class HttpWorkerConfig(msgspec.Struct, frozen=True):
    run_folder: str
    index: int  # from 1
    args: ServerArgs  # resolved; its port is the one that is listened on
    limits: Limits
    launch_command: str
    started_ts: float
    startup_time_s: float


def worker_name(index: int) -> str:
    return f"HTTP worker {index}"


class WorkerPeers(Peers):
    """The way to the other workers, of number ``index`` of ``count``; the launcher is number 0."""

    def __init__(self, folder: Path, index: int, count: int) -> None:
        self.prefix = prefix_of(index)
        others = [i for i in range(1, count + 1) if i != index]
        self._senders = [Sender(tokenizer_endpoint(folder, i), encode) for i in others]

    def tell(self, message: ToPeer) -> None:
        for sender in self._senders:
            sender.send(message)


class HttpWorkers:
    def __init__(self, args: ServerArgs, folder: Path, ready: Mapping[str, Any], news: asyncio.Event) -> None:
        """``ready``: has the name of each process that has started; ``news`` is set when it changes."""
        self.children: list[Child] = []
        self._args = args
        self._folder = folder
        self._ready = ready
        self._news = news
        self._stopping = False
        count = args.tokenizer_worker_num if self.are_wanted else 0
        self._senders = [Sender(tokenizer_endpoint(folder, i + 1), encode) for i in range(count)]

    @property
    def are_wanted(self) -> bool:
        return self._args.tokenizer_worker_num > 1

    def start(self, config: HttpWorkerConfig) -> None:
        """All of them; ``config`` is that of each, but for its number."""
        for index in range(1, self._args.tokenizer_worker_num + 1):
            own = msgspec.msgpack.encode(msgspec.structs.replace(config, index=index))
            self.children.append(start_child(worker_name(index), _MODULE, own, kill_with_parent=True))

    async def wait_ready(self, failed: asyncio.Event) -> bool:
        """Whether all listen; False if the server has failed before."""
        names = {child.name for child in self.children}
        while not names <= set(self._ready):
            self._news.clear()
            if failed.is_set():
                return False
            await self._news.wait()
        return True

    def may_end(self, child: Child) -> bool:
        """Whether it is one that was told to."""
        return self._stopping and child in self.children

    def fail(self, message: str) -> None:
        """They answer what waits, and end."""
        self._stopping = True
        for sender in self._senders:
            sender.send(Failed("launcher", message))

    def stop(self, *, at_once: bool) -> None:
        self._stopping = True
        for sender in self._senders:
            sender.send(StopWorker(at_once))

    async def wait_gone(self, drain_s: float) -> None:
        """Those that answer requests have ended. ``drain_s``: so long may requests still run."""
        deadline = time.monotonic() + drain_s + _ANSWER_S
        answering = [child for child in self.children if child.name in self._ready]
        while time.monotonic() < deadline and any(child.exit_code() is None for child in answering):
            await asyncio.sleep(_POLL_S)

    def close(self) -> None:
        for sender in self._senders:
            sender.close()
