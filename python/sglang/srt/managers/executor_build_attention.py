"""Which attention the models of a CUDA executor get, and what FlashInfer needs to be there for it."""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from sgl_kernel.attention import AttentionShape
from sgl_kernel.attention.decode.plan import MAX_MASK_PLACES, MAX_QUERY_LEN
from sgl_kernel.attention.prefill.flashinfer import FlashInferPrefill
from sgl_kernel.flashinfer_package import FlashInferError, find_flashinfer, installed_version
from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.tensor_parallel import TensorParallel
from sglang.srt.layers.attention.base import KernelAttention
from sglang.srt.layers.attention.mla_sparse_triton import TritonSparseMLA
from sglang.srt.layers.attention.mla_triton import HeadSizes, TritonMLA
from sglang.srt.layers.attention.triton_backend import TritonAttention
from sglang.srt.managers.executor_build_models import ExecutorArgsError, LoadedModels, make_pool
from sglang.srt.mem_cache.kv_pool import MHAKVPool
from sglang.srt.mem_cache.mla_pool import MLAKVPool
from sglang.srt.mem_cache.pool import CacheShape, KVPool
from sglang.srt.model_executor.config import WorkerConfig
from sglang.srt.models.dense import DenseLayer, KVShape

logger = logging.getLogger(__name__)

CUDA_BACKENDS = ("triton", "flashinfer")


class AttendingModel(Protocol):
    """What there is to know of a target or a draft model."""

    config: ModelConfig
    tp: TensorParallel
    kv_shape: CacheShape


def kernel_attention(
    model: AttendingModel, config: WorkerConfig, page_table: torch.Tensor
) -> tuple[KVPool, KernelAttention]:
    """A pool of what the model keeps, and the kernels that read and write it."""
    pool, mla, of_model = make_pool(model.kv_shape, config), model.config.mla, model.config
    kv_heads = of_model.num_kv_heads if mla is None else of_model.num_heads
    num_heads = model.tp.heads(of_model.num_heads, kv_heads, of_model.path).q.size
    if mla is None:
        assert isinstance(pool, MHAKVPool)
        windows = tuple(dict.fromkeys(of_model.windows)) or (None,)
        return pool, TritonAttention(pool, page_table, num_heads, windows=windows)
    assert isinstance(pool, MLAKVPool)
    sizes = HeadSizes(num_heads, mla.nope_dim, mla.rope_dim, mla.v_dim, mla.kv_lora_rank)
    if mla.index is not None:
        return pool, TritonSparseMLA(pool, page_table, sizes, mla.index)
    return pool, TritonMLA(pool, page_table, sizes)


def check_backend(args: ExecutorArgs) -> None:
    """Before anything is loaded.

    Raises:
        ExecutorArgsError: there is no such backend, its package is missing, or a tree is too wide for it.
    """
    name = args.attention_backend
    if name not in CUDA_BACKENDS:
        raise ExecutorArgsError(f"attention backend {name!r} is not one of: {', '.join(CUDA_BACKENDS)}")
    if name == "flashinfer":
        try:
            find_flashinfer()
        except FlashInferError as error:
            raise ExecutorArgsError(f"--attention-backend flashinfer: {error}") from error
    # A level's nodes are queries, and all levels but the last lie in scratch places.
    if args.num_steps > 1 and (
        args.topk > MAX_QUERY_LEN or args.topk * (args.num_steps - 1) > MAX_MASK_PLACES
    ):
        raise ExecutorArgsError(
            f"--speculative-eagle-topk {args.topk} with --speculative-num-steps {args.num_steps} is too"
            f" wide a tree on CUDA: topk is at most {MAX_QUERY_LEN}, topk * (steps - 1) at most"
            f" {MAX_MASK_PLACES}"
        )


def prefill_planner(
    args: ExecutorArgs, models: LoadedModels, config: WorkerConfig, page_table: torch.Tensor
) -> FlashInferPrefill | None:
    """FlashInfer with its kernels made and its workspace allocated, where it is asked for.

    Raises:
        ExecutorArgsError: it has no kernels for this model, or can't make them.
    """
    if args.attention_backend != "flashinfer":
        return None
    if models.target.config.mla is not None:
        logger.info("attention: latent, by our own kernels in prefill too: FlashInfer is not used")
        return None
    if any(isinstance(layer, DenseLayer) and not layer.scope.is_plain for layer in models.target.layers):
        logger.info("attention: with windows or sinks, by our own kernels in prefill too, not by FlashInfer")
        return None
    logger.info(
        "attention: prefill by FlashInfer %s, which plans with lengths that the host knows exactly; decode"
        " and verification by our own kernels, which read the lengths on the device",
        installed_version(),
    )
    if models.dtype not in (torch.bfloat16, torch.float16):
        raise ExecutorArgsError(
            f"--attention-backend flashinfer is for bfloat16 and float16, not {models.dtype}: use triton"
        )
    logger.info("FlashInfer makes its kernels now, unless they are in its cache: some 20 s on 16 cores")
    kv = models.target.kv_shape
    assert isinstance(kv, KVShape)
    of_model = models.target.config
    heads = models.target.tp.heads(of_model.num_heads, of_model.num_kv_heads, of_model.path)
    shape = AttentionShape(heads.q.size, kv.num_kv_heads, kv.head_dim, config.page_size)
    try:
        planner = FlashInferPrefill(shape, models.dtype, config.device)
        planner.build(page_table)
    except FlashInferError as error:
        raise ExecutorArgsError(f"--attention-backend flashinfer: {error}") from error
    return planner
