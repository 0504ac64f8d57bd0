"""A kernel launch as a value: what an op runs, and what the compile gates compile.

Only one place builds the launch of an op, so that a gate sees the very specialisation (dtypes,
divisibility by 16, constants, warps, stages) that a GPU would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from sgl_kernel._dispatch import interpreting
from sgl_kernel.direct import direct_launches

_COMPILING_AHEAD: Final[ContextVar[bool]] = ContextVar("compiling_ahead", default=False)


@contextmanager
def compile_ahead(num_threads: int) -> Iterator[None]:
    """Within it every launch only compiles its kernel, many at a time; all are ready at its end.

    Nothing runs, so what the ops return holds whatever its memory held.
    """
    token = _COMPILING_AHEAD.set(True)
    try:
        with ThreadPoolExecutor(num_threads) as threads, _compiling_in(threads):
            yield
    finally:
        _COMPILING_AHEAD.reset(token)


def compiling_ahead() -> bool:
    """Whether this is within ``compile_ahead``: what other libraries launch may be left out as well."""
    return _COMPILING_AHEAD.get()


def _compiling_in(threads: ThreadPoolExecutor) -> AbstractContextManager[Any]:
    try:
        from triton.runtime._async_compile import AsyncCompileMode
    except ImportError:  # Triton's own business: a version without it compiles one after the other
        return nullcontext()
    mode: AbstractContextManager[Any] = AsyncCompileMode(threads)
    return mode


class KernelSizeError(RuntimeError):
    """A kernel of these sizes does not fit the GPU."""


@dataclass(frozen=True, slots=True)
class Launch:
    """``kernel[grid](*args, **constants)``."""

    kernel: Any  # a @triton.jit function
    grid: tuple[int, ...]
    args: tuple[Any, ...]  # tensors and numbers, in the order of the kernel's first parameters
    constants: Mapping[str, Any] = field(default_factory=dict)  # its tl.constexpr parameters
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None  # a thread; also stops ptxas from spilling to reach an occupancy
    pdl: bool = False  # programmatic dependent launch; the kernel must then call begin_dependent(True)
    fp_fusion: bool = True  # False: no a * b + c in one rounding, where results must equal another device's

    @property
    def options(self) -> dict[str, Any]:
        given: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.max_registers is not None:
            given["maxnreg"] = self.max_registers
        if self.pdl and not interpreting():
            given["launch_pdl"] = True
        if not self.fp_fusion:
            given["enable_fp_fusion"] = False
        return given

    def run(self) -> None:
        if _COMPILING_AHEAD.get():
            self.kernel.warmup(*self.args, grid=self.grid, **self.constants, **self.options)
            return
        direct = direct_launches(self.kernel)
        if direct is not None:
            direct.run(self)
        else:
            self.by_triton()

    def by_triton(self) -> Any:
        """Launch as Triton does it, compiling where that has not happened; returns what was compiled.

        Raises:
            KernelSizeError: a program needs more shared memory, or the like, than the GPU has.
        """
        from triton.runtime.errors import OutOfResources

        try:
            return self.kernel[self.grid](*self.args, **self.constants, **self.options)
        except OutOfResources as error:
            name = getattr(self.kernel, "__name__", "a kernel")
            raise KernelSizeError(
                f"{name} needs {error.required} of {error.name}, and this GPU has {error.limit}"
            ) from error


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def compute_type(dtype: torch.dtype) -> Any:
    """The type in which a kernel multiplies: that of its inputs, float32 under the interpreter.

    The interpreter's ``tl.dot`` is wrong on bfloat16 (which it holds as uint16), so every kernel that
    multiplies takes this as a constant ``CT``.
    """
    import triton.language as tl

    if interpreting() or dtype == torch.float32:
        return tl.float32
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
