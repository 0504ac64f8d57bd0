"""The files of a model folder that hold weights, and what lies where in them."""

from __future__ import annotations

import json
import mmap
import os
import pickle
import struct
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open

from sglang.srt.configs.config_fields import ModelConfigError, read_json_object
from sglang.srt.model_loader.weight_source import WeightError

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


class WeightFile(Protocol):
    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def num_bytes(self, name: str) -> int:
        """In the file, about."""
        ...

    def close(self) -> None: ...


class WholeFile(WeightFile, Protocol):
    """Its tensors are only to be had whole, on the CPU."""

    def tensor(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it lies in a file, row by row."""

    file: SafetensorsFile
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file


class SafetensorsFile:
    """Knows the places of all tensors; bytes are read when they are wanted, by any number of threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(str(path), framework="pt"):  # checks the header and the file's size
                pass
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            (length,) = struct.unpack("<Q", os.pread(self._descriptor, 8, 0))
            header: dict[str, Any] = json.loads(os.pread(self._descriptor, length, 8))
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{path} is truncated or not a safetensors file: {error}") from error
        header.pop("__metadata__", None)
        self._header = header
        self._begin = 8 + length
        self._lock = Lock()
        self._map: mmap.mmap | None = None  # of the whole file, when it is first wanted
        self._bytes: torch.Tensor | None = None  # the same, uint8

    def names(self) -> list[str]:
        return list(self._header)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._header[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        code = self._header[name]["dtype"]
        if code not in _SAFETENSORS_DTYPES:
            raise WeightError(f"{self.path}: tensor {name} has dtype {code}, which is not supported")
        return _SAFETENSORS_DTYPES[code]

    def num_bytes(self, name: str) -> int:
        begin, end = self._header[name]["data_offsets"]
        return int(end - begin)

    def stored(self, name: str) -> Stored:
        offset = self._begin + self._header[name]["data_offsets"][0]
        return Stored(self, name, self.dtype(name), self.shape(name), offset)

    def read(self, name: str, into: memoryview, offset: int) -> None:
        """Fill ``into`` with the bytes from ``offset`` on, which are some of tensor ``name``'s."""
        done = 0
        while done < len(into):
            try:
                got = os.preadv(self._descriptor, [into[done:]], offset + done)
            except OSError as error:
                raise WeightError(f"{self.path}: tensor {name} can't be read: {error}") from error
            if got == 0:
                raise WeightError(f"{self.path}: tensor {name} can't be read: the file became shorter")
            done += got

    def mapped(self, name: str, offset: int, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8; what is used of them takes memory until ``let_go``."""
        if os.fstat(self._descriptor).st_size < offset + num_bytes:  # using them would end the process
            raise WeightError(f"{self.path}: tensor {name} can't be read: the file became shorter")
        os.posix_fadvise(self._descriptor, offset, num_bytes, os.POSIX_FADV_WILLNEED)
        with self._lock:
            if self._bytes is None:
                # A private one: torch wants memory that it could write to.
                self._map = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_COPY)
                self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
            return self._bytes[offset : offset + num_bytes]

    def let_go(self) -> None:
        """Of the memory that maps take, while others may use them: they are read again."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        self._bytes = self._map = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()


class TorchFile:
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

    def num_bytes(self, name: str) -> int:
        return self._tensors[name].nbytes

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def close(self) -> None:
        self._tensors.clear()


def weight_files(folder: Path, load_format: str) -> list[Path]:
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
