"""A model split over ranks puts out what the whole one does, token by token, in every mode.

Ranks are threads here, with a process group of Gloo; processes are in ``test/registered``.
Run alone: pytest THIS_FILE; more families, ranks and schedules: pytest THIS_FILE -m long
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.plan_driver import PlanDriver
from helpers.quantise import FORMATS, write_quantised
from helpers.rank_group import RankGroup
from helpers.tiny_executor import DRAFTERS, KINDS, WRITERS, draft_folder, drafter_folder, target_folder
from helpers.tiny_mla import write_tiny_kimi_k25
from helpers.tiny_models import write_tiny_eagle3, write_tiny_llama

from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.distributed.collectives import Collectives, Norm, PeerLostError, open_gloo
from sglang.srt.distributed.shares import ShardingError
from sglang.srt.distributed.tensor_parallel import TensorParallel
from sglang.srt.layers.norm import RMSNorm
from sglang.srt.managers.executor_build import build_executor
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.model_executor.step_plan import SlotSampling
from sglang.srt.models import eagle3

CHAIN, TREE = (3, 1, 4), (2, 4, 16)
NUM_TOKENS = 10
PROMPTS = ((0.0, 20), (1.0, 7), (0.7, 33))  # temperature, tokens


@pytest.fixture(autouse=True)
def quick_turns() -> Iterator[None]:
    """Ranks are threads, and each waits for the other one some twenty times a step."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-4)
    yield
    sys.setswitchinterval(before)


def arguments(
    target: Path, drafter: Path | None, shape: tuple[int, int, int], **changes: Any
) -> ExecutorArgs:
    args = ExecutorArgs(
        str(target),
        str(drafter) if drafter else None,
        dtype="float64",
        max_total_tokens=1024,
        max_running_requests=4,
        context_length=300,
        num_steps=shape[0],
        topk=shape[1],
        num_draft_tokens=shape[2],
    )
    return replace(args, **changes)


