"""NVFP4 on both sides of a product (W4A4), where it is asked for: what it needs, and a trial of it.

Weights are loaded as for our own kernels, which multiply them with inputs in half precision. Layers are
handed over to FlashInfer after the trial; where that fails, be it on one rank alone, all stay as they are.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.configs.fp4_args import BOTH_IN_FP4, FOR_EXPERTS, FOR_LINEARS, needs_gpu
from sglang.srt.distributed.tensor_parallel import TensorParallel
from sglang.srt.managers.executor_build_models import ExecutorArgsError, LoadedModels

if TYPE_CHECKING:
    from sgl_kernel.fp4.flashinfer import FlashInferFp4

logger = logging.getLogger(__name__)

HALVES: Final = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer, or the experts of one, as this module sees it."""

    shape: tuple[int, ...]  # layers of one shape are tried once
    why_not: str  # empty: it can be handed over
    error: Callable[[FlashInferFp4], float]
    limit: float
    hand_over: Callable[[FlashInferFp4], None]


def wanted(args: ExecutorArgs) -> list[str]:
    """The options by which it is asked for."""
    given = ((FOR_LINEARS, args.fp4_gemm_backend), (FOR_EXPERTS, args.moe_runner_backend))
    return [option for option, name in given if name == BOTH_IN_FP4]


def check_fp4(args: ExecutorArgs) -> None:
    """Before anything is loaded.

    Raises:
        ExecutorArgsError: the device can't do what is asked for, or FlashInfer is missing.
    """
    options = wanted(args)
    if not options:
        return
    if args.device != "cuda":
        raise ExecutorArgsError(needs_gpu(options[0]))
    from sgl_kernel.fp4.flashinfer import FlashInferError, FlashInferFp4, check_capability

    device = torch.cuda.current_device()
    try:
        check_capability(torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))
        FlashInferFp4()
    except FlashInferError as error:
        raise ExecutorArgsError(f"{options[0]} {BOTH_IN_FP4}: {error}") from error


def use_fp4_inputs(args: ExecutorArgs, models: LoadedModels) -> None:
    """Hand the target's NVFP4 layers over, where that is asked for and ``check_fp4`` was content.

    Raises:
        ExecutorArgsError: the model has no such layers, or another type.
    """
    options = wanted(args)
    if not options:
        return
    if models.dtype not in HALVES:
        raise ExecutorArgsError(
            f"{options[0]} {BOTH_IN_FP4} is for bfloat16 and float16, not {models.dtype}: use --dtype"
            " bfloat16"
        )
    from sgl_kernel.fp4.flashinfer import FlashInferFp4

    flashinfer = FlashInferFp4()
    for option in options:
        layers = linear_layers(models) if option == FOR_LINEARS else expert_layers(models)
        what = "linear layers" if option == FOR_LINEARS else "layers of experts"
        hand_over(option, what, layers, flashinfer, models.target.tp)


def linear_layers(models: LoadedModels) -> list[Layer]:
    """Those of the target that are packed."""
    from sgl_kernel.fp4.trial import LINEAR_LIMIT, linear_error
    from sgl_kernel.fp4.weights import why_not
    from sglang.srt.layers.packed_linear import PackedLinear

    layers = []
    for linear in models.target.linears():
        if not isinstance(linear, PackedLinear):
            continue
        matrix = linear.matrix
        assert matrix is not None, "nothing has been handed over yet"
        error = partial(linear_error, matrix=matrix, dtype=models.dtype)
        shape = (matrix.rows, matrix.columns)
        layers.append(Layer(shape, why_not(matrix), error, LINEAR_LIMIT, linear.use_fp4_inputs))
    return layers


def expert_layers(models: LoadedModels) -> list[Layer]:
    from sgl_kernel.fp4.trial import EXPERTS_LIMIT, experts_error
    from sgl_kernel.fp4.weights import why_not_experts
    from sglang.srt.layers.moe.kernel_experts import KernelExperts

    layers, config = [], models.target.config.moe
    for experts in models.target.experts():
        if not isinstance(experts, KernelExperts):
            continue
        assert config is not None
        gate_up, down = experts.matrices
        error = partial(experts_error, gate_up=gate_up, down=down, top_k=config.top_k, dtype=models.dtype)
        shape = (gate_up.num_experts, gate_up.rows, gate_up.columns)
        why = why_not_experts(gate_up, down)
        layers.append(Layer(shape, why, error, EXPERTS_LIMIT, experts.use_fp4_inputs))
    return layers


def hand_over(
    option: str, what: str, layers: Sequence[Layer], flashinfer: FlashInferFp4, tp: TensorParallel
) -> None:
    """After a trial of each shape."""
    able = [layer for layer in layers if not layer.why_not]
    others = Counter(layer.why_not for layer in layers if layer.why_not)
    reasons = ", ".join(f"{count} {why}" for why, count in others.items())
    if not able:
        found = f" (it has {reasons})" if reasons else ""
        raise ExecutorArgsError(
            f"{option} {BOTH_IN_FP4}: the model has no {what} in NVFP4 with scales of their inputs{found}:"
            " leave it out"
        )
    logger.info("%s: FlashInfer makes its kernels now, unless they are in its cache: minutes", option)
    began = time.perf_counter()
    failure = tp.first_alone(partial(trial, able, flashinfer))
    if not tp.least(int(not failure)):
        logger.warning(
            "%s %s failed its trial on this device (%s): weights alone are in 4 bits, by our own kernels",
            option, BOTH_IN_FP4, failure or "on another rank",
        )  # fmt: skip
        return
    for layer in able:
        layer.hand_over(flashinfer)
    logger.info(
        "%d %s: weights and inputs in NVFP4, by FlashInfer; tried in %.1f s%s",
        len(able), what, time.perf_counter() - began, f"; by our own kernels: {reasons}" if reasons else "",
    )  # fmt: skip


def trial(layers: Sequence[Layer], flashinfer: FlashInferFp4) -> str:
    """What went wrong; empty: nothing did."""
    for shape, layer in {layer.shape: layer for layer in layers}.items():
        size = " x ".join(str(length) for length in shape)
        try:
            error = layer.error(flashinfer)
        except Exception as problem:  # an edge: another project's build, of which anything may fail
            return f"{size}: {' '.join(str(problem).split())[:300]}"
        if not error <= layer.limit:  # so that NaN fails
            return f"{size}: off by {error:.3g} of the result, at most {layer.limit} is rounding"
    return ""
