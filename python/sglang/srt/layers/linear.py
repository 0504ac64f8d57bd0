"""Linear layers.

On a CPU a step of 1 to 16 rows is bound by reading the weights, so float32 weights are packed once
by oneDNN. All linears of SmolLM2-135M on 2 AVX2 cores: 1 row takes 0.65x of ``F.linear``'s time, and
4 rows 1.2x of 1 row (``F.linear``: 1.9x). The batch hint of the packing is left out: a hint of 1 or 4
made other row counts slower.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


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
    """

    def __init__(
        self,
        weight: torch.Tensor,  # [out, in]
        bias: torch.Tensor | None = None,  # [out]
        *,
        float_output: bool = False,
        pack: bool = True,
    ) -> None:
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

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._widen_input:
            x = x.float()
        if self.packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return out
        if self._half_to_float:
            product = torch.mm(x.flatten(0, -2), self.weight.t(), out_dtype=torch.float32)
            product = product.view(*x.shape[:-1], self.out_features)
            return product if self.bias is None else product + self.bias
        return F.linear(x, self.weight, self.bias)
