"""The decoder that Llama, Qwen2 and Qwen3 share. A family differs by its ``DenseTraits``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.shares import Span
from sglang.srt.distributed.tensor_parallel import Join, TensorParallel
from sglang.srt.layers.attention.base import LayerAttention
from sglang.srt.layers.attention.heads import HeadProduct, Positions, Scope
from sglang.srt.layers.linear import Linear
from sglang.srt.layers.moe.layer import MLP
from sglang.srt.layers.norm import RMSNorm
from sglang.srt.layers.stream import Stream
from sglang.srt.mem_cache.kv_pool import MHAKVPool
from sglang.srt.model_loader.weight_source import Part, WeightSource
from sglang.srt.models import packed
from sglang.srt.models.decoder import DecoderLayer, DecoderModel, total_bytes
from sglang.srt.models.partial_rope import in_order_of_kernels, turns_part


@dataclass(frozen=True, slots=True)
class DenseTraits:
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # q and k are normed per head before the rope


@dataclass(frozen=True, slots=True)
class KVShape:
    """Keys and values of every layer (``CacheShape``)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def bytes_per_place(self, dtype: torch.dtype, exact: torch.dtype | None = None) -> int:
        return self.num_layers * self.num_kv_heads * 2 * self.head_dim * dtype.itemsize

    def make_pool(
        self,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        exact: torch.dtype | None = None,
    ) -> MHAKVPool:
        return MHAKVPool(
            self.num_layers, num_pages, page_size, self.num_kv_heads, self.head_dim, dtype, device
        )


def take_linear(
    source: WeightSource,
    parts: Sequence[tuple[str, int]],
    in_features: int,
    bias: bool,
    *,
    pack: bool = True,
    gated: bool = False,
    rows: Sequence[Span] = (),
    columns: Span | None = None,
    join: Join | None = None,
) -> Linear:
    """One linear layer from the named parts (name without ``.weight``, output features).

    ``pack`` False: the matrix is wanted as it is. ``gated``: the parts are gate and up.
    ``rows``: this rank's output features of each part. ``columns``: its input features. ``join``: see
    ``Linear``; with it the bias is whole.
    """
    spans: list[Part | None] = [Part(0, span) for span in rows]
    if not rows:
        spans = [None if columns is None else Part(1, columns)] * len(parts)
    of_bias = [None if join is not None or part is None or part.dim == 1 else part for part in spans]
    biases = []
    if bias:
        takes = zip(parts, of_bias, strict=True)
        biases = [source.take(f"{name}.bias", (out,), part=part) for (name, out), part in takes]
    own_bias = torch.cat(biases) if biases else None
    wanted = [
        (f"{name}.weight", (out, in_features), part) for (name, out), part in zip(parts, spans, strict=True)
    ]
    if pack and packed.wants_kernels(source.device):
        kept = packed.take_packed_linear(source, wanted, own_bias, gated=gated, join=join)
        if kept is not None:
            return kept
    weights = [source.take(name, shape, part=part) for name, shape, part in wanted]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    return Linear(weight, own_bias, pack=pack, join=join)


class GatedMLP:
    """Split over ranks by its inner size."""

    def __init__(
        self,
        source: WeightSource,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        tp: TensorParallel,
    ) -> None:
        own = tp.span(intermediate_size, f"{prefix}: intermediate size")
        gate_up = [(f"{prefix}gate_proj", intermediate_size), (f"{prefix}up_proj", intermediate_size)]
        self.gate_up = take_linear(source, gate_up, hidden_size, bias, gated=True, rows=(own, own))
        down = [(f"{prefix}down_proj", hidden_size)]
        self.down = take_linear(source, down, intermediate_size, bias, columns=own, join=tp.summing)
        self.weight_bytes = self.gate_up.weight_bytes + self.down.weight_bytes

    def linears(self) -> list[Linear]:
        return [self.gate_up, self.down]

    def norms_apart(self, rows: int) -> bool:
        return self.gate_up.norms_apart(rows)

    def __call__(
        self, stream: Stream, norm: RMSNorm, live: torch.Tensor | None = None, then: RMSNorm | None = None
    ) -> Stream:
        """The MLP of the normed residual stream added to it; that is used up."""
        x, still = stream.input_of(norm)
        return self.down.onto(stream.x, self.gate_up.gated(x, norm=still), then)

    def part(self, normed: torch.Tensor) -> torch.Tensor:
        """normed: [T, H] -> [T, H], what this rank adds to the sum of all; without a bias."""
        return self.down.part(self.gate_up.gated(normed))


