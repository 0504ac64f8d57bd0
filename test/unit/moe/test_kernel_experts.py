"""Models with routing and experts by sgl_kernel (its references here) against the plain way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.kernel_executor import kernel_executor
from helpers.plan_driver import PlanDriver
from helpers.quantise import FORMATS, write_quantised
from helpers.run_model import Driver, load_target
from helpers.tiny_executor import KINDS, draft_folder, target_folder, tiny_executor
from helpers.tiny_mla import write_tiny_deepseek_v3, write_tiny_kimi_k25
from helpers.tiny_moe import write_tiny_glm4_moe, write_tiny_gpt_oss, write_tiny_qwen3_moe
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sgl_kernel.moe.choose import choose_experts_ref
from sgl_kernel.moe.weights import Format
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.moe_config import MoEConfig
from sglang.srt.distributed.shares import Span
from sglang.srt.distributed.tensor_parallel import TensorParallel
from sglang.srt.layers.moe.kernel_experts import KernelExperts, choice_rule
from sglang.srt.layers.moe.layer import MoE
from sglang.srt.layers.moe.router import route
from sglang.srt.layers.quantization.quant_weight import QuantWeight
from sglang.srt.model_executor.step_plan import PAD_SLOT, SlotSampling, StepKind, StepPlan
from sglang.srt.model_loader.checkpoint import open_source
from sglang.srt.model_loader.weight_source import WeightError
from sglang.srt.models import moe, packed

Writer = Callable[..., Path]


@contextmanager
def kernels() -> Iterator[None]:
    with mock.patch.object(packed, "wants_kernels", lambda device: True):
        yield


def some_long(names: Iterable[str], *short: str) -> list[Any]:
    """All of them but ``short`` are for ``-m long``."""
    return [name if name in short else pytest.param(name, marks=pytest.mark.long) for name in names]


def logits_of(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of a prefill, a step and several queries a row."""
    driver = Driver(load_target(folder, dtype), 16, dtype)
    ids = torch.randint(0, 256, (30,), generator=torch.Generator().manual_seed(2))
    return torch.cat([driver.prefill(ids[:20]), driver.decode(ids[20:21]), driver.decode(ids[21:])])


@pytest.mark.parametrize(
    "writer",
    [
        write_tiny_qwen3_moe,
        write_tiny_deepseek_v3,
        write_tiny_glm4_moe,
        write_tiny_gpt_oss,
        pytest.param(write_tiny_kimi_k25, marks=pytest.mark.long),
    ],
)
def test_families_are_what_they_were(tmp_path: Path, writer: Writer) -> None:
    folder = writer(tmp_path, seed=2)
    expected = logits_of(folder)
    with kernels():
        got = logits_of(folder)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


PACKED = {
    "int4": Format.INT4,
    "int4-rows": Format.INT4,  # its one scale a row stands for all groups
    "nvfp4": Format.NVFP4,
    "ct-nvfp4": Format.NVFP4,
    "ct-fp8-block": Format.FP8,
    "ct-fp8-rows": Format.FP8,
    "fp8": Format.FP8,
    "fp8-block": Format.PLAIN,  # 48 columns a block: no kernel
    "awq": Format.PLAIN,  # zero points: no kernel
}


