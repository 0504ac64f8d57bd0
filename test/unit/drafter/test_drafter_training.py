"""The drafter's training scripts at toy sizes on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts" / "drafter"
sys.path.insert(0, str(SCRIPTS))

from attention import PackedMask, attend_lse  # noqa: E402
from baselines import bigram_hits, bigram_table, ngram_hits  # noqa: E402
from dims import TOY  # noqa: E402
from drafting import Drafting  # noqa: E402
from evaluate import evaluate, head_hits, walk  # noqa: E402
from export import load_head, save_head  # noqa: E402
from generate import Generator, Jobs, Text, held_out_text  # noqa: E402
from head import MAX_STEPS, DraftHead  # noqa: E402
from noise import gumbel  # noqa: E402
from packing import Corpus  # noqa: E402
from target import Target, random_weights  # noqa: E402
from train import Recipe, Trainer, frequent_ids, train  # noqa: E402

RECIPE = Recipe(seconds=1e9, lr=1e-2, warmup_steps=5, rows=4, row_len=128, report_every=10)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(random_weights(TOY, "cpu", torch.float32), TOY, 128, compiled=False)


def make_jobs(count: int, max_len: int, seed: int) -> Jobs:
    rng = torch.Generator().manual_seed(seed)
    prompt_len = torch.randint(6, 12, (count,), generator=rng)
    ids = torch.randint(3, TOY.vocab, (count, max_len), generator=rng)
    ids *= torch.arange(max_len) < prompt_len[:, None]
    heat = torch.tensor([0.0, 0.7, 1.0])[torch.arange(count) % 3]
    return Jobs(ids, prompt_len, heat, (prompt_len + 30).clamp(max=max_len - 1), torch.arange(count) % 7)


@pytest.fixture(scope="module")
def text(target: Target) -> Text:
    jobs = make_jobs(24, 48, seed=1)
    generator = Generator(target, jobs, slots=5, seed=3)
    generator.run(1e9, "toy")
    return generator.text(jobs, at_least=2)


@pytest.fixture(scope="module")
def trained(target: Target, text: Text):
    """A head after 40 steps, and the log."""
    torch.manual_seed(0)
    draft_ids = frequent_ids(text, TOY)
    head = DraftHead(TOY)
    head.start_from(target.weights.embedding, target.weights.norm, draft_ids)
    drafting = toy_drafting(target, head, draft_ids)
    corpus = Corpus(text, drafting.draft_of(), TOY.eos)
    return drafting, train(Trainer(drafting, RECIPE), corpus, None, None, max_steps=40)


def toy_drafting(target: Target, head: DraftHead, draft_ids: torch.Tensor) -> Drafting:
    return Drafting(target, head, draft_ids, RECIPE.rows, RECIPE.row_len, compiled=False)


def one_text_forward(target: Target, ids: torch.Tensor):
    mask = PackedMask(1, len(ids), "cpu")
    position = torch.arange(len(ids))[None]
    mask.update(position)
    return target.forward(ids[None], position, mask)


def test_generated_text_is_what_the_packed_forward_says(target: Target, text: Text) -> None:
    """Slots, refills and caches give the argmax (or the noisy argmax) of a plain forward."""
    begin = 0
    for i, length in enumerate(text.length.tolist()):
        ids = text.ids[begin : begin + length].long()
        best = text.best[begin : begin + length].long()
        begin += length
        _, hidden = one_text_forward(target, ids)
        logits = target.logits(hidden[0])
        prompt = int(text.prompt_len[i])
        assert torch.equal(logits.argmax(-1)[:-1], best[1:])
        if text.temperature[i] == 0:
            assert torch.equal(best[prompt:], ids[prompt:])
        else:
            index = torch.arange(1, length)[:, None]
            noise = gumbel(text.seed[i], index, torch.arange(TOY.vocab)[None])
            noisy = (logits[:-1] + text.temperature[i] * noise).argmax(-1)
            assert torch.equal(noisy[prompt - 1 :], ids[prompt:])


def test_packing_keeps_texts_apart(target: Target, text: Text) -> None:
    corpus = Corpus(text, torch.arange(TOY.vocab), TOY.eos)
    places = corpus.pack(128, None)
    real = places[places != corpus.pad_place]
    assert sorted(real.tolist()) == list(range(len(text.ids)))
    batch = corpus.batch(places)
    mask = PackedMask(*batch.ids.shape, "cpu")
    mask.update(batch.position)
    _, hidden = target.forward(batch.ids, batch.position, mask)
    begin = 0
    for length in text.length.tolist()[:6]:
        _, alone = one_text_forward(target, text.ids[begin : begin + length].long())
        row, col = (batch.place == begin).nonzero()[0].tolist()
        assert torch.allclose(hidden[row, col : col + length], alone[0], atol=1e-5)
        begin += length


def test_flex_block_mask_agrees_with_dense() -> None:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    rng = torch.Generator().manual_seed(0)
    position = torch.cat([torch.arange(n) for n in (100, 200, 84)])[None]
    mask = PackedMask(1, 384, "cpu")
    q = torch.randn(1, 4, 384, 16, generator=rng)
    k, v = torch.randn(2, 1, 2, 384, 16, generator=rng)
    mask.update(position)
    out, lse = attend_lse(q, k, v, mask)
    mask.fused = True
    mask.update(position)
    fused, aux = flex_attention(
        q, k, v, block_mask=mask.block, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    assert torch.allclose(out, fused, atol=1e-5) and torch.allclose(lse, aux.lse, atol=1e-5)
    blocks = mask.block.to_dense()[0, 0].bool()
    allowed = mask.dense()[0, 0].view(3, 128, 3, 128).any(3).any(1)
    assert torch.equal(blocks & allowed, allowed)


def test_loss_falls(trained) -> None:
    losses = [line["loss"] for line in trained[1].lines if "loss" in line]
    assert losses[-1] < losses[0] - 2


def test_loss_gradient_is_the_gradient_of_the_loss(target: Target, text: Text) -> None:
    """The gradient made by hand equals autograd's on the plain formula."""
    torch.manual_seed(1)
    drafting = toy_drafting(target, DraftHead(TOY), frequent_ids(text, TOY))
    trainer, corpus = Trainer(drafting, RECIPE), Corpus(text, drafting.draft_of(), TOY.eos)
    batch = corpus.batch(corpus.pack(128, None)[: RECIPE.rows])
    loss, _ = trainer.loss(batch)
    loss.backward()
    made = {n: p.grad.clone() for n, p in drafting.head.named().items()}
    drafting.head.zero_grad()
    expected = plain_loss(trainer, batch)
    expected.backward()
    assert torch.allclose(loss, expected, rtol=1e-5)
    for name, p in drafting.head.named().items():
        assert torch.allclose(made[name], p.grad, atol=1e-5), name


