"""Sending requests at a rate, with at most so many at a time."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext

from sglang.benchmark.outcome import Outcome
from sglang.benchmark.prompt_row import PromptRow


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Seconds after the start at which requests are sent: all at once, or a Poisson process."""
    if math.isinf(rate):
        return [0.0] * count
    rng, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times


async def run_load(
    rows: Sequence[PromptRow],
    send: Callable[[PromptRow], Awaitable[Outcome]],
    rate: float,
    max_concurrency: int | None,
    seed: int,
    on_done: Callable[[Outcome], None],
) -> list[Outcome]:
    """Every row's outcome, in the rows' order. A request's time begins when its place is free."""
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()

    async def one(row: PromptRow) -> Outcome:
        async with places:
            outcome = await send(row)
        on_done(outcome)
        return outcome

    begin, tasks = time.perf_counter(), []
    for row, moment in zip(rows, arrival_times(len(rows), rate, seed), strict=True):
        wait = begin + moment - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(row)))
    return list(await asyncio.gather(*tasks))