@pytest.mark.parametrize("name", some_long(PACKED, "int4", "nvfp4", "ct-fp8-block", "awq"))
def test_packed_experts_equal_the_dequantised_ones(tmp_path: Path, name: str) -> None:
    dense = ("lm_head", "self_attn", "layers.0.mlp")
    source = write_tiny_qwen3_moe(tmp_path / "source", seed=5, hidden_size=128, moe_intermediate_size=64)
    quantised, plain = write_quantised(source, tmp_path, replace(FORMATS[name], dense=dense))
    expected = logits_of(plain)
    with kernels():
        model = load_target(quantised, torch.float32)
        got = logits_of(quantised)
    experts = model.layers[1].mlp.experts  # type: ignore[attr-defined]
    assert isinstance(experts, KernelExperts)
    assert experts.gate_up.format is experts.down.format is PACKED[name]
    whole = 8 * 3 * 128 * 64
    if PACKED[name] is not Format.PLAIN:
        assert experts.weight_bytes < whole * (1.2 if PACKED[name] is Format.FP8 else 0.7)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def take(folder: Path, rank: int, size: int) -> MoE:
    config = ModelConfig.from_folder(str(folder), None)
    assert config.moe is not None and config.quant is not None
    source = open_source(folder, "auto", torch.float32, "cpu", config.quant)
    tp = TensorParallel(rank, size).in_units(config.quant.columns_unit)
    with kernels():
        return moe.take_moe(source, "model.layers.1.mlp.", config.hidden_size, config.moe, tp)


@pytest.mark.parametrize(
    "name", some_long(["int4", "nvfp4", "ct-fp8-block", "ct-fp8-rows", "fp8"], "int4", "fp8")
)
def test_ranks_have_their_parts(tmp_path: Path, name: str) -> None:
    dense = ("lm_head", "self_attn", "layers.0.mlp")
    source = write_tiny_qwen3_moe(tmp_path / "source", seed=5, hidden_size=64, moe_intermediate_size=192)
    quantised, _ = write_quantised(source, tmp_path, replace(FORMATS[name], dense=dense))
    whole = take(quantised, 0, 1).experts
    assert isinstance(whole, KernelExperts)
    rows = 0
    for rank in range(2):
        own = take(quantised, rank, 2).experts
        assert isinstance(own, KernelExperts)
        span = Span(rows, rows + own.down.columns)
        rows = span.end
        for expert in (0, 7):
            gate_up = whole.gate_up.dequantise(expert, torch.float64).unflatten(0, (2, -1))
            part = gate_up[:, span.begin : span.end].flatten(0, 1)
            assert torch.equal(own.gate_up.dequantise(expert, torch.float64), part)
            down = whole.down.dequantise(expert, torch.float64)[:, span.begin : span.end]
            assert torch.equal(own.down.dequantise(expert, torch.float64), down)
    assert rows == 192


def test_experts_of_several_formats_are_refused(tmp_path: Path) -> None:
    dense = ("lm_head", "self_attn", "layers.0.mlp", "layers.1.mlp.experts.3.up_proj")
    source = write_tiny_qwen3_moe(tmp_path / "source", seed=5)
    quantised, _ = write_quantised(source, tmp_path, replace(FORMATS["int4"], dense=dense))
    with kernels(), pytest.raises(WeightError, match=r"experts.3.up_proj.weight: .*not packed as those of"):
        load_target(quantised, torch.float32)


def test_a_gate_that_half_precision_would_change_stays_float32(tmp_path: Path) -> None:
    folder = write_tiny_qwen3_moe(tmp_path, seed=1)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    gates = {name: tensor for name, tensor in tensors.items() if name.endswith("mlp.gate.weight")}
    for exact in (False, True):
        if exact:
            tensors |= {name: gate.bfloat16().float() for name, gate in gates.items()}
            save_file(tensors, file)
        with kernels():
            model = load_target(folder, torch.bfloat16)
        router = model.layers[1].mlp.router  # type: ignore[attr-defined]
        assert router.weight_bytes == next(iter(gates.values())).numel() * (2 if exact else 4)
        assert logits_of(folder, torch.bfloat16).isfinite().all()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    groups=st.sampled_from([(None, 1, 1), ("max", 4, 2), ("top2_sum", 4, 2), ("top2_sum", 2, 1)]),
    softmax=st.booleans(),
    has_bias=st.booleans(),
    renormalise=st.booleans(),
    coarse=st.booleans(),
)
def test_a_choice_is_the_routers(
    seed: int,
    groups: tuple[str | None, int, int],
    softmax: bool,
    has_bias: bool,
    renormalise: bool,
    coarse: bool,
) -> None:
    """``coarse``: few different numbers, so that experts and groups tie."""
    config = MoEConfig(
        num_experts=16,
        top_k=3,
        intermediate_size=1,
        layers=(0,),
        scoring="softmax" if softmax else "sigmoid",
        renormalise=renormalise,
        scaling_factor=2.5,
        num_groups=groups[1],
        topk_groups=groups[2],
        group_score=groups[0],  # type: ignore[arg-type]
    )
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(12, 16, generator=g)
    bias = torch.randn(16, generator=g) if has_bias else None
    if coarse:
        logits = logits.round()
        bias = None if bias is None else bias.round() * 0.25
    weights, experts = route(logits, bias, config)
    got_weights, got = choose_experts_ref(logits, bias, choice_rule(config), None)
    assert torch.equal(got.long(), experts) and torch.equal(got_weights, weights)
    if coarse and not has_bias and groups[0] is None:
        for row, chosen in zip(logits.tolist(), experts.tolist(), strict=True):
            assert chosen == sorted(range(16), key=lambda e: (-row[e], e))[:3]


