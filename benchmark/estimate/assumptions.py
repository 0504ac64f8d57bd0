"""What the estimate takes for given, and where each number is from. Nothing here was measured by us."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

GB: Final = 1e9


@dataclass(frozen=True, slots=True)
class Card:
    """One of the GPUs."""

    bandwidth: float  # bytes a second, of the data sheet
    memory: float  # bytes
    reserved: float  # of them not for weights and cache: context, activations, graphs


RTX_PRO_6000: Final = Card(bandwidth=1.79e12, memory=96 * GB, reserved=4 * GB)
NUM_RANKS: Final = 8


@dataclass(frozen=True, slots=True)
class Links:
    """How long sums over the ranks take: a start, then bytes over a link of each rank."""

    name: str
    start_s: float
    bandwidth: float  # bytes a second that a rank sends
    one_step: bool  # whether small sums may be sent whole to every other rank

    def sum_s(self, num_bytes: float, ranks: int) -> float:
        twice = 2 * self.start_s + 2 * num_bytes * (ranks - 1) / ranks / self.bandwidth
        if not self.one_step:
            return twice - self.start_s
        return min(twice, self.start_s + num_bytes * (ranks - 1) / self.bandwidth)

    def gather_s(self, num_bytes: float, ranks: int) -> float:
        """Of ``num_bytes`` from each rank to every other."""
        return self.start_s + num_bytes * (ranks - 1) / self.bandwidth


# Pushed: a public report of 4 of these cards has 25 GB/s for stores of all ranks at once (vLLM RFC 56128),
# others 4 to 12 us for a small one-step sum over PCIe, one of them 7.5 us for up to 32 KB on this card.
PUSHED: Final = Links("pushed over PCIe", 8e-6, 25e9, one_step=True)
# NCCL: 24 us for up to 32 KB in the same reports; it takes the links of AMD hosts for 16 GB/s.
NCCL: Final = Links("NCCL over PCIe", 24e-6, 16e9, one_step=False)

ACCEPT_LENGTHS: Final = MappingProxyType({"hard mix": 2.3, "chat (MT-Bench)": 2.7, "maths, code": 3.2})
"""Tokens of a step of 3 drafts: cards of the public drafters for Kimi-K2.5, K2.6 (lightseekorg, NVIDIA)."""

USUAL_SHARE: Final = 0.75
"""Of the bandwidth limit, for whatever no measurement is given of: products and attention alone reach more on
an H200, whole steps of few rows less."""

# One drafter layer with latent attention, as lightseekorg/kimi-k2.5-eagle3-mla has it: a rank's bytes.
HIDDEN, VOCAB, MLP, LATENT, Q_RANK = 7168, 163840, 18432, 576, 1536
_ATTENTION: Final = (12288 * Q_RANK + 16384 * 512 + HIDDEN * 8192) / NUM_RANKS
DRAFT_BYTES: Final = 2 * (
    (Q_RANK + LATENT) * 2 * HIDDEN + _ATTENTION + 3 * HIDDEN * MLP / NUM_RANKS + VOCAB * HIDDEN / NUM_RANKS
)
"""Of one draft forward."""
SYNC_BYTES: Final = 2 * (3 * HIDDEN * HIDDEN / NUM_RANKS + (Q_RANK + LATENT) * 2 * HIDDEN)
"""Of what keeps the drafter's cache exact, in plain steps too."""
DRAFT_LAUNCHES_S: Final = 40e-6
"""A draft forward's launches beside its bytes."""

NUM_DRAFTS: Final = 3

PUBLIC_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
PUBLIC: Final = MappingProxyType(
    {
        1024: (
            (112.5, 91.5), (176, 151), (261, 243), (455, 350), (730, 493), (1104, 859), (1602, 1398),
            (2044, 2165),
        ),
        16384: (
            (99.4, 84.6), (164, 141), (227, 219), (384, 318), (542, 429), (731, 700), (906, 1018),
            (1143, 1398),
        ),
        65536: (
            (99.5, 70.5), (127, 119), (162, 171), (232, 247), (288, 318), (365, 445), (454, 509), (409, 635),
        ),
    }
)  # fmt: skip
"""Tokens a second with and without EAGLE-3 (3 drafts): Kimi-K2.6 int4 on 8 RTX PRO 6000, vLLM, latents in
fp8, TP 8; github.com/voipmonitor/rtx6kpro, contexts 0, 16k and 64k."""
