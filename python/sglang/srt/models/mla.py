"""The decoder with multi-head latent attention that DeepSeek, Kimi and GLM-5 share.

What a family's layers are, its config says: ``MLAConfig`` (with or without an indexer) and ``MoEConfig``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F

from sglang.srt.configs.mla_config import IndexConfig, MLAConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.tensor_parallel import TensorParallel
from sglang.srt.layers.attention.base import LayerAttention
from sglang.srt.layers.attention.heads import Positions
from sglang.srt.layers.attention.mla import IndexProduct, LatentHeads, RawLatents, in_halves
from sglang.srt.layers.linear import Linear, exact_linear
from sglang.srt.layers.moe.layer import MLP
from sglang.srt.layers.norm import RMSNorm
from sglang.srt.layers.stream import Stream
from sglang.srt.mem_cache.mla_pool import MLAKVPool, MLAShape
from sglang.srt.mem_cache.pool import KVPool
from sglang.srt.model_loader.weight_source import Part, WeightSource
from sglang.srt.models.decoder import DecoderLayer, DecoderModel, total_bytes
from sglang.srt.models.dense import take_linear
from sglang.srt.models.moe import take_mlp

if TYPE_CHECKING:
    from sgl_kernel.attention.mla.indexing.prepare import KeyNorm, Turn

LATENT_EPS: Final = 1e-6
"""Of the norms of latents, and of an indexer's keys, whatever ``rms_norm_eps`` is: what transformers and
DeepSeek's own code have."""


class Indexer:
    """Finds the places that a layer attends to."""

    def __init__(
        self, config: ModelConfig, mla: MLAConfig, index: IndexConfig, source: WeightSource, prefix: str
    ):
        assert mla.q_lora_rank is not None
        self.config = index
        self.rope_dim = mla.rope_dim
        hidden, dim = config.hidden_size, index.head_dim
        self.q = take_linear(source, [(f"{prefix}wq_b", index.num_heads * dim)], mla.q_lora_rank, False)
        self.k = take_linear(source, [(f"{prefix}wk", dim)], hidden, False)
        # What decides is not rounded.
        self.norm_weight = source.take(f"{prefix}k_norm.weight", (dim,), wide=True)
        self.norm_bias = source.take(f"{prefix}k_norm.bias", (dim,), wide=True)
        weights = f"{prefix}weights_proj.weight", (index.num_heads, hidden)
        wide = source.take(*weights, wide=True)
        self.head_weights = exact_linear(wide, source.take(*weights) if wide.is_cuda else wide)

    @property
    def weight_bytes(self) -> int:
        norm = (self.norm_weight, self.norm_bias)
        return total_bytes(self.q, self.k, self.head_weights) + sum(
            t.numel() * t.element_size() for t in norm
        )

    def linears(self) -> list[Linear]:
        return [self.q, self.k, self.head_weights]

    def __call__(self, x: torch.Tensor, q_latent: torch.Tensor, positions: Positions) -> IndexProduct:
        """x: [T, H] normed; q_latent: [T, q_lora_rank] normed."""
        config = self.config
        q = self.q(q_latent).view(len(x), config.num_heads, config.head_dim)
        scale = (config.num_heads * config.head_dim) ** -0.5
        weights = self.head_weights(x.to(self.head_weights.weight.dtype))
        if _has_kernel(x):
            from sgl_kernel.attention.mla.indexing.prepare import prepare_index

            k = prepare_index(q, weights, self.k(x), *self._how(positions), scale)
            return IndexProduct(q, k, weights, config.top_k)
        return IndexProduct(self._turn(q, positions), self.keys(x, positions), weights * scale, config.top_k)

    def keys(self, x: torch.Tensor, positions: Positions) -> torch.Tensor:
        """[T, d], normed and turned: what the cache keeps. x: [T, H] normed."""
        if _has_kernel(x):
            from sgl_kernel.attention.mla.indexing.prepare import prepare_keys

            return prepare_keys(self.k(x), *self._how(positions))
        shape, wide = (self.config.head_dim,), self.norm_weight.dtype
        k = F.layer_norm(self.k(x).to(wide), shape, self.norm_weight, self.norm_bias, LATENT_EPS)
        return self._turn(k.to(x.dtype)[:, None], positions)[:, 0]

    def _turn(self, x: torch.Tensor, positions: Positions) -> torch.Tensor:
        """x: [T, heads, d], its first ``rope_dim`` dimensions."""
        return positions.angles.rotate(in_halves(x, self.rope_dim) if self.config.interleaved else x)

    def _how(self, positions: Positions) -> tuple[KeyNorm, Turn]:
        from sgl_kernel.attention.mla.indexing.prepare import KeyNorm, Turn

        angles = positions.angles
        turn = Turn(angles.cos[:, 0], angles.sin[:, 0], self.config.interleaved)
        return KeyNorm(self.norm_weight, self.norm_bias, LATENT_EPS), turn