@pytest.mark.parametrize(
    "family,drafter,shape",
    [
        ("qwen3-moe", "eagle3", (3, 1, 4)),
        ("glm4-moe", "nextn", (3, 2, 6)),
        pytest.param("glm4-moe", "nextn", (3, 1, 4), marks=pytest.mark.long),
    ],
)
def test_a_device_step_gives_the_runners_tokens_and_sends_padding_to_no_expert(
    family: str, drafter: str, shape: tuple[int, int, int]
) -> None:
    """Plain and speculative steps with padded rows between the real ones; a draft head has experts, too."""
    folder = draft_folder(family) if drafter == "eagle3" else None
    seen: list[torch.Tensor] = []
    products = KernelExperts.__call__

    def watched(
        self: KernelExperts, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, base=None
    ):  # type: ignore[no-untyped-def]
        seen.append(experts)
        return products(self, x, weights, experts, base)

    def run(driver: PlanDriver, padded: bool) -> list[list[int]]:
        requests = [driver.add([5, 6, 7, 8 + i], SlotSampling(temperature=1.0, seed=i)) for i in range(2)]
        for draft_len in (0, 3, 0, 2, 3):
            plan = driver.plan(decode=requests, draft_len=draft_len)
            slots, lens = plan.decode_slots, plan.decode_len_bounds
            if padded:
                slots, lens = (slots[0], PAD_SLOT, slots[1], PAD_SLOT), (lens[0], 1, lens[1], 1)
            step = StepPlan(
                plan.step_id, StepKind.DECODE, slots, lens, draft_len, page_writes=plan.page_writes
            )
            seen.clear()
            result = driver.executor.launch(step).wait()
            for request, tokens in zip(requests, result.tokens[:: 2 if padded else 1], strict=True):
                request.output += tokens
            if padded:
                assert seen
                for experts in seen:
                    rows = experts.view(4, -1)
                    assert (rows[[1, 3]] == -1).all() and (rows[[0, 2]] >= 0).all()
        driver.executor.shutdown()
        return [request.output for request in requests]

    with kernels(), mock.patch.object(KernelExperts, "__call__", watched):
        kind = KINDS.get(drafter)
        executor = kernel_executor(target_folder(family), folder, shape, 16, draft_kind=kind)
        got = run(PlanDriver(executor), padded=True)
    oracle = tiny_executor(shape, family, drafter=drafter, dtype="float32", page_size=16)
    expected = run(PlanDriver(oracle), padded=False)
    assert got == expected and len(got[0]) > 5


def test_weights_that_no_stack_holds() -> None:
    from sglang.srt.layers.quantization.expert_stack import layout_of
    from sglang.srt.layers.quantization.fp4_weight import Fp4Weight

    packed = torch.zeros(4, 32, dtype=torch.uint8)
    mxfp4: QuantWeight = Fp4Weight(packed, torch.ones(4, 2).to(torch.float8_e8m0fnu), None)
    assert layout_of(mxfp4) is None
