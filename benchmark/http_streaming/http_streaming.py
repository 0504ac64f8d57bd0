"""How many tokens a second get through scheduler, detokenizer and HTTP, and how long each is on its way?

    python benchmark/http_streaming/http_streaming.py --streams 64,250 --tokens-per-second 60

An executor that computes nothing gives every stream a token each step; client and server share the
machine. A line for each number of streams: tokens and chunks that came, how old the newest token of a chunk
was when the client had it (from the end of its step), and cores used by each process.
"""

import argparse
import asyncio
import gc
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np
from server_cpu import cpu_seconds
from stamps import StampReader
from stream_client import Seen, Stream, open_stream

from sglang.embedded.model import embedded_model_path
from sglang.srt.utils.text_tokenizer import TextTokenizer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "spec_toggle"))
from servers import Server, running_server, wait_until_healthy  # noqa: E402

_COLUMNS = (
    "streams", "offered tok/s", "tok/s", "chunks/s", "age p50 ms", "p99 ms", "max ms", "KB/s",
    "client cores", "server cores",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Figures:
    streams: int
    offered_tokens_s: float
    tokens_s: float
    chunks_s: float
    age_p50_ms: float
    age_p99_ms: float
    age_max_ms: float
    bytes_s: float
    client_cores: float
    server_cores: dict[str, float]

    def row(self) -> str:
        servers = ", ".join(f"{name} {cores:.2f}" for name, cores in sorted(self.server_cores.items()))
        return (
            f"| {self.streams} | {self.offered_tokens_s:,.0f} | {self.tokens_s:,.0f} | {self.chunks_s:,.0f} |"
            f" {self.age_p50_ms:.1f} | {self.age_p99_ms:.1f} | {self.age_max_ms:.0f} |"
            f" {self.bytes_s / 1000:,.0f} | {self.client_cores:.2f} | {servers} |"
        )


@contextmanager
def word_server(flags: list[str], slots: int, step_ms: float, pages: int = 0) -> Iterator[Server]:
    """``pages``: KV places; 0: enough for long streams."""
    command = [sys.executable, str(HERE / "word_server.py"), "--fake-slots", str(slots)]
    command += ["--fake-step-ms", str(step_ms), "--fake-pages", str(pages)]
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server("words", flags, Path(folder), command) as server,
    ):
        wait_until_healthy(server, 60)
        yield server


def request_body(path: str, tokens: int) -> dict[str, object]:
    """Of a request that runs to its last token."""
    if path == "/generate":
        return {"text": "hello", "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
    body: dict[str, object] = {"max_tokens": tokens, "ignore_eos": True}
    if path == "/v1/completions":
        return {**body, "prompt": "hello"}
    return {**body, "messages": [{"role": "user", "content": "hello"}]}


def _own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def measure(
    server: Server, path: str, streams: int, rate: float, seconds: float, reader: StampReader
) -> Figures:
    """Open ``streams``, wait for their first tokens, and look for ``seconds``."""
    port = int(server.base_url.rpartition(":")[2])
    seen = Seen()
    body = request_body(path, int((seconds + 20) * rate * 4))
    opened = []
    for _ in range(streams):
        opened.append(await open_stream("127.0.0.1", port, lambda: Stream(path, body, reader, seen)))
    await asyncio.gather(*(stream.first_token() for stream in opened))
    gc.collect()
    gc.freeze()  # pauses here are none of the server's
    await asyncio.sleep(1.0)
    own, theirs, began = _own_cpu_s(), cpu_seconds(server.process.pid), time.monotonic()
    seen.clear()
    await asyncio.sleep(seconds)
    took = time.monotonic() - began
    chunks, tokens, size, ages = seen.chunks, seen.tokens, seen.bytes, np.array(seen.ages_s or [np.nan])
    own_after, theirs_after = _own_cpu_s(), cpu_seconds(server.process.pid)
    if any(stream.ended.done() for stream in opened):
        raise RuntimeError("a stream ended while it was looked at: --seconds is too long for the context")
    for stream in opened:
        assert stream.transport is not None
        stream.transport.abort()
    p50, p99 = np.percentile(ages, [50, 99]) * 1000
    cores = {name: (theirs_after[name] - used) / took for name, used in theirs.items()}
    return Figures(
        streams, streams * rate, tokens / took, chunks / took, float(p50), float(p99),
        float(ages.max()) * 1000, size / took,
        (own_after - own) / took, cores,
    )  # fmt: skip


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", default="64,250", help="e.g. 64,250")
    parser.add_argument("--tokens-per-second", type=float, default=60.0, help="of each stream")
    parser.add_argument("--seconds", type=float, default=10.0, help="of looking, for each number of streams")
    parser.add_argument("--path", default="/v1/chat/completions", help="or /generate, /v1/completions")
    parser.add_argument("--out", help="file that records are added to, one JSON line each")
    parser.add_argument(
        "--server-flags", default="", help="more flags of the server, e.g. '--tokenizer-worker-num 2'"
    )
    flags = parser.parse_args()
    reader = StampReader(TextTokenizer.from_folder(embedded_model_path()))
    print(f"| {' | '.join(_COLUMNS)} |")
    print("|-" * len(_COLUMNS) + "|")
    for streams in map(int, flags.streams.split(",")):
        rate = flags.tokens_per_second
        more = ["--speculative-algorithm", "NONE", "--max-running-requests", str(streams)]
        with word_server([*more, *flags.server_flags.split()], streams, 1000 / rate) as server:
            figures = asyncio.run(measure(server, flags.path, streams, rate, flags.seconds, reader))
        print(figures.row(), flush=True)
        if flags.out:
            with open(flags.out, "ab") as out:
                out.write(msgspec.json.encode({"path": flags.path, **asdict(figures)}) + b"\n")


if __name__ == "__main__":
    main()
