"""Mixtures of experts out of a checkpoint: one tensor an expert and projection, as all families have."""

from __future__ import annotations

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.moe_config import MoEConfig
from sglang.srt.layers.moe.experts import Experts
from sglang.srt.layers.moe.layer import MLP, MoE
from sglang.srt.model_loader.weight_source import WeightSource
from sglang.srt.models.dense import GatedMLP


def take_moe(source: WeightSource, prefix: str, hidden_size: int, config: MoEConfig) -> MoE:
    """``prefix``: of the MLP (``model.layers.3.mlp.``)."""
    shape = (config.num_experts, hidden_size)
    gate = source.take(f"{prefix}gate.weight", shape, wide=True)
    bias = None
    if config.has_bias:
        bias = source.take(f"{prefix}gate.e_score_correction_bias", shape[:1], wide=True)
    shared = None
    if config.num_shared:
        size = config.num_shared * config.intermediate_size
        shared = GatedMLP(source, f"{prefix}shared_experts.", hidden_size, size, bias=False)
    experts = _take_experts(source, f"{prefix}experts.", hidden_size, config)
    return MoE(config, gate, bias, experts, shared)


def take_mlp(source: WeightSource, config: ModelConfig, index: int) -> MLP:
    """Of layer ``index``: experts, or a plain MLP where the layer has none."""
    prefix = f"model.layers.{index}.mlp."
    if config.moe is not None and index in config.moe.layers:
        return take_moe(source, prefix, config.hidden_size, config.moe)
    return GatedMLP(source, prefix, config.hidden_size, config.intermediate_size, bias=False)


def _take_experts(source: WeightSource, prefix: str, hidden: int, config: MoEConfig) -> Experts:
    """Each tensor goes to its place at once: no second copy of all of them."""
    size = config.intermediate_size
    gate_up = down = torch.empty(0)  # their dtype and device are the first tensors'
    for expert in range(config.num_experts):
        name = f"{prefix}{expert}."
        parts = [
            source.take(f"{name}gate_proj.weight", (size, hidden)),
            source.take(f"{name}up_proj.weight", (size, hidden)),
        ]
        last = source.take(f"{name}down_proj.weight", (hidden, size))
        if expert == 0:
            gate_up = parts[0].new_empty((config.num_experts, 2 * size, hidden))
            down = last.new_empty((config.num_experts, hidden, size))
        gate_up[expert, :size], gate_up[expert, size:] = parts
        down[expert] = last
    return Experts(gate_up, down)
