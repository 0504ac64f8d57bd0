"""Graphs of decode steps, with a capture that calls the step again. Run alone: ``pytest THIS_FILE``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from helpers.replaying_capture import ReplayingCapture

from sglang.srt.model_executor.graph_sizes import GraphSizes
from sglang.srt.model_executor.step_graphs import DecodeSteps, StepGraphs
from sglang.srt.model_executor.step_plan import PAD_SLOT, SpecShape
from sglang.srt.model_executor.step_trace import StepDone, StepTrace
from sglang.srt.utils import upload as upload_module

CPU = torch.device("cpu")
SPEC = SpecShape(3)


class CountingStep:
    """Puts out how often each slot has been stepped; the pad slot puts out nothing."""

    def __init__(self) -> None:
        self.times = torch.zeros(64, dtype=torch.int64)  # [slots]
        self.calls: list[tuple[tuple[int, ...], int]] = []

    def run(self, slots: torch.Tensor, draft_len: int) -> StepDone:
        self.calls.append((tuple(slots.tolist()), draft_len))
        real = (slots != PAD_SLOT).to(torch.int64)
        self.times.index_add_(0, slots, real)
        tokens = (100 * slots + self.times[slots])[:, None].expand(-1, draft_len + 1)
        packed = torch.cat([tokens, real[:, None], real[:, None]], dim=1)
        return StepDone(packed, StepTrace(None, packed, tokens, tokens, 1))


def make(pad: bool = True) -> tuple[DecodeSteps, StepGraphs, CountingStep]:
    step = CountingStep()
    sizes = GraphSizes({0: (1, 2, 4, 8), 3: (1, 2)}, pad)
    graphs = StepGraphs(step, ReplayingCapture(), sizes, SPEC, CPU)
    graphs.capture_all()
    step.calls.clear()
    return DecodeSteps(step, graphs, CPU), graphs, step


def test_capture_warms_every_key_up_with_pad_slots_and_tells_of_its_sets(
    caplog: pytest.LogCaptureFixture,
) -> None:
    step, capture = CountingStep(), ReplayingCapture()
    graphs = StepGraphs(step, capture, GraphSizes({0: (1, 4), 3: (1, 2)}, True), SPEC, CPU)
    with caplog.at_level(logging.INFO):
        plain, spec = graphs.capture_all()
    assert step.calls == [
        call
        for rows, draft_len in ((2, 3), (4, 0), (1, 3), (1, 0))
        for call in [((PAD_SLOT,) * rows, draft_len)] * 3  # a run, the capture, the first launch
    ]
    assert (plain.name, plain.draft_len, plain.sizes) == ("plain", 0, (1, 4))
    assert (spec.name, spec.draft_len, spec.sizes) == ("spec", 3, (1, 2))
    assert plain.bytes == (1 + 4) * 3 and spec.bytes == (1 + 2) * 6
    assert plain.seconds > 0 and spec.seconds > 0
    assert "CUDA graphs, plain: 2 (1 to 4 rows)" in caplog.text
    assert "spec(k=3): 2 (1 to 2 rows)" in caplog.text


def test_kernels_are_compiled_ahead_without_running_a_step() -> None:
    step, capture = CountingStep(), ReplayingCapture()
    graphs = StepGraphs(step, capture, GraphSizes({0: (1, 4)}, True), None, CPU)
    inside: list[int] = []

    @contextmanager
    def compile_ahead(num_threads: int) -> Iterator[None]:
        assert num_threads >= 1
        before = capture.num_traced
        yield
        inside.append(capture.num_traced - before)

    graphs.compile_ahead(compile_ahead)
    assert inside == [1] and step.calls == []


@pytest.mark.parametrize(
    "slots, draft_len, padded",
    [
        ((5,), 0, (5,)),
        ((5, 6, 7), 0, (5, 6, 7, 0)),
        ((5, 6, 7, 8, 9), 0, (5, 6, 7, 8, 9, 0, 0, 0)),
        ((5, 6), 3, (5, 6)),
    ],
)
def test_a_batch_is_padded_to_the_next_size(
    slots: tuple[int, ...], draft_len: int, padded: tuple[int, ...]
) -> None:
    steps, _, step = make()
    executed = steps.run(slots, draft_len)
    assert executed.used_graph and step.calls == [(padded, draft_len)]
    assert executed.packed.shape == (len(slots), draft_len + 3)
    assert executed.packed[:, 0].tolist() == [100 * slot + 1 for slot in slots]


@pytest.mark.parametrize("slots, draft_len", [(tuple(range(1, 10)), 0), ((1, 2, 3), 3), ((1,), 2)])
def test_what_no_graph_covers_runs_eagerly_as_it_is(slots: tuple[int, ...], draft_len: int) -> None:
    steps, graphs, step = make()
    assert graphs.run(slots, draft_len) is None and step.calls == []
    executed = steps.run(slots, draft_len)
    assert executed.used_graph is False and step.calls == [(slots, draft_len)]
    assert executed.packed[:, 0].tolist() == [100 * slot + 1 for slot in slots]


def test_without_padding_only_exact_sizes_are_covered() -> None:
    steps, _, step = make(pad=False)
    assert steps.run((1, 2), 0).used_graph is True
    assert steps.run((1, 2, 3), 0).used_graph is False
    assert step.calls == [((1, 2), 0), ((1, 2, 3), 0)]


def test_without_graphs_every_step_is_eager() -> None:
    step = CountingStep()
    executed = DecodeSteps(step, None, CPU).run((3,), 1)
    assert executed.used_graph is False and step.calls == [((3,), 1)]


def test_slots_are_uploaded_only_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads: list[list[int]] = []
    real = upload_module.upload_into

    def counting(out: torch.Tensor, values: list[int]) -> None:
        uploads.append(list(values))
        real(out, values)

    monkeypatch.setattr("sglang.srt.model_executor.step_graphs.upload_into", counting)
    steps, _, step = make()
    for draft_len in (0, 0, 3, 0):  # the modes share the buffer
        steps.run((4, 5), draft_len)
    assert uploads == [[4, 5]]
    steps.run((4, 5, 6), 0)
    steps.run((4, 5), 3)  # the first two are still there
    assert uploads == [[4, 5], [4, 5, 6, 0]]
    steps.run((5, 4), 0)
    steps.run((5, 4, 6), 0)
    assert uploads[2:] == [[5, 4]]
    steps.run((5,), 0)
    steps.run((5, 4, 6, 7, 8), 0)
    assert uploads[3:] == [[5, 4, 6, 7, 8, 0, 0, 0]]
    assert step.calls[-1] == ((5, 4, 6, 7, 8, 0, 0, 0), 0)
    assert step.times[PAD_SLOT] == 0 and step.times[4] == 9
