"""Which kernels multiply NVFP4 weights: ``--fp4-gemm-backend`` and ``--moe-runner-backend``. Plain values."""

from __future__ import annotations

from typing import Final

from sglang.srt.utils.flags import ServerArgsError

AUTO: Final = "auto"
OWN: Final = "triton"
BOTH_IN_FP4: Final = "flashinfer_cutlass"
BACKENDS: Final = (AUTO, OWN, BOTH_IN_FP4)

FOR_LINEARS: Final = "--fp4-gemm-backend"
FOR_EXPERTS: Final = "--moe-runner-backend"


def check_fp4_flags(linears: str, experts: str, device: str) -> None:
    """
    Raises:
        ServerArgsError: there is no such backend, or it is for a GPU.
    """
    for option, given in ((FOR_LINEARS, linears), (FOR_EXPERTS, experts)):
        if given not in BACKENDS:
            raise ServerArgsError(
                f"{option} {given} is not one of: {', '.join(BACKENDS)}. auto and triton are our own kernels,"
                f" {BOTH_IN_FP4} multiplies NVFP4 weights with inputs in NVFP4 by FlashInfer"
            )
        if given == BOTH_IN_FP4 and device == "cpu":
            raise ServerArgsError(needs_gpu(option))


def needs_gpu(option: str) -> str:
    return (
        f"{option} {BOTH_IN_FP4} needs a GPU of SM100 or SM120, and this server runs on a CPU (--device cpu):"
        " leave it out"
    )


def replaced_on_cpu(linears: str, experts: str) -> list[str]:
    """A line for each flag that a CPU has no use for, with what it does instead."""
    given = ((FOR_LINEARS, linears), (FOR_EXPERTS, experts))
    return [
        f"{option} {OWN} is for GPUs; on a CPU weights are dequantised as they are loaded"
        for option, name in given
        if name == OWN
    ]
