"""SmolLM2 with its drafter at 1 to 256 streams: plain, always speculating, and toggled at a threshold.

    python benchmark/h200/smollm2_streams.py --threshold 64 --out streams.jsonl

Held-out prompts, greedy, 256 tokens each and past the end of the answer; tokens per second while all
streams run. Acceptance is the drafter's own. "plain" is an executor without a drafter.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.h200.executors import (
    CHAIN,
    Records,
    Shape,
    Wanted,
    add_common_flags,
    device_name,
    started,
)
from benchmark.h200.models import Prompt, add_model_flags, context_of, folders_of, heldout_ids
from sglang.bench_one_batch_cases import DecodeTimes, OneBatch, decode_times, places_needed
from sglang.srt.model_executor.executor import Executor

DRAFTS = CHAIN[0]
STREAMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TINY_STREAMS = (1, 2)
OUTPUT_LEN, TINY_OUTPUT_LEN = 256, 8
MODES = ("plain", "spec", "toggle", "plain+drafter")


def run(executor: Executor, prompts: Sequence[Prompt], draft_len: int, output_len: int) -> DecodeTimes:
    places = places_needed(executor, max(len(prompt.ids) for prompt in prompts), output_len)
    batch = OneBatch(executor, [prompt.ids for prompt in prompts], places)
    batch.prefill()
    times = decode_times(batch.decode_all([draft_len], output_len))
    assert times is not None
    return times


def runs_of(shape: Shape | None, threshold: int, streams: int) -> Iterator[tuple[str, int]]:
    """Modes and draft lengths to run with such an executor."""
    if shape is None:
        yield "plain", 0
        return
    yield "spec", DRAFTS
    yield "toggle", DRAFTS if streams <= threshold else 0
    yield "plain+drafter", 0


def table(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Tokens per second, the better of the passes; and tokens a row and step of the speculative steps."""
    found = [line for line in lines if line["kind"] == "streams"]
    rows = [
        "| streams | plain tok/s | spec | toggle | plain+drafter | tokens a spec step | toggle / better |",
        "|" + "---|" * 7,
    ]
    for streams in sorted({line["streams"] for line in found}):
        rates, accept = {}, ""
        for mode in MODES:
            picked = [x for x in found if x["streams"] == streams and x["mode"] == mode]
            rates[mode] = max((x["tokens_per_s"] for x in picked), default=0.0)
            if mode == "spec" and picked:
                accept = f"{picked[-1]['tokens_per_row']:.2f}"
        better = max(rates["plain"], rates["spec"])
        share = f"{rates['toggle'] / better:.3f}" if better else ""
        cells = [str(streams), *(f"{rates[mode]:.0f}" for mode in MODES), accept, share]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_flags(parser)
    add_model_flags(parser)
    parser.add_argument("--threshold", type=int, required=True, help="more streams than this decode plainly")
    parser.add_argument("--streams", type=int, nargs="+", help="default: 1 to 256, doubling")
    parser.add_argument("--output-len", type=int)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    args = parser.parse_args(argv)
    os.environ.pop("SGLANG_SIMULATE_ACC_LEN", None)
    streams = args.streams or (TINY_STREAMS if args.tiny else STREAMS)
    output_len = args.output_len or (TINY_OUTPUT_LEN if args.tiny else OUTPUT_LEN)
    folders, most = folders_of(args), max(streams)
    prompts = heldout_ids(args, folders.target, output_len)
    longest = max(len(prompt.ids) for prompt in prompts[:most])
    out = Records(args.out, device_name(args.device))
    for shape in (None, CHAIN):
        wanted = Wanted(
            folders,
            shape,
            args.device,
            most,
            total_tokens=most * (longest + output_len + 16),
            context_len=context_of(folders.target),
            spec_rows=most,
            graph_sizes=tuple(sorted(streams)),
            dtype=args.dtype or ("bfloat16" if args.device == "cuda" else "float32"),
        )
        with started(wanted, out, "plain" if shape is None else "drafter") as executor:
            cases = [(rows, *case) for rows in streams for case in runs_of(shape, args.threshold, rows)]
            # The first pass is not counted: kernels may be compiled in it.
            for number, (rows, mode, draft_len) in product(range(-1, args.passes), cases):
                chosen = list(islice(cycle(prompts), rows))
                times = run(executor, chosen, draft_len, output_len)
                if number >= 0:
                    labels = {"mode": mode, "streams": rows, "draft_len": draft_len, "number": number}
                    out.add("streams", **labels, **asdict(times))
    print("\n".join(table(out.lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
