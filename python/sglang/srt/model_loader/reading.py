"""From files to tensors by several threads, each through one small buffer of its own.

What bounds loading is the host's copying, not the disks and not the links to the devices, so tensors are cut
into pieces that threads bring over side by side. A piece goes from the page cache into a thread's buffer
(pinned, for a device) and from there to its place; or, on a CPU and where nothing is converted, straight to
its place. Of rows of which a rank has a few columns, those alone are copied, out of a map of the file:
reading would copy whole rows, which are as many times as much as there are ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Lock, local
from typing import Any, Final

import torch

from sglang.srt.model_loader.weight_files import SafetensorsFile, Stored
from sglang.srt.model_loader.weight_source import Part

PIECE_BYTES: Final = 2 << 20
"""Most of a file that a thread holds: its second copy is made from the processor's cache."""
MAPPED_BYTES: Final = 8 << 20
"""Of maps of files, for each thread."""
SHORT_RUN_BYTES: Final = 64 << 10
"""Runs of bytes shorter than this are not read one by one, but with what lies between them."""
MAX_THREADS: Final = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """``rows`` of ``row`` elements in a file, and where some columns of them belong."""

    stored: Stored
    offset: int  # in the file
    row: int
    begin: int  # first wanted column
    into: torch.Tensor  # [rows, wanted columns]

    @property
    def num_bytes(self) -> int:
        return self.into.shape[0] * self.row * self.stored.dtype.itemsize

    @property
    def is_run(self) -> bool:
        return self.into.shape[1] == self.row


def pieces_of(stored: Stored, part: Part | None, out: torch.Tensor) -> Iterator[Piece]:
    """out: the part's shape, contiguous."""
    shape, size = stored.shape, stored.dtype.itemsize
    outer, row, begin = 1, torch.Size(shape).numel(), 0
    if part is not None:
        outer, inner = torch.Size(shape[: part.dim]).numel(), torch.Size(shape[part.dim + 1 :]).numel()
        row, begin = shape[part.dim] * inner, part.span.begin * inner
    width = out.numel() // max(outer, 1)
    if width == 0 or outer == 0:
        return
    places = out.view(outer, width)
    # Whole rows: in a map, or in a buffer where a map's numbers would not be aligned.
    most_bytes = PIECE_BYTES if stored.offset % size else MAPPED_BYTES
    if outer == 1 or width * size >= SHORT_RUN_BYTES or row * size > most_bytes:
        most = PIECE_BYTES // size
        for i in range(outer):
            for column in range(0, width, most):
                into = places[i : i + 1, column : column + most]
                offset = stored.offset + (i * row + begin + column) * size
                yield Piece(stored, offset, into.shape[1], 0, into)
        return
    most = max(1, min(most_bytes // (row * size), PIECE_BYTES // (width * size)))
    for i in range(0, outer, most):
        yield Piece(stored, stored.offset + i * row * size, row, begin, places[i : i + most])


class Readers:
    """Fills tensors on one device. Threads are started when they are first of use."""

    def __init__(self, device: torch.device, num_threads: int | None = None) -> None:
        self._device = device
        self._num_threads = num_threads or min(MAX_THREADS, os.cpu_count() or 1)
        self._pool: ThreadPoolExecutor | None = None
        self._lock = Lock()
        self._mapped_bytes = 0
        self._mapped_files: set[SafetensorsFile] = set()
        self._own = local()  # of a thread: buffer; of a reader's: stream

    def fill(self, out: torch.Tensor, stored: Stored, part: Part | None = None) -> None:
        """Returns when the bytes are there.

        Raises:
            WeightError: the file can't be read.
        """
        pieces = list(pieces_of(stored, part, out))
        if len(pieces) < 2 or self._is_reader():
            for piece in pieces:
                self._bring(piece)
        else:
            self.run([partial(self._bring, piece) for piece in pieces])

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """All of them, several at a time, in readers' threads; the first error ends it.

        What a call makes it must use up: on a device it belongs to its thread's stream.
        """
        if self._is_reader() or self._num_threads == 1:
            for call in calls:
                call()
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads, "weights", self._start_reader)
        ready = None
        if self._device.type == "cuda":  # memory for the results may be in use by what was launched before
            ready = torch.cuda.current_stream(self._device).record_event()
        mode = torch.is_inference_mode_enabled()
        futures = [self._pool.submit(self._call, call, ready, mode) for call in calls]
        try:
            for future in futures:
                future.result()
        finally:
            _stop(futures)  # nobody writes to the results any more

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _is_reader(self) -> bool:
        return hasattr(self._own, "stream")

    def _start_reader(self) -> None:
        self._own.stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def _call(self, call: Callable[[], None], ready: Any, inference: bool) -> None:
        stream = self._own.stream
        context: AbstractContextManager[Any] = nullcontext() if stream is None else torch.cuda.stream(stream)
        with context, torch.inference_mode(inference):
            if stream is not None:
                stream.wait_event(ready)
            call()
            if stream is not None:
                stream.synchronize()

    def _bring(self, piece: Piece) -> None:
        stored, into = piece.stored, piece.into
        if into.device.type == "cpu" and piece.is_run and into.dtype == stored.dtype and into.is_contiguous():
            stored.file.read(stored.name, _memory(into), piece.offset)
            return
        if piece.is_run or stored.offset % stored.dtype.itemsize:
            held = self._buffer()[: piece.num_bytes]
            stored.file.read(stored.name, _memory(held), piece.offset)
            self._move(_columns(held, piece), into)
            return
        wanted = _columns(stored.file.mapped(stored.name, piece.offset, piece.num_bytes), piece)
        if into.device.type != "cpu":
            size = into.numel() * stored.dtype.itemsize
            wanted = self._buffer()[:size].view(stored.dtype).view(into.shape).copy_(wanted)
        self._move(wanted, into)
        self._note_mapped(piece)

    def _note_mapped(self, piece: Piece) -> None:
        """Maps let go of their memory now and then: to do it after every piece would cost more than it."""
        with self._lock:
            self._mapped_bytes += piece.num_bytes
            self._mapped_files.add(piece.stored.file)
            if self._mapped_bytes < MAPPED_BYTES * self._num_threads:
                return
            files, self._mapped_files, self._mapped_bytes = self._mapped_files, set(), 0
        for file in files:
            file.let_go()

    def _move(self, found: torch.Tensor, into: torch.Tensor) -> None:
        """found: on the CPU, in a buffer that will be used again."""
        if into.device.type == "cpu":
            into.copy_(found)
            return
        if found.is_contiguous() and found.dtype == into.dtype:
            into.copy_(found, non_blocking=True)
        else:  # converted over there
            into.copy_(found.to(into.device, non_blocking=True))
        torch.cuda.current_stream(into.device).synchronize()

    def _buffer(self) -> torch.Tensor:
        if not hasattr(self._own, "buffer"):
            pinned = self._device.type == "cuda"
            self._own.buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=pinned)
        buffer: torch.Tensor = self._own.buffer
        return buffer


def _columns(found: torch.Tensor, piece: Piece) -> torch.Tensor:
    """found: [bytes] uint8 of whole rows -> [rows, wanted columns], a view."""
    rows = found.view(piece.stored.dtype).view(-1, piece.row)
    return rows[:, piece.begin : piece.begin + piece.into.shape[1]]


def _memory(tensor: torch.Tensor) -> memoryview:
    """Of a contiguous one on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _stop(futures: Sequence[Future[None]]) -> None:
    for future in futures:
        future.cancel()
    wait(futures)
