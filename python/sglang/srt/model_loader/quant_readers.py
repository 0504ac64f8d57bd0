"""From a module's stored tensors to its ``QuantWeight``, format by format.

A reader takes every tensor of its format, so that what is left over is an error, and answers None when
something is wrong: the ledger has it by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import torch

from sglang.srt.configs.quant_config import Kind, QuantConfig, WeightScheme
from sglang.srt.layers.quantization.fp4_weight import GROUP_SIZES, Fp4Weight
from sglang.srt.layers.quantization.fp8_weight import Fp8Weight
from sglang.srt.layers.quantization.int_weight import IntWeight, from_awq, from_gptq, from_int8
from sglang.srt.layers.quantization.packing import unpack_words, words_of
from sglang.srt.layers.quantization.quant_weight import QuantWeight
from sglang.srt.model_loader.weight_source import Ledger

Shape = tuple[int, ...]

FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class StoredTensors(Protocol):
    """A checkpoint as it lies in its files."""

    ledger: Ledger

    def stored(self, name: str) -> tuple[torch.dtype, Shape] | None: ...

    def take_stored(self, name: str, shape: Sequence[int]) -> torch.Tensor | None: ...


class Module:
    """The stored tensors of one module. What is wrong with them goes to the ledger."""

    def __init__(self, source: StoredTensors, name: str, out: int, in_features: int) -> None:
        self.source, self.name = source, name
        self.out, self.in_features = out, in_features

    def dtype(self, suffix: str) -> torch.dtype | None:
        stored = self.source.stored(f"{self.name}.{suffix}")
        return None if stored is None else stored[0]

    def take(self, suffix: str, dtypes: Sequence[torch.dtype], *shapes: Shape) -> torch.Tensor | None:
        """A tensor of one of the shapes and dtypes."""
        name = f"{self.name}.{suffix}"
        stored = self.source.stored(name)
        shape = stored[1] if stored is not None and stored[1] in shapes else shapes[0]
        found = self.source.take_stored(name, shape)
        if found is not None and found.dtype not in dtypes:
            self.wrong(f".{suffix} is {found.dtype}, not {' or '.join(map(str, dtypes))}")
            return None
        return found

    def take_if_there(
        self, suffix: str, dtypes: Sequence[torch.dtype], *shapes: Shape
    ) -> torch.Tensor | None:
        return None if self.dtype(suffix) is None else self.take(suffix, dtypes, *shapes)

    def take_scalar(self, suffix: str) -> torch.Tensor | None:
        """[] one number, where it is there."""
        found = self.take_if_there(suffix, FLOATS, (), (1,))
        return None if found is None else found.reshape(())

    def wrong(self, what: str) -> None:
        self.source.ledger.wrong_format.append(f"{self.name}{what}")

    def num_groups(self, scheme: WeightScheme) -> int | None:
        """Scales of a row; None: the groups don't fit."""
        if scheme.strategy != "group":
            return 1
        if self.in_features % scheme.group_size:
            self.wrong(f" has {self.in_features} columns, no multiple of the groups of {scheme.group_size}")
            return None
        return self.in_features // scheme.group_size


def read_weight(module: Module, config: QuantConfig) -> QuantWeight | None:
    """The packed weight of a module of which ``is_packed`` is true."""
    form = _form(module)
    assert form is not None
    reader, kind = _READERS[form]
    scheme = config.scheme_of(module.name, kind)
    if scheme is None:
        module.wrong(f" holds {kind} weights, of which {config.where} says nothing")
        return None
    if config.ignores(module.name):
        module.wrong(f" is packed, although {config.where} lists it among those that are not quantised")
        return None
    return reader(module, config, scheme)


def is_packed(module: Module) -> bool:
    return _form(module) is not None


def _form(module: Module) -> str | None:
    """What the tensors are, by their names and dtypes; None: not quantised."""
    if (packed := module.dtype("weight_packed")) is not None:
        return "packed fp4" if packed == torch.uint8 else "packed int"
    if module.dtype("qweight") is not None:
        return "qweight"
    by_dtype = {torch.float8_e4m3fn: "fp8", torch.int8: "int8", torch.uint8: "fp4"}
    weight = module.dtype("weight")
    return None if weight is None else by_dtype.get(weight)


