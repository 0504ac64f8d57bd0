"""Which errors of building an executor are written for the user."""

from __future__ import annotations

from sglang.srt.configs.config_fields import ModelConfigError


def is_for_user(error: BaseException) -> bool:
    """Whether the message is one line for the user, so that a traceback would only hide it."""
    if isinstance(error, ModelConfigError):
        return True
    # Only now: these import torch, which takes seconds.
    from sglang.srt.distributed.shares import ShardingError
    from sglang.srt.managers.executor_build import ExecutorArgsError
    from sglang.srt.model_executor.memory import OutOfMemoryError
    from sglang.srt.model_loader.weight_source import WeightError

    return isinstance(error, ExecutorArgsError | OutOfMemoryError | WeightError | ShardingError)
