"""What every decoder shares: embedding, layers one after the other, last norm, lm_head.

A family says what its layers are and what they keep in the cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final, Protocol

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.tensor_parallel import TensorParallel
from sglang.srt.layers.attention.base import LayerAttention
from sglang.srt.layers.attention.heads import Positions
from sglang.srt.layers.embedding import Embedding
from sglang.srt.layers.linear import Linear
from sglang.srt.layers.moe.layer import MLP, ExpertProducts, MoE
from sglang.srt.layers.norm import RMSNorm
from sglang.srt.layers.rope import Rope
from sglang.srt.layers.stream import Stream
from sglang.srt.mem_cache.pool import CacheShape
from sglang.srt.model_loader.weight_source import Part, WeightSource

IGNORED_TENSORS: Final = ("*rotary_emb.inv_freq",)
"""Buffers that old checkpoints hold and that are computed from the config."""


class HoldsWeights(Protocol):
    @property
    def weight_bytes(self) -> int: ...


def total_bytes(*parts: HoldsWeights) -> int:
    return sum(part.weight_bytes for part in parts)


def take_rows(source: WeightSource, name: str, size: tuple[int, int], tp: TensorParallel) -> torch.Tensor:
    """This rank's rows of a vocabulary's matrix; as many on every rank, the last ones padded with zeros."""
    own = source.take(name, size, part=Part(0, tp.rows(size[0])))
    missing = tp.padded_rows(size[0]) - own.shape[0]
    return own if missing == 0 else torch.cat((own, own.new_zeros(missing, size[1])))


class DecoderLayer(HoldsWeights, Protocol):
    """One layer; adds its blocks to the residual stream."""

    index: int
    mlp: MLP

    def linears(self) -> list[Linear]: ...

    def first_norm(self, rows: int) -> RMSNorm | None:
        """The norm of its input, where it would launch that by itself for so many rows."""
        ...

    def __call__(
        self, stream: Stream, positions: Positions, attn: LayerAttention, then: RMSNorm | None = None
    ) -> Stream:
        """The stream is used up. ``then``: the next layer's ``first_norm``; see ``Stream``."""
        ...