class DenseLayer:
    """One decoder layer; adds its two blocks to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        traits: DenseTraits,
        source: WeightSource,
        index: int,
        mlp: MLP,
        scope: Scope,
        tp: TensorParallel,
    ) -> None:
        self.index = index
        self.mlp = mlp
        self.scope = scope
        heads = tp.heads(config.num_heads, config.num_kv_heads, config.path)
        self.num_heads, self.num_kv_heads = heads.q.size, heads.kv.size
        self.head_dim = d = config.head_dim
        prefix, hidden = f"model.layers.{index}.", config.hidden_size
        attn = f"{prefix}self_attn."
        q_size, kv_size = config.num_heads * d, config.num_kv_heads * d
        q_rows, kv_rows = heads.q.times(d), heads.kv.times(d)
        qkv = [(f"{attn}q_proj", q_size), (f"{attn}k_proj", kv_size), (f"{attn}v_proj", kv_size)]
        self.qkv = take_linear(source, qkv, hidden, traits.qkv_bias, rows=(q_rows, kv_rows, kv_rows))
        o = [(f"{attn}o_proj", hidden)]
        self.o = take_linear(source, o, q_size, traits.o_bias, columns=q_rows, join=tp.summing)
        self.qk_norm = self._take_qk_norm(config, source, attn) if traits.qk_norm else None
        eps = config.rms_norm_eps
        self.input_norm = RMSNorm(source.take(f"{prefix}input_layernorm.weight", (hidden,)), eps)
        self.post_norm = RMSNorm(source.take(f"{prefix}post_attention_layernorm.weight", (hidden,)), eps)

    @property
    def weight_bytes(self) -> int:
        return total_bytes(self.qkv, self.o, self.mlp, self.input_norm, self.post_norm)

    def linears(self) -> list[Linear]:
        return [self.qkv, self.o, *self.mlp.linears()]

    def _take_qk_norm(self, config: ModelConfig, source: WeightSource, attn: str) -> RMSNorm:
        """q and k lie side by side, so one norm with a weight for each head serves both."""
        q = source.take(f"{attn}q_norm.weight", (self.head_dim,)).expand(self.num_heads, -1)
        k = source.take(f"{attn}k_norm.weight", (self.head_dim,)).expand(self.num_kv_heads, -1)
        return RMSNorm(torch.cat((q, k)), config.rms_norm_eps)  # [nq + nkv, d]

    def first_norm(self, rows: int) -> RMSNorm | None:
        return self.input_norm if self.qkv.norms_apart(rows) else None

    def __call__(
        self, stream: Stream, positions: Positions, attn: LayerAttention, then: RMSNorm | None = None
    ) -> Stream:
        x, norm = stream.input_of(self.input_norm)
        qkv = self.qkv(x, norm=norm)
        product = HeadProduct(qkv, self.num_heads, self.num_kv_heads, positions, self.qk_norm, self.scope)
        of_mlp = self.post_norm if self.mlp.norms_apart(len(x)) else None
        stream = self.o.onto(stream.x, attn(self.index, product).flatten(1), of_mlp)
        return self.mlp(stream, self.post_norm, positions.live, then)


class DenseModel(DecoderModel):
    """Families override ``traits``, and ``make_mlp`` and ``make_scope`` where a layer may have others."""

    @classmethod
    def traits(cls, config: ModelConfig) -> DenseTraits:
        return DenseTraits(config.attention_bias, config.attention_bias, config.mlp_bias, qk_norm=False)

    def cache_shape(self, config: ModelConfig) -> KVShape:
        heads = self.tp.heads(config.num_heads, config.num_kv_heads, config.path)
        return KVShape(config.num_layers, heads.kv.size, config.head_dim)

    def rope_dim(self, config: ModelConfig) -> int:
        return config.rope.turned(config.head_dim)

    def rope_width(self, config: ModelConfig, device: torch.device | str) -> int:
        return config.head_dim if turns_part(config, device) else self.rope_dim(config)

    def make_layers(self, config: ModelConfig, source: WeightSource) -> Sequence[DecoderLayer]:
        traits = self.traits(config)
        source = in_order_of_kernels(source, config)
        return [
            DenseLayer(
                config,
                traits,
                source,
                i,
                self.make_mlp(config, source, i),
                self.make_scope(config, source, i),
                self.tp,
            )
            for i in range(config.num_layers)
        ]

    def make_scope(self, config: ModelConfig, source: WeightSource, index: int) -> Scope:
        """Of layer ``index``."""
        return Scope(window=config.windows[index] if config.windows else None)

    def make_mlp(self, config: ModelConfig, source: WeightSource, index: int) -> MLP:
        """Of layer ``index``."""
        prefix, bias = f"model.layers.{index}.mlp.", self.traits(config).mlp_bias
        return GatedMLP(source, prefix, config.hidden_size, config.intermediate_size, bias, self.tp)
