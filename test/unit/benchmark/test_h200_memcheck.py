"""The run for compute-sanitizer, on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_executor import tiny_executor

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.h200 import memcheck
from benchmark.h200.executors import CHAIN, TREE
from benchmark.h200.memcheck_choices import chosen_for
from benchmark.h200.padding import Reserved
from sgl_kernel._dispatch import H200, RTX_PRO_6000
from sgl_kernel.linear.variants import ROW_CLASSES, ChoiceTable, Problem, candidates
from sglang.bench_one_batch_cases import GREEDY, OneBatch
from sglang.srt.managers.executor_settings import executor_args
from sglang.srt.model_executor.step_plan import StepPlan
from sglang.srt.server_args import ServerArgs


def test_every_mode_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "-1")  # put back afterwards: the script sets it
    file = tmp_path / "out.jsonl"
    flags = ["--tiny", "--device", "cpu", "--models", "d64", "--out", str(file)]
    assert memcheck.main(flags) == 0
    assert capsys.readouterr().out.endswith("\nok\n")
    lines: list[dict[str, Any]] = [json.loads(x) for x in file.read_text().splitlines()]
    found = {x["note"]: x["steps"] for x in lines if x["kind"] == "memcheck"}
    cases = len(list(memcheck.cases_of(3)))
    assert found == {
        f"d64, {shape}, graphs off": {"graph": 0, "eager": 3 * cases} for shape in ("chain", "tree")
    }


def test_a_changed_reserved_page_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "-1")
    monkeypatch.setattr(Reserved, "changed", lambda self, before: ["page of pool 0"])
    flags = ["--tiny", "--device", "cpu", "--models", "d64", "--shapes", "chain"]
    assert memcheck.main(flags) == 1
    assert not capsys.readouterr().out.endswith("ok\n")


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("model", list(memcheck.MODELS))
def test_the_gpus_flags_are_flags_of_the_server(model: str, graphs: bool, tmp_path: Path) -> None:
    folders, choices = memcheck.write_model(tmp_path, model), tmp_path / "choices.json"
    for shape in (CHAIN, TREE):
        wanted = memcheck.wanted_of(folders, shape, "cuda", graphs, choices)
        built = executor_args(ServerArgs.from_command_line(wanted.flags()).resolve("LlamaForCausalLM"))
        assert built.disable_cuda_graph != graphs
        assert built.cuda_graph_bs == ((1, 4) if graphs else None)
        assert built.kernel_choices_file == (str(choices) if graphs else None)
        assert built.capture_max_bs == 4 < built.max_running_requests


@pytest.mark.parametrize("info", [H200, RTX_PRO_6000])
def test_choices_are_of_our_kernels_and_of_many(info: Any) -> None:
    widths = memcheck._widths()
    chosen = chosen_for(widths, info)
    assert len(chosen) == len(widths) ** 2 * 2 * len(ROW_CLASSES)
    table = ChoiceTable("d", chosen)
    problem = Problem(memcheck.VOCAB, memcheck.HIDDEN, 4)
    assert table.variant(problem, info.arch, info.num_sms).name == chosen[problem.key] != "torch"
    for rows in ROW_CLASSES:
        problems = [Problem(n, memcheck.HIDDEN, rows) for n in widths]
        found = {v.name for p in problems for v in candidates(p, info.arch, info.num_sms)} - {"torch"}
        assert {chosen[p.key] for p in problems} == found and len(found) > 3


def test_rows_are_sampled_as_they_say() -> None:
    executor = tiny_executor(CHAIN)
    admitted: list[Any] = []
    launch = executor.launch

    def noted(plan: StepPlan) -> Any:
        admitted.extend(plan.admissions)
        return launch(plan)

    executor.launch = noted  # type: ignore[method-assign]
    batch = OneBatch(executor, [[1, 2], [3]], 20)
    batch.rows[1].sampling = memcheck.SAMPLINGS[2]
    batch.prefill()
    executor.shutdown()
    assert [a.sampling for a in admitted] == [GREEDY, memcheck.SAMPLINGS[2]]
