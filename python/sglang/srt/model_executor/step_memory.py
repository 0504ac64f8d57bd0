"""What steps on a CPU need beside weights, state and KV pools: a bound, so that the pools leave it free.

Every term is the most that its part can ask for; they are added, though not all are alive at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.moe_config import MoEConfig
from sglang.srt.layers.attention.mla_sparse import BLOCK_QUERIES
from sglang.srt.model_executor.config import max_positions
from sglang.srt.model_executor.step_plan import SpecShape

SAMPLING_BYTES: Final = 40
"""Of one node and id, in a row with noise and filters: the noise is hashed in 64 bits, scores are sorted."""

_LOGITS: Final = 3  # the product, and what is picked of it and put back
_RESIDUALS: Final = 8  # hidden states: residual, normed, the product's, those kept for the drafter
_HEADS: Final = 3  # q, k and v: the product, after norm and rope, and what attention gives
_MLP: Final = 4  # gate and up, and their product
_PREFIX_COPIES: Final = 3  # K and V of a chunk's prefix: gathered, then joined with the chunk's own
_SCORES: Final = 2  # of latent attention: before and after the softmax
_EXPERT_STATES: Final = 5  # hidden states: an expert's rows, what it gives, that weighted, the sum, its copy
_ROUTER: Final = 4  # scores: the product, the scores, what is chosen by, what groups leave of it
_CHOSEN: Final = 16  # numbers of a token and expert chosen: weights and experts, sorted, 8 bytes some
_WINDOW: Final = 17  # bytes while a window's mask is made: places are counted in 64 bits, both ways
_GROWTH: Final = 1.25  # of the buffer of gathered rows
_PADDING: Final = 2  # of a row to the longest beside it; rows of other lengths are taken apart


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The largest steps."""

    num_slots: int
    prefill_tokens: int
    context_len: int
    pool_tokens: int  # most that the KV pool may hold
    spec: SpecShape | None
    max_spec_rows: int


def step_bytes(target: ModelConfig, drafter: ModelConfig | None, sizes: StepSizes, itemsize: int) -> int:
    """The largest step's bytes. ``itemsize`` is of the models' dtype."""
    spec = sizes.spec
    nodes = max(sizes.num_slots, sizes.max_spec_rows * (spec.num_draft_tokens if spec else 0))
    tokens = max(sizes.prefill_tokens + sizes.num_slots, nodes)
    total: float = tokens * (_token_values(target) * itemsize + _expert_bytes(target, itemsize))
    total += _prefill_bytes(target, sizes, itemsize)
    total += nodes * target.vocab_size * (_LOGITS * max(itemsize, 4) + SAMPLING_BYTES)
    total += _gathered_bytes(target, sizes, itemsize)
    if drafter is not None and spec is not None:
        total += tokens * (_token_values(drafter) * itemsize + _expert_bytes(drafter, itemsize))
        total += _gathered_bytes(drafter, sizes, itemsize)
        total += _scratch_bytes(drafter, sizes, spec, itemsize)
        total += _draft_choice_bytes(drafter, sizes, spec, itemsize)
    return int(total)


def _token_values(config: ModelConfig) -> int:
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    if (mla := config.mla) is not None:  # queries before and after they are taken to the latents, and sums
        heads = config.num_heads * (mla.qk_dim + 2 * mla.latent_dim + mla.v_dim) + mla.latent_dim
        heads += (mla.q_lora_rank or 0) + (
            0 if mla.index is None else mla.index.num_heads * mla.index.head_dim
        )
    size = max(config.intermediate_size, 0 if config.moe is None else _mlp_width(config.moe))
    return _RESIDUALS * config.hidden_size + _HEADS * heads + _MLP * size


def _mlp_width(moe: MoEConfig) -> int:
    """Experts run one after the other, at most with all tokens; the shared ones before them, as one."""
    return max(moe.num_shared, 1) * moe.intermediate_size


