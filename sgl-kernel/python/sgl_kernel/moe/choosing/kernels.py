"""A router's choice: scores, a bias, groups, the best experts and their weights; a token a program.

Values are compared as 64-bit keys, in which a number's place breaks ties: of equal ones the lower expert is
taken, and none twice, whatever the numbers are (a NaN counts as the smallest).
"""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import begin_dependent

# Below every key.
_NONE = tl.constexpr(-(2**63))


@triton.jit
def _keys(values, places, COUNT: tl.constexpr):
    """int64, larger for larger values, and for lower places where these are equal; places: 0 … COUNT - 1."""
    values = tl.where(values == values, values, float("-inf"))
    values = tl.where(values == 0.0, 0.0, values)  # -0 is 0
    bits = values.to(tl.float32).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (places * -1 + (COUNT - 1)).to(tl.int64)


@triton.jit
def _of_best_groups(
    choice, key, group, within, there,
    GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, TOP2: tl.constexpr,
):  # fmt: skip
    """choice and key: [G, S]; choice of the experts in the best groups, minus infinity for the others."""
    NUM: tl.constexpr = choice.shape[0]
    of_group = tl.max(tl.where(there, choice, float("-inf")), 1)
    if TOP2:
        best = tl.max(key, 1)
        of_group += tl.max(tl.where(there & (key != best[:, None]), choice, float("-inf")), 1)
    group_key = tl.where(group < GROUPS, _keys(of_group, group, NUM), _NONE)
    chosen = tl.zeros([NUM], tl.int1)
    for _ in tl.static_range(TOPK_GROUPS):
        first = tl.max(group_key, 0)
        is_first = group_key == first
        chosen = chosen | is_first
        group_key = tl.where(is_first, _NONE, group_key)
    return tl.where(chosen[:, None], choice, float("-inf"))


@triton.jit
def choose_kernel(
    logits,  # [T, E] float32
    bias,  # [E] float32 if BIAS
    live,  # [T] bool if MASKED: the others get no expert
    weights,  # [T, TOP_K] float32
    experts,  # [T, TOP_K] int32
    scaling,
    E: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    SIZE_PAD: tl.constexpr,  # at least the experts of a group
    TOPK_GROUPS: tl.constexpr,  # 0: a choice among all
    TOP2: tl.constexpr,  # a group counts by its two best experts, else by the best
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BIAS: tl.constexpr,
    MASKED: tl.constexpr,
    PDL: tl.constexpr,
):
    SIZE: tl.constexpr = E // GROUPS
    begin_dependent(PDL)
    token = tl.program_id(0)
    group, within = tl.arange(0, GROUPS_PAD), tl.arange(0, SIZE_PAD)
    there = (group < GROUPS)[:, None] & (within < SIZE)[None, :]
    expert = group[:, None] * SIZE + within[None, :]
    logit = tl.load(logits + token.to(tl.int64) * E + expert, mask=there, other=float("-inf"))
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        score = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        score = score / tl.sum(tl.sum(score, 1), 0)
    choice = score
    if BIAS:
        choice += tl.load(bias + expert, mask=there, other=0.0)
    choice = tl.where(choice == choice, choice, float("-inf"))
    key = tl.where(there, _keys(choice, expert, E), _NONE)
    if TOPK_GROUPS > 0:
        choice = _of_best_groups(choice, key, group, within, there, GROUPS, TOPK_GROUPS, TOP2)
        key = tl.where(there, _keys(choice, expert, E), _NONE)
    slot = tl.arange(0, SLOTS)
    chosen, weight = tl.zeros([SLOTS], tl.int32), tl.zeros([SLOTS], tl.float32)
    for j in tl.static_range(TOP_K):
        best = tl.max(tl.max(key, 1), 0)
        is_best = key == best
        own = tl.sum(tl.sum(tl.where(is_best, score, 0.0), 1), 0)
        chosen = tl.where(slot == j, E - 1 - (best & 0x7FFFFFFF).to(tl.int32), chosen)
        weight = tl.where(slot == j, own, weight)
        key = tl.where(is_best, _NONE, key)
    if RENORMALISE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    if MASKED:
        chosen = tl.where(tl.load(live + token).to(tl.int1), chosen, -1)
    at = token * TOP_K + slot
    tl.store(weights + at, weight * scaling, mask=slot < TOP_K)
    tl.store(experts + at, chosen, mask=slot < TOP_K)
