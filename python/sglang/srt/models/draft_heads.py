"""Ordinary attention of a draft layer: q by one product, k and v by another.

A sync needs only k and v, the first draft forward of a step only q.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.tensor_parallel import TensorParallel
from sglang.srt.layers.attention.base import LayerAttention
from sglang.srt.layers.attention.heads import HeadProduct, Positions
from sglang.srt.layers.linear import Linear
from sglang.srt.layers.norm import RMSNorm
from sglang.srt.layers.stream import Stream
from sglang.srt.mem_cache.kv_pool import MHAKVPool
from sglang.srt.mem_cache.pool import KVPool
from sglang.srt.model_loader.weight_source import WeightSource
from sglang.srt.models.decoder import total_bytes
from sglang.srt.models.dense import KVShape, take_linear


@dataclass(frozen=True, slots=True)
class HeadTraits:
    in_features: int  # what q, k and v are made of
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool  # q and k are normed per head before the rope


class DraftHeads:
    """``DraftAttention``. Shapes: T tokens, nq and nkv query and KV heads of this rank, H of the stream."""

    def __init__(
        self, config: ModelConfig, traits: HeadTraits, source: WeightSource, prefix: str, tp: TensorParallel
    ) -> None:
        """``prefix``: of the attention's tensors (``midlayer.self_attn.``)."""
        d, wide = config.head_dim, traits.in_features
        own = tp.heads(config.num_heads, config.num_kv_heads, config.path)
        self.num_heads, self.num_kv_heads, self.head_dim = own.q.size, own.kv.size, d
        q_size, kv_size = config.num_heads * d, config.num_kv_heads * d
        q_rows, kv_rows = own.q.times(d), own.kv.times(d)
        qkv = [(f"{prefix}q_proj", q_size), (f"{prefix}k_proj", kv_size), (f"{prefix}v_proj", kv_size)]
        rows = (q_rows, kv_rows, kv_rows)
        whole = take_linear(source, qkv, wide, traits.qkv_bias, pack=False, rows=rows)
        self.q, self.kv = whole.rows(0, q_rows.size), whole.rows(q_rows.size, whole.out_features)
        # Over the same memory; a CPU's parts are packed copies, and it does without.
        self.qkv = whole if whole.weight.is_cuda else None
        o = [(f"{prefix}o_proj", config.hidden_size)]
        self.o = take_linear(source, o, q_size, traits.o_bias, columns=q_rows, join=tp.summing)
        self._norms: tuple[RMSNorm, RMSNorm, RMSNorm] | None = None  # of q, of k, and of both side by side
        if traits.qk_norm:
            self._norms = self._take_norms(source, prefix, config.rms_norm_eps)

    def _take_norms(self, source: WeightSource, prefix: str, eps: float) -> tuple[RMSNorm, RMSNorm, RMSNorm]:
        q = source.take(f"{prefix}q_norm.weight", (self.head_dim,))
        k = source.take(f"{prefix}k_norm.weight", (self.head_dim,))
        both = torch.cat((q.expand(self.num_heads, -1), k.expand(self.num_kv_heads, -1)))  # [nq + nkv, d]
        return RMSNorm(q, eps), RMSNorm(k, eps), RMSNorm(both, eps)

    @property
    def shape(self) -> KVShape:
        return KVShape(1, self.num_kv_heads, self.head_dim)

    @property
    def weight_bytes(self) -> int:
        return total_bytes(self.q, self.kv, self.o, *(self._norms or ()))

    def linears(self) -> list[Linear]:
        return [self.q, self.kv, self.o, *([] if self.qkv is None else [self.qkv])]

    def entries(self, x: torch.Tensor, positions: Positions) -> HeadProduct:
        """k and v alone, before norm and rope. x: [T, in_features]."""
        norm = None if self._norms is None else self._norms[1]
        return HeadProduct(self.kv(x), 0, self.num_kv_heads, positions, norm)

    def write(self, pool: KVPool, places: torch.Tensor, x: torch.Tensor, positions: Positions) -> None:
        assert isinstance(pool, MHAKVPool)
        _, k, v = self.entries(x, positions).turned()
        assert k is not None and v is not None
        pool.write(0, places, k, v)

    def __call__(
        self,
        x: torch.Tensor,  # [T, in_features]
        residual: torch.Tensor,  # [T, H]
        positions: Positions,
        attn: LayerAttention,
        write: bool,
        *,
        then: RMSNorm | None = None,
    ) -> Stream:
        q_norm, _, both = self._norms or (None, None, None)
        if not write:
            product = HeadProduct(self.q(x), self.num_heads, 0, positions, q_norm)
        else:
            qkv = torch.cat((self.q(x), self.kv(x)), dim=1) if self.qkv is None else self.qkv(x)
            product = HeadProduct(qkv, self.num_heads, self.num_kv_heads, positions, both)
        return self.o.onto(residual, attn(0, product).flatten(1), then)
