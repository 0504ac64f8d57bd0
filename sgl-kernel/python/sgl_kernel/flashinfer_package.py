"""FlashInfer as a package that may be missing: for prefill, sums over GPUs and products of NVFP4."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any, Final

PACKAGE: Final = "flashinfer-python"
VERSION: Final = "0.6.18.post1"


class FlashInferError(RuntimeError):
    """FlashInfer is not there, or can't make its kernels; one line for the user."""


def find_flashinfer() -> Any:
    """The package.

    Raises:
        FlashInferError: it is not installed or can't be imported.
    """
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise FlashInferError(
            f"FlashInfer can't be imported ({error}): pip install {PACKAGE}=={VERSION}"
        ) from error


def installed_version() -> str:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def not_built(what: str, error: Exception) -> FlashInferError:
    """Of kernels for ``what``, whose build failed in whatever way."""
    reason = " ".join(str(error).split())[:300]
    return FlashInferError(
        f"FlashInfer {installed_version()} can't make its kernels for {what} (it needs nvcc and CUDA_HOME):"
        f" {reason}"
    )
