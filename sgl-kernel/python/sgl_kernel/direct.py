"""Launches past Triton's front: it works out at every launch what it found out at the last one.

Binding, specialising and looking up a kernel of 30 parameters takes it some 20 us, more than many of our
kernels run for. Here a kernel that has run is found again by what Triton compiled it for: the types of its
arguments, which pointers and numbers are multiples of 16, which numbers are 1, constants and options.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, Final

import torch

from sgl_kernel._dispatch import interpreting

if TYPE_CHECKING:
    from sgl_kernel.launch import Launch

logger = logging.getLogger(__name__)

_LAUNCHER_OF: Final = "3.6."
"""The Triton whose launcher takes what ``DirectLaunches`` gives it; any other is asked as usual."""


@functools.cache
def direct_launches(kernel: Any) -> DirectLaunches | None:
    """Of one kernel for the whole process, as Triton's own cache is; None where it must be asked."""
    import triton

    if interpreting() or not _is_known(triton.__version__):
        return None
    return DirectLaunches(kernel, triton.runtime.driver.active, triton.knobs.runtime)


@functools.cache  # said once, not for every kernel
def _is_known(version: str) -> bool:
    known = version.startswith(_LAUNCHER_OF)
    if not known:
        logger.warning(
            "Triton %s: its launcher is not known here (that of %sx is), so every launch outside a CUDA graph"
            " goes through Triton's own front and takes some 20 us more of the host",
            version, _LAUNCHER_OF,
        )  # fmt: skip
    return known


class DirectLaunches:
    """The compiled variants of one kernel."""

    def __init__(self, kernel: Any, driver: Any, hooks: Any) -> None:
        """``driver``: of Triton, says the device and its stream; ``hooks``: where profilers hang theirs."""
        self._names = kernel.arg_names
        self._driver = driver
        self._hooks = hooks
        # A compiled kernel's launcher, its function, its data, and the constants as the kernel names them.
        self._compiled: dict[tuple[Any, ...], tuple[Any, Any, Any, list[Any]]] = {}

    def run(self, launch: Launch) -> None:
        device = self._driver.get_current_device()
        key = (
            device,
            launch.num_warps,
            launch.num_stages,
            launch.max_registers,
            launch.pdl,
            launch.fp_fusion,
            *launch.constants.items(),
            *map(_kind, launch.args),
        )
        found = self._compiled.get(key)
        if found is None or self._hooks.launch_enter_hook.calls or self._hooks.launch_exit_hook.calls:
            compiled = launch.by_triton()
            constants = [launch.constants.get(name) for name in self._names[len(launch.args) :]]
            self._compiled[key] = compiled.run, compiled.function, compiled.packed_metadata, constants
            return
        run, function, data, constants = found
        grid = launch.grid
        run(
            grid[0],
            grid[1] if len(grid) > 1 else 1,
            grid[2] if len(grid) > 2 else 1,
            self._driver.get_current_stream(device),
            function,
            data,
            None,  # for hooks, of which there are none
            None,
            None,
            *launch.args,
            *constants,
        )


def _kind(arg: Any) -> Any:
    """What Triton compiles a kernel for, of an argument; it may tell apart more, but not less."""
    if isinstance(arg, torch.Tensor):  # most are
        return arg.dtype if arg.data_ptr() % 16 == 0 else (arg.dtype,)
    kind = type(arg)
    if kind is int:
        if arg == 1:
            return 1
        is_wide = not -(2**31) <= arg < 2**31
        return is_wide, arg % 16 == 0
    assert kind is float or kind is bool or arg is None, f"an argument of type {kind}"
    return kind
