"""Draft trees: the reference and, in the interpreter, the kernels against the server's own builder;
compilation at real shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kernel.sampling.choose import block_size
from sgl_kernel.speculation.tree.ops import (
    DraftRows,
    Tree,
    TreeBuffers,
    expand,
    expand_launch,
    finish,
    finish_launch,
    partial_launch,
)
from sgl_kernel.testing.compile_gate import check
from sgl_kernel.testing.interpret import interpret
from sglang.srt.sampling.gumbel import noise
from sglang.srt.speculative.tree import Frontier, TreeBuilder

TREE_FIELDS = ("tokens", "parents", "depths", "mask")


def draft_rows(num_rows: int, vocab: int, heat: float) -> DraftRows:
    """The first row is greedy."""
    temperature = torch.full((num_rows + 1,), heat)
    temperature[:2] = 0
    seed = torch.arange(num_rows + 1) * 12345 - 3
    slots, root = torch.arange(num_rows) + 1, torch.arange(num_rows) + 7
    return DraftRows(slots, root, temperature, seed, torch.arange(vocab) * 3 + 1)


def draw_logits(level: int, num_rows: int, nodes: int, vocab: int, tied: bool, seed: int) -> torch.Tensor:
    """[R * nodes, V']. tied: a row's nodes have the same few values, so that cousins are equal too."""
    generator = torch.Generator().manual_seed(seed * 10 + level)
    if not tied:
        return torch.randn(num_rows * nodes, vocab, generator=generator) * 3
    return (
        (torch.randn(num_rows, 1, vocab, generator=generator) * 2).round().repeat(1, nodes, 1).flatten(0, 1)
    )


def ranks_of(logits: torch.Tensor, rows: DraftRows, level: int) -> torch.Tensor:
    """[R, nodes, V'], what the server's drafter ranks."""
    drawn = noise(rows.seed[rows.slots], rows.root + level + 1, rows.token_ids)[:, None]
    heat = rows.temperature[rows.slots][:, None, None]
    logits = logits.view(len(rows.slots), -1, logits.shape[1])
    return torch.where(heat > 0, logits / torch.where(heat > 0, heat, 1.0) + drawn, logits)


def seen_places(above: torch.Tensor, parent: torch.Tensor) -> torch.Tensor:
    """[R, k, S] of the level above -> [R, k, S + k]."""
    num_rows, k = parent.shape
    inherited = above.gather(1, parent[:, :, None].expand(-1, -1, above.shape[2]))
    return torch.cat([inherited, torch.eye(k, dtype=torch.bool).expand(num_rows, k, k)], dim=2)


def compare(
    k: int, levels: int, nodes: int, num_rows: int, vocab: int, heat: float, tied: bool, seed: int = 0
) -> None:
    rows, builder = draft_rows(num_rows, vocab, heat), TreeBuilder(k)
    buffers = TreeBuffers.make(num_rows, k, levels, vocab, "cpu")
    root_tokens = (torch.arange(num_rows) + 500)[:, None].repeat(1, 3)[:, 0]  # a column
    seen = torch.zeros(num_rows, k, 0, dtype=torch.bool)
    frontier: Frontier | None = None
    tree = Tree.make(num_rows, nodes, "cpu")
    for level in range(levels):
        logits = draw_logits(level, num_rows, k if level else 1, vocab, tied, seed)
        ranks = ranks_of(logits, rows, level)
        if frontier is None:
            frontier = builder.add_roots_children(ranks, rows.token_ids)
        else:
            frontier = builder.add_children(frontier, ranks, rows.token_ids)
        if level == levels - 1:
            finish(logits, rows, buffers, root_tokens, tree)
            break
        got = expand(level, logits, rows, buffers)
        torch.testing.assert_close(got.score, frontier.score, rtol=1e-5, atol=1e-5)
        assert torch.equal(got.number.long(), frontier.candidate)
        assert torch.equal(got.tokens, frontier.tokens) and torch.equal(got.parent, frontier.parent)
        assert torch.equal(got.positions, (rows.root + level)[:, None].expand(-1, k))
        seen = seen_places(seen, frontier.parent)
        assert torch.equal(got.seen, seen)
    wanted = builder.build(root_tokens, nodes)
    for name in TREE_FIELDS:
        assert torch.equal(getattr(tree, name), getattr(wanted, name)), name


def most_nodes(k: int, levels: int) -> int:
    return min(64, 1 + k + (levels - 1) * k * k)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 5),
    st.data(),
    st.integers(1, 4),
    st.sampled_from([8, 60, 1300]),
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.booleans(),
    st.integers(0, 99),
)
def test_reference_equals_the_server(
    k: int, levels: int, data: st.DataObject, num_rows: int, vocab: int, heat: float, tied: bool, seed: int
) -> None:
    nodes = data.draw(st.integers(2, most_nodes(k, levels)))
    compare(k, levels, nodes, num_rows, vocab, heat, tied, seed)


def check_broken(k: int) -> None:
    """A drafter gone wrong still gives a tree."""
    rows, buffers = draft_rows(3, 1300, 1.0), TreeBuffers.make(3, k, 2, 1300, "cpu")
    logits = torch.full((3, 1300), torch.nan)
    logits[1] = 0.0
    logits[1, 7] = torch.inf
    got = expand(0, logits, rows, buffers)
    assert all(len(set(row)) == k for row in got.tokens.tolist())
    assert got.tokens[1, 0] == 7 * 3 + 1 and got.score.isneginf().all()
    tree = Tree.make(3, 16, "cpu")
    finish(torch.full((3 * k, 1300), torch.nan), rows, buffers, torch.arange(3), tree)
    assert tree.tokens[:, 0].tolist() == [0, 1, 2] and (tree.depths[:, 1:] > 0).all()
    assert all(len(set(row[1 : k + 1])) == k for row in tree.tokens.tolist())


def body_kernels() -> None:
    vocab = 1300  # two blocks
    compare(4, 2, 16, 2, vocab, 0.8, True)
    compare(3, 4, 12, 1, 300, 1.2, False)
    compare(5, 3, 20, 2, 1100, 0.0, True)  # more than 8 lines: blocks are larger
    compare(2, 1, 3, 2, vocab, 0.5, False)
    compare(5, 4, 40, 1, 70, 1.0, False)
    assert block_size(8) == 1024 < vocab and block_size(10) > 1100
    check_broken(4)


def test_a_broken_drafter() -> None:
    for k in (4, 7):
        check_broken(k)


def test_kernels_equal_the_server() -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    interpret(__file__, "body_kernels")


def _meta(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


# Drafters of Llama-8B, SmolLM2 (all of its vocabulary), Kimi-K2.5 and GLM-5, which have the target's.
@pytest.mark.parametrize("vocab", [32000, 49152, pytest.param(163840, marks=pytest.mark.long), 154880])
def test_kernels_fit(vocab: int) -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    f32 = torch.float32
    shapes = ((1, 4, 2, 16), (16, 8, 5, 64)) if vocab in (32000, 163840) else ((1, 4, 2, 16),)
    for num_rows, k, levels, nodes in shapes:
        rows = DraftRows(_meta(num_rows), _meta(num_rows), _meta(256, dtype=f32), _meta(256), _meta(vocab))
        buffers = TreeBuffers.make(num_rows, k, levels, vocab, "meta")
        for level in (0, 1):
            logits = _meta(num_rows * (k if level else 1), vocab, dtype=f32)
            check(partial_launch(level, logits, rows, buffers, pdl=True))
            if level < levels - 1:
                check(expand_launch(level, logits, rows, buffers, pdl=True))
        tree = Tree.make(num_rows, nodes, "meta")
        check(finish_launch(logits, rows, buffers, _meta(num_rows, 3)[:, 0], tree, pdl=True))


def test_a_wide_tree_fits() -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    rows = DraftRows(_meta(1), _meta(1), _meta(9, dtype=torch.float32), _meta(9), _meta(32000))
    buffers, logits = TreeBuffers.make(1, 16, 4, 32000, "meta"), _meta(16, 32000, dtype=torch.float32)
    check(expand_launch(2, logits, rows, buffers, pdl=True))
    check(finish_launch(logits, rows, buffers, _meta(1), Tree.make(1, 64, "meta"), pdl=True))
