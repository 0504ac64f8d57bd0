"""One trace of arrivals, replayed in several modes of one server: ``make bench-trace``.

The trace is a file or made up (burst, poisson, diurnal). Each mode (plain, spec, toggle, auto, or a number:
that threshold) is set on the running server, and meets the same arrivals with an empty prefix cache. Writes
the figures of every second and of the whole as JSONL, a table, and a picture in which the modes are strips.
"""

import asyncio
import os
import platform
import random
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.doc_section import SectionError, replace_section
from benchmark.spec_toggle import servers
from benchmark.spec_toggle.client import GenerationError, ServerRefusal
from benchmark.spec_toggle.columns import AUTO, Column, Target, mode_change, probe
from benchmark.spec_toggle.protocols import PROTOCOLS, Wish
from benchmark.spec_toggle.records import PLAIN, PLAIN_WITH_DRAFTER, SPEC, TOGGLE
from benchmark.spec_toggle.replay_figures import Second, Whole, seconds_of, whole_of
from benchmark.spec_toggle.replay_options import parse_arguments, trace_options
from benchmark.spec_toggle.replay_report import markdown, read_replays, write_replays
from benchmark.spec_toggle.replay_run import Replay, ReplayWork, replay
from benchmark.spec_toggle.runner import require_mode
from benchmark.spec_toggle.study_prompts import load_prompts
from benchmark.traces import KINDS, Arrival, TraceError, arrivals, read_trace, write_trace
from sglang.benchmark.datasets import DatasetError, DatasetOptions

FAULTS: Final = (
    servers.ServerError, ServerRefusal, GenerationError, DatasetError, SectionError, TraceError, TimeoutError,
    ValueError, OSError,
)  # fmt: skip


def main(given: list[str] | None = None) -> int:
    """Replay (unless told only to report), then report."""
    arguments = parse_arguments(__doc__ or "", given)
    try:
        raw = arguments.from_jsonl or arguments.out / "replays.jsonl"
        if not arguments.from_jsonl:
            measure(arguments, raw)
        report(arguments, raw)
    except FAULTS as error:
        print(f"error: {error or type(error).__name__}", file=sys.stderr)
        return 1
    return 0


def report(arguments: Namespace, raw: Path) -> None:
    """Write the table, the picture and, if wanted, the section of a document."""
    header, seconds, wholes = read_replays(raw)
    text = markdown(header, wholes)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "report.md").write_text(text, encoding="utf-8")
    print(text)
    from benchmark.spec_toggle.replay_plot import draw

    stem = arguments.plot or arguments.out / "replays"
    pictures = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    draw(seconds, f"One trace, {len({whole.column for whole in wholes})} modes of one server", pictures)
    print(f"report: {arguments.out / 'report.md'}; picture: {pictures[0]}, {pictures[1]}")
    if arguments.update_doc:
        replace_section(arguments.update_doc, arguments.section, text)


def measure(arguments: Namespace, raw: Path) -> None:
    """Replay the trace in every mode, in every round."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    trace = trace_of(arguments)
    write_trace(arguments.out / "trace.jsonl", trace)
    order = random.Random(arguments.seed)
    seconds: list[Second] = []
    wholes: list[Whole] = []
    with ExitStack() as stack:
        target = target_of(arguments, stack)
        work = work_of(arguments, target, trace)
        columns = columns_of(arguments, target)
        header = describe(arguments, target, trace)
        for index in range(arguments.rounds):
            done: dict[str, Replay] = {}
            for column in order.sample(columns, len(columns)):
                done[column.name] = asyncio.run(replay(column, work))
                print(progress(index, column, done[column.name]), flush=True)
            # In the columns' own order; the fixed modes' replays tell what is steady.
            fixed = {column.mode: done[column.name] for column in columns if column.mode in (PLAIN, SPEC)}
            for column in columns:
                seconds += seconds_of(column.name, index, done[column.name])
                wholes.append(whole_of(column.name, column.mode, index, done[column.name], fixed))
                _require_mode(wholes[-1])
            write_replays(raw, header, seconds, wholes)


def trace_of(arguments: Namespace) -> list[Arrival]:
    """Read or make up the trace."""
    if arguments.trace not in KINDS:
        path = Path(arguments.trace)
        if not path.is_file():
            raise TraceError(f"--trace {arguments.trace} is no file, and none of {', '.join(KINDS)}")
        return read_trace(path)
    return arrivals(arguments.trace, arguments.seed, trace_options(arguments))


def target_of(arguments: Namespace, stack: ExitStack) -> Target:
    """Return the server that runs, or start the embedded model's with its drafter."""
    protocol = PROTOCOLS[arguments.protocol] if arguments.protocol else None
    headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else None
    if arguments.base_url:
        name, url = arguments.base_url
        return asyncio.run(probe(name, url, protocol, headers))
    threshold = "auto" if AUTO in arguments.modes else None  # so that it measures its costs
    launch = servers.embedded_arguments(threshold, arguments.num_steps)
    launch += [
        "--max-running-requests",
        str(arguments.max_running_requests),
        *shlex.split(arguments.server_args),
    ]
    process = stack.enter_context(servers.running_server("replay", launch, arguments.out))
    servers.wait_until_healthy(process, arguments.start_timeout)
    return asyncio.run(probe("server", process.base_url, protocol, headers, process))


