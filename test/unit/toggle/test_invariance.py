"""Toggle invariance: whatever the schedule and the modes, tokens are those of a plain run alone.

Run alone: ``pytest test/unit/toggle/test_invariance.py -s`` (prints the counts). Ten thousand
schedules: ``make test-long``.
"""

from __future__ import annotations

import zlib

import pytest
from helpers.fake_fp4 import FakeFlashInfer, fp4_inputs
from helpers.quantise import FORMATS
from helpers.tiny_executor import tiny_executor
from helpers.toggle_reference import Reference, Tally
from helpers.toggle_schedule import ScheduleRun, make_schedule

SHAPES = ((3, 1, 4), (2, 4, 16), (5, 4, 8))  # steps, topk, draft tokens
PAGE_SIZES = (1, 16)
SCHEDULES = 72  # over all shapes and page sizes
LONG_SCHEDULES = 10_002
FAMILIES = {
    "qwen3-moe": SHAPES[0],
    "glm4-moe": SHAPES[1],
    "gpt-oss": SHAPES[1],
    "deepseek-v3": SHAPES[1],
    "kimi-k2.5": SHAPES[0],
    "glm-5": SHAPES[1],
}
QUANTISED = {"int4": SHAPES[0], "awq": SHAPES[2], "nvfp4": SHAPES[1]}
DRAFTERS = {  # family, drafter, shape
    "speculators": ("llama", "speculators", SHAPES[1]),
    "eagle3-mla": ("kimi-k2.5", "eagle3-mla", SHAPES[1]),
    "nextn-deepseek": ("deepseek-v3", "nextn", SHAPES[0]),
    "nextn-glm4": ("glm4-moe", "nextn", SHAPES[0]),
    "nextn-glm5": ("glm-5", "nextn", SHAPES[1]),
    "standalone": ("llama", "standalone", SHAPES[0]),
    "ngram": ("llama", "ngram", SHAPES[0]),
}
FEW_SCHEDULES = 3  # of each family beside Llama
TOKENS_PER_EXEMPTION = 20_000


def run_schedules(
    shape: tuple[int, int, int],
    page_size: int,
    dtype: str,
    first_seed: int,
    count: int,
    family: str = "llama",
    drafter: str = "eagle3",
    cache: str = "auto",
) -> Tally:
    sizes = {"page_size": page_size, "max_total_tokens": 2048, "max_running_requests": 6}
    executor = tiny_executor(shape, family, drafter=drafter, dtype=dtype, kv_cache_dtype=cache, **sizes)
    small = {"max_total_tokens": 512, "max_running_requests": 1, "kv_cache_dtype": cache}
    plain = tiny_executor(None, family, dtype=dtype, **small)
    reference = Reference(plain, allow_ties=dtype == "float32")
    tally = Tally()
    try:
        for seed in range(first_seed, first_seed + count):
            schedule = make_schedule(seed, page_size, executor.info.num_pages)
            outcome = ScheduleRun(executor, schedule).run()
            tally.schedules += 1
            tally.plain_steps += outcome.steps["plain"]
            tally.spec_steps += outcome.steps["spec"]
            tally.ragged_steps += outcome.steps["ragged"]
            tally.retractions += outcome.retractions
            tally.cached_tokens += outcome.cached_tokens
            for arrival in schedule.arrivals:
                try:
                    reference.check(arrival.message, outcome.answers[arrival.message.rid], tally)
                except AssertionError as error:
                    where = f"schedule {seed}, {shape}, page size {page_size}"
                    raise AssertionError(f"{where}: {error}") from error
    finally:
        executor.shutdown()
        plain.shutdown()
    return tally


def first_seed(*combination: object) -> int:
    """Another range of seeds for each combination."""
    return zlib.crc32(repr(combination).encode()) % 1_000_000


def check_coverage(tally: Tally) -> None:
    """The schedules did what they are for."""
    assert tally.plain_steps > 0 and tally.spec_steps > 0
    assert tally.retractions > 0 and tally.cached_tokens > 0 and tally.aborted > 0


