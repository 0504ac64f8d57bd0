"""The work plan of a decode step: which program attends which places of which row.

Made on the device from lengths that are there, once a step; every layer uses it. The launch shape
depends on the number of rows alone, so one CUDA graph serves all lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_kernel._dispatch import DeviceInfo, device_info, use_kernel
from sgl_kernel.attention.decode.config import DecodeConfig, decode_config
from sgl_kernel.attention.decode.reference import plan_decode_ref
from sgl_kernel.launch import Launch

ITEM_FIELDS = 8
MAX_QUERY_LEN = 64
MAX_MASK_PLACES = 128
UNIT = 16  # places; chunks of a row are equally long but for this
WHOLE_WINDOW = 256
"""A window of up to so many places is one chunk: two passes more take less time than merging two chunks."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class View:
    """What the Q queries of a row see beside its base places."""

    query_len: int
    extra: int = 0  # places after the base: the queries' own, or scratch places
    causal: bool = False  # query i sees extra places 0 … i
    mask: torch.Tensor | None = None  # [R, Q, extra] bool: the extra places each query sees
    scratch: bool = False  # the extra places lie in scratch, not in pages
    write_start: int = 0  # in scratch: where the first query's K and V go
    # [R + 1] int64: row r's queries are tokens query_start[r] … query_start[r + 1] - 1, at least one and at
    # most Q of them, stored from its base on. None: Q in every row.
    query_start: torch.Tensor | None = None
    window: int = 0  # of what it sees a query keeps the last so many places, its own included; 0: all

    @property
    def words(self) -> int:
        """int64 words of mask bits a query."""
        return 0 if self.mask is None else -(-self.extra // 64)

    @property
    def writes(self) -> bool:
        return self.extra > 0

    def starts(self, num_rows: int) -> list[int]:
        """[R + 1] on the host: the number of each row's first token, and that of all of them."""
        if self.query_start is not None:
            return [int(start) for start in self.query_start.tolist()]
        return list(range(0, (num_rows + 1) * self.query_len, self.query_len))


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What ``decode_attention`` needs beside a layer's q and pool. Valid until the next plan."""

    shape: AttentionShape
    view: View
    config: DecodeConfig
    num_items: int
    num_partials: int
    slots: torch.Tensor  # [R] int64
    base_lens: torch.Tensor  # [R] int64
    page_table: torch.Tensor  # [slots, max_pages] int32
    items: torch.Tensor  # [num_items, 8] int32: see planning/kernels.py; row -1: nothing to do
    places: torch.Tensor  # [R * Q] int64: where this step's K and V go (in pool, or in scratch)
    bits: torch.Tensor  # [R * Q, words] int64: the mask, place s at bit s % 64 of word s // 64
    partial: torch.Tensor  # float32, [num_partials, Q * group, d] in use
    sums: torch.Tensor  # float32, [num_partials, Q * group, 2] in use
    counters: torch.Tensor  # int32, zero between launches
    scratch_cap: int  # places of scratch a row
    pdl: bool

    @property
    def min_chunk(self) -> int:
        window = self.view.window
        return max(self.config.min_chunk, window + self.view.extra if window <= WHOLE_WINDOW else 0)

    def check_levels(self) -> None:
        """Partials are merged in groups of ``fan_in``, levels of which share a group's counters: a level a
        counter (``merging.kernels``)."""
        fan_in = self.config.fan_in
        assert self.num_partials <= fan_in**fan_in, f"{self.num_partials} partials need a larger fan_in"

    @property
    def num_tiles(self) -> int:
        """Of (query, head) pairs of a row and KV head."""
        return -(-self.view.query_len * self.shape.group // self.config.block_m)


class DecodeWorkspace:
    """Buffers of one model's decode attention, at the same address in every step and graph.

    Grows when a plan needs more, which must not happen while a graph is being captured: call
    ``reserve`` with the largest step first. What it outgrows is kept, for graphs that hold its address.
    """

    def __init__(
        self,
        shape: AttentionShape,
        device: torch.device,
        kv_itemsize: int,
        info: DeviceInfo | None = None,
        pdl: bool = False,
        config: DecodeConfig | None = None,
    ) -> None:
        """pdl: launch with programmatic dependence on the kernel ahead (sm_90 and later); config:
        launch constants for every step instead of the table's, to time variants."""
        self.shape = shape
        self.device = device
        self.info = info or device_info(device)
        self.pdl = pdl
        self.kv_itemsize = kv_itemsize
        self._config = config
        self._buffers: dict[str, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    def config(self, query_len: int) -> DecodeConfig:
        return self._config or self.usual_config(query_len)

    def usual_config(self, query_len: int) -> DecodeConfig:
        shape = self.shape
        return decode_config(
            self.info.arch, query_len * shape.group, shape.head_dim, self.kv_itemsize, shape.page_size
        )

    def sizes(self, num_rows: int, query_len: int) -> tuple[int, int]:
        """(items, partials). A row has at least one item a KV head; what is left is for splitting.

        A row of n chunks needs n partials if n > 1, at most 2 (n - 1): so never more than ``wave``.
        """
        config, heads = self.config(query_len), self.shape.num_kv_heads
        tiles = -(-query_len * self.shape.group // config.block_m)
        wave = max(config.programs_per_sm * self.info.num_sms // tiles, 2 * heads)
        items = max(wave, num_rows * heads + wave // 2) // heads * heads
        return items, wave

    def reserve(self, max_rows: int, max_query_len: int) -> None:
        """Allocate for steps of up to so many rows and queries a row."""
        for query_len in range(1, max_query_len + 1):
            self._reserve(max_rows, query_len)

    def _reserve(self, num_rows: int, query_len: int) -> None:
        config, tile_rows = self.config(query_len), query_len * self.shape.group
        tiles = -(-tile_rows // config.block_m)
        items, partials = self.sizes(num_rows, query_len)
        self._buffer("items", items * ITEM_FIELDS, torch.int32)
        self._buffer("places", num_rows * query_len, torch.int64)
        self._buffer("bits", num_rows * query_len * (MAX_MASK_PLACES // 64), torch.int64)
        self._buffer("partial", partials * tile_rows * self.shape.head_dim, torch.float32)
        self._buffer("sums", partials * tile_rows * 2, torch.float32)
        self._buffer("counters", partials * tiles, torch.int32)

    def _buffer(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        held = self._buffers.get(name)
        if held is None or held.numel() < size:
            capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            assert not capturing, f"reserve() the workspace first: {name} needs {size} elements"
            if held is not None:
                self._outgrown.append(held)
            # Zeros: counters must start there, and the rest is small.
            held = self._buffers[name] = torch.zeros(size, dtype=dtype, device=self.device)
        return held

    def plan(
        self,
        slots: torch.Tensor,
        base_lens: torch.Tensor,
        page_table: torch.Tensor,
        view: View,
        scratch_cap: int,
    ) -> DecodePlan:
        """An empty plan over the buffers; ``plan_decode`` fills it."""
        num_rows = slots.shape[0]
        self._reserve(num_rows, view.query_len)
        items, partials = self.sizes(num_rows, view.query_len)
        tokens, words = num_rows * view.query_len, view.words
        return DecodePlan(
            shape=self.shape,
            view=view,
            config=self.config(view.query_len),
            num_items=items,
            num_partials=partials,
            slots=slots,
            base_lens=base_lens,
            page_table=page_table,
            items=self._buffers["items"][: items * ITEM_FIELDS].view(items, ITEM_FIELDS),
            places=self._buffers["places"][:tokens],
            bits=self._buffers["bits"][: tokens * words].view(tokens, words),
            partial=self._buffers["partial"],
            sums=self._buffers["sums"],
            counters=self._buffers["counters"],
            scratch_cap=scratch_cap,
            pdl=self.pdl,
        )


def plan_decode(
    workspace: DecodeWorkspace,
    slots: torch.Tensor,
    base_lens: torch.Tensor,
    page_table: torch.Tensor,
    view: View,
    scratch_cap: int = 0,
) -> DecodePlan:
    """Plan a step of R rows with Q queries each.

    slots, base_lens: [R] int64; page_table: [slots, max_pages] int32; slot 0 is padding: such a row
    attends nothing and gives zeros. scratch_cap: places of scratch a row, with ``view.scratch``.
    """
    assert 1 <= view.query_len <= MAX_QUERY_LEN and view.extra <= MAX_MASK_PLACES
    assert not (view.causal and view.mask is not None)
    assert view.mask is None or view.mask.shape == (slots.shape[0], view.query_len, view.extra)
    ragged = view.query_start
    assert ragged is None or (view.causal and not view.scratch and ragged.shape == (slots.shape[0] + 1,))
    assert not view.scratch or view.write_start + view.query_len <= scratch_cap
    # A node's position follows from its mask, another query's from its number.
    known = view.mask is not None or (not view.scratch and view.extra in (0, view.query_len))
    assert view.window == 0 or known, "positions must be known"
    plan = workspace.plan(slots, base_lens, page_table, view, scratch_cap)
    if use_kernel(slots):
        plan_launch(plan).run()
    else:
        plan_decode_ref(plan)
    return plan


def plan_launch(plan: DecodePlan) -> Launch:
    from sgl_kernel.attention.decode.planning.kernels import plan_kernel

    view, num_rows = plan.view, plan.slots.shape[0]
    mask = plan.bits if view.mask is None else view.mask.contiguous().view(torch.uint8)
    rows = max(16, 1 << (num_rows - 1).bit_length())
    return Launch(
        plan_kernel,
        (num_rows + 1,),
        (
            plan.slots, plan.base_lens, plan.page_table, mask, plan.items, plan.places, plan.bits,
            num_rows, plan.num_items, plan.page_table.stride(0), view.extra, plan.scratch_cap,
            view.write_start,
        ),
        {
            "Q": view.query_len,
            "Q_BLOCK": 1 << (view.query_len - 1).bit_length(),
            "NKV": plan.shape.num_kv_heads,
            "PAGE": plan.shape.page_size,
            "WRITE": view.writes,
            "EXTRA": view.extra,
            "WORDS": view.words,
            "SCRATCH": view.scratch,
            "WINDOW": view.window,
            "MIN_UNITS": -(-plan.min_chunk // UNIT),
            "UNIT": UNIT,
            "ROWS": rows,
            "ITEMS": 128,
            "PDL": plan.pdl,
        },
        num_warps=4 if rows > 128 else 1,
        pdl=plan.pdl,
    )  # fmt: skip
