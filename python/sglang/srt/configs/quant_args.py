"""``--quantization``: the files decide; the flag may say the same, and is refused if it says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from sglang.srt.configs.config_fields import ModelConfigError
from sglang.srt.configs.quant_config import QuantConfig

# SGLang's name -> the method of the files it is for; the last word of a name may be a kernel's.
_METHODS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "awq": "awq",
        "awq_marlin": "awq",
        "compressed-tensors": "compressed-tensors",
        "fp8": "fp8",
        "gptq": "gptq",
        "gptq_marlin": "gptq",
        "modelopt": "modelopt",
        "modelopt_fp4": "modelopt",
        "modelopt_fp8": "modelopt",
        "mxfp4": "mxfp4",
    }
)
_KINDS: Final[Mapping[str, str]] = MappingProxyType({"modelopt_fp4": "float4", "modelopt_fp8": "float8"})

QUANTIZATIONS: Final = tuple(_METHODS)


def check_quantization(option: str, wanted: str | None, quant: QuantConfig | None, folder: str) -> None:
    """``wanted``: as given with ``option``; None: not given.

    Raises:
        ModelConfigError: the files in ``folder`` are of another kind, or not quantised.
    """
    if wanted is None:
        return
    if quant is None:
        raise ModelConfigError(
            f"{option} {wanted}: the files in {folder} are not quantised, and nothing is quantised while"
            " loading; leave it out, or give a folder that is quantised"
        )
    kind = _KINDS.get(wanted)
    kinds = {scheme.kind for scheme in quant.schemes}
    if quant.method != _METHODS[wanted] or (kind is not None and kind not in kinds):
        said = quant.method if kind is None else f"{quant.method} with {' and '.join(sorted(kinds))} weights"
        raise ModelConfigError(
            f"{option} {wanted}: {quant.where} says {said}; leave it out, the files decide"
        )
