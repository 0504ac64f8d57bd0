"""The study of parallel throughput: plain, speculative, toggled and automatic decoding: ``make bench-study``.

Starts two servers of the embedded model for each round, one with its drafter, and measures 1 to 250 streams
with coding and agentic prompts in every mode, in turn. With --base-url it measures running servers of any
make instead; with --launch-args it starts servers of any model. Every run is a line of a JSONL file, from
which --from-jsonl makes the report, the picture and the section of a document again.
"""

import asyncio
import os
import platform
import random
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.doc_section import SectionError, replace_section
from benchmark.spec_toggle import records, servers
from benchmark.spec_toggle.client import GenerationError, ServerRefusal
from benchmark.spec_toggle.columns import AUTO, Column, Target, columns_of_running, own_columns, probe
from benchmark.spec_toggle.protocols import PROTOCOLS, Wish
from benchmark.spec_toggle.records import PLAIN
from benchmark.spec_toggle.runner import Workload
from benchmark.spec_toggle.study_options import parse_arguments
from benchmark.spec_toggle.study_points import base_column, points_of
from benchmark.spec_toggle.study_prompts import fixed_prompt, load_prompts
from benchmark.spec_toggle.study_records import FIXED, StudyRecord, read_study
from benchmark.spec_toggle.study_report import markdown
from benchmark.spec_toggle.study_run import Budget, StudyWork, run_round
from sglang.benchmark.datasets import DatasetError, DatasetOptions

FAULTS = (
    servers.ServerError, ServerRefusal, GenerationError, DatasetError, SectionError, TimeoutError, ValueError,
)  # fmt: skip
Groups = list[tuple[str, ...]]
"""Which servers run together: names of `start`, or () for those that run already."""


def main(given: list[str] | None = None) -> int:
    """Measure (unless told only to report), then report."""
    arguments = parse_arguments(__doc__ or "", given)
    try:
        if not arguments.from_jsonl:
            measure(arguments)
        report(arguments)
    except FAULTS as error:
        print(f"error: {error or type(error).__name__}", file=sys.stderr)
        return 1
    return 0


def report(arguments: Namespace) -> None:
    """Write the report, the picture and, if wanted, the section of a document."""
    header, runs = read_study(arguments.from_jsonl or [arguments.out / "runs.jsonl"])
    text = markdown(header, runs)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "report.md").write_text(text, encoding="utf-8")
    print(text)
    if not runs:
        return
    from benchmark.spec_toggle.study_plot import draw

    stem = arguments.plot or arguments.out / "study"
    pictures = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    base = base_column(runs)
    draw(points_of(runs, base), base, pictures)
    print(f"report: {arguments.out / 'report.md'}; picture: {pictures[0]}, {pictures[1]}")
    if arguments.update_doc:
        replace_section(arguments.update_doc, arguments.section, text)
        print(f"section {arguments.section} of {arguments.update_doc} is written anew")


def measure(arguments: Namespace) -> None:
    """Run all rounds."""
    raw = arguments.out / "runs.jsonl"
    arguments.out.mkdir(parents=True, exist_ok=True)
    order = random.Random(arguments.seed)
    begun = time.monotonic()
    budgets = {group: Budget(60.0 * arguments.minutes, begun) for group in groups(arguments)}
    has_header = False

    def done(record: StudyRecord) -> None:
        records.append_record(raw, record)
        print(progress(record, time.monotonic() - begun), flush=True)

    for index in range(arguments.rounds):
        if index and time.monotonic() - begun > 60.0 * arguments.minutes and index >= 2:
            break
        for group, budget in budgets.items():
            with columns(group, arguments) as shown:
                work = workload(arguments, [column.target for column in shown])
                if not has_header:
                    records.write_header(raw, describe(arguments, shown, work))
                    has_header = True
                names = ", ".join(column.name for column in shown)
                print(f"{time.monotonic() - begun:6.0f} s  round {index}: ready: {names}", flush=True)
                asyncio.run(run_round(index, shown, work, order, budget, done))


def groups(arguments: Namespace) -> Groups:
    """Return the servers that run at the same time, group by group."""
    if arguments.base_url:
        return [()]
    needed = ["plain"] if PLAIN in arguments.modes else []
    needed += ["drafting"] if set(arguments.modes) - {PLAIN} else []
    return [(name,) for name in needed] if arguments.in_turn else [tuple(needed)]


@contextmanager
def columns(group: Sequence[str], arguments: Namespace) -> Iterator[list[Column]]:
    """Start a group's servers and yield its columns; stop them in the end."""
    threshold = threshold_of(arguments)
    if not group:
        headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else None
        protocol = PROTOCOLS[arguments.protocol] if arguments.protocol else None
        found = [asyncio.run(probe(name, url, protocol, headers)) for name, url in arguments.base_url]
        yield [c for target in found for c in columns_of_running(target, arguments.modes, threshold)]
        return
    with ExitStack() as stack:
        started = {name: start(name, arguments, stack) for name in group}
        yield own_columns(started.get("plain"), started.get("drafting"), arguments.modes, threshold)


