"""A draft layer's forward inside a device step: what goes into it, however the layer is made.

An EAGLE-3 layer reads pairs, which a kernel makes; any other draft model makes its own input out of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sgl_kernel.speculation.inputs.ops import Keep, PairWeights, pair_inputs
from sglang.srt.layers.attention.base import LayerAttention, Product
from sglang.srt.layers.attention.heads import Positions
from sglang.srt.model_executor.step_plan import PAD_SLOT
from sglang.srt.models.draft_model import DraftModel
from sglang.srt.models.eagle3 import Eagle3Model


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """T = R * C tokens with the hidden states they are read with."""

    ids: torch.Tensor  # [R, C] int64, columns adjacent; [slots] with ``slots``
    hidden: torch.Tensor  # [R * N, H]; [slots, H] with ``slots``
    nodes: torch.Tensor | None = None  # [R, C] int64: which of a row's N hidden states; None: N = C, its own
    slots: torch.Tensor | None = None  # [R] int64: ids and hidden states are a slot's, and C is 1

    @property
    def shape(self) -> tuple[int, int]:
        """T, H"""
        num_tokens = self.ids.numel() if self.slots is None else self.slots.shape[0]
        return num_tokens, self.hidden.shape[1]

    def gathered(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[T] int64 and [T, H]."""
        if self.slots is not None:
            return self.ids[self.slots], self.hidden[self.slots]
        if self.nodes is None:
            return self.ids.reshape(-1), self.hidden
        by_row = self.hidden.view(self.ids.shape[0], -1, self.hidden.shape[1])
        wanted = self.nodes[:, :, None].expand(-1, -1, by_row.shape[2])
        return self.ids.reshape(-1), by_row.gather(1, wanted).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Where T tokens of R rows are, T a multiple of R."""

    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [R] int64; PAD_SLOT for padding
    pdl: bool  # launches overlap with the kernel ahead

    @property
    def live(self) -> torch.Tensor:
        """[T] bool: not padding."""
        live = self.slots != PAD_SLOT
        each = self.positions.shape[0] // self.slots.shape[0]
        return live if each == 1 else live[:, None].expand(-1, each).reshape(-1)


class DraftForward(Protocol):
    def layer(
        self, inputs: DraftInputs, tokens: DraftTokens, attn: LayerAttention, write: bool
    ) -> torch.Tensor:
        """-> [T, H]. Hidden states that are neither a slot's nor picked are used up."""
        ...

    def entries(self, inputs: DraftInputs, keep: Keep | None, positions: Positions, pdl: bool) -> Product:
        """What of it goes to the cache, and nothing else; hidden states are features here."""
        ...


def draft_forward(model: DraftModel) -> DraftForward:
    """Pairs are made of whole rows of an embedding, which a model split over ranks does not have."""
    if isinstance(model, Eagle3Model) and model.tp.size == 1:
        return PairForward(model)
    return TensorForward(model)


class PairForward:
    """Implements ``DraftForward``: one launch for all that is before the layer's first product."""

    def __init__(self, model: Eagle3Model) -> None:
        self._model = model
        embed, hidden = model.embed_norm, model.hidden_norm
        self._weights = PairWeights(model.embed.weight, embed.weight, hidden.weight, embed.eps, hidden.eps)

    def layer(
        self, inputs: DraftInputs, tokens: DraftTokens, attn: LayerAttention, write: bool
    ) -> torch.Tensor:
        hidden, pdl = inputs.hidden, tokens.pdl
        if inputs.slots is not None or inputs.nodes is not None:
            hidden = hidden.new_empty(inputs.shape)
            pairs = self._pairs(inputs, None, hidden, pdl)
        else:
            pairs = self._pairs(inputs, None, None, pdl)
        return self._model.layer_of_pairs(pairs, hidden, tokens.positions, attn, write)

    def entries(self, inputs: DraftInputs, keep: Keep | None, positions: Positions, pdl: bool) -> Product:
        return self._model.attention.entries(self._pairs(inputs, keep, None, pdl), positions)

    def _pairs(
        self, inputs: DraftInputs, keep: Keep | None, hidden: torch.Tensor | None, pdl: bool
    ) -> torch.Tensor:
        """[T, 2 * H]; ``hidden`` gets the hidden states themselves."""
        num_tokens, size = inputs.shape
        return pair_inputs(
            inputs.ids,
            inputs.hidden,
            self._weights,
            inputs.hidden.new_empty(num_tokens, 2 * size),
            nodes=inputs.nodes,
            slots=inputs.slots,
            keep=keep,
            hidden=hidden,
            pdl=pdl,
        )


class TensorForward:
    """Implements ``DraftForward`` for any draft model."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model

    def layer(
        self, inputs: DraftInputs, tokens: DraftTokens, attn: LayerAttention, write: bool
    ) -> torch.Tensor:
        ids, hidden = inputs.gathered()
        live = None if self._model.config.moe is None else tokens.live
        return self._model.layer(ids, hidden, tokens.positions, attn, write, live)

    def entries(self, inputs: DraftInputs, keep: Keep | None, positions: Positions, pdl: bool) -> Product:
        ids, features = inputs.gathered()
        if keep is not None:
            _keep_last(features.view(*inputs.ids.shape, -1), keep)
        return self._model.entries(ids, features, positions)


def _keep_last(features: torch.Tensor, keep: Keep) -> None:
    """features: [R, C, H]; the one of each row's last counted column becomes its slot's."""
    last = (keep.counts - 1).clamp_(min=0)[:, None, None].expand(-1, 1, features.shape[2])
    of_rows, held = features.gather(1, last)[:, 0], keep.features[keep.slots]
    real = (keep.slots != keep.pad_slot)[:, None]
    keep.features[keep.slots] = torch.where(real, of_rows, held)  # the pad slot's is put back
