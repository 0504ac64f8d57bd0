"""What a step leaves on the device for those who ask for more than ids. Keeping it costs the step nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class StepTrace:
    """R rows of N nodes that put out up to C tokens each; good until the next step is launched."""

    logits: torch.Tensor | None  # [lines, V] as chosen from: rules and masks are in them; None: no row chose
    hidden: torch.Tensor  # [T, H] before the last norm
    tokens: torch.Tensor  # [R, C] int64
    path: torch.Tensor  # [R, C] int64: the node that chose a token; past the count some node
    num_nodes: int  # N
    line_of: torch.Tensor | None = None  # [R, N] int64: a node's line of logits; None: they are in order
    place_of: torch.Tensor | None = None  # [R, N] int64: a node's place in ``hidden``; None: in order

    def lines(self, rows: torch.Tensor) -> torch.Tensor:
        """[W, C] int64: where among the logits the tokens of ``rows`` [W] were chosen."""
        return self._among(self.line_of, rows)

    def places(self, rows: torch.Tensor) -> torch.Tensor:
        """[W, C] int64: the same among the hidden states."""
        return self._among(self.place_of, rows)

    def _among(self, of_nodes: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        path = self.path[rows]
        if of_nodes is None:
            return rows[:, None] * self.num_nodes + path
        return of_nodes[rows].gather(1, path)


@dataclass(frozen=True, slots=True)
class StepDone:
    """A decode step that has been launched."""

    packed: torch.Tensor  # [R, C + 2] int64: tokens, how many are put out, how many of these are valid
    trace: StepTrace

    def lent(self) -> StepDone:
        """Without owning the large tensors. A graph writes at its addresses whoever owns them, and other
        graphs of its pool may have the memory while this one isn't replayed."""
        trace = self.trace
        logits = None if trace.logits is None else unowned(trace.logits)
        return replace(self, trace=replace(trace, logits=logits, hidden=unowned(trace.hidden)))


class _Address:
    """Memory on a GPU, as libraries tell each other of it."""

    def __init__(self, data: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (data, False), "version": 2, "strides": None,
        }  # fmt: skip


def unowned(values: torch.Tensor) -> torch.Tensor:
    """The same memory, which the result doesn't keep. On a CPU, where nothing is captured: itself."""
    if not values.is_cuda or values.numel() == 0:
        return values
    span = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
    there = _Address(values.data_ptr(), span * values.element_size())
    flat = torch.as_tensor(there, device=values.device).view(values.dtype)
    return flat.as_strided(values.shape, values.stride())
