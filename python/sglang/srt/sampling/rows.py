"""The rows whose tokens are to be chosen, and what was chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.model_executor.step_plan import StepMidInput
from sglang.srt.utils.upload import upload, upload_array


@dataclass(frozen=True, slots=True)
class ChoiceRows:
    """R rows of N nodes each. Node 0 is the row's last known token, node j > 0 a draft.

    The choice at a node is the token that follows it, so its history is the row's known ids and
    the drafts on the path from the root to the node (the node included).
    """

    slots_cpu: tuple[int, ...]  # length R
    slots: torch.Tensor  # [R] int64
    root_index: torch.Tensor  # [R] int64: index in the sequence of the root's token
    tokens: torch.Tensor  # [R, N] int64
    depths: torch.Tensor  # [R, N] int64
    mask: torch.Tensor | None = None  # [R, N, N] bool ancestor-or-self; None: a chain
    num_depths: int = 0  # host: with a mask, all depths are below this

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]

    def index(self) -> torch.Tensor:
        """[R, N] int64: index in the sequence of the token chosen at each node."""
        return self.root_index[:, None] + self.depths + 1

    def ancestors(self) -> torch.Tensor:
        """[R, N, N] bool: the drafts emitted before the choice at a node (the root is not one)."""
        nodes = self.num_nodes
        if self.mask is None:
            chain = torch.ones(nodes, nodes, dtype=torch.bool, device=self.tokens.device).tril_()
            mask = chain.expand(len(self.slots_cpu), nodes, nodes).clone()
        else:
            mask = self.mask.clone()
        mask[:, :, 0] = False
        return mask

    def pick(self, wanted: Callable[[int], bool]) -> RowPick | None:
        """The rows whose slot is wanted (asked on the host), or None if there are none."""
        rows_cpu = [row for row, slot in enumerate(self.slots_cpu) if wanted(slot)]
        if not rows_cpu:
            return None
        if len(rows_cpu) == len(self.slots_cpu):
            return RowPick(None, self)
        return RowPick(upload(rows_cpu, torch.int64, self.slots.device), self.take(rows_cpu))

    def take(self, rows_cpu: Sequence[int]) -> ChoiceRows:
        """Some of the rows, in the order given."""
        rows = upload(rows_cpu, torch.int64, self.slots.device)
        return ChoiceRows(
            slots_cpu=tuple(self.slots_cpu[row] for row in rows_cpu),
            slots=self.slots[rows],
            root_index=self.root_index[rows],
            tokens=self.tokens[rows],
            depths=self.depths[rows],
            mask=None if self.mask is None else self.mask[rows],
            num_depths=self.num_depths,
        )


@dataclass(frozen=True, slots=True)
class RowPick:
    """Some rows of a batch. Work is done on a copy of them, or in place if they are all."""

    index: torch.Tensor | None  # [R'] int64 rows of the batch; None: all
    rows: ChoiceRows  # the picked rows

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """[R, …] -> [R', …]; the tensor itself if every row is picked."""
        return values if self.index is None else values[self.index]

    def put(self, values: torch.Tensor, part: torch.Tensor) -> None:
        """Write the picked rows back."""
        if self.index is not None:
            values[self.index] = part
        elif part is not values:
            values.copy_(part)


@dataclass(frozen=True, slots=True)
class ChoiceMasks:
    """Ids that G of the rows may choose; the other rows may choose any."""

    rows_cpu: tuple[int, ...]  # length G, ascending
    bits: torch.Tensor  # [G, N, words] int32: bit t % 32 of word t // 32 allows id t

    def take(self, rows_cpu: Sequence[int]) -> ChoiceMasks | None:
        """Of some of the rows, counted among these; None if none of them has a mask."""
        places = [(new, self.rows_cpu.index(row)) for new, row in enumerate(rows_cpu) if row in self.rows_cpu]
        if not places:
            return None
        kept = upload([place for _, place in places], torch.int64, self.bits.device)
        return ChoiceMasks(tuple(new for new, _ in places), self.bits[kept])

    def allowed(self, vocab_size: int) -> torch.Tensor:
        """[G, N, V] bool."""
        shifts = torch.arange(32, dtype=torch.int32, device=self.bits.device)
        bits = (self.bits[..., None] >> shifts) & 1  # [G, N, words, 32]
        return bits.flatten(-2)[..., :vocab_size].bool()


def choice_masks(masks: StepMidInput, device: torch.device) -> ChoiceMasks:
    """As the host has made them."""
    bits = upload_array(mask_words(masks), device)
    return ChoiceMasks(masks.rows, bits.view(len(masks.rows), masks.num_nodes, -1))


def mask_words(masks: StepMidInput) -> npt.NDArray[np.int32]:
    return np.frombuffer(masks.masks, np.int32)


@dataclass(frozen=True, slots=True)
class Choice:
    tokens: torch.Tensor  # [R, N] int64
    faulty: torch.Tensor  # [R, N] bool: the logits were not finite; the token is 0
