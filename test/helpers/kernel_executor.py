"""An executor whose decode steps are ``DecodeStep``s, on a CPU: over the references of sgl_kernel."""

from __future__ import annotations

from pathlib import Path

import torch

from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.managers.executor_build_cuda import _Wiring
from sglang.srt.managers.executor_build_models import load_models, worker_config
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.model_executor.step_graphs import DecodeSteps
from sglang.srt.model_executor.step_plan import ExecutorInfo
from sglang.srt.model_executor.worker import Worker

CPU = torch.device("cpu")


def kernel_executor(
    target: Path,
    draft: Path | None,
    shape: tuple[int, int, int] | None,  # steps, topk, draft tokens
    page_size: int,
    num_slots: int = 8,
    max_total_tokens: int = 4096,
    context_len: int = 1000,
    draft_kind: str | None = None,
    kv_cache_dtype: str = "auto",
) -> InProcessExecutor:
    """Float32, wired as for CUDA; the drafter goes with the shape."""
    steps, topk, num_draft_tokens = shape or (1, 1, 2)
    args = ExecutorArgs(
        str(target),
        str(draft) if draft is not None and shape is not None else None,
        draft_kind=draft_kind if shape is not None else None,
        num_steps=steps,
        topk=topk,
        num_draft_tokens=num_draft_tokens,
        dtype="float32",
        kv_cache_dtype=kv_cache_dtype,
        device="cuda",
        attention_backend="triton",
        max_running_requests=num_slots,
        context_length=context_len,
        page_size=page_size,
    )

    def assemble() -> tuple[Worker, ExecutorInfo]:
        models = load_models(args, CPU)
        config = worker_config(args, models, max_total_tokens // page_size, num_slots)
        wiring = _Wiring(args, models, config, None)
        wired = wiring.wire(config)
        worker = Worker(
            config, wiring.state, wiring.sampler, wired.pools, wired.drafter, wired.runner,
            DecodeSteps(wired.step, None, CPU), reader=wired.reader,
        )  # fmt: skip
        info = ExecutorInfo(
            num_slots, config.num_pages, page_size, context_len, config.vocab_size, config.spec,
            config.max_spec_rows, draft_lens=(steps,) if config.spec else (),
        )  # fmt: skip
        return worker, info

    return InProcessExecutor(assemble)
