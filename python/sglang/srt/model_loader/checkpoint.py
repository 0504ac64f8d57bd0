"""Weights of a Hugging Face folder: safetensors (one file or sharded), pytorch_model.bin, or a GGUF file."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open

from sglang.srt.configs.config_fields import ModelConfigError, read_json_object
from sglang.srt.configs.quant_config import QuantConfig
from sglang.srt.model_loader.dummy import DummySource
from sglang.srt.model_loader.dummy_packed import DummyQuantSource
from sglang.srt.model_loader.gguf_file import GgufFile
from sglang.srt.model_loader.quant_source import QuantSource
from sglang.srt.model_loader.weight_source import Ledger, Part, WeightError, WeightSource, widened

LOAD_FORMATS: Final = ("auto", "safetensors", "pt", "gguf", "dummy")

_SAFETENSORS_DTYPES: Final = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}

_SINGLE_FILE: Final = {"safetensors": "model.safetensors", "pt": "pytorch_model.bin"}


def open_source(
    folder: str | Path,
    load_format: str,
    dtype: torch.dtype,
    device: torch.device | str,
    quant: QuantConfig | None = None,
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
    source = CheckpointSource(Path(folder), load_format, dtype, device)
    return source if quant is None else QuantSource(source, quant)


class _File(Protocol):
    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def tensor(self, name: str) -> torch.Tensor: ...


class CheckpointSource:
    """Tensors by name, whichever file holds them. Files are memory-mapped, and read as taken."""

    def __init__(
        self, folder: Path, load_format: str, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self._files: dict[str, _File] = {}  # tensor name -> its file
        self.ledger = Ledger(str(folder))
        for path in _weight_files(folder, load_format):
            file = _open(path)
            self._files |= dict.fromkeys(file.names(), file)

    def has(self, name: str) -> bool:
        return name in self._files

    def take(
        self, name: str, shape: Sequence[int], *, wide: bool = False, part: Part | None = None
    ) -> torch.Tensor:
        found = self._find(name, shape, part)
        dtype = widened(self.dtype) if wide else self.dtype
        if found is None:
            wanted = shape if part is None else part.shape(shape)
            return torch.zeros(*wanted, dtype=dtype, device=self.device)
        # copy: what a file maps must not stay mapped for a model's life
        return found.to(device=self.device, dtype=dtype, copy=True)

    def take_integers(self, name: str, size: int) -> torch.Tensor:
        found = self._find(name, (size,))
        if found is None:
            return torch.zeros(size, dtype=torch.int64, device=self.device)
        return found.to(device=self.device, dtype=torch.int64, copy=True)

    def stored(self, name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """dtype and shape in the file; None: it has no such tensor."""
        file = self._files.get(name)
        return None if file is None else (file.dtype(name), file.shape(name))

    def take_packed(self, name: str, shape: Sequence[int], part: Part | None = None) -> None:
        return None  # the config says nothing of a quantisation

    def take_stored(self, name: str, shape: Sequence[int], part: Part | None = None) -> torch.Tensor | None:
        """As it lies in the file, on the wanted device; None (and recorded) as ``take`` gives zeros."""
        found = self._find(name, shape, part)
        return None if found is None else found.to(device=self.device, copy=True)

    def unused(self) -> list[str]:
        """Names that nobody took yet, in order."""
        return sorted(set(self._files) - self.ledger.taken)

    def finish(self, ignorable: Sequence[str] = ()) -> None:
        self.ledger.check(self._files, ignorable)
        self._files.clear()  # closes them

    def _find(self, name: str, shape: Sequence[int], part: Part | None = None) -> torch.Tensor | None:
        file = self._files.get(name)
        if file is None:
            self.ledger.missing.append(name)
            return None
        self.ledger.taken.add(name)
        if (found := file.shape(name)) != tuple(shape):
            self.ledger.wrong_shape.append(f"{name} {list(found)} instead of {list(shape)}")
            return None
        if part is None or part.span.size == shape[part.dim]:
            return file.tensor(name)
        return file.part(name, part) if isinstance(file, _SafetensorsFile) else part.of(file.tensor(name))


def _open(path: Path) -> _File:
    if path.suffix == ".gguf":
        return GgufFile(path)
    return _SafetensorsFile(path) if path.suffix == ".safetensors" else _TorchFile(path)


class _SafetensorsFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._handle: Any = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{path} is truncated or not a safetensors file: {error}") from error

    def names(self) -> list[str]:
        return list(self._handle.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        code = self._handle.get_slice(name).get_dtype()
        if code not in _SAFETENSORS_DTYPES:
            raise WeightError(f"{self._path}: tensor {name} has dtype {code}, which is not supported")
        return _SAFETENSORS_DTYPES[code]

    def tensor(self, name: str) -> torch.Tensor:
        return self._read(name, lambda: self._handle.get_tensor(name))

    def part(self, name: str, part: Part) -> torch.Tensor:
        """Reads no more of the file than that."""
        if part.span.size == 0:
            return part.of(self.tensor(name))
        return self._read(name, lambda: self._handle.get_slice(name)[part.index()])

    def _read(self, name: str, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        try:
            return read()
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{self._path}: tensor {name} can't be read: {error}") from error


class _TorchFile:
    def __init__(self, path: Path) -> None:
        try:
            loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise WeightError(f"{path} is truncated or not a PyTorch weight file: {reason}") from error
        if not isinstance(loaded, dict) or not all(isinstance(t, torch.Tensor) for t in loaded.values()):
            raise WeightError(f"{path} does not hold a dictionary of tensors")
        self._tensors: dict[str, torch.Tensor] = loaded

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def _weight_files(folder: Path, load_format: str) -> list[Path]:
    """An index where there is one, else the single file, else every file of the kind."""
    kinds = ("safetensors", "pt", "gguf") if load_format == "auto" else (load_format,)
    for kind in kinds:
        if kind == "gguf":
            if found := sorted(folder.glob("*.gguf")):
                return _one_of(found)
            continue
        single = _SINGLE_FILE[kind]
        index = folder / f"{single}.index.json"
        if index.is_file():
            return _indexed_files(index)
        if (folder / single).is_file():
            return [folder / single]
        if kind == "safetensors" and (found := sorted(folder.glob("*.safetensors"))):
            return found
    wanted = " or ".join(_SINGLE_FILE.get(kind, "a .gguf file") for kind in kinds)
    raise WeightError(f"{folder} has no weights ({wanted}, or several with an index)")


def _one_of(files: list[Path]) -> list[Path]:
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise WeightError(f"{files[0].parent} has several GGUF files ({names}): leave one of them there")
    return files


def _indexed_files(index: Path) -> list[Path]:
    try:
        weight_map = read_json_object(index).get("weight_map")
    except ModelConfigError as error:
        raise WeightError(str(error)) from error
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise WeightError(f"{index} lacks a 'weight_map' of tensor names to files")
    paths = [index.parent / name for name in sorted(set(weight_map.values()))]
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise WeightError(f"{index.parent} lacks files that {index.name} names: {', '.join(absent)}")
    return paths
