"""Build an executor from plain arguments: configs, weights, pools, state, drafter, worker."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.configs.model_config import ModelConfig, ModelConfigError
from sglang.srt.layers.attention.torch_native import TorchNativeAttention
from sglang.srt.mem_cache.kv_pool import MHAKVPool
from sglang.srt.model_executor.config import WorkerConfig, max_positions
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.model_executor.memory import PageBudget, available_bytes
from sglang.srt.model_executor.slot_state import SlotState
from sglang.srt.model_executor.step import StepRunner
from sglang.srt.model_executor.step_plan import ExecutorInfo, SpecShape
from sglang.srt.model_executor.worker import Worker
from sglang.srt.model_loader.checkpoint import open_source
from sglang.srt.models.dense import DenseModel, KVShape
from sglang.srt.models.llama_eagle3 import LlamaEagle3
from sglang.srt.models.registry import build_drafter, build_model
from sglang.srt.sampling.sampler import Sampler
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.simulate import SimulationError, simulated_acceptance

logger = logging.getLogger(__name__)

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


class ExecutorArgsError(ValueError):
    """The arguments name something that is not there; one line for the user."""


@dataclass(frozen=True, slots=True)
class _Models:
    target: DenseModel
    drafter: LlamaEagle3 | None

    @property
    def weight_bytes(self) -> int:
        return self.target.weight_bytes + (self.drafter.weight_bytes if self.drafter else 0)


def build_executor(args: ExecutorArgs) -> InProcessExecutor:
    """Load the models and start the executor.

    Raises:
        ExecutorArgsError: unknown dtype, attention backend, an impossible shape of speculation, or
            ``SGLANG_SIMULATE_ACC_*`` that can't be used.
        ModelConfigError, WeightError: a model folder that can't be used.
        OutOfMemoryError: no request fits in the memory given.
    """
    return InProcessExecutor(lambda: _build_worker(args))


def _build_worker(args: ExecutorArgs) -> tuple[Worker, ExecutorInfo]:
    device, spec = torch.device(args.device), _spec_shape(args)
    model_config = ModelConfig.from_folder(args.model_path, args.context_length)
    dtype = _dtype(args.dtype, model_config, device)
    models = _load_models(args, model_config, spec, dtype, device)
    config = _worker_config(args, models, spec, dtype, device)
    worker = _assemble(args, config, models)
    kv_bytes = sum(pool.bytes for pool in worker.pools)
    info = ExecutorInfo(
        num_slots=config.num_slots,
        num_pages=config.num_pages,
        page_size=config.page_size,
        context_len=config.context_len,
        vocab_size=config.vocab_size,
        spec=spec,
        max_spec_rows=config.max_spec_rows,
        weight_bytes=models.weight_bytes,
        kv_bytes=kv_bytes,
    )
    logger.info(
        "weights %.1f MiB, KV cache of %d tokens %.1f MiB, dtype %s",
        info.weight_bytes / 2**20, info.num_pages * info.page_size, kv_bytes / 2**20, dtype,
    )  # fmt: skip
    return worker, info


def log_spec_version(environ: Mapping[str, str]) -> None:
    """``SGLANG_ENABLE_SPEC_V2`` is accepted for upstream's sake: there is one speculative worker here."""
    given = environ.get("SGLANG_ENABLE_SPEC_V2")
    note = "" if given is None else f" (SGLANG_ENABLE_SPEC_V2={given} changes nothing)"
    logger.info("speculative worker: EAGLEWorkerV2%s", note)


def _spec_shape(args: ExecutorArgs) -> SpecShape | None:
    if args.draft_model_path is None:
        return None
    spec = SpecShape(args.num_steps, args.topk, args.num_draft_tokens)
    if spec.num_steps < 1 or spec.topk < 1:
        raise ExecutorArgsError(f"speculation needs at least 1 step and topk 1, got {spec}")
    most = spec.pool_size(spec.num_steps) + 1
    if not 2 <= spec.num_draft_tokens <= most or (spec.topk == 1 and spec.num_draft_tokens != most):
        raise ExecutorArgsError(
            f"{spec.num_steps} steps with topk {spec.topk} give {most} draft tokens at most"
            f" (exactly, for topk 1), got {spec.num_draft_tokens}"
        )
    log_spec_version(os.environ)
    return spec


