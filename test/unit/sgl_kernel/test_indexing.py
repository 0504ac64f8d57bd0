"""An indexer's choice: the reference against the backend of CPUs, kernels against the reference, compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="kernels need triton")

from sgl_kernel._dispatch import H200, RTX_PRO_6000, DeviceInfo
from sgl_kernel.attention import View, plan_decode
from sgl_kernel.attention.mla.indexing.config import SiftConfig
from sgl_kernel.attention.mla.indexing.op import choose_launch, choose_places, count_launch, score_launch
from sgl_kernel.attention.mla.indexing.plan import IndexPlan, IndexWorkspace, Sieve, plan_index, seen_launch
from sgl_kernel.attention.mla.indexing.reference import choose_places_ref
from sgl_kernel.attention.mla.op import LatentWorkspace, latent_attention
from sgl_kernel.attention.mla.reference import latent_attention_ref
from sgl_kernel.testing.compile_gate import check
from sgl_kernel.testing.interpret import interpret

SMALL = DeviceInfo(arch=120, num_sms=20)
SIFT = SiftConfig(chunk=128, near=64)


@dataclass(frozen=True, slots=True)
class World:
    """A random paged cache of an indexer's keys: NaN wherever a row must not look."""

    num_heads: int
    dim: int
    page_size: int
    slots: torch.Tensor  # [R] int64, 0: padding
    base_lens: torch.Tensor  # [R] int64
    page_table: torch.Tensor  # [slots, max_pages] int32
    keys: torch.Tensor  # [places, d]
    generator: torch.Generator

    def draw(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator, dtype=self.keys.dtype)

    def places(self, slot: int, positions: torch.Tensor) -> torch.Tensor:
        size = self.page_size
        return self.page_table[slot, positions // size].to(torch.int64) * size + positions % size

    def workspace(self, top_k: int, sift: SiftConfig = SIFT) -> IndexWorkspace:
        device = torch.device("cpu")
        return IndexWorkspace(
            self.num_heads, self.dim, top_k, self.page_size, device, 4, SMALL, sieve=Sieve(device, sift)
        )

    def plan(self, view: View, top_k: int, workspace: IndexWorkspace | None = None) -> IndexPlan:
        workspace = workspace or self.workspace(top_k)
        return plan_index(workspace, self.slots, self.base_lens, self.page_table, view)


def world(
    shape: tuple[int, int, int], lens: list[int], room: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> World:
    """shape: heads, d, page size. A length of 0 makes a row padding; ``room`` places more are written."""
    num_heads, dim, size = shape
    generator = torch.Generator().manual_seed(seed)
    max_pages = -(-(max(lens) + room) // size)
    pages = torch.randperm(len(lens) * max_pages, generator=generator) + 1
    table = torch.zeros(len(lens) + 1, max_pages, dtype=torch.int32)
    table[1:] = pages.view(len(lens), max_pages).to(torch.int32)
    keys = torch.full(((len(lens) * max_pages + 1) * size, dim), torch.nan, dtype=dtype)
    base_lens = torch.tensor(lens)
    slots = torch.where(base_lens > 0, torch.arange(1, len(lens) + 1), 0)
    made = World(num_heads, dim, size, slots, base_lens, table, keys, generator)
    for slot, length in enumerate(lens, start=1):
        keys[made.places(slot, torch.arange(length + room))] = made.draw(length + room, dim)
    return made


def tree_mask(made: World, num: int) -> torch.Tensor:
    """[R, num, num]: random, each query sees itself."""
    mask = torch.rand(len(made.slots), num, num, generator=made.generator) < 0.4
    return mask | torch.eye(num, dtype=torch.bool)


def chosen(plan: IndexPlan) -> list[list[int]]:
    """The places of every query, ascending."""
    rows = zip(plan.chosen[1:], plan.counts.tolist(), strict=True)
    return [sorted(row[:count].tolist()) for row, count in rows]


def compare(made: World, view: View, top_k: int, layers: int = 1, sift: SiftConfig = SIFT) -> IndexPlan:
    """By kernels and by the reference: the same places, whatever was there before."""
    plan, expected = made.plan(view, top_k, made.workspace(top_k, sift)), made.plan(view, top_k)
    assert torch.equal(plan.counts, expected.counts) and torch.equal(plan.ids, expected.ids)
    tokens = len(made.slots) * view.query_len
    for _ in range(layers):
        q = made.draw(tokens, made.num_heads + 1, made.dim)[:, : made.num_heads]
        same_choice(made, q, made.draw(tokens, made.num_heads), plan, expected)
    return plan


def same_choice(
    made: World, q: torch.Tensor, weights: torch.Tensor, plan: IndexPlan, expected: IndexPlan
) -> None:
    plan.chosen.fill_(-7)
    choose_places(q, weights, made.keys, plan)
    choose_places_ref(q, weights, made.keys, expected)
    assert chosen(plan) == chosen(expected)
    sifting = plan.sifting
    assert not sifting.counted.any() and not sifting.sifted.any() and (sifting.tops == -(2**31)).all()


def whole(made: World) -> World:
    """Small integers for keys: products are exact, and many scores are equal."""
    made.keys.copy_(torch.randint(-1, 2, made.keys.shape, generator=made.generator))
    return made


def body_views() -> None:
    """One query and several, causal, by a mask, without places of their own; padding; short rows."""
    made = world((3, 20, 3), [150, 0, 7, 33], 6)
    compare(made, View(3, 3, causal=True), 12)
    compare(made, View(1), 30, layers=2)
    made = world((3, 20, 3), [126, 20], 6)  # the queries' own places lie in two chunks
    compare(made, View(6, 6, mask=tree_mask(made, 6)), 12)
    compare(made, View(3, 3, causal=True), 200)


def body_chunks() -> None:
    """Rows of several chunks, one of exactly one; more heads than a tile has rows for."""
    made = world((40, 16, 16), [1700, 127, 60], 4)
    compare(made, View(2, 2, causal=True), 400)
    compare(made, View(1, 1), 120)


def body_ties() -> None:
    """Equal scores, most of them 0; all negative; all 0."""
    made = whole(world((2, 8, 1), [300], 1))
    q = torch.randint(-1, 2, (1, 2, 8), generator=made.generator).float()
    for weights, top_k in (((1.5, 2.0), 40), ((-1.0, -1.0), 290), ((0.0, 0.0), 40), ((1.0, -1.0), 270)):
        plan, expected = made.plan(View(1, 1), top_k), made.plan(View(1, 1), top_k)
        same_choice(made, q, torch.tensor([weights]), plan, expected)


def body_many_near() -> None:
    """More scores in the last bin than registers hold, that differ by little."""
    made = world((1, 8, 1), [500], 1)
    made.keys[:] = 1 + 1e-3 * torch.rand(made.keys.shape, generator=made.generator)
    q = torch.tensor([[[1.0] + [0.0] * 7]])  # a score is one number of a key: no rounding
    for weight in (1.0, -1.0):
        plan, expected = made.plan(View(1, 1), 200), made.plan(View(1, 1), 200)
        same_choice(made, q, torch.full((1, 1), weight), plan, expected)
        assert int(plan.sifting.cuts[2]) > SIFT.near


def body_bins() -> None:
    """Scores of many sizes and both signs; all below 0; tiny ones."""
    made = world((2, 8, 1), [400], 1)
    size = torch.exp2(torch.rand(402, generator=made.generator) * 15 - 9)
    sign = torch.where(torch.rand(402, generator=made.generator) < 0.4, 1.0, -1.0)
    q, weights = torch.zeros(1, 2, 8), torch.tensor([[1.0, -1.0]])
    q[0, :, 0] = torch.tensor([1.0, -1.0])  # heads see x and -x: a score is x
    made.keys.zero_()
    for numbers, top_k in (
        (sign * size, 250),
        (-size, 250),
        (sign * size * 2.0**-110, 250),
    ):
        made.keys[:, 0] = numbers
        plan, expected = made.plan(View(1, 1), top_k), made.plan(View(1, 1), top_k)
        same_choice(made, q, weights, plan, expected)
        assert int(plan.sifting.cuts[2]) <= SIFT.near


def body_broken() -> None:
    """Whoever sees a key that is not a number attends to it; others do not know of it."""
    made = world((2, 8, 1), [100], 3)
    made.keys[made.places(1, torch.tensor([101]))] = torch.nan
    plan = compare(made, View(3, 3, causal=True), 9)
    broken = int(made.places(1, torch.tensor([101]))[0])
    assert [broken in places for places in chosen(plan)] == [False, True, True]


def body_groups() -> None:
    """Rows that do not go through together."""
    made = world((2, 8, 1), [250, 20, 0, 150, 200], 2)
    sift = SiftConfig(chunk=128, near=64, max_bytes=4 * (2 * (128 + 256) + 2 * 64) * 5)
    plan = compare(made, View(2, 2, causal=True), 24, sift=sift)
    assert plan.rows_at_once == 2


def body_attention() -> None:
    """Latent attention with the choice as its page table."""
    made = world((2, 8, 16), [200, 0, 30], 3)
    plan = compare(made, View(2, 2, causal=True), 100)
    latents, q = made.draw(made.keys.shape[0], 48), made.draw(6, 3, 48)
    workspace = LatentWorkspace(3, 32, 1, torch.device("cpu"), 4, SMALL)
    over = plan_decode(workspace, plan.ids, plan.counts, plan.chosen, View(1))
    got = latent_attention(q, latents, over, 0.2)
    torch.testing.assert_close(got, latent_attention_ref(q, latents, over, 0.2, None), rtol=2e-5, atol=2e-5)
    assert not got[2:4].any()


def body_scratch() -> None:
    """A level of a draft tree: base places, then scratch places by a mask, of which some are chosen."""
    made = world((2, 8, 3), [150, 0, 20], 0)
    mask = torch.rand(3, 2, 5, generator=made.generator) < 0.6
    view = View(2, 5, mask=mask, scratch=True, write_start=3)
    scratch = made.draw(4, 7, 8)
    q, weights = made.draw(6, 2, 8), made.draw(6, 2)
    for top_k in (9, 140):
        plans = [
            plan_index(made.workspace(top_k), made.slots, made.base_lens, made.page_table, view, 155, None, 7)
            for _ in range(2)
        ]
        choose_places(q, weights, made.keys, plans[0], scratch)
        choose_places_ref(q, weights, made.keys, plans[1], scratch)
        assert chosen(plans[0]) == chosen(plans[1]) and min(map(min, filter(None, chosen(plans[0])))) < 0
        latents, of_drafts, queries = (
            made.draw(made.keys.shape[0], 48),
            made.draw(4, 7, 48),
            made.draw(6, 3, 48),
        )
        workspace = LatentWorkspace(3, 32, 1, torch.device("cpu"), 4, SMALL)
        index = plans[0]
        over = plan_decode(workspace, index.ids, index.counts, index.chosen, View(1, scratch=True), 7)
        got = latent_attention(queries, latents, over, 0.2, scratch=of_drafts)
        wanted = latent_attention_ref(queries, latents, over, 0.2, None, of_drafts)
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


def body_many_words() -> None:
    """Masks of more than 64 places, which scratch places alone have."""
    made = world((2, 16, 1), [40, 130], 0)
    mask = torch.rand(2, 3, 100, generator=made.generator) < 0.6
    view = View(3, 100, mask=mask, scratch=True, write_start=97)
    q, weights, scratch = made.draw(6, 2, 16), made.draw(6, 2), made.draw(2, 100, 16)
    for top_k in (50, 190):
        plans = [
            plan_index(
                made.workspace(top_k), made.slots, made.base_lens, made.page_table, view, 230, None, 100
            )
            for _ in range(2)
        ]
        choose_places(q, weights, made.keys, plans[0], scratch)
        choose_places_ref(q, weights, made.keys, plans[1], scratch)
        assert chosen(plans[0]) == chosen(plans[1])


def body_usual_sizes() -> None:
    """Chunks as large as a GPU's."""
    compare(world((2, 16, 1), [9000, 4095], 4), View(2, 2, causal=True), 700, sift=SiftConfig())


def body_all(names: list[str]) -> None:
    for name in names:
        globals()[f"body_{name}"]()


def test_kernels_equal_references() -> None:
    interpret(__file__, "body_all", names=["views", "ties", "broken"])


@pytest.mark.long
def test_larger_ones() -> None:
    names = ["bins", "many_near", "groups", "chunks", "attention", "scratch", "many_words", "usual_sizes"]
    interpret(__file__, "body_all", names=names)


Draw = st.integers(0, 10_000)


@settings(max_examples=25, deadline=None)
@given(
    Draw, st.lists(st.integers(0, 60), min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 70),
    st.sampled_from(["none", "causal", "tree"]), st.booleans(),
)  # fmt: skip
def test_the_reference_equals_the_backend_of_cpus(
    seed: int, lens: list[int], queries: int, top_k: int, block: str, ties: bool
) -> None:
    from sglang.srt.layers.attention.mla_sparse import best_places, index_scores

    lens = [*lens, 9]
    made = world((3, 8, 3), lens, queries, seed, torch.float64)
    if ties:
        made.keys.copy_(torch.randint(-1, 2, made.keys.shape, generator=made.generator))
    views: dict[str, Callable[[], View]] = {
        "none": lambda: View(queries),
        "causal": lambda: View(queries, queries, causal=True),
        "tree": lambda: View(queries, queries, mask=tree_mask(made, queries)),
    }
    view = views[block]()
    plan = made.plan(view, top_k)
    q = torch.randint(-2, 3, (len(lens) * queries, 3, 8), generator=made.generator).double()
    weights = torch.randint(-2, 3, (len(lens) * queries, 3), generator=made.generator).double()
    choose_places(q, weights, made.keys, plan)
    for row, length in enumerate(lens):
        mine = slice(row * queries, (row + 1) * queries)
        if length == 0:
            assert not plan.counts[mine].any() and not plan.ids[mine].any()
            continue
        seen = torch.ones(queries, length + view.extra, dtype=torch.bool)
        if view.extra:
            inner = torch.ones(queries, queries).tril().bool() if view.mask is None else view.mask[row]
            seen[:, length:] = inner
        places = made.places(row + 1, torch.arange(length + view.extra))
        scores = index_scores(q[mine][None], made.keys[places][None], weights[mine][None])
        best = best_places(scores, seen[None], top_k)[0]
        assert chosen(plan)[mine] == [sorted(places[line].tolist()) for line in best]


# ---- compiled for GPUs ----------------------------------------------------------------------------


def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def compiled(
    num_heads: int, query_len: int, info: DeviceInfo, page_size: int = 1, tree: bool = False
) -> None:
    rows, top_k = 16, 2048
    workspace = IndexWorkspace(num_heads, 128, top_k, page_size, torch.device("meta"), 2, info, pdl=True)
    mask = meta(rows, query_len, query_len, dtype=torch.bool) if tree else None
    view = View(query_len, query_len, causal=not tree, mask=mask)
    of_rows, table = meta(rows, dtype=torch.int64), meta(rows + 1, 65536 // page_size, dtype=torch.int32)
    plan = workspace.index_plan(workspace.plan(of_rows, of_rows, table, view, 0), 65536, None)
    tokens = rows * query_len
    q, weights = meta(tokens, num_heads, 128), meta(tokens, num_heads, dtype=torch.float32)
    score = score_launch(q, weights, meta(100_000, 128), plan, 0)
    for launch in (score, count_launch(plan, 0), choose_launch(plan, 0), seen_launch(plan)):
        (made,) = check(launch, archs=(info.arch,))
        print(
            f"{launch.kernel.__name__}: {num_heads} heads Q={query_len} page {page_size} sm_{info.arch}:"
            f" {made.shared} bytes, {made.registers} registers,"
            f" {made.programs_per_sm(launch.num_warps)} programs a SM"
        )
        needed = plan.rows.config.programs_per_sm if launch is score else 2
        assert made.programs_per_sm(launch.num_warps) >= needed, "a step is one wave"


DEVICES = pytest.mark.parametrize("info", [H200, RTX_PRO_6000], ids=lambda info: f"sm_{info.arch}")


@DEVICES
def test_fits(info: DeviceInfo) -> None:
    """GLM-5's 32 heads, four queries."""
    compiled(32, 4, info)


@pytest.mark.long
@DEVICES
@pytest.mark.parametrize("num_heads", [32, 64])
def test_all_sizes_fit(num_heads: int, info: DeviceInfo) -> None:
    for query_len in (1, 2, 4, 8):
        compiled(num_heads, query_len, info)
    compiled(num_heads, 16, info, tree=True)
    compiled(num_heads, 64, info, page_size=64, tree=True)
