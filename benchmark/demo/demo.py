"""One server under a load that rises and falls, seen choosing its mode: ``make demo``.

Starts the embedded model's server, drives it from 1 to 16 to 1 concurrent streams, shows a live table and
writes a picture (and the samples it is made of, as JSON lines beside it). The server is always stopped.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import httpx
from rich.console import Console
from rich.live import Live

from benchmark.demo.load import StreamPool, TokenCounter
from benchmark.demo.monitor import Plateau, Sample, take_sample, write_samples
from benchmark.demo.plot import draw
from benchmark.demo.table import live_table, plateau_line
from benchmark.spec_toggle import client, servers
from benchmark.spec_toggle.prompts import HELDOUT, interleaved, read_prompts
from benchmark.spec_toggle.protocols import Wish
from benchmark.spec_toggle.streams import generate, open_streams

PLATEAUS = (1, 2, 4, 8, 16, 8, 4, 2, 1)
DOMAINS = ("tasks", "chat_template", "chat_free")
THRESHOLD = 6
"""So low that 16 streams cross it twice; ``make bench-toggle`` says where speculation stops paying."""
COUNTING_WINDOW_S = 2.0
STEP_WINDOW_S = 1.0
SLACK_S = 120.0
"""How much longer than its plateaus the demo may take before it gives up."""


@dataclass(slots=True)
class Course:
    """What has been seen of the demo so far; grows while it runs."""

    plateaus: list[Plateau] = field(default_factory=list)

    @property
    def samples(self) -> list[Sample]:
        """All samples in order."""
        return [sample for plateau in self.plateaus for sample in plateau.samples]

    def add(self, sample: Sample) -> None:
        """Add a sample to the last plateau."""
        last = self.plateaus[-1]
        self.plateaus[-1] = replace(last, samples=(*last.samples, sample))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs/demo.png"), help="the picture")
    parser.add_argument("--plateaus", type=_int_list, default=PLATEAUS, help="streams, e.g. 1,4,16,4,1")
    parser.add_argument("--seconds", type=float, default=9.0, help="length of a plateau")
    parser.add_argument("--poll", type=float, default=0.3, help="seconds between two samples")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument(
        "--threshold", type=int, default=THRESHOLD, help="more streams than this: plain steps"
    )
    parser.add_argument("--prompts", type=Path, default=HELDOUT, help="JSON lines with domain and text")
    parser.add_argument("--domains", type=_name_list, default=DOMAINS, help="of the prompts")
    parser.add_argument("--base-url", help="drive this running server instead of starting one")
    parser.add_argument("--server-args", default="", help="further arguments of the server, in one string")
    parser.add_argument("--start-timeout", type=float, default=300.0)
    return parser.parse_args()


def main() -> int:
    """Run the demo; return the exit code."""
    arguments = parse_arguments()
    servers.exit_on_sigterm()
    console = Console()
    try:
        with ExitStack() as stack:
            url = arguments.base_url or start_server(arguments, stack, console)
            samples = run(url, arguments, console)
    except (servers.ServerError, client.GenerationError, httpx.HTTPError, TimeoutError) as error:
        console.print(f"[bold red]demo failed:[/] {type(error).__name__}: {error}", highlight=False)
        return 1
    write_samples(arguments.out.with_suffix(".jsonl"), samples)
    draw(samples, arguments.out, "SmolLM2-135M-Instruct")
    console.print(f"wrote {arguments.out} and {arguments.out.with_suffix('.jsonl')}")
    return 0


def start_server(arguments: argparse.Namespace, stack: ExitStack, console: Console) -> str:
    """Start the embedded model's server, and return its URL; ``stack`` stops it."""
    log_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sglang-demo-")))
    launch = ["--enable-metrics", "--speculative-disable-bs-threshold", str(arguments.threshold)]
    launch += arguments.server_args.split()
    begin = time.monotonic()
    server = stack.enter_context(servers.running_server("demo", launch, log_dir))
    with console.status("starting the server (the first start converts the model)"):
        servers.wait_until_healthy(server, arguments.start_timeout)
    console.print(f"server ready at {server.base_url} after {time.monotonic() - begin:.1f} s")
    return server.base_url


def run(url: str, arguments: argparse.Namespace, console: Console) -> list[Sample]:
    """Drive the server through the plateaus, showing the table; return the samples."""
    course = Course()
    limit = len(arguments.plateaus) * arguments.seconds + SLACK_S
    if not console.is_terminal:
        asyncio.run(asyncio.wait_for(drive(url, arguments, course, lambda: _print_finished(course)), limit))
        return course.samples
    with Live(console=console, refresh_per_second=4) as live:

        def show() -> None:
            live.update(live_table(course.plateaus, course.samples[-1].threshold))

        asyncio.run(asyncio.wait_for(drive(url, arguments, course, show), limit))
    return course.samples


def _print_finished(course: Course) -> None:
    """Print the running plateau's line when its time is up (for output that is no terminal)."""
    last = course.plateaus[-1]
    if last.samples[-1].seconds >= last.end:
        print(plateau_line(last), flush=True)


async def drive(url: str, arguments: argparse.Namespace, course: Course, show: Callable[[], None]) -> None:
    """Hold each number of streams for a while, sampling; ``show`` is called after every sample."""
    prompts = interleaved(read_prompts(arguments.prompts, arguments.domains))
    params: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": arguments.max_new_tokens}
    counter = TokenCounter(COUNTING_WINDOW_S, STEP_WINDOW_S)
    async with client.open_client(url) as http, open_streams(url) as session:
        await generate(session, prompts[-1], Wish(8, ignore_eos=False))  # warm-up
        pool = StreamPool(session, prompts, params, counter)
        try:
            await _plateaus(http, pool, counter, arguments, course, show)
        finally:
            await pool.close()


async def read_state(http: httpx.AsyncClient) -> dict[str, Any]:
    """Return ``internal_states[0]``, with the number of running requests from ``/metrics`` if it lacks it."""
    state = await client.internal_state(http)
    if state.get("num_running_reqs") is None:
        state["num_running_reqs"] = await client.metric(http, "sglang:num_running_reqs")
    return state


async def _plateaus(
    http: httpx.AsyncClient,
    pool: StreamPool,
    counter: TokenCounter,
    arguments: argparse.Namespace,
    course: Course,
    show: Callable[[], None],
) -> None:
    begin = time.perf_counter()
    for streams in arguments.plateaus:
        await pool.resize(streams)
        start = time.perf_counter() - begin
        end = start + arguments.seconds
        course.plateaus.append(Plateau(start, end, streams, ()))
        while time.perf_counter() - begin < end:
            await asyncio.sleep(arguments.poll)
            pool.check()
            state = await read_state(http)
            now = time.perf_counter()
            before = course.samples[-1] if course.samples else None
            figures = (counter.rate(now), counter.tokens_per_step(now))
            course.add(take_sample(now - begin, len(pool), state, *figures, before))
            show()


def _name_list(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _int_list(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
