"""The rules for the device and its CUDA graph flags. Pure functions of plain values, tested by tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sglang.srt.utils.flags import ServerArgsError

NO_GRAPHS_ON_CPU: Final = "there are no CUDA graphs on a CPU (--device cpu): leave it out"
NO_KERNELS_ON_CPU: Final = "a CPU (--device cpu) has no kernels to choose between: leave it out"
_KERNELS_ELSEWHERE: Final = ("fa3", "fa4", "trtllm_mla", "trtllm_mha", "flashmla", "cutlass_mla")
_OWN: Final = {"cpu": "torch_native", "cuda": "triton"}
_PREFILL_BY: Final = "flashinfer"  # on CUDA, where asked for
_ON_CUDA: Final = (_OWN["cuda"], _PREFILL_BY)


def check_graph_flags(
    device: str,
    max_bs: int | None,
    sizes: Sequence[int] | None,
    disable: bool,
    disable_padding: bool,
    choices_file: bool,
) -> None:
    """
    Raises:
        ServerArgsError: a flag that would change nothing, or sizes that can't be. On a CPU sizes may be
            given all the same (``replaced_on_cpu``): commands for GPUs have them.
    """
    given = {
        "--cuda-graph-max-bs": max_bs is not None,
        "--cuda-graph-bs": sizes is not None,
        "--disable-cuda-graph-padding": disable_padding,
        "--kernel-choices-file": choices_file,
    }
    shaping = [name for name, is_given in given.items() if is_given]
    on_gpu = [name for name in shaping if name not in ("--cuda-graph-max-bs", "--cuda-graph-bs")]
    if device == "cpu" and (on_gpu or disable):
        name = on_gpu[0] if on_gpu else "--disable-cuda-graph"
        why = NO_KERNELS_ON_CPU if name == "--kernel-choices-file" else NO_GRAPHS_ON_CPU
        raise ServerArgsError(f"{name}: {why}")
    if disable and shaping:
        raise ServerArgsError(f"{shaping[0]} changes nothing with --disable-cuda-graph: leave one out")
    if sizes is not None and (not sizes or min(sizes) < 1):
        raise ServerArgsError(f"--cuda-graph-bs takes batch sizes of at least 1, got {list(sizes)}")
    if sizes is not None and max_bs is not None and min(sizes) > max_bs:
        raise ServerArgsError(
            f"--cuda-graph-bs {min(sizes)} is beyond --cuda-graph-max-bs {max_bs}: no size is left"
        )


def replaced_on_cpu(max_bs: int | None, sizes: Sequence[int] | None, backend: str | None) -> list[str]:
    """A line for each flag that a CPU has no use for, with what it does instead."""
    lines = []
    if max_bs is not None:
        lines.append("--cuda-graph-max-bs: a CPU has no CUDA graphs; every decode step runs eagerly")
    if sizes is not None:
        lines.append("--cuda-graph-bs: a CPU has no CUDA graphs; every decode step runs eagerly")
    if backend in _ON_CUDA:
        lines.append(f"--attention-backend {backend} is for GPUs; {_OWN['cpu']} is used")
    return lines


def attention_backend(given: str | None, device: str) -> str:
    """The backend of the device, where that or nothing is asked for; on CUDA flashinfer too; on a CPU its
    own in the place of CUDA's."""
    own = _OWN[device]
    if given in (None, own) or (device == "cpu" and given in _ON_CUDA):
        return own
    if given == _PREFILL_BY and device == "cuda":
        return _PREFILL_BY
    places = {name: place for place, name in _OWN.items()} | {_PREFILL_BY: "cuda"}
    if given in places:
        why = f"is for --device {places[given]}"
    else:
        why = "needs a kernel this server does not have" if given in _KERNELS_ELSEWHERE else "is unknown"
    raise ServerArgsError(f"--attention-backend {given} {why}: use {own} on {device}, or leave it out")
