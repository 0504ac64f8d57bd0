"""What a look at the GPUs' links has found, and how the server asks for it; needs no torch.

The look is a process of its own with a time limit: where the host's set-up is wrong (an IOMMU that does not
let GPUs reach each other, for one) a copy between GPUs gives zeros, or never ends, and so would a server.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec

from sglang.srt.utils.child_process import start_child, stop_children

MODULE: Final = "sglang.srt.distributed.link_check"
LIMIT_S: Final = 90.0
_LOOK_S: Final = 0.05


class LinkReport(msgspec.Struct, frozen=True):
    """Written whenever more is known: what is still in doubt when the process ends counts as broken."""

    gpus: int = -1  # that this process may use; -1: it did not get so far
    reachable: bool = True  # every GPU can see the memory of every other one
    copies: bool = False  # between every two GPUs arrive whole
    pushes: bool = False  # sums by our own kernels come out right
    flashinfer: bool = False  # and those by FlashInfer's
    why: str = ""
    doing: str = "starting"
    slowest_gbs: float = 0.0  # of the copies
    seconds: float = 0.0


class LinkCheckConfig(msgspec.Struct, frozen=True):
    size: int
    pushes: bool
    flashinfer: bool  # only its kernels; links and pushes are known to be right
    file: str  # of the report


def check_links(size: int, *, pushes: bool, limit_s: float = LIMIT_S, module: str = MODULE) -> LinkReport:
    """Of the first ``size`` GPUs; ``pushes``: our own kernels too."""
    return _look(size, pushes, False, limit_s, module)


def check_flashinfer(size: int, *, limit_s: float = LIMIT_S, module: str = MODULE) -> LinkReport:
    """Sums over them by FlashInfer's kernels, where they are compiled; links that ``check_links`` has found
    to be good. A process of its own again: whatever these kernels do leaves that report as it is."""
    return _look(size, True, True, limit_s, module)


def _look(size: int, pushes: bool, flashinfer: bool, limit_s: float, module: str) -> LinkReport:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sglang-links-") as folder:
        file = Path(folder) / "report"
        config = msgspec.msgpack.encode(LinkCheckConfig(size, pushes, flashinfer, str(file)))
        child = start_child("GPU link check", module, config, kill_with_parent=True)
        while (code := child.exit_code()) is None and time.monotonic() - began < limit_s:
            time.sleep(_LOOK_S)
        stop_children([child], grace_s=0.0)
        report = read_report(file)
    seconds = time.monotonic() - began
    if not report.why and code != 0:
        ended = f"had not ended after {limit_s:.0f} s" if code is None else f"ended with {code}"
        report = msgspec.structs.replace(report, why=f"the check {ended} ({report.doing})")
    return msgspec.structs.replace(report, seconds=seconds)


def read_report(file: Path) -> LinkReport:
    try:
        return msgspec.msgpack.decode(file.read_bytes(), type=LinkReport)
    except FileNotFoundError:
        return LinkReport()


def write_report(file: Path, report: LinkReport) -> None:
    """All of it at once: the process may be ended at any time."""
    new = file.with_suffix(".new")
    new.write_bytes(msgspec.msgpack.encode(report))
    new.rename(file)
