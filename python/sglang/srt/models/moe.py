"""Mixtures of experts out of a checkpoint: one tensor an expert and projection, as all families have."""

from __future__ import annotations

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.moe_config import MoEConfig
from sglang.srt.distributed.tensor_parallel import TensorParallel
from sglang.srt.layers.moe.experts import Experts
from sglang.srt.layers.moe.layer import MLP, MoE
from sglang.srt.model_loader.weight_source import Part, WeightSource
from sglang.srt.models.dense import GatedMLP


def take_moe(
    source: WeightSource, prefix: str, hidden_size: int, config: MoEConfig, tp: TensorParallel
) -> MoE:
    """``prefix``: of the MLP (``model.layers.3.mlp.``). Every rank has a part of every expert."""
    shape = (config.num_experts, hidden_size)
    gate = source.take(f"{prefix}gate.weight", shape, wide=True)
    bias = None
    if config.has_bias:
        bias = source.take(f"{prefix}gate.e_score_correction_bias", shape[:1], wide=True)
    shared = None
    if config.num_shared:
        size = config.num_shared * config.intermediate_size
        shared = GatedMLP(source, f"{prefix}shared_experts.", hidden_size, size, False, tp)
    experts = _take_experts(source, f"{prefix}experts.", hidden_size, config, tp)
    return MoE(config, gate, bias, experts, shared, summing=tp.summing)


def take_mlp(source: WeightSource, config: ModelConfig, index: int, tp: TensorParallel) -> MLP:
    """Of layer ``index``: experts, or a plain MLP where the layer has none."""
    prefix = f"model.layers.{index}.mlp."
    if config.moe is not None and index in config.moe.layers:
        return take_moe(source, prefix, config.hidden_size, config.moe, tp)
    return GatedMLP(source, prefix, config.hidden_size, config.intermediate_size, False, tp)


def _take_experts(
    source: WeightSource, prefix: str, hidden: int, config: MoEConfig, tp: TensorParallel
) -> Experts:
    """Each tensor goes to its place at once: no second copy of all of them."""
    size = config.intermediate_size
    span = tp.span(size, f"{prefix}: intermediate size of an expert")
    rows, columns, own = Part(0, span), Part(1, span), span.size
    gate_up = down = torch.empty(0)  # their dtype and device are the first tensors'
    for expert in range(config.num_experts):
        name = f"{prefix}{expert}."
        parts = [
            source.take(f"{name}gate_proj.weight", (size, hidden), part=rows),
            source.take(f"{name}up_proj.weight", (size, hidden), part=rows),
        ]
        last = source.take(f"{name}down_proj.weight", (hidden, size), part=columns)
        if expert == 0:
            gate_up = parts[0].new_empty((config.num_experts, 2 * own, hidden))
            down = last.new_empty((config.num_experts, hidden, own))
        gate_up[expert, :own], gate_up[expert, own:] = parts
        down[expert] = last
    return Experts(gate_up, down)
