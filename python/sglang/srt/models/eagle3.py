"""EAGLE-3 draft models (arXiv 2503.01840): everything but the attention of their one layer.

Row t reads the embedding of x_{t+1} and a hidden state: ``g_t = feature(aux_t)`` in the first draft
forward, the layer's own output ``a`` in the next ones. Embedding and hidden state are normed apart and
concatenated (embedding first) for the attention; the residual is the hidden state itself.

Sources: SafeAILab/EAGLE ``cnets``; SGLang 0.5.23 ``llama_eagle3`` for the names and their variants.
Shapes: T tokens, H hidden size of the draft layer, Ht of the target, Vd draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

import torch

from sglang.srt.configs.model_config import ModelConfig, ModelConfigError
from sglang.srt.layers.attention.base import LayerAttention, Product
from sglang.srt.layers.attention.heads import Positions
from sglang.srt.layers.embedding import Embedding
from sglang.srt.layers.linear import Linear
from sglang.srt.layers.norm import RMSNorm
from sglang.srt.layers.rope import Rope
from sglang.srt.mem_cache.pool import KVPool
from sglang.srt.model_loader.weight_source import WeightSource
from sglang.srt.models.decoder import IGNORED_TENSORS, DecoderModel, HoldsWeights, take_rows, total_bytes
from sglang.srt.models.dense import GatedMLP, take_linear
from sglang.srt.models.draft_model import DraftAttention

DRAFT_IGNORED_TENSORS: Final = (*IGNORED_TENSORS, "*t2d", "*embed_tokens.weight")
"""t2d repeats d2t; an embedding of the target's width is a copy of the target's."""

FC_SPLIT_BYTES: Final = 32 << 20
"""Size of ``fc`` from which it is split over ranks: reading it costs more than joining its results. Half of
it is some 10 us of a GPU's memory bandwidth, about what one collective of a few rows takes."""

_OLD_AUX_NORMS: Final = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")


