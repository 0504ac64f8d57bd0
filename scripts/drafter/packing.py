"""Pack texts of different lengths into rows of one length, so that every batch has one shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from generate import Text
from head import MAX_STEPS
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    ids: Tensor  # [B, S] int64
    position: Tensor  # [B, S] int64, place in the own text
    place: Tensor  # [B, S] int64, place in the flat text (its last token where padded)
    rows: Tensor  # [R] int64, flat places j in [B * S] whose next token was generated
    wanted: Tensor  # [R] int64, draft id of the target's argmax for token j + 1, or -1


class Corpus:
    """Texts on a device with what the trainer needs per token; the last token is padding."""

    def __init__(self, text: Text, draft_of: Tensor, eos: int):
        device = text.ids.device
        self.length = text.length.cpu().numpy()
        start = torch.cumsum(text.length, 0) - text.length
        owner = torch.repeat_interleave(torch.arange(len(text.length), device=device), text.length)
        pad = torch.zeros(1, dtype=torch.int64, device=device)
        self.ids = torch.cat([text.ids.long(), pad + eos])
        self.owner = torch.cat([owner, pad - 1])
        self.start = start.cpu().numpy()
        place = torch.arange(len(text.ids), device=device)
        local = place - start[owner]
        self.position = torch.cat([local, pad])
        # row j predicts token j+1, which must be generated; MAX_STEPS tokens must precede it
        open_ = (
            (local >= text.prompt_len[owner] - 1) & (local <= text.length[owner] - 2) & (local >= MAX_STEPS)
        )
        self.open_cpu = torch.cat([open_, pad.bool()]).cpu().numpy()
        following = torch.cat([text.best[1:].long(), pad])
        self.wanted = torch.cat([draft_of[following], pad - 1])
        self.pad_place = len(text.ids)

    def pack(self, row_len: int, rng: np.random.Generator | None, spread: int = 64) -> np.ndarray:
        """Places [rows, row_len] of one pass over the texts: best fit among `spread` open rows."""
        order = np.arange(len(self.length)) if rng is None else rng.permutation(len(self.length))
        space = np.full(spread, row_len)
        bins: list[list[int]] = [[] for _ in range(spread)]
        closed: list[list[int]] = []
        for text in order:
            left = space - self.length[text]
            left[left < 0] = row_len + 1
            at = int(left.argmin())
            if left[at] > row_len:
                at = int(space.argmin())
                closed.append(bins[at])
                bins[at], space[at] = [], row_len
            bins[at].append(int(text))
            space[at] -= self.length[text]
        closed += [b for b in bins if b]
        places = np.full((len(closed), row_len), self.pad_place, np.int64)
        for row, texts in enumerate(closed):
            at = 0
            for text in texts:
                size = self.length[text]
                places[row, at : at + size] = np.arange(self.start[text], self.start[text] + size)
                at += size
        return places

    def batch(self, places: np.ndarray) -> Batch:
        """One batch from rows of `pack`; padded tokens count up as one text of their own."""
        device = self.ids.device
        place = to_device(places, device)
        rows = to_device(self.open_cpu[places].reshape(-1).nonzero()[0], device)
        padded = place == self.pad_place
        run = torch.cumsum(padded.long(), 1) - 1
        position = torch.where(padded, run, self.position[place])
        return Batch(self.ids[place], position, place, rows, self.wanted[place.flatten()[rows]])


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy without waiting for the work queued before it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
