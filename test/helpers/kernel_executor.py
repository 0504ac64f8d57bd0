"""An executor whose decode steps are ``DecodeStep``s, on a CPU: over the references of sgl_kernel."""

from __future__ import annotations

from pathlib import Path

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.triton_backend import TritonAttention
from sglang.srt.mem_cache.kv_pool import MHAKVPool
from sglang.srt.model_executor.config import WorkerConfig
from sglang.srt.model_executor.decode_step import DecodeStep
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.model_executor.slot_state import SlotState
from sglang.srt.model_executor.step import StepRunner
from sglang.srt.model_executor.step_graphs import DecodeSteps
from sglang.srt.model_executor.step_plan import ExecutorInfo, SpecShape
from sglang.srt.model_executor.worker import Worker
from sglang.srt.model_loader.checkpoint import open_source
from sglang.srt.models.dense import KVShape
from sglang.srt.models.registry import build_drafter, build_model
from sglang.srt.sampling.kernel_sampler import KernelSampler
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.kernel_drafter import KernelDrafter

DTYPE, CPU = torch.float32, torch.device("cpu")


def kernel_executor(
    target: Path,
    draft: Path | None,
    shape: tuple[int, int, int] | None,  # steps, topk, draft tokens
    page_size: int,
    num_slots: int = 8,
    max_total_tokens: int = 4096,
    context_len: int = 1000,
) -> InProcessExecutor:
    """Float32; the drafter goes with the shape."""
    spec = None if shape is None else SpecShape(*shape)

    def assemble() -> tuple[Worker, ExecutorInfo]:
        config = ModelConfig.from_folder(target, context_len)
        positions = context_len + 64
        model = build_model(config, open_source(target, "auto", DTYPE, CPU), DTYPE, CPU, positions)
        drafter_model = None
        if draft is not None and spec is not None:
            draft_config = ModelConfig.from_draft_folder(draft, context_len)
            source = open_source(draft, "auto", DTYPE, CPU)
            drafter_model = build_drafter(draft_config, source, model, DTYPE, CPU, positions)
        worker_config = WorkerConfig(
            device=CPU,
            dtype=DTYPE,
            num_slots=num_slots,
            num_pages=max_total_tokens // page_size,
            page_size=page_size,
            context_len=context_len,
            vocab_size=config.vocab_size,
            spec=spec,
            max_spec_rows=num_slots if spec else 0,
            feature_size=drafter_model.feature_size if drafter_model else 0,
        )
        state = SlotState(worker_config)
        sampler = KernelSampler(worker_config.num_rows, config.vocab_size, CPU)
        sampler.reserve(num_slots * (spec.num_draft_tokens if spec else 1))

        def attention(kv_shape: KVShape, num_heads: int) -> TritonAttention:
            pool = MHAKVPool(
                kv_shape.num_layers,
                worker_config.num_pages,
                page_size,
                kv_shape.num_kv_heads,
                kv_shape.head_dim,
                DTYPE,
                CPU,
            )
            return TritonAttention(pool, state.page_table, num_heads)

        backend = attention(model.kv_shape, config.num_heads)
        pools, worker_drafter, device_drafter = (backend.pool,), None, None
        if drafter_model is not None and spec is not None:
            draft_backend = attention(drafter_model.kv_shape, drafter_model.config.num_heads)
            pools = (backend.pool, draft_backend.pool)
            worker_drafter = EAGLEWorkerV2(
                drafter_model,
                draft_backend.pool,
                draft_backend,
                sampler.states,
                spec,
                drafter_model.aux_layers,
            )
            device_drafter = KernelDrafter(drafter_model, draft_backend, state, sampler, spec)
        runner = StepRunner(state, sampler, model, backend.pool, backend, worker_drafter)
        step = DecodeStep(state, sampler, model, backend.pool, backend, spec, device_drafter)
        worker = Worker(
            worker_config, state, sampler, pools, worker_drafter, runner, DecodeSteps(step, None, CPU)
        )
        info = ExecutorInfo(
            num_slots, worker_config.num_pages, page_size, context_len, config.vocab_size, spec,
            worker_config.max_spec_rows,
        )  # fmt: skip
        return worker, info

    return InProcessExecutor(assemble)
