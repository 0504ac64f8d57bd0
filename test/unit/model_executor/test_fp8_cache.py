"""A cache of float8: device steps against the CPU's, what is kept, what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.kernel_executor import kernel_executor
from helpers.plan_driver import PlanDriver
from helpers.tiny_executor import draft_folder, target_folder, tiny_executor

from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.managers.executor_build_models import ExecutorArgsError, load_models
from sglang.srt.mem_cache.kv_pool import MHAKVPool
from sglang.srt.mem_cache.mla_pool import MLAShape
from sglang.srt.mem_cache.pool import stored
from sglang.srt.model_executor.step_plan import SlotSampling

FP8 = torch.float8_e4m3fn
SHAPE = (3, 1, 4)


@pytest.mark.parametrize("family", ["llama", "kimi-k2.5"])
def test_device_steps_give_the_runners_tokens(family: str) -> None:
    """Prompts in chunks, plain steps, drafts; keys and values, and latents."""
    folders = target_folder(family), draft_folder(family)
    kernels = kernel_executor(*folders, SHAPE, 4, kv_cache_dtype="fp8_e4m3")
    sizes = {"dtype": "float32", "page_size": 4}
    oracle = tiny_executor(SHAPE, family, kv_cache_dtype="fp8_e4m3", **sizes)
    exact = tiny_executor(SHAPE, family, **sizes)
    outputs = []
    for executor in (kernels, oracle, exact):
        driver = PlanDriver(executor)
        prompts = ([3 + 7 * i % 200 for i in range(length)] for length in (5, 21))
        requests = [driver.add(prompt, SlotSampling(temperature=0.0), chunk=16) for prompt in prompts]
        driver.generate(requests, 12, itertools.cycle((0, 3, 3, 1)).__next__)
        outputs.append([request.output for request in requests])
        executor.shutdown()
    assert outputs[0] == outputs[1]
    assert outputs[1] != outputs[2], "rounding changed nothing: is it done?"


def test_what_is_too_large_becomes_the_largest_and_nan_stays() -> None:
    kept = stored(torch.tensor([1e6, -1e6, 17.0, torch.nan]), FP8).float()
    assert kept[:3].tolist() == [448.0, -448.0, 16.0] and kept[3].isnan()


def test_an_indexers_keys_keep_their_type() -> None:
    shape = MLAShape(2, 24, (1,), 8)
    pool = shape.make_pool(3, 2, FP8, "cpu", torch.bfloat16)
    assert pool.latents.dtype == FP8 and pool.index_keys.dtype == torch.bfloat16
    assert shape.bytes_per_place(FP8, torch.bfloat16) * pool.num_places == pool.bytes


def test_places_are_moved_and_poisoned() -> None:
    pool = MHAKVPool(2, 3, 2, 1, 4, FP8, "cpu")
    places = torch.tensor([2, 3])
    k = torch.tensor([[[1.0, 2.0, 3.0, 500.0]], [[5.0, 6.0, 7.0, 8.0]]])
    pool.write(1, places, k, 2 * k)
    pool.move(places, torch.tensor([6, 7]))
    assert torch.equal(pool.keys(1)[6:].float(), k.clamp(max=448.0))
    pool.poison([1])
    assert pool.kv[:, 2:4].float().isnan().all() and not pool.kv[1, 6:].float().isnan().any()


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"kv_cache_dtype": "bf16", "dtype": "float32"}, "the cache has the model's type"),
        ({"kv_cache_dtype": "fp8_e4m3", "attention_backend": "flashinfer"}, "leave out --attention-backend"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, str], message: str) -> None:
    with pytest.raises(ExecutorArgsError, match=message):
        load_models(ExecutorArgs(str(target_folder("llama")), **fields), torch.device("cpu"))