def columns_of(arguments: Namespace, target: Target) -> list[Column]:
    """Return one column a mode; a server whose mode can't be set is one column."""
    if not (target.is_ours and target.num_steps):
        return [Column(target.name, "", target)]
    threshold = servers.embedded_threshold() if arguments.threshold is None else arguments.threshold
    return [
        Column(f"N={mode}", TOGGLE, target, mode_change(TOGGLE, int(mode)))
        if mode.isdecimal()
        else Column(mode, mode, target, mode_change(mode, threshold))
        for mode in arguments.modes
    ]


def work_of(arguments: Namespace, target: Target, trace: Sequence[Arrival]) -> ReplayWork:
    """Return what every replay does."""
    tokenizer = arguments.tokenizer or (target.tokenizer if Path(target.tokenizer).is_dir() else "")
    if not tokenizer and target.protocol.needs_text:
        raise ValueError("give the model's folder with --tokenizer, or use --protocol chat")
    options = DatasetOptions(num_prompts=256, seed=arguments.seed, held_out=True, max_tools=2)
    by_domain = load_prompts(arguments.datasets, tokenizer, options)
    # One of each domain in turn: any stretch of the trace is a fair mix.
    prompts = [prompt for turn in zip(*by_domain.values(), strict=True) for prompt in turn]
    return ReplayWork(tuple(trace), tuple(prompts), Wish(1), arguments.poll, arguments.timeout)


def describe(arguments: Namespace, target: Target, trace: Sequence[Arrival]) -> dict[str, Any]:
    """Return what the reader of the numbers has to know."""
    threshold = servers.embedded_threshold() if arguments.threshold is None else arguments.threshold
    tokens = sum(arrival.output_len for arrival in trace)
    return {
        "client's machine": f"{os.cpu_count()} cores ({platform.machine()})",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "server": f"{target.name} ({target.protocol.name}), {target.num_steps} drafts; threshold {threshold}",
        "trace": f"{arguments.trace}, seed {arguments.seed}: {len(trace)} requests in"
        f" {trace[-1].second:.0f} s, {tokens} tokens",
        "replays": f"{arguments.rounds} in each mode, in shuffled order, prefix cache emptied before each",
    }


def progress(index: int, column: Column, done: Replay) -> str:
    """Return the line that is printed after a replay."""
    tokens = sum(trace.counts[-1] for trace in done.traces)
    seconds = max(trace.times[-1] for trace in done.traces)
    failed = f", {len(done.errors)} FAILED ({done.errors[0]})" if done.errors else ""
    rate = f"{tokens} tokens in {seconds:.1f} s: {tokens / seconds:.1f} tok/s"
    return f"round {index}  {column.name:8s} {rate}{failed}"


def _require_mode(whole: Whole) -> None:
    mode = PLAIN_WITH_DRAFTER if whole.mode == PLAIN else whole.mode
    if whole.plain_steps is not None and whole.spec_steps is not None:
        require_mode(mode, whole.plain_steps, whole.spec_steps)


if __name__ == "__main__":
    servers.exit_on_sigterm()
    sys.exit(main())
