"""GPT-OSS: windows in every other layer, attention sinks, experts with biases and a clamped activation.

A checkpoint holds all experts of a layer in one tensor [E, in, out] (MXFP4 is stored the other way round,
and dequantised as it is taken), gate and up interleaved.

transformers multiplies by a norm's weight in float32 before it rounds; ours rounds first, as everywhere
else, which is seen in half precision alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.moe_config import MoEConfig
from sglang.srt.distributed.tensor_parallel import TensorParallel
from sglang.srt.layers.activation import clamped_swiglu
from sglang.srt.layers.attention.heads import Scope
from sglang.srt.layers.moe.experts import Experts
from sglang.srt.layers.moe.layer import MLP, MoE
from sglang.srt.layers.moe.router import TorchRouter
from sglang.srt.layers.quantization.fp4_weight import Fp4Weight
from sglang.srt.model_loader.weight_source import Part, WeightSource
from sglang.srt.models import packed
from sglang.srt.models.dense import DenseModel

if TYPE_CHECKING:
    from sgl_kernel.moe.weights import ExpertMatrix
    from sglang.srt.layers.moe.kernel_experts import KernelExperts


class GptOssForCausalLM(DenseModel):
    def make_scope(self, config: ModelConfig, source: WeightSource, index: int) -> Scope:
        own = Part(0, self.tp.heads(config.num_heads, config.num_kv_heads, config.path).q)
        sinks = source.take(f"model.layers.{index}.self_attn.sinks", (config.num_heads,), part=own)
        return replace(super().make_scope(config, source, index), sinks=sinks)

    def make_mlp(self, config: ModelConfig, source: WeightSource, index: int) -> MLP:
        assert config.moe is not None
        prefix, moe = f"model.layers.{index}.mlp.", config.moe
        gate = source.take(f"{prefix}router.weight", (moe.num_experts, config.hidden_size), wide=True)
        gate_bias = source.take(f"{prefix}router.bias", (moe.num_experts,), wide=True)
        place = _Place(source, f"{prefix}experts.", config.hidden_size, moe, self.tp)
        if not packed.wants_kernels(source.device):
            router = TorchRouter(moe, gate, None, gate_bias)
            return MoE(router, _take_experts(place), None, self.tp.summing)
        from sglang.srt.layers.moe.kernel_experts import KernelRouter

        rounded = source.take(f"{prefix}router.weight", (moe.num_experts, config.hidden_size))
        kernel_router = KernelRouter(moe, gate, rounded, None, gate_bias)
        return MoE(kernel_router, _take_kernel_experts(place), None, self.tp.summing)


class _Place:
    """Where the experts of a layer are, and which part of them is this rank's."""

    def __init__(
        self, source: WeightSource, prefix: str, hidden: int, config: MoEConfig, tp: TensorParallel
    ) -> None:
        num, size = config.num_experts, config.intermediate_size
        own = tp.span(size, f"{prefix}: intermediate size of an expert")
        pairs = own.times(2)
        self.source = source
        # name, shape [E, in, out], this rank's part
        self.gate_up = f"{prefix}gate_up_proj", (num, hidden, 2 * size), Part(2, pairs)
        self.down = f"{prefix}down_proj", (num, size, hidden), Part(1, own)
        self.gate_up_bias = source.take(f"{prefix}gate_up_proj_bias", (num, 2 * size), part=Part(1, pairs))
        self.down_bias = source.take(f"{prefix}down_proj_bias", (num, hidden))
        if tp.rank > 0:
            self.down_bias.zero_()  # the ranks' parts are added up, and it must be in the sum once


def _take_experts(place: _Place) -> Experts:
    (up, up_shape, up_part), (last, last_shape, last_part) = place.gate_up, place.down
    gate_up = place.source.take(up, up_shape, part=up_part).transpose(1, 2)
    down = place.source.take(last, last_shape, part=last_part).transpose(1, 2).contiguous()
    return Experts(_halves(gate_up), down, _halves(place.gate_up_bias), place.down_bias, clamped_swiglu)


def _take_kernel_experts(place: _Place) -> KernelExperts:
    from sglang.srt.layers.moe.kernel_experts import KernelExperts

    gate_up = _take_matrix(place, place.gate_up, _halves)
    down = _take_matrix(place, place.down, torch.Tensor.contiguous)
    return KernelExperts(
        replace(gate_up, bias=_halves(place.gate_up_bias)), replace(down, bias=place.down_bias), clamped=True
    )


def _take_matrix(
    place: _Place,
    wanted: tuple[str, tuple[int, int, int], Part],
    ordered: Callable[[torch.Tensor], torch.Tensor],  # [E, rows, columns] -> the same in the kernels' order
) -> ExpertMatrix:
    """As MXFP4 where the checkpoint has it; else in the run's dtype."""
    from sgl_kernel.moe.weights import ExpertMatrix, Format
    from sglang.srt.layers.quantization.expert_stack import as_mxfp4

    source, (name, shape, part) = place.source, wanted
    weight = source.take_packed(name, shape, part)
    if weight is None:
        return ExpertMatrix(Format.PLAIN, ordered(source.take(name, shape, part=part).transpose(1, 2)))
    assert isinstance(weight, Fp4Weight)
    kept = as_mxfp4(weight)
    if kept is not None:
        return ExpertMatrix(Format.MXFP4, ordered(kept[0]), ordered(kept[1]))
    dense = place.down_bias.new_empty(weight.shape)
    for expert, matrix in enumerate(dense):  # one by one: what it takes in between is large
        matrix.copy_(weight.part(expert).dequantise(dense.dtype))
    return ExpertMatrix(Format.PLAIN, ordered(dense))


def _halves(interleaved: torch.Tensor) -> torch.Tensor:
    """[E, 2 * I, ...] of gate, up, gate, up, … -> all of gate, then all of up."""
    return torch.cat((interleaved[:, ::2], interleaved[:, 1::2]), dim=1)
