"""What FlashInfer's kernels are given for sums over ranks: its kernels are faked, they need GPUs.

Run alone: pytest THIS_FILE
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_kernel import launch
from sgl_kernel.communication import flashinfer as module
from sgl_kernel.communication.flashinfer import FlashInferLayout, FlashInferSums, load_kernels, why_not
from sgl_kernel.flashinfer_package import FlashInferError

BF16 = torch.bfloat16
LAYOUTS = st.builds(
    FlashInferLayout, st.sampled_from(module.RANKS), st.integers(1, 1 << 21), st.integers(1, 1 << 23)
)

ORDER = (
    "allreduce_in", "world_size", "world_rank", "token_num", "hidden_size", "workspace_ptrs",
    "launch_with_pdl", "use_oneshot", "trigger_completion_at_end", "fp32_acc", "pattern_code",
    "allreduce_out", "residual_in", "residual_out", "norm_out", "quant_out", "scale_out", "rms_gamma",
    "rms_eps", "scale_factor", "layout_code", "block_quant_group_size", "weight_bias",
)  # fmt: skip
"""The parameters of trtllm_allreduce_fusion in FlashInfer 0.6.18.post1, csrc/trtllm_allreduce_fusion.cu."""


class Kernels:
    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def trtllm_allreduce_fusion(self, *args: Any) -> None:
        self.calls.append(dict(zip(ORDER, args, strict=True)))


def sums(size: int = 4, rank: int = 1) -> tuple[FlashInferSums, Kernels]:
    kernels, layout = Kernels(), FlashInferLayout(size, 1 << 12, 1 << 14)
    addresses = [(peer + 1) << 24 for peer in range(size)]
    return FlashInferSums(kernels, rank, addresses, layout, torch.device("cpu")), kernels


@given(layout=LAYOUTS)
def test_places_lie_apart_and_in_the_block(layout: FlashInferLayout) -> None:
    spans = [
        (layout.buffer, 2 * layout.twice_bytes),
        (layout.flags, 4 * 256 * layout.size),
        (layout.parts, 3 * layout.size * layout.once_bytes),
    ]
    for (begin, size), (after, _) in zip(spans, [*spans[1:], (layout.total_bytes, 0)], strict=True):
        assert begin % 4096 == 0 and begin + size <= after
    assert 3 * layout.turn_bytes < 2**31, "its kernels count the bytes in an int"


def test_a_block_that_is_ready_says_that_nothing_has_come() -> None:
    layout = FlashInferLayout(2, 64, 64)
    block = torch.full((layout.total_bytes,), 7, dtype=torch.uint8)
    layout.prepare(block)
    parts = block[layout.parts :]
    for dtype in module.DTYPES:
        values = parts.view(dtype)
        assert (values == 0).all() and values.signbit().all()
    assert (block[layout.flags : layout.parts] == 0).all()
    layout.prepare(block, waits=False)
    assert (
        not parts.view(BF16).signbit().any()
        and (block[layout.flags : layout.parts].view(torch.int32) > 2).all()
    )


@pytest.mark.parametrize("twice", [False, True])
def test_what_the_kernel_is_given(twice: bool) -> None:
    own, kernels = sums()
    x, residual, weight = (
        torch.ones(5, 64, dtype=BF16),
        torch.ones(5, 64, dtype=BF16),
        torch.ones(64, dtype=BF16),
    )
    total, normed = own.sum_and_norm(x, residual, weight, 1e-6, twice=twice)
    assert total is residual and normed.shape == x.shape
    (call,) = kernels.calls
    tensors = {"allreduce_in": x, "residual_in": residual, "residual_out": residual, "norm_out": normed}
    assert all(call[name] is tensor for name, tensor in {**tensors, "rms_gamma": weight}.items())
    plain = {"world_size": 4, "world_rank": 1, "token_num": 5, "hidden_size": 64, "rms_eps": 1e-6}
    plain |= {"use_oneshot": not twice, "fp32_acc": True, "pattern_code": 1, "launch_with_pdl": False}
    plain["trigger_completion_at_end"] = True
    assert {name: call[name] for name in plain} == plain
    rest = set(ORDER) - {*tensors, *plain, "rms_gamma", "workspace_ptrs"}
    assert all(call[name] is None for name in rest)


def test_the_workspace_names_every_ranks_places_and_the_own_state() -> None:
    own, kernels = sums(2, 0)
    x = torch.ones(5, 64, dtype=BF16)
    own.sum_and_norm(x, x.clone(), x[0], 1e-6, twice=False)
    layout, pointers = own.layout, kernels.calls[0]["workspace_ptrs"].tolist()
    offsets = (layout.buffer, layout.flags, layout.parts)
    assert pointers == [*((peer << 24) + at for at in offsets for peer in (1, 2)), own._state.data_ptr()]
    assert own._state.tolist() == [0, 0, 0, 2 << 12, 0]
    own._state.fill_(9)
    own.reset()
    assert own._state.tolist() == [0, 0, 0, 2 << 12, 0]


def test_nothing_is_sent_while_kernels_are_compiled() -> None:
    own, kernels = sums()
    x = torch.ones(5, 64, dtype=BF16)
    with launch.compile_ahead(1):
        own.sum_and_norm(x, x.clone(), x[0], 1e-6, twice=False)
    assert kernels.calls == []


def test_what_is_taken() -> None:
    own, _ = sums()
    rows = {n: torch.empty(n, 64, dtype=BF16) for n in (0, 1, 4, 5, 32, 33, 128, 129)}
    assert [n for n, x in rows.items() if own.takes(x, twice=False)] == [1, 4, 5, 32]
    assert [n for n, x in rows.items() if own.takes(x, twice=True)] == [5, 32, 33, 128]
    assert not own.takes(torch.empty(5, 64), twice=False)


def test_why_it_is_not_for_a_model() -> None:
    assert [why_not(size, width, BF16) for size in (2, 8) for width in (2880, 4096, 7168, 16384)] == [""] * 8
    assert why_not(6, 4096, BF16) == "its kernels are for 2, 4, 8, 16 ranks, not for 6"
    assert "not for torch.float32" in why_not(2, 4096, torch.float32)
    assert why_not(2, 4100, BF16) == "its kernels are not for rows of 4100"
    assert why_not(2, 8 * 1031, BF16) == "its kernels are not for rows of 8248"


class Spec:
    """FlashInfer's of a module that is not in its cache."""

    is_compiled = False

    def gen_trtllm_comm_module(self) -> Spec:
        return self

    def build_and_load(self) -> str:
        return "kernels"


def test_kernels_that_are_not_there_are_compiled_only_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_flashinfer", lambda: None)
    monkeypatch.setattr(module.importlib, "import_module", lambda name: Spec())
    with pytest.raises(FlashInferError, match=r"not in FlashInfer's cache; .*load_kernels\(build=True\)"):
        load_kernels()
    assert load_kernels(build=True) == "kernels"
    monkeypatch.setattr(Spec, "is_compiled", True)
    assert load_kernels() == "kernels"


def test_a_package_that_is_missing_or_can_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise FlashInferError("FlashInfer can't be imported")

    monkeypatch.setattr(module, "find_flashinfer", missing)
    with pytest.raises(FlashInferError, match="can't be imported"):
        load_kernels()
    monkeypatch.setattr(module, "find_flashinfer", lambda: None)
    monkeypatch.setattr(module.importlib, "import_module", lambda name: 1 / 0)
    with pytest.raises(
        FlashInferError, match="can't make its kernels for sums over GPUs .* division by zero"
    ):
        load_kernels()
