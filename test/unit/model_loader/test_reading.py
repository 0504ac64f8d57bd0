"""Files read in pieces by several threads: every byte in its place, little memory, errors with names."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.tiny_models import write_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from sglang.srt.distributed.shares import Span
from sglang.srt.model_loader import progress, reading
from sglang.srt.model_loader.checkpoint import CheckpointSource, open_source
from sglang.srt.model_loader.progress import LoadProgress
from sglang.srt.model_loader.reading import Readers
from sglang.srt.model_loader.weight_files import SafetensorsFile
from sglang.srt.model_loader.weight_source import Part, WeightError

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    shape=st.lists(st.integers(0, 9), max_size=4),
    stored=st.sampled_from((torch.float32, torch.bfloat16, torch.uint8, torch.int64)),
    wanted=st.sampled_from((None, torch.float64, torch.float32)),
    sizes=st.sampled_from(((16, 8), (64, 1000), (40, 0), (1 << 20, 1 << 10))),
    threads=st.integers(1, 3),
)
def test_every_part_in_pieces_of_any_size(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    shape: list[int],
    stored: torch.dtype,
    wanted: torch.dtype | None,
    sizes: tuple[int, int],
    threads: int,
) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    whole = torch.randint(0, 200, shape, generator=generator).to(stored)
    path = tmp_path_factory.mktemp("file") / "model.safetensors"
    save_file({"a": torch.ones(3), "b": whole, "c": torch.ones(5, dtype=torch.uint8)}, path)
    part, expected = None, whole
    if shape and data.draw(st.booleans(), "part"):
        dim = data.draw(st.integers(0, len(shape) - 1), "dim")
        begin, end = sorted(data.draw(st.integers(0, shape[dim]), edge) for edge in ("begin", "end"))
        part = Part(dim, Span(begin, end))
        expected = part.of(whole)
    out = torch.full(expected.shape, 7, dtype=wanted or stored)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PIECE_BYTES", sizes[0])
        patch.setattr(reading, "SHORT_RUN_BYTES", sizes[1])
        readers = Readers(CPU, threads)
        readers.fill(out, SafetensorsFile(path).stored("b"), part)
        readers.close()
    assert torch.equal(out, expected.to(out.dtype))


def test_calls_side_by_side(tmp_path: Path) -> None:
    """Two wait for each other, so they do run at once; what they take within is read in their own threads."""
    tensors = {f"t{i}": torch.full((4, 3), float(i)) for i in range(20)}
    source = CheckpointSource(write_folder(tmp_path, {}, tensors, 3), "auto", torch.float32, CPU)
    source._readers = Readers(CPU, 2)
    out, barrier = torch.zeros(20, 4, 3), threading.Barrier(2, timeout=20)

    def call(i: int) -> Callable[[], None]:
        def put() -> None:
            barrier.wait()
            out[i] = source.take(f"t{i}", (4, 3))

        return put

    source.side_by_side([call(i) for i in range(20)])
    assert torch.equal(out[:, 0, 0], torch.arange(20.0))
    source.finish()


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    file = write_folder(tmp_path, {}, {"a": torch.ones(1000), "b": torch.ones(1000)}) / "model.safetensors"
    source = open_source(tmp_path, "auto", torch.float32, CPU)
    os.truncate(file, file.stat().st_size - 2000)
    assert torch.equal(source.take("a", (1000,)), torch.ones(1000))
    message = "model.safetensors: tensor b can't be read: the file became shorter"
    with pytest.raises(WeightError, match=message):
        source.take("b", (1000,))
    with pytest.raises(WeightError, match=message):
        source.side_by_side([lambda: source.take("b", (1000,)).zero_()] * 9)


def test_an_error_in_one_thread_ends_the_others(tmp_path: Path) -> None:
    """Nothing of the calls runs on after the error has been raised."""
    readers, ran = Readers(CPU, 2), []

    def call(i: int) -> Callable[[], None]:
        def work() -> None:
            if i == 3:
                raise WeightError("three")
            time.sleep(0.005)
            ran.append(i)

        return work

    with pytest.raises(WeightError, match="three"):
        readers.run([call(i) for i in range(200)])
    count = len(ran)
    assert count < 150
    time.sleep(0.05)
    assert len(ran) == count
    readers.close()


def test_a_load_needs_little_beside_its_tensors(tmp_path: Path) -> None:
    """A buffer and some pages of maps for each thread, whatever is loaded: here an eighth of 192 MiB."""
    parts, size, threads = [Part(0, Span(0, 1024)), Part(1, Span(64, 128))], (8192, 512), 2
    tensors = {f"t{i}": torch.randn(size) for i in range(12)}
    source = CheckpointSource(write_folder(tmp_path, {}, tensors, 3), "auto", torch.float32, CPU)
    del tensors
    source._readers = Readers(CPU, threads)
    largest = torch.Size(parts[0].shape(size)).numel() * 4
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = memory_of_process("VmRSS")
    taken = [source.take(f"t{i}", size, part=parts[i % 2]) for i in range(12)]
    assert sum(t.nbytes for t in taken) == 12 * largest
    beside = memory_of_process("VmHWM") - before - 12 * largest
    assert beside < threads * (reading.PIECE_BYTES + reading.MAPPED_BYTES) + largest
    source.finish()


def memory_of_process(field: str) -> int:
    """In bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def test_files_are_closed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {}, {f"t{i}": torch.ones(2) for i in range(8)}, 8)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    source = open_source(folder, "auto", torch.float32, CPU)
    assert len(os.listdir("/proc/self/fd")) == before + 8
    for i in range(8):
        source.take(f"t{i}", (2,))
    source.finish()
    assert len(os.listdir("/proc/self/fd")) == before
    forgotten = open_source(folder, "auto", torch.float32, CPU)
    del forgotten
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_line_every_tenth(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    with caplog.at_level(logging.INFO, progress.__name__):
        told = LoadProgress(1000)
        for _ in range(100):
            told.add(10)
        told.close()
    assert [record.getMessage().split()[2] for record in caplog.records] == [
        str(10 * i) for i in range(1, 11)
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO, progress.__name__):
        LoadProgress(1000, shown=False).add(1000)
    assert not caplog.records
