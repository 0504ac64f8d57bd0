"""Whether there is a GPU, said without torch, which takes seconds to import."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

GPU_DEVICE_FILE: Final = Path("/dev/nvidiactl")


def has_gpu(
    environ: Mapping[str, str] = os.environ, device_file: Path = GPU_DEVICE_FILE, torch_version: str = ""
) -> bool:
    """An NVIDIA GPU that this process may see, and a build of torch that can use one."""
    if environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1") or not device_file.exists():
        return False
    return not (torch_version or importlib.metadata.version("torch")).endswith("+cpu")
