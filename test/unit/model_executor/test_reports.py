"""Log-probabilities and hidden states that rows tell, against transformers (whose norms are float32 in any
model). Run alone: ``pytest THIS_FILE``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from helpers.kernel_executor import kernel_executor
from helpers.plan_driver import DrivenRequest, PlanDriver
from helpers.rank_group import RankGroup
from helpers.replaying_capture import ReplayingCapture
from helpers.tiny_executor import draft_folder, target_folder, tiny_executor

from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.model_executor import reporting
from sglang.srt.model_executor.graph_sizes import GraphSizes
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.model_executor.rank_messages import decode_result, encode
from sglang.srt.model_executor.step_graphs import DecodeSteps, StepGraphs
from sglang.srt.model_executor.step_plan import RowReport, RowWish, SlotSampling, StepPlan

CPU = torch.device("cpu")
NAMED = (7, 250)
TOP = 3
PROMPTS = ([5, 17, 200, 31, 8, 90, 4, 66, 120, 7, 33], [44, 45, 46, 47])
BIASED = SlotSampling(temperature=0.8, seed=3, logit_bias=((9, 2.5),), frequency_penalty=0.5)


@dataclass
class Told:
    """Of one request, put together."""

    prompt: list[float] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)  # of prompt and outputs
    named: list[tuple[float, ...]] = field(default_factory=list)
    hidden: list[array[float]] = field(default_factory=list)

    def add(self, report: RowReport) -> None:
        self.prompt += report.prompt.own
        self.chosen += report.chosen.own
        for part in (report.prompt, report.chosen):
            self.top += [dict(zip(*of, strict=True)) for of in zip(part.top_ids, part.top, strict=True)]
            self.named += part.named
        values = array(report.hidden.kind, report.hidden.data)
        size = report.hidden.size
        self.hidden += [values[at : at + size] for at in range(0, len(values), size or 1)]


@cache
def oracle() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target_folder(), dtype=torch.float64)


@torch.inference_mode()
def expected(ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, V] and hidden states [T, H]."""
    out = oracle()(torch.tensor([list(ids)]), output_hidden_states=True)
    return out.logits[0], out.hidden_states[-1][0]


def with_graphs(shape: tuple[int, int, int] | None) -> InProcessExecutor:
    executor = kernel_executor(target_folder(), draft_folder() if shape else None, shape, 4)
    worker = executor.worker
    assert worker._decode_steps is not None
    step = worker._decode_steps.step
    sizes = {0: (1, 4)} | ({shape[0]: (1, 4)} if shape else {})
    graphs = StepGraphs(step, ReplayingCapture(), GraphSizes(sizes, pad=True), worker.config.spec, CPU)
    graphs.capture_all()
    worker._decode_steps = DecodeSteps(step, graphs, CPU)
    return executor


def plans(driver: PlanDriver, requests: list[DrivenRequest], chunk: int) -> Iterator[StepPlan]:
    """Chunked prefill of the first beside decoding of the second, then both, in all modes."""
    first, second = requests
    end = len(second.prompt)
    yield driver.plan(prefill=[(second, 0, end)])
    for start in range(0, len(first.prompt), chunk):
        end = min(start + chunk, len(first.prompt))
        yield driver.plan(decode=[second], prefill=[(first, start, end)])
    spec = driver.info.spec
    for draft_len in (0, 1, 0, 0, 1, 1, 1, 0):
        yield driver.plan(decode=requests[::-1], draft_len=draft_len * spec.num_steps if spec else 0)


def wishes(plan: StepPlan, slots: Sequence[int]) -> tuple[RowWish, ...]:
    """Of rows of these slots."""
    found = [
        RowWish(row, True, num_top=TOP, token_ids=NAMED, temperature=0.8, hidden_from=0)
        for row, slot in enumerate(plan.decode_slots)
        if slot in slots
    ]
    for row, chunk in enumerate(plan.prefill, start=len(plan.decode_slots)):
        size = len(chunk.token_ids)
        to = size - 1 if chunk.is_last else size
        wish = RowWish(row, chunk.is_last, 0, to, TOP, NAMED, 0.8, hidden_from=0)
        if chunk.slot in slots:
            found.append(wish)
    return tuple(found)


def drive(executor: Any, chunk: int, wished: Sequence[int]) -> tuple[list[DrivenRequest], list[Told]]:
    driver = PlanDriver(executor)
    requests = [
        DrivenRequest(driver.free_slots.pop(), list(prompt), sampling)
        for prompt, sampling in zip(PROMPTS, (SlotSampling(temperature=0.0), BIASED), strict=True)
    ]
    told = {request.slot: Told() for request in requests}
    slots = [requests[index].slot for index in wished]
    try:
        for plan in plans(driver, requests, chunk):
            plan = replace(plan, wishes=wishes(plan, slots))
            of_slot = {request.slot: request for request in requests}
            rows = [*plan.decode_slots, *(part.slot for part in plan.prefill)]
            result = driver.run(plan, [of_slot[slot] for slot in rows])
            assert [report.row for report in result.reports] == [wish.row for wish in plan.wishes]
            assert decode_result(encode(result)) == result, "as it comes from a worker's process"
            for report in result.reports:
                assert len(report.chosen.own) == len(result.tokens[report.row])
                told[rows[report.row]].add(report)
    finally:
        executor.shutdown()
    return requests, list(told.values())


