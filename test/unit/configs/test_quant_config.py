"""What released checkpoints say about their quantisation, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.configs.config_fields import ModelConfigError
from sglang.srt.configs.quant_config import QuantConfig, WeightScheme, read_quant

KIMI = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
                "block_structure": None, "dynamic": False, "actorder": None, "observer": "minmax",
            },
        }
    },
    "ignore": [
        "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
}  # fmt: skip
GLM5_NVFP4 = {
    "producer": {"name": "modelopt", "version": "0.42.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head", "model.layers.*.self_attn*", "model.layers.3.mlp.gate"],
    },
}
CT_FP8 = {
    "num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False,
}  # fmt: skip


def quant_of(folder: Path, said: dict[str, Any] | None, **files: dict[str, Any]) -> QuantConfig | None:
    (folder / "config.json").write_text(json.dumps({} if said is None else {"quantization_config": said}))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return read_quant(folder)


def one_scheme(quant: QuantConfig | None) -> WeightScheme:
    assert quant is not None and len(quant.schemes) == 1
    return quant.schemes[0]


def test_kimi(tmp_path: Path) -> None:
    quant = quant_of(tmp_path, KIMI)
    assert quant is not None and not quant.has_kv_scales
    scheme = one_scheme(quant)
    assert (scheme.kind, scheme.bits, scheme.group_size, scheme.symmetric) == ("int", 4, 32, True)
    layer = "language_model.model.layers.1."
    assert quant.scheme_of(f"{layer}mlp.experts.7.gate_proj", "int") is scheme
    assert quant.scheme_of(f"{layer}mlp.experts.7.gate_proj", "float4") is None
    assert not quant.ignores(f"{layer}mlp.experts.7.gate_proj")
    for plain in ("self_attn.o_proj", "mlp.shared_experts.up_proj", "mlp.gate_proj"):
        assert quant.ignores(f"{layer}{plain}")


def test_glm5_nvfp4_in_its_own_file_or_in_the_config(tmp_path: Path) -> None:
    in_config = GLM5_NVFP4["quantization"] | {"quant_method": "modelopt"}
    nested = GLM5_NVFP4 | {"quant_method": "modelopt"}
    for said, files in ((None, {"hf_quant_config": GLM5_NVFP4}), (in_config, {}), (nested, {})):
        quant = quant_of(tmp_path, said, **files)
        assert quant is not None and quant.method == "modelopt" and quant.has_kv_scales
        assert one_scheme(quant) == WeightScheme("float4", 4, "group", 16)
        assert quant.ignores("model.layers.9.self_attn.o_proj") and quant.ignores("model.layers.3.mlp.gate")
        assert not quant.ignores("model.layers.3.mlp.gate_proj")


def test_mixed_formats(tmp_path: Path) -> None:
    quant = quant_of(
        tmp_path,
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4", "group_size": 16}},
        },
    )
    assert quant is not None and {scheme.kind for scheme in quant.schemes} == {"float8", "float4"}
    groups = {
        "group_0": {"targets": ["re:.*experts.*"], "weights": KIMI["config_groups"]["group_0"]["weights"]},  # type: ignore[index]
        "group_1": {"targets": ["Linear"], "weights": CT_FP8 | {"type": "int"}},
        "group_2": {"targets": ["m.experts.0"], "weights": CT_FP8},
        "group_3": {"targets": ["Linear"], "input_activations": CT_FP8},
    }
    quant = quant_of(tmp_path, KIMI | {"format": "mixed-precision", "config_groups": groups})
    assert quant is not None and len(quant.schemes) == 3
    experts = quant.scheme_of("m.experts.1", "int")
    others = quant.scheme_of("m.q_proj", "int")
    assert experts is not None and others is not None and (experts.bits, others.bits) == (4, 8)
    assert quant.scheme_of("m.experts.0", "float8") is not None
    assert quant.scheme_of("m.experts.1", "float8") is None


@pytest.mark.parametrize(
    "said, scheme",
    [
        (
            {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
            WeightScheme("float8", 8, "block", block=(128, 128)),
        ),
        ({"quant_method": "fp8", "activation_scheme": "static"}, WeightScheme("float8", 8, "tensor")),
        ({"quant_method": "fbgemm_fp8"}, WeightScheme("float8", 8, "channel")),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True},
            WeightScheme("int", 4, "group", 128, symmetric=False),
        ),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": -1},
            WeightScheme("int", 8, "channel", symmetric=False),
        ),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
            WeightScheme("int", 4, "group", 128, symmetric=False),
        ),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["a"]}, WeightScheme("float4", 4, "group", 32)),
    ],
)  # fmt: skip
def test_methods(tmp_path: Path, said: dict[str, Any], scheme: WeightScheme) -> None:
    assert one_scheme(quant_of(tmp_path, said)) == scheme


def test_files_of_the_tools_themselves(tmp_path: Path) -> None:
    assert quant_of(tmp_path, None) is None
    quant = quant_of(tmp_path, None, quantize_config={"bits": 4, "group_size": 64})
    assert quant is not None and quant.method == "gptq" and quant.zeros_less_one
    other = quant_of(tmp_path, {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"})
    assert other is not None and not other.zeros_less_one
    (tmp_path / "quantize_config.json").unlink()
    quant = quant_of(tmp_path, None, quant_config={"w_bit": 4, "q_group_size": 64, "zero_point": True})
    assert quant is not None and quant.method == "awq" and one_scheme(quant).group_size == 64


def ct(**fields: Any) -> dict[str, Any]:
    return KIMI | fields


def ct_weights(**fields: Any) -> dict[str, Any]:
    return ct(
        config_groups={"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"} | fields}}
    )


@pytest.mark.parametrize(
    "said, message",
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported .supported: compressed-"),
        ({}, "lacks 'quant_method'"),
        (ct(format="marlin-24"), "format 'marlin-24' is not supported"),
        (ct(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity format 'sparse-24-bitmask'"),
        (ct(transform_config={"config_groups": {"u": {}}}), "transform_config"),
        (ct(ignore="lm_head"), "'ignore' must be a list of names"),
        (ct_weights(num_bits=3, strategy="channel"), "int3 weights with strategy 'channel' is not supported"),
        (ct_weights(strategy="attn_head"), "strategy 'attn_head'"),
        (ct_weights(strategy="group"), "lacks 'group_size'"),
        (ct_weights(num_bits=8, type="float", strategy="block"), "'block_structure' must be two positive"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ with 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "a kernel's own layout"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 8}}}, "other settings for"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "'group_size' must be a positive"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ version 'gemv'"),
        ({"quant_method": "awq", "bits": 8}, "AWQ with 8 bits"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 in the format 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "two positive integers"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ' is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "NVFP4 in groups of 32"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, said: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message) as caught:
        quant_of(tmp_path, said)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
