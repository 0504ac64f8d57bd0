"""Quantised copies of tiny checkpoints, and the unquantised ones they stand for.

compressed-tensors' formats are packed by the package of that name. The others are packed here, one
value after the other from the formats' definitions, with nothing of the loader. What a weight stands
for is computed from integers, zero points and scales before anything is packed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.tiny_models import Tensors, write_folder
from safetensors.torch import load_file

GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble of a word -> column of eight

Packed = tuple[Tensors, torch.Tensor]
"""Tensors by the end of their names, and the matrix [out, in] float64 that they stand for."""


@dataclass(frozen=True)
class Format:
    config: dict[str, Any]
    pack: Callable[[torch.Tensor], Packed]  # of a weight [out, in]
    dense: tuple[str, ...] = ("lm_head",)  # parts of the names of modules that stay as they are
    own_file: bool = False  # the config is hf_quant_config.json's
    extra: Tensors = field(default_factory=dict)  # for every layer's attention: scales of a KV cache


def write_quantised(source: Path, folder: Path, form: Format) -> tuple[Path, Path]:
    """``source`` quantised, and what that stands for in float64, unquantised: two folders."""
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    quantised: Tensors = {}
    plain: Tensors = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        is_linear = module.endswith("_proj") and name != module
        if not is_linear or any(part in module for part in form.dense):
            quantised[name] = plain[name] = tensor
            continue
        parts, plain[name] = form.pack(tensor)
        if f"{module}.bias" in tensors:
            parts.pop("bias", None)
        quantised |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
        if module.endswith("self_attn.q_proj"):
            quantised |= {f"{module.removesuffix('q_proj')}{n}": t for n, t in form.extra.items()}
    if form.own_file:
        write_folder(folder / "quantised", config, quantised)
        (folder / "quantised" / "hf_quant_config.json").write_text(json.dumps(form.config))
    else:
        write_folder(folder / "quantised", config | {"quantization_config": form.config}, quantised)
    return folder / "quantised", write_folder(folder / "plain", config, plain)


# ---- integers


def integers(
    weight: torch.Tensor, bits: int, group: int, scale_dtype: torch.dtype, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [out, in] from 0, zero points [out, G] and scales [out, G] of round-to-nearest."""
    grouped = weight.unflatten(1, (-1, group))
    low, high = grouped.amin(2), grouped.amax(2)
    most = 2**bits - 1
    if symmetric:
        scale = (torch.maximum(-low, high) / (most // 2)).to(scale_dtype)
        zero = torch.full_like(low, (most + 1) // 2)
    else:
        scale = ((high.clamp(min=0) - low.clamp(max=0)) / most).to(scale_dtype)
        zero = (-low.clamp(max=0) / scale.float()).round().clamp(0, most)
    q = (grouped / scale.float()[..., None] + zero[..., None]).round().clamp(0, most)
    return q.flatten(1).to(torch.int64), zero.to(torch.int64), scale


def stands_for(
    q: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor, group_of: torch.Tensor
) -> torch.Tensor:
    """[out, in] float64; group_of: [in]."""
    return (q - zero[:, group_of]).double() * scale.double()[:, group_of]


def words(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[rows, n] of small integers -> [rows, n * bits / 32] int32; place i of a word holds order[i]."""
    a_word = 32 // bits
    packed = np.zeros((values.shape[0], values.shape[1] // a_word), dtype=np.uint32)
    for j in range(packed.shape[1]):
        for i in range(a_word):
            column = a_word * j + (i if order is None else order[i])
            packed[:, j] |= values[:, column].astype(np.uint32) << np.uint32(bits * i)
    return torch.from_numpy(packed.view(np.int32))


def gptq(bits: int, less_one: bool, shuffled: bool) -> Callable[[torch.Tensor], Packed]:
    def pack(weight: torch.Tensor) -> Packed:
        out, columns = weight.shape
        order = torch.arange(columns)
        if shuffled:
            order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
        q, zero, scale = integers(weight[:, order], bits, GROUP, torch.float16, symmetric=False)
        back = order.argsort()
        q, group_of = q[:, back], back // GROUP
        stored = (zero - 1) % 2**bits if less_one else zero
        tensors = {
            "qweight": words(q.numpy(), bits).t(),
            "qzeros": words(stored.t().numpy(), bits),
            "scales": scale.t(),
            "g_idx": group_of.int(),
            "bias": torch.zeros(out),  # as AutoGPTQ writes for layers that have none
        }
        return tensors, stands_for(q, zero, scale, group_of)

    return pack


def awq(weight: torch.Tensor) -> Packed:
    q, zero, scale = integers(weight, 4, GROUP, torch.float16, symmetric=False)
    tensors = {
        "qweight": words(q.t().numpy(), 4, AWQ_ORDER),
        "qzeros": words(zero.t().numpy(), 4, AWQ_ORDER),
        "scales": scale.t(),
    }
    return tensors, stands_for(q, zero, scale, torch.arange(weight.shape[1]) // GROUP)


# ---- floats


def fp8_block(rows: int, columns: int) -> Callable[[torch.Tensor], Packed]:
    def pack(weight: torch.Tensor) -> Packed:
        data = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        stood_for = torch.empty(weight.shape, dtype=torch.float64)
        scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = weight[at].abs().max() / 448
                data[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
                stood_for[at] = data[at].double() * float(scales[i, j])
        return {"weight": data, "weight_scale_inv": scales}, stood_for

    return pack


def fp8(scale_shape: tuple[int, ...], *, fixed_inputs: bool) -> Callable[[torch.Tensor], Packed]:
    """One scale, or (shape (-1, 1) or (-1,)) one a row."""

    def pack(weight: torch.Tensor) -> Packed:
        rows = -1 in scale_shape
        scale = weight.abs().amax(1 if rows else None, keepdim=True) / 448  # [out, 1] or [1, 1]
        data = (weight / scale).to(torch.float8_e4m3fn)
        tensors = {"weight": data, "weight_scale": scale.reshape(scale_shape)}
        if fixed_inputs:
            tensors["input_scale"] = torch.tensor(0.05)
        return tensors, data.double() * scale.double()

    return pack


def nearest_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Codes of the nearest 4-bit floats, the sign in bit 3."""
    magnitudes = (values.abs()[..., None] - torch.tensor(E2M1)).abs().argmin(-1)
    return magnitudes + 8 * (values < 0)


def nvfp4(weight: torch.Tensor) -> Packed:
    """modelopt's."""
    grouped = weight.unflatten(1, (-1, 16))
    own = weight.abs().max() / (6 * 448)
    scale = (grouped.abs().amax(2) / 6 / own).to(torch.float8_e4m3fn)
    codes = nearest_e2m1(grouped / (scale.float() * own)[..., None]).flatten(1)
    signs = 1.0 - 2.0 * (codes >= 8).double()
    values = torch.tensor(E2M1, dtype=torch.float64)[codes % 8] * signs
    stood_for = values * scale.double().repeat_interleave(16, 1) * own.double()
    packed = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    seen = (4 + 8 * weight.abs().max()) / (6 * 448)  # of activations up to 4 and a little more
    tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": own, "input_scale": seen}
    return tensors, stood_for


# ---- compressed-tensors


def compressed(form: str, scale_dtype: torch.dtype = torch.float32, **weights: Any) -> Format:
    """Packed by the package; the config is the one it writes."""
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }

    def pack(weight: torch.Tensor) -> Packed:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        args = QuantizationArgs(**weights)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
        packer = BaseCompressor.get_value_from_registry(form)
        tensors = packer.compress({"weight": weight} | parameters(weight, scale_dtype, **weights), scheme)
        if args.type == "float" and args.num_bits == 4:
            return tensors, _fp4_stands_for(tensors, args.group_size)
        scales = {name: t.double() for name, t in tensors.items() if name.endswith("scale")}
        return tensors, packer.decompress(tensors | scales, scheme)["weight"]

    return Format(config, pack)


def parameters(weight: torch.Tensor, scale_dtype: torch.dtype, **args: Any) -> Tensors:
    """Scales (and zero points) for the package to quantise with."""
    out, columns = weight.shape
    if args["type"] == "float" and args["num_bits"] == 4:
        return _fp4_parameters(weight, args["group_size"])
    if args["strategy"] == "block":
        rows, width = args["block_structure"]
        scales = [[b.abs().max() for b in r.split(width, 1)] for r in weight.split(rows, 0)]
        return {"weight_scale": torch.tensor(scales) / 448}
    if args["type"] == "float":
        dim = 1 if args["strategy"] == "channel" else None
        scale = weight.abs().amax(dim, keepdim=True) / 448
        return {"weight_scale": scale if dim else scale.reshape(1)}
    group = args.get("group_size") or columns
    _, zero, scale = integers(weight, args["num_bits"], group, scale_dtype, args["symmetric"])
    signed = (zero - 2 ** (args["num_bits"] - 1)).to(torch.int8)
    return {"weight_scale": scale} | ({} if args["symmetric"] else {"weight_zero_point": signed})


def _fp4_parameters(weight: torch.Tensor, group: int) -> Tensors:
    largest = weight.unflatten(1, (-1, group)).abs().amax(2)
    if group == 32:
        return {"weight_scale": torch.exp2((largest / 6).log2().ceil())}
    own = (6 * 448) / weight.abs().max()
    scale = (largest / 6 * own).to(torch.float8_e4m3fn)
    return {"weight_scale": scale.float(), "weight_global_scale": own.reshape(1)}


def _fp4_stands_for(tensors: Tensors, group: int) -> torch.Tensor:
    """Not by the package, which rounds these to bfloat16."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    packed, scale = tensors["weight_packed"], tensors["weight_scale"]
    if scale.dtype == torch.uint8:
        scale = torch.exp2(scale.double() - 127)
    values = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], torch.float64)
    stood_for = values * scale.double().repeat_interleave(group, 1)
    return stood_for / tensors.get("weight_global_scale", torch.ones(1)).double()


# ---- all of them


def _config(method: str, **fields: Any) -> dict[str, Any]:
    return {"quant_method": method} | fields


INT4 = {"num_bits": 4, "type": "int"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
KV_SCALES = {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor(0.25)}
GPTQ = {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}

FORMATS: dict[str, Format] = {
    "int4": compressed(
        "pack-quantized", torch.bfloat16, **INT4, symmetric=True, strategy="group", group_size=GROUP
    ),
    "int4-zeros": compressed("pack-quantized", **INT4, symmetric=False, strategy="group", group_size=GROUP),
    "int4-rows": compressed("pack-quantized", **INT4, symmetric=True, strategy="channel"),
    "int8-packed": compressed(
        "pack-quantized", num_bits=8, type="int", symmetric=False, strategy="group", group_size=64
    ),
    "int8": compressed("int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"),
    "ct-fp8-rows": compressed("float-quantized", **FP8, strategy="channel"),
    "ct-fp8-one": compressed("float-quantized", **FP8, strategy="tensor"),
    "ct-fp8-block": compressed("float-quantized", **FP8, strategy="block", block_structure=[32, 64]),
    "ct-nvfp4": compressed(
        "nvfp4-pack-quantized",
        num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16,
    ),
    "ct-mxfp4": compressed(
        "mxfp4-pack-quantized", num_bits=4, type="float", symmetric=True, strategy="group", group_size=32
    ),
    "gptq": Format(_config("gptq", **GPTQ), gptq(4, less_one=True, shuffled=False)),
    "gptq-shuffled": Format(_config("gptq", **GPTQ), gptq(4, less_one=True, shuffled=True)),
    "gptq-v2": Format(_config("gptq", **GPTQ, checkpoint_format="gptq_v2"), gptq(4, False, shuffled=False)),
    "gptq-8": Format(_config("gptq", **GPTQ | {"bits": 8}), gptq(8, less_one=True, shuffled=False)),
    "awq": Format(_config("awq", bits=4, group_size=GROUP, zero_point=True, version="gemm"), awq),
    "fp8-block": Format(
        _config("fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[32, 48]),
        fp8_block(32, 48),
        extra=KV_SCALES,
    ),
    "fp8": Format(_config("fp8", activation_scheme="static"), fp8((), fixed_inputs=True)),
    "fbgemm": Format(
        _config("fbgemm_fp8", activation_scale_ub=1200.0), fp8((-1, 1), fixed_inputs=False)
    ),
    "modelopt-fp8": Format(
        {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
        fp8((), fixed_inputs=True),
        own_file=True,
        extra=KV_SCALES,
    ),
    "nvfp4": Format(
        _config("modelopt", quant_algo="NVFP4", group_size=16, ignore=["lm_head", "*.self_attn.*"]),
        nvfp4,
        dense=("lm_head", "self_attn"),
    ),
}  # fmt: skip
