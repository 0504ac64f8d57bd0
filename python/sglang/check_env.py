"""``python -m sglang.check_env``: what a report of a fault should say of a machine and its packages."""

from __future__ import annotations

import argparse
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from sglang.srt.utils.installation import upstream_conflict

_PACKAGES: Final = (
    "sglang-toggle", "sgl-kernel-toggle", "triton", "flashinfer-python", "flashinfer-cubin",
    "flashinfer-jit-cache", "apache-tvm-ffi", "transformers", "tokenizers", "tiktoken", "safetensors", "gguf",
    "huggingface-hub", "numpy", "xgrammar", "llguidance", "fastapi", "starlette", "uvicorn", "httptools",
    "pyzmq", "msgspec", "pydantic", "prometheus-client", "psutil", "openai", "anthropic",
)  # fmt: skip
_NOT_FOUND: Final = "not found"
_TIMEOUT_S: Final = 20


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(prog="python -m sglang.check_env", description=__doc__).parse_args(argv)
    for name, value in environment():
        print(f"{name}: {value}", flush=True)
    conflict = upstream_conflict()
    if conflict:
        print(f"error: {conflict}", file=sys.stderr)
    return 1 if conflict else 0


def environment() -> Iterator[tuple[str, str]]:
    """Name and value, each as soon as it is known. Names are SGLang's where it tells the same."""
    yield "Python", " ".join(sys.version.split())
    yield "Platform", platform.platform()
    yield from _cpu()
    yield from _gpus()
    for package in _PACKAGES:
        yield package, _version(package)
    topology = _output("nvidia-smi", "topo", "-m")
    if topology is not None:
        yield "NVIDIA Topology", f"\n{_without_colours(topology)}"
    yield "ulimit soft", str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield "ulimit hard", str(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def _cpu() -> Iterator[tuple[str, str]]:
    said = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", _read("/proc/cpuinfo"), re.MULTILINE))
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "CPU", f"{said.get('model name', platform.machine())}, {usable} of {os.cpu_count()} usable"
    memory = re.search(r"^MemTotal:\s*(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    if memory is not None:
        yield "Memory", f"{int(memory[1]) / 2**20:.1f} GiB"
    hypervisor = re.search(r"^Hypervisor vendor:\s*(.+)$", _output("lscpu") or "", re.MULTILINE)
    if hypervisor is not None:
        yield "Hypervisor vendor", hypervisor[1]


def _gpus() -> Iterator[tuple[str, str]]:
    try:
        import torch
    except ImportError as error:
        yield "PyTorch", f"can't be imported: {error}"
        return
    yield "PyTorch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    yield "CUDA available", str(torch.cuda.is_available())
    if not torch.cuda.is_available():
        return
    yield from gpu_lines([torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())])
    home = os.environ.get("CUDA_HOME") or _NOT_FOUND
    nvcc = _output(shutil.which("nvcc") or str(Path(home) / "bin" / "nvcc"), "--version")
    yield "CUDA_HOME", home
    yield "NVCC", (nvcc or _NOT_FOUND).strip().splitlines()[-1]
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    yield "CUDA Driver Version", ", ".join(sorted(set((driver or _NOT_FOUND).split("\n")) - {""}))


def gpu_lines(gpus: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Those that are the same in one line. ``gpus``: properties as torch tells them."""
    alike: dict[str, list[str]] = {}
    for index, gpu in enumerate(gpus):
        told = f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, compute capability {gpu.major}.{gpu.minor}"
        alike.setdefault(told, []).append(str(index))
    for told, indices in alike.items():
        yield f"GPU {','.join(indices)}", told


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return _NOT_FOUND


def _output(*command: str) -> str | None:
    """What a program of the machine says; None: it isn't there, or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip()


if __name__ == "__main__":
    sys.exit(main())
