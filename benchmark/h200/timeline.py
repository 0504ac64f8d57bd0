"""What runs when in one decode step: the kernels of a graph replay, and a picture of them.

    python benchmark/h200/timeline.py --out timeline.json            # on the GPU
    python benchmark/h200/timeline.py --plot docs/timeline.png --out timeline.json   # of the file, anywhere

The shape and pages of ``step_times.py``. Kernels come from PyTorch's profiler (CUPTI), which slows steps
down a little: shares count, not the sum.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmark.h200.executors import CHAIN, Records, Shape, Wanted, started
from benchmark.h200.shapes import write_shapes
from sglang.bench_one_batch import random_prompts
from sglang.bench_one_batch_cases import OneBatch, places_needed
from sglang.srt.model_executor.executor import Executor

INPUT_LEN, OUTPUT_LEN, STEPS = 1024, 64, 6


def kernels_of(profile: Any) -> list[dict[str, Any]]:
    """Name, begin and end in microseconds, in the order of their begin."""
    found = []
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            found.append({"name": event.name, "begin": event.time_range.start, "end": event.time_range.end})
    return sorted(found, key=lambda kernel: kernel["begin"])


def last_step(kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The kernels from the last but one ``begin_rows`` on to the last one: one whole step."""
    starts = [i for i, kernel in enumerate(kernels) if "begin_rows" in kernel["name"]]
    return kernels[starts[-2] : starts[-1]]


def recorded(
    executor: Executor, rows: int, draft_len: int, prompts: Sequence[list[int]]
) -> list[dict[str, Any]]:
    batch = OneBatch(executor, prompts[:rows], places_needed(executor, INPUT_LEN, OUTPUT_LEN))
    batch.prefill()
    batch.decode_all([draft_len], OUTPUT_LEN, max_steps=STEPS)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        batch.decode_all([draft_len], OUTPUT_LEN, max_steps=STEPS)
    return last_step(kernels_of(profile))


def summary(kernels: list[dict[str, Any]]) -> str:
    """A line a kernel name: how many, microseconds each and in all; and how long nothing ran."""
    spent: dict[str, list[float]] = defaultdict(list)
    idle, end = 0.0, kernels[0]["begin"]
    for kernel in kernels:
        spent[kernel["name"]].append(kernel["end"] - kernel["begin"])
        idle += max(0.0, kernel["begin"] - end)
        end = max(end, kernel["end"])
    lines = [
        f"{sum(times):9.1f} us  {len(times):4} x {sum(times) / len(times):7.2f}  {name[:90]}"
        for name, times in sorted(spent.items(), key=lambda item: -sum(item[1]))
    ]
    total = end - kernels[0]["begin"]
    return "\n".join([f"{total:9.1f} us  in all, nothing running for {idle:.1f}", *lines])


def draw(steps: dict[str, list[dict[str, Any]]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = {
        "products": ("gemv", "gemm", "nvjet", "cutlass", "sm90"),
        "attention": ("decode_kernel", "plan_kernel"),
        "norm, rope, cache": ("norm", "rope", "pair_inputs"),
        "choose, accept": ("choose", "accept", "rules", "filter", "count", "begin_rows"),
    }
    figure, axes = plt.subplots(len(steps), 1, figsize=(11, 1.7 * len(steps)), squeeze=False)
    for axis, (title, kernels) in zip(axes[:, 0], steps.items(), strict=True):
        first = kernels[0]["begin"]
        for height, (group, words) in enumerate([*groups.items(), ("other", ("",))]):
            taken = [k for k in kernels if _group(k["name"], groups) == group]
            spans = [((k["begin"] - first) / 1e3, (k["end"] - k["begin"]) / 1e3) for k in taken]
            total = sum(length for _, length in spans)
            axis.broken_barh(spans, (height - 0.4, 0.8), color=f"C{height}", label=f"{group} {total:.2f} ms")
            assert words
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_yticks([])
        axis.legend(fontsize=7, ncols=5, loc="upper center", bbox_to_anchor=(0.6, 1.32), frameon=False)
    axes[-1, 0].set_xlabel("ms")
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def _group(name: str, groups: dict[str, tuple[str, ...]]) -> str:
    return next((g for g, words in groups.items() if any(w in name for w in words)), "other")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON: written, or read with --plot")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    args = parser.parse_args(argv)
    if args.plot is not None:
        draw(json.loads(args.out.read_text()), args.plot)
        return 0
    os.environ["SGLANG_SIMULATE_ACC_LEN"] = "2.5"
    steps = {}
    shape: Shape = CHAIN
    with tempfile.TemporaryDirectory(prefix="shapes_") as root:
        rows = max(args.rows)
        wanted = Wanted(
            write_shapes(Path(root), tiny=False), shape, "cuda", rows, rows * 1200, 1200, rows,
            graph_sizes=tuple(args.rows), dummy=True,
        )  # fmt: skip
        with started(wanted, Records(None, "cuda"), "timeline") as executor:
            prompts = random_prompts(executor.info.vocab_size, rows, INPUT_LEN)
            for num_rows in args.rows:
                for draft_len in (0, shape[0]):
                    title = f"{num_rows} row(s), {draft_len} drafts"
                    steps[title] = recorded(executor, num_rows, draft_len, prompts)
                    print(f"== {title}\n{summary(steps[title])}", flush=True)
    args.out.write_text(json.dumps(steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
