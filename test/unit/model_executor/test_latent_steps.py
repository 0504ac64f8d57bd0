"""``DecodeStep`` over latent attention and over experts, with drafters of every kind of layer, on a CPU.

Wired as for CUDA, over the references of sgl_kernel; ``StepRunner`` over plain PyTorch is the oracle.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from unittest import mock

import pytest
from helpers.kernel_executor import kernel_executor
from helpers.plan_driver import DrivenRequest, PlanDriver
from helpers.tiny_executor import KINDS, draft_folder, drafter_folder, target_folder, tiny_executor

from sglang.srt.model_executor.step_plan import SlotSampling
from sglang.srt.models import packed

SAMPLINGS = (
    SlotSampling(temperature=0.0),
    SlotSampling(temperature=1.0, seed=11),
    SlotSampling(temperature=0.7, top_k=20, top_p=0.9, seed=5, draft_cap=1),
)


def drive(driver: PlanDriver, modes: list[int], num_tokens: int) -> list[DrivenRequest]:
    """Prompts in chunks, and a mode at random for every step."""
    rng = random.Random(len(modes))
    requests = [
        driver.add([rng.randrange(3, 250) for _ in range(5 + 17 * index)], sampling, chunk=16)
        for index, sampling in enumerate(SAMPLINGS)
    ]
    driver.generate(requests, num_tokens, lambda: rng.choice(modes))
    return requests


@pytest.mark.parametrize(
    "family,drafter,shape",
    [
        ("kimi-k2.5", "eagle3-mla", (3, 1, 4)),
        ("glm-4.7-flash", "nextn", (2, 1, 3)),
        ("qwen3-moe", "speculators-qwen3", (3, 1, 4)),
        ("glm4-moe", "nextn", (2, 1, 3)),
        ("llama", "ngram", (4, 1, 5)),
        ("llama", "standalone", (3, 1, 4)),
        pytest.param("glm4-moe", "nextn", (2, 3, 6), marks=pytest.mark.long),
        pytest.param("glm4-moe", "eagle3", (3, 1, 4), marks=pytest.mark.long),
        pytest.param("deepseek-v2", None, None, marks=pytest.mark.long),
        pytest.param("kimi-k2.5", "eagle3-mla", (3, 3, 8), marks=pytest.mark.long),
        pytest.param("kimi-k2.5", "eagle3", (2, 4, 16), marks=pytest.mark.long),
        pytest.param("deepseek-v3", "nextn", (2, 3, 6), marks=pytest.mark.long),
    ],
)
def test_same_tokens_as_the_runner_in_any_mode(
    family: str, drafter: str | None, shape: tuple[int, int, int] | None
) -> None:
    folder = None
    if drafter == "eagle3":
        folder = draft_folder(family)
    elif drafter is not None and drafter not in ("nextn", "ngram"):
        folder = drafter_folder(drafter, family)
    most = 0 if shape is None else shape[0]
    page_size = 1 if most == 3 else 4
    kind = None if drafter is None else KINDS.get(drafter)
    as_on_cuda = mock.patch.object(packed, "wants_kernels", lambda device: True)
    with as_on_cuda if family == "glm4-moe" else nullcontext():  # its heads get another order
        kernels = kernel_executor(target_folder(family), folder, shape, page_size, draft_kind=kind)
    oracle = tiny_executor(shape, family, drafter=drafter or "eagle3", dtype="float32", page_size=page_size)
    got, expected = (drive(PlanDriver(one), [0, most, max(most - 1, 0)], 18) for one in (kernels, oracle))
    for request, other in zip(got, expected, strict=True):
        assert request.output == other.output
        assert request.counts == other.counts
    if shape is not None:
        assert any(count > 1 for request in got for count in request.counts)
    for executor in (kernels, oracle):
        executor.shutdown()
