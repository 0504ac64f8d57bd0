"""Memory of a GPU that other processes of the host see too, by CUDA's runtime.

Not of torch's allocator: its memory may be of a kind that can't be passed on (``expandable_segments``), and
a piece of a larger one.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch

_HANDLE_BYTES: Final = 64
_ENABLE_PEER_ACCESS: Final = 1


class IpcError(RuntimeError):
    """CUDA can't do it here; says why."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class _Region:
    """What torch takes for someone else's memory on a GPU."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def as_tensor(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """[num_bytes] uint8 over what ``CudaIpc.allocate`` gave."""
    return torch.as_tensor(_Region(address, num_bytes), device=device)


class CudaIpc:
    """Of the current device of the calling thread. What it makes is there until the process ends."""

    def __init__(self) -> None:
        """
        Raises:
            IpcError: torch's runtime library is not to be found.
        """
        version = torch.version.cuda
        if version is None:
            raise IpcError("this build of PyTorch has no CUDA")
        name = f"libcudart.so.{version.split('.')[0]}"
        try:
            self._library: Any = ctypes.CDLL(name)  # the one that torch has loaded
        except OSError as error:
            raise IpcError(f"{name}: {error}") from error
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def allocate(self, num_bytes: int) -> int:
        """The address of zeroed memory."""
        address = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        assert address.value is not None
        self._call("cudaMemset", address, ctypes.c_int(0), ctypes.c_size_t(num_bytes))
        self._call("cudaDeviceSynchronize")
        return address.value

    def export(self, address: int) -> bytes:
        """What another process opens; of an address that ``allocate`` gave."""
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle)

    def open(self, exported: bytes) -> int:
        """Another process's memory, perhaps of another GPU: its address here."""
        address, handle = ctypes.c_void_p(), _Handle.from_buffer_copy(exported)
        flags = ctypes.c_uint(_ENABLE_PEER_ACCESS)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(address), handle, flags)
        assert address.value is not None
        return address.value

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._library, name)(*args)
        if code:
            self._library.cudaGetLastError()  # or torch would meet it at its next call
            text = self._library.cudaGetErrorString(ctypes.c_int(code)).decode()
            raise IpcError(f"{name}: {text}")
