"""What decode steps cost, measured at the start: for every draft length and number of rows a fixed part
and a part for every KV token, from steps over short and over long rows.

The steps are those that requests will have: replays of the captured graphs, or eager steps. The state of
the slots they use is put back as it was; of the pages only contents change, and nobody has read those.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final, Protocol

import torch
from tqdm import tqdm

from sglang.srt.model_executor.config import WorkerConfig
from sglang.srt.model_executor.graph_sizes import GraphKey, spread
from sglang.srt.model_executor.slot_state import SlotState
from sglang.srt.model_executor.step_plan import GraphSet, SpecShape, StepCost, StepKind, StepPlan
from sglang.srt.model_executor.worker import Worker

logger = logging.getLogger(__name__)

_LEAST_FIXED: Final = 0.1  # of a short step's time: the rows' KV is never nearly all of it


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured. A GPU's long rows must come from memory; a CPU's should not fill it."""

    budget_s: float  # no further size is begun after it
    repeats: int  # of each step; the median counts
    patience_s: float | None  # no repeat after that time; None: on a device that runs later than it is told
    short_len: int  # KV tokens a row
    long_len: int
    most_tokens: int  # of all rows of a step
    ragged_budget_s: float  # the same for steps whose rows have draft lengths of their own, after the others
    one_token_cost: bool  # KV tokens cost the same in all sizes of a draft length: less noise


CPU_EFFORT: Final = Effort(6.0, 2, 0.2, 16, 1024, 4096, 0.0, one_token_cost=True)
CUDA_EFFORT: Final = Effort(6.0, 3, None, 128, 8192, 1 << 18, 4.0, one_token_cost=False)
EAGER_ROWS: Final = (1, 16, 64, 4)  # in the order of what is learned by them


@dataclass(frozen=True, slots=True)
class Timed:
    """One size, with two lengths of its rows. They are the same where the pool has no room for more."""

    key: GraphKey
    short_len: int
    long_len: int
    short_s: float
    long_s: float

    @property
    def more_tokens(self) -> int:
        return self.key.rows * (self.long_len - self.short_len)

    @property
    def more_s(self) -> float:
        return self.long_s - self.short_s

    def cost(self, per_kv_token_s: float) -> StepCost:
        fixed = self.short_s - per_kv_token_s * self.key.rows * self.short_len
        return StepCost(
            self.key.draft_len, self.key.rows, max(fixed, _LEAST_FIXED * self.short_s), per_kv_token_s
        )


class StepTimer(Protocol):
    def seconds(self, key: GraphKey, kv_len: int) -> float:
        """Of a step of ``key.rows`` rows that have ``kv_len`` committed tokens each."""
        ...


