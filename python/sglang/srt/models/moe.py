"""Mixtures of experts out of a checkpoint: one tensor an expert and projection, as all families have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.moe_config import MoEConfig
from sglang.srt.distributed.tensor_parallel import TensorParallel
from sglang.srt.layers.moe.experts import Experts
from sglang.srt.layers.moe.layer import MLP, MoE
from sglang.srt.layers.moe.router import TorchRouter
from sglang.srt.layers.quantization.quant_weight import QuantWeight
from sglang.srt.model_loader.weight_source import Part, WeightError, WeightSource
from sglang.srt.models import packed
from sglang.srt.models.dense import GatedMLP

if TYPE_CHECKING:
    from sglang.srt.layers.moe.kernel_experts import KernelExperts
    from sglang.srt.layers.quantization.expert_stack import ExpertStack, Layout


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
    place = _Place(source, f"{prefix}experts.", hidden_size, config, tp)
    if not packed.wants_kernels(source.device):
        return MoE(TorchRouter(config, gate, bias), _take_experts(place), shared, tp.summing)
    from sglang.srt.layers.moe.kernel_experts import KernelRouter

    rounded = source.take(f"{prefix}gate.weight", shape)  # in the type of the hidden states
    router = KernelRouter(config, gate, rounded, bias)
    return MoE(router, _take_kernel_experts(place, gate.device), shared, tp.summing)


def take_mlp(source: WeightSource, config: ModelConfig, index: int, tp: TensorParallel) -> MLP:
    """Of layer ``index``: experts, or a plain MLP where the layer has none."""
    prefix = f"model.layers.{index}.mlp."
    if config.moe is not None and index in config.moe.layers:
        return take_moe(source, prefix, config.hidden_size, config.moe, tp)
    return GatedMLP(source, prefix, config.hidden_size, config.intermediate_size, False, tp)


class _Place:
    """Where the experts of a layer are, and which part of them is this rank's."""

    def __init__(
        self, source: WeightSource, prefix: str, hidden: int, config: MoEConfig, tp: TensorParallel
    ) -> None:
        self.source = source
        self.num_experts = config.num_experts
        size = config.intermediate_size
        span = tp.span(size, f"{prefix}: intermediate size of an expert")
        self.own, self.hidden = span.size, hidden
        rows, columns = Part(0, span), Part(1, span)
        # name -> shape of the whole, this rank's part
        up = ((size, hidden), rows)
        self._weights = {"gate_proj": up, "up_proj": up, "down_proj": ((hidden, size), columns)}
        self._prefix = prefix

    def name(self, expert: int, which: str) -> str:
        return f"{self._prefix}{expert}.{which}.weight"

    def take(self, expert: int, which: str) -> torch.Tensor:
        shape, part = self._weights[which]
        return self.source.take(self.name(expert, which), shape, part=part)

    def take_packed(self, expert: int, which: str) -> QuantWeight | None:
        shape, part = self._weights[which]
        return self.source.take_packed(self.name(expert, which), shape, part)


def _take_experts(place: _Place) -> Experts:
    """Each tensor goes to its place at once: no second copy of all of them."""
    own = place.own
    first = place.take(0, "gate_proj")
    gate_up = first.new_empty((place.num_experts, 2 * own, place.hidden))
    down = first.new_empty((place.num_experts, place.hidden, own))
    gate_up[0, :own] = first

    def put(expert: int) -> None:
        if expert:
            gate_up[expert, :own] = place.take(expert, "gate_proj")
        gate_up[expert, own:] = place.take(expert, "up_proj")
        down[expert] = place.take(expert, "down_proj")

    place.source.side_by_side([partial(put, expert) for expert in range(place.num_experts)])
    return Experts(gate_up, down)


@dataclass(frozen=True, slots=True)
class _Filling:
    """A stack that is being filled. ``packed``: by weights as the checkpoint packs them."""

    stack: ExpertStack
    names: tuple[str, ...]  # of its parts
    packed: bool
    first: QuantWeight | torch.Tensor  # of expert 0, the first part

    def put(self, place: _Place, expert: int) -> None:
        for part, which in enumerate(self.names):
            weight: QuantWeight | torch.Tensor | None = self.first
            if expert or part:
                weight = place.take_packed(expert, which) if self.packed else place.take(expert, which)
            try:
                if weight is None:
                    raise ValueError("missing, or not packed as those of expert 0 are")
                self.stack.put(expert, part, weight)
            except ValueError as error:
                raise WeightError(f"{place.name(expert, which)}: {error}") from error


def _take_kernel_experts(place: _Place, device: torch.device) -> KernelExperts:
    """As the checkpoint packs them where a kernel reads that; else dequantised."""
    from sglang.srt.layers.moe.kernel_experts import KernelExperts

    up = _filling(place, ("gate_proj", "up_proj"), (place.own, place.hidden), device)
    down = _filling(place, ("down_proj",), (place.hidden, place.own), device)

    def put(expert: int) -> None:
        up.put(place, expert)
        down.put(place, expert)

    place.source.side_by_side([partial(put, expert) for expert in range(place.num_experts)])
    return KernelExperts(up.stack.matrix(), down.stack.matrix())


def _filling(
    place: _Place, names: tuple[str, ...], part_size: tuple[int, int], device: torch.device
) -> _Filling:
    from sglang.srt.layers.quantization.expert_stack import ExpertStack, layout_of

    first: QuantWeight | torch.Tensor | None = place.take_packed(0, names[0])
    layout: Layout | None = None if first is None else layout_of(first)
    packed = layout is not None
    if layout is None or first is None:
        first = place.take(0, names[0])
        layout = layout_of(first)
        assert layout is not None
    stack = ExpertStack(layout, place.num_experts, len(names), part_size, device)
    return _Filling(stack, names, packed, first)
