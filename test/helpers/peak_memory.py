"""The most bytes of tensors that were alive at once, of those made in a block."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Sees what operators return; what one uses inside is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, int] = {}  # storage's address -> bytes
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._known.update(_storages((args, kwargs)))  # made before the block, or noted already
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            self._note(storage)
        self.peak = max(self.peak, sum(self._live.values()))
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        key = id(storage)
        self._live[key] = storage.nbytes()
        weakref.finalize(storage, self._live.pop, key, None)


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors if not tensor.is_mkldnn]  # packed weights
