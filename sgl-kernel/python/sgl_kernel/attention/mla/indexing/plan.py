"""What an indexer's launches need beside a layer's queries and keys, made on the device once a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from sgl_kernel._dispatch import DeviceInfo, use_kernel
from sgl_kernel.attention.decode.config import DecodeConfig
from sgl_kernel.attention.decode.plan import (
    ITEM_FIELDS,
    MAX_MASK_PLACES,
    AttentionShape,
    DecodePlan,
    DecodeWorkspace,
    View,
    plan_decode,
)
from sgl_kernel.attention.mla.indexing.config import BINS, SiftConfig, index_config
from sgl_kernel.attention.mla.indexing.reference import count_seen_ref
from sgl_kernel.launch import Launch, next_power_of_2

LOWEST: Final = -(2**31)
"""Below every score, as an ordered integer."""


@dataclass(frozen=True, slots=True)
class Sifting:
    """Of the tokens that are scored together. All of it is used again by every layer."""

    scores: torch.Tensor  # float32, [tokens, bound] in use
    bins: torch.Tensor  # int32, [tokens, chunks, BINS] in use: scores of a chunk, counted by bins
    offsets: torch.Tensor  # int32, [tokens, chunks, 2] in use: chosen ones, and near ones, ahead of a chunk
    cuts: torch.Tensor  # [tokens, 4] int32: the bin of the last chosen one, scores above it, scores in it
    tops: torch.Tensor  # [tokens] int32: the largest size of a score, ordered; LOWEST between launches
    counted: torch.Tensor  # [tokens] int32: chunks that are done, zero between launches
    sifted: torch.Tensor  # [tokens] int32: the same of the second launch
    near_keys: torch.Tensor  # [tokens, near] int32: scores of the last bin, ordered
    near_places: torch.Tensor  # [tokens, near] int32


class Sieve:
    """Where the highest scores are found: one for all launches of a stream, which take turns."""

    def __init__(self, device: torch.device, config: SiftConfig | None = None) -> None:
        self.config = config or SiftConfig()
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []  # CUDA graphs may hold their addresses

    def tokens_at_once(self, tokens: int, chunks: int) -> int:
        """How many tokens of so many chunks each are scored together."""
        bytes_a_token = 4 * (chunks * (self.config.chunk + BINS) + 2 * self.config.near)
        return max(1, min(tokens, self.config.max_bytes // bytes_a_token))

    def reserve(self, tokens: int, chunks: int) -> Sifting:
        """Buffers for so many tokens at once; those of before where they are large enough."""
        near = tokens * self.config.near
        return Sifting(
            scores=self._buffer("scores", tokens * chunks * self.config.chunk, torch.float32),
            bins=self._buffer("bins", tokens * chunks * BINS),
            offsets=self._buffer("offsets", tokens * chunks * 2),
            cuts=self._buffer("cuts", tokens * 4),
            tops=self._buffer("tops", tokens, start=LOWEST),
            counted=self._buffer("counted", tokens),
            sifted=self._buffer("sifted", tokens),
            near_keys=self._buffer("near keys", near),
            near_places=self._buffer("near places", near),
        )

    def _buffer(self, name: str, size: int, dtype: torch.dtype = torch.int32, start: int = 0) -> torch.Tensor:
        held = self._buffers.get(name)
        if held is None or held.numel() < size:
            capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            assert not capturing, f"reserve_scores() first: {name} needs {size} elements"
            if held is not None:
                self._outgrown.append(held)
            held = self._buffers[name] = torch.full((size,), start, dtype=dtype, device=self._device)
        return held


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """Valid until the workspace's next plan."""

    rows: DecodePlan  # who scores which keys, where new ones go (``places``), and a tree's mask
    top_k: int
    sift: SiftConfig
    num_chunks: int  # of the longest row there may be
    rows_at_once: int
    counts: torch.Tensor  # [T] int64: places a query attends to, those it sees but ``top_k`` at most
    ids: torch.Tensor  # [T] int64: a query's row of ``chosen``; 0 for padding
    chosen: torch.Tensor  # [T + 1, top_k] int32: places, the first ``counts`` of each
    sifting: Sifting

    @property
    def bound(self) -> int:
        """Scores a token has room for."""
        return self.num_chunks * self.sift.chunk