class Eagle3Model(ABC):
    """One draft layer with ``fc`` before it and an lm_head over ``target_ids`` after it (``DraftModel``)."""

    @abstractmethod
    def rope_dim(self) -> int:
        """Dimensions of a head that are turned."""

    @abstractmethod
    def take_attention(self, source: WeightSource, prefix: str) -> DraftAttention:
        """``prefix``: of its tensors. It reads pairs, [T, 2 * H]."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        target: DecoderModel,
        dtype: torch.dtype,
        device: torch.device | str,
        max_positions: int,
    ) -> None:
        """Take the tensors of ``source`` and share what the checkpoint leaves to the target.

        Raises:
            WeightError: the checkpoint's tensors are not those of the config.
            ModelConfigError: the config is of a draft model for another target.
            ShardingError: it can't be split over the target's ranks.
        """
        assert config.draft is not None
        _check_target(config, target.config)
        self.config = config
        self.tp = target.tp.in_units(1 if config.quant is None else config.quant.columns_unit)
        self.draft = config.draft
        self.aux_layers = config.draft.aux_layers(target.config.num_layers, target.config.mla is not None)
        self.feature_size = config.hidden_size
        self.rope = Rope(config.rope, self.rope_dim(), max_positions, dtype, device)
        names = _Names(source)
        self._take_fc(source, names, dtype)
        self.attention = self.take_attention(source, names.layer("self_attn."))
        self.kv_shape = self.attention.shape
        self._take_rest_of_layer(source, names)
        self._take_ends(source, names, target, device)
        shared_head = ("*lm_head.weight",) if config.draft.draft_vocab_size is None else ()
        source.finish((*DRAFT_IGNORED_TENSORS, *shared_head))
        if self.target_ids.min() < 0 or self.target_ids.max() >= config.vocab_size:
            raise ModelConfigError(f"{config.path}: d2t names ids outside the {config.vocab_size} there are")

    def _take_fc(self, source: WeightSource, names: _Names, dtype: torch.dtype) -> None:
        draft, eps, hidden = self.draft, self.config.rms_norm_eps, self.config.hidden_size
        width = draft.num_aux * draft.target_hidden_size
        fc = [(names.top("fc"), hidden)]
        if hidden % self.tp.size == 0 and hidden * width * dtype.itemsize >= FC_SPLIT_BYTES:
            rows, join = (self.tp.rows(hidden),), self.tp.joining(hidden)
            self.fc = take_linear(source, fc, width, draft.fc_bias, rows=rows, join=join)
        else:
            self.fc = take_linear(source, fc, width, draft.fc_bias)
        self.input_norm: RMSNorm | None = None  # over all of aux
        self.aux_norms: list[RMSNorm] = []  # over each part of it
        if draft.norm_before_fc:
            self.input_norm = RMSNorm(source.take(names.top("input_norm.weight"), (width,)), eps)
        if draft.fc_norm:
            old = draft.num_aux == 3 and source.has(names.top("aux_norm_low.weight"))
            parts = _OLD_AUX_NORMS if old else [f"fc_norm.{i}" for i in range(draft.num_aux)]
            shape = (draft.target_hidden_size,)
            self.aux_norms = [RMSNorm(source.take(names.top(f"{p}.weight"), shape), eps) for p in parts]

    def _take_rest_of_layer(self, source: WeightSource, names: _Names) -> None:
        config = self.config
        hidden, size = config.hidden_size, config.intermediate_size
        self.mlp = GatedMLP(source, names.layer("mlp."), hidden, size, config.mlp_bias, self.tp)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(source.take(names.layer(f"{name}.weight"), (hidden,)), config.rms_norm_eps)

        self.embed_norm = norm("input_layernorm")
        self.hidden_norm = norm("hidden_norm")
        self.post_norm = norm("post_attention_layernorm")

    def _take_ends(
        self, source: WeightSource, names: _Names, target: DecoderModel, device: torch.device | str
    ) -> None:
        config, hidden, vocab_size = self.config, self.config.hidden_size, self.config.vocab_size
        self.norm = RMSNorm(source.take(names.top("norm.weight"), (hidden,)), config.rms_norm_eps)
        self.embed = target.embed
        if self._owns_embedding:
            rows = take_rows(source, names.top("embed_tokens.weight"), (vocab_size, hidden), self.tp)
            self.embed = Embedding(rows, self.tp.rows(vocab_size), self.tp.summing)
        draft_vocab = self.draft.draft_vocab_size
        if draft_vocab is None:
            self.lm_head = target.lm_head
        else:
            head = take_rows(source, names.top("lm_head.weight"), (draft_vocab, hidden), self.tp)
            self.lm_head = Linear(head, float_output=True, join=self.tp.joining(draft_vocab))
        self.target_ids = torch.arange(draft_vocab or vocab_size, device=device)  # [Vd] int64
        whole = draft_vocab is None or draft_vocab == vocab_size
        if not whole or source.has(names.top("d2t")):
            self.target_ids = self.target_ids + source.take_integers(
                names.top("d2t"), self.target_ids.shape[0]
            )

    @property
    def _owns_embedding(self) -> bool:
        return self.draft.own_embedding or self.draft.target_hidden_size != self.config.hidden_size

    @property
    def weight_bytes(self) -> int:
        parts: list[HoldsWeights] = [self.fc, self.attention, self.mlp, self.norm]
        if self.draft.draft_vocab_size is not None:
            parts.append(self.lm_head)
        if self._owns_embedding:
            parts.append(self.embed)
        return total_bytes(*parts)

    def linears(self) -> list[Linear]:
        shared = self.draft.draft_vocab_size is None
        parts = [self.fc, *self.attention.linears(), *self.mlp.linears()]
        return parts + ([] if shared else [self.lm_head])

    def feature(self, aux: torch.Tensor) -> torch.Tensor:
        """aux: [T, num_aux * Ht] -> g [T, H]."""
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.aux_norms:
            parts = aux.split(self.draft.target_hidden_size, dim=-1)
            aux = torch.cat([norm(part) for norm, part in zip(self.aux_norms, parts, strict=True)], dim=-1)
        return self.fc(aux)

    def write(
        self,
        pool: KVPool,
        places: torch.Tensor,  # [T] int64
        next_ids: torch.Tensor,  # [T] int64: x_{t+1}
        features: torch.Tensor,  # [T, H]: g_t
        positions: torch.Tensor,  # [T] int64: t
    ) -> None:
        of_pairs = Positions(self.rope, positions)
        self.attention.write(pool, places, self.pairs(next_ids, features), of_pairs)

    def entries(self, next_ids: torch.Tensor, features: torch.Tensor, positions: Positions) -> Product:
        """next_ids: [T] int64; features: [T, H]."""
        return self.attention.entries(self.pairs(next_ids, features), positions)

    def layer(
        self,
        embed_ids: torch.Tensor,  # [T] int64
        hidden: torch.Tensor,  # [T, H]: g or a; used up
        positions: torch.Tensor,  # [T] int64
        attn: LayerAttention,
        write: bool,
        live: torch.Tensor | None = None,  # there are no experts
    ) -> torch.Tensor:
        """-> a [T, H]."""
        return self.layer_of_pairs(self.pairs(embed_ids, hidden), hidden, positions, attn, write)

    def layer_of_pairs(
        self,
        pairs: torch.Tensor,  # [T, 2 * H]
        hidden: torch.Tensor,  # [T, H]: what the pairs were made of; used up
        positions: torch.Tensor,  # [T] int64
        attn: LayerAttention,
        write: bool,
    ) -> torch.Tensor:
        """``layer``, of pairs that are made already."""
        residual = pairs[:, self.feature_size :].clone() if self.draft.norm_before_residual else hidden
        of_mlp = self.post_norm if self.mlp.norms_apart(len(pairs)) else None
        of_pairs = Positions(self.rope, positions)
        stream = self.attention(pairs, residual, of_pairs, attn, write, then=of_mlp)
        if self.draft.norm_output:
            return self.mlp(stream, self.post_norm, then=self.norm).under(self.norm)
        return self.mlp(stream, self.post_norm).x

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """output: a [T, H] -> [T, Vd]; ids are ``target_ids``'s."""
        return self.lm_head(output, norm=None if self.draft.norm_output else self.norm)

    def pairs(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """[T, 2 * H]"""
        return torch.cat((self.embed_norm(self.embed(ids)), self.hidden_norm(hidden)), dim=-1)


class _Names:
    """Checkpoints differ in two prefixes: ``model.`` before all, ``midlayer.`` or ``layers.0.``."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def top(self, name: str) -> str:
        """``fc`` and whole tensor names; each may carry ``model.`` or not."""
        tensor = f"{name}.weight" if name == "fc" else name
        return f"model.{name}" if self._source.has(f"model.{tensor}") else name

    def layer(self, name: str) -> str:
        for prefix in ("midlayer.", "layers.0.", "model.midlayer.", "model.layers.0."):
            if self._source.has(f"{prefix}hidden_norm.weight"):
                return prefix + name
        return f"midlayer.{name}"


def _check_target(config: ModelConfig, target: ModelConfig) -> None:
    assert config.draft is not None
    for what, own, theirs in (
        ("hidden size", config.draft.target_hidden_size, target.hidden_size),
        ("vocabulary", config.vocab_size, target.vocab_size),
    ):
        if own != theirs:
            raise ModelConfigError(
                f"{config.path} is a draft model for a target with {what} {own}, but the target's is {theirs}"
            )
    if config.draft.draft_vocab_size is None and config.hidden_size != target.hidden_size:
        raise ModelConfigError(f"{config.path} has no lm_head of its own, and its width is not the target's")
