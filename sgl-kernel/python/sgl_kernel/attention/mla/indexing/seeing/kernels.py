"""How many places each query of a step sees."""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import begin_dependent


@triton.jit(do_not_specialize=["num_tokens"])
def seen_kernel(
    slots, base_lens, mask, counts, ids, num_tokens, top_k,
    Q: tl.constexpr, EXTRA: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, TOKENS: tl.constexpr,
    EXTRA_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin_dependent(PDL)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < num_tokens
    own = tl.load(slots + token // Q, mask=inside, other=0) > 0
    seen = tl.load(base_lens + token // Q, mask=inside, other=0).to(tl.int32)
    if CAUSAL:
        seen += token % Q + 1
    elif MASKED:
        node = tl.arange(0, EXTRA_BLOCK)
        at = token.to(tl.int64)[:, None] * EXTRA + node[None, :]
        bits = tl.load(mask + at, mask=inside[:, None] & (node < EXTRA)[None, :], other=0)
        seen += tl.sum(bits.to(tl.int32), 1)
    else:
        seen += EXTRA
    count = tl.where(own, tl.minimum(seen, top_k), 0)
    tl.store(counts + token, count.to(tl.int64), mask=inside)
    tl.store(ids + token, tl.where(own, token + 1, 0).to(tl.int64), mask=inside)
