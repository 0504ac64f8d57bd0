"""Random packed tensors (``--load-format dummy`` of a model whose config says that it is quantised).

What a checkpoint of the config's format would hold, so that all that is done to a real one is done to it.
The modules that quantising tools leave alone, whatever a config says, are left alone here too.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final

import torch

from sglang.srt.configs.quant_config import QuantConfig, WeightScheme
from sglang.srt.model_loader.dummy import DummySource
from sglang.srt.model_loader.quant_module import Module
from sglang.srt.model_loader.quant_source import QuantSource
from sglang.srt.model_loader.weight_source import Ledger, Part

NEVER_PACKED: Final = (
    "*embed_tokens", "*lm_head", "*shared_head.head", "*norm", "*.gate", "*.router", "*.weights_proj",
    "*.eh_proj", "fc", "*.fc",
)  # fmt: skip
"""Modules: embeddings, heads, norms, and what decides."""

_SPREAD: Final = {4: 4.6, 8: 73.9}
"""Bits -> standard deviation of integers that are all equally likely."""
_SPREAD_E2M1: Final = 2.93
_GLOBAL_SCALE: Final = 2.0**-12  # so that the scales of groups are among float8's usual numbers
_INPUT_SCALE: Final = 8 / (6 * 448)  # NVFP4: for activations up to 8
_FLOAT8: Final = torch.float8_e4m3fn


class DummyQuantSource(QuantSource):
    def __init__(self, config: QuantConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        self._drawn = DummyCheckpoint(config, dtype, device)
        super().__init__(self._drawn, config)

    def has(self, name: str) -> bool:
        return False

    def _module(self, name: str, shape: Sequence[int], part: Part | None) -> Module:
        module = super()._module(name, shape, part)
        self._drawn.sizes[module.name] = (module.out, module.in_features)
        return module


class DummyCheckpoint(DummySource):
    """Has every tensor of a packed module that is asked for, in whatever shape it is asked for."""

    def __init__(self, config: QuantConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(dtype, device)
        self.config = config
        self.ledger = Ledger("dummy weights")
        self.sizes: dict[str, tuple[int, int]] = {}  # module -> rows and columns of its matrix
        self._schemes: dict[str, WeightScheme | None] = {}

    def has(self, name: str) -> bool:
        return self.config.method == "mxfp4" and fnmatchcase(name, "*.experts.*_proj_blocks")

    def unused(self) -> list[str]:
        return []

    def finish(self, ignorable: Sequence[str] = ()) -> None:
        self.ledger.check((), ignorable)

    def stored(self, name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        module, _, suffix = name.rpartition(".")
        scheme = self._scheme(module)
        dtype = None if scheme is None else self._dtypes(scheme).get(suffix)
        return None if dtype is None else (dtype, ())

    def take_stored(self, name: str, shape: Sequence[int], part: Part | None = None) -> torch.Tensor | None:
        whole = self._draw_stored(name, tuple(shape))
        return whole if part is None else part.of(whole).clone()

    def _scheme(self, module: str) -> WeightScheme | None:
        if module not in self._schemes:  # patterns take as long as drawing a small tensor
            self._schemes[module] = self._find_scheme(module)
        return self._schemes[module]

    def _find_scheme(self, module: str) -> WeightScheme | None:
        if any(fnmatchcase(module, pattern) for pattern in NEVER_PACKED) or self.config.ignores(module):
            return None
        found = (self.config.scheme_of(module, scheme.kind) for scheme in self.config.schemes)
        return next((scheme for scheme in found if scheme is not None), None)

    def _dtypes(self, scheme: WeightScheme) -> dict[str, torch.dtype]:
        """The tensors of a module, by the ends of their names."""
        method = self.config.method
        if scheme.kind == "float8":
            scale = "weight_scale_inv" if scheme.strategy == "block" else "weight_scale"
            return {"weight": _FLOAT8, scale: torch.float32}
        if method == "mxfp4":
            return {}  # experts alone, under other names
        if scheme.kind == "float4":
            if scheme.group_size == 32:
                return {"weight_packed": torch.uint8, "weight_scale": torch.uint8}
            if method == "compressed-tensors":
                own = {"weight_packed": torch.uint8}
                whole = ("weight_global_scale", "input_global_scale")
            else:
                own, whole = {"weight": torch.uint8}, ("weight_scale_2", "input_scale")
            return own | {"weight_scale": _FLOAT8} | dict.fromkeys(whole, torch.float32)
        names = ("weight_packed", "weight_scale", "weight_zero_point")
        if method in ("gptq", "awq"):
            names = ("qweight", "scales", "qzeros")
        packed = {names[0]: torch.int32, names[1]: torch.bfloat16}
        if not scheme.symmetric or method == "gptq":
            packed[names[2]] = torch.int32
        return packed if method in ("gptq", "awq") else packed | {"weight_shape": torch.int64}

    def _draw_stored(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        module, _, suffix = name.rpartition(".")
        if suffix.endswith("_blocks"):
            return self._bytes(name, shape)
        if suffix.endswith("_scales"):  # [E, out, in / 32]
            return self._exponents(shape, 32 * shape[-1])
        scheme, size = self._scheme(module), self.sizes[module]
        assert scheme is not None
        dtype = self._dtypes(scheme)[suffix]
        if suffix == "weight_shape":
            return torch.tensor(size, device=self.device)
        if suffix in ("weight_zero_point", "qzeros"):
            return self._zero_points(name, shape, scheme.bits)
        if dtype == torch.int32:
            return self._bytes(name, (*shape[:-1], 4 * shape[-1])).view(torch.int32)
        if suffix == "weight_scale" and dtype == torch.uint8:
            return self._exponents(shape, size[1])
        if dtype == torch.uint8:
            return self._bytes(name, shape)
        if dtype == _FLOAT8 and suffix == "weight":
            return self._between(name, shape, -(3**0.5), 3**0.5).to(_FLOAT8)
        if suffix in ("weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale"):
            own = _INPUT_SCALE if suffix.startswith("input") else _GLOBAL_SCALE
            return torch.full(shape, 1 / own if "global" in suffix else own, device=self.device)
        spread = {"float8": 1.0, "float4": _SPREAD_E2M1 * _GLOBAL_SCALE}.get(scheme.kind) or _SPREAD[
            scheme.bits
        ]
        scale = size[1] ** -0.5 / spread
        return self._between(name, shape, 0.75 * scale, 1.25 * scale).to(dtype)

    def _between(self, name: str, shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
        return torch.empty(shape, device=self.device).uniform_(low, high, generator=self._generator(name))

    def _bytes(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        drawn = torch.empty(shape, dtype=torch.uint8, device=self.device)
        return drawn.random_(0, 256, generator=self._generator(name))

    def _zero_points(self, name: str, shape: tuple[int, ...], bits: int) -> torch.Tensor:
        """[...] int32, every zero point of a word in the middle or one below."""
        ones = {4: 0x11, 8: 0x01}[bits]
        below = {4: 0x77, 8: 0x7F}[bits]
        drawn = self._bytes(name, (*shape[:-1], 4 * shape[-1]))
        return (drawn & ones).add_(below).view(torch.int32)

    def _exponents(self, shape: tuple[int, ...], columns: int) -> torch.Tensor:
        """Scales that are powers of two, as bytes."""
        exponent = round(math.log2(columns**-0.5 / _SPREAD_E2M1))
        return torch.full(shape, 127 + exponent, dtype=torch.uint8, device=self.device)

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()) + self.seed)
