"""Logit processors that requests bring. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.kernel_executor import kernel_executor
from helpers.plan_driver import DrivenRequest, PlanDriver
from helpers.processors import Broken, Fickle, WrongShape, fickle
from helpers.scheduler_harness import SchedulerHarness
from helpers.tiny_executor import draft_folder, target_folder, tiny_executor
from helpers.toggle_schedule import Arrival, ScheduleRun, make_schedule

from sglang.srt.entrypoints.native_request import parse_call
from sglang.srt.entrypoints.scheduling_fields import checked_processor
from sglang.srt.managers.io_struct import GenerateRequest
from sglang.srt.managers.text_request import RequestError
from sglang.srt.model_executor.rank_messages import decode_masks, decode_plan, encode
from sglang.srt.model_executor.step_plan import (
    ProcessorSpec,
    RowEdit,
    SlotAdmission,
    SlotSampling,
    StepDrafts,
    StepKind,
    StepMidInput,
    StepPlan,
)
from sglang.srt.sampling import custom_logit_processor as processors
from sglang.srt.sampling.custom_logit_processor import ProcessorError, load_processor, processor_text
from sglang.srt.sampling.logit_edits import LOWEST, LogitEditors
from sglang.srt.sampling.sampling_params import SamplingParams

VOCAB = 256
SHAPES = (None, (3, 1, 4), (2, 4, 16))


def edits_of(plan: StepPlan, rows: Sequence[DrivenRequest], drafts: StepDrafts | None) -> StepMidInput:
    """For every second row."""
    edits = []
    for row, request in enumerate(rows):
        if request.slot % 2:
            continue
        tokens = drafts.tokens[row] if drafts is not None else (0,)
        parents = drafts.parents[row] if drafts is not None and drafts.parents is not None else None
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, len(tokens)):
            paths.append((*paths[node - 1 if parents is None else parents[node]], tokens[node]))
        known = tuple(request.known)
        edits.append(RowEdit(row, request.slot, len(request.prompt), known, tuple(paths)))
    return StepMidInput(plan.step_id, edits=tuple(edits))


def edited_step(driver: PlanDriver, plan: StepPlan, rows: list[DrivenRequest]) -> None:
    spec = ProcessorSpec(Fickle.to_str(), '{"modulus": 2}', "r")
    admissions = tuple(replace(a, processor=None if a.slot % 2 else spec) for a in plan.admissions)
    plan = replace(plan, masked=True, admissions=admissions)
    before = [len(request.output) for request in rows]
    pending = driver.executor.launch(plan)
    driver.executor.supply(edits_of(plan, rows, pending.drafts() if plan.draft_len else None))
    for row, tokens in enumerate(pending.wait().tokens):
        rows[row].output += tokens
        for end in range(before[row], len(rows[row].output)) if not rows[row].slot % 2 else ():
            outputs = rows[row].output
            assert outputs[end] in fickle(len(rows[row].prompt), outputs[:end], 2, VOCAB)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_kinds_of_step_choose_the_same(shape: tuple[int, int, int] | None) -> None:
    texts = []
    draft = None if shape is None else draft_folder()
    for executor in (
        tiny_executor(shape, dtype="float32"),
        kernel_executor(target_folder(), draft, shape, 1),
    ):
        driver, rng = PlanDriver(executor), random.Random(5)
        requests = []
        for index in range(4):
            sampling = SlotSampling(temperature=0.7 * (index // 2), seed=index, frequency_penalty=0.2 * index)
            prompt = [rng.randrange(3, 250) for _ in range(3 + 5 * index)]
            requests.append(DrivenRequest(driver.free_slots.pop(), prompt, sampling))
            edited_step(driver, next(iter(driver.prefill_plans(requests[-1]))), requests[-1:])
        for step in range(8):
            draft_len = shape[0] if shape and step % 3 else 0
            plan = driver.plan(decode=requests, draft_len=draft_len)
            edited_step(driver, plan, requests)
        texts.append([request.output for request in requests])
        executor.shutdown()
    assert texts[0] == texts[1]


def admitted(text: str, params: str = "{}") -> LogitEditors:
    editors = LogitEditors()
    spec = ProcessorSpec(text, params, "r")
    editors.admit([SlotAdmission(3, 2, 0, SlotSampling(), processor=spec)])
    return editors


def test_what_a_processor_forbids_stays_finite_and_what_fails_does_not() -> None:
    class Extreme(processors.CustomLogitProcessor):  # of no module: sent with its code
        def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
            logits[:, 0], logits[:, 1] = -float("inf"), float("inf")
            return logits.double()

    edit = RowEdit(0, 3, 2, (1, 2, 9), ((), (7,)))
    logits = torch.zeros(4, 5)
    admitted(Extreme.to_str()).apply([edit], logits, {0: 1})
    assert torch.equal(logits[1:3], torch.tensor([[LOWEST, -LOWEST, 0.0, 0.0, 0.0]] * 2))
    assert not logits[0].any() and not logits[3].any()
    for broken, first in ((WrongShape.to_str(), 0), ('{"callable": "00"}', 0), (Broken.to_str(), 1)):
        logits = torch.zeros(4, VOCAB)
        admitted(broken).apply([replace(edit, ids=(1, 2, 9, 9))], logits, {0: 0})
        assert logits[first:2].isnan().all() and not logits[2:].any() and not logits[:first].any()
    editors = admitted(Fickle.to_str())
    assert editors.has_any((1, 3)) and not editors.has_any((1, 2))
    editors.admit([SlotAdmission(3, 2, 0, SlotSampling())])
    assert not editors.has_any((3,))


def test_a_processor_that_fails_ends_its_own_request() -> None:
    executor = tiny_executor((2, 1, 3))
    schedule = make_schedule(1, 1, executor.info.num_pages)
    arrivals = tuple(
        Arrival(
            0,
            GenerateRequest(
                rid, [5, 6], SamplingParams(max_new_tokens=8, ignore_eos=True), False, 0.0, processor=text
            ),
            None,
        )
        for rid, text in (("bad", Broken.to_str()), ("good", None))
    )
    config = replace(schedule.config, runs_processors=True)
    answers = ScheduleRun(executor, replace(schedule, arrivals=arrivals, config=config)).run().answers
    executor.shutdown()
    finish = answers["bad"].finish
    assert finish is not None and finish.type == "abort" and finish.status_code == 500
    assert "custom logit processor failed" in (finish.message or "") and len(answers["bad"].ids) == 3
    assert len(answers["good"].ids) == 8


def test_without_the_flag_no_code_is_read() -> None:
    harness = SchedulerHarness()
    params = SamplingParams(max_new_tokens=2)
    harness.scheduler.receive(GenerateRequest("r", [1], params, False, 0.0, processor="not even JSON"))
    finish = harness.answers["r"].finish
    assert finish is not None and finish.status_code == 400
    assert "--enable-custom-logit-processor" in (finish.message or "")
    harness = SchedulerHarness(runs_processors=True)
    harness.scheduler.receive(GenerateRequest("r", [1], params, False, 0.0, processor='{"callable": "00"}'))
    finish = harness.answers["r"].finish
    assert finish is not None and finish.status_code == 400 and "can't be read" in (finish.message or "")


def test_texts_of_processors() -> None:
    assert isinstance(load_processor(processor_text("helpers.processors:Fickle")), Fickle)
    assert checked_processor(Fickle.to_str()) == Fickle.to_str()
    for path, why in (
        ("no.such:Thing", "imported"),
        ("json:Nothing", "imported"),
        ("json:dumps", "no class"),
    ):
        with pytest.raises(ProcessorError, match=why):
            processor_text(path)
    for text in ("x", "[1]", '{"callable": "xy"}', '{"callable": 5}', "x" * (1 << 21)):
        with pytest.raises(RequestError, match="to_str"):
            checked_processor(text)
    call = parse_call({"text": "a", "custom_logit_processor": Fickle.to_str()}, None, None)  # type: ignore[arg-type]
    assert call.requests[0].processor == Fickle.to_str()


def test_processors_under_upstreams_names() -> None:
    """Clients send them by name: what is run is what this server has under it."""

    def after(cls: type[processors.ThinkingBudgetLogitProcessor], outputs: list[int], budget: int) -> int:
        editors = admitted(cls.to_str(), json.dumps({"thinking_budget": budget}))
        logits = torch.zeros(1, 152_000)
        logits[0, 77] = 1.0
        ids = (5, cls.THINKING_START_TOKEN_ID, *outputs)
        editors.apply([RowEdit(0, 3, 2, ids, ((),))], logits, {0: 0})
        return int(logits.argmax())

    for cls in (
        processors.Qwen3ThinkingBudgetLogitProcessor,
        processors.DeepSeekR1ThinkingBudgetLogitProcessor,
        processors.Glm4MoeThinkingBudgetLogitProcessor,
    ):
        line, end = cls.NEW_LINE_TOKEN_ID, cls.THINKING_END_TOKEN_ID
        assert after(cls, [8, 8], 3) == 77 and after(cls, [8, 8, 8], 3) == line
        assert after(cls, [8, 8, 8, line], 3) == end and after(cls, [8, 8, 8, line, end], 3) == 77
    for given, banned in (("[1, -2]", [1, 2]), ("[]", []), ("[4]", None), ("[-5]", None), ("[1.0]", None)):
        editors = admitted(processors.DisallowedTokensLogitsProcessor.to_str(), f'{{"token_ids": {given}}}')
        logits = torch.zeros(1, 4)
        editors.apply([RowEdit(0, 3, 1, (9,), ((),))], logits, {0: 0})
        if banned is None:  # an error of this request alone, on a GPU too
            assert logits.isnan().all()
        else:
            assert (logits[0] == LOWEST).tolist() == [token in banned for token in range(4)]


def test_processors_cross_to_other_ranks() -> None:
    spec = ProcessorSpec(Fickle.to_str(), '{"modulus": 2}', "r")
    plan = StepPlan(
        1, StepKind.PREFILL, masked=True, admissions=(SlotAdmission(3, 2, 0, SlotSampling(), processor=spec),)
    )
    assert decode_plan(encode(plan)) == plan
    middle = StepMidInput(1, edits=(RowEdit(0, 3, 2, (1, 2, 9), ((), (7,))),))
    assert decode_masks(encode(middle)) == middle
