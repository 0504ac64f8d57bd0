"""The EAGLE-3 draft layer (``LlamaForCausalLMEagle3`` checkpoints).

Row t reads the embedding of x_{t+1} and a hidden state: ``g_t = feature(aux_t)`` in the first draft
forward, the layer's own output ``a`` in the next ones. Embedding and hidden state are normed apart and
concatenated (embedding first) for q, k and v; the residual is the hidden state itself.

Sources: SafeAILab/EAGLE ``cnets``; SGLang 0.5.23 ``llama_eagle3`` for the names and their variants.
Shapes: T tokens, H hidden size of the draft layer, Ht of the target, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import Final

import torch

from sglang.srt.configs.model_config import ModelConfig, ModelConfigError
from sglang.srt.layers.attention.base import LayerAttention
from sglang.srt.layers.attention.heads import HeadProduct, Positions
from sglang.srt.layers.embedding import Embedding
from sglang.srt.layers.linear import Linear
from sglang.srt.layers.norm import RMSNorm
from sglang.srt.layers.rope import Rope
from sglang.srt.model_loader.weight_source import WeightSource
from sglang.srt.models.decoder import IGNORED_TENSORS, DecoderModel, HoldsWeights, take_rows, total_bytes
from sglang.srt.models.dense import GatedMLP, KVShape, take_linear

DRAFT_IGNORED_TENSORS: Final = (*IGNORED_TENSORS, "*t2d", "*embed_tokens.weight")
"""t2d repeats d2t; an embedding of the target's width is a copy of the target's."""

FC_SPLIT_BYTES: Final = 32 << 20
"""Size of ``fc`` from which it is split over ranks: reading it costs more than joining its results. Half of
it is some 10 us of a GPU's memory bandwidth, about what one collective of a few rows takes."""

_OLD_AUX_NORMS: Final = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")


class LlamaEagle3:
    """One draft layer with ``fc`` before it and an lm_head over ``target_ids`` after it."""

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
        self.tp = tp = target.tp.in_units(1 if config.quant is None else config.quant.columns_unit)
        self.heads = tp.heads(config.num_heads, config.num_kv_heads, config.path)
        self.draft = config.draft
        self.aux_layers = config.draft.aux_layers(target.config.num_layers, target.config.mla is not None)
        self.kv_shape = KVShape(1, self.heads.kv.size, config.head_dim)
        self.feature_size = config.hidden_size
        self.rope = Rope(config.rope, config.head_dim, max_positions, dtype, device)
        names = _Names(source)
        self._take_fc(source, names, dtype)
        self._take_layer(source, names)
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

    def _take_layer(self, source: WeightSource, names: _Names) -> None:
        config, d = self.config, self.config.head_dim
        hidden, eps, bias = config.hidden_size, config.rms_norm_eps, config.attention_bias
        q_size, kv_size = config.num_heads * d, config.num_kv_heads * d
        attn = names.layer("self_attn.")
        # q apart from k and v: a sync needs only k and v, and the first draft forward only q
        qkv = [(f"{attn}q_proj", q_size), (f"{attn}k_proj", kv_size), (f"{attn}v_proj", kv_size)]
        q_rows, kv_rows = self.heads.q.times(d), self.heads.kv.times(d)
        whole = take_linear(source, qkv, 2 * hidden, bias, pack=False, rows=(q_rows, kv_rows, kv_rows))
        self.q, self.kv_proj = whole.rows(0, q_rows.size), whole.rows(q_rows.size, whole.out_features)
        # Over the same memory; a CPU's parts are packed copies, and it does without.
        self.qkv = whole if whole.weight.is_cuda else None
        o = [(f"{attn}o_proj", hidden)]
        self.o = take_linear(source, o, q_size, bias, columns=q_rows, join=self.tp.summing)
        size = config.intermediate_size
        self.mlp = GatedMLP(source, names.layer("mlp."), hidden, size, config.mlp_bias, self.tp)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(source.take(names.layer(f"{name}.weight"), (hidden,)), eps)

        self.embed_norm = norm("input_layernorm")
        self.hidden_norm = norm("hidden_norm")
        self.post_norm = norm("post_attention_layernorm")

    def _take_ends(
        self, source: WeightSource, names: _Names, target: DecoderModel, device: torch.device | str
    ) -> None:
        config, hidden, vocab_size = self.config, self.config.hidden_size, self.config.vocab_size
        self.norm = RMSNorm(source.take(names.top("norm.weight"), (hidden,)), config.rms_norm_eps)
        self.embed = target.embed
        if self.draft.target_hidden_size != hidden:
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
    def weight_bytes(self) -> int:
        """Bytes beside what is the target's."""
        parts: list[HoldsWeights] = [self.fc, self.q, self.kv_proj, self.o, self.mlp, self.norm]
        if self.draft.draft_vocab_size is not None:
            parts.append(self.lm_head)
        if self.draft.target_hidden_size != self.config.hidden_size:
            parts.append(self.embed)
        return total_bytes(*parts)

    def feature(self, aux: torch.Tensor) -> torch.Tensor:
        """aux: [T, num_aux * Ht] -> g [T, H]."""
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.aux_norms:
            parts = aux.split(self.draft.target_hidden_size, dim=-1)
            aux = torch.cat([norm(part) for norm, part in zip(self.aux_norms, parts, strict=True)], dim=-1)
        return self.fc(aux)

    def kv(
        self,
        next_ids: torch.Tensor,  # [T] int64: x_{t+1}
        features: torch.Tensor,  # [T, H]: g_t
        positions: torch.Tensor,  # [T] int64: t
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [T, nkv, d] that the layer writes for these pairs, and nothing else of the layer."""
        kv = self.kv_proj(self.pairs(next_ids, features))
        kv = kv.view(kv.shape[0], 2, self.heads.kv.size, self.config.head_dim)
        return self.rope.at(positions).rotate(kv[:, 0]), kv[:, 1]

    def layer(
        self,
        embed_ids: torch.Tensor,  # [T] int64, ids of the target's vocabulary
        hidden: torch.Tensor,  # [T, H]: g or a; used up
        positions: torch.Tensor,  # [T] int64
        attn: LayerAttention,
        write: bool,
    ) -> torch.Tensor:
        """The whole layer -> a [T, H], the next forward's hidden state.

        ``write`` False: k and v of these pairs are in the cache already (``attn`` is of Block.NONE).
        """
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
        num_kv_heads = self.heads.kv.size if write else 0
        if not write:
            heads = self.q(pairs)
        elif self.qkv is not None:
            heads = self.qkv(pairs)
        else:
            heads = torch.cat((self.q(pairs), self.kv_proj(pairs)), dim=1)
        product = HeadProduct(heads, self.heads.q.size, num_kv_heads, Positions(self.rope, positions))
        hidden = self.o(attn(0, product).flatten(1), residual=hidden)
        hidden = self.mlp(hidden, self.post_norm)
        return self.norm(hidden) if self.draft.norm_output else hidden

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """output: a [T, H] -> [T, Vd] float32 (float64 in a float64 model); ids are ``target_ids``'s."""
        return self.lm_head(output, norm=None if self.draft.norm_output else self.norm)

    def linears(self) -> list[Linear]:
        """All of them that are the drafter's own."""
        shared = self.draft.draft_vocab_size is None
        parts = [self.fc, self.q, self.kv_proj, self.o, self.mlp.gate_up, self.mlp.down]
        return parts + ([] if self.qkv is None else [self.qkv]) + ([] if shared else [self.lm_head])

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