def _packed_int(module: Module, config: QuantConfig, scheme: WeightScheme) -> IntWeight | None:
    """compressed-tensors, pack-quantized."""
    groups = module.num_groups(scheme)
    if groups is None:
        return None
    out, bits = module.out, scheme.bits
    stored_shape = module.take("weight_shape", (torch.int32, torch.int64), (2,))
    words = (out, words_of(module.in_features, bits))
    packed = module.take("weight_packed", (torch.int32,), words)
    scale = module.take("weight_scale", FLOATS, (out, groups), *_one_scale(scheme))
    zero = group_of = None
    if not scheme.symmetric:
        words = (words_of(out, bits), groups)  # they are packed along the rows
        zero = module.take("weight_zero_point", (torch.int32,), words)
        if zero is None:
            return None
        zero = unpack_words(zero.t(), bits, out).t().contiguous()
    if module.dtype("weight_g_idx") is not None:
        group_of = module.take("weight_g_idx", (torch.int32, torch.int64), (module.in_features,))
    _drop_input_scales(module)
    if packed is None or scale is None or stored_shape is None:
        return None
    if stored_shape.tolist() != [out, module.in_features]:
        module.wrong(f".weight_shape says {stored_shape.tolist()}, not {[out, module.in_features]}")
        return None
    scale = scale.reshape(-1, groups).expand(out, groups)
    return IntWeight(packed, scale, zero, group_of, bits, module.in_features)


def _int8(module: Module, config: QuantConfig, scheme: WeightScheme) -> IntWeight | None:
    """compressed-tensors, int-quantized."""
    groups = module.num_groups(scheme)
    if groups is None:
        return None
    out = module.out
    weight = module.take("weight", (torch.int8,), (out, module.in_features))
    scale = module.take("weight_scale", FLOATS, (out, groups), (out,), *_one_scale(scheme))
    zero = None
    if not scheme.symmetric:
        shapes = ((out, groups), (out,), *_one_scale(scheme))
        zero = module.take("weight_zero_point", (torch.int8,), *shapes)
        if zero is None:
            return None
        zero = zero.reshape(-1, groups).expand(out, groups)
    _drop_input_scales(module)
    if weight is None or scale is None:
        return None
    return from_int8(weight, scale.reshape(-1, groups).expand(out, groups), zero)


def _qweight(module: Module, config: QuantConfig, scheme: WeightScheme) -> IntWeight | None:
    groups = module.num_groups(scheme)
    if groups is None:
        return None
    out, in_features, int32 = module.out, module.in_features, (torch.int32,)
    scales = module.take("scales", FLOATS, (groups, out))
    if config.method == "awq":
        qweight = module.take("qweight", int32, (in_features, words_of(out, 4)))
        qzeros = module.take_if_there("qzeros", int32, (groups, words_of(out, 4)))
        if qweight is None or scales is None:
            return None
        if qzeros is None and not scheme.symmetric:
            module.wrong(".qzeros is missing, although the config says that there are zero points")
            return None
        return from_awq(qweight, scales, qzeros)
    bits = scheme.bits
    qweight = module.take("qweight", int32, (words_of(in_features, bits), out))
    qzeros = module.take("qzeros", int32, (groups, words_of(out, bits)))
    g_idx = module.take_if_there("g_idx", int32, (in_features,))
    if qweight is None or scales is None or qzeros is None:
        return None
    if g_idx is not None and not 0 <= int(g_idx.min()) <= int(g_idx.max()) < groups:
        module.wrong(f".g_idx names groups outside the {groups} there are")
        return None
    return from_gptq(qweight, scales, qzeros, g_idx, bits, config.zeros_less_one)


def _fp8(module: Module, config: QuantConfig, scheme: WeightScheme) -> Fp8Weight | None:
    """``weight_scale_inv`` (DeepSeek's name) is a factor too. Without blocks the stored shape decides."""
    out, columns = module.out, module.in_features
    data = module.take("weight", (torch.float8_e4m3fn,), (out, columns))
    dtypes, suffix = (*FLOATS, torch.float8_e8m0fnu), "weight_scale"
    if module.dtype("weight_scale_inv") is not None:
        suffix = "weight_scale_inv"
    block = scheme.block
    if scheme.strategy == "block":
        scale = module.take(suffix, dtypes, (-(-out // block[0]), -(-columns // block[1])))
    else:
        scale = module.take(suffix, dtypes, (), (1,), (1, 1), (out,), (out, 1))
        if scale is not None:
            scale = scale.reshape(-1, 1)
            block = (out if scale.shape[0] == 1 else 1, columns)
    input_scale = module.take_scalar("input_scale")
    if data is None or scale is None:
        return None
    return Fp8Weight(data, scale, block, input_scale)


def _packed_fp4(module: Module, config: QuantConfig, scheme: WeightScheme) -> Fp4Weight | None:
    """compressed-tensors: nvfp4-pack-quantized and mxfp4-pack-quantized."""
    scale = _fp4_scale(module, scheme)
    packed = module.take("weight_packed", (torch.uint8,), (module.out, module.in_features // 2))
    own = None
    if scheme.group_size == 16:
        own = module.take("weight_global_scale", FLOATS, (1,), ())
    input_scale = module.take_scalar("input_global_scale")
    if packed is None or scale is None or (own is None and scheme.group_size == 16):
        return None
    return Fp4Weight(packed, scale, None if own is None else own.reshape(()), True, input_scale)


def _fp4(module: Module, config: QuantConfig, scheme: WeightScheme) -> Fp4Weight | None:
    """modelopt's NVFP4."""
    scale = _fp4_scale(module, scheme)
    packed = module.take("weight", (torch.uint8,), (module.out, module.in_features // 2))
    own = module.take("weight_scale_2", FLOATS, (), (1,))
    input_scale = module.take_scalar("input_scale")
    if packed is None or scale is None or own is None:
        return None
    return Fp4Weight(packed, scale, own.reshape(()), False, input_scale)


def read_blocks(source: StoredTensors, name: str, shape: Sequence[int]) -> Fp4Weight | None:
    """GPT-OSS's own MXFP4: ``{name}_blocks`` and ``{name}_scales`` of all experts, for [E, in, out]."""
    experts, in_features, out = shape
    groups = (experts, out, in_features // GROUP_SIZES[torch.float8_e8m0fnu])
    blocks = source.take_stored(f"{name}_blocks", (*groups, 16))
    scales = source.take_stored(f"{name}_scales", groups)
    if blocks is None or scales is None:
        return None
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        source.ledger.wrong_format.append(f"{name}_blocks and {name}_scales are not bytes")
        return None
    return Fp4Weight(blocks.flatten(-2), scales.view(torch.float8_e8m0fnu), None)


def _fp4_scale(module: Module, scheme: WeightScheme) -> torch.Tensor | None:
    """[out, groups] in the dtype that tells NVFP4 and MXFP4 apart."""
    groups = module.num_groups(scheme)
    if groups is None:
        return None
    shape = (module.out, groups)
    if scheme.group_size == GROUP_SIZES[torch.float8_e4m3fn]:
        return module.take("weight_scale", (torch.float8_e4m3fn,), shape)
    scale = module.take("weight_scale", (torch.uint8, torch.float8_e8m0fnu), shape)
    return None if scale is None else scale.view(torch.float8_e8m0fnu)


def _one_scale(scheme: WeightScheme) -> tuple[Shape, ...]:
    """Shapes of the one scale of a whole matrix."""
    return ((1,), (), (1, 1)) if scheme.strategy == "tensor" else ()


def _drop_input_scales(module: Module) -> None:
    """Fixed scales of 8-bit activations, which are never quantised here."""
    module.take_if_there("input_scale", FLOATS, (1,), (), (1, 1))
    module.take_if_there("input_zero_point", (torch.int8,), (1,), (), (1, 1))


_Reader = Callable[[Module, QuantConfig, WeightScheme], QuantWeight | None]

_READERS: Final[Mapping[str, tuple[_Reader, Kind]]] = {
    "packed int": (_packed_int, "int"),
    "int8": (_int8, "int"),
    "qweight": (_qweight, "int"),
    "fp8": (_fp8, "float8"),
    "packed fp4": (_packed_fp4, "float4"),
    "fp4": (_fp4, "float4"),
}
