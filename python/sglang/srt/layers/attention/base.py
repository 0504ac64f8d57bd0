"""One interface for attention in prefill, decode, verify and draft forwards.

A backend is bound to one KV pool and to the page table that every pool shares. Per step it is
asked once for a ``LayerAttention`` (all index arithmetic happens there), which every layer calls.

Shapes: R rows, Q queries a row, T = R * Q query tokens in row order, nq/nkv query and KV heads,
d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from sglang.srt.layers.attention.heads import HeadProduct
from sglang.srt.layers.attention.mla import LatentProduct, RawLatents

Product = HeadProduct | LatentProduct | RawLatents
"""What a layer hands to its attention; a backend is of one kind, as its pool is."""


class Block(Enum):
    """How the Q queries of a row see each other. They are stored at ``base_len + i``."""

    NONE = "none"  # they see only the base places; nothing is written
    CAUSAL = "causal"  # query i sees queries 0 … i
    TREE = "tree"  # query i sees the queries that tree_mask[row, i] names (itself included)


@dataclass(frozen=True, slots=True)
class RaggedQueries:
    """Rows with 1 … Q queries each: T tokens, one row's after the other's."""

    query_start: torch.Tensor  # [R + 1] int64: the first token of each row, then T
    lines: torch.Tensor  # [T] int64: row * Q + query of each token


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows with the same number of queries: plain decode (Q = 1), verify, draft chain."""

    slots: torch.Tensor  # [R] int64
    base_len: torch.Tensor  # [R] int64: places 0 … base_len-1 are seen by every query of the row
    base_len_bound: int  # host upper bound of base_len.max()
    query_len: int  # Q
    block: Block = Block.CAUSAL
    tree_mask: torch.Tensor | None = None  # [R, Q, Q] bool, with Block.TREE
    ragged: RaggedQueries | None = None  # with Block.CAUSAL: rows may have fewer than Q queries


@dataclass(frozen=True, slots=True)
class ScratchRows:
    """Draft tree levels: the row's base places, then scratch places outside the pages.

    Scratch row r holds S places per batch row (not per slot); the queries of this call are
    written at scratch places ``write_start … write_start + Q - 1`` of their row.
    """

    slots: torch.Tensor  # [R] int64
    base_len: torch.Tensor  # [R] int64
    base_len_bound: int
    query_len: int
    write_start: int
    scratch_mask: torch.Tensor  # [R, Q, write_start + Q] bool: scratch places each query sees


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Rows of different lengths, flattened: row r has query_lens[r] tokens from position starts[r]."""

    slots: tuple[int, ...]
    starts: tuple[int, ...]  # places already in the cache before this chunk
    query_lens: tuple[int, ...]


class LayerAttention(Protocol):
    """Attention of one step, called by every layer in turn.

    Makes what the cache keeps of the product, writes it to the pool at the places of this step's tokens
    (with Block.NONE there is nothing to write), then attends; returns [T, nq, d], d being V's.
    """

    def __call__(self, layer: int, product: Product) -> torch.Tensor: ...


class AttentionBackend(Protocol):
    needs_exact_lens: bool  # True: base_len_bound must be exact (host knows the lengths)

    def decode(self, rows: DecodeRows) -> LayerAttention: ...

    def prefill(self, rows: PrefillRows) -> LayerAttention: ...

    def mixed(self, decode: DecodeRows, prefill: PrefillRows) -> LayerAttention:
        """Tokens of the decode rows first (Q = 1), then those of the prefill rows."""
        ...

    def places(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Pool places of (slot, position) pairs; same shape as its arguments, int64."""
        ...


class DraftAttentionBackend(AttentionBackend, Protocol):
    """What drafters that build trees need beside it."""

    def scratch(self, rows: ScratchRows) -> LayerAttention: ...


@dataclass(frozen=True, slots=True)
class CacheRows:
    """Tokens of which only the cache is to hear: R rows of Q, stored at (and turned by) ``root + i``."""

    slots: torch.Tensor  # [R] int64; nothing is written for the pad slot
    root: torch.Tensor  # [R] int64
    query_len: int = 1  # Q
    counts: torch.Tensor | None = None  # [R] int64: how many of a row's tokens are written; None: all
    pdl: bool = False  # the launch overlaps with the kernel ahead


class KernelAttention(DraftAttentionBackend, Protocol):
    """What a CUDA executor needs: steps that a graph can hold."""

    def reserve(self, max_rows: int, max_query_len: int, scratch_places: int = 0) -> None:
        """Allocate for steps of up to this size; needed before a CUDA graph is captured."""
        ...

    def write(self, layer: int, product: Product, rows: CacheRows) -> None:
        """Only fill the cache, of a product without queries."""
        ...


def pool_places(
    page_table: torch.Tensor,  # [slots, max_pages] int32
    page_size: int,
    slots: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Pool places of (slot, position) pairs; same shape as these, int64."""
    pages = page_table[slots, positions // page_size]
    return pages.to(torch.int64) * page_size + positions % page_size
