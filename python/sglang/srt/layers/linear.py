"""Linear layers.

On a CPU a step of 1 to 16 rows is bound by reading the weights, so float32 weights are packed once
by oneDNN. All linears of SmolLM2-135M on 2 AVX2 cores: 1 row takes 0.65x of ``F.linear``'s time, and
4 rows 1.2x of 1 row (``F.linear``: 1.9x). The batch hint of the packing is left out: a hint of 1 or 4
made other row counts slower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from sglang.srt.distributed.tensor_parallel import Join
from sglang.srt.layers.activation import silu_and_mul
from sglang.srt.layers.norm import RMSNorm
from sglang.srt.layers.stream import Stream

if TYPE_CHECKING:
    from sglang.srt.layers.kernel_linear import KernelChoices


def exact_linear(wide: torch.Tensor, rounded: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A layer whose results are not rounded, for what decides. wide: [out, in] float32 at least.

    The weight is ``rounded``, the same in the type of the model, where that changes none of its numbers, as
    checkpoints mostly store it: products of half-precision numbers are exact in float32, and half the bytes
    are read. Its input must have the weight's type. bias: [out].
    """
    is_exact = torch.equal(rounded.to(wide.dtype), wide)
    return Linear(rounded if is_exact else wide, bias, float_output=True)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN packs this weight: float32 on a CPU, and the operators are in this build."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class Linear:
    """``x [..., in] -> [..., out]``. Takes ownership of its tensors: a packed weight is the only copy.

    ``float_output``: the result is float32 whatever the weights are (float64 stays): an lm_head's
    logits must not be rounded to bfloat16 before a token is chosen.

    ``join``: the matrix is one rank's part, and this makes the whole result of what it gives. The bias is
    then of the whole, and added once.
    """

    def __init__(
        self,
        weight: torch.Tensor,  # [out, in]
        bias: torch.Tensor | None = None,  # [out]
        *,
        float_output: bool = False,
        pack: bool = True,
        join: Join | None = None,
    ) -> None:
        self._join = join
        self.out_features, self.in_features = weight.shape
        self.weight_bytes = weight.numel() * weight.element_size()
        self.bias = bias
        is_half = float_output and weight.dtype in (torch.bfloat16, torch.float16)
        # No mixed-precision product on a CPU: hold the same values in float32.
        self._widen_input = is_half and weight.device.type == "cpu"
        self._half_to_float = is_half and not self._widen_input
        if self._widen_input:
            weight, self.bias = weight.float(), None if bias is None else bias.float()
        self.packed = pack and can_pack(weight)
        if self.packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.weight = weight  # [out, in], in oneDNN's layout if packed

        self._choices: KernelChoices | None = None

    def use_kernels(self, choices: KernelChoices) -> None:
        """Multiply with sgl_kernel from now on; for half-precision weights on CUDA."""
        self._choices = choices

    def rows(self, begin: int, end: int) -> Linear:
        """The layer that gives some of the output features, over the same memory unless it is packed."""
        assert not self.packed and self._join is None, "neither a packed matrix nor one rank's has rows"
        return Linear(self.weight[begin:end], None if self.bias is None else self.bias[begin:end])

    def __call__(
        self, x: torch.Tensor, *, norm: RMSNorm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``norm(x) @ W^T + bias + residual``. The residual's memory may be that of the result."""
        if self._join is not None:
            part = self.part(x, norm=norm)
            if self.bias is None:
                return self._join(part, residual)
            out = self._join(part).add_(self.bias)
            return out if residual is None else residual.add_(out)
        if self._choices is not None:
            return self._by_kernel(self._choices, x, norm, residual, gated=False)
        out = self._product(x if norm is None else norm(x))
        return out if residual is None else residual + out

    def onto(self, residual: torch.Tensor, x: torch.Tensor, then: RMSNorm | None) -> Stream:
        """``x @ W^T + bias`` added to the residual stream, [T, out], which is used up. ``then``: see
        ``Stream``."""
        if self._join is None or self.bias is not None or then is None:
            return Stream(self(x, residual=residual))
        return Stream(*self._join.with_norm(self.part(x), residual, then), then)

    def norms_apart(self, rows: int) -> bool:
        """Whether a norm of so many rows of its input is a launch of its own; the same on all ranks."""
        return self._choices is None or self._choices.norms_apart(rows)

    def part(self, x: torch.Tensor, *, norm: RMSNorm | None = None) -> torch.Tensor:
        """This rank's part of ``norm(x) @ W^T``, before any join."""
        if self._choices is not None:
            return self._by_kernel(self._choices, x, norm, None, gated=False)
        return self._product(x if norm is None else norm(x))

    def gated(self, x: torch.Tensor, *, norm: RMSNorm | None = None) -> torch.Tensor:
        """``silu(gate) * up`` of the features, of which the first half are the gate's: [..., out / 2]."""
        if self._choices is not None and self.bias is None:
            return self._by_kernel(self._choices, x, norm, None, gated=True)
        return silu_and_mul(self(x, norm=norm))

    def _by_kernel(
        self,
        choices: KernelChoices,
        x: torch.Tensor,  # [T, in]
        norm: RMSNorm | None,
        residual: torch.Tensor | None,  # [T, out]
        gated: bool,
    ) -> torch.Tensor:
        from sglang.srt.layers import kernel_linear as kernels  # a CPU server needs nothing of sgl_kernel

        own_norm = None if norm is None else kernels.InputNorm(norm.weight, norm.eps)
        bias = self.bias if self._join is None else None
        fusion = kernels.Fusion(norm=own_norm, gated=gated, bias=bias, residual=residual)
        return kernels.product(x, self.weight, fusion, choices, float_output=self._half_to_float)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias if self._join is None else None
        if self._widen_input:
            x = x.float()
        if self.packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, bias, "none", [], "")
            return out
        if self._half_to_float:
            product = torch.mm(x.flatten(0, -2), self.weight.t(), out_dtype=torch.float32)
            product = product.view(*x.shape[:-1], self.out_features)
            return product if bias is None else product + bias
        return F.linear(x, self.weight, bias)
