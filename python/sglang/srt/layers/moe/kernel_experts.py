"""Routing and experts by sgl_kernel: nothing of the host in it, so a CUDA graph holds it.

On a CPU the kernels' references run, which is how it is tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgl_kernel.fp4.flashinfer import FlashInferFp4
from sgl_kernel.fp4.weights import Fp4Experts, experts_for_products
from sgl_kernel.moe.choose import ChoiceRule, choose_experts
from sgl_kernel.moe.ops import expert_counters, fused_experts
from sgl_kernel.moe.weights import ExpertMatrix
from sgl_kernel.norm.ops import rms_norm
from sglang.srt.configs.moe_config import MoEConfig
from sglang.srt.layers.linear import Linear, exact_linear
from sglang.srt.layers.norm import RMSNorm

MAX_PDL_TOKENS = 32
"""Up to so many tokens launches overlap with the kernel ahead."""


def choice_rule(config: MoEConfig) -> ChoiceRule:
    grouped = config.group_score is not None
    return ChoiceRule(
        top_k=config.top_k,
        sigmoid=config.scoring == "sigmoid",
        renormalise=config.renormalise,
        scaling=config.scaling_factor,
        num_groups=config.num_groups if grouped else 1,
        topk_groups=config.topk_groups if grouped else 0,
        by_two=config.group_score == "top2_sum",
    )


class KernelRouter:
    """``Router``. Products and their sums are float32."""

    def __init__(
        self,
        config: MoEConfig,
        gate: torch.Tensor,  # [E, H] float32 at least
        rounded: torch.Tensor,  # [E, H] the same in the type of the hidden states
        bias: torch.Tensor | None,  # [E] float32 at least
        gate_bias: torch.Tensor | None = None,  # [E], of the logits; ``bias`` is of the scores to choose by
    ) -> None:
        self._rule = choice_rule(config)
        self.gate = exact_linear(gate, rounded, gate_bias)
        self.bias = bias

    @property
    def weight_bytes(self) -> int:
        biases = [bias for bias in (self.bias, self.gate.bias) if bias is not None]
        return self.gate.weight_bytes + sum(bias.numel() * bias.element_size() for bias in biases)

    def linears(self) -> Sequence[Linear]:
        return [self.gate]

    def normed(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        return rms_norm(x, norm.weight, norm.eps, pdl=len(x) <= MAX_PDL_TOKENS)

    def __call__(
        self, normed: torch.Tensor, live: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """normed: [T, H]; live: [T] bool, the others get no expert -> [T, k] weights and int32 experts."""
        x = normed if self.gate.weight.dtype == normed.dtype else normed.to(torch.float32)
        logits = self.gate(x)  # [T, E] float32
        pdl = len(normed) <= MAX_PDL_TOKENS
        return choose_experts(logits, self.bias, self._rule, live=live, pdl=pdl)


@dataclass(frozen=True, slots=True)
class _Fp4Products:
    flashinfer: FlashInferFp4
    experts: Fp4Experts


class KernelExperts:
    """``ExpertProducts`` of matrices as a checkpoint packs them. ``clamped``: with GPT-OSS's activation."""

    def __init__(self, gate_up: ExpertMatrix, down: ExpertMatrix, *, clamped: bool = False) -> None:
        self._matrices: tuple[ExpertMatrix, ExpertMatrix] | None = (gate_up, down)
        self._fp4: _Fp4Products | None = None
        self.num_experts = gate_up.num_experts
        self._clamped = clamped
        self.weight_bytes = gate_up.weight_bytes + down.weight_bytes
        self._counters = expert_counters(gate_up.data.device)

    @property
    def matrices(self) -> tuple[ExpertMatrix, ExpertMatrix]:
        """Gate and up, down: as long as they are as the checkpoint packs them."""
        assert self._matrices is not None, "they have been made ready for inputs in 4 bits"
        return self._matrices

    @property
    def gate_up(self) -> ExpertMatrix:
        return self.matrices[0]

    @property
    def down(self) -> ExpertMatrix:
        return self.matrices[1]

    def use_fp4_inputs(self, flashinfer: FlashInferFp4) -> None:
        """Multiply in 4 bits on both sides from now on; of experts that can (``why_not_experts``), and that
        FlashInfer has memory for."""
        self._fp4 = _Fp4Products(flashinfer, experts_for_products(*self.matrices))
        self._matrices = None

    def __call__(
        self,
        x: torch.Tensor,  # [T, H], normed
        weights: torch.Tensor,  # [T, k] float32
        experts: torch.Tensor,  # [T, k], no expert twice in a row; negative: none
        base: torch.Tensor | None = None,  # [T, H], added
    ) -> torch.Tensor:
        """[T, H] of x's dtype."""
        if self._fp4 is not None:
            out = self._fp4.flashinfer.experts(x, weights, experts, self._fp4.experts)
            return out if base is None else out.add_(base)
        return fused_experts(
            x, weights, experts, self.gate_up, self.down, base=base, counters=self._counters,
            pdl=len(x) <= MAX_PDL_TOKENS, clamped=self._clamped,
        )  # fmt: skip
