"""What a drafter's worker asks of a draft model of one layer, whatever its attention and its input are.

Row t reads the token x_{t+1} and a hidden state: the target's feature g_t, or within a step, where the
target has not been yet, what the layer itself gave for the row before.
"""

from __future__ import annotations

from typing import Protocol

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.tensor_parallel import TensorParallel
from sglang.srt.layers.attention.base import LayerAttention, Product
from sglang.srt.layers.attention.heads import Positions
from sglang.srt.layers.linear import Linear
from sglang.srt.layers.norm import RMSNorm
from sglang.srt.layers.rope import Rope
from sglang.srt.layers.stream import Stream
from sglang.srt.mem_cache.pool import CacheShape, KVPool


class DraftModel(Protocol):
    """Shapes: T tokens, H size of a feature, Vd draft vocabulary."""

    config: ModelConfig
    tp: TensorParallel
    rope: Rope
    aux_layers: tuple[int, ...]
    """The target's layers whose *input* it reads; their number stands for the output of the last one."""

    kv_shape: CacheShape
    feature_size: int  # H
    target_ids: torch.Tensor  # [Vd] int64: the target's id of every draft id

    @property
    def weight_bytes(self) -> int:
        """Bytes beside what is the target's."""
        ...

    def linears(self) -> list[Linear]:
        """All of them that are the drafter's own."""
        ...

    def feature(self, aux: torch.Tensor) -> torch.Tensor:
        """[T, len(aux_layers) * H_target] -> g [T, H]."""
        ...

    def write(
        self,
        pool: KVPool,
        places: torch.Tensor,  # [T] int64
        next_ids: torch.Tensor,  # [T] int64: x_{t+1}
        features: torch.Tensor,  # [T, H]: g_t
        positions: torch.Tensor,  # [T] int64: t
    ) -> None:
        """What the layer leaves in its cache for these pairs, and nothing else of the layer."""
        ...

    def entries(
        self,
        next_ids: torch.Tensor,  # [T] int64
        features: torch.Tensor,  # [T, H]
        positions: Positions,
    ) -> Product:
        """The same as a product without queries, for a backend that writes it."""
        ...

    def layer(
        self,
        embed_ids: torch.Tensor,  # [T] int64, ids of the target's vocabulary
        hidden: torch.Tensor,  # [T, H]: used up
        positions: torch.Tensor,  # [T] int64
        attn: LayerAttention,
        write: bool,
        live: torch.Tensor | None = None,  # [T] bool; see ``Positions``
    ) -> torch.Tensor:
        """The whole layer -> [T, H], the next forward's hidden state.

        ``write`` False: the cache holds these pairs already (``attn`` is of Block.NONE).
        """
        ...

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """output: of ``layer`` -> [T, Vd] float32 (float64 in a float64 model)."""
        ...


class DraftAttention(Protocol):
    """The attention block of a draft model's layer, which is layer 0 of its pool."""

    @property
    def shape(self) -> CacheShape:
        """What one such layer keeps of a token."""
        ...

    @property
    def weight_bytes(self) -> int: ...

    def linears(self) -> list[Linear]: ...

    def write(self, pool: KVPool, places: torch.Tensor, x: torch.Tensor, positions: Positions) -> None:
        """Only fill the cache. places: [T] int64; x: [T, in_features], normed."""
        ...

    def entries(self, x: torch.Tensor, positions: Positions) -> Product:
        """What ``write`` writes as a product without queries, for a backend that writes it."""
        ...

    def __call__(
        self,
        x: torch.Tensor,  # [T, in_features], normed
        residual: torch.Tensor,  # [T, H], used up
        positions: Positions,
        attn: LayerAttention,
        write: bool,
        *,
        then: RMSNorm | None = None,
    ) -> Stream:
        """The attention of ``x`` added to the residual stream. ``then``: see ``Stream``.

        ``write`` False: the cache holds these tokens already (``attn`` is of Block.NONE).
        """
        ...
