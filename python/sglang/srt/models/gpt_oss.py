"""GPT-OSS: windows in every other layer, attention sinks, experts with biases and a clamped activation.

A checkpoint holds all experts of a layer in one tensor [E, in, out] (MXFP4 is stored the other way round,
and dequantised as it is taken), gate and up interleaved.

transformers multiplies by a norm's weight in float32 before it rounds; ours rounds first, as everywhere
else, which is seen in half precision alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.moe_config import MoEConfig
from sglang.srt.distributed.tensor_parallel import TensorParallel
from sglang.srt.layers.activation import clamped_swiglu
from sglang.srt.layers.attention.heads import Scope
from sglang.srt.layers.moe.experts import Experts
from sglang.srt.layers.moe.layer import MLP, MoE
from sglang.srt.layers.moe.router import TorchRouter
from sglang.srt.model_loader.weight_source import Part, WeightSource
from sglang.srt.models.dense import DenseModel


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
        experts = _take_experts(source, f"{prefix}experts.", config.hidden_size, moe, self.tp)
        return MoE(TorchRouter(moe, gate, None, gate_bias), experts, None, self.tp.summing)


def _take_experts(
    source: WeightSource, prefix: str, hidden: int, config: MoEConfig, tp: TensorParallel
) -> Experts:
    num, size = config.num_experts, config.intermediate_size
    own = tp.span(size, f"{prefix}: intermediate size of an expert")
    pairs = own.times(2)
    gate_up = source.take(f"{prefix}gate_up_proj", (num, hidden, 2 * size), part=Part(2, pairs))
    gate_up_bias = source.take(f"{prefix}gate_up_proj_bias", (num, 2 * size), part=Part(1, pairs))
    down = source.take(f"{prefix}down_proj", (num, size, hidden), part=Part(1, own))
    down = down.transpose(1, 2).contiguous()
    down_bias = source.take(f"{prefix}down_proj_bias", (num, hidden))
    if tp.rank > 0:
        down_bias.zero_()  # the ranks' parts are added up, and it must be in the sum once
    gate_up, gate_up_bias = _halves(gate_up.transpose(1, 2)), _halves(gate_up_bias)
    return Experts(gate_up, down, gate_up_bias, down_bias, clamped_swiglu)


def _halves(interleaved: torch.Tensor) -> torch.Tensor:
    """[E, 2 * I, ...] of gate, up, gate, up, … -> all of gate, then all of up."""
    return torch.cat((interleaved[:, ::2], interleaved[:, 1::2]), dim=1)