def _has_kernel(x: torch.Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class LatentPlace:
    """Where the attention of one layer is, and how it differs from a target's."""

    prefix: str  # of its tensors' names
    layer: int  # its number in the pool
    has_indexer: bool
    in_features: int  # what it reads
    eps: float = LATENT_EPS  # of the latents' norms
    apart: bool = False  # the queries' latent by a product of its own: who only fills the cache needs none


class LatentAttention:
    """The attention block of one layer."""

    def __init__(
        self, config: ModelConfig, source: WeightSource, place: LatentPlace, tp: TensorParallel
    ) -> None:
        assert config.mla is not None
        self.layer = place.layer
        self.mla = mla = config.mla
        own = tp.heads(config.num_heads, config.num_heads, config.path).q
        self.num_heads = own.size
        wide, bias, prefix = place.in_features, config.attention_bias, place.prefix
        latent = (f"{prefix}kv_a_proj_with_mqa", mla.latent_dim)
        rank, q_size = mla.q_lora_rank, config.num_heads * mla.qk_dim
        self.q_norm: RMSNorm | None = None
        self.q_down: Linear | None = None  # None: a part of ``down``, or there is none
        if rank is None:
            self.down = take_linear(source, [latent], wide, bias)
            self.q = take_linear(
                source, [(f"{prefix}q_proj", q_size)], wide, False, rows=(own.times(mla.qk_dim),)
            )
        else:
            q_latent = (f"{prefix}q_a_proj", rank)
            if place.apart:
                self.q_down = take_linear(source, [q_latent], wide, bias)
            self.down = take_linear(source, [latent] if place.apart else [q_latent, latent], wide, bias)
            self.q_norm = RMSNorm(source.take(f"{prefix}q_a_layernorm.weight", (rank,)), place.eps)
            self.q = take_linear(
                source, [(f"{prefix}q_b_proj", q_size)], rank, False, rows=(own.times(mla.qk_dim),)
            )
        shape = (mla.kv_lora_rank,)
        self.kv_norm = RMSNorm(source.take(f"{prefix}kv_a_layernorm.weight", shape), place.eps)
        width = mla.nope_dim + mla.v_dim
        kv_shape, part = (config.num_heads * width, mla.kv_lora_rank), Part(0, own.times(width))
        kv_b = source.take(f"{prefix}kv_b_proj.weight", kv_shape, part=part)
        self.heads = LatentHeads(kv_b.view(own.size, width, mla.kv_lora_rank), mla.nope_dim)
        o, columns = [(f"{prefix}o_proj", config.hidden_size)], own.times(mla.v_dim)
        v_size = config.num_heads * mla.v_dim
        self.o = take_linear(source, o, v_size, bias, columns=columns, join=tp.summing)
        self.indexer: Indexer | None = None
        if place.has_indexer:
            assert mla.index is not None
            self.indexer = Indexer(config, mla, mla.index, source, f"{prefix}indexer.")

    @property
    def shape(self) -> MLAShape:
        """What the cache of this layer alone keeps."""
        if self.indexer is None:
            return MLAShape(1, self.mla.latent_dim)
        return MLAShape(1, self.mla.latent_dim, (0,), self.indexer.config.head_dim)

    @property
    def weight_bytes(self) -> int:
        parts = (self.q_down, self.q_norm, self.indexer)
        return total_bytes(
            self.down, self.q, self.kv_norm, self.heads, self.o, *(part for part in parts if part is not None)
        )

    def linears(self) -> list[Linear]:
        q_down = [] if self.q_down is None else [self.q_down]
        indexer = [] if self.indexer is None else self.indexer.linears()
        return [self.down, *q_down, self.q, self.o, *indexer]

    def __call__(
        self,
        x: torch.Tensor,  # [T, in_features], normed unless there is a ``norm``
        residual: torch.Tensor,  # [T, H], used up
        positions: Positions,
        attn: LayerAttention,
        write: bool = True,
        norm: RMSNorm | None = None,
        then: RMSNorm | None = None,
    ) -> Stream:
        """The attention of ``x`` (or of ``norm(x)``) added to the residual stream. ``then``: see ``Stream``.

        ``write`` False: the cache holds these tokens already (``attn`` is of Block.NONE).
        """
        out = attn(self.layer, self._product(x, positions, write, norm))  # [T, nq, v]
        return self.o.onto(residual, out.flatten(1), then)

    def norms_apart(self, rows: int) -> bool:
        """Whether it launches a norm of so many rows by itself."""
        return self.indexer is not None or self.down.norms_apart(rows)

    def write(self, pool: KVPool, places: torch.Tensor, x: torch.Tensor, positions: Positions) -> None:
        """Only fill the cache. places: [T] int64; x: [T, in_features], normed."""
        assert isinstance(pool, MLAKVPool)
        product = self.entries(x, positions)
        pool.write(self.layer, places, product.entries())
        if product.index is not None:
            pool.write_index_keys(self.layer, places, product.index.k)

    def entries(self, x: torch.Tensor, positions: Positions) -> RawLatents:
        """What the cache keeps of them, before norm and rope, and no queries. x: [T, in_features], normed."""
        down = self.down(x)
        if self.q_norm is not None and self.q_down is None:
            down = down[:, self.q_norm.size :]
        q = x.new_empty(0, self.num_heads, self.mla.qk_dim)
        index = None
        if self.indexer is not None:
            config, keys = self.indexer.config, self.indexer.keys(x, positions)
            queries = keys.new_empty(0, config.num_heads, config.head_dim)
            index = IndexProduct(queries, keys, queries[..., 0], config.top_k)
        return self._raw(q, down, positions, index)

    def _product(
        self, x: torch.Tensor, positions: Positions, write: bool, norm: RMSNorm | None
    ) -> RawLatents:
        """x: [T, in_features]."""
        mla, down = self.mla, None
        if norm is not None and self.indexer is not None:
            x, norm = norm(x), None  # it reads more of it than products can norm on their way
        q_in, q_norm = x, norm
        if self.q_down is not None:
            q_in, q_norm = self.q_down(x, norm=norm), self.q_norm
        elif self.q_norm is not None:
            q_in, down = self.down(x, norm=norm).split((self.q_norm.size, mla.latent_dim), dim=-1)
            q_norm = self.q_norm
        index = None
        if self.indexer is not None:
            assert q_norm is not None
            q_in, q_norm = q_norm(q_in), None
            index = self.indexer(x, q_in, positions)
        q = self.q(q_in, norm=q_norm).view(len(x), self.num_heads, mla.qk_dim)
        if not write:
            down = x.new_empty(0, mla.latent_dim)
        elif down is None:
            down = self.down(x, norm=norm)
        return self._raw(q, down, positions, index)

    def _raw(
        self, q: torch.Tensor, down: torch.Tensor, positions: Positions, index: IndexProduct | None
    ) -> RawLatents:
        mla = self.mla
        return RawLatents(
            q,
            down,
            self.kv_norm,
            positions,
            mla.interleaved,
            self.heads,
            mla.softmax_scale,
            sparse=mla.index is not None,
            index=index,
        )


class MLALayer:
    """One decoder layer; adds its two blocks to the residual stream."""

    def __init__(
        self, config: ModelConfig, source: WeightSource, index: int, mlp: MLP, tp: TensorParallel
    ) -> None:
        assert config.mla is not None
        self.index = index
        prefix, shape, eps = f"model.layers.{index}.", (config.hidden_size,), config.rms_norm_eps
        has_indexer = config.mla.index is not None and index in config.mla.index.layers
        place = LatentPlace(f"{prefix}self_attn.", index, has_indexer, config.hidden_size)
        self.attention = LatentAttention(config, source, place, tp)
        self.mlp = mlp
        self.input_norm = RMSNorm(source.take(f"{prefix}input_layernorm.weight", shape), eps)
        self.post_norm = RMSNorm(source.take(f"{prefix}post_attention_layernorm.weight", shape), eps)

    @property
    def weight_bytes(self) -> int:
        return total_bytes(self.attention, self.mlp, self.input_norm, self.post_norm)

    def linears(self) -> list[Linear]:
        return [*self.attention.linears(), *self.mlp.linears()]

    def first_norm(self, rows: int) -> RMSNorm | None:
        return self.input_norm if self.attention.norms_apart(rows) else None

    def __call__(
        self, stream: Stream, positions: Positions, attn: LayerAttention, then: RMSNorm | None = None
    ) -> Stream:
        x, norm = stream.input_of(self.input_norm)
        of_mlp = self.post_norm if self.mlp.norms_apart(len(x)) else None
        stream = self.attention(x, stream.x, positions, attn, norm=norm, then=of_mlp)
        return self.mlp(stream, self.post_norm, positions.live, then)


class MLAModel(DecoderModel):
    """Latent attention in every layer; experts in those that the config names."""

    def cache_shape(self, config: ModelConfig) -> MLAShape:
        assert config.mla is not None
        index = config.mla.index
        if index is None:
            return MLAShape(config.num_layers, config.mla.latent_dim)
        return MLAShape(config.num_layers, config.mla.latent_dim, index.layers, index.head_dim)

    def rope_dim(self, config: ModelConfig) -> int:
        assert config.mla is not None
        return config.mla.rope_dim

    def make_layers(self, config: ModelConfig, source: WeightSource) -> Sequence[DecoderLayer]:
        layers = range(config.num_layers)
        tp = self.tp
        return [MLALayer(config, source, i, take_mlp(source, config, i, tp), tp) for i in layers]