class IndexWorkspace(DecodeWorkspace):
    """Buffers of one model's indexers, at the same address in every step and graph."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        top_k: int,
        page_size: int,
        device: torch.device,
        kv_itemsize: int,
        info: DeviceInfo | None = None,
        pdl: bool = False,
        config: DecodeConfig | None = None,
        sieve: Sieve | None = None,
    ) -> None:
        """sieve: shared with other workspaces of the same stream; config: as in ``DecodeWorkspace``."""
        shape = AttentionShape(num_heads, 1, head_dim, page_size)
        super().__init__(shape, device, kv_itemsize, info, pdl, config)
        self.top_k = top_k
        self.sieve = sieve or Sieve(device)

    def usual_config(self, query_len: int) -> DecodeConfig:
        return index_config(self.info.arch, query_len, self.shape.num_heads)

    def reserve_scores(self, max_tokens: int, max_len: int) -> None:
        """Allocate for so many tokens of rows of up to that length, or as many as go through at once."""
        chunks = -(-max_len // self.sieve.config.chunk)
        self.sieve.reserve(self.sieve.tokens_at_once(max_tokens, chunks), chunks)
        self._reserve_choice(max_tokens)

    def index_plan(self, rows: DecodePlan, max_len: int, chosen: torch.Tensor | None) -> IndexPlan:
        """An empty plan over the buffers; ``plan_index`` fills it."""
        queries, num_rows, sieve = rows.view.query_len, rows.slots.shape[0], self.sieve
        tokens, chunks = num_rows * queries, -(-max_len // sieve.config.chunk)
        at_once = max(1, sieve.tokens_at_once(tokens, chunks) // queries)
        self._reserve_choice(tokens)
        if chosen is None:
            chosen = self._buffers["chosen"][: (tokens + 1) * self.top_k].view(tokens + 1, self.top_k)
        assert chosen.shape == (tokens + 1, self.top_k) and chosen.is_contiguous()
        return IndexPlan(
            rows=rows,
            top_k=self.top_k,
            sift=sieve.config,
            num_chunks=chunks,
            rows_at_once=at_once,
            counts=self._buffers["counts"][:tokens],
            ids=self._buffers["ids"][:tokens],
            chosen=chosen,
            sifting=sieve.reserve(at_once * queries, chunks),
        )

    def _reserve(self, num_rows: int, query_len: int) -> None:
        """As for attention, without what chunks leave to be merged."""
        items, _ = self.sizes(num_rows, query_len)
        self._buffer("items", items * ITEM_FIELDS, torch.int32)
        self._buffer("places", num_rows * query_len, torch.int64)
        self._buffer("bits", num_rows * query_len * (MAX_MASK_PLACES // 64), torch.int64)
        for name in ("partial", "sums"):
            self._buffer(name, 1, torch.float32)
        self._buffer("counters", 1, torch.int32)

    def _reserve_choice(self, tokens: int) -> None:
        self._buffer("counts", tokens, torch.int64)
        self._buffer("ids", tokens, torch.int64)
        self._buffer("chosen", (tokens + 1) * self.top_k, torch.int32)


def plan_index(
    workspace: IndexWorkspace,
    slots: torch.Tensor,
    base_lens: torch.Tensor,
    page_table: torch.Tensor,
    view: View,
    max_len: int | None = None,
    chosen: torch.Tensor | None = None,
    scratch_cap: int = 0,
) -> IndexPlan:
    """Plan a step of R rows with Q queries each, as ``plan_decode`` does; ``scratch_cap`` as there.

    max_len: no row is longer, its queries' own places included; None: as long as the page table has room.
    chosen: [R * Q + 1, top_k] int32, instead of the workspace's own, to outlast its next plan.
    """
    rows = plan_decode(workspace, slots, base_lens, page_table, view, scratch_cap)
    room = page_table.shape[1] * workspace.shape.page_size
    plan = workspace.index_plan(rows, room if max_len is None else max_len, chosen)
    if use_kernel(slots):
        seen_launch(plan).run()
    else:
        count_seen_ref(rows, plan.top_k, plan.counts, plan.ids)
    return plan


def seen_launch(plan: IndexPlan) -> Launch:
    from sgl_kernel.attention.mla.indexing.seeing.kernels import seen_kernel

    rows, view = plan.rows, plan.rows.view
    mask = rows.bits if view.mask is None else view.mask.contiguous().view(torch.uint8)
    tokens = plan.counts.shape[0]
    return Launch(
        seen_kernel,
        (-(-tokens // 32),),
        (rows.slots, rows.base_lens, mask, plan.counts, plan.ids, tokens, plan.top_k),
        {
            "Q": view.query_len,
            "EXTRA": view.extra,
            "CAUSAL": view.causal,
            "MASKED": view.mask is not None,
            "TOKENS": 32,
            "EXTRA_BLOCK": next_power_of_2(max(view.extra, 1)),
            "PDL": rows.pdl,
        },
        num_warps=1,
        pdl=rows.pdl,
    )