def start(name: str, arguments: Namespace, stack: ExitStack) -> Target:
    """Start the server without a drafter (``plain``) or the one with it (``drafting``)."""
    drafts = name != "plain"
    if arguments.launch_args is not None:
        launch = shlex.split(arguments.launch_args)
        launch += shlex.split(arguments.drafter_args) if drafts else []
    else:
        launch = servers.embedded_arguments(None, arguments.num_steps, drafter=drafts)
        launch += ["--max-total-tokens", str(arguments.max_total_tokens)]
        most = max(*arguments.streams, threshold_of(arguments))  # what the threshold can be set to later
        launch += ["--max-running-requests", str(most)]
    if drafts and AUTO in arguments.modes:
        launch += ["--speculative-disable-bs-threshold", "auto"]  # so that it measures its costs
    launch += shlex.split(arguments.server_args)
    process = stack.enter_context(servers.running_server(name, launch, arguments.out))
    servers.wait_until_healthy(process, arguments.start_timeout)
    protocol = PROTOCOLS[arguments.protocol] if arguments.protocol else None
    return asyncio.run(probe(name, process.base_url, protocol, process=process))


def threshold_of(arguments: Namespace) -> int:
    """Return the toggle's threshold."""
    return servers.embedded_threshold() if arguments.threshold is None else int(arguments.threshold)


def is_embedded(arguments: Namespace) -> bool:
    """Whether the embedded model is served: everything is small then."""
    return not arguments.base_url and arguments.launch_args is None


def workload(arguments: Namespace, targets: Sequence[Target]) -> StudyWork:
    """Return what every round does.

    Raises:
        ValueError: the servers take complete texts only, and no tokenizer is here to make them.
    """
    named = next((t.tokenizer for t in targets if Path(t.tokenizer).is_dir() and t.tokenizer), "")
    tokenizer = arguments.tokenizer or named
    if not tokenizer and any(target.protocol.needs_text for target in targets):
        raise ValueError("give the model's folder with --tokenizer, or use --protocol chat")
    tools = arguments.max_tools if arguments.max_tools is not None or not is_embedded(arguments) else 2
    options = DatasetOptions(
        num_prompts=4 * arguments.num_prompts, seed=arguments.seed, max_tools=tools, held_out=True
    )
    prompts = load_prompts(arguments.datasets, tokenizer, options)
    tokens = arguments.tokens if arguments.tokens or is_embedded(arguments) else 256
    loads = {
        domain: Workload(
            tuple(few), arguments.streams, arguments.num_prompts, arguments.min_prompts, tokens,
            arguments.run_timeout,
        )
        for domain, few in prompts.items()
    }  # fmt: skip
    if arguments.fixed_runs:
        fixed = (fixed_prompt(tokenizer),)
        loads[FIXED] = Workload(fixed, (1,), 1, arguments.fixed_runs, tokens, arguments.run_timeout)
    return StudyWork(loads, arguments.cold, Wish(1, arguments.temperature))


def describe(arguments: Namespace, shown: Sequence[Column], work: StudyWork) -> dict[str, Any]:
    """Return what the reader of the numbers has to know about the run."""
    some = next(iter(work.domains.values()))
    tokens = ", ".join(f"{some.tokens_at(streams)} at {streams}" for streams in some.stream_counts)
    cache = "not in the prefix cache" if arguments.cold else "in the prefix cache"
    drafts = max(column.target.num_steps for column in shown)
    urls = dict.fromkeys(f"{c.target.name} ({c.target.protocol.name})" for c in shown)
    machine = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    return {
        "client's machine": f"{machine}, torch {version('torch')}",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "servers": ", ".join(urls) + (", started afresh for each round" if not arguments.base_url else ""),
        "work": f"at most {arguments.rounds} rounds, more than two only within {arguments.minutes:g} minutes;"
        f" temperature {arguments.temperature:g}; {arguments.num_prompts} prompts of a domain in a"
        f" round ({', '.join(arguments.datasets)}), {cache}",
        "tokens of each stream, by streams": tokens,
        "speculation": f"toggle threshold {threshold_of(arguments)}; {drafts} drafts",
    }


def progress(record: StudyRecord, elapsed: float) -> str:
    """Return the line that is printed for a finished run."""
    length = f"accept {record.spec_tokens / record.spec_steps:.2f}" if record.spec_steps else "no drafts"
    return (
        f"{elapsed:6.0f} s  {record.domain:8s} {record.streams:3d} streams  round {record.round}"
        f"  {record.column:14s} {record.total_rate:7.1f} tok/s total  {record.decode_rate:7.1f} decode"
        f"  {length}"
    )


if __name__ == "__main__":
    servers.exit_on_sigterm()
    sys.exit(main())
