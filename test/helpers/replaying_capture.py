"""A ``Capture`` for a CPU: a replay runs the step again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch

from sglang.srt.model_executor.step_graphs import same
from sglang.srt.model_executor.step_trace import StepDone

T = TypeVar("T")


class ReplayingCapture:
    """The output of a replay is in the tensor that the capture returned, as a graph's is."""

    def __init__(self) -> None:
        self.num_traced = 0
        self.bytes = 1000

    def capture(self, step: Callable[[], T], lend: Callable[[T], T] = same) -> Callable[[], T]:
        output = _packed(lend(step()))
        self.bytes += output.numel()

        @torch.inference_mode()  # as a worker's steps are
        def replay() -> T:
            done = step()
            output.copy_(_packed(done))
            return cast("T", replace(done, packed=output) if isinstance(done, StepDone) else output)

        return replay

    def trace(self, steps: Callable[[], None]) -> None:
        self.num_traced += 1

    def let_go(self, held: list[Any]) -> None:
        """A replay here reads it."""

    def used_bytes(self) -> int:
        return self.bytes


def _packed(output: object) -> torch.Tensor:
    if isinstance(output, StepDone):
        return output.packed
    assert isinstance(output, torch.Tensor)
    return output
