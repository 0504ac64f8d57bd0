"""Building an executor: what it says of itself, and one clear error for what can't be."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from helpers.plan_driver import PlanDriver
from helpers.tiny_executor import draft_folder, target_folder, tiny_executor
from helpers.tiny_models import write_tiny_eagle3, write_tiny_llama
from safetensors.torch import load_file, save_file

from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.configs.model_config import ModelConfigError
from sglang.srt.managers.executor_build import ExecutorArgsError, build_executor, log_spec_version
from sglang.srt.model_executor.memory import OutOfMemoryError
from sglang.srt.model_executor.step_plan import SpecShape
from sglang.srt.model_loader.weight_source import WeightError


def test_info() -> None:
    info = tiny_executor((2, 3, 7), page_size=4, capture_max_bs=5).info
    assert (info.num_slots, info.page_size, info.context_len, info.vocab_size) == (8, 4, 1000, 256)
    assert info.num_pages == 1024 and info.spec == SpecShape(2, 3, 7) and info.max_spec_rows == 5
    assert info.draft_lens == (1, 2) and info.most_rows(1) == info.most_rows(2) == 5
    assert info.most_rows(0) == info.most_rows(3) == 0 and info.device_name == "cpu"
    assert info.weight_bytes > 0 and info.kv_bytes > 0
    plain = tiny_executor().info
    assert (
        plain.spec is None
        and plain.max_spec_rows == 0
        and plain.draft_lens == ()
        and plain.kv_bytes < info.kv_bytes
    )


def test_a_drafter_changes_no_other_limit() -> None:
    with_drafter, without = tiny_executor((3, 1, 4)).info, tiny_executor().info
    assert with_drafter.num_slots == without.num_slots and with_drafter.context_len == without.context_len
    assert with_drafter.max_spec_rows == with_drafter.num_slots


@pytest.mark.parametrize("shape", [None, (3, 1, 4), (2, 3, 7)], ids=str)
def test_dummy_weights_run(shape: tuple[int, int, int] | None) -> None:
    driver = PlanDriver(tiny_executor(shape, load_format="dummy", dtype="auto"))
    assert driver.executor.worker.config.dtype == torch.float32
    request = driver.add([1, 2, 3])
    driver.generate([request], 8, shape[0] if shape else 0)
    assert not request.faulty


@pytest.mark.parametrize("shape", [None, (3, 1, 4), (2, 3, 7)], ids=str)
def test_bfloat16_runs(shape: tuple[int, int, int] | None) -> None:
    driver = PlanDriver(tiny_executor(shape, dtype="bfloat16"))
    request = driver.add([1, 2, 3])
    driver.generate([request], 8, shape[0] if shape else 0)
    assert not request.faulty


def test_a_finished_request_may_be_stepped_once_more_at_the_end_of_its_context() -> None:
    for shape in ((3, 1, 4), (5, 4, 8)):
        driver = PlanDriver(tiny_executor(shape, context_length=40, page_size=4))
        request = driver.add(list(range(30)))
        driver.generate([request], 10, shape[0])
        driver.step([request], shape[0])
        driver.step([request], shape[0])
        assert not request.faulty


@pytest.mark.parametrize(
    "changes,error,message",
    [
        ({"model_path": "/nowhere"}, ModelConfigError, "does not exist"),
        ({"dtype": "int8"}, ExecutorArgsError, "dtype 'int8' is not one of"),
        ({"attention_backend": "magic"}, ExecutorArgsError, "attention backend 'magic'"),
        ({"max_total_tokens": 3}, OutOfMemoryError, "no request fits"),
        ({"num_steps": 3, "topk": 1, "num_draft_tokens": 9}, ExecutorArgsError, "exactly, for topk 1"),
        (
            {"num_steps": 2, "topk": 2, "num_draft_tokens": 8},
            ExecutorArgsError,
            "give 7 draft tokens at most",
        ),
        ({"num_steps": 0}, ExecutorArgsError, "at least 1 step"),
        ({"spec_rows": ((4, None),)}, ExecutorArgsError, "draft lengths are 1 to 3"),
        (
            {"num_steps": 1, "topk": 200, "num_draft_tokens": 2},
            ModelConfigError,
            "draft vocabulary has 128 ids",
        ),
    ],
)
def test_errors(changes: dict[str, object], error: type[Exception], message: str) -> None:
    values: dict[str, object] = {
        "model_path": str(target_folder()),
        "draft_model_path": str(draft_folder()),
        "max_total_tokens": 256,
        "max_running_requests": 2,
        "context_length": 64,
    }
    with pytest.raises(error, match=message):
        build_executor(ExecutorArgs(**(values | changes)))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["d2t", "fc.weight", "midlayer.self_attn.k_proj.weight"])
def test_a_draft_tensor_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    folder = write_tiny_eagle3(tmp_path / "draft", target_folder())
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightError, match=name.split(".weight")[0]):
        tiny_executor((3, 1, 4), draft_model_path=str(folder))


def test_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    other = write_tiny_llama(tmp_path / "other", vocab_size=300)
    folder = write_tiny_eagle3(tmp_path / "draft", other)
    with pytest.raises(ModelConfigError, match="vocabulary 300"):
        tiny_executor((3, 1, 4), draft_model_path=str(folder))


@pytest.mark.parametrize("given,note", [(None, ""), ("0", "SGLANG_ENABLE_SPEC_V2=0 changes nothing")])
def test_the_switch_of_upstream_is_one_log_line(
    given: str | None, note: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        log_spec_version({} if given is None else {"SGLANG_ENABLE_SPEC_V2": given})
    (record,) = caplog.records
    assert "EAGLEWorkerV2" in record.getMessage() and note in record.getMessage()
