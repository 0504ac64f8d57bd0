"""Which errors of building an executor are written for the user."""

from __future__ import annotations

from typing import Final

# By name: their modules import torch, which takes seconds, and an error of theirs means that they are there.
_FOR_USER: Final = frozenset(
    {
        ("sglang.srt.configs.config_fields", "ModelConfigError"),
        ("sglang.srt.distributed.shares", "ShardingError"),
        ("sglang.srt.managers.executor_build_models", "ExecutorArgsError"),
        ("sglang.srt.model_executor.memory", "OutOfMemoryError"),
        ("sglang.srt.model_loader.weight_source", "WeightError"),
    }
)


def is_for_user(error: BaseException) -> bool:
    """Whether the message is one line for the user, so that a traceback would only hide it."""
    return any((kind.__module__, kind.__name__) in _FOR_USER for kind in type(error).__mro__)
