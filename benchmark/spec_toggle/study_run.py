"""One round of the study: every column at every number of streams and in every domain, in turn."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import httpx

from benchmark.spec_toggle import client
from benchmark.spec_toggle.client import StreamTrace
from benchmark.spec_toggle.columns import Column, Target, apply_change
from benchmark.spec_toggle.prompts import Prompt
from benchmark.spec_toggle.protocols import Wish
from benchmark.spec_toggle.runner import FILL_AT_ONCE, WARMUP_TOKENS, Workload, alone, require_mode
from benchmark.spec_toggle.servers import ServerError
from benchmark.spec_toggle.streams import generate_together, open_streams
from benchmark.spec_toggle.study_records import Place, StudyRecord, record_of

LEAST_RUNS: Final = 2
"""Of every point: without two there is no interval."""


@dataclass(slots=True)
class Budget:
    """How long the study may take: a point is measured again only if that ends in time."""

    limit_s: float
    begun: float
    _runs: dict[tuple[str, int], int] = field(default_factory=dict)
    _cost: dict[tuple[str, int], float] = field(default_factory=dict)

    def allows(self, domain: str, streams: int, now: float) -> bool:
        """Whether the point should be measured (again)."""
        point = (domain, streams)
        if self._runs.get(point, 0) < LEAST_RUNS:
            return True
        return now - self.begun + self._cost[point] <= self.limit_s

    def spent(self, domain: str, streams: int, seconds: float) -> None:
        """Note that the point was measured, and how long it took."""
        point = (domain, streams)
        self._runs[point] = self._runs.get(point, 0) + 1
        self._cost[point] = seconds


@dataclass(frozen=True, slots=True)
class StudyWork:
    """What every round does."""

    domains: Mapping[str, Workload]
    is_cold: bool  # the prefix cache is emptied before each run, so that prompts are prefilled
    wish: Wish  # of every request, but for its number of tokens


Done = Callable[[StudyRecord], None]


async def run_round(
    index: int, columns: Sequence[Column], work: StudyWork, order: random.Random, budget: Budget, done: Done
) -> None:
    """Measure every point that the budget allows; ``done`` gets each record.

    Raises:
        ServerError: a column did not run in the mode that it is named for.
        GenerationError: a request failed.
    """
    targets = list({column.target.name: column.target for column in columns}.values())
    for domain, load in work.domains.items():
        prompts = load.prompts_of(index)
        points = [n for n in load.stream_counts if budget.allows(domain, n, time.monotonic())]
        if not points:
            continue
        for target in targets:
            with _alone(target, targets):
                await _fill_cache(target, prompts, work, load.timeout_s)
        for streams in points:
            if not budget.allows(domain, streams, time.monotonic()):
                continue
            began = time.monotonic()
            await _point(index, domain, streams, columns, targets, work, order, done)
            budget.spent(domain, streams, time.monotonic() - began)


async def _point(
    index: int,
    domain: str,
    streams: int,
    columns: Sequence[Column],
    targets: Sequence[Target],
    work: StudyWork,
    order: random.Random,
    done: Done,
) -> None:
    load = work.domains[domain]
    waves = load.waves(load.prompts_of(index), streams)
    ids = [prompt.id for wave in waves for prompt in wave]
    first = {column.target.name: column for column in reversed(columns)}
    for target in targets:
        with _alone(target, targets):
            await _drive(first[target.name], waves[:1], WARMUP_TOKENS, work, load.timeout_s)
    for position, column in enumerate(order.sample(columns, len(columns))):
        with _alone(column.target, targets):
            traces = await _drive(column, waves, load.tokens_at(streams), work, load.timeout_s)
        place = Place(column.name, column.mode, domain, streams, index, position)
        record = record_of(place, traces, ids)
        if record.steps_plain is not None and record.steps_spec is not None:
            require_mode(column.mode, record.steps_plain, record.steps_spec)
        done(record)


async def _drive(
    column: Column, waves: Sequence[Sequence[Prompt]], tokens: int, work: StudyWork, timeout_s: float
) -> list[list[StreamTrace]]:
    """Set the mode, run the waves, and return their traces."""
    await apply_change(column)
    target, traces = column.target, []
    wish = replace(work.wish, tokens=tokens)
    async with open_streams(target.base_url, headers=target.headers) as session:
        for wave in waves:
            if work.is_cold:
                await _flush(target)
            running = generate_together(session, wave, wish, target.protocol, target.model)
            traces.append(await asyncio.wait_for(running, timeout_s))
    return traces


async def _fill_cache(target: Target, prompts: Sequence[Prompt], work: StudyWork, timeout_s: float) -> None:
    """Let the server prefill every prompt once, a few at a time."""
    if work.is_cold:
        return
    async with open_streams(target.base_url, headers=target.headers) as session:
        for begin in range(0, len(prompts), FILL_AT_ONCE):
            few = prompts[begin : begin + FILL_AT_ONCE]
            wave = generate_together(
                session, few, replace(work.wish, tokens=1), target.protocol, target.model
            )
            await asyncio.wait_for(wave, timeout_s)


async def _flush(target: Target) -> None:
    async with client.open_client(target.base_url, headers=target.headers) as http:
        try:
            (await http.post("/flush_cache")).raise_for_status()
        except httpx.HTTPError as error:
            raise ServerError(
                f"{target.name} can't empty its prefix cache ({error}): leave --cold out"
            ) from error


@contextmanager
def _alone(target: Target, targets: Sequence[Target]) -> Iterator[None]:
    """Freeze the other servers that this program started."""
    processes = [other.process for other in targets if other.process is not None]
    if target.process is None or len(processes) < 2:
        yield
        return
    with alone(target.process, processes):
        yield
