"""Accepting drafts, against plain Python."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.model_executor.accept import accept
from sglang.srt.model_executor.drafter import DraftTree
from sglang.srt.model_executor.step_batch import roots
from sglang.srt.speculative.tree import ancestor_mask


def _walk(tokens: list[int], parents: list[int], choice: list[int], cap: int, columns: int) -> list[int]:
    """Nodes whose choices are put out."""
    node, path = 0, [0]
    while len(path) <= cap and len(path) < columns:
        children = [i for i in range(len(tokens)) if parents[i] == node and tokens[i] == choice[node]]
        if not children:
            break
        node = children[0]
        path.append(node)
    return path


def _check(tree: DraftTree, choice: torch.Tensor, cap: torch.Tensor, columns: int) -> None:
    got = accept(tree, choice, cap, columns)
    assert got.path.shape == (len(cap), columns)
    for row in range(len(cap)):
        expected = _walk(
            tree.tokens[row].tolist(),
            tree.parents[row].tolist(),
            choice[row].tolist(),
            int(cap[row]),
            columns,
        )
        count = int(got.counts[row])
        assert got.path[row, :count].tolist() == expected
        assert got.path[row, count:].tolist() == list(range(count, columns))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 6))
def test_chains(seed: int, num_rows: int, draft_len: int) -> None:
    rng = random.Random(seed)
    tokens = torch.tensor([[rng.randrange(2) for _ in range(draft_len + 1)] for _ in range(num_rows)])
    choice = torch.tensor([[rng.randrange(2) for _ in range(draft_len + 1)] for _ in range(num_rows)])
    cap = torch.tensor([rng.choice([0, 1, 3, 2**31 - 1]) for _ in range(num_rows)])
    depths = torch.arange(draft_len + 1).expand(num_rows, -1)
    _check(DraftTree(tokens, depths - 1, depths, None), choice, cap, draft_len + 1)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(2, 12), st.integers(1, 5))
def test_trees(seed: int, num_rows: int, num_nodes: int, max_columns: int) -> None:
    rng = random.Random(seed)
    tokens, parents, depths = [], [], []
    for _ in range(num_rows):
        row_parents, row_tokens, row_depths = [-1], [9], [0]
        used: set[tuple[int, int]] = set()
        while len(row_parents) < num_nodes:
            parent, token = rng.randrange(len(row_parents)), rng.randrange(4)
            if (parent, token) not in used:  # children of a node have distinct tokens
                used.add((parent, token))
                row_parents.append(parent)
                row_tokens.append(token)
                row_depths.append(row_depths[parent] + 1)
        parents.append(row_parents)
        tokens.append(row_tokens)
        depths.append(row_depths)
    choice = torch.tensor([[rng.randrange(4) for _ in range(num_nodes)] for _ in range(num_rows)])
    cap = torch.tensor([rng.choice([0, 1, 2, 2**31 - 1]) for _ in range(num_rows)])
    pointers = torch.tensor(parents)
    mask = ancestor_mask(pointers, num_nodes)
    tree = DraftTree(torch.tensor(tokens), pointers, torch.tensor(depths), mask)
    _check(tree, choice, cap, min(max_columns, num_nodes))


def test_a_plain_step_is_the_verification_of_no_drafts() -> None:
    got = accept(roots(torch.tensor([5, 6])), torch.tensor([[1], [2]]), torch.tensor([0, 9]), 1)
    assert got.path.tolist() == [[0], [0]] and got.counts.tolist() == [1, 1]
