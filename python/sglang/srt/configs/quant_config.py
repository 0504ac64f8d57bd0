"""What a checkpoint says about its quantisation (``quantization_config``, ``hf_quant_config.json``).

It says which formats there are, and which modules have none. Whether a module is quantised is seen from
its tensors (``model_loader/quant_source.py``): files list too many or too few modules now and then.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from sglang.srt.configs.config_fields import ConfigFields, ModelConfigError, read_json_object

Kind = Literal["int", "float8", "float4"]
Strategy = Literal["tensor", "channel", "group", "block"]


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """One way in which weights of a checkpoint are packed."""

    kind: Kind
    bits: int
    strategy: Strategy  # what shares a scale: the matrix, a row, some columns of a row, a block
    group_size: int = 0  # columns, of strategy "group"
    block: tuple[int, int] = (0, 0)  # rows and columns, of strategy "block"
    symmetric: bool = True  # no zero points
    targets: tuple[str, ...] = ("Linear",)  # names of modules, ``re:`` patterns, or kinds of modules


@dataclass(frozen=True, slots=True)
class QuantConfig:
    where: str  # file and field, named in errors
    method: str  # as SGLang names it: compressed-tensors, gptq, awq, fp8, modelopt, mxfp4
    schemes: tuple[WeightScheme, ...]
    ignored: tuple[str, ...] = ()  # names or patterns of modules that are not quantised
    has_kv_scales: bool = False  # scales of a quantised KV cache may be among the tensors
    zeros_less_one: bool = False  # gptq: zero points are stored minus one

    def scheme_of(self, module: str, kind: Kind) -> WeightScheme | None:
        """The most specific one of this kind that is for the module."""
        of_kind = [scheme for scheme in self.schemes if scheme.kind == kind]
        for matches in (_is_name, _is_pattern, _is_class):
            for scheme in of_kind:
                if any(matches(module, target) for target in scheme.targets):
                    return scheme
        return None

    @property
    def columns_unit(self) -> int:
        """Columns that are never split: a multiple of every scheme's groups or blocks."""
        return math.lcm(*(max(scheme.group_size, scheme.block[1], 1) for scheme in self.schemes))

    def ignores(self, module: str) -> bool:
        """Whether the file says that the module is not quantised."""
        if self.method == "compressed-tensors":
            return any(_is_name(module, p) or _is_pattern(module, p) for p in self.ignored)
        return any(fnmatchcase(module, p) or module.startswith(f"{p}.") for p in self.ignored)


def _is_name(module: str, target: str) -> bool:
    return module == target


def _is_pattern(module: str, target: str) -> bool:
    return target.startswith("re:") and re.match(target.removeprefix("re:"), module) is not None


def _is_class(module: str, target: str) -> bool:
    """A kind of module, as "Linear": nothing else is asked for in a packed form."""
    return "." not in target and not target.startswith("re:")


def read_quant(folder: Path) -> QuantConfig | None:
    """The quantisation of the model in a folder; None: it is not quantised.

    Raises:
        ModelConfigError: a format that is not supported, or fields that make no sense.
    """
    fields = _find(folder)
    if fields is None:
        return None
    method = fields.text("quant_method", "modelopt" if fields.has("quant_algo") else None)
    reader = _READERS.get(method)
    if reader is None:
        supported = ", ".join(dict.fromkeys(_READERS))
        raise _unsupported(fields, f"quantisation {method!r}", supported)
    return reader(fields)


