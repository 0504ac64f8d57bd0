"""The processes of one server, and the tokenizer manager that speaks for them."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from sglang.srt.entrypoints.http_workers import HttpWorkers, WorkerPeers
from sglang.srt.entrypoints.prepare import Prepared, StartError
from sglang.srt.entrypoints.watching import Watching, make_watching
from sglang.srt.managers.io_struct import (
    ControlReply,
    Failed,
    GetStateRequest,
    Ready,
    TextBatch,
    ToScheduler,
    ToTokenizer,
    encode,
    tokenizer_decoder,
)
from sglang.srt.managers.state_answers import state_endpoint
from sglang.srt.managers.text_request import RequestError
from sglang.srt.managers.tokenizer_manager import Limits, TokenizerManager
from sglang.srt.utils.child_process import Child, describe_exit, start_child, stop_children
from sglang.srt.utils.ipc import Receiver, Sender, endpoint
from sglang.srt.utils.run_folder import RunFolder

logger = logging.getLogger(__name__)

METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_SCHEDULER, _DETOKENIZER = "scheduler", "detokenizer"
_CHILD_CHECK_S = 0.2
_LAST_WORDS_S = 0.1
_LONGEST_PAUSE_S = 15.0  # between two looks at whether the scheduler answers


class ServerRuntime:
    """Start with ``await start(…)``; ``failed`` is set when a process has ended that should not have."""

    def __init__(self, prepared: Prepared) -> None:
        self.args = prepared.args
        self.manager: TokenizerManager | None = None
        self.failed = asyncio.Event()
        self.started_ts = time.time()
        self.startup_time_s = 0.0
        self._prepared = prepared
        self._loop = asyncio.get_running_loop()
        self._run_folder = RunFolder()
        self._folder = self._run_folder.path
        self._children: list[Child] = []
        self._ready: dict[str, dict[str, Any]] = {}
        self._news = asyncio.Event()
        self._failure = ""
        self._closed = False
        self._tasks: list[asyncio.Task[None]] = []
        self._prepare_metrics()
        self.watching: Watching = make_watching(self.args)
        self.workers = HttpWorkers(self.args, self._folder, self._ready, self._news)
        self._receiver: Receiver[ToTokenizer] = Receiver(
            endpoint(self._folder, "tokenizer"), tokenizer_decoder.decode
        )
        self._sender = Sender(endpoint(self._folder, _SCHEDULER), encode)
        self._state_sender = Sender(state_endpoint(self._folder), encode)
        atexit.register(self._close_processes)

    @staticmethod
    async def start(prepared: Prepared) -> ServerRuntime:
        """
        Raises:
            StartError: a process could not start.
        """
        runtime = ServerRuntime(prepared)
        try:
            await runtime._start()
        except BaseException:
            runtime.close()
            raise
        return runtime

    def close(self) -> None:
        """End every process and remove what they shared. May be called again."""
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.cancel()
        self._loop.remove_reader(self._receiver.file_descriptor)
        if self.manager is not None and self.manager.failure is None:
            self.manager.fail("the server is shutting down", status_code=503)
        self._close_processes()
        self.watching.close()
        self.workers.close()
        self._receiver.close()
        self._sender.close()
        self._state_sender.close()
        atexit.unregister(self._close_processes)

    def _close_processes(self) -> None:
        stop_children([*self.workers.children, *self._children])
        self._run_folder.remove()

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def failure(self) -> str:
        return self._failure

    # ---- start

    def _prepare_metrics(self) -> None:
        if not self.args.enable_metrics:
            return
        folder = self._folder / "metrics"
        folder.mkdir()
        # Before prometheus_client is imported by this process or by a child, which inherits it.
        os.environ[METRICS_VARIABLE] = str(folder)

    async def _start(self) -> None:
        self._loop.add_reader(self._receiver.file_descriptor, self._receive)
        logger.info("Starting the scheduler and detokenizer processes.")
        self._children = [self._start_scheduler(), self._start_detokenizer()]
        self._tasks.append(asyncio.create_task(self._supervise()))
        self._receive()
        while not {_SCHEDULER, _DETOKENIZER} <= set(self._ready):
            self._news.clear()
            await self._news.wait()
            if self._failure:
                raise StartError(self._failure)
        hidden_size = self._prepared.model.hidden_size if self.args.enable_return_hidden_states else 0
        limits = Limits(**self._ready[_SCHEDULER], hidden_size=hidden_size)
        self.manager = TokenizerManager(
            self._prepared.tokenizer,
            limits,
            self._send,
            self.watching.observers,
            self.args.random_seed,
            WorkerPeers(self._folder, 0, 0) if self.workers.are_wanted else None,
        )
        reply = await self.manager.flush_cache()  # an answer: the way to the scheduler is open too
        if not reply.ok:
            raise StartError(reply.error)
        if self.args.watchdog_timeout:
            self._tasks.append(asyncio.create_task(self._watch(self.manager, self.args.watchdog_timeout)))
        self.startup_time_s = time.time() - self.started_ts
        self.watching.started(self.startup_time_s)
        logger.info(
            "The model is loaded (%.1f s): context of %d tokens, KV cache of %d tokens.",
            self.startup_time_s,
            limits.context_len,
            limits.max_total_num_tokens,
        )

    def _start_scheduler(self) -> Child:
        config = {"run_folder": str(self._folder), "args": msgspec.to_builtins(self.args)}
        module = "sglang.srt.managers.scheduler_process"
        return start_child(_SCHEDULER, module, msgspec.msgpack.encode(config), kill_with_parent=True)

    def _start_detokenizer(self) -> Child:
        config = {
            "run_folder": str(self._folder),
            "tokenizer_path": self.args.tokenizer_path,
            "log_level": self.args.log_level,
            "num_workers": self.args.tokenizer_worker_num,
        }
        module = "sglang.srt.managers.detokenizer_manager"
        # It is never busy for long, and removes the run folder should this process be killed.
        return start_child(_DETOKENIZER, module, msgspec.msgpack.encode(config), kill_with_parent=False)

    # ---- while it runs

    def _send(self, message: ToScheduler | GetStateRequest) -> None:
        sender = self._state_sender if isinstance(message, GetStateRequest) else self._sender
        sender.send(message)

    def _receive(self) -> None:
        for message in self._receiver.receive_all():
            if isinstance(message, TextBatch | ControlReply):
                assert self.manager is not None
                self.manager.receive(message)
            elif isinstance(message, Ready):
                self._ready[message.name] = message.info
                self._news.set()
            elif isinstance(message, Failed):
                started = self.manager is not None
                self._fail(
                    f"the {message.name} process failed: {message.error}" if started else message.error
                )

    async def _supervise(self) -> None:
        while not self._failure:
            await asyncio.sleep(_CHILD_CHECK_S)
            for child in (*self._children, *self.workers.children):
                code = child.exit_code()
                if code is not None and not self.workers.may_end(child):
                    await asyncio.sleep(_LAST_WORDS_S)  # it may have said why
                    self._receive()
                    self._fail(describe_exit(child.name, code))

    async def _watch(self, manager: TokenizerManager, limit_s: float) -> None:
        """A process that is stopped, or stuck where no thread of it moves, can't say so itself."""
        while manager.failure is None:
            await asyncio.sleep(min(limit_s / 4, _LONGEST_PAUSE_S))
            try:
                await asyncio.wait_for(manager.get_state(), limit_s)
            except TimeoutError:
                self._fail(
                    f"the {_SCHEDULER} process has not answered for {limit_s:g} s (--watchdog-timeout)"
                )
            except RequestError:
                return

    def _fail(self, message: str) -> None:
        """The first failure counts: what follows it is a consequence."""
        if self._failure:
            return
        self._failure = message
        self.workers.fail(message)
        if self.manager is not None:
            logger.error("%s; the server stops", message)
            content = self.watching.crash_content(message, self.args)
            self.manager.fail(message)
            self.watching.write_crash(content)
        self._news.set()
        self.failed.set()


def metrics_folder() -> Path | None:
    value = os.environ.get(METRICS_VARIABLE)
    return None if value is None else Path(value)
