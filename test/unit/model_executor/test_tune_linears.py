"""Which variant a product ends up with, by tables of times: no GPU is needed to decide."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sgl_kernel.linear.variants import ChoiceTable, Problem, candidates
from sglang.srt.layers import kernel_linear
from sglang.srt.layers.kernel_linear import KernelChoices, Use
from sglang.srt.layers.linear import Linear
from sglang.srt.model_executor import tune_linears as module
from sglang.srt.model_executor.tune_linears import tune_linears

pytest.importorskip("triton", reason="compiling ahead needs triton")

CPU, N, K = torch.device("cpu"), 256, 512
RAN: list[tuple[int, str]] = []  # rows and variant of every product that ran


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    def watch(use: Use, variant: kernel_linear.Variant, choices: KernelChoices) -> torch.Tensor:
        RAN.append((use.x.shape[0], variant.name))
        return torch.zeros(use.x.shape[0], N, dtype=torch.bfloat16)

    RAN.clear()
    for place in (module, kernel_linear):
        monkeypatch.setattr(place, "carry_out", watch)


def names(rows: int) -> list[str]:
    return [v.name for v in candidates(Problem(N, K, rows), 90, 132)]


def tuned(
    rows_of_steps: list[int], alone: Callable[[int, str], float], in_step: Callable[[int, str], float]
) -> ChoiceTable:
    """Steps of one product each. Times by rows and variant."""
    linear = Linear(torch.zeros(N, K, dtype=torch.bfloat16))
    choices = KernelChoices(ChoiceTable("a GPU"), CPU)
    linear.use_kernels(choices)
    steps = [lambda rows=rows: linear(torch.zeros(rows, K, dtype=torch.bfloat16)) for rows in rows_of_steps]

    def micros(run: Callable[[], object]) -> float:
        RAN.clear()
        run()
        (rows, name), *_ = RAN
        return (in_step if run in steps else alone)(rows, name)

    tune_linears(choices, steps, micros)  # type: ignore[arg-type]
    return choices.table


def test_the_step_decides_among_those_that_are_close_alone() -> None:
    first, second, far, *_ = names(1)
    alone = {first: 10.0, second: 11.0, far: 20.0}
    in_step = {first: 100.0, second: 90.0, far: 1.0}
    table = tuned([1], lambda _, name: alone.get(name, 50.0), lambda _, name: in_step[name])
    assert table.chosen[Problem(N, K, 1).key] == second, f"{far} is not tried: alone it takes twice as long"


def test_a_gain_within_noise_changes_nothing() -> None:
    first, second, *_ = names(1)
    table = tuned(
        [1],
        lambda _, name: {first: 10.0, second: 10.5}.get(name, 50.0),
        lambda _, name: {first: 100.0, second: 99.9}[name],
    )
    assert table.chosen[Problem(N, K, 1).key] == first


def test_a_class_of_rows_is_judged_by_its_largest() -> None:
    first, second, *_ = names(16)

    def alone(rows: int, name: str) -> float:
        return {(6, first): 1.0, (16, second): 1.0}.get((rows, name), 50.0)

    table = tuned([6, 16, 12], alone, lambda rows, name: 1.0)
    assert table.chosen[Problem(N, K, 16).key] == second
    assert table.variant(Problem(N, K, 6), 90, 132).name == second


def test_what_the_table_holds_is_left_alone() -> None:
    table = ChoiceTable("a GPU", {Problem(N, K, 4).key: names(4)[1]})
    linear = Linear(torch.zeros(N, K, dtype=torch.bfloat16))
    choices = KernelChoices(table, CPU)
    linear.use_kernels(choices)
    report = tune_linears(choices, [lambda: linear(torch.zeros(4, K, dtype=torch.bfloat16))], lambda run: 1.0)
    assert report.num_problems == report.num_variants == 0
    assert table.chosen == {Problem(N, K, 4).key: names(4)[1]}