class Stopwatch(Protocol):
    def mark(self) -> Any:
        """A moment in the order of what is launched."""
        ...

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two marks; waits for the second."""
        ...


class HostStopwatch:
    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class AgreedStopwatch:
    """Of ranks that run the same steps: all of them get what the first one measured."""

    def __init__(self, own: Stopwatch, first: Callable[[float], float]) -> None:
        self._own = own
        self._first = first

    def mark(self) -> Any:
        return self._own.mark()

    def seconds(self, begin: Any, end: Any) -> float:
        return self._first(self._own.seconds(begin, end))


class DeviceStopwatch:
    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1000


class WorkerTimer:
    """Steps of a worker that has no requests yet, with the first slots as rows."""

    def __init__(self, worker: Worker, watch: Stopwatch, effort: Effort) -> None:
        self._worker = worker
        self._watch = watch
        self._effort = effort
        self._last: GraphKey | None = None

    def seconds(self, key: GraphKey, kv_len: int) -> float:
        """The first run of a size only loads what it needs, unless there is no patience for a second."""
        _give_pages(self._worker.state, self._worker.config, key, kv_len)
        is_first, self._last = key != self._last, key
        patience, spent_s = self._effort.patience_s, 0.0
        spans: list[tuple[Any, Any]] = []
        while len(spans) < self._effort.repeats + is_first and (patience is None or spent_s <= patience):
            spans.append(self._run(key, kv_len))
            if patience is not None:
                spent_s += self._watch.seconds(*spans[-1])
        counting = spans[1:] if is_first and len(spans) > 1 else spans
        return median(self._watch.seconds(*span) for span in counting)

    def _run(self, key: GraphKey, kv_len: int) -> tuple[Any, Any]:
        slots = tuple(range(1, key.rows + 1))
        drafts = tuple(spread(key.tokens - key.rows, key.rows)) if key.tokens else ()
        plan = StepPlan(0, StepKind.DECODE, slots, (kv_len,) * key.rows, key.draft_len, drafts)
        state = self._worker.state
        state.seq_len[1 : key.rows + 1] = kv_len
        # Tokens that differ go to experts that differ, as those of a server do.
        ids = torch.arange(1, key.rows + 1, device=state.device) * 7919
        state.next_token[1 : key.rows + 1] = ids % self._worker.config.vocab_size
        begin = self._watch.mark()
        self._worker.execute(plan)
        return begin, self._watch.mark()


def _give_pages(state: SlotState, config: WorkerConfig, key: GraphKey, kv_len: int) -> None:
    """Every row reads pages of its own, as far as there are so many."""
    pages = -(-(kv_len + _num_nodes(config.spec, key.draft_len)) // config.page_size)
    places = torch.arange(key.rows * pages, dtype=torch.int32, device=state.device)
    state.page_table[1 : key.rows + 1, :pages] = (places % config.num_pages + 1).view(key.rows, pages)


def _num_nodes(spec: SpecShape | None, draft_len: int) -> int:
    return 1 if spec is None else spec.num_nodes(draft_len)


def kv_lens(config: WorkerConfig, key: GraphKey, effort: Effort) -> tuple[int, int]:
    """KV tokens of short and of long rows; the same where the pool has no room for a difference."""
    tokens = min(effort.most_tokens, config.num_pages * config.page_size)
    a_row = tokens // key.rows - _num_nodes(config.spec, key.draft_len) - config.page_size
    most = max(1, min(effort.long_len, config.context_len, a_row))
    return min(effort.short_len, most), most


def bisecting(count: int) -> Iterator[int]:
    """0 … count - 1, so that those before any point are spread over all: the ends, the middle, ..."""
    seen: set[int] = set()
    spans = [(0, 0), (count - 1, count - 1), (0, count - 1)]
    for low, high in spans:
        middle = (low + high) // 2
        if low <= high and middle not in seen:
            seen.add(middle)
            yield middle
        if low < middle or middle < high:
            spans += [(low, middle - 1), (middle + 1, high)]


def captured_order(sets: Sequence[GraphSet]) -> list[GraphKey]:
    """If time runs out, what is left lies between sizes that were measured, in every set."""
    keys = []
    for draft_len, rows in ((graphs.draft_len, graphs.sizes) for graphs in sets):
        keys += [(place, GraphKey(draft_len, rows[i])) for place, i in enumerate(bisecting(len(rows)))]
    return [key for _, key in sorted(keys, key=lambda entry: (entry[0], entry[1].draft_len))]


def eager_order(draft_lens: Sequence[int], num_slots: int, max_spec_rows: int) -> list[GraphKey]:
    """Where nothing is captured: a few sizes."""
    most = {0: num_slots} | dict.fromkeys(draft_lens, max_spec_rows)
    return [GraphKey(draft_len, rows) for rows in EAGER_ROWS for draft_len in most if rows <= most[draft_len]]


def measure(
    keys: Sequence[GraphKey],
    timer: StepTimer,
    lens: Callable[[GraphKey], tuple[int, int]],
    effort: Effort,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[StepCost, ...]:
    """Costs by draft length and rows.

    What the budget leaves out gets what lies between its neighbours; beyond the largest size of its draft
    length it grows as the steps of another length do.
    """
    began, timed = clock(), []
    bar = tqdm(keys, desc="Timing decode steps", disable=None)  # None: only on a terminal
    for key in bar:
        if clock() - began > effort.budget_s:
            bar.close()
            break
        bar.set_postfix_str(f"draft_len {key.draft_len}, {key.rows} rows")
        short, long = lens(key)
        short_s = timer.seconds(key, short)
        long_s = timer.seconds(key, long) if long > short else short_s
        timed.append(Timed(key, short, long, short_s, long_s))
    costs = _costs(timed, effort.one_token_cost)
    found = costs | {key: cost for key in keys if key not in costs and (cost := _between(key, costs))}
    for key in sorted(keys, key=lambda key: (key.draft_len, key.rows)):
        if key not in found and (cost := _grown(key, found)):
            found[key] = cost
    logger.info(
        "decode steps timed in %.1f s: %d sizes, and %d more from them",
        clock() - began, len(costs), len(found) - len(costs),
    )  # fmt: skip
    return tuple(found[key] for key in sorted(found, key=lambda key: (key.draft_len, key.rows)))


def ragged_order(sets: Sequence[GraphSet]) -> list[GraphKey]:
    """If time runs out, sizes all over have been measured; all of a size, so that they are compared."""
    keys = []
    for graphs in sets:
        rows = sorted({rows for rows, _ in graphs.ragged})
        places = {rows[i]: place for place, i in enumerate(bisecting(len(rows)) if rows else ())}
        keys += [(places[rows], GraphKey(graphs.draft_len, rows, tokens)) for rows, tokens in graphs.ragged]
    return [key for _, key in sorted(keys, key=lambda entry: (entry[0], entry[1].draft_len, entry[1].tokens))]


def measure_ragged(
    keys: Sequence[GraphKey],
    common: Sequence[StepCost],
    timer: StepTimer,
    lens: Callable[[GraphKey], tuple[int, int]],
    effort: Effort,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[StepCost, ...]:
    """Costs of steps whose rows have draft lengths of their own, as many as there is time for.

    Over short rows alone: a KV token costs what it costs in ``common`` steps of that draft length and size,
    which read the same, and so the two differ by what was measured, whatever the length of the rows is.
    """
    began, a_token = clock(), {(cost.draft_len, cost.rows): cost.per_kv_token_s for cost in common}
    found: list[StepCost] = []
    bar = tqdm(keys, desc="Timing ragged steps", disable=None)  # None: only on a terminal
    for key in bar:
        if clock() - began > effort.ragged_budget_s:
            bar.close()
            break
        bar.set_postfix_str(f"draft_len {key.draft_len}, {key.rows} rows, {key.tokens} tokens")
        short, per_kv_token_s = lens(key)[0], a_token.get((key.draft_len, key.rows))
        if per_kv_token_s is None:
            continue
        seconds = timer.seconds(key, short)
        cost = Timed(key, short, short, seconds, seconds).cost(per_kv_token_s)
        found.append(replace(cost, tokens=key.tokens))
    if keys:
        logger.info("ragged steps timed in %.1f s: %d of %d", clock() - began, len(found), len(keys))
    return tuple(found)


def _costs(timed: Sequence[Timed], one_token_cost: bool) -> dict[GraphKey, StepCost]:
    costs = {}
    for one in timed:
        alike = [t for t in timed if t.key.draft_len == one.key.draft_len] if one_token_cost else [one]
        tokens = sum(t.more_tokens for t in alike)
        # Noise must not make longer rows cheaper.
        a_token = max(0.0, sum(t.more_s for t in alike) / tokens) if tokens else 0.0
        costs[one.key] = one.cost(a_token)
    return costs


def _between(key: GraphKey, costs: dict[GraphKey, StepCost]) -> StepCost | None:
    """Linear between the nearest sizes measured; None beyond them."""
    of_len = sorted((cost for k, cost in costs.items() if k.draft_len == key.draft_len), key=lambda c: c.rows)
    below = [cost for cost in of_len if cost.rows < key.rows]
    above = [cost for cost in of_len if cost.rows > key.rows]
    if not below or not above:
        return None
    low, high = below[-1], above[0]
    part = (key.rows - low.rows) / (high.rows - low.rows)
    return StepCost(
        key.draft_len,
        key.rows,
        low.fixed_s + part * (high.fixed_s - low.fixed_s),
        low.per_kv_token_s + part * (high.per_kv_token_s - low.per_kv_token_s),
    )


def _grown(key: GraphKey, costs: dict[GraphKey, StepCost]) -> StepCost | None:
    """As much more than the largest smaller size as it is at the nearest draft length that has both."""
    smaller = [k for k in costs if k.draft_len == key.draft_len and k.rows < key.rows]
    if not smaller:
        return None
    last = max(smaller, key=lambda k: k.rows)
    others = sorted({k.draft_len for k in costs}, key=lambda k: (abs(k - key.draft_len), k))
    for draft_len in others:
        here, there = costs.get(GraphKey(draft_len, last.rows)), costs.get(GraphKey(draft_len, key.rows))
        if draft_len != key.draft_len and here and there:
            growth = there.fixed_s / here.fixed_s
            cost = costs[last]
            return StepCost(key.draft_len, key.rows, cost.fixed_s * growth, cost.per_kv_token_s)
    return None


@torch.inference_mode()
def measure_costs(
    worker: Worker,
    keys: Sequence[GraphKey],
    effort: Effort,
    watch: Stopwatch,
    clock: Callable[[], float] = time.perf_counter,
    ragged: Sequence[GraphKey] = (),
) -> tuple[StepCost, ...]:
    """Of a worker without requests; its state is as before when this returns."""
    state, config = worker.state, worker.config
    held = [getattr(state, name) for name in ("seq_len", "next_token", "draft_feature", "page_table")]
    before = [tensor.clone() for tensor in held]
    timer = WorkerTimer(worker, watch, effort)
    try:
        common = measure(keys, timer, lambda key: kv_lens(config, key, effort), effort, clock)
        own = measure_ragged(ragged, common, timer, lambda key: kv_lens(config, key, effort), effort, clock)
        return (*common, *own)
    finally:
        for tensor, values in zip(held, before, strict=True):
            tensor.copy_(values)
