"""Three Triton kernels and their plain-torch twins (used on a CPU and as references).

`decode_attention`: one query per slot over its own cache.  `choose`: Gumbel-perturbed argmax and
plain argmax in one pass over the logits.  `soft_cross_entropy`: loss and gradient of a row of
draft logits in one pass, the gradient written over the logits.
"""

from __future__ import annotations

import torch
from noise import gumbel
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU machine: the twins are used
    triton = None

if triton is not None:

    @triton.jit
    def _decode_attention(
        q_ptr,
        k_ptr,
        v_ptr,
        out_ptr,
        pos_ptr,
        scale,
        cache_len,
        GROUP: tl.constexpr,
        ROWS: tl.constexpr,
        DIM: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        slot, kv_head, kv_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
        length = tl.load(pos_ptr + slot).to(tl.int32) + 1
        rows, dims, cols = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, BLOCK)
        q_at = ((slot * kv_heads + kv_head) * GROUP + rows[:, None]) * DIM + dims[None, :]
        q = tl.load(q_ptr + q_at, mask=rows[:, None] < GROUP, other=0.0)
        base = (slot * kv_heads + kv_head) * cache_len * DIM
        top = tl.full([ROWS], -1e30, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM], tl.float32)
        for begin in range(0, length, BLOCK):
            inside = begin + cols < length
            kv_at = base + (begin + cols)[:, None] * DIM + dims[None, :]
            keys = tl.load(k_ptr + kv_at, mask=inside[:, None], other=0.0)
            score = tl.where(inside[None, :], tl.dot(q, tl.trans(keys)) * scale, -1e30)
            new_top = tl.maximum(top, tl.max(score, 1))
            weight = tl.exp(score - new_top[:, None])
            keep = tl.exp(top - new_top)
            total = total * keep + tl.sum(weight, 1)
            values = tl.load(v_ptr + kv_at, mask=inside[:, None], other=0.0)
            acc = acc * keep[:, None] + tl.dot(weight.to(values.dtype), values)
            top = new_top
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + q_at, out, mask=rows[:, None] < GROUP)

    @triton.jit
    def _hash32(seed, index, token):
        bits = seed * tl.full([], 0x9E3779B1, tl.uint32) + index * tl.full([], 0x85EBCA77, tl.uint32)
        bits = bits + tl.full([], 0x165667B1, tl.uint32)
        bits = (bits ^ (bits >> 15)) * tl.full([], 0xC2B2AE3D, tl.uint32)
        bits = bits + token * tl.full([], 0x85EBCA77, tl.uint32)
        bits = (bits ^ (bits >> 16)) * tl.full([], 0x85EBCA6B, tl.uint32)
        bits = (bits ^ (bits >> 13)) * tl.full([], 0xC2B2AE35, tl.uint32)
        return bits ^ (bits >> 16)

    @triton.jit
    def _choose(logit_ptr, temp_ptr, seed_ptr, index_ptr, pick_ptr, best_ptr, vocab, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        temperature = tl.load(temp_ptr + row)
        seed, index = tl.load(seed_ptr + row).to(tl.uint32), tl.load(index_ptr + row).to(tl.uint32)
        cols = tl.arange(0, BLOCK)
        pick_value, best_value = -float("inf"), -float("inf")
        pick, best = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
        for begin in range(0, vocab, BLOCK):
            token = begin + cols
            logit = tl.load(logit_ptr + row * vocab + token, mask=token < vocab, other=-float("inf"))
            u = (_hash32(seed, index, token.to(tl.uint32)).to(tl.float32) + 0.5) * 2.3283064365386963e-10
            wait = tl.where(u < 1e-3, u + u * u * 0.5 + u * u * u * 0.333333, -tl.log(1.0 - u))
            noisy = tl.where(temperature > 0, logit - temperature * tl.log(wait), logit)
            value, place = tl.max(noisy, 0, return_indices=True)
            pick = tl.where(value > pick_value, begin + place, pick)
            pick_value = tl.maximum(value, pick_value)
            value, place = tl.max(logit, 0, return_indices=True)
            best = tl.where(value > best_value, begin + place, best)
            best_value = tl.maximum(value, best_value)
        tl.store(pick_ptr + row, pick)
        tl.store(best_ptr + row, best)

    @triton.jit
    def _soft_cross_entropy(
        logit_ptr, prob_ptr, weight_ptr, loss_ptr, best_ptr, vocab, overlap_weight, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        cols = tl.arange(0, BLOCK)
        inside = cols < vocab
        weight = tl.load(weight_ptr + row)
        z = tl.load(logit_ptr + row * vocab + cols, mask=inside, other=-float("inf")).to(tl.float32)
        p = tl.load(prob_ptr + row * vocab + cols, mask=inside, other=0.0).to(tl.float32)
        top, best = tl.max(z, 0, return_indices=True)
        raised = tl.exp(z - top)
        total = tl.sum(raised, 0)
        q = raised / total
        entropy = top + tl.log(total) - tl.sum(tl.where(inside, p * z, 0.0), 0)
        low = tl.where(q < p, q, 0.0)
        low_mass = tl.sum(low, 0)
        miss = 1.0 - tl.sum(tl.minimum(p, q), 0)
        tl.store(loss_ptr + row, weight * (entropy + overlap_weight * miss))
        tl.store(best_ptr + row, best.to(tl.int64))
        grad = weight * (q - p - overlap_weight * (low - q * low_mass))
        tl.store(logit_ptr + row * vocab + cols, grad.to(logit_ptr.dtype.element_ty), mask=inside)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
    """q [B, heads, D]; k, v [B, kv_heads, T, D]; keys 0..position[b] are valid -> [B, heads, D]."""
    batch, heads, dim = q.shape
    kv_heads, cache_len = k.shape[1], k.shape[2]
    if triton is None or not q.is_cuda:
        valid = torch.arange(cache_len, device=q.device) <= position[:, None]
        grouped = q.view(batch, kv_heads, heads // kv_heads, dim)
        out = torch.nn.functional.scaled_dot_product_attention(grouped, k, v, attn_mask=valid[:, None, None])
        return out.reshape(batch, heads, dim)
    out = torch.empty_like(q)
    _decode_attention[(batch, kv_heads)](
        q, k, v, out, position, dim**-0.5, cache_len, GROUP=heads // kv_heads, ROWS=16, DIM=dim, BLOCK=64
    )
    return out


def choose(logits: Tensor, temperature: Tensor, seed: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """logits [B, V] f32; temperature, seed, index [B] -> chosen token, plain argmax; both [B] int64."""
    if triton is None or not logits.is_cuda:
        token = torch.arange(logits.shape[1], device=logits.device)
        noise = gumbel(seed[:, None], index[:, None], token[None])
        hot = temperature[:, None] > 0
        noisy = torch.where(hot, logits + temperature[:, None] * noise, logits)
        return noisy.argmax(-1), logits.argmax(-1)
    pick, best = torch.empty_like(seed), torch.empty_like(seed)
    _choose[(logits.shape[0],)](
        logits, temperature, seed, index, pick, best, logits.shape[1], BLOCK=4096, num_warps=8
    )
    return pick, best


def soft_cross_entropy(
    logits: Tensor, prob: Tensor, weight: Tensor, overlap_weight: float
) -> tuple[Tensor, Tensor]:
    """Row losses w * (CE(p, q) + overlap_weight * (1 - sum min(p, q))) and argmaxes of `logits`.

    logits [N, V] is overwritten with the gradient of the summed loss; prob [N, V], rows sum to 1.
    """
    loss = torch.empty_like(weight)
    if triton is None or not logits.is_cuda:
        best = logits.argmax(-1)
        z, p = logits.float(), prob.float()
        q = torch.softmax(z, -1)
        low = torch.where(q < p, q, 0.0)
        miss = 1 - torch.minimum(p, q).sum(-1)
        entropy = torch.logsumexp(z, -1) - (p * z).sum(-1)
        grad = q - p - overlap_weight * (low - q * low.sum(-1, keepdim=True))
        logits.copy_(grad * weight[:, None])
        return weight * (entropy + overlap_weight * miss), best
    best = torch.empty(len(weight), dtype=torch.int64, device=weight.device)
    vocab = logits.shape[1]
    block = triton.next_power_of_2(vocab)
    _soft_cross_entropy[(len(weight),)](
        logits, prob, weight, loss, best, vocab, overlap_weight, BLOCK=block, num_warps=16
    )
    return loss, best
