"""The draft head that a target brings along (MTP, NextN): DeepSeek-V3, GLM-4.5 and 4.7-Flash, GLM-5.

It is stored as the layer after the last one: a whole decoder layer, before it a product of the next token's
embedding and the target's hidden state, each normed. Embedding and lm_head are the target's, and so is the
rope. The hidden state is the target's after its last norm, or within a step the head's own after its norm.

Sources: SGLang 0.5.23 ``deepseek_nextn``, ``glm4_moe_nextn``. Shapes: T tokens, H hidden size.
"""

from __future__ import annotations

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.base import LayerAttention, Product
from sglang.srt.layers.attention.heads import Positions
from sglang.srt.layers.linear import Linear
from sglang.srt.layers.moe.layer import MLP
from sglang.srt.layers.norm import RMSNorm
from sglang.srt.mem_cache.pool import KVPool
from sglang.srt.model_loader.weight_source import WeightSource, everything_but
from sglang.srt.models.decoder import DecoderModel, total_bytes
from sglang.srt.models.dense import DenseModel, take_linear
from sglang.srt.models.draft_heads import DraftHeads, HeadTraits
from sglang.srt.models.draft_model import DraftAttention
from sglang.srt.models.mla import LatentAttention, LatentPlace
from sglang.srt.models.moe import take_mlp
from sglang.srt.models.partial_rope import in_order_of_kernels


class NextnHead:
    """``DraftModel``"""

    def __init__(self, config: ModelConfig, source: WeightSource, target: DecoderModel) -> None:
        """``config``: of ``configs.draft_choice.nextn_config``. ``source``: of a whole model with its head,
        or of the head alone.

        Raises:
            WeightError: tensors of the head are missing, or not those of the config.
        """
        self.config = config
        self.tp = target.tp.in_units(1 if config.quant is None else config.quant.columns_unit)
        index = target.config.num_layers
        prefix, hidden = f"model.layers.{index}.", config.hidden_size
        self.aux_layers: tuple[int, ...] = (index,)
        self.feature_size = hidden
        self.rope, self.embed, self.lm_head = target.rope, target.embed, target.lm_head
        self.target_norm = target.norm

        def norm(name: str) -> RMSNorm:
            return RMSNorm(source.take(f"{prefix}{name}.weight", (hidden,)), config.rms_norm_eps)

        self.embed_norm, self.hidden_norm = norm("enorm"), norm("hnorm")
        self.product = take_linear(source, [(f"{prefix}eh_proj", hidden)], 2 * hidden, False)
        self.input_norm = norm("input_layernorm")
        self.attention = self._take_attention(source, target, f"{prefix}self_attn.")
        self.kv_shape = self.attention.shape
        self.post_norm = norm("post_attention_layernorm")
        self.mlp: MLP = take_mlp(source, config, index, self.tp)
        self.norm = norm("shared_head.norm")
        self.target_ids = torch.arange(config.vocab_size, device=self.norm.weight.device)  # [V] int64
        copies = (f"{prefix}embed_tokens.weight", f"{prefix}shared_head.head.weight")  # of the target's
        source.finish((*everything_but(prefix), *copies, "*rotary_emb.inv_freq"))

    def _take_attention(self, source: WeightSource, target: DecoderModel, prefix: str) -> DraftAttention:
        config = self.config
        if config.mla is not None:
            has_indexer = config.mla.index is not None
            place = LatentPlace(prefix, 0, has_indexer, config.hidden_size, apart=True)
            return LatentAttention(config, source, place, self.tp)
        assert isinstance(target, DenseModel)
        of_target = target.traits(config)
        traits = HeadTraits(config.hidden_size, of_target.qkv_bias, of_target.o_bias, of_target.qk_norm)
        return DraftHeads(config, traits, in_order_of_kernels(source, target.config), prefix, self.tp)

    @property
    def weight_bytes(self) -> int:
        return total_bytes(self.product, self.attention, self.mlp, self.norm)

    def linears(self) -> list[Linear]:
        return [self.product, *self.attention.linears(), *self.mlp.linears()]

    def feature(self, aux: torch.Tensor) -> torch.Tensor:
        """aux: [T, H], the residual stream after the target's last layer -> [T, H]."""
        return self.target_norm(aux)

    def write(
        self,
        pool: KVPool,
        places: torch.Tensor,  # [T] int64
        next_ids: torch.Tensor,  # [T] int64: x_{t+1}
        features: torch.Tensor,  # [T, H]
        positions: torch.Tensor,  # [T] int64: t
    ) -> None:
        x = self.input_norm(self._inputs(next_ids, features))
        self.attention.write(pool, places, x, Positions(self.rope, positions))

    def entries(self, next_ids: torch.Tensor, features: torch.Tensor, positions: Positions) -> Product:
        """next_ids: [T] int64; features: [T, H]."""
        return self.attention.entries(self.input_norm(self._inputs(next_ids, features)), positions)

    def layer(
        self,
        embed_ids: torch.Tensor,  # [T] int64
        hidden: torch.Tensor,  # [T, H]
        positions: torch.Tensor,  # [T] int64
        attn: LayerAttention,
        write: bool,
        live: torch.Tensor | None = None,  # [T] bool; the others get no expert
    ) -> torch.Tensor:
        """-> [T, H], after the head's norm."""
        x = self._inputs(embed_ids, hidden)
        of_mlp = self.post_norm if self.mlp.norms_apart(len(x)) else None
        of_tokens = Positions(self.rope, positions)
        stream = self.attention(self.input_norm(x), x, of_tokens, attn, write, then=of_mlp)
        return self.mlp(stream, self.post_norm, live, self.norm).under(self.norm)

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """output: [T, H] -> [T, V]."""
        return self.lm_head(output)

    def _inputs(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """[T, H], what goes into the layer: the embedding first."""
        return self.product(torch.cat((self.embed_norm(self.embed(ids)), self.hidden_norm(hidden)), dim=-1))
