"""An indexer's choice (DSA; DeepSeek-V3.2, arXiv 2512.02556): the places that each query attends to.

The cache of a layer is ``[places, d]``, one key a token. Scores are made of all that a query sees, and the
``top_k`` highest are found exactly; all lengths are read on the device. Attention over what was chosen is
latent attention with the choice as its page table: ``plan_decode`` of a ``LatentWorkspace`` with page size 1
over ``plan.ids``, ``plan.counts`` and ``plan.chosen``, with ``View(1)``.
"""

from __future__ import annotations

import torch

from sgl_kernel._dispatch import use_kernel
from sgl_kernel.attention.mla.indexing.config import BIN_SHIFT, BINS, queries_at_once
from sgl_kernel.attention.mla.indexing.plan import IndexPlan
from sgl_kernel.attention.mla.indexing.reference import choose_places_ref
from sgl_kernel.launch import Launch, compute_type, next_power_of_2


def choose_places(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    plan: IndexPlan,
    scratch: torch.Tensor | None = None,
) -> None:
    """Fill ``plan.chosen``: for each query the places of its highest scores, ``sum of weight * relu(q . k)``.

    q: [T, h, d], heads contiguous; weights: [T, h] float32 (float64 with references); keys: [places, d],
    contiguous, in q's type; scratch: [rows, cap, d], contiguous, with a view of scratch places, of which
    place s of row r is -1 - (r * cap + s) in ``plan.chosen``.

    Of equal scores the earlier position is taken, and a score that is not a number before all others: so a
    query that sees a token that is broken attends to it. The order of a query's places follows from its
    scores alone. Rows with no more places than ``top_k`` take all of them, and their keys are not read.
    """
    shape = plan.rows.shape
    assert q.shape == (len(plan.counts), shape.num_heads, shape.head_dim) and keys.shape[1] == shape.head_dim
    assert plan.rows.view.scratch == (scratch is not None)
    if not use_kernel(q):
        choose_places_ref(q, weights, keys, plan, scratch)
        return
    for first in range(0, plan.rows.slots.shape[0], plan.rows_at_once):
        score_launch(q, weights, keys, plan, first, scratch).run()
        count_launch(plan, first).run()
        choose_launch(plan, first).run()


def score_launch(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    plan: IndexPlan,
    first_row: int,
    scratch: torch.Tensor | None = None,
) -> Launch:
    from sgl_kernel.attention.mla.indexing.scoring.kernels import score_kernel

    rows, sifting = plan.rows, plan.sifting
    shape, view, config = rows.shape, rows.view, rows.config
    assert q.stride()[1:] == (shape.head_dim, 1) and keys.is_contiguous() and weights.stride(1) == 1
    scratch_offset = 0
    if scratch is not None:
        assert scratch.is_contiguous() and scratch.dtype == keys.dtype
        # One address space: a place is reached from the pool's start wherever it lies.
        scratch_offset = (scratch.data_ptr() - keys.data_ptr()) // keys.element_size()
    at_once = queries_at_once(view.query_len, shape.num_heads)
    end_row = min(first_row + plan.rows_at_once, rows.slots.shape[0])
    return Launch(
        score_kernel,
        (-(-view.query_len // at_once), rows.num_items),
        (
            q, weights, keys, rows.items, rows.base_lens, rows.bits, rows.page_table, sifting.scores,
            sifting.tops, q.stride(0), weights.stride(0), rows.page_table.stride(0), plan.bound, first_row,
            end_row, plan.top_k, scratch_offset, rows.scratch_cap,
        ),
        {
            "Q": view.query_len,
            "HEADS": shape.num_heads,
            "D": shape.head_dim,
            "PAGE": shape.page_size,
            "EXTRA": view.extra,
            "CAUSAL": view.causal and view.query_len > 1,
            "WORDS": view.words,
            "SCRATCH": view.scratch,
            "QB": at_once,
            "H": max(16, next_power_of_2(shape.num_heads)),
            "BN": config.block_n,
            "BD": max(16, next_power_of_2(shape.head_dim)),
            "STAGES": config.num_stages,
            "CT": compute_type(q.dtype),
            "PDL": rows.pdl,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        max_registers=config.max_registers,
        pdl=rows.pdl,
    )  # fmt: skip


def _grid(plan: IndexPlan, first_row: int) -> tuple[int, int]:
    num_rows = min(plan.rows_at_once, plan.rows.slots.shape[0] - first_row)
    return plan.num_chunks, num_rows * plan.rows.view.query_len


def count_launch(plan: IndexPlan, first_row: int) -> Launch:
    from sgl_kernel.attention.mla.indexing.choosing.kernels import count_kernel

    rows, sifting = plan.rows, plan.sifting
    return Launch(
        count_kernel,
        _grid(plan, first_row),
        (
            sifting.scores, rows.slots, rows.base_lens, plan.counts, sifting.bins, sifting.offsets,
            sifting.cuts, sifting.tops, sifting.counted, plan.bound, first_row, plan.num_chunks, plan.top_k,
        ),
        {
            "Q": rows.view.query_len,
            "EXTRA": rows.view.extra,
            "CHUNK": plan.sift.chunk,
            "BINS": BINS,
            "SHIFT": BIN_SHIFT,
            "CHUNKS": 8,
            "PDL": rows.pdl,
        },
        num_warps=plan.sift.num_warps,
        pdl=rows.pdl,
    )  # fmt: skip


def choose_launch(plan: IndexPlan, first_row: int) -> Launch:
    from sgl_kernel.attention.mla.indexing.choosing.kernels import choose_kernel

    rows, view, sifting = plan.rows, plan.rows.view, plan.sifting
    return Launch(
        choose_kernel,
        _grid(plan, first_row),
        (
            sifting.scores, rows.slots, rows.base_lens, rows.bits, rows.page_table, plan.counts,
            sifting.offsets, sifting.cuts, sifting.tops, sifting.sifted, sifting.near_keys,
            sifting.near_places, plan.chosen, plan.bound, rows.page_table.stride(0), first_row,
            plan.num_chunks, plan.top_k, rows.scratch_cap,
        ),
        {
            "Q": view.query_len,
            "EXTRA": view.extra,
            "CAUSAL": view.causal and view.query_len > 1,
            "WORDS": view.words,
            "SCRATCH": view.scratch,
            "PAGE": rows.shape.page_size,
            "CHUNK": plan.sift.chunk,
            "BINS": BINS,
            "SHIFT": BIN_SHIFT,
            "NEAR": plan.sift.near,
            "PDL": rows.pdl,
        },
        num_warps=plan.sift.num_warps,
        pdl=rows.pdl,
    )  # fmt: skip