def generate(executor: Any, seed: int, most_drafts: int, num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """Greedy and sampled requests, a prompt in chunks, and a mode drawn anew for every step."""
    rng, driver = random.Random(seed), PlanDriver(executor, poison=False)
    requests = []
    for i, (temperature, length) in enumerate(PROMPTS):
        prompt = [rng.randrange(3, 256) for _ in range(length)]
        requests.append(driver.add(prompt, SlotSampling(temperature=temperature, seed=i), chunk=16))
    lens = [0, most_drafts, min(1, most_drafts), *(rng.randint(0, most_drafts) for _ in range(200))]
    return driver.generate(requests, num_tokens, iter(lens).__next__)


def check_equal(args: ExecutorArgs, seed: int = 0, num_tokens: int = NUM_TOKENS) -> None:
    most = args.num_steps if args.draft_model_path or args.draft_kind else 0
    whole, group = build_executor(replace(args, tp_size=1)), RankGroup(args)
    try:
        assert generate(group, seed, most, num_tokens) == generate(whole, seed, most, num_tokens)
        bytes_of_rank = [rank.info.weight_bytes for rank in group.ranks]
        assert max(bytes_of_rank) < whole.info.weight_bytes
    finally:
        group.shutdown()
        whole.shutdown()


@pytest.mark.parametrize(
    "family, shape", [("llama", CHAIN), ("gpt-oss", CHAIN), ("kimi-k2.5", TREE), ("glm-5", CHAIN)]
)
def test_two_ranks_are_one_model(family: str, shape: tuple[int, int, int]) -> None:
    check_equal(arguments(target_folder(family), draft_folder(family), shape, tp_size=2))


@pytest.mark.parametrize(
    "family, drafter, shape",
    [
        ("kimi-k2.5", "eagle3-mla", TREE),
        pytest.param("kimi-k2.5", "eagle3-mla", CHAIN, marks=pytest.mark.long),
        pytest.param("llama", "speculators-qwen3", TREE, marks=pytest.mark.long),
        pytest.param("glm4-moe", "nextn", TREE, marks=pytest.mark.long),
        pytest.param("glm-5", "nextn", CHAIN, marks=pytest.mark.long),
        pytest.param("glm-5", "nextn", TREE, marks=pytest.mark.long),
        pytest.param("llama", "standalone", CHAIN, marks=pytest.mark.long),
        pytest.param("llama", "ngram", CHAIN, marks=pytest.mark.long),
    ],
)
def test_other_drafters_over_two_ranks(family: str, drafter: str, shape: tuple[int, int, int]) -> None:
    folder = drafter_folder(drafter, family) if drafter in DRAFTERS else None
    kind = KINDS.get(drafter)
    check_equal(arguments(target_folder(family), folder, shape, tp_size=2, draft_kind=kind))


@pytest.mark.long
@pytest.mark.parametrize("family", WRITERS)
@pytest.mark.parametrize("shape", [CHAIN, TREE])
@pytest.mark.parametrize("size", [2, 4])
def test_any_family_over_any_number_of_ranks(family: str, shape: tuple[int, int, int], size: int) -> None:
    for seed in range(3):
        args = arguments(target_folder(family), draft_folder(family), shape, tp_size=size)
        check_equal(args, seed, 40)


def check_kind(drafter: str, family: str, size: int, num_tokens: int = NUM_TOKENS) -> None:
    folder = drafter_folder(drafter, family) if drafter in DRAFTERS else None
    args = arguments(target_folder(family), folder, CHAIN, draft_kind=KINDS.get(drafter), tp_size=size)
    check_equal(args, 1, num_tokens)


@pytest.mark.parametrize("drafter, family", [("nextn", "glm-5"), ("standalone", "llama")])
def test_drafters_of_other_kinds(drafter: str, family: str) -> None:
    check_kind(drafter, family, 2)


@pytest.mark.long
@pytest.mark.parametrize(
    "drafter, family",
    [
        ("eagle3-mla", "kimi-k2.5"),
        ("eagle3-mla", "llama"),
        ("speculators-qwen3", "qwen3"),
        ("nextn", "deepseek-v3"),
        ("nextn", "glm4-moe"),
        ("ngram", "llama"),
        ("standalone", "qwen3-moe"),
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_any_kind_over_any_number_of_ranks(drafter: str, family: str, size: int) -> None:
    check_kind(drafter, family, size, 40)


def test_ranks_agree_on_what_they_measure() -> None:
    """A rank that went on measuring while another one has stopped would wait for it for ever."""
    args = arguments(target_folder("llama"), draft_folder("llama"), CHAIN, tp_size=2)
    group = RankGroup(replace(args, measure_costs=True, measure_costs_s=0.1))
    assert group.info.costs and all(rank.info == group.info for rank in group.ranks)
    group.shutdown()


def test_odd_sizes_and_quantised_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks: a vocabulary and inner sizes that don't divide, groups of 32, and ``fc`` split."""
    monkeypatch.setattr(eagle3, "FC_SPLIT_BYTES", 0)
    sizes = {"vocab_size": 256, "num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96}
    plain = write_tiny_kimi_k25(
        tmp_path / "plain", **sizes, moe_intermediate_size=128, n_routed_experts=4, num_hidden_layers=3
    )
    experts_alone = replace(FORMATS["awq"], dense=("lm_head", "self_attn", "shared_experts", "layers.0.mlp"))
    target, _ = write_quantised(plain, tmp_path / "awq", experts_alone)
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6}
    drafter = write_tiny_eagle3(tmp_path / "drafter", plain, draft_vocab=100, **heads)
    check_equal(arguments(target, drafter, CHAIN, tp_size=3))


def test_more_ranks_than_kv_heads(tmp_path: Path) -> None:
    """Qwen2 shape: tied embeddings, biases; two ranks share a KV head."""
    target = write_tiny_llama(tmp_path / "t", num_key_value_heads=2, attention_bias=True, num_hidden_layers=2)
    check_equal(arguments(target, None, CHAIN, tp_size=4))


class Fusing:
    """Sums give the norm of their result, as over GPUs; it is made in the very type of the stream."""

    def __init__(self, inner: Collectives) -> None:
        self.device = inner.device
        self.all_reduce, self.all_gather = inner.all_reduce, inner.all_gather
        self.normed: list[Norm] = []

    def sum_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.normed.append(norm)
        total = self.all_reduce(x, residual)
        return total, RMSNorm(norm.weight, norm.eps)(total)


def alone_and_fusing(args: ExecutorArgs) -> tuple[InProcessExecutor, RankGroup, list[Fusing]]:
    """One rank, the ranks of ``args``, and what each of these was asked for."""
    fusing: list[Fusing] = []

    def wrap(inner: Collectives, rank: int) -> Fusing:
        fusing.append(Fusing(inner))
        return fusing[-1]

    return build_executor(replace(args, tp_size=1)), RankGroup(args, wrap), fusing


@pytest.mark.parametrize(
    "family, drafter, norms_a_step",
    [
        ("llama", None, lambda layers: 2 * layers - 1),  # all but the first, which is an embedding's
        ("gpt-oss", None, lambda layers: layers - 1),  # a bias comes between attention's sum and its norm
        ("glm-5", "nextn", None),
        pytest.param("kimi-k2.5", "eagle3-mla", None, marks=pytest.mark.long),
        pytest.param("llama", "speculators-qwen3", None, marks=pytest.mark.long),
    ],
)
def test_norms_that_come_with_a_sum(
    family: str, drafter: str | None, norms_a_step: Callable[[int], int] | None
) -> None:
    """Each where it is wanted, and the model puts out what it does over one rank."""
    folder = drafter_folder(drafter, family) if drafter in DRAFTERS else None
    kind = KINDS.get(drafter) if drafter else None
    args = arguments(target_folder(family), folder, CHAIN, tp_size=2, draft_kind=kind)
    most = args.num_steps if drafter else 0
    whole, group, fusing = alone_and_fusing(args)
    try:
        model = group.worker._runner.model
        last = [layer.index for layer in model.layers][-1]
        assert generate(group, 5, most) == generate(whole, 5, most)
        counts = [Counter(map(id, of_rank.normed)) for of_rank in fusing]
        assert sorted(counts[0].values()) == sorted(counts[1].values())
        if norms_a_step is not None:
            assert len(counts[0]) == norms_a_step(last + 1) and len(set(counts[0].values())) == 1
        else:
            assert len(counts[0]) > last + 1
    finally:
        group.shutdown()
        whole.shutdown()


def test_a_norm_that_one_rank_alone_would_launch_comes_with_no_sum() -> None:
    """One rank may hold a layer packed that another can't: all must ask for the same sums."""
    args = arguments(target_folder("llama"), None, CHAIN, tp_size=2)
    whole, group, fusing = alone_and_fusing(args)
    try:
        models = [rank.worker._runner.model for rank in group.ranks]
        models[1].layers[-1].qkv.norms_apart = lambda rows: False
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda model: model.agree_on_norms(), models))
        assert generate(group, 5, 0) == generate(whole, 5, 0)
        counts = [Counter(map(id, of_rank.normed)) for of_rank in fusing]
        assert len(counts[0]) == len(counts[1]) == 2 * len(models[0].layers) - 2
    finally:
        group.shutdown()
        whole.shutdown()


class Noisy:
    """Every rank's sums are off by something else, before they are added up or after."""

    def __init__(self, inner: Collectives, rank: int, before: bool) -> None:
        self.device = inner.device
        self._inner = inner
        self._before = before
        self._generator = torch.Generator().manual_seed(rank)

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if self._before:
            return self._inner.all_reduce(x + self._noise(x), residual)
        summed = self._inner.all_reduce(x, residual)
        return summed + self._noise(summed)

    def sum_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.all_reduce(x, residual), None

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner.all_gather(x)

    def _noise(self, x: torch.Tensor) -> torch.Tensor:
        return 1e-6 * torch.randn(x.shape, generator=self._generator).to(x.dtype)


@pytest.mark.parametrize("before", [True, False])
def test_ranks_agree_whatever_their_sums_are(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``RankGroup`` compares the ranks' tokens in every step, and so do they themselves."""
    monkeypatch.setenv("SGLANG_CHECK_RANKS_AGREE", "1")
    args = arguments(target_folder("qwen3-moe"), draft_folder("qwen3-moe"), TREE, dtype="float32", tp_size=2)
    group = RankGroup(args, lambda inner, rank: Noisy(inner, rank, before))
    try:
        generate(group, 3, 2, 14)
        features = [rank.worker.state.draft_feature for rank in group.ranks]
        assert torch.equal(*features) == before  # the streams do differ, only what is chosen doesn't
    finally:
        group.shutdown()


def test_the_check_finds_ranks_that_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CHECK_RANKS_AGREE", "1")
    group = RankGroup(arguments(target_folder("llama"), None, CHAIN, tp_size=2))
    driver = PlanDriver(group, poison=False)  # type: ignore[arg-type]
    request = driver.add([5, 6, 7])
    driver.step([request])
    # Of another slot: the step's own tokens would agree again, being made of what all ranks give.
    group.worker.state.next_token[request.slot + 1] = 1
    with pytest.raises(AssertionError, match="ranks disagree after step"):
        driver.step([request])
    group.shutdown()


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(ShardingError, match="4 attention heads can't be split over 3 ranks"):
        RankGroup(arguments(target_folder("llama"), None, CHAIN, tp_size=3))


def test_a_rank_that_is_gone_is_not_waited_for() -> None:
    """A connection ends with its process; here with the object."""
    from concurrent.futures import ThreadPoolExecutor

    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        stays, goes = threads.map(lambda rank: open_gloo(store, rank, 2), range(2))
    del goes
    with pytest.raises(PeerLostError):
        stays.all_reduce(torch.ones(3))


def test_one_rank_sends_nothing() -> None:
    tp, x = TensorParallel(), torch.arange(6.0)
    assert tp.summing is None and tp.joining(6) is None
    assert tp.least(7) == tp.most(7) == 7 and tp.first(0.5) == 0.5
    assert tp.collectives.all_reduce(x) is x
    assert torch.equal(tp.collectives.all_reduce(x.clone(), x.clone()), 2 * x)
