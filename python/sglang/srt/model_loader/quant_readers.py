"""From a module's stored tensors to its ``QuantWeight``, format by format.

A reader takes every tensor of its format, so that what is left over is an error, and answers None when
something is wrong: the ledger has it by then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from sglang.srt.configs.quant_config import Kind, QuantConfig, WeightScheme
from sglang.srt.distributed.shares import Span
from sglang.srt.layers.quantization.fp4_weight import GROUP_SIZES, Fp4Weight
from sglang.srt.layers.quantization.fp8_weight import Fp8Weight
from sglang.srt.layers.quantization.int_weight import IntWeight, from_awq, from_gptq, from_int8
from sglang.srt.layers.quantization.packing import WORD_BITS, unpack_words, words_of
from sglang.srt.layers.quantization.quant_weight import QuantWeight
from sglang.srt.model_loader.quant_module import FLOATS, Module, Shape, StoredTensors
from sglang.srt.model_loader.weight_source import Part

MXFP4_GROUP: Final = GROUP_SIZES[torch.float8_e8m0fnu]


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


def can_cut(module: Module, config: QuantConfig, part: Part) -> bool:
    """Whether the part of a packed module begins and ends where groups, blocks and words do."""
    whole = (module.out, module.in_features)[part.dim]
    unit = _units(module, config)[part.dim]
    begin, end = part.span.begin, part.span.end
    return part.span.size > 0 and begin % unit == 0 and (end % unit == 0 or end == whole)


def _units(module: Module, config: QuantConfig) -> tuple[int, int]:
    """Rows and columns of the matrix that are never cut through."""
    form = _form(module)
    assert form is not None
    scheme = config.scheme_of(module.name, _READERS[form][1])
    if scheme is None:
        return 1, 1  # an error, which the reader will record
    group = scheme.group_size if scheme.strategy == "group" else 1
    if scheme.kind == "float8":
        return scheme.block if scheme.strategy == "block" else (1, 1)
    if scheme.kind == "float4":
        return 1, group
    if form == "int8":
        return 1, group
    a_word = WORD_BITS // scheme.bits
    of_one = scheme.group_size if scheme.strategy == "group" else module.in_features
    columns = math.lcm(group, a_word) if _in_order(module, of_one) else module.in_features
    return (1 if form == "packed int" and scheme.symmetric else a_word), columns


def _form(module: Module) -> str | None:
    """What the tensors are, by their names and dtypes; None: not quantised."""
    if (packed := module.dtype("weight_packed")) is not None:
        return "packed fp4" if packed == torch.uint8 else "packed int"
    if module.dtype("qweight") is not None:
        return "qweight"
    by_dtype = {torch.float8_e4m3fn: "fp8", torch.int8: "int8", torch.uint8: "fp4"}
    weight = module.dtype("weight")
    return None if weight is None else by_dtype.get(weight)


def _in_order(module: Module, group: int) -> bool:
    """Whether columns are in the order of their groups, so that a part of them has whole groups."""
    for suffix in ("g_idx", "weight_g_idx"):
        if module.dtype(suffix) is not None:
            shape = (module.in_features,)
            found = module.source.take_stored(f"{module.name}.{suffix}", shape)
            return found is not None and bool((found.cpu() == torch.arange(*shape) // group).all())
    return True


def _packed_int(module: Module, config: QuantConfig, scheme: WeightScheme) -> IntWeight | None:
    """compressed-tensors, pack-quantized."""
    groups = module.num_groups(scheme)
    if groups is None:
        return None
    out, bits, group = module.out, scheme.bits, max(scheme.group_size, 1)
    a_word = WORD_BITS // bits
    stored_shape = module.take("weight_shape", (torch.int32, torch.int64), (2,))
    words = (out, words_of(module.in_features, bits))
    packed = module.take("weight_packed", (torch.int32,), words, rows=(0, 1), columns=(1, a_word))
    shapes = ((out, groups), *_one_scale(scheme))
    scale = module.take("weight_scale", FLOATS, *shapes, rows=(0, 1), columns=(1, group))
    zero = group_of = None
    if not scheme.symmetric:
        words = (words_of(out, bits), groups)  # they are packed along the rows
        zero = module.take("weight_zero_point", (torch.int32,), words, rows=(0, a_word), columns=(1, group))
        if zero is None:
            return None
        zero = unpack_words(zero.t(), bits, module.rows).t().contiguous()
    if module.dtype("weight_g_idx") is not None:
        group_of = module.take("weight_g_idx", (torch.int32, torch.int64), (module.in_features,))
        if module.columns < module.in_features:
            group_of = None  # it is in order, or it would not be cut
    _drop_input_scales(module)
    if packed is None or scale is None or stored_shape is None:
        return None
    if stored_shape.tolist() != [out, module.in_features]:
        module.wrong(f".weight_shape says {stored_shape.tolist()}, not {[out, module.in_features]}")
        return None
    scale = _for_rows(module, scheme, scale)
    return IntWeight(packed, scale, zero, group_of, bits, module.columns)


def _for_rows(module: Module, scheme: WeightScheme, of_groups: torch.Tensor) -> torch.Tensor:
    """[rows, groups] of scales or zero points as they are stored; there may be one for the whole matrix."""
    groups = module.own_groups(scheme)
    return of_groups.reshape(-1, groups).expand(module.rows, groups)


def _int8(module: Module, config: QuantConfig, scheme: WeightScheme) -> IntWeight | None:
    """compressed-tensors, int-quantized."""
    groups = module.num_groups(scheme)
    if groups is None:
        return None
    out, group = module.out, max(scheme.group_size, 1)
    whole = (out, module.in_features)
    weight = module.take("weight", (torch.int8,), whole, rows=(0, 1), columns=(1, 1))
    shapes = ((out, groups), (out,), *_one_scale(scheme))
    scale = module.take("weight_scale", FLOATS, *shapes, rows=(0, 1), columns=(1, group))
    zero = None
    if not scheme.symmetric:
        zero = module.take("weight_zero_point", (torch.int8,), *shapes, rows=(0, 1), columns=(1, group))
        if zero is None:
            return None
        zero = _for_rows(module, scheme, zero)
    _drop_input_scales(module)
    if weight is None or scale is None:
        return None
    return from_int8(weight, _for_rows(module, scheme, scale), zero)


def _qweight(module: Module, config: QuantConfig, scheme: WeightScheme) -> IntWeight | None:
    groups = module.num_groups(scheme)
    if groups is None:
        return None
    out, in_features, int32 = module.out, module.in_features, (torch.int32,)
    bits, of_groups = scheme.bits, (0, max(scheme.group_size, 1))
    a_word = WORD_BITS // bits
    scales = module.take("scales", FLOATS, (groups, out), rows=(1, 1), columns=of_groups)
    if config.method == "awq":
        words = (in_features, words_of(out, 4))
        qweight = module.take("qweight", int32, words, rows=(1, a_word), columns=(0, 1))
        words = (groups, words_of(out, 4))
        qzeros = module.take_if_there("qzeros", int32, words, rows=(1, a_word), columns=of_groups)
        if qweight is None or scales is None:
            return None
        if qzeros is None and not scheme.symmetric:
            module.wrong(".qzeros is missing, although the config says that there are zero points")
            return None
        return from_awq(qweight, scales, qzeros)
    words = (words_of(in_features, bits), out)
    qweight = module.take("qweight", int32, words, rows=(1, 1), columns=(0, a_word))
    words = (groups, words_of(out, bits))
    qzeros = module.take("qzeros", int32, words, rows=(1, a_word), columns=of_groups)
    g_idx = module.take_if_there("g_idx", int32, (in_features,))
    if qweight is None or scales is None or qzeros is None:
        return None
    if g_idx is not None and not 0 <= int(g_idx.min()) <= int(g_idx.max()) < groups:
        module.wrong(f".g_idx names groups outside the {groups} there are")
        return None
    if module.columns < in_features:
        g_idx = None  # it is in order, or it would not be cut
    return from_gptq(qweight, scales, qzeros, g_idx, bits, config.zeros_less_one)


def _fp8(module: Module, config: QuantConfig, scheme: WeightScheme) -> Fp8Weight | None:
    """``weight_scale_inv`` (DeepSeek's name) is a factor too. Without blocks the stored shape decides."""
    out, columns = module.out, module.in_features
    data = module.take("weight", (torch.float8_e4m3fn,), (out, columns), rows=(0, 1), columns=(1, 1))
    dtypes, suffix = (*FLOATS, torch.float8_e8m0fnu), "weight_scale"
    if module.dtype("weight_scale_inv") is not None:
        suffix = "weight_scale_inv"
    block = scheme.block
    if scheme.strategy == "block":
        blocks = (-(-out // block[0]), -(-columns // block[1]))
        scale = module.take(suffix, dtypes, blocks, rows=(0, block[0]), columns=(1, block[1]))
    else:
        scale = module.take(suffix, dtypes, (), (1,), (1, 1), (out,), (out, 1), rows=(0, 1))
        if scale is not None:
            scale = scale.reshape(-1, 1)
            block = (module.rows if scale.shape[0] == 1 else 1, module.columns)
    input_scale = module.take_scalar("input_scale")
    if data is None or scale is None:
        return None
    return Fp8Weight(data, scale, block, input_scale)


def _packed_fp4(module: Module, config: QuantConfig, scheme: WeightScheme) -> Fp4Weight | None:
    """compressed-tensors: nvfp4-pack-quantized and mxfp4-pack-quantized."""
    scale = _fp4_scale(module, scheme)
    packed = _fp4_codes(module, "weight_packed")
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
    packed = _fp4_codes(module, "weight")
    own = module.take("weight_scale_2", FLOATS, (), (1,))
    input_scale = module.take_scalar("input_scale")
    if packed is None or scale is None or own is None:
        return None
    return Fp4Weight(packed, scale, own.reshape(()), False, input_scale)


def read_blocks(
    source: StoredTensors, name: str, shape: Sequence[int], part: Part | None = None
) -> Fp4Weight | None:
    """GPT-OSS's own MXFP4: ``{name}_blocks`` and ``{name}_scales`` of all experts, for [E, in, out].

    ``part``: of that shape; of the inputs in whole groups.
    """
    experts, in_features, out = shape
    group = MXFP4_GROUP
    groups = (experts, out, in_features // group)
    if part is not None:
        dim, each = {0: (0, 1), 1: (2, group), 2: (1, 1)}[part.dim]
        part = Part(dim, Span(part.span.begin // each, part.span.end // each))
    blocks = source.take_stored(f"{name}_blocks", (*groups, 16), part)
    scales = source.take_stored(f"{name}_scales", groups, part)
    if blocks is None or scales is None:
        return None
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        source.ledger.wrong_format.append(f"{name}_blocks and {name}_scales are not bytes")
        return None
    return Fp4Weight(blocks.flatten(-2), scales.view(torch.float8_e8m0fnu), None)


def _fp4_codes(module: Module, suffix: str) -> torch.Tensor | None:
    """[out, in / 2]"""
    shape = (module.out, module.in_features // 2)
    return module.take(suffix, (torch.uint8,), shape, rows=(0, 1), columns=(1, 2))


def _fp4_scale(module: Module, scheme: WeightScheme) -> torch.Tensor | None:
    """[out, groups] in the dtype that tells NVFP4 and MXFP4 apart."""
    groups = module.num_groups(scheme)
    if groups is None:
        return None
    shape, group = (module.out, groups), scheme.group_size
    dtypes: tuple[torch.dtype, ...] = (torch.uint8, torch.float8_e8m0fnu)
    if is_nvfp4 := group == GROUP_SIZES[torch.float8_e4m3fn]:
        dtypes = (torch.float8_e4m3fn,)
    scale = module.take("weight_scale", dtypes, shape, rows=(0, 1), columns=(1, group))
    if is_nvfp4:
        return scale
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
