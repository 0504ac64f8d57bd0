"""Direct launches give a compiled kernel what Triton itself gives it, and tell apart what Triton does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kernel._dispatch import has_triton
from sgl_kernel.attention import AttentionShape, plan_prefill
from sgl_kernel.attention.prefill.op import prefill_launch
from sgl_kernel.direct import DirectLaunches, _is_known, _kind, direct_launches
from sgl_kernel.launch import Launch

pytestmark = pytest.mark.skipif(not has_triton(), reason="needs triton (requirements/dev.txt)")


class Kernel:
    """Launches are noted; a "compiled" kernel notes too what it is run with."""

    def __init__(self, arg_names: list[str]) -> None:
        self.arg_names = arg_names
        self.asked: list[tuple[Any, ...]] = []
        self.run: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **named: Any) -> SimpleNamespace:
            self.asked.append((grid, args, named))
            number = len(self.asked)
            run = lambda *given: self.run.append((number, *given))  # noqa: E731
            return SimpleNamespace(run=run, function=f"function {number}", packed_metadata=f"data {number}")

        return launch


def direct(kernel: Kernel) -> tuple[DirectLaunches, SimpleNamespace]:
    driver = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: f"stream {device}"
    )
    chains = SimpleNamespace(
        launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=SimpleNamespace(calls=[])
    )
    return DirectLaunches(kernel, driver, chains), chains


def test_the_second_launch_of_a_kind_goes_past_triton() -> None:
    kernel = Kernel(["x", "n", "BLOCK", "FLAG"])
    launches, hooks = direct(kernel)
    x, other = torch.zeros(64), torch.zeros(128)
    constants = {"FLAG": True, "BLOCK": 64}  # in no particular order
    launches.run(Launch(kernel, (3,), (x, 32), constants, num_warps=2))
    assert (
        kernel.asked == [((3,), (x, 32), {**constants, "num_warps": 2, "num_stages": 3})] and not kernel.run
    )
    launches.run(Launch(kernel, (5, 6), (other, 48), constants, num_warps=2))
    assert len(kernel.asked) == 1
    expected = (1, 5, 6, 1, "stream 0", "function 1", "data 1", None, None, None, other, 48, 64, True)
    assert all(a is b or a == b for a, b in zip(kernel.run.pop(), expected, strict=True))
    for new in (
        Launch(kernel, (3,), (x[1:], 32), constants, num_warps=2),  # not at a multiple of 16 bytes
        Launch(kernel, (3,), (x.double(), 32), constants, num_warps=2),
        Launch(kernel, (3,), (x, 33), constants, num_warps=2),
        Launch(kernel, (3,), (x, 1), constants, num_warps=2),
        Launch(kernel, (3,), (x, 2**40), constants, num_warps=2),
        Launch(kernel, (3,), (x, 32), constants, num_warps=4),
        Launch(kernel, (3,), (x, 32), {"FLAG": True, "BLOCK": 32}, num_warps=2),
        Launch(kernel, (3,), (x, 32), constants, num_warps=2, pdl=True),
    ):
        before = len(kernel.asked)
        launches.run(new)
        assert len(kernel.asked) == before + 1 and not kernel.run
        launches.run(new)
        assert kernel.run.pop()[0] == before + 1
    hooks.launch_enter_hook.calls.append(print)
    launches.run(new)
    assert len(kernel.asked) == 10 and not kernel.run, "a profiler hears of every launch"


@pytest.mark.parametrize(("version", "lines"), [("3.6.0", 0), ("3.7.1", 1), ("4.0.0", 1)])
def test_another_triton_launches_by_itself(
    version: str, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import triton

    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace()))
    for cached in (direct_launches, _is_known):
        cached.cache_clear()
    kernels = [Kernel(["x", "BLOCK"]) for _ in range(2)]
    x = torch.zeros(4)
    try:
        for kernel in kernels:
            if lines:
                for _ in range(2):
                    Launch(kernel, (3,), (x,), {"BLOCK": 64}).run()
                options = {"BLOCK": 64, "num_warps": 4, "num_stages": 3}
                assert kernel.asked == [((3,), (x,), options)] * 2 and not kernel.run
            else:
                assert isinstance(direct_launches(kernel), DirectLaunches)
        assert [version in record.message for record in caplog.records] == [True] * lines
    finally:
        for cached in (direct_launches, _is_known):
            cached.cache_clear()


def _binder(kernel: Any) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    return create_function_from_signature(kernel.signature, kernel.params, backend)


def test_a_real_kernels_arguments_are_those_that_triton_binds() -> None:
    shape = AttentionShape(6, 2, 32, 16)
    plan = plan_prefill(shape, torch.arange(8, dtype=torch.int32).view(2, 4), (1, 0), (16, 0), (5, 17), 4)
    q, kv = torch.zeros(22, 6, 32), torch.zeros(128, 2, 2, 32)
    launch = prefill_launch(q, kv, q.clone(), plan, None)
    bound, _, _ = _binder(launch.kernel)(*launch.args, **launch.constants, **launch.options)
    kernel = Kernel(launch.kernel.arg_names)
    launches, _ = direct(kernel)
    twice = Launch(kernel, launch.grid, launch.args, launch.constants, launch.num_warps, launch.num_stages)
    launches.run(twice)
    launches.run(twice)
    [run] = kernel.run
    assert run[1:4] == (*launch.grid, 1)
    assert len(run[10:]) == len(bound)
    assert all(given is expected for given, expected in zip(run[10:], bound.values(), strict=True))


numbers = st.one_of(st.integers(-70, 70), st.integers(-(2**63), 2**63 - 1), st.floats(), st.booleans())


@settings(max_examples=300, deadline=None)
@given(numbers, numbers)
def test_what_triton_tells_apart_is_told_apart(one: float, other: float) -> None:
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    if _kind(one) == _kind(other):
        a, b = (native_specialize_impl(CUDABackend, value, False, True, True) for value in (one, other))
        assert a == b


def test_tensors_are_told_apart_as_triton_does() -> None:
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    x = torch.zeros(64, dtype=torch.float32)
    tensors = [x, x[1:], x[4:], x.to(torch.int64), x.to(torch.bfloat16), x.to(torch.bfloat16)[1:]]
    kinds = [_kind(t) for t in tensors]
    found = [native_specialize_impl(CUDABackend, t, False, True, True) for t in tensors]
    assert (
        [kinds.index(kind) for kind in kinds] == [found.index(kind) for kind in found] == [0, 1, 0, 3, 4, 5]
    )
