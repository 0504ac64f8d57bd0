"""Simulated acceptance: how long a speculative step's output is, whatever the drafter guesses.

For benchmarks with random weights (SGLang's ``SGLANG_SIMULATE_ACC_LEN``, ``_METHOD`` and ``_TOKEN_MODE``;
the method "geometric" is ours: every draft is as likely as the one before it, which a trained drafter is
nearer to). The length is that of a step with all drafts; a step with fewer takes as many of the same ones.
Drafts and choices are made as always; then, before ``accept``, the nodes' own tokens are rewritten so
that just the wanted number of drafts equals the choice at their parent. What is put out is no longer
the model's text. Everything happens on the device, from tables made at the start: a CUDA graph
captures it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch

from sglang.srt.model_executor.step_plan import SpecShape

logger = logging.getLogger(__name__)

METHODS: Final = ("match-expected", "multinomial", "geometric")
TOKEN_MODES: Final = ("fixed", "real-draft-token")
FIXED_TOKEN: Final = 100
NO_TOKEN: Final = -1  # equal to no choice

_TABLE_SIZE: Final = 2**14  # draws; a power of 2
_SLOT_STRIDE: Final = 10_127  # keeps the draws of two slots apart; about the table's golden section
_GOLDEN: Final = (math.sqrt(5) - 1) / 2


class SimulationError(ValueError):
    """An environment variable that can't be used; one line for the user."""


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    length: float  # mean tokens of a speculative step; clamped to 1 … drafts + 1
    method: str = METHODS[0]
    token_mode: str = TOKEN_MODES[0]
    others: tuple[float, ...] = ()  # the slots after the first have these and ``length`` in turn

    @staticmethod
    def from_environment(environ: Mapping[str, str]) -> SimulationSettings | None:
        """None where ``SGLANG_SIMULATE_ACC_LEN`` is not given or not positive.

        Raises:
            SimulationError: a value that says nothing.
        """
        given = environ.get("SGLANG_SIMULATE_ACC_LEN", "-1")
        try:
            lengths = tuple(float(part) for part in given.split(","))
        except ValueError:
            lengths = (math.nan,)
        if not all(map(math.isfinite, lengths)):
            raise SimulationError(
                f"SGLANG_SIMULATE_ACC_LEN needs a number, got {given!r}; numbers with commas between them are"
                " for slots in turn"
            )
        if min(lengths) <= 0:
            return None
        method = _one_of(environ, "SGLANG_SIMULATE_ACC_METHOD", METHODS)
        mode = _one_of(environ, "SGLANG_SIMULATE_ACC_TOKEN_MODE", TOKEN_MODES)
        return SimulationSettings(lengths[0], method, mode, lengths[1:])

    @property
    def lengths(self) -> tuple[float, ...]:
        """That of slot s is number s modulo their number."""
        return (self.length, *self.others)


