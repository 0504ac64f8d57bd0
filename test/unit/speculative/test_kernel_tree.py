"""Trees drafted over sgl_kernel's ops against those of ``EAGLEWorkerV2``, and how many launches they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from helpers.kernel_executor import kernel_executor
from helpers.plan_driver import PlanDriver
from helpers.tiny_executor import draft_folder, target_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sglang.srt.layers.attention import triton_backend
from sglang.srt.model_executor.decode_step import Rows
from sglang.srt.model_executor.drafter import DraftContext, DraftTree
from sglang.srt.model_executor.step_plan import SlotSampling, SpecShape
from sglang.srt.model_executor.worker import Worker
from sglang.srt.speculative import draft_forward, kernel_tree
from sglang.srt.speculative.kernel_tree import KernelTrees

PROMPTS = ([5, 6, 7, 8], list(range(3, 60)), [9, 30, 200, 4, 77, 12, 91])
HEATS = (0.0, 1.0, 0.6)


@dataclass(frozen=True, slots=True)
class Served:
    """Three requests in the middle of their life."""

    driver: PlanDriver
    slots: torch.Tensor  # [R]

    @property
    def worker(self) -> Worker:
        return self.driver.executor.worker


def serve() -> Served:
    driver = PlanDriver(kernel_executor(target_folder(), draft_folder(), (5, 8, 16), 16))
    requests = [
        driver.add(prompt, SlotSampling(temperature=heat, seed=index))
        for index, (prompt, heat) in enumerate(zip(PROMPTS, HEATS, strict=True))
    ]
    driver.generate(requests, 6, lambda: 2)
    return Served(driver, torch.tensor([request.slot for request in requests]))


def rows_of(served: Served) -> tuple[Rows, torch.Tensor]:
    state = served.worker.state
    tokens = state.next_token[served.slots][:, None].repeat(1, 6)
    return Rows(served.slots, state.seq_len[served.slots].to(torch.int64), pdl=False), tokens


def both(served: Served, shape: SpecShape, draft_len: int) -> tuple[DraftTree, DraftTree]:
    """The worker's, and the kernels'."""
    worker, (rows, tokens) = served.worker, rows_of(served)
    oracle = worker.drafter
    oracle._spec = shape
    state, feature = worker.state, worker.state.draft_feature[rows.slots]
    bound = int(rows.root.max())
    expected = oracle.draft(
        DraftContext(rows.slots, rows.root, bound, tokens[:, 0], feature, sampled=True), draft_len
    )
    trees = KernelTrees(oracle._model, oracle._backend, state, worker.sampler.states, shape)
    return expected, trees.draft(rows, tokens, draft_len)


def test_same_trees_as_the_worker() -> None:
    served = serve()

    @settings(max_examples=40, deadline=None, derandomize=True)  # scores may be as close as a rounding
    @given(st.integers(2, 8), st.integers(2, 5), st.data())
    def check(topk: int, steps: int, data: st.DataObject) -> None:
        most = 1 + topk + (steps - 1) * topk**2
        shape = SpecShape(steps, topk, data.draw(st.integers(2, min(64, most))))
        expected, got = both(served, shape, data.draw(st.integers(1, steps)))
        for name in ("tokens", "parents", "depths", "mask"):
            assert torch.equal(getattr(got, name), getattr(expected, name)), name

    with torch.inference_mode():
        check()
    served.driver.executor.shutdown()


LAUNCHES = {"pair_inputs": 1, "plan_decode": 1, "expand": 2, "finish": 2}
MAKES_NOTHING = {
    "alias", "as_strided", "detach", "empty", "expand", "new_empty", "permute", "select", "slice", "split",
    "squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view",
}  # fmt: skip


class Counting(TorchDispatchMode):
    """Counts torch's operations that launch something, and our own ops' launches in their stead."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if not self.paused and func.overloadpacket.__name__ not in MAKES_NOTHING:
            self.count += 1
        return func(*args, **(kwargs or {}))

    def instead(self, function: Callable[..., Any], launches: int) -> Callable[..., Any]:
        def counted(*args: Any, **named: Any) -> Any:
            before, self.paused = self.paused, True
            self.count += launches
            try:
                return function(*args, **named)
            finally:
                self.paused = before

        return counted


def launches_of(draft: Callable[[], object], model: object, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of all but the layer and its logits, which are the same launches whoever drafts."""
    counting = Counting()
    with monkeypatch.context() as patched:
        for module in (draft_forward, kernel_tree, triton_backend):
            for name, launches in LAUNCHES.items():
                if hasattr(module, name):
                    patched.setattr(module, name, counting.instead(getattr(module, name), launches))
        for name in ("layer_of_pairs", "logits"):
            patched.setattr(model, name, counting.instead(getattr(model, name), 0))
        with counting, torch.inference_mode():
            draft()
    return counting.count


def test_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()
    worker, (rows, tokens), oracle = served.worker, rows_of(served), served.worker.drafter
    context = DraftContext(
        rows.slots, rows.root, 100, tokens[:, 0], worker.state.draft_feature[rows.slots], sampled=True
    )
    for steps, topk, nodes in ((2, 4, 16), (5, 4, 16)):
        oracle._spec = SpecShape(steps, topk, nodes)
        trees = KernelTrees(oracle._model, oracle._backend, worker.state, worker.sampler.states, oracle._spec)
        by_torch, by_kernels = (
            launches_of(partial(draft, *args, steps), oracle._model, monkeypatch)
            for draft, args in ((oracle.draft, (context,)), (trees.draft, (rows, tokens)))
        )
        print(f"{steps} steps: {by_torch} launches in torch, {by_kernels} by kernels")
        # A level: pairs, plan, best of the blocks, frontier or tree; and L - 1.
        assert by_kernels == 4 * steps + 1 < by_torch / 8
    served.driver.executor.shutdown()
