"""Attention of prefill chunks by FlashInfer: for steps whose exact lengths the host knows, and no others.

A plan of its wrappers cuts rows into parts by the lengths it is told. With lengths that are only bounds,
as a step planned ahead of its results has them, it reads places that are not there or leaves out some
that are; so decode and verify are not for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from sgl_kernel.attention.decode.plan import AttentionShape
from sgl_kernel.attention.prefill.places import ChunkPlaces, chunk_places
from sgl_kernel.flashinfer_package import find_flashinfer, not_built

WORKSPACE_BYTES: Final = 128 << 20
"""For partial results of rows that are cut: what FlashInfer's documentation asks for."""

_PLANS_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class _Wrapper:
    """One plan's memory: FlashInfer's kernels read it until the last layer."""

    wrapper: Any
    sent: torch.cuda.Event | None  # after the plan's copies; None on a CPU


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """One step's chunks, for every layer. Good until the next but one is made."""

    shape: AttentionShape
    places: ChunkPlaces  # where the chunks' K and V go
    wrapper: Any

    def attend(self, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """One layer, causal; the chunks' own K and V must be in the pool. Returns ``out``.

        q: [T, nq, d], heads contiguous; kv: [places, nkv, 2 (k, v), d] in q's type; out: [T, nq, d].
        Scores are scaled by d ** -0.5.
        """
        shape = self.shape
        pages = kv.view(-1, shape.page_size, shape.num_kv_heads, 2, shape.head_dim)
        # Strided views: its kernels take the strides of pages, places and heads as they are.
        self.wrapper.run(q, (pages[..., 0, :], pages[..., 1, :]), out=out)
        return out


class FlashInferPrefill:
    """Planner of prefill steps. Owns what FlashInfer works in, for all layers and steps of one model."""

    def __init__(self, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> None:
        """
        Raises:
            FlashInferError: the package is missing.
        """
        flashinfer = find_flashinfer()
        self._shape = shape
        self._dtype = dtype
        self._on_gpu = device.type == "cuda"
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # ``plan`` writes to pinned memory and leaves it to the stream to copy it: while the copy of one step
        # waits behind the step before, the next step's plan needs memory of its own.
        self._wrappers = [
            _Wrapper(
                flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD"),
                torch.cuda.Event() if self._on_gpu else None,
            )
            for _ in range(_PLANS_AT_ONCE)
        ]
        self._num_plans = 0

    def build(self, page_table: torch.Tensor) -> None:
        """Have the kernels compiled, if they are not in FlashInfer's cache; takes a minute at most.

        Raises:
            FlashInferError: it did not work, for want of a compiler for instance.
        """
        try:
            self.plan(page_table, (0,), (0,), (1,))
        except Exception as error:  # an edge: another project's build, of which anything may fail
            raise not_built(str(self._dtype), error) from error

    def plan(
        self,
        page_table: torch.Tensor,
        slots: tuple[int, ...],
        starts: tuple[int, ...],
        lens: tuple[int, ...],
    ) -> FlashInferPlan:
        """Plan a step of R chunks: lens[r] tokens of slot slots[r] from position starts[r], flattened.

        page_table: [slots, max_pages] int32. Nothing is read back from the device.
        """
        shape = self._shape
        places = chunk_places(page_table, slots, starts, lens, shape.page_size, with_pages=True)
        assert places.page_ids is not None
        total = np.array(starts, dtype=np.int32) + np.array(lens, dtype=np.int32)  # [R] places a row sees
        num_pages = -(-total // shape.page_size)
        held = self._wrappers[self._num_plans % _PLANS_AT_ONCE]
        if held.sent is not None and self._num_plans >= _PLANS_AT_ONCE:
            held.sent.synchronize()  # of the step before the last: it began long ago
        self._num_plans += 1
        held.wrapper.plan(
            self._host(_offsets(np.array(lens, dtype=np.int32))),
            self._host(_offsets(num_pages)),
            places.page_ids,
            self._host(total - (num_pages - 1) * shape.page_size),
            shape.group * shape.num_kv_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            causal=True,
            sm_scale=shape.head_dim**-0.5,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            seq_lens=self._host(total),
            max_token_per_sequence=max(lens),
        )
        if held.sent is not None:
            held.sent.record()
        return FlashInferPlan(shape, places, held.wrapper)

    def _host(self, values: np.ndarray[Any, np.dtype[np.int32]]) -> torch.Tensor:
        """int32 on the host, from where it may be copied while the host goes on."""
        tensor = torch.from_numpy(values)
        return tensor.pin_memory() if self._on_gpu else tensor


def _offsets(lens: np.ndarray[Any, np.dtype[np.int32]]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """[R] -> [R + 1]: where each begins, and where the last one ends."""
    return np.concatenate(([0], lens.cumsum())).astype(np.int32)
