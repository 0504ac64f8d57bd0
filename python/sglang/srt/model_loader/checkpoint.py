"""Weights of a Hugging Face folder: safetensors (one file or sharded), pytorch_model.bin, or a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from sglang.srt.configs.quant_config import QuantConfig
from sglang.srt.model_loader.dummy import DummySource
from sglang.srt.model_loader.dummy_packed import DummyQuantSource
from sglang.srt.model_loader.gguf_file import GgufFile
from sglang.srt.model_loader.progress import LoadProgress
from sglang.srt.model_loader.quant_source import QuantSource
from sglang.srt.model_loader.reading import Readers
from sglang.srt.model_loader.weight_files import (
    LOAD_FORMATS,
    SafetensorsFile,
    TorchFile,
    WholeFile,
    weight_files,
)
from sglang.srt.model_loader.weight_source import Ledger, Part, WeightError, WeightSource, widened


def open_source(
    folder: str | Path,
    load_format: str,
    dtype: torch.dtype,
    device: torch.device | str,
    quant: QuantConfig | None = None,
    shows_progress: bool = False,
) -> WeightSource:
    """Open the weights of a model folder. ``auto``: safetensors if there are any, else .bin, else .gguf.

    ``quant``: how the folder's config says that it is quantised; dummy weights are drawn so too.

    Raises:
        WeightError: no weights there, or a file that is broken.
    """
    if load_format not in LOAD_FORMATS:
        raise WeightError(f"load format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    if load_format == "dummy":
        return DummySource(dtype, device) if quant is None else DummyQuantSource(quant, dtype, device)
    source = CheckpointSource(Path(folder), load_format, dtype, device, shows_progress)
    return source if quant is None else QuantSource(source, quant)


class CheckpointSource:
    """Tensors by name, whichever file holds them, read as they are taken.

    A tensor is complete when ``take`` returns it. Large ones are read by several threads; of small ones,
    several are in ``side_by_side``.
    """

    def __init__(
        self,
        folder: Path,
        load_format: str,
        dtype: torch.dtype,
        device: torch.device | str,
        shows_progress: bool = False,
    ) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self._files: dict[str, SafetensorsFile | WholeFile] = {}  # tensor name -> its file
        self._opened: list[SafetensorsFile | WholeFile] = []
        self.ledger = Ledger(str(folder))
        for path in weight_files(folder, load_format):
            file = _open(path)
            self._opened.append(file)
            self._files |= dict.fromkeys(file.names(), file)
        self._readers = Readers(self.device)
        self._progress = LoadProgress(sum(map(self._num_bytes, self._files)), shows_progress)

    def has(self, name: str) -> bool:
        return name in self._files

    def take(
        self, name: str, shape: Sequence[int], *, wide: bool = False, part: Part | None = None
    ) -> torch.Tensor:
        dtype = widened(self.dtype) if wide else self.dtype
        found = self._read(name, shape, part, dtype)
        if found is not None:
            return found
        return torch.zeros(*(shape if part is None else part.shape(shape)), dtype=dtype, device=self.device)

    def take_packed(self, name: str, shape: Sequence[int], part: Part | None = None) -> None:
        return None  # the config says nothing of a quantisation

    def take_integers(self, name: str, size: int) -> torch.Tensor:
        found = self._read(name, (size,), None, torch.int64)
        return torch.zeros(size, dtype=torch.int64, device=self.device) if found is None else found

    def side_by_side(self, calls: Sequence[Callable[[], None]]) -> None:
        self._readers.run(calls)

    def stored(self, name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """dtype and shape in the file; None: it has no such tensor."""
        file = self._files.get(name)
        return None if file is None else (file.dtype(name), file.shape(name))

    def take_stored(self, name: str, shape: Sequence[int], part: Part | None = None) -> torch.Tensor | None:
        """As it lies in the file, on the wanted device; None (and recorded) as ``take`` gives zeros."""
        return self._read(name, shape, part, None)

    def unused(self) -> list[str]:
        """Names that nobody took yet, in order."""
        return sorted(set(self._files) - self.ledger.taken)

    def finish(self, ignorable: Sequence[str] = ()) -> None:
        self._readers.close()
        self._progress.close()
        for file in self._opened:
            file.close()
        try:
            self.ledger.check(self._files, ignorable)
        finally:
            self._files.clear()

    def _num_bytes(self, name: str) -> int:
        return self._files[name].num_bytes(name)

    def _read(
        self, name: str, shape: Sequence[int], part: Part | None, dtype: torch.dtype | None
    ) -> torch.Tensor | None:
        """In a tensor of its own; ``dtype`` None: that of the file. None: it is recorded why not."""
        file = self._files.get(name)
        if file is None:
            self.ledger.missing.append(name)
            return None
        self.ledger.taken.add(name)
        if (found := file.shape(name)) != tuple(shape):
            self.ledger.wrong_shape.append(f"{name} {list(found)} instead of {list(shape)}")
            return None
        if part is not None and part.is_whole(shape):
            part = None
        dtype = dtype or file.dtype(name)
        if isinstance(file, SafetensorsFile):
            wanted = tuple(shape) if part is None else part.shape(shape)
            out = torch.empty(wanted, dtype=dtype, device=self.device)
            self._readers.fill(out, file.stored(name), part)
        else:
            whole = file.tensor(name)
            # copy: what a file maps must not stay mapped for a model's life
            out = (whole if part is None else part.of(whole)).to(device=self.device, dtype=dtype, copy=True)
            out = out.contiguous()
        self._progress.add(self._num_bytes(name))
        return out


def _open(path: Path) -> SafetensorsFile | WholeFile:
    if path.suffix == ".gguf":
        return GgufFile(path)
    return SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path)
