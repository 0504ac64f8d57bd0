"""What an executor is built from on every device: shapes, dtype, models, pools."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.quant_args import check_quantization
from sglang.srt.distributed.tensor_parallel import StreamShape, TensorParallel
from sglang.srt.managers.executor_build_drafter import (
    LoadedDrafter,
    choose,
    draft_kind,
    load_drafter,
)
from sglang.srt.mem_cache.pool import CacheShape, KVPool
from sglang.srt.model_executor.config import WorkerConfig, max_positions
from sglang.srt.model_executor.memory import PageBudget
from sglang.srt.model_executor.step_plan import SpecShape
from sglang.srt.model_loader.checkpoint import open_source
from sglang.srt.models.decoder import DecoderModel
from sglang.srt.models.draft_model import DraftModel
from sglang.srt.models.registry import build_model

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
class LoadedModels:
    target: DecoderModel
    drafter: LoadedDrafter | None
    spec: SpecShape | None
    dtype: torch.dtype
    device: torch.device
    kv_dtype: torch.dtype  # of the caches

    @property
    def draft_model(self) -> DraftModel | DecoderModel | None:
        """Whatever the drafter has of its own."""
        return None if self.drafter is None else self.drafter.own

    @property
    def weight_bytes(self) -> int:
        own = self.draft_model
        return self.target.weight_bytes + (0 if own is None else own.weight_bytes)

    @property
    def bytes_per_place(self) -> int:
        """Of KV: all layers of both models."""
        shapes: list[CacheShape] = [self.target.kv_shape]
        if (own := self.draft_model) is not None:
            shapes.append(own.kv_shape)
        return sum(shape.bytes_per_place(self.kv_dtype, self.dtype) for shape in shapes)


def load_models(args: ExecutorArgs, device: torch.device, tp: TensorParallel | None = None) -> LoadedModels:
    """One rank's part of them; ``tp`` None: there is one rank."""
    spec = _spec_shape(args)
    config = ModelConfig.from_folder(args.model_path, args.context_length)
    check_quantization("--quantization", args.quantization, config.quant, args.model_path)
    choice = choose(args, config)
    dtype = _dtype(args.dtype, config, device)
    kv_dtype = _kv_dtype(args, dtype)
    positions = max_positions(config.context_len, spec)
    is_first = tp is None or tp.rank == 0
    source = open_source(args.model_path, args.load_format, dtype, device, config.quant, is_first)
    target = build_model(config, source, dtype, device, positions, tp)
    if spec is None or choice is None:
        return LoadedModels(target, None, None, dtype, device, kv_dtype)
    drafter = load_drafter(args, choice, target, spec, dtype, device, positions)
    return LoadedModels(target, drafter, spec, dtype, device, kv_dtype)


def stream_shape(args: ExecutorArgs) -> StreamShape:
    """Of the target's residual stream on a GPU.

    Raises:
        ModelConfigError, ExecutorArgsError: see ``load_models``.
    """
    config = ModelConfig.from_folder(args.model_path, args.context_length)
    return StreamShape(config.hidden_size, _dtype(args.dtype, config, torch.device(args.device)))


def page_budget(
    args: ExecutorArgs, models: LoadedModels, available_bytes: int, mem_fraction: float
) -> PageBudget:
    return PageBudget(
        page_size=args.page_size,
        bytes_per_place=models.bytes_per_place,
        num_slots=args.max_running_requests,
        context_len=models.target.config.context_len,
        spec=models.spec,
        max_total_tokens=args.max_total_tokens,
        mem_fraction=mem_fraction,
        available_bytes=available_bytes,
    )


def worker_config(
    args: ExecutorArgs, models: LoadedModels, num_pages: int, most_spec_rows: int
) -> WorkerConfig:
    """``most_spec_rows``: rows of a speculative step where the user sets no limit."""
    return WorkerConfig(
        device=models.device,
        dtype=models.dtype,
        kv_dtype=models.kv_dtype,
        num_slots=args.max_running_requests,
        num_pages=num_pages,
        page_size=args.page_size,
        context_len=models.target.config.context_len,
        vocab_size=models.target.config.vocab_size,
        spec=models.spec,
        max_spec_rows=max_spec_rows(args, models, most_spec_rows),
        feature_size=0 if models.drafter is None else models.drafter.feature_size,
    )


def max_spec_rows(args: ExecutorArgs, models: LoadedModels, most: int) -> int:
    """Rows of a speculative step; ``most``: where the user sets no limit."""
    return max(spec_rows(args, models.spec, most).values(), default=0)


def spec_rows(args: ExecutorArgs, spec: SpecShape | None, most: int) -> dict[int, int]:
    """Draft lengths of the speculative steps to prepare, ascending, and the rows each may have."""
    if spec is None:
        return {}
    asked = most if args.capture_max_bs is None else args.capture_max_bs
    wanted = sorted(args.spec_rows) if args.spec_rows else [(spec.num_steps, None)]
    return {
        draft_len: max(1, min(asked if rows is None else rows, args.max_running_requests))
        for draft_len, rows in wanted
    }


def make_pool(shape: CacheShape, config: WorkerConfig) -> KVPool:
    return shape.make_pool(
        config.num_pages, config.page_size, config.cache_dtype, config.device, config.dtype
    )


def _spec_shape(args: ExecutorArgs) -> SpecShape | None:
    if draft_kind(args) is None:
        return None
    spec = SpecShape(args.num_steps, args.topk, args.num_draft_tokens)
    if spec.num_steps < 1 or spec.topk < 1:
        raise ExecutorArgsError(f"speculation needs at least 1 step and topk 1, got {spec}")
    if any(not 1 <= draft_len <= spec.num_steps for draft_len, _ in args.spec_rows):
        raise ExecutorArgsError(f"draft lengths are 1 to {spec.num_steps}, got {args.spec_rows}")
    most = spec.pool_size(spec.num_steps) + 1
    if not 2 <= spec.num_draft_tokens <= most or (spec.topk == 1 and spec.num_draft_tokens != most):
        raise ExecutorArgsError(
            f"{spec.num_steps} steps with topk {spec.topk} give {most} draft tokens at most"
            f" (exactly, for topk 1), got {spec.num_draft_tokens}"
        )
    return spec


def _kv_dtype(args: ExecutorArgs, dtype: torch.dtype) -> torch.dtype:
    name = args.kv_cache_dtype
    if name == "fp8_e4m3":
        if args.attention_backend == "flashinfer":
            raise ExecutorArgsError(
                "--kv-cache-dtype fp8_e4m3 is for our own kernels: leave out --attention-backend flashinfer"
            )
        return torch.float8_e4m3fn
    if name != "auto" and dtype != torch.bfloat16:
        raise ExecutorArgsError(
            f"--kv-cache-dtype {name}: the cache has the model's type ({str(dtype).removeprefix('torch.')}),"
            " or fp8_e4m3; use auto"
        )
    return dtype


def _dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = "float32" if device.type == "cpu" else model.dtype
    if name not in _DTYPES:
        raise ExecutorArgsError(f"dtype {name!r} is not one of auto, {', '.join(_DTYPES)}")
    if device.type == "cuda" and _DTYPES[name] == torch.float64:
        raise ExecutorArgsError("dtype float64 is for the CPU: use bfloat16, float16 or float32 on CUDA")
    return _DTYPES[name]