def _expert_bytes(config: ModelConfig, itemsize: int) -> int:
    """Of one token: what routing needs, in float32 at least."""
    if (moe := config.moe) is None:
        return 0
    values = _EXPERT_STATES * config.hidden_size + _ROUTER * moe.num_experts + _CHOSEN * moe.top_k
    return values * max(itemsize, 4)


def _layer_kv_bytes(config: ModelConfig, itemsize: int) -> int:
    """Of one token in one layer."""
    if (mla := config.mla) is not None:
        return (mla.latent_dim + (0 if mla.index is None else mla.index.head_dim)) * itemsize
    return 2 * config.num_kv_heads * config.head_dim * itemsize


def _prefill_bytes(config: ModelConfig, sizes: StepSizes, itemsize: int) -> int:
    """Masks of all chunks of a step (a bool and what is added to scores), and one chunk's prefix."""
    mask = itemsize + 1
    of_place = _PREFIX_COPIES * _layer_kv_bytes(config, itemsize)
    if (mla := config.mla) is not None:  # keys and values of a chunk's places, padded to one size
        wide = max(mla.qk_dim, mla.v_dim)
        of_place += config.num_heads * (mla.nope_dim + mla.v_dim + mla.qk_dim + 2 * wide) * itemsize
        if mla.index is not None:  # what is chosen of what is seen; scores of all heads
            mask += 2 + 3 * max(itemsize, 4) + 8
            of_place += 2 * BLOCK_QUERIES * mla.index.num_heads * max(itemsize, 4)
    if config.windows:  # a second mask, and one with a sink; K and V with a sink
        mask += 2 * itemsize + _WINDOW
        of_place += 2 * _layer_kv_bytes(config, itemsize)
    return sizes.prefill_tokens * sizes.context_len * mask + sizes.context_len * of_place


def _gathered_bytes(config: ModelConfig, sizes: StepSizes, itemsize: int) -> float:
    """One layer's K and V of all decode rows, and their masks.

    Rows that share a prefix gather it each: those may need more, which is not counted.
    """
    spec = sizes.spec
    queries = spec.num_draft_tokens if spec else 1
    longest = max_positions(sizes.context_len, spec)
    places = min(sizes.num_slots * longest, _PADDING * sizes.pool_tokens)
    group = config.num_heads // config.num_kv_heads
    masks = queries * (2 + (group + 1) * itemsize)
    if (mla := config.mla) is not None:  # one mask for all heads, but their scores, and those of an indexer
        index_heads = 0 if mla.index is None else mla.index.num_heads + 3
        masks = queries * (3 + (_SCORES * config.num_heads + 2 * index_heads) * max(itemsize, 4))
    copies = _GROWTH
    if config.windows:  # as in prefill
        masks += queries * (2 * (group + 1) * itemsize + _WINDOW)
        copies += 2
    return places * (copies * _layer_kv_bytes(config, itemsize) + masks)


def _scratch_bytes(config: ModelConfig, sizes: StepSizes, spec: SpecShape, itemsize: int) -> int:
    """K and V of tree nodes that have no place in the pool, and of their rows joined with them."""
    if spec.topk == 1:
        return 0
    nodes = sizes.max_spec_rows * spec.topk * spec.num_steps
    joined = min(sizes.max_spec_rows * sizes.context_len, _PADDING * sizes.pool_tokens) + nodes
    return (2 * nodes * config.num_layers + joined) * _layer_kv_bytes(config, itemsize)


def _draft_choice_bytes(config: ModelConfig, sizes: StepSizes, spec: SpecShape, itemsize: int) -> int:
    nodes = sizes.max_spec_rows * spec.topk
    own = None if config.draft is None else config.draft.draft_vocab_size
    vocab_size = own or config.vocab_size
    return nodes * vocab_size * (_LOGITS * max(itemsize, 4) + SAMPLING_BYTES)