def _dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "float32" if device.type == "cpu" else model.dtype
    if name not in _DTYPES:
        raise ExecutorArgsError(f"dtype {name!r} is not one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _load_models(
    args: ExecutorArgs, config: ModelConfig, spec: SpecShape | None, dtype: torch.dtype, device: torch.device
) -> _Models:
    positions = max_positions(config.context_len, spec)
    source = open_source(args.model_path, args.load_format, dtype, device)
    target = build_model(config, source, dtype, device, positions)
    if spec is None:
        return _Models(target, None)
    assert args.draft_model_path is not None
    draft_config = ModelConfig.from_draft_folder(args.draft_model_path, config.context_len)
    source = open_source(args.draft_model_path, args.draft_load_format or args.load_format, dtype, device)
    drafter = build_drafter(draft_config, source, target, dtype, device, positions)
    if spec.topk > len(drafter.target_ids):
        raise ModelConfigError(
            f"{args.draft_model_path}: topk is {spec.topk}, but the draft vocabulary has"
            f" {len(drafter.target_ids)} ids"
        )
    return _Models(target, drafter)


def _worker_config(
    args: ExecutorArgs, models: _Models, spec: SpecShape | None, dtype: torch.dtype, device: torch.device
) -> WorkerConfig:
    target, drafter = models.target, models.drafter
    bytes_per_place = _bytes_per_place(target.kv_shape, dtype)
    if drafter is not None:
        bytes_per_place += _bytes_per_place(drafter.kv_shape, dtype)
    budget = PageBudget(
        page_size=args.page_size,
        bytes_per_place=bytes_per_place,
        num_slots=args.max_running_requests,
        context_len=target.config.context_len,
        spec=spec,
        max_total_tokens=args.max_total_tokens,
        mem_fraction=args.mem_fraction_static,
        available_bytes=available_bytes(device),
    )
    spec_rows = 0
    if spec is not None:
        most = args.max_running_requests
        spec_rows = most if args.capture_max_bs is None else max(1, min(args.capture_max_bs, most))
    return WorkerConfig(
        device=device,
        dtype=dtype,
        num_slots=args.max_running_requests,
        num_pages=budget.num_pages(),
        page_size=args.page_size,
        context_len=target.config.context_len,
        vocab_size=target.config.vocab_size,
        spec=spec,
        max_spec_rows=spec_rows,
        feature_size=drafter.feature_size if drafter is not None else 0,
    )


def _bytes_per_place(shape: KVShape, dtype: torch.dtype) -> int:
    return shape.num_layers * shape.num_kv_heads * 2 * shape.head_dim * dtype.itemsize


def _assemble(args: ExecutorArgs, config: WorkerConfig, models: _Models) -> Worker:
    state = SlotState(config)
    sampler = Sampler(config.num_rows, config.vocab_size, config.device)
    pool = _pool(models.target.kv_shape, config)
    backend = _backend(args.attention_backend, pool, state)
    pools: tuple[MHAKVPool, ...] = (pool,)
    drafter = None
    if models.drafter is not None and config.spec is not None:
        draft_pool = _pool(models.drafter.kv_shape, config)
        pools = (pool, draft_pool)
        drafter = EAGLEWorkerV2(
            models.drafter,
            draft_pool,
            _backend(args.attention_backend, draft_pool, state),
            sampler.states,
            config.spec,
            models.drafter.aux_layers,
        )
    try:
        simulated = simulated_acceptance(os.environ, config.spec, config.vocab_size, config.device)
    except SimulationError as error:
        raise ExecutorArgsError(str(error)) from error
    runner = StepRunner(state, sampler, models.target, pool, backend, drafter, simulated)
    return Worker(config, state, sampler, pools, drafter, runner)


def _pool(shape: KVShape, config: WorkerConfig) -> MHAKVPool:
    return MHAKVPool(
        shape.num_layers,
        config.num_pages,
        config.page_size,
        shape.num_kv_heads,
        shape.head_dim,
        config.dtype,
        config.device,
    )


def _backend(name: str, pool: MHAKVPool, state: SlotState) -> TorchNativeAttention:
    if name != "torch_native":
        raise ExecutorArgsError(f"attention backend {name!r} is not one of: torch_native")
    return TorchNativeAttention(pool, state.page_table)
