"""Sums over ranks with the residual and the RMS norm in one launch, by FlashInfer's kernels for one host.

Only those without multicast (their backend "trtllm"): each rank writes to, and in two steps reads from, the
memory of the others. The memory is ours, so FlashInfer's own ways to share some, which need torch's default
process group, are left out, and so is its ``comm`` package, which needs more packages than the kernels do.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from sgl_kernel.flashinfer_package import FlashInferError, find_flashinfer, not_built
from sgl_kernel.launch import compiling_ahead

RANKS: Final = (2, 4, 8, 16)
DTYPES: Final = (torch.bfloat16, torch.float16)
"""Of one workspace: what marks a place as empty is the same in both, and another thing in float32."""

NOT_COMPILED: Final = (
    "its kernels for sums are not in FlashInfer's cache; the package flashinfer-jit-cache brings them, or"
    " compile them once, which takes minutes"
)
BUILD_COMMAND: Final = (
    'python -c "from sgl_kernel.communication.flashinfer import load_kernels; load_kernels(build=True)"'
)

_SUM_RESIDUAL_NORM: Final = 1  # its number of the pattern
_VECTOR: Final = 8  # elements of a row that one thread has
_MAX_THREADS: Final = 1024
_MAX_CLUSTER: Final = 8
_FLAGS: Final = 256  # of each rank: a program's in two steps, at most so many
_ALIGNED: Final = 4096
_EMPTY: Final = -0x8000  # minus zero as int16: nobody gives that, so it says that nothing has come


def load_kernels(*, build: bool = False) -> Any:
    """FlashInfer's module. ``build``: compiled if it is not in its cache, which takes minutes.

    Raises:
        FlashInferError: the package or a compiler is missing, or the module is not there and not to be built.
    """
    find_flashinfer()
    try:
        spec = importlib.import_module("flashinfer.jit.comm").gen_trtllm_comm_module()
        if build or spec.is_compiled:
            return spec.build_and_load()
    except Exception as error:  # an edge: another project's build, of which anything may fail
        raise not_built("sums over GPUs", error) from error
    raise FlashInferError(f"{NOT_COMPILED}: {BUILD_COMMAND}")


def why_not(size: int, width: int, dtype: torch.dtype) -> str:
    """Why its kernels are not for so many ranks and rows of ``width``; empty: they are."""
    if size not in RANKS:
        return f"its kernels are for {', '.join(map(str, RANKS))} ranks, not for {size}"
    if dtype not in DTYPES:
        return f"its kernels are used for bfloat16 and float16, not for {dtype}"
    threads = width // _VECTOR
    cluster = _MAX_CLUSTER
    while cluster > 1 and threads % cluster:
        cluster //= 2
    if width % _VECTOR or threads // cluster > _MAX_THREADS:
        return f"its kernels are not for rows of {width}"
    return ""


@dataclass(frozen=True, slots=True)
class FlashInferLayout:
    """Offsets in bytes of what a rank shares: one block, the same on all ranks."""

    size: int  # ranks
    once_bytes: int  # largest message in one step
    twice_bytes: int  # in two

    @property
    def buffer(self) -> int:
        """For two steps: a message, and its sum."""
        return 0

    @property
    def flags(self) -> int:
        """[_FLAGS, size] int32."""
        return _aligned(2 * self.twice_bytes)

    @property
    def parts(self) -> int:
        """For one step: [3 turns, size, message]."""
        return self.flags + _aligned(4 * _FLAGS * self.size)

    @property
    def turn_bytes(self) -> int:
        return self.size * self.once_bytes

    @property
    def total_bytes(self) -> int:
        return self.parts + _aligned(3 * self.turn_bytes)

    def prepare(self, block: torch.Tensor, *, waits: bool = True) -> None:
        """Make a rank's block, [total_bytes] uint8, ready for the first sum.

        ``waits`` False: for one that waits for nobody, and gives nothing of use: where one thread launches
        all ranks' kernels they must be loaded before any of them waits.
        """
        flags, parts = block[self.flags : self.parts].view(torch.int32), block[self.parts :].view(torch.int16)
        flags.fill_(0 if waits else 3)  # those in use are 0, 1 and 2
        parts.fill_(_EMPTY if waits else 0)


class FlashInferSums:
    """One rank's side. All ranks must make the same sums in the same order, on one stream each."""

    def __init__(
        self,
        kernels: Any,  # of ``load_kernels``
        rank: int,
        addresses: Sequence[int],
        layout: FlashInferLayout,
        device: torch.device,
    ) -> None:
        """addresses: of every rank's prepared block, as this rank's GPU sees them."""
        assert len(addresses) == layout.size in RANKS and 0 <= rank < layout.size
        self.rank = rank
        self.layout = layout
        self.early = False
        """Launched while the kernel ahead still runs. It reads the residual before it waits for that one, so
        this is only for where that one has not written it, nor any that may still run then."""
        self._kernels = kernels
        # Programs that have come, turn in two steps, turn in one, bytes of a turn, what to empty next.
        self._state = torch.tensor([0, 0, 0, layout.turn_bytes, 0], dtype=torch.int32, device=device)
        offsets = (layout.buffer, layout.flags, layout.parts)
        pointers = [address + offset for offset in offsets for address in addresses]
        self._workspace = torch.tensor(
            [*pointers, self._state.data_ptr()], dtype=torch.int64, device=device
        )  # [3 * size + 1]

    def reset(self) -> None:
        """As for the first sum; the blocks must be prepared again too, on all ranks."""
        self._state.copy_(torch.tensor([0, 0, 0, self.layout.turn_bytes, 0], dtype=torch.int32))

    def takes(self, x: torch.Tensor, *, twice: bool) -> bool:
        """x: [T, H]. In two steps each rank adds up some rows."""
        most = self.layout.twice_bytes if twice else self.layout.once_bytes
        fits = 0 < x.numel() * x.element_size() <= most
        return fits and x.dtype in DTYPES and (not twice or x.shape[0] > self.layout.size)

    def sum_and_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        twice: bool,
        normed: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: [T, H] contiguous, used up; weight: [H] -> the sum over the ranks added to the
        residual, in its memory, and the RMS norm of that (in ``normed``, if that is given).

        Parts are added in float32 in the order of the ranks; the sum is rounded, and again when it has been
        added to the residual, and the norm once.
        """
        assert self.takes(x, twice=twice) and x.is_contiguous() and residual.is_contiguous()
        assert residual.shape == x.shape and residual.dtype == x.dtype
        assert weight.shape == x.shape[1:] and weight.dtype == x.dtype
        normed = torch.empty_like(x) if normed is None else normed
        if compiling_ahead():
            return residual, normed
        self._kernels.trtllm_allreduce_fusion(
            x,
            self.layout.size,
            self.rank,
            *x.shape,
            self._workspace,
            self.early,
            not twice,
            True,  # the next kernel may start when this one is done
            True,  # sums in float32
            _SUM_RESIDUAL_NORM,
            None,  # the sum alone
            residual,
            residual,
            normed,
            None,
            None,
            weight,
            eps,
            None,
            None,
            None,
            None,
        )
        return residual, normed


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED
