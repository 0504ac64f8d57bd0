"""The experts of a mixture-of-experts model, whichever family's fields say it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from sglang.srt.configs.config_fields import ConfigFields, ModelConfigError


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """How tokens find experts, and the experts' sizes.

    With groups (``num_groups`` > 1) only experts of the ``topk_groups`` best groups can be chosen.
    """

    num_experts: int
    top_k: int  # experts a token
    intermediate_size: int  # of one expert
    layers: tuple[int, ...]  # indices of the layers that have experts, ascending
    num_shared: int = 0  # experts that every token goes through, stored as one wide MLP
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = False  # weights of the chosen experts are made to sum to 1
    scaling_factor: float = 1.0  # weights are multiplied by it at the end
    has_bias: bool = False  # added to the scores to choose, not to the weights
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2_sum"] | None = None  # None: no groups


def read_moe(fields: ConfigFields, architecture: str, num_layers: int) -> MoEConfig | None:
    """The experts of this architecture; None: it has none, or the file says so.

    Raises:
        ModelConfigError: fields that are lacking, contradict each other or aren't supported.
    """
    reader = _READERS.get(architecture)
    if reader is None or not any(fields.has(name) for name in _NUM_EXPERTS):
        return None
    config = reader(fields, num_layers)
    if not config.layers:
        return None
    _check(fields, config)
    return config


_NUM_EXPERTS: Final = ("num_experts", "n_routed_experts", "num_local_experts")


def _qwen3_moe(fields: ConfigFields, num_layers: int) -> MoEConfig:
    step, dense = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    return MoEConfig(
        num_experts=_num_experts(fields),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        layers=tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0),
        renormalise=fields.flag("norm_topk_prob"),
    )


def _deepseek_v2(fields: ConfigFields, num_layers: int) -> MoEConfig:
    """Softmax; groups are judged by their best expert."""
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelConfigError(
            f"{fields.where}: topk_method {method!r} is not supported"
            " (supported: greedy, group_limited_greedy)"
        )
    if fields.flag("norm_topk_prob"):
        raise ModelConfigError(f"{fields.where}: norm_topk_prob is not supported with softmax scores")
    grouped = method == "group_limited_greedy" and fields.integer("n_group", 1) > 1
    return MoEConfig(
        num_experts=_num_experts(fields),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        layers=_after_dense(fields, num_layers),
        num_shared=fields.count("n_shared_experts", 1),
        scaling_factor=fields.number("routed_scaling_factor", 1.0),
        num_groups=fields.integer("n_group") if grouped else 1,
        topk_groups=fields.integer("topk_group") if grouped else 1,
        group_score="max" if grouped else None,
    )


def _deepseek_v3(fields: ConfigFields, num_layers: int) -> MoEConfig:
    """Sigmoid and a bias; groups are judged by the sum of their two best experts."""
    method, scoring = fields.text("topk_method", "noaux_tc"), fields.text("scoring_func", "sigmoid")
    if (method, scoring) != ("noaux_tc", "sigmoid"):
        raise ModelConfigError(
            f"{fields.where}: topk_method {method!r} with scoring_func {scoring!r} is not supported"
            " (supported: noaux_tc with sigmoid)"
        )
    num_groups = fields.integer("n_group", 1)
    return MoEConfig(
        num_experts=_num_experts(fields),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        layers=_after_dense(fields, num_layers),
        num_shared=fields.count("n_shared_experts", 1),
        scoring="sigmoid",
        renormalise=fields.flag("norm_topk_prob", True),
        scaling_factor=fields.number("routed_scaling_factor", 1.0),
        has_bias=True,
        num_groups=num_groups,
        topk_groups=fields.integer("topk_group", 1) if num_groups > 1 else 1,
        group_score="top2_sum" if num_groups > 1 else None,
    )


def _gpt_oss(fields: ConfigFields, num_layers: int) -> MoEConfig:
    """Softmax over the chosen ones, which is that over all of them made to sum to 1."""
    if (limit := fields.number("swiglu_limit", 7.0)) != 7.0:
        raise ModelConfigError(f"{fields.where}: swiglu_limit {limit} is not supported (supported: 7)")
    return MoEConfig(
        num_experts=_num_experts(fields),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        layers=tuple(range(num_layers)),
        renormalise=True,
    )


_READERS: Final[Mapping[str, Callable[[ConfigFields, int], MoEConfig]]] = MappingProxyType(
    {
        "Qwen3MoeForCausalLM": _qwen3_moe,
        "DeepseekV2ForCausalLM": _deepseek_v2,
        "DeepseekV3ForCausalLM": _deepseek_v3,
        "DeepseekV32ForCausalLM": _deepseek_v3,
        "KimiK25ForConditionalGeneration": _deepseek_v3,  # of its text_config
        "Glm4MoeForCausalLM": _deepseek_v3,
        "Glm4MoeLiteForCausalLM": _deepseek_v3,
        "GlmMoeDsaForCausalLM": _deepseek_v3,
        "GptOssForCausalLM": _gpt_oss,
    }
)


def _num_experts(fields: ConfigFields) -> int:
    name = next(name for name in _NUM_EXPERTS if fields.has(name))
    return fields.integer(name)


def _after_dense(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """The first layers have a plain MLP; then every ``moe_layer_freq``-th one has experts. Some files name
    the kind of every layer instead (``mlp_layer_types``, dense or sparse)."""
    if isinstance(kinds := fields.raw.get("mlp_layer_types"), list):
        return tuple(i for i, kind in enumerate(kinds[:num_layers]) if kind == "sparse")
    first, every = fields.count("first_k_dense_replace"), fields.integer("moe_layer_freq", 1)
    return tuple(i for i in range(num_layers) if i >= first and i % every == 0)


def _check(fields: ConfigFields, config: MoEConfig) -> None:
    if config.num_experts % config.num_groups:
        raise ModelConfigError(
            f"{fields.where}: {config.num_experts} experts can't be split into {config.num_groups} groups"
        )
    if config.topk_groups > config.num_groups:
        raise ModelConfigError(
            f"{fields.where}: topk_group {config.topk_groups} is more than n_group {config.num_groups}"
        )
    group_size = config.num_experts // config.num_groups
    if config.group_score == "top2_sum" and group_size < 2:
        raise ModelConfigError(f"{fields.where}: a group of experts needs two, n_group leaves {group_size}")
    if config.top_k > (most := config.topk_groups * group_size):
        raise ModelConfigError(
            f"{fields.where}: {config.top_k} experts a token, but only {most} can be chosen from"
        )
