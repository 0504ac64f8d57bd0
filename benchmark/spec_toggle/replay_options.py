"""The command line of the trace replay."""

import argparse
import os
from argparse import Namespace
from pathlib import Path
from typing import Final

from benchmark.spec_toggle.columns import AUTO
from benchmark.spec_toggle.protocols import PROTOCOLS
from benchmark.spec_toggle.records import PLAIN, SPEC, TOGGLE
from benchmark.spec_toggle.study_options import name_list, named_url
from benchmark.traces import KINDS, TraceOptions

MODES: Final = (PLAIN, SPEC, TOGGLE, AUTO)


def parse_arguments(description: str, arguments: list[str] | None = None) -> Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _trace_flags(parser.add_argument_group("the trace"))
    _work_flags(parser.add_argument_group("what is done with it"))
    _server_flags(parser.add_argument_group("the server"))
    _output_flags(parser.add_argument_group("output"))
    known = parser.parse_args(arguments)
    wrong = [mode for mode in known.modes if mode not in MODES and not mode.isdecimal()]
    if wrong:
        parser.error(f"--modes takes {', '.join(MODES)} and numbers, not {', '.join(wrong)}")
    return known


def trace_options(known: Namespace) -> TraceOptions:
    """Return what a trace that is made up is to be like."""
    return TraceOptions(
        duration_s=known.duration,
        rate=known.rate,
        peak_rate=known.peak_rate,
        peak=known.peak,
        ramp_s=known.ramp,
        period_s=known.period,
        output_len=known.output_len,
        spread=known.spread,
    )


def _trace_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--trace", default="burst", help=f"{', '.join(KINDS)}, or a file of JSON lines")
    group.add_argument("--seed", type=int, default=1)
    group.add_argument("--duration", type=float, default=60.0, help="seconds in which requests arrive")
    group.add_argument("--rate", type=float, default=0.3, help="arrivals a second (between bursts; at night)")
    group.add_argument("--peak-rate", type=float, default=4.0, help="arrivals a second at noon (diurnal)")
    group.add_argument("--peak", type=int, default=100, help="requests of a burst")
    group.add_argument("--ramp", type=float, default=2.0, help="seconds in which they arrive")
    group.add_argument("--period", type=float, default=0.0, help="seconds (default: one in the whole trace)")
    group.add_argument("--output-len", type=int, default=32, help="tokens of an answer, on average")
    group.add_argument("--spread", type=float, default=0.5, help="of the lengths (sigma of their logarithm)")
    group.add_argument("--datasets", type=name_list, default=("humaneval", "chat"), help="and bfcl")


def _work_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--modes", type=name_list, default=MODES, help="or numbers, which are thresholds")
    group.add_argument("--rounds", type=int, default=1, help="replays in each mode; from 2 on with intervals")
    group.add_argument("--poll", type=float, default=0.25, help="seconds between looks at the server's state")
    group.add_argument("--timeout", type=float, default=600.0, help="seconds of one replay")


def _server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--base-url", type=named_url, metavar="NAME=URL", help="default: start one")
    group.add_argument("--protocol", choices=tuple(PROTOCOLS), help="default: native, or else chat")
    group.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="or OPENAI_API_KEY")
    group.add_argument("--tokenizer", default="", help="folder (default: what the server says)")
    group.add_argument("--threshold", type=int, help="N of toggle (default: the embedded model's)")
    group.add_argument("--num-steps", type=int, default=3, help="drafts of a speculative step")
    group.add_argument("--server-args", default="", help="further arguments of a started one, in one string")
    group.add_argument("--max-running-requests", type=int, default=256, help="of a started one")
    group.add_argument("--start-timeout", type=float, default=300.0)


def _output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--out", type=Path, default=Path(".cache/replay"), help="results and logs")
    group.add_argument("--plot", type=Path, help="where the picture goes as .png and .svg (default: --out)")
    group.add_argument("--from-jsonl", type=Path, help="only report on an earlier run")
    group.add_argument("--update-doc", type=Path, help="a Markdown file to put the report into")
    group.add_argument("--section", default="cpu-trace", help="between its markers of this name")
