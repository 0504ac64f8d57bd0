"""How many KV pages fit."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang.srt.model_executor.config import max_positions
from sglang.srt.model_executor.step_plan import SpecShape

logger = logging.getLogger(__name__)


class OutOfMemoryError(RuntimeError):
    """The memory given holds no request; one line for the user."""


@dataclass(frozen=True, slots=True)
class PageBudget:
    page_size: int
    bytes_per_place: int  # K and V of one token: all layers of the target, and the drafter's
    num_slots: int
    context_len: int
    spec: SpecShape | None
    max_total_tokens: int | None  # the user's; None: as many as fit
    mem_fraction: float  # of the memory available
    available_bytes: int
    step_bytes: int = 0  # what steps need beside the pools, at most

    def num_pages(self) -> int:
        """Usable pages, the pad page not counted.

        Never more than all slots can use at their longest: a log line where that is less than the user's.

        Raises:
            OutOfMemoryError: a request of two tokens would not fit.
        """
        longest = max_positions(self.context_len, self.spec)
        most = self.num_slots * -(-longest // self.page_size)
        fit = self._kv_bytes() // (self.bytes_per_place * self.page_size) - 1
        if self.max_total_tokens is not None:
            pages = min(most, self.max_total_tokens // self.page_size)
            self._need(pages <= fit, f"--max-total-tokens {self.max_total_tokens} does not fit", fit)
            if self.max_total_tokens // self.page_size > most:
                self._say_cut(most)
        else:
            pages = min(most, fit)
        smallest = -(-(2 + longest - self.context_len) // self.page_size)
        self._need(pages >= smallest, f"no request fits: it needs {smallest * self.page_size} tokens", pages)
        return pages

    def _kv_bytes(self) -> int:
        """The fraction, or what steps leave. No more than half is kept for them: all requests at their
        most expensive would be rare, and too small a pool helps nobody."""
        kept = min(self.step_bytes, self.available_bytes // 2)
        if kept < self.step_bytes:
            logger.warning(
                "steps of %d requests may need %d MiB, and %d MiB are available: a lower"
                " --max-running-requests makes sure that they fit",
                self.num_slots, self.step_bytes >> 20, self.available_bytes >> 20,
            )  # fmt: skip
        return min(int(self.available_bytes * self.mem_fraction), self.available_bytes - kept)

    def _say_cut(self, most: int) -> None:
        logger.warning(
            "--max-total-tokens %d is more than %d requests of %d tokens can use: the KV cache holds %d",
            self.max_total_tokens, self.num_slots, self.context_len, most * self.page_size,
        )  # fmt: skip

    def _need(self, ok: bool, problem: str, pages: int) -> None:
        if ok:
            return
        tokens, mib = max(pages, 0) * self.page_size, self.available_bytes >> 20
        steps = min(self.step_bytes, self.available_bytes // 2) >> 20
        beside = f", {steps} MiB of them kept for steps" if steps else ""
        raise OutOfMemoryError(
            f"{problem}; there is room for {tokens} tokens of KV cache ({self.bytes_per_place} bytes a token,"
            f" {self.mem_fraction:g} of {mib} MiB available{beside}). Change --mem-fraction-static or"
            " --max-total-tokens, or use a smaller model"
        )


def available_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on the device, after the weights."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_host_available(), _cgroup_available())


def _host_available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        if "MemAvailable" in fields:
            return int(fields["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_available() -> int:
    """What a container's limit leaves (cgroup v2); a very large number without one."""
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    unlimited = 2**62
    if not (limit.exists() and used.exists()):
        return unlimited
    text = limit.read_text().strip()
    return unlimited if text == "max" else max(0, int(text) - int(used.read_text()))


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one GPU, measured when everything but the KV pool and the graphs is there."""

    total: int
    free: int
    own: int  # weights and state of this process
    activations: int  # what a step needs while it runs, at most
    graphs: int  # an estimate: they are captured after the pool, whose address they hold

    def for_kv(self, fraction: float) -> int:
        """What the KV pool may have.

        ``fraction`` of the GPU is for weights, KV and graphs; the rest is for activations, and for what
        CUDA itself takes. Where that is more than the rest, or others use the GPU too, the pool is smaller.
        """
        allowed = int(self.total * fraction) - self.own - self.graphs
        return max(0, min(allowed, self.free - self.graphs - self.activations))


BYTES_A_GRAPH = 8 << 20
"""What CUDA keeps for one graph of a few hundred launches, beside the tensors in its pool."""

CPU_CHUNK = 512
"""Prompt tokens of a prefill step on a CPU: some 3 s of 2 cores for the embedded model, in which no row
decodes."""

_LARGE_GPU = 100 * 10**9  # bytes


def default_chunk(total_bytes: int) -> int:
    """Prompt tokens of a prefill step on a GPU of that size, where the user says nothing."""
    return 16384 if total_bytes > _LARGE_GPU else 8192
