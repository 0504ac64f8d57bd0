"""The source of a quantised checkpoint: models take weights by name and never know.

Whether a module is quantised is seen from its own tensors; the config says how. Today every weight is
dequantised as it is taken, so a model needs the memory of one that is not quantised; ``take_packed``
gives the packed form.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Final, Protocol

import torch

from sglang.srt.configs.quant_config import QuantConfig
from sglang.srt.layers.quantization.quant_weight import QuantWeight
from sglang.srt.model_loader.quant_readers import Module, StoredTensors, is_packed, read_blocks, read_weight
from sglang.srt.model_loader.weight_source import Part, WeightSource, widened

logger = logging.getLogger(__name__)

_WEIGHT: Final = ".weight"

KV_SCALES: Final = ("*.k_scale", "*.v_scale", "*.q_scale", "*.k_proj.output_scale", "*.v_proj.output_scale")
"""Of a quantised KV cache. The cache here has the run's dtype."""


class _Checkpoint(WeightSource, StoredTensors, Protocol):
    dtype: torch.dtype
    device: torch.device

    def unused(self) -> list[str]: ...


class QuantSource:
    """A checkpoint of which some modules are quantised."""

    def __init__(self, checkpoint: _Checkpoint, config: QuantConfig) -> None:
        self.dtype, self.device = checkpoint.dtype, checkpoint.device
        self.config = config
        self._checkpoint = checkpoint
        self._modules: set[str] = set()  # the quantised ones
        self._formats: Counter[str] = Counter()

    def has(self, name: str) -> bool:
        return self._checkpoint.has(name) or self._is_packed(name)

    def take(
        self, name: str, shape: Sequence[int], *, wide: bool = False, part: Part | None = None
    ) -> torch.Tensor:
        """A part of a packed tensor is taken of the dequantised one, so each rank reads all of it."""
        dtype = widened(self.dtype) if wide else self.dtype
        is_blocks = self._checkpoint.has(f"{name}_blocks")
        if not is_blocks and not self._is_packed(name):
            return self._checkpoint.take(name, shape, wide=wide, part=part)
        whole = self._take_blocks(name, shape, dtype) if is_blocks else self._dequantised(name, shape, dtype)
        return whole if part is None else part.of(whole).clone()

    def _dequantised(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        packed = self.take_packed(name, shape)
        if packed is None:
            return torch.zeros(*shape, dtype=dtype, device=self.device)
        return packed.dequantise(dtype)

    def take_packed(self, name: str, shape: Sequence[int]) -> QuantWeight | None:
        """Weight ``name`` as it is packed; None: it is not, or what is wrong is recorded."""
        if not self._is_packed(name):
            return None
        out, in_features = shape
        module = Module(self._checkpoint, name.removesuffix(_WEIGHT), out, in_features)
        packed = read_weight(module, self.config)
        self._modules.add(module.name)
        if packed is not None:
            self._formats[packed.describe()] += 1
        return packed

    def _take_blocks(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """GPT-OSS's experts [E, in, out], which are stored the other way round as MXFP4."""
        packed = read_blocks(self._checkpoint, name, shape)
        matrices = torch.zeros(*shape, dtype=dtype, device=self.device)
        if packed is not None:
            self._formats[packed.describe()] += 1
            for expert, matrix in enumerate(matrices):  # one by one: what it takes in between is large
                matrix.copy_(packed.part(expert).dequantise(dtype).t())
        return matrices

    def take_integers(self, name: str, size: int) -> torch.Tensor:
        return self._checkpoint.take_integers(name, size)

    def finish(self, ignorable: Sequence[str] = ()) -> None:
        self._drop_zero_biases()
        kv_scales = KV_SCALES if self.config.has_kv_scales else ()
        self._checkpoint.finish((*ignorable, *kv_scales))
        found = ", ".join(f"{count} {form}" for form, count in sorted(self._formats.items()))
        logger.info(
            "quantised weights (%s): %s; held dequantised as %s",
            self.config.method, found or "none", str(self.dtype).removeprefix("torch."),
        )  # fmt: skip

    def _is_packed(self, name: str) -> bool:
        return name.endswith(_WEIGHT) and is_packed(
            Module(self._checkpoint, name.removesuffix(_WEIGHT), 0, 0)
        )

    def _drop_zero_biases(self) -> None:
        """AutoGPTQ wrote a bias of zeros for every linear layer that has none."""
        if self.config.method != "gptq":
            return
        for name in self._checkpoint.unused():
            if not name.endswith(".bias") or name.removesuffix(".bias") not in self._modules:
                continue
            stored = self._checkpoint.stored(name)
            assert stored is not None
            bias = self._checkpoint.take_stored(name, stored[1])
            if bias is not None and bool(bias.any()):
                self._checkpoint.ledger.wrong_format.append(f"{name} is not zero, but the model has none")
