"""``DecodeStep`` over layers with windows and sinks, wired as for CUDA over the references of sgl_kernel.

``StepRunner`` over plain PyTorch is the oracle. Texts are longer than the windows of 24.
"""

from __future__ import annotations

import random
from unittest import mock

import pytest
from helpers.kernel_executor import kernel_executor
from helpers.plan_driver import DrivenRequest, PlanDriver
from helpers.tiny_executor import draft_folder, target_folder, tiny_executor

from sglang.srt.model_executor.step_plan import SlotSampling
from sglang.srt.models import packed

SAMPLINGS = (
    SlotSampling(temperature=0.0),
    SlotSampling(temperature=1.0, seed=11),
    SlotSampling(temperature=0.0, draft_cap=1),
)


def drive(driver: PlanDriver, modes: list[int], num_tokens: int) -> list[DrivenRequest]:
    """Prompts in chunks, and a mode at random for every step."""
    rng = random.Random(len(modes))
    requests = [
        driver.add([rng.randrange(3, 250) for _ in range(10 + 17 * index)], sampling, chunk=16)
        for index, sampling in enumerate(SAMPLINGS)
    ]
    driver.generate(requests, num_tokens, lambda: rng.choice(modes))
    return requests


@pytest.mark.parametrize(
    "family,shape",
    [
        ("gpt-oss", (3, 1, 4)),
        pytest.param("gpt-oss", (3, 3, 8), marks=pytest.mark.long),
        pytest.param("gpt-oss", None, marks=pytest.mark.long),
        pytest.param("gpt-oss", (2, 4, 16), marks=pytest.mark.long),
        ("mistral-window", (3, 1, 4)),
        pytest.param("mistral-window", None, marks=pytest.mark.long),
        pytest.param("mistral-window", (3, 3, 8), marks=pytest.mark.long),
    ],
)
def test_same_tokens_as_the_runner_in_any_mode(family: str, shape: tuple[int, int, int] | None) -> None:
    most = 0 if shape is None else shape[0]
    page_size = 1 if most == 3 else 4
    draft = None if shape is None else draft_folder(family)
    with mock.patch.object(packed, "wants_kernels", lambda device: True):
        kernels = kernel_executor(target_folder(family), draft, shape, page_size)
    oracle = tiny_executor(shape, family, dtype="float32", page_size=page_size)
    got, expected = (drive(PlanDriver(one), [0, most, max(most - 1, 0)], 24) for one in (kernels, oracle))
    for request, other in zip(got, expected, strict=True):
        assert request.output == other.output
        assert request.counts == other.counts
    if shape is not None:
        assert any(count > 1 for request in got for count in request.counts)
    for executor in (kernels, oracle):
        executor.shutdown()
