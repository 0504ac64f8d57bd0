"""What a chunk costs the HTTP process: processor time from the detokenizer's message to the sockets.

    python benchmark/http_streaming/chunk_cpu.py                   # --streams 250 --path /generate
    python benchmark/http_streaming/chunk_cpu.py --profile         # where it goes

One process and one thread: the server's application, uvicorn, and sockets that are read between the rounds.
So no write wakes a reader, and other work on the machine moves it less than `http_streaming.py`; a server
beside its clients takes more. To compare with another checkout: PYTHONPATH=CHECKOUT/python, in turns.
"""

import argparse
import asyncio
import cProfile
import os
import pstats
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import msgspec
from http_streaming import request_body

from sglang.embedded.model import embedded_model_path
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints.body_sends import BodySends
from sglang.srt.entrypoints.context import ServerContext
from sglang.srt.entrypoints.http_server import HttpServer, build_app, uvicorn_config
from sglang.srt.entrypoints.server_runtime import METRICS_VARIABLE
from sglang.srt.entrypoints.watching import make_watching
from sglang.srt.managers.chat_templates import load_chat_template
from sglang.srt.managers.io_struct import (
    GenerateRequest,
    RequestStats,
    TextBatch,
    TextOutput,
    encode,
    tokenizer_decoder,
)
from sglang.srt.managers.tokenizer_manager import Limits, TokenizerManager
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.open_files import allow_many_files
from sglang.srt.utils.text_tokenizer import TextTokenizer

_CONTEXT: Final = 8192
_TURNS: Final = 20  # of the loop: enough to write everything
_SKIPPED: Final = 10  # rounds


class Application:
    """The server's, with nobody behind it."""

    def __init__(self) -> None:
        folder = str(embedded_model_path())
        tokenizer = TextTokenizer.from_folder(folder)
        args = ServerArgs(model_path=folder, served_model_name="m", enable_metrics=True)
        limits = Limits(_CONTEXT, 10**9, tokenizer.vocab_size)
        self.rids: list[str] = []
        self.manager = TokenizerManager(tokenizer, limits, self._take, make_watching(args).observers, 1)
        model = ModelConfig.from_folder(folder, _CONTEXT)
        template = load_chat_template(tokenizer, None)
        context = ServerContext(args, model, self.manager, template, "", 0.0, 0.0)
        self.server = HttpServer(uvicorn_config(BodySends(build_app(context)), None))

    def _take(self, message: Any) -> None:
        if isinstance(message, GenerateRequest):
            self.rids.append(message.rid)

    def receive(self, message: bytes) -> None:
        texts = tokenizer_decoder.decode(message)
        assert isinstance(texts, TextBatch)
        self.manager.receive(texts)

    def message(self, number: int) -> bytes:
        """One more token of every stream."""
        stats = RequestStats(40, number + 1, 0, admitted_ts=1.0, first_token_ts=1.0)
        return encode(TextBatch([TextOutput(rid, " word", [1234], stats) for rid in self.rids]))


async def open_readers(
    application: Application, address: tuple[str, int], path: str, streams: int
) -> list[socket.socket]:
    body = msgspec.json.encode({**request_body(path, 4000), "stream": True})
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    readers = []
    for _ in range(streams):
        reader = socket.create_connection(address)
        reader.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        reader.setblocking(False)
        readers.append(reader)
    while len(application.rids) < streams:
        await asyncio.sleep(0.01)
    return readers


async def measure(path: str, streams: int, rounds: int, profile: cProfile.Profile | None) -> list[float]:
    """Microseconds a chunk of each round, the first ones left out."""
    application = Application()
    listener = socket.create_server(("127.0.0.1", 0), backlog=streams)
    serving = asyncio.create_task(application.server.serve(sockets=[listener]))
    readers = await open_readers(application, listener.getsockname(), path, streams)
    took = []
    for number in range(rounds + _SKIPPED):
        message = application.message(number)
        if profile is not None and number >= _SKIPPED:
            profile.enable()
        began = time.thread_time()
        application.receive(message)
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        took.append((time.thread_time() - began) / streams * 1e6)
        if profile is not None:
            profile.disable()
        got = [reader.recv(1 << 20) for reader in readers]
        if number and any(data.count(b"data: ") != 1 for data in got):
            raise RuntimeError(f"not one event for each stream: {got[0]!r}")
    for reader in readers:
        reader.close()
    application.server.should_exit = True
    await serving
    return took[_SKIPPED:]


def main() -> None:
    """Measure, and print a line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--path", default="/v1/chat/completions", help="or /generate, /v1/completions")
    parser.add_argument("--profile", action="store_true")
    flags = parser.parse_args()
    allow_many_files()
    profile = cProfile.Profile() if flags.profile else None
    with tempfile.TemporaryDirectory() as folder:
        os.environ[METRICS_VARIABLE] = str(Path(folder))  # as a server has them
        took = sorted(asyncio.run(measure(flags.path, flags.streams, flags.rounds, profile)))
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    print(
        f"{flags.path}, {flags.streams} streams, us a chunk: median {statistics.median(took):.1f},"
        f" a tenth of the rounds took at most {took[len(took) // 10]:.1f}"
    )


if __name__ == "__main__":
    main()
