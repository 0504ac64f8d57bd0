"""Compile a launch for GPUs that are not there, and say what it would need.

Arguments may be tensors on the ``meta`` device: real shapes without memory. Their address counts as
aligned to 16 bytes, as that of a CUDA allocation is.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_kernel.launch import Launch

SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


@dataclass(frozen=True, slots=True)
class Compiled:
    arch: int
    shared: int  # bytes of shared memory a program
    registers: int  # a thread
    stack: int  # bytes a thread; more than 0 means spills
    ptx: str
    ttgir: str

    def programs_per_sm(self, num_warps: int) -> int:
        """By registers and shared memory; 1 KiB a program is the driver's."""
        total = {120: 100 * 1024}.get(self.arch, SHARED_LIMIT[self.arch] + 1024)
        by_shared = total // (self.shared + 1024)
        by_registers = 65536 // (-(-self.registers // 8) * 8 * 32 * num_warps)
        return min(by_shared, by_registers, (48 if self.arch >= 120 else 64) // num_warps)


def compile_launch(launch: Launch, arch: int) -> Compiled:
    """Compile with the specialisation that Triton's launcher derives from these very arguments."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    binder = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
    keywords = {**launch.constants, **launch.options}
    bound, specialisation, _ = binder(*launch.args, **keywords)
    options, signature, constants, attributes = launch.kernel._pack_args(
        backend, keywords, bound, specialisation, None
    )
    source = ASTSource(launch.kernel, signature, constants, attributes)
    made = triton.compile(source, target=target, options=options.__dict__)
    registers, stack = _resources(made.asm["cubin"])
    return Compiled(
        arch=arch,
        shared=made.metadata.shared,
        registers=registers,
        stack=stack,
        ptx=made.asm["ptx"],
        ttgir=str(made.asm["ttgir"]),
    )


def check(launch: Launch, archs: tuple[int, ...] = (90, 120)) -> list[Compiled]:
    """Compile for each architecture; assert that it fits and that nothing is spilled."""
    all_made = [compile_launch(launch, arch) for arch in archs]
    for made in all_made:
        name = f"{launch.kernel.__name__} on sm_{made.arch}"
        limit = SHARED_LIMIT[made.arch]
        assert made.shared <= limit, f"{name}: {made.shared} bytes of shared memory, {limit} at most"
        assert made.stack == 0, f"{name}: spills ({made.stack} bytes of stack, {made.registers} registers)"
    return all_made


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, stack bytes) of the one function in it."""
    import triton.backends.nvidia as nvidia

    tool = Path(str(nvidia.__file__)).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return _number("REG", said.stdout), _number("STACK", said.stdout)


def _number(key: str, text: str) -> int:
    found: Any = re.search(rf"{key}:(\d+)", text)
    assert found, f"no {key} in {text!r}"
    return int(found.group(1))
