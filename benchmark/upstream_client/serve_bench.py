"""Run PyPI's ``sglang.benchmark.serving`` with this process's arguments, in the environment made for it.

PyPI's torchvision, which upstream's package imports first of all, is built for CUDA. Beside a PyTorch for
CPUs it lacks operations that it names while it is imported and that no client calls: they are given names.
"""

from __future__ import annotations

import importlib
import re
import runpy
import sys

import torch

_MISSING = re.compile(r"operator (torchvision::\w+) does not exist")


def import_torchvision() -> None:
    while True:
        try:
            importlib.import_module("torchvision")
            return
        except RuntimeError as error:
            missing = _MISSING.search(str(error))
            if missing is None:
                raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        torch.library.define(missing[1], "() -> ()")


if __name__ == "__main__":
    import_torchvision()
    runpy.run_module("sglang.benchmark.serving", run_name="__main__", alter_sys=True)