_OWN_FILES: Final = MappingProxyType(
    {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
)
"""Files of the quantising tools, where config.json says nothing."""


def _find(folder: Path) -> ConfigFields | None:
    """In config.json (of a model with parts: in the text part), else in a tool's own file."""
    config = ConfigFields(read_json_object(folder / "config.json"), str(folder / "config.json"))
    for holder in (config, config.child("text_config")):
        for name in ("quantization_config", "compression_config"):
            if holder.has(name):
                found = holder.child(name)
                return found.child("quantization") if found.has("quantization") else found
    for name, method in _OWN_FILES.items():
        file = folder / name
        if not file.is_file():
            continue
        found = ConfigFields({"quant_method": method} | read_json_object(file), str(file))
        if method != "modelopt":
            return found
        algorithm = found.child("quantization")
        return algorithm if algorithm.has("quant_algo") else None
    return None


def _unsupported(fields: ConfigFields, what: str, supported: str) -> ModelConfigError:
    return ModelConfigError(f"{fields.where}: {what} is not supported (supported: {supported})")


def _texts(fields: ConfigFields, *names: str) -> tuple[str, ...]:
    """A list of strings, by the first name that is there; absent: empty."""
    for name in names:
        if fields.has(name):
            values = fields.raw[name]
            if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
                raise ModelConfigError(f"{fields.where}: {name!r} must be a list of names, not {values!r}")
            return tuple(values)
    return ()


def _pair(fields: ConfigFields, name: str) -> tuple[int, int]:
    values = fields.integers(name)
    if len(values) != 2 or min(values) < 1:
        raise ModelConfigError(f"{fields.where}: {name!r} must be two positive integers, not {values}")
    return values[0], values[1]


# ---- compressed-tensors

_CT_FORMATS: Final = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mixed-precision", "dense",
)  # fmt: skip


def _read_compressed_tensors(fields: ConfigFields) -> QuantConfig:
    form = fields.text("format", "dense")
    if form not in _CT_FORMATS:
        raise _unsupported(fields, f"format {form!r}", ", ".join(_CT_FORMATS))
    sparse = fields.child("sparsity_config").text("format", "dense")
    if sparse != "dense":
        raise _unsupported(fields, f"sparsity format {sparse!r}", "dense")
    if fields.child("transform_config").raw.get("config_groups"):
        raise _unsupported(fields, "a transform_config", "checkpoints without one")
    groups = fields.child("config_groups")
    schemes = [_ct_scheme(groups.child(name)) for name in groups.raw]
    return QuantConfig(
        where=fields.where,
        method="compressed-tensors",
        schemes=tuple(scheme for scheme in schemes if scheme is not None),
        ignored=_texts(fields, "ignore"),
        has_kv_scales=fields.has("kv_cache_scheme"),
    )


def _ct_scheme(group: ConfigFields) -> WeightScheme | None:
    """None: a group that quantises activations alone."""
    if not group.has("weights"):
        return None
    weights, targets = group.child("weights"), _texts(group, "targets")
    bits, number = weights.integer("num_bits"), weights.text("type", "int")
    group_size = weights.raw.get("group_size") or 0
    strategy = weights.text("strategy", "group" if group_size > 0 else "tensor")
    if number == "float" and bits == 4 and group_size in (16, 32):
        return WeightScheme("float4", 4, "group", group_size, targets=targets)
    known = {"int": (4, 8), "float": (8,)}.get(number, ())
    strategies = ("tensor", "channel", "group") if number == "int" else ("tensor", "channel", "block")
    if bits not in known or strategy not in strategies:
        what = f"{number}{bits} weights with strategy {strategy!r}"
        supported = "int4 and int8 by tensor, channel or group, float8 by tensor, channel or block, float4"
        raise _unsupported(weights, what, supported)
    return WeightScheme(
        kind="int" if number == "int" else "float8",
        bits=bits,
        strategy=strategy,  # type: ignore[arg-type]
        group_size=weights.integer("group_size") if strategy == "group" else 0,
        block=_pair(weights, "block_structure") if strategy == "block" else (0, 0),
        symmetric=weights.flag("symmetric", True),
        targets=targets,
    )


# ---- GPTQ and AWQ


def _read_gptq(fields: ConfigFields) -> QuantConfig:
    bits, form = fields.integer("bits"), fields.text("checkpoint_format", "gptq")
    if bits not in (4, 8):
        raise _unsupported(fields, f"GPTQ with {bits} bits", "4, 8")
    if form not in ("gptq", "gptq_v2") or fields.flag("is_marlin_format"):
        raise _unsupported(fields, "GPTQ in a kernel's own layout", "checkpoint_format gptq, gptq_v2")
    overrides = [name for name in fields.child("dynamic").raw if not name.startswith("-:")]
    if overrides:
        raise _unsupported(fields, f"GPTQ with other settings for {overrides[0]!r}", "one for all modules")
    scheme = WeightScheme("int", bits, *_group_of(fields.raw.get("group_size", -1), fields), symmetric=False)
    return QuantConfig(
        where=fields.where,
        method="gptq",
        schemes=(scheme,),
        ignored=_texts(fields, "modules_to_not_convert"),
        zeros_less_one=form == "gptq",
    )


