"""Traces of one static batch (``bench_one_batch --profile``)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from sglang.bench_one_batch_cases import OneBatch
from sglang.srt.utils.flags import ServerArgsError

ACTIVITIES = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}
CUDA_PROFILER = "CUDA_PROFILER"  # cudaProfilerStart and Stop, for nsys and ncu
STAGES = ("all", "prefill", "decode")


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("profile", "traces go to $SGLANG_TORCH_PROFILER_DIR, or to /tmp")
    group.add_argument("--profile", action="store_true", help="trace each case once more, after it was timed")
    group.add_argument(
        "--profile-activities", nargs="+", default=["CPU", "GPU"], choices=[*ACTIVITIES, CUDA_PROFILER]
    )
    group.add_argument("--profile-record-shapes", action="store_true")
    group.add_argument("--profile-stage", default="all", choices=STAGES)
    group.add_argument("--profile-filename-prefix", default="profile")
    group.add_argument("--profile-start-step", type=int, help="decode steps before it (default: about half)")
    group.add_argument("--profile-steps", type=int, default=1, help="decode steps")


def profile_batch(
    bench: argparse.Namespace, batch: OneBatch, draft_lens: list[int], output_len: int, case: str
) -> list[Path]:
    """Trace the prefill and some decode steps of a batch; returns the files."""
    stage, files = bench.profile_stage, []
    if stage in ("all", "prefill"):
        with _traced(bench, f"{case}_prefill") as file:
            batch.prefill()
        files.append(file)
    else:
        batch.prefill()
    if stage in ("all", "decode"):
        start = bench.profile_start_step
        if start is None:
            start = output_len // 2 // (max(draft_lens) + 1)  # whatever is accepted, steps are left
        batch.decode_all(draft_lens, output_len, max_steps=start)
        with _traced(bench, f"{case}_decode") as file:
            steps = batch.decode_all(draft_lens, output_len, max_steps=bench.profile_steps)
        if not steps:
            raise ServerArgsError(f"no decode step is left to trace after {start}: raise --output-len")
        files.append(file)
    return [file for file in files if file.is_file()]


@contextmanager
def _traced(bench: argparse.Namespace, name: str) -> Iterator[Path]:
    """No step is in flight when it begins or ends."""
    folder = Path(os.environ.get("SGLANG_TORCH_PROFILER_DIR", "/tmp"))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{bench.profile_filename_prefix}_{name}.trace.json.gz"
    chosen = [ACTIVITIES[a] for a in bench.profile_activities if a in ACTIVITIES]
    if ProfilerActivity.CUDA in chosen and not torch.cuda.is_available():
        chosen.remove(ProfilerActivity.CUDA)
    if CUDA_PROFILER in bench.profile_activities:
        torch.cuda.profiler.start()
    if not chosen:
        yield file
    else:
        # The executor steps in a thread of its own.
        threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        with profile(
            activities=chosen, record_shapes=bench.profile_record_shapes, experimental_config=threads
        ) as profiler:
            yield file
        profiler.export_chrome_trace(str(file))
    if CUDA_PROFILER in bench.profile_activities:
        torch.cuda.profiler.stop()
