"""The source of a quantised checkpoint: models take weights by name and never know.

Whether a module is quantised is seen from its own tensors; the config says how. ``take`` dequantises;
``take_packed`` gives the packed form. A part of a module is read alone, in whole groups, blocks and words.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch

from sglang.srt.configs.quant_config import QuantConfig
from sglang.srt.layers.quantization.fp4_weight import Fp4Weight
from sglang.srt.layers.quantization.quant_weight import QuantWeight
from sglang.srt.model_loader.quant_module import Module, StoredTensors
from sglang.srt.model_loader.quant_readers import MXFP4_GROUP, can_cut, is_packed, read_blocks, read_weight
from sglang.srt.model_loader.weight_source import Part, WeightError, WeightSource, widened

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
        self._formats: list[str] = []  # one entry a weight: several threads may take them

    def has(self, name: str) -> bool:
        return self._checkpoint.has(name) or self._is_packed(name)

    def take(
        self, name: str, shape: Sequence[int], *, wide: bool = False, part: Part | None = None
    ) -> torch.Tensor:
        """A part that would cut through a group or a block is cut out of the whole matrix."""
        dtype = widened(self.dtype) if wide else self.dtype
        is_blocks = self._checkpoint.has(f"{name}_blocks")
        if not is_blocks and (len(shape) != 2 or not self._is_packed(name)):
            return self._checkpoint.take(name, shape, wide=wide, part=part)
        part = None if part is not None and part.is_whole(shape) else part
        make = self._take_blocks if is_blocks else self._dequantised
        if part is None or self._can_cut(name, shape, part):
            return make(name, shape, dtype, part)
        return part.of(make(name, shape, dtype, None)).clone()

    def take_packed(self, name: str, shape: Sequence[int], part: Part | None = None) -> QuantWeight | None:
        """Weight ``name`` as it is packed; None: it is not, or what is wrong is recorded.

        Raises:
            WeightError: the part cuts through a group, a block or a word.
        """
        is_blocks = len(shape) == 3 and self._checkpoint.has(f"{name}_blocks")
        if not is_blocks and not self._is_packed(name):
            return None
        if part is not None and part.is_whole(shape):
            part = None
        if part is not None and not self._can_cut(name, shape, part):
            what, span = "inputs" if is_blocks else ("rows", "columns")[part.dim], part.span
            raise WeightError(
                f"{name}: {what} {span.begin} to {span.end} of {shape[part.dim]} cut through what the"
                " checkpoint packs together: use a smaller --tp-size"
            )
        if is_blocks:
            return self._read_blocks(name, shape, part)
        module = self._module(name, shape, part)
        packed = read_weight(module, self.config)
        self._modules.add(module.name)
        if packed is not None:
            self._formats.append(packed.describe())
        return packed

    def _dequantised(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, part: Part | None
    ) -> torch.Tensor:
        packed = self.take_packed(name, shape, part)
        if packed is None:
            wanted = shape if part is None else part.shape(shape)
            return torch.zeros(*wanted, dtype=dtype, device=self.device)
        return packed.dequantise(dtype)

    def _take_blocks(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, part: Part | None
    ) -> torch.Tensor:
        """GPT-OSS's experts [E, in, out], which are stored the other way round as MXFP4."""
        packed = self._read_blocks(name, shape, part)
        wanted = shape if part is None else part.shape(shape)
        matrices = torch.zeros(*wanted, dtype=dtype, device=self.device)
        if packed is not None:
            for expert, matrix in enumerate(matrices):  # one by one: what it takes in between is large
                matrix.copy_(packed.part(expert).dequantise(dtype).t())
        return matrices

    def _read_blocks(self, name: str, shape: Sequence[int], part: Part | None) -> Fp4Weight | None:
        packed = read_blocks(self._checkpoint, name, shape, part)
        if packed is not None:
            self._formats.append(packed.describe())
        return packed

    def _can_cut(self, name: str, shape: Sequence[int], part: Part) -> bool:
        if len(shape) == 3:  # blocks of all experts
            unit = MXFP4_GROUP if part.dim == 1 else 1
            return part.span.begin % unit == 0 and part.span.end % unit == 0 and part.span.size > 0
        return can_cut(self._module(name, shape, None), self.config, part)

    def _module(self, name: str, shape: Sequence[int], part: Part | None) -> Module:
        out, in_features = shape
        return Module(self._checkpoint, name.removesuffix(_WEIGHT), out, in_features, part)

    def take_integers(self, name: str, size: int) -> torch.Tensor:
        return self._checkpoint.take_integers(name, size)

    def side_by_side(self, calls: Sequence[Callable[[], None]]) -> None:
        self._checkpoint.side_by_side(calls)

    def finish(self, ignorable: Sequence[str] = ()) -> None:
        self._drop_zero_biases()
        kv_scales = KV_SCALES if self.config.has_kv_scales else ()
        self._checkpoint.finish((*ignorable, *kv_scales))
        found = ", ".join(f"{count} {form}" for form, count in sorted(Counter(self._formats).items()))
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
