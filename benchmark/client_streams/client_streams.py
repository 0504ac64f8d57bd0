"""How many streams can one client process follow? A server that generates nothing sends them.

    python benchmark/client_streams/client_streams.py --streams 100,1000 --gap-ms 100 --tokens 50

Prints, for each number of streams, the client's processor time, how late events were read (the spread of
the time between them, which the server keeps constant), and how many requests failed.
"""

import argparse
import asyncio
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from sglang.benchmark.backends import BACKENDS, RequestSettings
from sglang.benchmark.client import open_session, send
from sglang.benchmark.load import run_load
from sglang.benchmark.outcome import Outcome
from sglang.benchmark.prompt_row import PromptRow
from sglang.benchmark.server_info import wait_until_ready


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@contextmanager
def _fake_server(gap_ms: float) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, str(Path(__file__).parent / "fake_llm.py"), "--port", str(port)]
    process = subprocess.Popen([*command, "--gap-ms", str(gap_ms)])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


async def measure(url: str, backend: str, streams: int, tokens: int) -> tuple[list[Outcome], float]:
    """Return the outcomes, and the client's processor seconds."""
    kind, settings = BACKENDS[backend], RequestSettings("fake")
    rows = [PromptRow("hello", 1, tokens)] * streams
    async with open_session(url, {}) as session:
        await wait_until_ready(session, url, 20)

        async def one(row: PromptRow) -> Outcome:
            body = kind.request(row, settings)
            return await send(session, kind.path, body, kind.reader(time.perf_counter()))

        before = _cpu_s()
        outcomes = await run_load(rows, one, float("inf"), None, 0, lambda _: None)
        return outcomes, _cpu_s() - before


def _report(streams: int, outcomes: list[Outcome], cpu_s: float, wall_s: float) -> str:
    good = [outcome for outcome in outcomes if outcome.success]
    gaps = np.array([gap for outcome in good for gap in outcome.itl] or [0.0]) * 1000
    events = sum(len(outcome.itl) + 1 for outcome in good)
    p50, p99 = np.percentile(gaps, [50, 99])
    return (
        f"| {streams} | {len(outcomes) - len(good)} | {wall_s:.1f} | {cpu_s:.2f} |"
        f" {cpu_s / max(events, 1) * 1e6:.0f} | {p50:.1f} | {p99:.1f} |"
    )


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", default="100,1000", help="e.g. 100,1000")
    parser.add_argument("--gap-ms", type=float, default=100.0, help="between a stream's events")
    parser.add_argument("--tokens", type=int, default=50, help="of each stream, one an event")
    parser.add_argument("--backend", default="sglang", choices=list(BACKENDS))
    flags = parser.parse_args()
    print("| streams | failed | wall s | client CPU s | CPU us an event | gap p50 ms | gap p99 ms |")
    print("|-|-|-|-|-|-|-|")
    for streams in map(int, flags.streams.split(",")):
        with _fake_server(flags.gap_ms) as url:
            began = time.perf_counter()
            outcomes, cpu_s = asyncio.run(measure(url, flags.backend, streams, flags.tokens))
            print(_report(streams, outcomes, cpu_s, time.perf_counter() - began))


if __name__ == "__main__":
    main()
