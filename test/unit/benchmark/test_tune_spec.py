"""`tune_spec`: what it chooses from costs and acceptance, and the whole of it with a tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from helpers.server import write_tiny_pair
from hypothesis import given
from hypothesis import strategies as st

from sglang import tune_spec
from sglang.srt.managers.mode_args import load_table
from sglang.srt.model_executor.step_plan import SpecShape, StepCost
from sglang.srt.speculative.cost_table import CostTable
from sglang.srt.speculative.schedule import parse_bs_schedule
from sglang.srt.utils.flags import ServerArgsError
from sglang.srt.utils.text_tokenizer import TextTokenizer
from sglang.tune_spec_choice import (
    ShapeFigures,
    best_fixed,
    best_threshold,
    choose,
    choose_best,
    schedule_of,
    score,
    survival,
)
from sglang.tune_spec_prompts import prompt_ids
from sglang.tune_spec_report import report

SIZES = (1, 2, 4, 8, 16)
KV_LEN = 50.0


@st.composite
def figures(draw: st.DrawFn, topk: int = 1) -> ShapeFigures:
    """Any costs that grow with rows and drafts, any acceptance."""
    num_steps = draw(st.integers(1, 4))
    costs = []
    for k in range(num_steps + 1):
        base = 1.0 + 0.2 * k + draw(st.floats(0, 1.0)) * k
        slope = draw(st.floats(0.0, 0.3)) * (k + 1)
        costs += [StepCost(k, rows, base + slope * rows, 1e-4) for rows in SIZES]
    parts = draw(st.lists(st.floats(0, 1), min_size=num_steps, max_size=num_steps))
    taken = tuple(math.prod(parts[:depth]) for depth in range(1, num_steps + 1))
    shape = SpecShape(num_steps, topk, 0 if topk == 1 else num_steps + 2)
    return ShapeFigures(shape, CostTable.from_costs(costs, padded=True), taken, draw(st.sampled_from(SIZES)))


@given(figures())
def test_the_schedule_is_the_best_of_every_size(of: ShapeFigures) -> None:
    choice = choose(of, SIZES, KV_LEN)
    assert parse_bs_schedule(str(choice.schedule)) == choice.schedule
    for rows in SIZES:
        chosen = of.rate(choice.schedule.draft_len(rows), rows, KV_LEN)
        assert choice.schedule.draft_len(rows) == 0 or rows <= of.max_rows
        lens = range(of.shape.num_steps + 1) if rows <= of.max_rows else [0]
        assert chosen == pytest.approx(max(of.rate(k, rows, KV_LEN) for k in lens))
    assert choice.schedule_score >= choice.threshold_score - 1e-9


@given(figures())
def test_no_threshold_is_better_than_the_one_found(of: ShapeFigures) -> None:
    found, full = best_threshold(of, SIZES, KV_LEN), of.shape.num_steps

    def with_threshold(threshold: int | None) -> float:
        lens = [full if threshold is None or rows <= threshold else 0 for rows in SIZES]
        return score(of, SIZES, lens, KV_LEN)

    assert with_threshold(found) == pytest.approx(max(map(with_threshold, [0, *SIZES, None])))


@given(st.lists(figures(), min_size=1, max_size=4))
def test_the_best_shape_is_as_good_as_any(found: list[ShapeFigures]) -> None:
    best, fixed = choose_best(found, SIZES, KV_LEN), best_fixed(found, SIZES, KV_LEN)
    for of in found:
        assert best.schedule_score >= choose(of, SIZES, KV_LEN).schedule_score - 1e-9
        assert fixed.threshold_score >= choose(of, SIZES, KV_LEN).threshold_score - 1e-9
    # No drafts are prepared that the schedule does not use.
    assert best.figures.shape.num_steps == max(best.schedule.draft_lens, default=1)
    assert best.figures.table.draft_lens == tuple(range(best.figures.shape.num_steps + 1))


@given(figures(topk=2))
def test_a_tree_stays_as_it_is(of: ShapeFigures) -> None:
    assert choose_best([of], SIZES, KV_LEN).figures is of and best_fixed([of], SIZES, KV_LEN).figures is of


@given(st.lists(st.integers(0, 20), min_size=4, max_size=4).filter(any))
def test_survival_and_parts(histogram: list[int]) -> None:
    taken = survival(histogram, 3)
    rows, accepted = sum(histogram), sum(n * count for n, count in enumerate(histogram))
    assert 1 + sum(taken) == pytest.approx(1 + accepted / rows)
    table = CostTable.from_costs([StepCost(k, 1, 1.0, 0.0) for k in range(4)], padded=True)
    of = ShapeFigures(SpecShape(3), table, taken, 1)
    assert all(0 <= part <= 1 for part in of.parts())
    assert math.prod(of.parts()) == pytest.approx(taken[-1])
    assert of.expected_tokens(3) == pytest.approx(1 + accepted / rows) and of.expected_tokens(0) == 1


def test_a_schedule_goes_from_size_to_size() -> None:
    assert str(schedule_of((1, 4, 16, 32), (3, 3, 1, 0))) == "1-4:3,5-16:1,17-:0"
    assert str(schedule_of((1, 2), (0, 0))) == "1-:0" and str(schedule_of((4,), (2,))) == "1-:2"


def test_the_threshold_lies_where_the_gain_is_used_up() -> None:
    """Two drafts cost nothing at 4 rows and twice as much at 8; half of the first ones are accepted."""
    rows = {4: (1.0, 1.0), 8: (1.0, 2.0)}
    costs = [StepCost(k, n, seconds[k], 0.0) for n, seconds in rows.items() for k in (0, 1)]
    of = ShapeFigures(SpecShape(1), CostTable.from_costs(costs, padded=True), (0.5,), 8)
    gain, loss = math.log(1.5), math.log(0.75)
    assert best_threshold(of, (4, 8), KV_LEN) == 4 + int(4 * gain / (gain - loss)) == 6
    assert best_threshold(of, (4,), KV_LEN) is None and best_threshold(of, (8,), KV_LEN) == 0
    text = "\n".join(report([of], (4, 8), KV_LEN, "t.json"))
    assert "--speculative-disable-bs-threshold 6\n" in text + "\n"
    assert "--speculative-disable-bs-threshold auto --speculative-auto-table t.json" in text
    assert "--speculative-bs-schedule 1-4:1,5-:0" in text
    assert "| 1, 1, 2 | 1.50 | 6 | 6 |" in text and "| plain | 1.00 | 4 | 8 |" in text


# ---- the program -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_tiny_pair(tmp_path_factory.mktemp("model"))


def _flags(model: tuple[Path, Path]) -> list[str]:
    return [
        "--device", "cpu", "--model-path", str(model[0]), "--speculative-draft-model-path", str(model[1]),
        "--max-running-requests", "4", "--max-total-tokens", "1000",
    ]  # fmt: skip


def test_the_table_is_one_that_a_server_reads(
    model: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, table, results = tmp_path / "p.txt", tmp_path / "auto.json", tmp_path / "results.jsonl"
    prompts.write_text("once upon a time\nsay it again\n")
    flags = [*_flags(model), "--prompts", str(prompts), "--output-len", "12", "--shapes", "2", "1,2,3"]
    flags += ["--save", str(table), "--result-filename", str(results), "--temperature", "0.7"]
    assert tune_spec.main(flags) == 0
    printed = capsys.readouterr().out
    saved = json.loads(table.read_text())
    loaded = load_table(str(table), SpecShape(**saved["shape"]))
    assert (loaded.model, loaded.drafter, loaded.device) == ("target", "drafter", "cpu")
    assert list(loaded.acceptance) == ["sampled"]
    assert loaded.table.draft_lens == tuple(range(loaded.shape.num_steps + 1))
    assert f"--speculative-num-steps {loaded.shape.num_steps}" in printed
    shapes = [json.loads(line)["shape"] for line in results.read_text().splitlines()]
    assert [(s["num_steps"], s["topk"], s["num_draft_tokens"]) for s in shapes] == [(2, 1, 3), (1, 2, 3)]
    for name in ("2, 1, 3", "1, 2, 3", "plain"):
        assert f"| {name} |" in printed


@pytest.mark.parametrize(
    "flags,message",
    [
        (["--shapes", "3,4"], "STEPS,TOPK,DRAFT_TOKENS"),
        (["--shapes", "x"], "got 'x'"),
        (["--shapes", "2,2,99"], "--speculative-num-draft-tokens must be from 2 to"),
        (["--speculative-num-steps", "3"], "--speculative-num-steps can't be given here; use --shapes"),
        (["--speculative-disable-bs-threshold", "3"], "it is what is looked for"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["--batch-sizes", "0"], "--batch-sizes must be at least 1"),
        (["--batch-sizes", "5"], "--batch-sizes 5 is more than --max-running-requests 4"),
        (["--save", "/nowhere/t.json"], "there is no folder /nowhere"),
        (["--prompts", "/nowhere/p.txt"], "can't be read"),
        (["--temperature", "-1"], "temperature must be >= 0"),
    ],
)
def test_errors(
    flags: list[str], message: str, model: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_of:
        tune_spec.main([*_flags(model), *flags])
    assert exit_of.value.code not in (0, None) and message in capsys.readouterr().err


def test_a_model_without_a_drafter_is_refused(
    model: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tune_spec.main(["--model-path", str(model[0])])
    assert "--speculative-draft-model-path is needed" in capsys.readouterr().err


def test_prompt_files(model: tuple[Path, Path], tmp_path: Path) -> None:
    tokenizer = TextTokenizer.from_folder(model[0])
    texts, lines = tmp_path / "p.txt", tmp_path / "p.jsonl"
    texts.write_text("ab\n\nabcd\n")
    assert [len(ids) for ids in prompt_ids(texts, tokenizer, 9, 100)] == [2, 4]
    assert len(prompt_ids(texts, tokenizer, 1, 100)) == 1
    rows = [{"text": "abc"}, {"prompt": "ab"}, {"messages": [{"role": "user", "content": "hello"}]}]
    lines.write_text("\n".join(map(json.dumps, rows)))
    first, second, third = prompt_ids(lines, tokenizer, 9, 1000)
    assert (len(first), len(second)) == (3, 2) and "hello" in tokenizer.decode(third)
    assert len(prompt_ids(None, tokenizer, 3, 2000)) == 3  # those that ship
    for text, message in [("{", "line 1 is no JSON"), ('{"x": 1}', "needs"), ("\n", "has no prompts")]:
        lines.write_text(text)
        with pytest.raises(ServerArgsError, match=message):
            prompt_ids(lines, tokenizer, 9, 100)
    with pytest.raises(ServerArgsError, match="between 1 and 1 tokens"):
        prompt_ids(texts, tokenizer, 9, 1)
