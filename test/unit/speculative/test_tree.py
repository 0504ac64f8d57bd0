"""Building draft trees, against a plain Python version of EAGLE-2's expansion and reranking."""

from __future__ import annotations

import math

import pytest
import torch

from sglang.srt.model_executor.drafter import DraftTree
from sglang.srt.model_executor.step_plan import SpecShape
from sglang.srt.speculative.tree import TreeBuilder

SHAPES = [(1, 2, 3), (1, 4, 3), (2, 4, 16), (2, 2, 7), (3, 3, 9), (5, 4, 8), (4, 2, 15), (5, 4, 3)]
VOCAB = 11
IDS = torch.arange(VOCAB) * 3 + 1  # target ids of the draft ids


class _FakeDrafter:
    """Logits are a function of the path alone: [R] rows of paths of draft ids."""

    def __init__(self, seed: int, coarse: bool) -> None:
        self.seed, self.coarse = seed, coarse

    def logits(self, row: int, path: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, row, path)) % 2**31)
        drawn = torch.randn(VOCAB, generator=generator, dtype=torch.float64) * 2
        return drawn.round() if self.coarse else drawn


def _build(drafter: _FakeDrafter, num_rows: int, shape: tuple[int, int, int]) -> DraftTree:
    steps, k, nodes = shape
    builder = TreeBuilder(k)
    paths: list[list[tuple[int, ...]]] = [[()] for _ in range(num_rows)]
    frontier = None
    for _ in range(steps):
        ranks = torch.stack([torch.stack([drafter.logits(r, p) for p in row]) for r, row in enumerate(paths)])
        if frontier is None:
            frontier = builder.add_roots_children(ranks, IDS)
        else:
            frontier = builder.add_children(frontier, ranks, IDS)
        paths = [
            [
                paths[r][int(frontier.parent[r, i])] + (int((frontier.tokens[r, i] - 1) // 3),)
                for i in range(k)
            ]
            for r in range(num_rows)
        ]
    return builder.build(torch.full((num_rows,), 100), SpecShape(*shape).num_nodes(steps))


def _paths(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """Draft ids from the root to each node."""
    paths: list[tuple[int, ...]] = [()]
    for i in range(1, tree.tokens.shape[1]):
        parent = int(tree.parents[row, i])
        assert 0 <= parent < i
        paths.append((*paths[parent], (int(tree.tokens[row, i]) - 1) // 3))
    return paths


def _oracle(drafter: _FakeDrafter, row: int, shape: tuple[int, int, int]) -> set[tuple[int, ...]]:
    """The kept paths. All scores differ, so no rule for ties is needed."""
    steps, k, nodes = shape
    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    candidates: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(steps):
        level = []
        for score, path in frontier:
            log_probs = drafter.logits(row, path).log_softmax(0).tolist()
            best = sorted(range(VOCAB), key=lambda i: -log_probs[i])[:k]
            level += [(score + log_probs[i], (*path, i)) for i in best]
        candidates += level
        frontier = sorted(level, reverse=True)[:k]
    kept = sorted(candidates, reverse=True)[: SpecShape(*shape).num_nodes(steps) - 1]
    return {path for _, path in kept}


@pytest.mark.parametrize("shape", SHAPES)
def test_keeps_what_the_oracle_keeps(shape: tuple[int, int, int]) -> None:
    for seed in range(5):
        drafter = _FakeDrafter(seed, coarse=False)
        tree = _build(drafter, 3, shape)
        for row in range(3):
            assert set(_paths(tree, row)) - {()} == _oracle(drafter, row, shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("coarse", [False, True])
def test_is_a_tree(shape: tuple[int, int, int], coarse: bool) -> None:
    """Also where most scores are equal: parents before children, distinct siblings, right mask."""
    for seed in range(5):
        tree = _build(_FakeDrafter(seed, coarse), 2, shape)
        assert tree.mask is not None
        for row in range(2):
            paths = _paths(tree, row)
            assert len(set(paths)) == len(paths)
            assert tree.depths[row].tolist() == [len(p) for p in paths]
            expected = [
                [paths[i][: len(paths[j])] == paths[j] for j in range(len(paths))] for i in range(len(paths))
            ]
            assert tree.mask[row].tolist() == expected


def test_a_drafter_that_is_nan_still_gives_a_tree() -> None:
    drafter = _FakeDrafter(0, coarse=False)
    drafter.logits = lambda row, path: torch.full((VOCAB,), math.nan if row == 0 or path else 1.0).double()  # type: ignore[method-assign]
    tree = _build(drafter, 2, (3, 3, 9))
    for row in range(2):
        assert len(set(_paths(tree, row))) == 9
        assert set(tree.tokens[row, 1:].tolist()) <= set(IDS.tolist())