class SimulatedAcceptance:
    """``rewrite`` goes between the choice and ``accept``."""

    def __init__(self, settings: SimulationSettings, num_steps: int, device: torch.device | str) -> None:
        self._settings = settings
        self._num_steps = num_steps
        self._one_draw_a_step = settings.method == "match-expected"
        self._fixed = settings.token_mode == "fixed"
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)  # [1] speculative steps so far
        self.survivals = _survivals(
            settings, num_steps
        )  # of each length: P(draft j is taken) for j = 1, 2, …
        # [lengths * draws, num_steps] bool
        self._misses = _miss_tables(settings.method, self.survivals).to(device)

    @property
    def survival(self) -> tuple[float, ...]:
        """Of the first length."""
        return self.survivals[0]

    def set_length(self, *lengths: float) -> None:
        """Other means, as many as before, or one for all slots.

        The table is filled in place, so captured graphs go by it. Between two steps only.
        """
        count = len(self.survivals)
        lengths = lengths * count if len(lengths) == 1 else lengths
        assert len(lengths) == count, f"{len(lengths)} lengths, there were {count}"
        self._settings = replace(self._settings, length=lengths[0], others=lengths[1:])
        self.survivals = _survivals(self._settings, self._num_steps)
        self._misses.copy_(_miss_tables(self._settings.method, self.survivals))
        if self._misses.is_cuda:  # steps are on a stream of their own
            torch.cuda.synchronize(self._misses.device)

    def rewrite(
        self,
        tokens: torch.Tensor,  # [R, N] int64 nodes' own tokens; written
        choice: torch.Tensor,  # [R, N] int64 the target's choice after each node; written
        root: torch.Tensor,  # [R] int64 position of the root
        slots: torch.Tensor,  # [R]
        parents: torch.Tensor | None = None,  # [R, N] int64 of a tree; None: a chain
    ) -> None:
        """Draw how many drafts are taken, and make them the only ones that equal their parent's choice.

        With "fixed" every token put out is ``FIXED_TOKEN``, with "real-draft-token" the drafts taken and
        then the target's choice. A step without drafts is left alone.
        """
        num_drafts = tokens.shape[1] - 1
        if num_drafts == 0:
            return
        if parents is not None:
            assert self._fixed, "real-draft-token is for chains"
            choice.fill_(FIXED_TOKEN)
            self._confirm_first_children(tokens, parents, self._draw(root, slots, self._num_steps))
            return
        misses, drafts = self._draw(root, slots, num_drafts), tokens[:, 1:]
        if self._fixed:
            choice.fill_(FIXED_TOKEN)
            drafts.fill_(FIXED_TOKEN)
        else:
            before = choice[:, :-1]
            before.copy_(torch.where(misses, before, drafts))
        drafts.masked_fill_(misses, NO_TOKEN)

    def _draw(self, root: torch.Tensor, slots: torch.Tensor, num_drafts: int) -> torch.Tensor:
        """[R, k] bool (or [1, k], for all rows): does this draft fail?

        The draw is that of the step, or a function of (root, slot) alone. A request never meets an entry
        twice within a table's length, so what it draws is not tied to where its own draws led it.
        """
        once = self._one_draw_a_step
        index = self._counter.add_(1) if once else torch.add(root, slots, alpha=_SLOT_STRIDE)
        index = index & (_TABLE_SIZE - 1)
        if len(self.survivals) > 1:
            index = torch.add(index, slots % len(self.survivals), alpha=_TABLE_SIZE)
        return self._misses.index_select(0, index)[:, :num_drafts]

    def _confirm_first_children(
        self, tokens: torch.Tensor, parents: torch.Tensor, misses: torch.Tensor
    ) -> None:
        """Down the path of first children; where it ends no further draft can be taken."""
        num_rows, num_nodes = tokens.shape
        values = torch.full_like(misses, FIXED_TOKEN, dtype=torch.int64).masked_fill_(misses, NO_TOKEN)
        values = values.expand(num_rows, -1)
        tokens.fill_(NO_TOKEN)
        node = torch.zeros_like(tokens[:, :1])
        for level in range(self._num_steps):
            children = parents == node  # [R, N]
            # Without a child this is the root, whose own token nobody compares.
            first = children.to(torch.int8).argmax(dim=1, keepdim=True)
            tokens.scatter_(1, first, values[:, level : level + 1])
            node = torch.where(children.any(dim=1, keepdim=True), first, num_nodes)


