"""Accept and state update, the move of paths, a draft layer's input: references against the CPU
server's own code, kernels against references in the interpreter, compilation at real shapes."""

from __future__ import annotations

import pytest
import torch

from sgl_kernel.speculation.accept import Accepted, SlotRows, accept, accept_launch, begin_launch, begin_rows
from sgl_kernel.speculation.inputs.ops import Keep, PairWeights, pair_inputs, pair_launch
from sgl_kernel.speculation.lookup.ops import BLOCK, look_up, look_up_ref, note, note_ref
from sgl_kernel.speculation.move import move_launch, move_path
from sgl_kernel.testing.compile_gate import check
from sgl_kernel.testing.interpret import interpret
from sglang.srt.layers.norm import RMSNorm
from sglang.srt.mem_cache.kv_pool import MHAKVPool
from sglang.srt.model_executor.accept import accept as server_accept
from sglang.srt.model_executor.drafter import DraftTree
from sglang.srt.speculative.tree import ancestor_mask

BF16, I32, I64 = torch.bfloat16, torch.int32, torch.int64


def _gen(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _state() -> SlotRows:
    """8 slots; caps of 0, 1, 2 and none."""
    caps = torch.tensor([2**31 - 1, 0, 1, 2, 2**31 - 1, 2**31 - 1, 2**31 - 1, 2**31 - 1])
    return SlotRows(torch.ones(8, dtype=I32), torch.zeros(8, dtype=I64), caps)


def _parents(num_rows: int, num_nodes: int) -> torch.Tensor:
    """Random trees: a node's parent is any node before it."""
    draws = torch.rand(num_rows, num_nodes, generator=_gen(1))
    parents = (draws * torch.arange(num_nodes)).long()
    parents[:, 0] = -1
    return parents


def _case(num_nodes: int, tree: bool, trial: int) -> tuple[DraftTree, torch.Tensor, torch.Tensor]:
    """A tree of 6 rows, choices of which most confirm a child, and faults here and there."""
    parents = _parents(6, num_nodes) if tree else torch.arange(-1, num_nodes - 1).expand(6, -1)
    tokens = torch.arange(num_nodes).expand(6, -1).contiguous()
    child = torch.full((6, num_nodes), 99)
    for node in range(num_nodes - 1, 0, -1):
        child.scatter_(1, parents[:, node : node + 1], node)  # the first child stays
    wrong = torch.rand(6, num_nodes, generator=_gen(10 + trial)) < 0.2
    faulty = torch.rand(6, num_nodes, generator=_gen(20 + trial)) < 0.15
    mask = ancestor_mask(parents, num_nodes) if tree else None
    drafts = DraftTree(tokens, parents.contiguous(), torch.zeros_like(tokens), mask)
    return drafts, torch.where(wrong, 77, child), faulty


def _check_accept(num_nodes: int, num_columns: int, tree: bool, trial: int) -> None:
    slots, root = torch.tensor([3, 0, 1, 7, 5, 2]), torch.tensor([5, 1, 9, 100, 3, 2])
    drafts, choice, faulty = _case(num_nodes, tree, trial)
    state, out, expected = _state(), Accepted.make(6, num_columns, "cpu"), _state()
    parents = drafts.parents if tree else None
    accept(drafts.tokens, choice, faulty, slots, root, state, out, parents=parents)
    wanted = server_accept(drafts, choice, state.draft_cap[slots], num_columns)
    real = slots != 0
    counts = torch.where(real, wanted.counts, 0)
    assert torch.equal(out.counts, counts)
    assert torch.equal(out.path[real], wanted.path[real])
    assert torch.equal(out.tokens[real], choice.gather(1, wanted.path)[real])
    valid = (torch.arange(num_columns) < counts[:, None]) & ~faulty.gather(1, wanted.path)
    assert torch.equal(out.packed[:, -1], valid.long().cumprod(1).sum(1))
    assert torch.equal(out.packed[:, -2], counts)
    for row in real.nonzero()[:, 0].tolist():
        expected.seq_len[slots[row]] = root[row] + counts[row]
        expected.next_token[slots[row]] = out.tokens[row, counts[row] - 1]
    assert torch.equal(state.seq_len, expected.seq_len)
    assert torch.equal(state.next_token, expected.next_token)


def body_accept() -> None:
    for num_nodes, num_columns, tree in ((1, 1, False), (4, 4, False), (12, 4, True), (7, 7, True)):
        for trial in range(3):
            _check_accept(num_nodes, num_columns, tree, trial)
    slots, state = torch.tensor([3, 0, 1, 7, 5, 2]), _state()
    state.seq_len.copy_(torch.arange(8))
    state.next_token.copy_(torch.arange(8) * 10)
    tokens, root = torch.zeros(6, 3, dtype=I64), torch.empty(6, dtype=I64)
    begin_rows(slots, state.seq_len, state.next_token, root, tokens)
    assert torch.equal(root, slots) and torch.equal(tokens[:, 0], slots * 10) and not tokens[:, 1:].any()


def body_move() -> None:
    """Overlapping paths, rows that move nothing, and every other place as it was."""
    for page_size in (1, 4):
        pool = MHAKVPool(3, 40, page_size, 2, 24, torch.float32, "cpu")
        pool.kv.normal_(generator=_gen(0))
        table = torch.randperm(40, generator=_gen(2)).view(4, 10).int() + 1
        slots, root = torch.tensor([1, 3, 0, 2]), torch.tensor([2, 0, 1, 3])
        path = torch.tensor([[0, 2, 3, 5], [0, 1, 2, 3], [0, 3, 4, 5], [0, 3, 5, 3]])
        counts = torch.tensor([4, 4, 0, 3])

        kv = pool.kv.clone()
        move_path(kv, path, counts, slots, root, table, page_size)
        wanted = (torch.arange(4) < counts[:, None])[:, 1:]
        position = torch.stack((root[:, None] + path, root[:, None] + torch.arange(4)))[:, :, 1:]
        places = table[slots[:, None], position // page_size].long() * page_size + position % page_size
        pool.move(places[0][wanted], places[1][wanted])
        assert torch.equal(kv, pool.kv)


def body_inputs() -> None:
    size, generator = 48, _gen(0)
    for dtype, tolerance in ((torch.float32, 1e-5), (BF16, 2**-5)):

        def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        weights = PairWeights(draw(30, size), draw(size), draw(size), 1e-5, 1e-6)
        norms = RMSNorm(weights.embed_norm, 1e-5), RMSNorm(weights.feature_norm, 1e-6)

        def pairs(
            ids: torch.Tensor,
            features: torch.Tensor,
            w: PairWeights = weights,
            n: tuple[RMSNorm, RMSNorm] = norms,
        ) -> torch.Tensor:
            return torch.cat((n[0](w.embedding[ids]), n[1](features)), dim=-1)

        packed = torch.randint(30, (3, 6), generator=generator)
        ids, slots, counts = packed[:, :4], torch.tensor([4, 0, 2]), torch.tensor([3, 0, 1])
        for nodes in (None, torch.tensor([[0, 2, 5, 3], [0, 1, 2, 3], [0, 4, 2, 3]])):
            features = draw(3 * (4 if nodes is None else 7), size)
            taken = features.view(3, -1, size)
            if nodes is not None:
                taken = taken[torch.arange(3)[:, None], nodes]
            kept, hidden, out = draw(6, size), torch.empty(12, size, dtype=dtype), draw(12, 2 * size)
            expected = kept.clone()
            expected[4], expected[2] = taken[0, 2], taken[2, 0]
            pair_inputs(
                ids, features, weights, out, nodes=nodes, keep=Keep(kept, slots, counts), hidden=hidden
            )
            taken = taken.reshape(12, size)
            torch.testing.assert_close(out, pairs(ids.reshape(-1), taken), rtol=tolerance, atol=tolerance)
            assert torch.equal(kept, expected) and torch.equal(hidden, taken)
        next_token, state = torch.randint(30, (6,), generator=generator), draw(6, size)
        out = draw(3, 2 * size)
        pair_inputs(next_token, state, weights, out, slots=slots)
        wanted = pairs(next_token[slots], state[slots])
        torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance)


def body_lookup() -> None:
    """Texts in one part and in many, with matches of every length at the borders of parts and blocks."""
    g = _gen(3)
    at_borders = [1, BLOCK, BLOCK + 1, 3 * BLOCK + 7, 5 * BLOCK]
    for width, lens in ((40, [1, 2, 3, 33, 40]), (5 * BLOCK, at_borders)):
        ids = torch.randint(0, 3, (7, width), generator=g).to(I32)
        ids[2, width // 2 :] = torch.arange(width - width // 2) % 7  # a loop
        ids[4, ::5] = -1
        slots = torch.tensor([0, 1, 2, 3, 4, 5])
        root = torch.tensor([0, *(length - 1 for length in lens)])
        for begin in (BLOCK - 3, BLOCK, 2 * BLOCK - 1):
            if begin + 20 < width - 20:  # the only long match is at a border
                ids[5, begin : begin + 12] = ids[5, width - 12 :]
                ids[5, begin + 12 : begin + 16] = torch.tensor([7, 8, 9, 6])
        for num_drafts in (1, 5):
            own = torch.full((6, num_drafts + 2), 99, dtype=I64)
            expected = own.clone()
            look_up(ids, slots, root, own[:, : num_drafts + 1], 12)
            look_up_ref(ids, slots[1:], root[1:], expected[1:, : num_drafts + 1], 12)
            assert torch.equal(own[1:], expected[1:])
        noted, wanted = ids.clone(), ids.clone()
        counts, tokens = torch.tensor([2, 0, 1, 3, 2, 3]), torch.randint(9, 99, (6, 5), generator=g)[:, :3]
        note(noted, slots, root, tokens, counts)
        note_ref(wanted, slots, root, tokens, counts, 0)
        assert torch.equal(noted, wanted) and not torch.equal(noted, ids)


BODIES = ("body_accept", "body_move", "body_inputs", "body_lookup")


def body_all() -> None:
    for body in BODIES:
        globals()[body]()


@pytest.mark.parametrize("body", BODIES[:-1])  # of the last one it would compare references with themselves
def test_references_equal_the_server(body: str) -> None:
    globals()[body]()


def test_kernels_equal_the_server() -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    interpret(__file__, "body_all")


def _meta(*shape: int, dtype: torch.dtype = I64) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_accept_and_move_fit() -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    state = SlotRows(_meta(256, dtype=I32), _meta(256), _meta(256))
    for nodes, columns, tree in ((1, 1, False), (4, 4, False), (16, 3, True), (64, 6, True)):
        tokens, out = _meta(8, nodes), Accepted.make(8, columns, "meta")
        faulty = _meta(8, nodes, dtype=torch.bool)
        parents = tokens if tree else None
        check(accept_launch(tokens, tokens, faulty, _meta(8), _meta(8), state, out, parents, pdl=True))
        check(begin_launch(_meta(8), state.seq_len, state.next_token, _meta(8), tokens, pdl=True))
    table = _meta(256, 2048, dtype=I32)
    for layers, heads, d, dtype in ((32, 8, 128, BF16), (30, 3, 64, BF16), (32, 8, 128, torch.float8_e4m3fn)):
        kv = _meta(layers, 65536, heads, 2, d, dtype=dtype)
        for columns in (3, 6):
            path = _meta(8, columns)
            check(move_launch(kv, path, _meta(8), _meta(8), _meta(8), table, 1, 0, pdl=True))


@pytest.mark.parametrize("size", [4096, 576, 7168, 6144])
def test_inputs_fit(size: int) -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    w = _meta(size, dtype=BF16)
    weights = PairWeights(_meta(1000, size, dtype=BF16), w, w, 1e-5, 1e-5)
    features, out = _meta(16, size, dtype=BF16), _meta(16, 2 * size, dtype=BF16)
    state = _meta(256, size, dtype=BF16)
    keep = Keep(state, _meta(4), _meta(4))
    check(pair_launch(_meta(4, 6)[:, :4], features, weights, out, None, None, keep, None, pdl=True))
    out = _meta(4, 2 * size, dtype=BF16)
    check(pair_launch(_meta(256), state, weights, out, None, _meta(4), None, features[:4], pdl=True))