def plain_loss(trainer: Trainer, batch) -> torch.Tensor:
    forward = trainer.drafting.forward(batch)
    prob = torch.softmax(forward.hidden[batch.rows] @ trainer.draft_rows.t(), -1)
    weight = (batch.wanted >= 0).float() / len(batch.rows)
    total = torch.zeros(())
    for step, h in enumerate(forward.outputs):
        logq = torch.log_softmax(h[batch.rows - 1 - step] @ trainer.drafting.head.weights["lm_head"].t(), -1)
        miss = 1 - torch.minimum(prob, logq.exp()).sum(-1)
        row = -(prob * logq).sum(-1) + RECIPE.overlap_weight * miss
        total = total + RECIPE.step_decay**step * (weight * row).sum()
    return total


def test_export_round_trip_is_exact(trained, tmp_path: Path) -> None:
    drafting, _ = trained
    save_head(drafting.head, drafting.draft_ids, tmp_path / "a")
    again, ids = load_head(tmp_path / "a", "cpu")
    save_head(again, ids, tmp_path / "b")
    assert torch.equal(ids, drafting.draft_ids)
    for name, value in drafting.head.named().items():
        assert torch.equal(again.named()[name], value.to(torch.bfloat16).float()), name
    for part in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / part).read_bytes() == (tmp_path / "b" / part).read_bytes()


