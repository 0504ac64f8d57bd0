"""The matrix: every feature, in every mode, greedy and sampled, whole and streamed, alone and with others.

The answer is the one that a server without a drafter gives to the request alone, not streamed: ids, texts,
finish reasons, calls, what is told beside them to 1e-9. Everything from the HTTP application to the model is
the real thing, in one process. The ordinary run takes a part that has every feature in a mode with a drafter,
and every two values of two axes together; the whole: ``make test-long``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

import httpx2
import pytest
from helpers.features import CHOICES, FEATURES, Feature, differs
from helpers.whole_server import Answer, WholeServer, answers_of, plainly, speculatively, switching

MODES = {
    "plain": (plainly, None),
    "speculative": (speculatively, (3, 1, 4)),
    "switching": (switching(), (3, 1, 4)),
    "speculative tree": (speculatively, (2, 4, 16)),
    "switching tree": (switching(), (2, 4, 16)),
}
ORDINARY_MODES = ("plain", "speculative", "switching")
NAMES = tuple(feature.name for feature in FEATURES)
BY_NAME = {feature.name: feature for feature in FEATURES}
BARE = BY_NAME["bare"]
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Cell:
    feature: str
    mode: str
    choice: str
    streamed: bool
    mixed: bool  # in a batch with all features

    def __str__(self) -> str:
        how = ("streamed" if self.streamed else "whole", "mixed" if self.mixed else "alone")
        return "-".join((self.feature, self.mode, self.choice, *how))


def is_ordinary(cell: Cell) -> bool:
    """Each feature in a batch of one of the modes with a drafter, in turn; a few in a plain batch, and some
    alone in the other mode with a drafter. Greedy or sampled, streamed or not: in turn."""
    at = NAMES.index(cell.feature)
    if cell.choice != ordinary_choice(cell.feature) or cell.streamed != bool((at // 4 + cell.mixed) % 2):
        return False
    drafting = ("speculative", "switching")[at // 2 % 2]
    if cell.mixed:
        return cell.mode == drafting or (cell.mode == "plain" and at % 7 == 0)
    return cell.mode in ORDINARY_MODES[1:] and cell.mode != drafting and at // 2 % 8 in (0, 3)


def ordinary_choice(feature: str) -> str:
    choices = BY_NAME[feature].choices
    return choices[NAMES.index(feature) % len(choices)]


CELLS = [Cell(*values) for values in product(NAMES, MODES, CHOICES, (False, True), (False, True))]


@dataclass
class Matrix:
    """Servers, and answers that several cells share; made when first asked for."""

    servers: dict[str, WholeServer] = field(default_factory=dict)
    references: dict[tuple[str, str], list[Answer]] = field(default_factory=dict)
    batches: dict[tuple[Any, ...], dict[str, httpx2.Response]] = field(default_factory=dict)

    def server(self, mode: str) -> WholeServer:
        if mode not in self.servers:
            policy, shape = MODES[mode]
            grammars = self.servers["plain"].grammars if self.servers else None
            self.servers[mode] = WholeServer(policy, shape, grammars)
        return self.servers[mode]

    def body(self, feature: Feature, choice: str, streamed: bool) -> dict[str, Any]:
        bare = {} if feature is BARE else self.reference("bare", choice)[0]
        return feature.body(bare, choice, streamed)

    def reference(self, name: str, choice: str) -> list[Answer]:
        """Plain, whole, alone."""
        if (name, choice) not in self.references:
            self.references[name, choice] = self.alone(BY_NAME[name], "plain", choice, False)
        return self.references[name, choice]

    def alone(self, feature: Feature, mode: str, choice: str, streamed: bool) -> list[Answer]:
        server = self.server(mode)
        (response,) = server.ask([(feature.path, self.body(feature, choice, streamed))])
        server.check_end()
        return answers_of(feature.path, streamed, response)

    def mixed(self, cell: Cell, is_long: bool) -> list[Answer]:
        """``is_long``: every request of the batch is greedy or sampled, streamed or not, as the cell is."""
        key = (cell.mode, cell.choice, cell.streamed) if is_long else (cell.mode,)
        if key not in self.batches:
            self.batches[key] = self._batch(cell, is_long)
        response = self.batches[key][cell.feature]
        return answers_of(BY_NAME[cell.feature].path, cell.streamed, response)

    def _batch(self, cell: Cell, is_long: bool) -> dict[str, httpx2.Response]:
        cells = [
            other for other in CELLS
            if other.mode == cell.mode and other.mixed
            and (is_ordinary(other) if not is_long else
                 (other.choice, other.streamed) == (cell.choice, cell.streamed))
        ]  # fmt: skip
        server = self.server(cell.mode)
        features = [BY_NAME[other.feature] for other in cells]
        calls = [
            (feature.path, self.body(feature, other.choice, other.streamed))
            for feature, other in zip(features, cells, strict=True)
        ]
        responses = server.ask(calls)
        server.check_end()
        return {other.feature: response for other, response in zip(cells, responses, strict=True)}


@pytest.fixture(scope="module")
def matrix() -> Iterator[Matrix]:
    made = Matrix()
    made.server("plain")
    yield made
    for server in made.servers.values():
        server.close()


def check_same(mine: Any, theirs: Any, where: str) -> None:
    """Numbers to 1e-9, everything else exactly."""
    if isinstance(theirs, float) and isinstance(mine, float):
        assert mine == pytest.approx(theirs, abs=TOLERANCE, rel=TOLERANCE), where
    elif isinstance(theirs, dict):
        assert mine.keys() == theirs.keys(), where
        for name, value in theirs.items():
            check_same(mine[name], value, f"{where}.{name}")
    elif isinstance(theirs, list):
        assert len(mine) == len(theirs), f"{where}: {mine} instead of {theirs}"
        for at, value in enumerate(theirs):
            check_same(mine[at], value, f"{where}[{at}]")
    else:
        assert mine == theirs, where


def params(ordinary: bool) -> list[Any]:
    return [pytest.param(cell, id=str(cell)) for cell in CELLS if is_ordinary(cell) == ordinary]


@pytest.mark.parametrize("cell", params(ordinary=True))
def test_the_same_in_every_mode(matrix: Matrix, cell: Cell) -> None:
    check_cell(matrix, cell, is_long=False)


@pytest.mark.long
@pytest.mark.parametrize("cell", params(ordinary=False))
def test_the_same_in_every_mode_whole_matrix(matrix: Matrix, cell: Cell) -> None:
    check_cell(matrix, cell, is_long=True)


def check_cell(matrix: Matrix, cell: Cell, is_long: bool) -> None:
    expected = matrix.reference(cell.feature, cell.choice)
    if cell.mixed:
        found = matrix.mixed(cell, is_long)
    else:
        found = matrix.alone(BY_NAME[cell.feature], cell.mode, cell.choice, cell.streamed)
    check_same(found, expected, str(cell))


@pytest.mark.parametrize("name", NAMES)
def test_a_feature_has_its_effect(matrix: Matrix, name: str) -> None:
    """Or the matrix would say nothing about it."""
    choice = ordinary_choice(name)
    answers, bare = matrix.reference(name, choice), matrix.reference("bare", choice)[0]
    assert all(BY_NAME[name].check(answer, bare) for answer in answers), answers
    if name == "n > 1" and choice == "sampled":
        assert differs(answers[0], answers[1])


def test_servers_do_what_their_modes_say(matrix: Matrix) -> None:
    for mode in ORDINARY_MODES:
        matrix.alone(BARE, mode, "greedy", False)
        modes = matrix.server(mode).modes
        assert (modes[False] > 0) == (mode != "speculative") and (modes[True] > 0) == (mode != "plain")


def test_the_ordinary_part_has_every_pair_of_values() -> None:
    """But plain and alone: that is what the others are compared with."""
    cells = [cell for cell in CELLS if is_ordinary(cell)]
    axes = {
        "mode": ORDINARY_MODES,
        "choice": tuple(CHOICES),
        "streamed": (False, True),
        "mixed": (False, True),
    }
    for one, other in combinations(axes, 2):
        pairs = {(getattr(cell, one), getattr(cell, other)) for cell in cells}
        assert set(product(axes[one], axes[other])) - pairs <= {("plain", False)}
    drafting = [cell.feature for cell in cells if cell.mixed and cell.mode != "plain"]
    assert sorted(drafting) == sorted(NAMES)
