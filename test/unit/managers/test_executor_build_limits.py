"""What a GPU can't hold ends the start in a line that says what to do, and not in a library's traceback."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from triton.runtime.errors import OutOfResources

from sgl_kernel.launch import Launch
from sglang.srt.managers.executor_build_limits import limits_told
from sglang.srt.managers.executor_build_models import ExecutorArgsError
from sglang.srt.managers.executor_errors import is_for_user
from sglang.srt.model_executor.memory import OutOfMemoryError


def test_a_kernel_that_does_not_fit_names_the_flag() -> None:
    class TooLarge:
        def __getitem__(self, grid: tuple[int, ...]) -> TooLarge:
            return self

        def __call__(self, **options: object) -> None:
            raise OutOfResources(376960, 232448, "shared memory")

    launch = Launch(TooLarge(), (1,), ())
    wanted = r"376960 of shared memory, and this GPU has 232448.*--dtype bfloat16"
    with pytest.raises(ExecutorArgsError, match=wanted) as told, limits_told():
        launch.by_triton()
    assert is_for_user(told.value)


def test_memory_that_is_used_up_names_the_flags() -> None:
    wanted = "tried to allocate.*--chunked-prefill-size"
    with pytest.raises(OutOfMemoryError, match=wanted) as told, limits_told():
        raise torch.OutOfMemoryError("tried to allocate 3 GiB\nmore")
    assert is_for_user(told.value)


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(ValueError, match="else"), limits_told():
        raise ValueError("something else")
