"""Run a test body in a process of its own in which Triton's interpreter carries out kernels on the CPU.

``@triton.jit`` reads TRITON_INTERPRET when it is imported, so a process is in one mode for good. A
body is a module-level function of the test file whose arguments JSON can hold; it asserts by itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def interpret(file: str | Path, body: str, **arguments: Any) -> None:
    """Call ``body(**arguments)`` of the module in ``file``; AssertionError with its output if it fails."""
    environ = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    command = [sys.executable, "-m", "sgl_kernel.testing.interpret", str(file), body, json.dumps(arguments)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, f"{body}({arguments}):\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


def _main(file: str, body: str, arguments: str) -> None:
    import torch

    assert os.environ.get("TRITON_INTERPRET") == "1"
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("interpreted_body", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    getattr(module, body)(**json.loads(arguments))


if __name__ == "__main__":
    _main(*sys.argv[1:])
