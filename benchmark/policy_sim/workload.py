"""Loads for the simulator: when requests arrive, how long they are, and how many drafts they accept."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from benchmark.traces import BURST, DIURNAL, POISSON, Arrival, TraceOptions, arrivals

DECAY: Final = 0.95  # a draft's chance against the one before it
SPREAD: Final = 0.5  # of the logits of two requests of one domain


@dataclass(frozen=True, slots=True)
class Phase:
    """From ``second`` on, tokens of a step with 3 drafts by domain."""

    second: float
    lengths: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SimRequest:
    second: float
    prompt_len: int
    output_len: int
    domain: str
    request_class: str  # what the policy sees of it
    offset: float  # of its logit from its domain's


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    requests: tuple[SimRequest, ...]
    phases: tuple[Phase, ...]  # ascending; the first begins at 0
    cost_factors: Mapping[int, float] = field(default_factory=dict)  # truth / table, by draft length
    noise: float = 0.01  # of a step's time (standard deviation)
    outliers: float = 0.0  # part of the steps that take 10 times as long


def first_chance(length: float, num_steps: int = 3) -> float:
    """p1 with 1 + p1 + p1 p2 + … = ``length``, each chance ``DECAY`` times the one before."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_of(chances(middle, num_steps)) < length else (low, middle)
    return low


def chances(first: float, num_steps: int) -> list[float]:
    return [first * DECAY**depth for depth in range(num_steps)]


def tokens_of(parts: Sequence[float]) -> float:
    total, reached = 1.0, 1.0
    for part in parts:
        reached *= part
        total += reached
    return total


def request_chance(domain_chance: float, offset: float) -> float:
    """p1 of a request whose logit differs from its domain's by ``offset``."""
    safe = min(max(domain_chance, 1e-6), 1 - 1e-6)
    return 1.0 / (1.0 + math.exp(-(math.log(safe / (1 - safe)) + offset)))


def requests_of(trace: Sequence[Arrival], seed: int, greedy: Mapping[str, float]) -> tuple[SimRequest, ...]:
    """``greedy``: the part of a domain's requests that decode greedily; the others sample."""
    source = random.Random(f"acceptance {seed}")
    return tuple(
        SimRequest(
            second=arrival.second,
            prompt_len=arrival.prompt_len or 512,
            output_len=arrival.output_len,
            domain=arrival.domain,
            request_class="greedy" if source.random() < greedy.get(arrival.domain, 0.5) else "sampled",
            offset=source.gauss(0.0, SPREAD),
        )
        for arrival in trace
    )


def _steady(lengths: Mapping[str, float]) -> tuple[Phase, ...]:
    return (Phase(0.0, lengths),)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A named load, for any seed and duration."""

    kind: str
    options: TraceOptions  # period_s: a part of the duration
    phases: tuple[Phase, ...]  # their seconds are parts of the duration
    greedy: Mapping[str, float] = field(default_factory=dict)
    cost_factors: Mapping[int, float] = field(default_factory=dict)
    noise: float = 0.01
    outliers: float = 0.0


_BASE = TraceOptions(rate=12.0, output_len=256, prompt_len=512, spread=0.5, domains=("any",))
_ONE = _steady({"any": 2.0})
_TWO_DOMAINS = replace(_BASE, domains=("coding", "chat"))
_CODING_CHAT = {"coding": 2.5, "chat": 1.5}

RECIPES: Final[Mapping[str, Recipe]] = {
    "poisson-light": Recipe(POISSON, replace(_BASE, rate=3.0), _ONE),
    "poisson": Recipe(POISSON, _BASE, _ONE),
    "burst": Recipe(BURST, replace(_BASE, rate=0.5, peak=249, ramp_s=2.0, period_s=0.5, spread=0.3), _ONE),
    "diurnal": Recipe(DIURNAL, replace(_BASE, rate=0.5, peak_rate=26.0), _ONE),
    "low": Recipe(DIURNAL, replace(_BASE, rate=0.5, peak_rate=22.0), _steady({"any": 1.25})),
    "high": Recipe(DIURNAL, replace(_BASE, rate=0.5, peak_rate=30.0), _steady({"any": 2.8})),
    "mixed": Recipe(
        DIURNAL,
        replace(_TWO_DOMAINS, rate=4.0, peak_rate=24.0),
        _steady(_CODING_CHAT),
        greedy={"coding": 0.8, "chat": 0.2},
    ),
    "drift": Recipe(
        POISSON,
        replace(_BASE, rate=16.0),
        tuple(Phase(n / 6, {"any": length}) for n, length in enumerate((2.5, 1.2, 2.0, 1.1, 2.8, 1.5))),
    ),
    "collapse": Recipe(
        POISSON,
        replace(_BASE, rate=12.0),
        tuple(Phase(n / 3, {"any": length}) for n, length in enumerate((2.5, 1.04, 2.5))),
    ),
    "long": Recipe(POISSON, replace(_BASE, rate=2.5, prompt_len=8000, output_len=512, spread=0.8), _ONE),
    "costs-off": Recipe(
        DIURNAL,
        replace(_BASE, rate=4.0, peak_rate=24.0),
        _ONE,
        cost_factors={0: 1.0, 1: 1.06, 2: 1.12, 3: 1.2},
        noise=0.03,
        outliers=0.01,
    ),
}

_CLASSLESS = replace(_TWO_DOMAINS, rate=24.0)  # nothing that is known of a request tells how much it accepts
_FEW = {"coding": 3.5, "chat": 1.03, "prose": 1.03, "talk": 1.03}
MIXTURES: Final[Mapping[str, Recipe]] = {
    "halves": Recipe(POISSON, _CLASSLESS, _steady({"coding": 2.5, "chat": 1.2})),
    "halves-busy": Recipe(POISSON, replace(_CLASSLESS, rate=40.0), _steady({"coding": 2.5, "chat": 1.2})),
    "coding-chat-busy": Recipe(POISSON, replace(_CLASSLESS, rate=40.0), _steady(_CODING_CHAT)),
    "alike-busy": Recipe(POISSON, replace(_CLASSLESS, rate=40.0), _steady({"coding": 1.8, "chat": 1.8})),
    # No length common to all is worth its time: nobody accepts drafts, then one request in four nearly all.
    "few-busy": Recipe(
        POISSON,
        replace(_CLASSLESS, rate=40.0, domains=("coding", "chat", "prose", "talk")),
        (Phase(0.0, _FEW | {"coding": 1.03}), Phase(1 / 3, _FEW)),
    ),
}
"""For draft lengths of the rows' own."""


def make_workload(name: str, seed: int, seconds: float) -> Workload:
    recipe = {**RECIPES, **MIXTURES}[name]
    options = replace(recipe.options, duration_s=seconds, period_s=recipe.options.period_s * seconds)
    return Workload(
        name=name,
        requests=requests_of(arrivals(recipe.kind, seed, options), seed, recipe.greedy),
        phases=tuple(Phase(phase.second * seconds, phase.lengths) for phase in recipe.phases),
        cost_factors=recipe.cost_factors,
        noise=recipe.noise,
        outliers=recipe.outliers,
    )