def _read_awq(fields: ConfigFields) -> QuantConfig:
    bits = fields.integer("bits" if fields.has("bits") else "w_bit")
    version = fields.text("version", "gemm").lower()
    if bits != 4:
        raise _unsupported(fields, f"AWQ with {bits} bits", "4")
    if version != "gemm":
        raise _unsupported(fields, f"AWQ version {version!r}", "gemm")
    size = fields.raw.get("group_size", fields.raw.get("q_group_size", 128))
    zero_point = fields.flag("zero_point", True)
    return QuantConfig(
        where=fields.where,
        method="awq",
        schemes=(WeightScheme("int", 4, *_group_of(size, fields), symmetric=not zero_point),),
        ignored=_texts(fields, "modules_to_not_convert"),
    )


def _group_of(size: Any, fields: ConfigFields) -> tuple[Strategy, int]:
    if size in (-1, None):
        return "channel", 0
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ModelConfigError(f"{fields.where}: 'group_size' must be a positive integer or -1, not {size!r}")
    return "group", size


# ---- float8 and float4


def _read_fp8(fields: ConfigFields) -> QuantConfig:
    if (fmt := fields.text("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise _unsupported(fields, f"fp8 in the format {fmt!r}", "e4m3")
    scheme = WeightScheme("float8", 8, "tensor")
    if fields.has("weight_block_size"):
        scheme = WeightScheme("float8", 8, "block", block=_pair(fields, "weight_block_size"))
    elif fields.text("quant_method") == "fbgemm_fp8":
        scheme = WeightScheme("float8", 8, "channel")
    return QuantConfig(
        where=fields.where,
        method="fp8",
        schemes=(scheme,),
        ignored=_texts(fields, "modules_to_not_convert", "ignored_layers"),
        has_kv_scales=True,  # older files name no scheme for them
    )


_MODELOPT: Final = MappingProxyType(
    {
        "NVFP4": WeightScheme("float4", 4, "group", 16),
        "FP8": WeightScheme("float8", 8, "tensor"),
        "FP8_PER_CHANNEL_PER_TOKEN": WeightScheme("float8", 8, "channel"),
    }
)


def _read_modelopt(fields: ConfigFields) -> QuantConfig:
    algorithm = fields.text("quant_algo")
    names = {algorithm}
    if algorithm == "MIXED_PRECISION":
        layers = fields.child("quantized_layers")
        names = {layers.child(name).text("quant_algo") for name in layers.raw}
    if unknown := sorted(names - set(_MODELOPT)):
        raise _unsupported(fields, f"quant_algo {unknown[0]!r}", ", ".join((*_MODELOPT, "MIXED_PRECISION")))
    if "NVFP4" in names and (size := fields.integer("group_size", 16)) != 16:
        raise _unsupported(fields, f"NVFP4 in groups of {size}", "16")
    return QuantConfig(
        where=fields.where,
        method="modelopt",
        schemes=tuple(_MODELOPT[name] for name in sorted(names)),
        ignored=_texts(fields, "exclude_modules", "ignore"),
        has_kv_scales=fields.has("kv_cache_quant_algo") or fields.has("kv_cache_scheme"),
    )


def _read_mxfp4(fields: ConfigFields) -> QuantConfig:
    return QuantConfig(
        where=fields.where,
        method="mxfp4",
        schemes=(WeightScheme("float4", 4, "group", 32),),
        ignored=_texts(fields, "modules_to_not_convert"),
    )


_READERS: Final[MappingProxyType[str, Callable[[ConfigFields], QuantConfig]]] = MappingProxyType(
    {
        "compressed-tensors": _read_compressed_tensors,
        "gptq": _read_gptq,
        "awq": _read_awq,
        "fp8": _read_fp8,
        "fbgemm_fp8": _read_fp8,
        "modelopt": _read_modelopt,
        "modelopt_fp4": _read_modelopt,
        "modelopt_fp8": _read_modelopt,
        "mxfp4": _read_mxfp4,
    }
)