def check(request: DrivenRequest, told: Told, tolerance: float) -> None:
    ids = request.known
    logits, hidden = expected(ids)
    prompt_len, places = len(request.prompt), torch.arange(len(ids) - 1)
    scores = logits[:-1].clone()
    for index in range(prompt_len - 1, len(scores)):
        scores[index] = processed(request, scores[index], index + 1 - prompt_len)
    logprobs = scores.log_softmax(-1)
    own = logprobs[places, torch.tensor(ids[1:])].tolist()
    assert told.prompt + told.chosen == pytest.approx(own, abs=tolerance)
    assert len(told.prompt) == prompt_len - 1
    best = logprobs.topk(TOP).values.tolist()
    for index, given in enumerate(told.top):
        assert list(given.values()) == pytest.approx(best[index], abs=tolerance)
        assert list(given.values()) == pytest.approx(logprobs[index, list(given)].tolist(), abs=tolerance)
    assert len(told.top) == len(told.named) == len(ids) - 1
    assert torch.tensor(told.named).allclose(logprobs[:, list(NAMED)].float(), atol=max(tolerance, 1e-6))
    vectors = torch.tensor([list(vector) for vector in told.hidden], dtype=torch.float64)
    assert vectors.shape == hidden[:-1].shape
    torch.testing.assert_close(vectors, hidden[:-1], atol=10 * tolerance, rtol=0)


def processed(request: DrivenRequest, logits: torch.Tensor, num_outputs: int) -> torch.Tensor:
    """What output ``num_outputs`` was chosen from, told a second time."""
    scores = logits / 1.0
    for token in request.output[:num_outputs]:
        scores[token] -= request.sampling.frequency_penalty
    for token, bias in request.sampling.logit_bias:
        scores[token] += bias
    return scores / 0.8


@pytest.mark.parametrize("shape", [None, (3, 1, 4), (2, 4, 16)], ids=str)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_what_is_told_is_what_transformers_says(
    shape: tuple[int, int, int] | None, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "PART_NUMBERS", 3 * 64)  # several parts
    executor = with_graphs(shape) if graphs else tiny_executor(shape, page_size=4)
    requests, told = drive(executor, 4, (0, 1))
    for request, of_request in zip(requests, told, strict=True):
        check(request, of_request, 1e-4 if graphs else 1e-5)


def test_a_row_tells_the_same_beside_others_that_tell_nothing() -> None:
    texts = []
    for wished in ((0, 1), (1,), ()):
        requests, told = drive(tiny_executor((3, 1, 4)), 5, wished)
        texts.append([request.output for request in requests])
        for index in wished:
            check(requests[index], told[index], 1e-5)
        assert all(told[index] == Told() for index in (0, 1) if index not in wished)
    assert texts[0] == texts[1] == texts[2]


def test_what_cannot_be_chosen_has_a_number_that_json_can_hold() -> None:
    sampling = SlotSampling(temperature=0.0, min_new_tokens=3, suppressed_ids=(7,))
    driver = PlanDriver(tiny_executor())
    request = DrivenRequest(driver.free_slots.pop(), list(PROMPTS[0]), sampling)
    plan = driver.plan(prefill=[(request, 0, len(request.prompt))])
    result = driver.run(replace(plan, wishes=(RowWish(0, True, token_ids=NAMED),)), [request])
    driver.executor.shutdown()
    (chosen,) = result.reports[0].chosen.named
    assert chosen[0] == torch.finfo(torch.float32).min and -40 < chosen[1] < 0


def test_the_same_is_told_in_every_mode() -> None:
    """Of float64 models: as far as sums in another order go."""
    plain = drive(tiny_executor(), 4, (0, 1))
    for shape in ((3, 1, 4), (2, 4, 16)):
        requests, told = drive(tiny_executor(shape, page_size=4), 3, (0, 1))
        for index, request in enumerate(requests):
            common = min(len(request.output), len(plain[0][index].output))
            assert request.output[:common] == plain[0][index].output[:common]
            near(told[index], plain[1][index], len(request.prompt) - 1 + common)


def test_two_ranks_tell_what_one_does() -> None:
    args = ExecutorArgs(
        str(target_folder()), str(draft_folder()), dtype="float64", num_steps=2, topk=1, num_draft_tokens=3,
        max_total_tokens=1024, max_running_requests=4, context_length=300, tp_size=2,
    )  # fmt: skip
    requests, told = drive(RankGroup(args), 4, (0, 1))
    _, whole = drive(tiny_executor((2, 1, 3)), 4, (0, 1))
    for request, mine, theirs in zip(requests, told, whole, strict=True):
        near(mine, theirs, len(request.known) - 1)


def near(told: Told, other: Told, count: int) -> None:
    for a, b in ((told.prompt + told.chosen, other.prompt + other.chosen), (told.named, other.named)):
        torch.testing.assert_close(
            torch.tensor(a[:count], dtype=torch.float64),
            torch.tensor(b[:count], dtype=torch.float64),
            atol=1e-9,
            rtol=0,
        )
    for mine, theirs in zip(told.top[:count], other.top[:count], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-9)
    for mine, theirs in zip(told.hidden[:count], other.hidden[:count], strict=True):
        assert list(mine) == pytest.approx(list(theirs), abs=1e-9)