def test_hit_table_equals_incremental_drafting(trained, text: Text) -> None:
    """Walking the table gives the accept lengths that real draft loops give."""
    drafting, _ = trained
    hits = head_hits(drafting, text, noisy=False)["argmax"]
    begin = 0
    for length, prompt_len in zip(text.length.tolist()[:6], text.prompt_len.tolist(), strict=False):
        ids = text.ids[begin : begin + length].long()
        steps, tokens, _, _ = walk(hits[begin : begin + length], prompt_len, length, 3)
        assert (steps, tokens) == draft_loop(drafting, ids, prompt_len, 3)
        begin += length


def draft_loop(drafting: Drafting, ids: torch.Tensor, prompt_len: int, drafts: int) -> tuple[int, int]:
    """Draft from the committed tokens only, feeding drafts back; returns verify steps and tokens."""
    committed, steps, tokens = prompt_len, 0, 0
    while committed + 1 < len(ids):
        fed, taken = ids[: committed + 1].clone(), 0
        for k in range(drafts):
            if committed + 1 + taken >= len(ids):
                break
            draft = draft_next(drafting, fed, committed, k)
            fed = torch.cat([fed, draft[None]])
            if int(draft) != int(ids[committed + 1 + k]):
                break
            taken += 1
        steps += 1
        tokens += min(taken + 1, len(ids) - 1 - committed)
        committed += taken + 1
    return steps, tokens


@torch.no_grad()
def draft_next(drafting: Drafting, fed: torch.Tensor, committed: int, k: int) -> torch.Tensor:
    """Draft k; `fed` holds the committed tokens, the chosen one and k drafts, features end at `committed`."""
    features, _ = one_text_forward(drafting.target, fed[:committed])
    ids = torch.cat([fed, fed.new_zeros(MAX_STEPS)])
    padded = torch.cat([features, torch.zeros(1, len(ids) - committed, features.shape[2])], 1)
    mask, position = PackedMask(1, len(ids), "cpu"), torch.arange(len(ids))[None]
    mask.update(position)
    outputs = drafting.unroller.run(
        drafting.head.cast(torch.float32),
        drafting.target.weights.embedding,
        ids[None],
        position,
        padded,
        mask,
    )
    for step, h in enumerate(outputs):
        if step == k:
            return drafting.draft_ids[(h[committed - 1] @ drafting.head.weights["lm_head"].t()).argmax()]


def test_evaluation_reports_all_drafters(target: Target, text: Text, trained) -> None:
    drafting, _ = trained
    t1 = held_out_text(target, make_jobs(7, 48, seed=2), 1.0, 20, seed=5)
    result = evaluate(drafting, t1, noisy=True, bigram=bigram_table(text, TOY.vocab))
    assert set(result) == {"head_noise", "head_argmax", "ngram", "bigram"}
    for groups in result.values():
        assert 1.0 <= groups["all"]["accept_length_3"] <= 4.0
        assert len(groups["all"]["by_position"]) == MAX_STEPS


def test_lookup_baselines_on_a_repeating_text() -> None:
    ids = torch.tensor([5, 6, 7, 8] * 8, dtype=torch.int32)
    one = torch.tensor([len(ids)])
    text = Text(ids, ids, one, torch.tensor([4]), torch.zeros(1), torch.zeros(1, dtype=torch.int64), one)
    for hits in (ngram_hits(text, 5), bigram_hits(text, bigram_table(text, 9), 5)):
        steps, tokens, _, _ = walk(hits, 4, len(ids), 3)
        assert tokens == len(ids) - 5 and steps <= -(-tokens // 4) + 1
