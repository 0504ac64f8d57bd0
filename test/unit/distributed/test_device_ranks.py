"""Steps of a GPU split over ranks, on a CPU: kernels are their references, ranks are threads that use Gloo.

What is timed, how much memory there is and which kernel is the fastest differ from rank to rank here.
Run alone: pytest THIS_FILE
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from helpers.plan_driver import PlanDriver
from helpers.rank_group import RankGroup
from helpers.replaying_capture import ReplayingCapture
from helpers.tiny_executor import draft_folder, drafter_folder, target_folder

from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.distributed import collectives
from sglang.srt.distributed.tensor_parallel import TensorParallel
from sglang.srt.managers import executor_build_cuda as build
from sglang.srt.managers.executor_build_models import load_models
from sglang.srt.model_executor import tune_linears
from sglang.srt.model_executor.step_plan import ExecutorInfo, SlotSampling
from sglang.srt.model_executor.worker import Worker
from sglang.srt.models import packed

TOTAL = 1 << 30
CHAIN, TREE = (3, 1, 4), (2, 4, 16)


class Capture(ReplayingCapture):
    def __init__(self, device: torch.device) -> None:
        super().__init__()


@pytest.fixture(autouse=True)
def fake_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU a thread: each has less memory free than the one before, and a clock that is random."""
    lock, free = threading.Lock(), [700 << 20]

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        with lock:
            free[0] -= 1 << 16
            return free[0], TOTAL

    def micros(run: Callable[[], object]) -> float:
        run()
        return 1.0 + random.random()  # now this many variants are close to the best, now that many

    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "fake")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100 << 20)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 150 << 20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(build, "CudaCapture", Capture)
    monkeypatch.setattr(build, "compile_ahead", lambda num_threads: nullcontext())
    monkeypatch.setattr(tune_linears, "compile_ahead", lambda num_threads: nullcontext())
    monkeypatch.setattr(tune_linears, "_graph_micros", micros)
    monkeypatch.setattr(collectives, "TIMEOUT", timedelta(seconds=60))  # for a rank that waits in vain
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-4)
    yield
    sys.setswitchinterval(before)


def build_rank(args: ExecutorArgs, tp: TensorParallel) -> tuple[Worker, ExecutorInfo]:
    models = load_models(args, torch.device("cpu"), tp)
    worker, graphs = build.build_cuda(args, models, None, chunk=64, check_agreement=True)
    config = worker.config
    info = ExecutorInfo(
        config.num_slots, config.num_pages, config.page_size, config.context_len, config.vocab_size,
        config.spec, config.max_spec_rows,
    )  # fmt: skip
    return worker, info


def arguments(shape: tuple[int, int, int], size: int, dtype: str) -> ExecutorArgs:
    return ExecutorArgs(
        str(target_folder()),
        str(draft_folder()),
        dtype=dtype,
        device="cuda",
        attention_backend="triton",
        mem_fraction_static=0.6,
        max_running_requests=3,
        context_length=100,
        page_size=4,
        num_steps=shape[0],
        topk=shape[1],
        num_draft_tokens=shape[2],
        tp_size=size,
    )


def texts(group: RankGroup, most_drafts: int, prompt_len: int = 4) -> list[list[int]]:
    driver = PlanDriver(group)  # type: ignore[arg-type]
    same = list(range(5, 4 + prompt_len))
    requests = [
        driver.add([*same, 8 + i], SlotSampling(temperature=i / 2, seed=i), chunk=prompt_len - 1)
        for i in range(3)
    ]
    lens = iter([0, most_drafts, min(1, most_drafts), *([most_drafts, 0] * 50)])
    return driver.generate(requests, 12, lens.__next__)


@pytest.mark.parametrize("shape", [CHAIN, pytest.param(TREE, marks=pytest.mark.long)])
def test_two_gpus_are_one(shape: tuple[int, int, int]) -> None:
    whole = RankGroup(arguments(shape, 1, "float32"), build=build_rank)
    group = RankGroup(replace(arguments(shape, 2, "float32"), max_total_tokens=None), build=build_rank)
    assert group.info.num_pages > 0, "RankGroup compares: the ranks agree on it"
    assert [rank.worker.pools[0].kv.shape[2] for rank in group.ranks] == [1, 1], "KV heads"
    assert texts(group, shape[0]) == texts(whole, shape[0])


@pytest.mark.long
@pytest.mark.parametrize("family,kind", [("llama", "NGRAM"), ("llama", "STANDALONE"), ("glm4-moe", "NEXTN")])
def test_other_drafters(family: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two GPUs as of one, with graphs; GLM's heads are in the order of the kernels."""
    monkeypatch.setattr(packed, "wants_kernels", lambda device: True)
    args = replace(
        arguments(CHAIN, 1, "float32"), model_path=str(target_folder(family)),
        draft_model_path=str(drafter_folder("standalone", family)) if kind == "STANDALONE" else None,
        draft_kind=kind,
    )  # fmt: skip
    found = []
    for size in (1, 2):
        group = RankGroup(replace(args, tp_size=size), build=build_rank)
        found.append(texts(group, CHAIN[0]))
        group.shutdown()
    plain = RankGroup(replace(args, draft_model_path=None, draft_kind=None), build=build_rank)
    assert found == [texts(plain, 0)] * 2
    plain.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_two_gpus_are_one_for_gpt_oss(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 24 in texts of 50, sinks by rank, biases of experts once."""
    monkeypatch.setattr(packed, "wants_kernels", lambda device: True)
    args = replace(
        arguments(shape, 1, "float32"), model_path=str(target_folder("gpt-oss")),
        draft_model_path=str(draft_folder("gpt-oss")),
    )  # fmt: skip
    found = []
    for size in (1, 2):
        group = RankGroup(replace(args, tp_size=size), build=build_rank)
        found.append(texts(group, shape[0], prompt_len=38))
        group.shutdown()
    assert found[0] == found[1]


def test_ranks_that_choose_different_kernels_stay_together() -> None:
    """In bfloat16 products are tuned: were one rank to run a step more than the other, it would hang."""
    args = replace(arguments(CHAIN, 2, "bfloat16"), draft_model_path=None, cuda_graph_bs=(1, 3))
    group = RankGroup(args, build=build_rank)
    texts(group, 0)
    chosen = [
        rank.worker._runner.model.linears()[-1]._choices.table.chosen  # type: ignore[attr-defined]
        for rank in group.ranks
    ]
    assert chosen[0].keys() == chosen[1].keys() and chosen[0]
    group.shutdown()