class DecoderModel(ABC):
    """A decoder with its embedding and lm_head."""

    ignored_tensors: ClassVar[tuple[str, ...]] = IGNORED_TENSORS

    @abstractmethod
    def cache_shape(self, config: ModelConfig) -> CacheShape:
        """What the layers keep of every token."""

    @abstractmethod
    def make_layers(self, config: ModelConfig, source: WeightSource) -> Sequence[DecoderLayer]: ...

    @abstractmethod
    def rope_dim(self, config: ModelConfig) -> int:
        """Dimensions of a head that are turned."""

    def rope_width(self, config: ModelConfig, device: torch.device | str) -> int:
        """Of the tables: what is more than ``rope_dim`` stays as it is."""
        return self.rope_dim(config)

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device | str,
        max_positions: int,
        tp: TensorParallel,
    ) -> None:
        """``source`` gives tensors of ``dtype`` on ``device``; ``max_positions`` bounds the rope tables.

        Raises:
            WeightError: the checkpoint's tensors are not those of the config.
            ShardingError: it can't be split over so many ranks.
        """
        self.config = config
        self.tp = tp = tp.in_units(1 if config.quant is None else config.quant.columns_unit)
        self.kv_shape = self.cache_shape(config)
        size = (config.vocab_size, config.hidden_size)
        embedding = take_rows(source, "model.embed_tokens.weight", size, tp)
        self.embed = Embedding(embedding, tp.rows(size[0]), tp.summing)
        self.layers = list(self.make_layers(config, source))
        self._normed_apart: frozenset[int] = frozenset()  # layers whose first norm no sum makes
        self.norm = RMSNorm(source.take("model.norm.weight", size[1:]), config.rms_norm_eps)
        tied = config.tie_word_embeddings
        # Tied: the lookup needs whole rows, the product a packed matrix, so a CPU holds both.
        head = embedding if tied else take_rows(source, "lm_head.weight", size, tp)
        self.lm_head = Linear(head, float_output=True, join=tp.joining(size[0]))
        nextn = range(config.num_layers, config.num_layers + config.num_nextn_layers)
        ignored = (*self.ignored_tensors, *(f"model.layers.{i}.*" for i in nextn))
        source.finish((*ignored, "lm_head.weight") if tied else ignored)
        width = self.rope_width(config, device)
        self.rope = Rope(config.rope, self.rope_dim(config), max_positions, dtype, device, width)

    @property
    def weight_bytes(self) -> int:
        return total_bytes(self.embed, self.lm_head, self.norm, *self.layers)

    @property
    def has_experts(self) -> bool:
        """Whether it wants to know which tokens are padding, so as to send them to no expert."""
        return self.config.moe is not None

    def forward(
        self,
        token_ids: torch.Tensor,  # [T] int64
        positions: torch.Tensor,  # [T] int64
        attn: LayerAttention,
        aux_layers: tuple[int, ...] = (),
        live: torch.Tensor | None = None,  # [T] bool; see ``Positions``
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Residual stream after the last layer [T, H], and the *inputs* of ``aux_layers``, concatenated
        in their order, [T, len(aux_layers) * H] (None without any). Layer ``num_layers`` stands for the
        output of the last one.
        """
        hidden = self.embed(token_ids)
        of_tokens = Positions(self.rope, positions, live=live)
        aux = None
        if aux_layers:
            aux = hidden.new_empty(hidden.shape[0], len(aux_layers), hidden.shape[1])
        stream = Stream(hidden)
        for layer, following in zip(self.layers, (*self.layers[1:], None), strict=True):
            self._capture(aux, aux_layers, layer.index, stream.x)
            then = None
            if following is not None and following.index not in self._normed_apart:
                then = following.first_norm(len(hidden))
            stream = layer(stream, of_tokens, attn, then)
        self._capture(aux, aux_layers, len(self.layers), stream.x)
        return stream.x, None if aux is None else aux.flatten(1)

    def agree_on_norms(self) -> None:
        """Ask no sum for a norm that some ranks alone would launch by themselves, or all would wait for ever.
        A block of a checkpoint may be whole in the last rank's part of a layer and cut in the others'. Every
        rank calls it, when layers know their products. MLPs are split between blocks.
        """
        if self.tp.size == 1:
            return
        group = self.tp.collectives
        asked = [layer.first_norm(1) is not None for layer in self.layers]
        of_ranks = group.all_gather(torch.tensor(asked, dtype=torch.int32, device=group.device))  # [ranks, L]
        differs = (of_ranks != of_ranks[0]).any(0).tolist()
        self._normed_apart = frozenset(
            layer.index for layer, differ in zip(self.layers, differs, strict=True) if differ
        )

    def _capture(
        self, aux: torch.Tensor | None, aux_layers: tuple[int, ...], index: int, hidden: torch.Tensor
    ) -> None:
        """Copy the stream at once: the next layer adds to it in place. aux: [T, len(aux_layers), H]."""
        for part, wanted in enumerate(aux_layers):
            if wanted == index:
                assert aux is not None
                aux[:, part] = hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, H], before the final norm -> [N, V] float32 (float64 in a float64 model)."""
        return self.lm_head(hidden, norm=self.norm)

    def last_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, H], as ``logits`` takes it -> what the output head multiplies, [N, H]."""
        return self.norm(hidden)

    def linears(self) -> list[Linear]:
        """All of them, the largest first."""
        of_layers = [part for layer in self.layers for part in layer.linears()]
        return [self.lm_head, *of_layers]

    def experts(self) -> list[ExpertProducts]:
        """Of the layers that have some."""
        return [layer.mlp.experts for layer in self.layers if isinstance(layer.mlp, MoE)]
