"""A thousand streams for five minutes against a server without a model; nothing may be left of them.

    make load; for less: make load ARGS="--seconds 60 --streams 200"

The executor makes words (see ../http_streaming); HTTP, tokenizer, scheduler and detokenizer are the server's.
Most clients read to the end, some vanish, some read slowly, some abort their request. Every request must be
answered or aborted once, and the server must hold nothing more at the end than at the begin: the exit code
is 1 if not.
"""

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "http_streaming"))
from clients import Clients
from footprint import Footprint, growth, held_when_idle, look
from http_streaming import word_server
from server_cpu import cpu_seconds
from servers import Server
from stamps import StampReader

from sglang.embedded.model import embedded_model_path
from sglang.srt.utils.open_files import allow_many_files
from sglang.srt.utils.text_tokenizer import TextTokenizer

_LOOK_S: Final = 2.0
_PAGES_A_STREAM: Final = 300  # so few that prefixes are evicted all the time


@dataclass(frozen=True, slots=True)
class Drive:
    clients: Clients
    footprints: list[Footprint]
    tokens_s: float  # this and what follows: of clients that read at once, while all ran
    chunks_s: float
    ages_s: list[float]
    cores: dict[str, float]


async def drive(server: Server, flags: argparse.Namespace) -> Drive:
    """All clients at once, until the time is over and the last answer has ended."""
    port = int(server.base_url.rpartition(":")[2])
    reader = StampReader(TextTokenizer.from_folder(embedded_model_path()))
    footprints = []
    # No connection is used twice for aborts: the server closes idle ones, perhaps just then.
    connector = aiohttp.TCPConnector(limit=50, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        clients = Clients(port, reader, session, flags.seed)
        running = [asyncio.create_task(clients.run()) for _ in range(flags.streams)]
        began = time.monotonic()
        await asyncio.sleep(
            min(20.0, flags.seconds / 5)
        )  # until the first requests have ended and others begun
        clients.fast.clear()
        looked_from, before = time.monotonic(), cpu_seconds(server.process.pid)
        while time.monotonic() < began + flags.seconds:
            footprints.append(look(server.process.pid, began))
            await asyncio.sleep(_LOOK_S)
        took, after = time.monotonic() - looked_from, cpu_seconds(server.process.pid)
        tokens, chunks, ages = clients.fast.tokens, clients.fast.chunks, list(clients.fast.ages_s)
        clients.stop()
        await asyncio.gather(*running)
    cores = {name: (after[name] - used) / took for name, used in before.items()}
    return Drive(clients, footprints, tokens / took, chunks / took, ages, cores)


def report(drive: Drive) -> list[str]:
    """Print the figures; what is wrong."""
    tally, footprints = drive.clients.tally, drive.footprints
    print(f"requests: {sum(tally.ended.values())}")
    for how, count in sorted(tally.ended.items()):
        print(f"  {how}: {count}")
    p50, p99 = np.percentile(np.array(drive.ages_s) * 1000, [50, 99])
    print(
        f"of clients that read at once: {drive.tokens_s:,.0f} tokens/s in {drive.chunks_s:,.0f} chunks/s;"
        f" from the end of a token's step to its client: median {p50:.1f} ms, p99 {p99:.1f} ms"
    )
    print("cores: " + ", ".join(f"{name} {used:.2f}" for name, used in sorted(drive.cores.items())))
    lines, grown = growth(footprints, (footprints[-1].at_s - footprints[0].at_s) / 4)
    print("\n".join(lines))
    return sorted(set(tally.wrong)) + grown


def main() -> int:
    """Run it, print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--step-ms", type=float, default=400, help="of the executor; a token or more each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server-flags", default="", help="e.g. '--tokenizer-worker-num 2'")
    flags = parser.parse_args()
    allow_many_files()
    # About as many rows decode at once: steps go from one mode to the other and back.
    threshold = ["--speculative-disable-bs-threshold", str(round(flags.streams * 0.95))]
    server_flags = ["--max-running-requests", str(flags.streams), *threshold, *flags.server_flags.split()]
    pages = _PAGES_A_STREAM * flags.streams
    with word_server(server_flags, flags.streams, flags.step_ms, pages) as server:
        wrong = report(asyncio.run(drive(server, flags)))
        wrong += held_when_idle(server.base_url)
        if server.process.poll() is not None:
            wrong.append(f"the server ended:\n{server.log_tail()}")
    print("\n".join(f"WRONG: {line}" for line in wrong) or "nothing leaked, every request ended once")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
