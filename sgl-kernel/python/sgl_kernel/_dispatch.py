"""Which implementation an op takes, and facts about the device it runs on.

Every op has one public function, a plain PyTorch reference ``*_ref`` and a Triton kernel. The public
function asks ``use_kernel`` and does nothing else that depends on the device.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass

import torch


@functools.cache  # asked at every launch, and a process is in one mode for good
def interpreting() -> bool:
    """True in a process in which Triton's interpreter runs kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def use_kernel(tensor: torch.Tensor) -> bool:
    """True where the Triton kernel serves: CUDA tensors, and any tensor under the interpreter."""
    if not (tensor.is_cuda or interpreting()):
        return False
    assert has_triton(), "CUDA tensors need triton (pip install 'triton>=3.6')"
    return True


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What launch shapes depend on."""

    arch: int  # compute capability as in sm_90, sm_120
    num_sms: int

    @property
    def has_pdl(self) -> bool:
        """Programmatic dependent launch."""
        return self.arch >= 90


# What the launch code takes CPU and meta tensors for: an H200. Tests pass other devices explicitly.
H200 = DeviceInfo(arch=90, num_sms=132)
RTX_PRO_6000 = DeviceInfo(arch=120, num_sms=188)


@functools.cache
def _cuda_info(index: int) -> DeviceInfo:
    properties = torch.cuda.get_device_properties(index)
    return DeviceInfo(10 * properties.major + properties.minor, properties.multi_processor_count)


def device_info(device: torch.device) -> DeviceInfo:
    if device.type != "cuda":
        return H200
    return _cuda_info(torch.cuda.current_device() if device.index is None else device.index)
