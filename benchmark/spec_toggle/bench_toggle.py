"""Plain, speculation always, and the toggle, side by side on this machine: ``make bench-toggle``.

Every round starts two servers of the embedded model afresh, one of them with its drafter. In that one the
threshold is changed while it runs, so that speculation, plain steps and the toggle are compared inside one
process; at every number of streams the modes take turns, in a shuffled order, with the same held-out
prompts. The raw runs go to a JSONL file, from which ``--from-jsonl`` makes the report again.
"""

import argparse
import asyncio
import os
import platform
import random
import sys
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.spec_toggle import prompts, records, report, servers
from benchmark.spec_toggle.records import RunRecord
from benchmark.spec_toggle.runner import Workload, modes_of, run_round

DOMAINS = ("humaneval_chat", "chat_template", "humaneval_raw", "chat_free")
SEED = 2


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=_int_list, default=(1, 2, 4, 8, 16, 32, 64), help="e.g. 1,2,4")
    parser.add_argument("--rounds", type=int, default=9, help="each starts both servers afresh")
    parser.add_argument("--tokens", type=int, help="of each stream (default: 2 to 7 s a run)")
    parser.add_argument("--min-prompts", type=int, default=2, help="prompts of a run with fewer streams")
    parser.add_argument("--num-prompts", type=int, default=16, help="of a round, from the domains in turn")
    parser.add_argument("--domains", type=lambda text: tuple(text.split(",")), default=DOMAINS)
    parser.add_argument("--threshold", type=int, help="N of the toggle (default: the embedded model's)")
    parser.add_argument("--num-steps", type=int, default=3, help="drafts of a speculative step")
    parser.add_argument("--max-total-tokens", type=int, default=65536, help="KV cache of each server")
    parser.add_argument("--server-args", default="", help="further arguments of all servers, in one string")
    parser.add_argument("--start-timeout", type=float, default=300.0)
    parser.add_argument("--run-timeout", type=float, default=300.0)
    parser.add_argument("--out", type=Path, default=Path(".cache/bench_toggle"), help="results and logs")
    parser.add_argument("--plot", type=Path, help="also write a PNG, e.g. docs/toggle_cpu.png")
    parser.add_argument("--from-jsonl", type=Path, help="only report on an earlier run")
    return parser.parse_args()


def main() -> int:
    """Measure (unless told only to report), write the report, print it."""
    arguments = parse_arguments()
    servers.exit_on_sigterm()
    raw = arguments.from_jsonl or arguments.out / "runs.jsonl"
    if not arguments.from_jsonl:
        try:
            measure(arguments, raw)
        except servers.ServerError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    run = records.read_run(raw)
    text = report.markdown(run)
    (raw.parent / "report.md").write_text(text, encoding="utf-8")
    print(text)
    if arguments.plot and run.records:
        from benchmark.spec_toggle.plot import draw

        draw(report.rows_of(run.records), arguments.plot)
        print(f"plot: {arguments.plot}")
    return 0


def measure(arguments: argparse.Namespace, raw: Path) -> None:
    """Run all rounds."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    threshold = arguments.threshold if arguments.threshold is not None else servers.embedded_threshold()
    work = workload(arguments)
    records.write_header(raw, describe(arguments, threshold, work))
    order = random.Random(SEED)
    begin = time.monotonic()

    def done(record: RunRecord) -> None:
        records.append_record(raw, record)
        print(progress(record, time.monotonic() - begin), flush=True)

    for index in range(arguments.rounds):
        with ExitStack() as stack:
            plain = start_server("plain", arguments, stack)
            drafting = start_server("drafting", arguments, stack)
            print(f"{time.monotonic() - begin:6.0f} s  round {index}: both servers are ready", flush=True)
            modes = modes_of(plain, drafting, threshold)
            asyncio.run(run_round(index, modes, work, order, done))


def workload(arguments: argparse.Namespace) -> Workload:
    """Return what every round does."""
    return Workload(
        prompts=tuple(prompts.interleaved(prompts.read_prompts(domains=arguments.domains))),
        stream_counts=arguments.streams,
        num_prompts=arguments.num_prompts,
        min_prompts=arguments.min_prompts,
        tokens=arguments.tokens,
        timeout_s=arguments.run_timeout,
    )


def start_server(name: str, arguments: argparse.Namespace, stack: ExitStack) -> servers.Server:
    """Start the server without a drafter (``plain``) or the one with it; ``stack`` stops it."""
    # Without a threshold at first: it can then be set to any.
    launch = servers.embedded_arguments(None, arguments.num_steps, drafter=name != "plain")
    launch += ["--max-total-tokens", str(arguments.max_total_tokens), *arguments.server_args.split()]
    server = stack.enter_context(servers.running_server(name, launch, arguments.out))
    servers.wait_until_healthy(server, arguments.start_timeout)
    return server


def describe(arguments: argparse.Namespace, threshold: int, work: Workload) -> dict[str, Any]:
    """Return what the reader of the numbers has to know about the run."""
    tokens = ", ".join(f"{work.tokens_at(streams)} at {streams}" for streams in work.stream_counts)
    return {
        "machine": f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()},"
        f" torch {version('torch')}",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "work": f"{arguments.rounds} rounds, both servers started afresh for each; greedy; each round another"
        f" {arguments.num_prompts} held-out prompts of {', '.join(arguments.domains)}, in the prefix cache",
        "tokens of each stream, by streams": tokens,
        "speculation": f"EAGLE-3, {arguments.num_steps} drafts (chain); toggle threshold {threshold}",
        "load average at the start": f"{os.getloadavg()[0]:.2f}",
    }


def progress(record: RunRecord, elapsed: float) -> str:
    """Return the line that is printed for a finished run."""
    length = f"accept {record.spec_tokens / record.spec_steps:.2f}" if record.spec_steps else "no drafts"
    return (
        f"{elapsed:6.0f} s  {record.streams:3d} streams  round {record.round}  {record.mode:14s}"
        f" {record.decode_rate:7.1f} tok/s decode  {record.total_rate:7.1f} total  {length}"
    )


def _int_list(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
