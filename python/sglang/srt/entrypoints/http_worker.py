"""One of several processes that answer clients: endpoints and tokenizer manager, as in a server of one."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import msgspec

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints.body_sends import BodySends
from sglang.srt.entrypoints.context import ServerContext
from sglang.srt.entrypoints.drain import Drain
from sglang.srt.entrypoints.http_server import SHUTTING_DOWN, HttpServer, build_app, uvicorn_config
from sglang.srt.entrypoints.http_workers import HttpWorkerConfig, WorkerPeers, worker_name
from sglang.srt.entrypoints.prepare import Prepared, load_prepared
from sglang.srt.entrypoints.shared_port import bind_shared, open_shared
from sglang.srt.entrypoints.watching import Watching, make_watching
from sglang.srt.managers.io_struct import (
    AbortByRid,
    ControlReply,
    Failed,
    GetStateRequest,
    HoldRequests,
    LogRequests,
    Ready,
    StopWorker,
    TextBatch,
    ToScheduler,
    ToTokenizer,
    encode,
    tokenizer_decoder,
)
from sglang.srt.managers.state_answers import state_endpoint
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.utils.child_process import end_with_parent, read_config
from sglang.srt.utils.garbage import leave_start_alone
from sglang.srt.utils.ipc import Receiver, Sender, close_sockets, endpoint
from sglang.srt.utils.log import configure_logging, say_traceback
from sglang.srt.utils.routes import tokenizer_endpoint

logger = logging.getLogger(__name__)


class HttpWorker:
    def __init__(self, config: HttpWorkerConfig, prepared: Prepared) -> None:
        self._config = config
        args, folder = config.args, Path(config.run_folder)
        self._sender = Sender(endpoint(folder, "scheduler"), encode)
        self._state_sender = Sender(state_endpoint(folder), encode)
        self._launcher = Sender(tokenizer_endpoint(folder, 0), encode)
        self._receiver: Receiver[ToTokenizer] = Receiver(
            tokenizer_endpoint(folder, config.index), tokenizer_decoder.decode
        )
        self.failure = ""
        self._watching: Watching = make_watching(args)
        self._manager = TokenizerManager(
            prepared.tokenizer,
            config.limits,
            self._send,
            self._watching.observers,
            # Not the same seeds in every worker.
            None if args.random_seed is None else args.random_seed + config.index,
            WorkerPeers(folder, config.index, args.tokenizer_worker_num),
        )
        context = ServerContext(
            args=args,
            model=prepared.model,
            manager=self._manager,
            chat_template=prepared.chat_template,
            launch_command=config.launch_command,
            started_ts=config.started_ts,
            startup_time_s=config.startup_time_s,
            request_log=self._watching.request_log,
        )
        self._server = HttpServer(uvicorn_config(BodySends(build_app(context)), args.log_level_http))
        self._drain = Drain(self._manager, args.drain_timeout, SHUTTING_DOWN, self._stop)

    async def serve(self) -> None:
        """Until the launcher says that it is the end."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._receiver.file_descriptor, self._receive)
        listener = bind_shared(self._config.args.host, self._config.args.port)
        leave_start_alone()
        open_shared(listener)
        self._launcher.send(Ready(worker_name(self._config.index)))
        self._receive()
        try:
            await self._server.serve(sockets=[listener])
        finally:
            loop.remove_reader(self._receiver.file_descriptor)
            self._watching.close()

    def _send(self, message: ToScheduler | GetStateRequest) -> None:
        sender = self._state_sender if isinstance(message, GetStateRequest) else self._sender
        sender.send(message)

    def _receive(self) -> None:
        for message in self._receiver.receive_all():
            if isinstance(message, TextBatch | ControlReply):
                self._manager.receive(message)
            elif isinstance(message, AbortByRid | HoldRequests):
                self._manager.hear(message)
            elif isinstance(message, LogRequests):
                log = self._watching.request_log
                log.enabled, log.level = message.enabled, message.level
            elif isinstance(message, Failed):
                self._fail(message.error)
            elif isinstance(message, StopWorker):
                self._end(message)

    def _end(self, message: StopWorker) -> None:
        if message.at_once:
            self._stop()
        else:
            self._drain.begin()

    def _stop(self) -> None:
        if self._manager.failure is None:
            self._manager.fail(SHUTTING_DOWN, status_code=503)
        self._server.should_exit = True

    def _fail(self, message: str) -> None:
        if self.failure:
            return
        self.failure = message
        content = self._watching.crash_content(message, self._config.args)
        self._manager.fail(message)
        self._watching.write_crash(content)
        self._server.should_exit = True


def main() -> int:
    config = msgspec.msgpack.decode(read_config(), type=HttpWorkerConfig)
    end_with_parent(lambda: None)
    name = worker_name(config.index)
    configure_logging(config.args.log_level, name)
    try:
        args = config.args
        assert args.model_path is not None
        prepared = load_prepared(args, ModelConfig.from_folder(args.model_path, args.context_length))
        return asyncio.run(_serve(config, prepared))
    except Exception as error:
        say_traceback()
        launcher = Sender(tokenizer_endpoint(Path(config.run_folder), 0), encode)
        launcher.send(Failed(name, f"{error}" or type(error).__name__))
        launcher.close(linger_s=1.0)
        close_sockets()
    return 1


async def _serve(config: HttpWorkerConfig, prepared: Prepared) -> int:
    worker = HttpWorker(config, prepared)
    await worker.serve()
    return 1 if worker.failure else 0


if __name__ == "__main__":
    sys.exit(main())
