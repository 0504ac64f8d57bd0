"""Top-k, top-p and min-p as one number a row: the lowest score that stays."""

from __future__ import annotations

import torch

from sgl_kernel._dispatch import device_info, use_kernel
from sgl_kernel.launch import Launch, next_power_of_2
from sgl_kernel.sampling.rows import NodeRows


def filter_cutoffs(
    logits: torch.Tensor,
    rows: NodeRows,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    scratch: torch.Tensor,
    cutoffs: torch.Tensor,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """[R * N] float32: scores (logits / T) below it are excluded; -inf for greedy and unfiltered rows.
    With the rows' ``lines`` there are T instead of R * N.

    logits: [R * N, V] float32, rules applied; temperature, top_p, min_p: [slots] float32; top_k: [slots]
    int64, V or more for all; scratch: [R * N, V] float32; cutoffs: [R * N], the result. All three
    limits look at the same softmax: in descending order an id stays if its rank is below k, the ids
    before it hold at most p and it has at least m of the best one's probability. Ids equal to the last
    one that stays do too.
    """
    if cutoffs.shape[0] == 0:
        return cutoffs
    if not use_kernel(logits):
        return filter_cutoffs_ref(logits, rows, temperature, top_k, top_p, min_p, cutoffs)
    filter_launch(logits, rows, temperature, top_k, top_p, min_p, scratch, cutoffs, pdl=pdl).run()
    return cutoffs


def filter_cutoffs_ref(
    logits: torch.Tensor,
    rows: NodeRows,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    cutoffs: torch.Tensor,
) -> torch.Tensor:
    heat, k, p, m = (rows.of_slots(t)[:, None] for t in (temperature, top_k, top_p, min_p))
    asks = (heat > 0) & ((k < logits.shape[1]) | (p < 1) | (m > 0))
    ordered = (logits / torch.where(heat > 0, heat, 1.0)).sort(dim=-1, descending=True).values
    probs = ordered.softmax(dim=-1)
    before = probs.cumsum(dim=-1).roll(1, dims=-1)
    before[:, 0] = 0
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    keep = ((before <= p) | (p >= 1)) & (rank < k) & (probs >= m * probs[:, :1])
    keep[:, 0] = True
    last = ordered.gather(1, keep.sum(dim=-1, keepdim=True) - 1)
    return cutoffs.copy_(torch.where(asks, last, -torch.inf)[:, 0])


def filter_launch(
    logits: torch.Tensor,
    rows: NodeRows,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    scratch: torch.Tensor,
    cutoffs: torch.Tensor,
    *,
    pdl: bool,
) -> Launch:
    from sgl_kernel.sampling.filters.kernels import filter_cutoff_kernel

    num_lines, vocab_size = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and num_lines == rows.num_lines
    assert scratch.shape == logits.shape and scratch.is_contiguous() and scratch.dtype == torch.float32
    block = min(8192, next_power_of_2(vocab_size))
    pdl = pdl and device_info(logits.device).has_pdl
    return Launch(
        filter_cutoff_kernel,
        (num_lines,),
        (
            logits,
            rows.slots,
            rows.lines_or(rows.slots),
            temperature,
            top_k,
            top_p,
            min_p,
            scratch,
            cutoffs,
            logits.stride(0),
            vocab_size,
        ),
        {
            "NODES": rows.num_nodes,
            "LINES": rows.lines is not None,
            "BLOCK": block,
            "LOOK_BLOCK": min(2048, block),
            "PDL": pdl,
        },
        num_warps=16,
        pdl=pdl,
        fp_fusion=False,
    )