def add(total: Tally, tally: Tally) -> None:
    for name, value in vars(tally).items():
        setattr(total, name, getattr(total, name) + value)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact_in_float64(shape: tuple[int, int, int]) -> None:
    """No exemptions."""
    total = Tally()
    for page_size in PAGE_SIZES:
        count = SCHEDULES // (len(SHAPES) * len(PAGE_SIZES))
        tally = run_schedules(shape, page_size, "float64", first_seed(shape, page_size), count)
        print(f"\nfloat64 {shape} page size {page_size}: {tally.line()}")
        add(total, tally)
    check_coverage(total)
    assert (total.ragged_steps > 0) == (shape[1] == 1)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_float32_differs_only_at_ties(shape: tuple[int, int, int]) -> None:
    tally = run_schedules(shape, 1, "float32", first_seed(shape, 1), 12)
    print(f"\nfloat32 {shape}: {tally.line()}")
    assert tally.exemptions <= max(1, tally.tokens // TOKENS_PER_EXEMPTION)


@pytest.mark.parametrize("family,shape", FAMILIES.items(), ids=list(FAMILIES))
def test_other_families(family: str, shape: tuple[int, int, int]) -> None:
    tally = run_schedules(shape, 1, "float64", first_seed(family), FEW_SCHEDULES, family)
    print(f"\nfloat64 {family} {shape}: {tally.line()}")
    assert tally.plain_steps > 0 and tally.spec_steps > 0
    assert tally.tokens > 20 * FEW_SCHEDULES


@pytest.mark.parametrize("kind", ["eagle3-mla", "nextn-glm4", "nextn-glm5", "standalone", "ngram"])
def test_other_drafters(kind: str) -> None:
    family, drafter, shape = DRAFTERS[kind]
    tally = run_schedules(shape, 1, "float64", first_seed(kind), FEW_SCHEDULES - 1, family, drafter)
    print(f"\nfloat64 {kind} {shape}: {tally.line()}")
    assert tally.plain_steps > 0 and tally.spec_steps > 0
    assert tally.tokens > 40


@pytest.mark.parametrize("family", ["llama", "glm-5"])
def test_caches_of_fewer_bits(family: str) -> None:
    """Whoever brings a token rounds what the cache keeps of it in the same way: decode, drafts, prefill."""
    shape, fp8 = SHAPES[0], "fp8_e4m3"
    tally = run_schedules(shape, 1, "float64", first_seed(family, fp8), FEW_SCHEDULES, family, cache=fp8)
    print(f"\nfloat64 {family} {fp8} {shape}: {tally.line()}")
    assert tally.plain_steps > 0 and tally.spec_steps > 0
    assert tally.tokens > 20 * FEW_SCHEDULES


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", *FAMILIES])
@pytest.mark.timeout(0)
def test_many_schedules_with_caches_of_fewer_bits(family: str) -> None:
    shape, fp8 = SHAPES[1], "fp8_e4m3"
    count = 30 * FEW_SCHEDULES
    tally = run_schedules(shape, 16, "float64", first_seed(family, fp8), count, family, cache=fp8)
    print(f"\nfloat64 {family} {fp8} {shape}: {tally.line()}")
    check_coverage(tally)


@pytest.mark.parametrize("form,shape", QUANTISED.items(), ids=list(QUANTISED))
def test_quantised_models(form: str, shape: tuple[int, int, int]) -> None:
    """And their drafters."""
    family = f"llama:{form}"
    tally = run_schedules(shape, 1, "float64", first_seed(family), FEW_SCHEDULES, family)
    print(f"\nfloat64 {family} {shape}: {tally.line()}")
    assert tally.plain_steps > 0 and tally.spec_steps > 0
    assert tally.tokens > 20 * FEW_SCHEDULES


@pytest.mark.parametrize("count", [1, pytest.param(10 * FEW_SCHEDULES, marks=pytest.mark.long)])
@pytest.mark.timeout(0)
def test_inputs_in_4_bits(count: int) -> None:
    """Linear layers and experts in NVFP4 on both sides, by a stand-in for FlashInfer."""
    family, shape = "qwen3-moe:nvfp4", SHAPES[0]
    with fp4_inputs(FakeFlashInfer()) as fake:
        tally = run_schedules(shape, 1, "float64", first_seed("inputs in 4 bits"), count, family)
    print(f"\nfloat64 {family}, inputs too, {shape}: {tally.line()}")
    assert {name for name, _ in fake.calls} == {"quantize", "mm", "experts"}
    assert tally.plain_steps > 0 and tally.spec_steps > 0 and tally.tokens > 20 * count


@pytest.mark.long
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.timeout(0)
def test_many_schedules_of_quantised_models(form: str) -> None:
    family, shape = f"qwen3:{form}", SHAPES[list(FORMATS).index(form) % len(SHAPES)]
    tally = run_schedules(shape, 16, "float64", first_seed(family), 40 * FEW_SCHEDULES, family)
    print(f"\nfloat64 {family} {shape}: {tally.line()}")
    check_coverage(tally)


@pytest.mark.long
@pytest.mark.parametrize("family,shape", FAMILIES.items(), ids=list(FAMILIES))
@pytest.mark.timeout(0)
def test_many_schedules_of_other_families(family: str, shape: tuple[int, int, int]) -> None:
    tally = run_schedules(shape, 16, "float64", first_seed(family, 16), 100 * FEW_SCHEDULES, family)
    print(f"\nfloat64 {family} {shape}: {tally.line()}")
    check_coverage(tally)


@pytest.mark.long
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.timeout(0)
def test_many_schedules_of_other_drafters(kind: str) -> None:
    family, drafter, shape = DRAFTERS[kind]
    count = 100 * FEW_SCHEDULES
    tally = run_schedules(shape, 16, "float64", first_seed(kind, 16), count, family, drafter)
    print(f"\nfloat64 {kind} {shape}: {tally.line()}")
    check_coverage(tally)


@pytest.mark.long
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.timeout(0)
def test_ten_thousand_schedules(shape: tuple[int, int, int], page_size: int) -> None:
    count = LONG_SCHEDULES // (len(SHAPES) * len(PAGE_SIZES))
    first = 1_000_000 + first_seed(shape, page_size)
    tally = run_schedules(shape, page_size, "float64", first, count)
    print(f"\nfloat64 {shape} page size {page_size}: {tally.line()}")
    check_coverage(tally)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_many_float32_schedules() -> None:
    total = Tally()
    for shape in SHAPES:
        for page_size in PAGE_SIZES:
            first = 2_000_000 + first_seed(shape, page_size)
            add(total, run_schedules(shape, page_size, "float32", first, 300))
    print(f"\nfloat32: {total.line()}")
    assert total.exemptions <= max(1, total.tokens // TOKENS_PER_EXEMPTION)
