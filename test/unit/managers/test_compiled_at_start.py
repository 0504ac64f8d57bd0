"""No step with prefill needs a kernel that the start has not compiled.

The CUDA build on a CPU with every launch noted instead of run: what results hold is never looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.replaying_capture import ReplayingCapture
from helpers.tiny_executor import draft_folder, target_folder

from sgl_kernel._dispatch import has_triton
from sgl_kernel.direct import _kind
from sgl_kernel.launch import Launch
from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.layers.embedding import Embedding
from sglang.srt.managers import executor_build_cuda as build
from sglang.srt.managers.executor_build_models import load_models
from sglang.srt.model_executor import tune_linears
from sglang.srt.model_executor.step_plan import PrefillChunk, StepKind, StepPlan
from sglang.srt.model_executor.worker import Worker

pytestmark = pytest.mark.skipif(not has_triton(), reason="launches need triton (requirements/dev.txt)")

NUM_SLOTS = 20


class Capture(ReplayingCapture):
    def __init__(self, device: torch.device) -> None:
        super().__init__()


def compiled_for(launch: Launch) -> tuple[Any, ...]:
    """What a kernel is compiled for. Numbers that the kernel says not to specialise are left out."""
    names = launch.kernel.arg_names
    loose = {p.name for p in launch.kernel.params if p.do_not_specialize}
    kinds = [None if name in loose else _kind(arg) for name, arg in zip(names, launch.args, strict=False)]
    return launch.kernel.__name__, *launch.options.items(), *launch.constants.items(), *kinds


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[Any, ...]]]:
    """Filled with what has been launched."""
    found: set[tuple[Any, ...]] = set()
    monkeypatch.setattr(Launch, "run", lambda launch: found.add(compiled_for(launch)))
    for name, module in list(sys.modules.items()):
        if name.startswith("sgl_kernel.") and hasattr(module, "use_kernel"):
            monkeypatch.setattr(module, "use_kernel", lambda tensor: True)
    # Ids that a launch should have written are anything.
    monkeypatch.setattr(Embedding, "__call__", lambda own, ids: own.weight[torch.zeros_like(ids)])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "fake")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100 << 20)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 150 << 20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (900 << 20, 1 << 30))
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: None)
    monkeypatch.setattr(build, "CudaCapture", Capture)
    monkeypatch.setattr(build, "compile_ahead", lambda num_threads: nullcontext())
    monkeypatch.setattr(tune_linears, "compile_ahead", lambda num_threads: nullcontext())
    monkeypatch.setattr(tune_linears, "_graph_micros", lambda run: 1.0)
    yield found


def start(shape: tuple[int, int, int] | None, **changes: object) -> Worker:
    values: dict[str, Any] = {
        "model_path": str(target_folder()),
        "dtype": "bfloat16",
        "device": "cuda",
        "attention_backend": "triton",
        "mem_fraction_static": 0.88,
        "max_running_requests": NUM_SLOTS,
        "context_length": 200,
        "page_size": 4,
    }
    if shape is not None:
        steps, topk, tokens = shape
        draft = str(draft_folder())
        values |= {
            "draft_model_path": draft, "num_steps": steps, "topk": topk, "num_draft_tokens": tokens,
        }  # fmt: skip
    args = ExecutorArgs(**(values | changes))
    worker, _ = build.build_cuda(args, load_models(args, torch.device("cpu")), None, chunk=64)
    return worker


def prefill(lengths: tuple[int, ...], num_decode: int = 0, next_id: int | None = None) -> StepPlan:
    chunks = tuple(
        PrefillChunk(1 + num_decode + row, 0, (5,) * length, next_id if row == 0 else None)
        for row, length in enumerate(lengths)
    )
    slots = tuple(range(1, num_decode + 1))
    kind = StepKind.MIXED if num_decode else StepKind.PREFILL
    return StepPlan(0, kind, slots, (9,) * num_decode, prefill=chunks)


@pytest.mark.parametrize(
    ("shape", "graphs"),
    [
        (None, {}),
        ((3, 1, 4), {}),
        ((3, 1, 4), {"cuda_graph_max_bs": 1}),
        ((3, 1, 4), {"disable_cuda_graph": True}),
    ],
    ids=str,
)
def test_short_prefills_compile_nothing(
    shape: tuple[int, int, int] | None, graphs: dict[str, object], compiled: set[tuple[Any, ...]]
) -> None:
    worker = start(shape, **graphs)
    at_start = set(compiled)
    assert {"prefill_kernel", "small_gemm_kernel"} <= {key[0] for key in at_start}
    plans = [prefill((n,)) for n in range(1, 65)]
    plans += [prefill((n, 3), next_id=7) for n in (1, 2, 15, 40)]
    plans += [prefill((5,) * n) for n in range(2, NUM_SLOTS + 1)]
    plans += [prefill((n,), num_decode=d) for d in range(1, NUM_SLOTS) for n in (1, 14)]
    for plan in plans:
        with torch.inference_mode():
            worker._runner.run(plan)
        assert compiled == at_start, f"{plan.kind} of {[len(c.token_ids) for c in plan.prefill]} tokens"


def test_it_would_be_noticed(compiled: set[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_run_small_prefills", lambda trial, config: None)
    worker = start(None, cuda_graph_max_bs=1)
    at_start = set(compiled)
    with torch.inference_mode():
        worker._runner.run(prefill((10,)))
    assert {key[0] for key in compiled - at_start} == {"rope_cache_write_kernel"}
