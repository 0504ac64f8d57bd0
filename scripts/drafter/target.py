"""The target model: weights from a GGUF file, packed forward, and one decode step.

Plain functions over lists of weights, because the same weights serve three uses: generating
text (`decode`), giving features and probabilities to the trainer (`forward`), and evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from attention import PackedMask, attend
from dims import Dims
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer, projections of one input fused."""

    norm1: Tensor  # [hidden]
    qkv: Tensor  # [q + 2 kv, hidden]
    out: Tensor  # [hidden, q]
    norm2: Tensor  # [hidden]
    gate_up: Tensor  # [2 ffn, hidden]
    down: Tensor  # [hidden, ffn]


@dataclass(frozen=True, slots=True)
class TargetWeights:
    embedding: Tensor  # [vocab, hidden], also the output layer
    norm: Tensor  # [hidden]
    layers: tuple[LayerWeights, ...]


def _undo_rope_order(weight: Tensor, heads: int) -> Tensor:
    """GGUF interleaves the two rope halves of a head; go back to [first half, second half]."""
    rows, cols = weight.shape
    return weight.view(heads, rows // heads // 2, 2, cols).transpose(1, 2).reshape(rows, cols)


def load_gguf(path: Path, dims: Dims, device: str, dtype: torch.dtype) -> TargetWeights:
    """Dequantise a Llama GGUF; values are rounded to bfloat16 first, whatever `dtype`."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    raw: dict[str, Tensor] = {}
    for item in GGUFReader(str(path)).tensors:
        value = torch.from_numpy(dequantize(item.data, item.tensor_type).copy())
        if item.name.endswith("attn_q.weight"):
            value = _undo_rope_order(value, dims.heads)
        if item.name.endswith("attn_k.weight"):
            value = _undo_rope_order(value, dims.kv_heads)
        raw[item.name] = value.to(torch.bfloat16).to(device, dtype)
    layers = tuple(_gguf_layer(raw, f"blk.{i}.") for i in range(dims.layers))
    return TargetWeights(raw["token_embd.weight"], raw["output_norm.weight"], layers)


def _gguf_layer(raw: dict[str, Tensor], prefix: str) -> LayerWeights:
    def get(name: str) -> Tensor:
        return raw[f"{prefix}{name}.weight"]

    return LayerWeights(
        norm1=get("attn_norm"),
        qkv=torch.cat([get("attn_q"), get("attn_k"), get("attn_v")]),
        out=get("attn_output"),
        norm2=get("ffn_norm"),
        gate_up=torch.cat([get("ffn_gate"), get("ffn_up")]),
        down=get("ffn_down"),
    )


def random_weights(dims: Dims, device: str, dtype: torch.dtype, seed: int = 0) -> TargetWeights:
    """A target of random weights, for tests and for timing without the model."""
    rng = torch.Generator().manual_seed(seed)

    def mat(rows: int, cols: int) -> Tensor:
        return (torch.randn(rows, cols, generator=rng) * cols**-0.5).to(device, dtype)

    def ones() -> Tensor:
        return torch.ones(dims.hidden, device=device, dtype=dtype)

    h, q, kv, f = dims.hidden, dims.q_size, dims.kv_size, dims.ffn
    layers = tuple(
        LayerWeights(ones(), mat(q + 2 * kv, h), mat(h, q), ones(), mat(2 * f, h), mat(h, f))
        for _ in range(dims.layers)
    )
    return TargetWeights(mat(dims.vocab, h), ones(), layers)


def rope_tables(dims: Dims, length: int, device: str) -> tuple[Tensor, Tensor]:
    """cos and sin, each [length, head_dim] float32."""
    frequency = dims.theta ** -(torch.arange(0, dims.head_dim, 2).double() / dims.head_dim)
    angle = torch.outer(torch.arange(length).double(), frequency).repeat(1, 2)
    return angle.cos().float().to(device), angle.sin().float().to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rope in float32 on the last dimension; `cos` and `sin` broadcast."""
    first, second = x.float().chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return (x.float() * cos + turned * sin).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm computed in float32, rounded once."""
    value = x.float()
    scale = torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + eps)
    return (value * scale * weight.float()).to(x.dtype)


def _project(
    x: Tensor, w: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, dims: Dims
) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, S, hidden] -> q [B, heads, S, D], k and v [B, kv_heads, S, D]."""
    batch, length, _ = x.shape
    fused = F.linear(rms_norm(x, norm, dims.eps), w).view(batch, length, -1, dims.head_dim)
    q, k, v = fused.transpose(1, 2).split([dims.heads, dims.kv_heads, dims.kv_heads], 1)
    return rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous()


def _mix(x: Tensor, o: Tensor, w: tuple[Tensor, ...], eps: float) -> Tensor:
    """Output projection, residual, MLP.  o [B, heads, S, D]."""
    out, norm2, gate_up, down = w
    x = x + F.linear(o.transpose(1, 2).flatten(2), out)
    gate, up = F.linear(rms_norm(x, norm2, eps), gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, down)


class Target:
    """Runs the weights; `compiled` fuses the pieces of a layer (one compile serves all layers)."""

    def __init__(self, weights: TargetWeights, dims: Dims, max_len: int, compiled: bool):
        self.weights, self.dims = weights, dims
        device = str(weights.embedding.device)
        self.cos, self.sin = rope_tables(dims, max_len + 16, device)
        wrap: Callable = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self._project, self._mix = wrap(_project), wrap(_mix)
        self._norm = wrap(rms_norm)

    @torch.no_grad()
    def forward(self, ids: Tensor, position: Tensor, mask: PackedMask) -> tuple[Tensor, Tensor]:
        """ids, position [B, S] -> features [B, S, 3 hidden], final normed hidden [B, S, hidden]."""
        cos, sin = self.cos[position][:, None], self.sin[position][:, None]  # [B, 1, S, D]
        x, features = self.weights.embedding[ids], []
        for i, w in enumerate(self.weights.layers):
            if i in self.dims.aux_layers:
                features.append(x)
            q, k, v = self._project(x, w.qkv, w.norm1, cos, sin, self.dims)
            o = attend(q, k, v, mask)
            x = self._mix(x, o, (w.out, w.norm2, w.gate_up, w.down), self.dims.eps)
        return torch.cat(features, -1), self._norm(x, self.weights.norm, self.dims.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits over the whole vocabulary; hidden [N, hidden]."""
        return matmul_f32(hidden, self.weights.embedding.t())


def matmul_f32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with float32 results from bfloat16 factors (no rounding of the sums)."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