def simulated_acceptance(
    environ: Mapping[str, str], spec: SpecShape | None, vocab_size: int, device: torch.device | str
) -> SimulatedAcceptance | None:
    """As the environment says; None where it says nothing, or where there is no drafter.

    Raises:
        SimulationError: one line for the user.
    """
    settings = SimulationSettings.from_environment(environ)
    if settings is None:
        return None
    if spec is None:
        logger.warning("SGLANG_SIMULATE_ACC_LEN changes nothing: there is no drafter")
        return None
    if spec.topk > 1 and settings.token_mode != "fixed":
        raise SimulationError(
            f"SGLANG_SIMULATE_ACC_TOKEN_MODE={settings.token_mode} needs --speculative-eagle-topk 1,"
            f" got {spec.topk}: use fixed"
        )
    if settings.token_mode == "fixed" and vocab_size <= FIXED_TOKEN:
        raise SimulationError(
            f"SGLANG_SIMULATE_ACC_TOKEN_MODE=fixed puts out token {FIXED_TOKEN}, but the vocabulary has"
            f" {vocab_size} ids"
        )
    logger.warning(
        "acceptance is SIMULATED: %s tokens a speculative step (%s, %s); the text means nothing",
        ", ".join(f"{min(max(length, 1.0), spec.num_steps + 1):g}" for length in settings.lengths),
        settings.method, settings.token_mode,
    )  # fmt: skip
    return SimulatedAcceptance(settings, spec.num_steps, device)


def _one_of(environ: Mapping[str, str], name: str, known: tuple[str, ...]) -> str:
    given = environ.get(name, known[0])
    if given not in known:
        raise SimulationError(f"{name} is one of {', '.join(known)}; got {given!r}")
    return given


def _survivals(settings: SimulationSettings, num_drafts: int) -> tuple[tuple[float, ...], ...]:
    """Of each length P(m >= j) for j = 1 … num_drafts, m being the number of drafts taken of so many."""
    find = {"match-expected": _floor_or_ceil, "multinomial": _rounded_normal, "geometric": _geometric}
    means = [min(max(length, 1.0), num_drafts + 1.0) - 1.0 for length in settings.lengths]
    return tuple(tuple(find[settings.method](mean, num_drafts)) for mean in means)


def _miss_tables(method: str, survivals: tuple[tuple[float, ...], ...]) -> torch.Tensor:
    """[lengths * _TABLE_SIZE, num_drafts] bool, on the CPU."""
    return torch.cat([_miss_table(method, survival) for survival in survivals])


def _miss_table(method: str, survival: tuple[float, ...]) -> torch.Tensor:
    """[_TABLE_SIZE, num_drafts] bool, on the CPU. Draft j is taken where the draw u is below P(m >= j).

    For one draw a step, u runs through multiples of the golden section, so that also a short run has
    the mean asked for; else u are shuffled, evenly spread values.
    """
    places = torch.arange(_TABLE_SIZE, dtype=torch.float64)
    if method == "match-expected":
        u = (places * _GOLDEN).frac()
    else:
        order = torch.randperm(_TABLE_SIZE, generator=torch.Generator().manual_seed(0))
        u = (places[order] + 0.5) / _TABLE_SIZE
    return u[:, None] >= torch.tensor(survival, dtype=torch.float64)


def _floor_or_ceil(mean: float, num_drafts: int) -> list[float]:
    """m is one of the two whole numbers around the mean."""
    return [min(max(mean - j, 0.0), 1.0) for j in range(num_drafts)]


def _rounded_normal(mean: float, num_drafts: int) -> list[float]:
    """m is a normal of standard deviation 1, rounded and cut to 0 … num_drafts.

    Cutting moves the mean, so the normal's centre is placed where the mean comes out as asked.
    """

    def survival(centre: float) -> list[float]:
        return [0.5 * math.erfc((j - 0.5 - centre) / math.sqrt(2)) for j in range(1, num_drafts + 1)]

    return survival(_solve(lambda x: sum(survival(x)), mean, -40.0, num_drafts + 40.0))


def _geometric(mean: float, num_drafts: int) -> list[float]:
    """Each draft is taken with the same probability where those before it are."""

    def survival(rate: float) -> list[float]:
        return [rate**j for j in range(1, num_drafts + 1)]

    return survival(_solve(lambda x: sum(survival(x)), mean, 0.0, 1.0))


def _solve(rising: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Where a function that rises is as wanted."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return (low + high) / 2
