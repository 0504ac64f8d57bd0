"""A GPU that is too small for what was asked, in words that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sgl_kernel.launch import KernelSizeError
from sglang.srt.managers.executor_build_models import ExecutorArgsError
from sglang.srt.model_executor.memory import OutOfMemoryError


@contextmanager
def limits_told() -> Iterator[None]:
    """
    Raises:
        OutOfMemoryError: for what PyTorch says of the GPU's memory.
        ExecutorArgsError: a kernel of these sizes needs more of a multiprocessor than there is.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"the GPU's memory is used up before the KV cache is made ({str(error).splitlines()[0]}). Use"
            " smaller steps (--chunked-prefill-size, --cuda-graph-max-bs, --speculative-capture-max-bs)"
            " or a smaller model"
        ) from error
    except KernelSizeError as error:
        raise ExecutorArgsError(
            f"{error}. In float32 latent attention and wide heads are too large for it: use --dtype"
            " bfloat16, or --device cpu"
        ) from error
