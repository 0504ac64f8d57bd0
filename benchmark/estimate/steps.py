"""From the bytes of a step, or its time on an H200, to its time on 8 cards that are joined by PCIe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.estimate.assumptions import (
    DRAFT_BYTES,
    DRAFT_LAUNCHES_S,
    NUM_DRAFTS,
    NUM_RANKS,
    SYNC_BYTES,
    USUAL_SHARE,
    Card,
    Links,
)


@dataclass(frozen=True, slots=True)
class RankShape:
    """One rank's share of a model of latent attention and routed experts."""

    num_layers: int
    num_moe_layers: int
    hidden: int
    vocab: int
    num_experts: int
    top_k: int
    every_step_bytes: float  # weights that every step reads
    expert_bytes: float  # of one expert of one layer
    weight_bytes: float  # all, the embedding too
    token_bytes: float  # of the cache

    @staticmethod
    def of(config: Mapping[str, Any], expert_bits: float, ranks: int = NUM_RANKS) -> RankShape:
        """``config``: a config.json's text part; expert_bits: of a routed expert's weight, scales and all."""
        hidden, heads, layers = (
            config["hidden_size"],
            config["num_attention_heads"],
            config["num_hidden_layers"],
        )
        nope, rope, v = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
        q_rank, latent = config["q_lora_rank"], config["kv_lora_rank"]
        whole = hidden * (q_rank + latent + rope) + q_rank + latent + 2 * hidden
        split = heads * ((nope + rope) * q_rank + (nope + v) * latent + v * hidden)
        dense = config["first_k_dense_replace"]
        moe, experts = layers - dense, config["n_routed_experts"]
        inter = config["moe_intermediate_size"]
        vocabulary = config["vocab_size"] * hidden / ranks
        numbers = layers * (whole + split / ranks) + dense * 3 * hidden * config["intermediate_size"] / ranks
        numbers += moe * (experts * hidden + 3 * hidden * inter * config["n_shared_experts"] / ranks)
        numbers += vocabulary + hidden
        every_step = 2 * numbers + moe * experts * 4  # biases of the choice are float32
        expert = 3 * hidden * inter / ranks * expert_bits / 8
        return RankShape(
            layers, moe, hidden, config["vocab_size"], experts, config["num_experts_per_tok"], every_step,
            expert, every_step + moe * experts * expert + 2 * vocabulary, layers * (latent + rope) * 2.0,
        )  # fmt: skip

    def experts_hit(self, tokens: int) -> float:
        """Expected number of different experts of a layer, were every choice random."""
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** tokens)

    def step_bytes(self, batch: int, context: int, queries: int) -> float:
        hit = self.num_moe_layers * self.experts_hit(batch * queries)
        return self.every_step_bytes + hit * self.expert_bytes + batch * context * self.token_bytes


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps of one rank on an H200 (``benchmark/h200/rank_stack.py``)."""

    layers: int
    bandwidth: float  # of copying there
    # (batch, context, queries) -> milliseconds, and those of its bandwidth limit
    steps: Mapping[tuple[int, int, int], tuple[float, float]]

    @staticmethod
    def read(path: Path, model: str) -> Measured:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        stack = next(x for x in lines if x["kind"] == "stack" and x["model"] == model)
        steps = {
            (x["batch"], x["context"], x["queries"]): (x["ms"], x["limit_ms"])
            for x in lines
            if x["kind"] == "step" and x["model"] == model
        }
        return Measured(stack["layers"], stack["bandwidth"], steps)

    def beside_reading(self, batch: int, context: int, queries: int) -> tuple[float, float] | None:
        """The share of the limit that was reached, and the seconds beyond it, of the batches measured on both
        sides, or of the nearest one; None: nothing of this context was."""
        batches = sorted(b for b, c, q in self.steps if (c, q) == (context, queries))
        if not batches:
            return None
        low = max((b for b in batches if b <= batch), default=batches[0])
        high = min((b for b in batches if b >= batch), default=batches[-1])
        part = (batch - low) / (high - low) if high > low else 0.0
        ends = []
        for step in (low, high):
            ms, limit = self.steps[step, context, queries]
            ends.append((limit / ms, (ms - limit) / 1e3))
        (share, beyond), (share_high, beyond_high) = ends
        return share + part * (share_high - share), beyond + part * (beyond_high - beyond)


@dataclass(frozen=True, slots=True)
class Range:
    """Two bounds of an estimate: seconds, or tokens a second."""

    low: float
    high: float

    def plus(self, seconds: float) -> Range:
        return Range(self.low + seconds, self.high + seconds)

    @property
    def middle(self) -> float:
        return (self.low * self.high) ** 0.5


class Estimate:
    def __init__(self, shape: RankShape, card: Card, links: Links, measured: Measured | None) -> None:
        self.shape, self.card, self.links = shape, card, links
        self._measured = measured

    def fits(self, batch: int, context: int, drafter: bool) -> bool:
        """In the cache that is left beside the weights."""
        taken = self.shape.weight_bytes + ((DRAFT_BYTES + SYNC_BYTES) if drafter else 0) + self.card.reserved
        return batch * (context + NUM_DRAFTS + 1) * self.shape.token_bytes <= self.card.memory - taken

    def stack(self, batch: int, context: int, queries: int) -> Range:
        """One rank alone. What an H200 takes beside reading either grows as reading does, or stays."""
        reading = self.shape.step_bytes(batch, context, queries) / self.card.bandwidth
        found = None if self._measured is None else self._measured.beside_reading(batch, context, queries)
        if found is None:
            return Range(reading / USUAL_SHARE, reading / USUAL_SHARE)
        share, beyond = found
        bounds = (reading / share, reading + beyond)
        return Range(min(bounds), max(bounds))

    def together(self, tokens: int) -> float:
        """What the ranks tell each other in a forward of the target: two sums a layer, one of the embedding,
        and the logits."""
        sums = 2 * self.shape.num_layers + 1
        one = self.links.sum_s(tokens * self.shape.hidden * 2, NUM_RANKS)
        return sums * one + self.logits(tokens)

    def logits(self, tokens: int) -> float:
        return self.links.gather_s(tokens * self.shape.vocab * 4 / NUM_RANKS, NUM_RANKS)

    def drafts(self, batch: int, count: int) -> float:
        reading = DRAFT_BYTES / self.card.bandwidth / USUAL_SHARE + DRAFT_LAUNCHES_S
        sums = 2 * self.links.sum_s(batch * self.shape.hidden * 2, NUM_RANKS)
        return count * (reading + sums + self.logits(batch))

    def sync(self, tokens: int) -> float:
        joined = self.links.gather_s(tokens * self.shape.hidden * 2 / NUM_RANKS, NUM_RANKS)
        return SYNC_BYTES / self.card.bandwidth / USUAL_SHARE + joined

    def plain_s(self, batch: int, context: int) -> Range:
        """Of a server that has a drafter."""
        return self.stack(batch, context, 1).plus(self.together(batch) + self.sync(batch))

    def spec_s(self, batch: int, context: int) -> Range:
        tokens = batch * (NUM_DRAFTS + 1)
        other = self.together(tokens) + self.drafts(batch, NUM_DRAFTS) + self.sync(tokens)
        return self.stack(batch, context, NUM_DRAFTS + 1).plus(other)

    def plain_rate(self, batch: int, context: int) -> Range:
        """Tokens a second of all requests."""
        seconds = self.plain_s(batch, context)
        return Range(batch / seconds.high, batch / seconds.low)

    def spec_rate(self, batch: int, context: int, accept_length: float) -> Range:
        seconds = self.spec_s(batch, context)
        return Range(batch * accept_length / seconds.high, batch * accept_length / seconds.low)

    def plain_wins(self, context: int, accept_length: float, most: int) -> tuple[list[range], int]:
        """The numbers of requests at which plain steps give as many tokens a second, of those that fit; and
        the largest that fits, up to ``most``."""
        found: list[range] = []
        largest = 0
        for batch in range(1, most + 1):
            if not self.fits(batch, context, drafter=True):
                break
            largest = batch
            plain, spec = self.plain_rate(batch, context), self.spec_rate(batch, context, accept_length)
            if plain.middle < spec.middle:
                continue
            if found and found[-1].stop == batch:
                found[-1] = range(found[-1].start, batch + 1)
            else:
                found.append(range(batch, batch + 1))
        return found, largest
