"""What a layer with multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434) hands to its attention.

The cache keeps one *latent* a token: R numbers of which every head's key and value are made by a linear
map, and a short key that all heads share and that alone is turned by the rope. A backend may make the
keys and values (``LatentHeads.expand``: cheap where many queries see the same places), or take the map to
the query's side and attend to the latents themselves (``absorb``, ``values``: what decoding does).

Some models (DeepSeek-V3.2, GLM-5) attend to the ``top_k`` places alone that an *indexer* finds, a small
attention of its own with its own cache of keys; a layer may take over the choice of the one before it.

Shapes: T tokens, nq heads, R latent, n and r dimensions of a key that the rope leaves alone and turns,
v of a value; h heads of an indexer of d dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from sglang.srt.layers.attention.heads import Positions
from sglang.srt.layers.norm import RMSNorm


def in_halves(x: torch.Tensor, rope_dim: int) -> torch.Tensor:
    """x: [..., d], pairs (0, 1), (2, 3), … in the first ``rope_dim`` dimensions -> the first of every pair,
    then the second ones, as ``RopeAngles`` turns them. Queries and keys alike: products stay."""
    turned = x[..., :rope_dim].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return turned if rope_dim == x.shape[-1] else torch.cat((turned, x[..., rope_dim:]), dim=-1)


class LatentHeads:
    """The map from a latent to keys and values (``kv_b_proj``)."""

    def __init__(self, weight: torch.Tensor, key_dim: int) -> None:
        self.weight = weight  # [nq, n + v, R], a head's key first
        self.key_dim = key_dim  # n
        self.weight_bytes = weight.numel() * weight.element_size()

    @property
    def latent_dim(self) -> int:
        return self.weight.shape[2]

    @property
    def value_dim(self) -> int:
        return self.weight.shape[1] - self.key_dim

    def absorb(self, q_nope: torch.Tensor) -> torch.Tensor:
        """[T, nq, n] -> [T, nq, R]: what multiplies a latent as ``q_nope`` multiplies its key."""
        return torch.bmm(q_nope.transpose(0, 1), self.weight[:, : self.key_dim]).transpose(0, 1)

    def values(self, latents: torch.Tensor) -> torch.Tensor:
        """[T, nq, R], weighted sums of latents -> [T, nq, v], those of their values."""
        by_head = self.weight[:, self.key_dim :].transpose(1, 2)  # [nq, R, v]
        return torch.bmm(latents.transpose(0, 1), by_head).transpose(0, 1)

    def expand(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[S, R] -> keys [S, nq, n] and values [S, nq, v]."""
        heads = F.linear(latents, self.weight.flatten(0, 1)).view(len(latents), *self.weight.shape[:2])
        return heads[..., : self.key_dim], heads[..., self.key_dim :]


@dataclass(frozen=True, slots=True)
class IndexProduct:
    """An indexer's part: a place's score is ``sum over heads of weight * relu(q . k)``."""

    q: torch.Tensor  # [T, h, d], turned
    k: torch.Tensor  # [T, d], normed and turned: what the cache keeps
    weights: torch.Tensor  # [T, h] float32 at least, all factors in it
    top_k: int

    def take(self, tokens: torch.Tensor | slice) -> IndexProduct:
        return IndexProduct(self.q[tokens], self.k[tokens], self.weights[tokens], self.top_k)


@dataclass(frozen=True, slots=True)
class LatentProduct:
    """Everything of T tokens in one layer."""

    q_nope: torch.Tensor  # [T, nq, n]
    q_rope: torch.Tensor  # [T, nq, r], turned
    latent: torch.Tensor  # [T, R + r]: the normed latent, then the turned key; what the cache keeps
    heads: LatentHeads
    scale: float  # of the scores, before the softmax
    sparse: bool = False  # attend to the chosen places alone
    index: IndexProduct | None = None  # chooses; None with ``sparse``: as the last layer that chose

    def take(self, tokens: torch.Tensor | slice) -> LatentProduct:
        """Some of the tokens."""
        return LatentProduct(
            self.q_nope[tokens],
            self.q_rope[tokens],
            self.latent[tokens],
            self.heads,
            self.scale,
            self.sparse,
            None if self.index is None else self.index.take(tokens),
        )

    def absorbed(self) -> torch.Tensor:
        """[T, nq, R + r]: queries that attend to latents as if there were one key head."""
        return torch.cat((self.heads.absorb(self.q_nope), self.q_rope), dim=-1)


@dataclass(frozen=True, slots=True)
class RawLatents:
    """T tokens in one layer before the latent's norm and the rope, for which a backend may have a kernel;
    ``made`` is for the others."""

    q: torch.Tensor  # [T, nq, n + r]; [0, nq, n + r]: there is only something for the cache
    down: torch.Tensor  # [T, R + r], rows may lie apart; [0, R + r]: nothing goes to the cache
    norm: RMSNorm  # of the latent
    positions: Positions
    interleaved: bool  # pairs to be turned lie side by side
    heads: LatentHeads
    scale: float  # as in ``LatentProduct``, and so are the last two
    sparse: bool = False
    index: IndexProduct | None = None

    @property
    def latent_dim(self) -> int:
        """R"""
        return self.heads.latent_dim

    def take(self, tokens: slice, positions: Positions) -> RawLatents:
        """Some of the tokens, whose positions these are."""
        index = None if self.index is None else self.index.take(tokens)
        return replace(self, q=self.q[tokens], down=self.down[tokens], positions=positions, index=index)

    def made(self) -> LatentProduct:
        q_nope, q_rope = self.q.split((self.heads.key_dim, self.q.shape[2] - self.heads.key_dim), dim=-1)
        return LatentProduct(
            q_nope,
            self._turn(q_rope) if len(q_rope) else q_rope,
            self.entries() if len(self.down) else self.down,
            self.heads,
            self.scale,
            self.sparse,
            self.index,
        )

    def entries(self) -> torch.Tensor:
        """[T, R + r]: what the cache keeps."""
        latent, k_rope = self.down.split((self.latent_dim, self.down.shape[1] - self.latent_dim), dim=-1)
        return torch.cat((self.norm(latent), self._turn(k_rope[:, None])[:, 0]), dim=-1)

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, heads, r]."""
        return self.positions.angles.rotate(in_halves(x, x.shape[-1]) if self.interleaved else x)
