"""Step times of a model as one of 8 tensor-parallel ranks runs it, alone on one GPU without communication.

    python benchmark/h200/rank_stack.py --model kimi --out kimi.jsonl
    python benchmark/h200/rank_stack.py --model glm5 --contexts 1024 65536
    python benchmark/h200/rank_stack.py --table kimi.jsonl         # the tables again
    python benchmark/h200/rank_stack.py --model kimi --tiny --device cpu

Random weights in the real shapes and formats, of all layers, or of as many as the memory holds. A sum over
the ranks is this rank's own part, and what is gathered is its own part so many times. Requests have their
lengths set directly over random latents; a step is plain, or verifies three random tokens (no drafter runs).
Beside each time is what reading the bytes of the step would take at the speed of copying: all weights but the
embedding's and those of experts that were not hit, and the cache of every request once.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.h200.executors import Records, device_name
from benchmark.h200.rank_model import SLACK, Stack, Weights, copy_bandwidth, load
from benchmark.h200.rank_shapes import MODELS, shape_of
from benchmark.h200.shapes import write_folder
from sglang.srt.managers.executor_build_cuda import start_device
from sglang.srt.models.decoder import DecoderModel

SPARE_BYTES: Final = 8 << 30  # of the GPU's memory: activations and graphs
COPY_BYTES: Final = 2 << 30


@contextmanager
def loaded(args: argparse.Namespace, device: torch.device, out: Records) -> Iterator[DecoderModel]:
    """All layers, or fewer if they do not fit."""
    num_layers = args.layers
    while True:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as root:
            folder = write_folder(Path(root), shape_of(args.model, args.tiny, num_layers))
            try:
                model = load(folder, max(args.contexts) + SLACK, device, args.ranks)
                break
            except torch.OutOfMemoryError:
                all_layers = shape_of(args.model, args.tiny)
                whole = all_layers.get("text_config", all_layers)["num_hidden_layers"]
                num_layers = (num_layers or whole) * 3 // 4
        gc.collect()
        torch.cuda.empty_cache()
    out.add(
        "stack", model=args.model, layers=len(model.layers), ranks=args.ranks,
        weights=asdict(Weights.of(model)), hidden=model.config.hidden_size, vocab=model.config.vocab_size,
        load_s=round(time.perf_counter() - began, 1), bandwidth=copy_bandwidth(device, args.copy_bytes),
    )  # fmt: skip
    yield model


def places_that_fit(args: argparse.Namespace, model: DecoderModel, device: torch.device) -> int:
    """Of the cache: enough for the largest case, or what the memory holds."""
    wanted = max(args.batches) * (max(args.contexts) + SLACK)
    if device.type == "cpu":
        return wanted
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0] - SPARE_BYTES
    dtype = model.norm.weight.dtype
    return min(wanted, free // model.kv_shape.bytes_per_place(kv_dtype(args) or dtype, dtype))


def kv_dtype(args: argparse.Namespace) -> torch.dtype | None:
    return torch.float8_e4m3fn if args.kv_cache_dtype == "fp8_e4m3" else None


def measure(args: argparse.Namespace, out: Records) -> None:
    device = start_device() if args.device == "cuda" else torch.device("cpu")
    torch.manual_seed(0)
    with loaded(args, device, out) as model:
        places = places_that_fit(args, model, device)
        stack = Stack(model, args.batches, args.contexts, places, kv_dtype(args))
        weights = Weights.of(model)
        draft_lens = [queries - 1 for queries in args.queries]
        began = time.perf_counter()
        stack.prepare(args.batches, draft_lens, args.choices)
        out.add(
            "prepared",
            kv_cache_dtype=args.kv_cache_dtype,
            seconds=round(time.perf_counter() - began, 1),
            places=places,
        )
        bandwidth = out.lines[0]["bandwidth"] if out.lines[0]["kind"] == "stack" else 0.0
        for context in args.contexts:
            for batch in args.batches:
                if batch * (context + SLACK) > places:
                    out.add("skipped", batch=batch, context=context, why="the cache does not hold it")
                    continue
                for draft_len in draft_lens:
                    hit = stack.experts_hit(batch, context, draft_len)
                    times = stack.time_step(batch, context, draft_len, args.repeats)
                    read = weights.every_step + weights.num_moe_layers * hit * weights.an_expert
                    cache = batch * stack.cache_bytes(context)
                    out.add(
                        "step", model=args.model, layers=len(model.layers), batch=batch, context=context,
                        queries=draft_len + 1, ms=round(median(times), 4), best_ms=round(min(times), 4),
                        experts_hit=round(hit, 1), weight_bytes=int(read), cache_bytes=cache,
                        limit_ms=round((read + cache) / bandwidth * 1e3, 4),
                    )  # fmt: skip


def table(lines: Sequence[dict[str, Any]]) -> str:
    """A row for each batch, for each context plain and verifying: time, and the limit's share of it."""
    stacks = [line for line in lines if line["kind"] == "stack"]
    steps = [line for line in lines if line["kind"] == "step"]
    text = []
    for stack in stacks:
        of_model = [line for line in steps if line["model"] == stack["model"]]
        cells = {(s["batch"], s["context"], s["queries"]): s for s in of_model}
        columns = sorted({(context, queries) for _, context, queries in cells})
        text.append(
            f"{stack['model']}: {stack['layers']} layers as one of {stack['ranks']} ranks on"
            f" {stack['device']}, weights {stack['weights']['total'] / 1e9:.1f} GB, copying at"
            f" {stack['bandwidth'] / 1e12:.2f} TB/s; ms (share of the bandwidth limit)\n"
        )
        titles = [f"{context // 1024}k x {queries}" for context, queries in columns]
        text.append("| batch | experts hit | " + " | ".join(titles) + " |")
        text.append("|---" * (len(columns) + 2) + "|")
        for batch in sorted({batch for batch, _, _ in cells}):
            row = [cells.get((batch, *column)) for column in columns]
            hit = {f"{cell['experts_hit']:.0f}" for cell in row if cell}
            shown = [f"{c['ms']:.2f} ({c['limit_ms'] / c['ms']:.0%})" if c else "-" for c in row]
            text.append(f"| {batch} | {'/'.join(sorted(hit, key=int))} | " + " | ".join(shown) + " |")
        text.append("")
    return "\n".join(text)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="kimi")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, help="default: all of the model's, or as many as fit")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 16384, 65536])
    parser.add_argument("--queries", type=int, nargs="+", choices=(1, 2, 3, 4), default=[1, 4])
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8_e4m3"), default="auto")
    parser.add_argument("--repeats", type=int, default=10, help="timed steps of a case; the median counts")
    parser.add_argument("--choices", type=Path, help="file of kernel choices, written if it is not there")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--out", type=Path, help="append the records; default: rank_stack.jsonl in $OUT")
    parser.add_argument(
        "--tiny", action="store_true", help="small and short: does it run? figures mean nothing"
    )
    parser.add_argument("--table", type=Path, help="make the tables from this file and run nothing")
    args = parser.parse_args(argv)
    args.copy_bytes = COPY_BYTES
    if args.tiny:
        args.batches, args.contexts, args.repeats, args.copy_bytes = [1, 3], [40], 1, 1 << 20
    if args.out is None and "OUT" in os.environ:
        args.out = Path(os.environ["OUT"]) / "rank_stack.jsonl"
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.table is not None:
        print(table([json.loads(line) for line in args.table.read_text().splitlines()]))
        return 0
    out = Records(args.out, device_name(args.device))
    measure(args, out)
    print(table(out.lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
