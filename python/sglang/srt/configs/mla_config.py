"""Multi-head latent attention of a config: its sizes, and the indexer of models with sparse attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from sglang.srt.configs.config_fields import ConfigFields, ModelConfigError
from sglang.srt.configs.draft_config import MLA_DRAFTER
from sglang.srt.configs.rope_config import RopeConfig

MLA_ARCHITECTURES: Final = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "KimiK25ForConditionalGeneration",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
)
_SPARSE: Final = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """What a query attends to is chosen by an indexer, in layers that have one."""

    top_k: int  # places a query attends to
    num_heads: int
    head_dim: int
    interleaved: bool  # the rope turns pairs (0, 1), (2, 3), …; else the two halves
    layers: tuple[int, ...]  # those with an indexer of their own, ascending; others take over its choice


@dataclass(frozen=True, slots=True)
class MLAConfig:
    q_lora_rank: int | None  # None: queries are made by one product
    kv_lora_rank: int
    nope_dim: int  # of a head's query and key, left alone by the rope
    rope_dim: int  # turned
    v_dim: int
    interleaved: bool  # as in IndexConfig
    softmax_scale: float
    index: IndexConfig | None = None

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """What the cache keeps of a token in one layer."""
        return self.kv_lora_rank + self.rope_dim


def read_mla(fields: ConfigFields, architecture: str, rope: RopeConfig, num_layers: int) -> MLAConfig | None:
    """None: the architecture has another kind of attention.

    Raises:
        ModelConfigError: fields that are lacking or contradict each other.
    """
    if architecture not in (*MLA_ARCHITECTURES, MLA_DRAFTER):
        return None
    nope_dim, rope_dim = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    if rope_dim % 2:
        raise ModelConfigError(f"{fields.where}: 'qk_rope_head_dim' must be even, not {rope_dim}")
    rank = fields.optional_integer("q_lora_rank")
    is_sparse = architecture in _SPARSE
    if is_sparse and rank is None:
        raise ModelConfigError(
            f"{fields.where}: an indexer reads the queries' latent: 'q_lora_rank' is needed"
        )
    return MLAConfig(
        q_lora_rank=rank,
        kv_lora_rank=fields.integer("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=fields.integer("v_head_dim"),
        interleaved=fields.flag("rope_interleave", True),
        softmax_scale=(nope_dim + rope_dim) ** -0.5 * _yarn_factor(rope) ** 2,
        index=_read_index(fields, architecture, rope_dim, num_layers) if is_sparse else None,
    )


def _yarn_factor(rope: RopeConfig) -> float:
    """Scores are made larger for a stretched rope; cos and sin are left alone where the two mscale agree."""
    if rope.kind != "yarn" or not rope.mscale_all_dim or rope.factor <= 1.0:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0


def _read_index(fields: ConfigFields, architecture: str, rope_dim: int, num_layers: int) -> IndexConfig:
    head_dim = fields.integer("index_head_dim")
    if head_dim < rope_dim:
        raise ModelConfigError(
            f"{fields.where}: 'index_head_dim' {head_dim} is less than 'qk_rope_head_dim' {rope_dim}"
        )
    layers = _index_layers(fields, num_layers)
    if not layers or layers[0] != 0:
        raise ModelConfigError(f"{fields.where}: the first layer must have an indexer of its own")
    return IndexConfig(
        top_k=fields.integer("index_topk"),
        num_heads=fields.integer("index_n_heads"),
        head_dim=head_dim,
        interleaved=fields.flag("indexer_rope_interleave", architecture == "GlmMoeDsaForCausalLM"),
        layers=layers,
    )


def _index_layers(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """From ``indexer_types`` (full or shared), a pattern of F and S, or a frequency and an offset."""
    kinds = fields.raw.get("indexer_types")
    if kinds is None and (pattern := fields.raw.get("index_topk_pattern")) is not None:
        kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    if kinds is None:
        every, offset = fields.integer("index_topk_freq", 1), fields.count("index_skip_topk_offset", 2)
        return tuple(i for i in range(num_layers) if max(i - offset + 1, 0) % every == 0)
    if len(kinds) < num_layers or any(kind not in ("full", "shared") for kind in kinds):
        raise ModelConfigError(
            f"{fields.where}: the indexers of {num_layers} layers must each be full or shared, not {kinds!r}"
        )
    return tuple(i for i, kind in enumerate(kinds[:num_layers]) if kind == "full")
