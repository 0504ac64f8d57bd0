"""A server in a loop: continuous batching over a cost table, with a policy that chooses drafts.

Prefill goes first, all that waits in steps of at most ``PREFILL_TOKENS``. A decode step takes the table's
time (times what the workload says the table is wrong by, and noise), and accepts drafts by each row's own
chances.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmark.policy_sim.policies import Outcome, Policy, SimRow, View
from benchmark.policy_sim.workload import DECAY, Phase, SimRequest, Workload, first_chance, request_chance
from sglang.srt.managers.decode_tally import NEW_STEPS
from sglang.srt.model_executor.step_plan import RaggedSize
from sglang.srt.speculative.cost_table import CostTable
from sglang.srt.speculative.toggle import Decision, Reason

PREFILL_TOKENS: Final = 16_384
PREFILL_FIXED_S: Final = 1.8e-3  # docs/data/h200/step_times.jsonl, with drafter, 1 to 32 x 1024
PREFILL_TOKEN_S: Final = 23e-6


@dataclass(frozen=True, slots=True)
class Result:
    num_tokens: int
    end_s: float
    decode_s: float  # expected time of the decode steps that were run
    best_s: float  # time that the best choice in each of these steps would have needed for the same tokens
    num_steps: dict[int, int]  # by draft length
    num_ragged: int  # of these, with draft lengths of the rows' own
    mean_latency_s: float  # of a request, from arrival to its last token

    @property
    def regret(self) -> float:
        """1 - tokens a second / those of the best choice at each step, true costs and chances known."""
        return 1.0 - self.best_s / self.decode_s if self.decode_s else 0.0


class Truth:
    """What steps really cost."""

    def __init__(self, table: CostTable, workload: Workload, num_steps: int) -> None:
        self.table = table
        self._factors = workload.cost_factors
        self.draft_lens = tuple(k for k in table.draft_lens if 0 < k <= num_steps)
        self.max_rows = table.max_rows(0)

    def seconds(self, draft_len: int, rows: int, kv_tokens: int) -> float:
        return self.table.seconds(draft_len, rows, kv_tokens) * self._factors.get(draft_len, 1.0)

    def ragged_seconds(self, size: RaggedSize, kv_tokens: int) -> float:
        return self.table.ragged_seconds(size, kv_tokens) * self._factors.get(size.draft_len, 1.0)

    def ragged_sizes(self, rows: int) -> tuple[RaggedSize, ...]:
        """Of each draft length those with the fewest padded rows."""
        sizes = [RaggedSize(c.draft_len, c.rows, c.tokens) for c in self.table.ragged if c.rows >= rows]
        least = {k: min((s.rows for s in sizes if s.draft_len == k), default=0) for k in self.draft_lens}
        return tuple(size for size in sizes if size.rows == least.get(size.draft_len))


class _Rows:
    """The running requests, as arrays by row."""

    def __init__(self, num_steps: int) -> None:
        self.requests: list[SimRequest] = []
        self.left = np.zeros(0, np.int64)  # [rows] tokens to give yet
        self.kv_lens = np.zeros(0, np.int64)  # [rows]
        self.chances = np.zeros((0, num_steps))  # [rows, steps] of a draft, those before it accepted
        self.classes = np.zeros(0, np.int64)  # [rows]
        self.tried = np.zeros(0, np.int64)  # [rows] steps with drafts so far
        self.known: list[SimRow] = []
        self._num_added = 0

    def add(self, request: SimRequest, chances: np.ndarray, class_index: int) -> None:
        taken = {row.slot for row in self.known}
        slot = next(slot for slot in range(1, len(taken) + 2) if slot not in taken)
        self._num_added += 1
        self.known.append(SimRow(slot, self._num_added, request.request_class))
        self.tried = np.append(self.tried, 0)
        self.requests.append(request)
        self.left = np.append(self.left, request.output_len - 1)
        self.kv_lens = np.append(self.kv_lens, request.prompt_len)
        self.chances = np.vstack((self.chances, chances))
        self.classes = np.append(self.classes, class_index)

    def take_finished(self) -> list[SimRequest]:
        going = self.left > 0  # [rows] bool
        if going.all():
            return []
        finished = [r for r, keeps in zip(self.requests, going, strict=True) if not keeps]
        self.requests = [r for r, keeps in zip(self.requests, going, strict=True) if keeps]
        self.left, self.kv_lens = self.left[going], self.kv_lens[going]
        self.chances, self.classes = self.chances[going], self.classes[going]
        self.tried = self.tried[going]
        self.known = [row for row, keeps in zip(self.known, going, strict=True) if keeps]
        return finished


class Simulation:
    def __init__(self, workload: Workload, truth: Truth, policy: Policy, seed: int) -> None:
        self._workload = workload
        self._truth = truth
        self._policy = policy
        self._source = np.random.default_rng(seed)
        self._num_steps = truth.draft_lens[-1]
        self._rows = _Rows(self._num_steps)
        self._class_names = tuple(sorted({r.request_class for r in workload.requests}))
        self._coming = deque(workload.requests)
        self._phases = deque(workload.phases)
        self._phase: Phase = self._phases.popleft()
        self._firsts: dict[str, float] = {}
        self._begin_phase(self._phase)
        self._now = 0.0
        self._decode_s = self._best_s = self._latency_s = 0.0
        self._num_tokens = 0
        self._lengths: Counter[int] = Counter()
        self._num_ragged = 0
        self._sizes: dict[int, tuple[RaggedSize, ...]] = {}  # by rows

    def run(self) -> Result:
        while self._coming or self._rows.requests:
            self._advance_phase()
            if not self._prefill():
                self._decode()
        return Result(
            num_tokens=self._num_tokens,
            end_s=self._now,
            decode_s=self._decode_s,
            best_s=self._best_s,
            num_steps=dict(sorted(self._lengths.items())),
            num_ragged=self._num_ragged,
            mean_latency_s=self._latency_s / len(self._workload.requests),
        )

    def _advance_phase(self) -> None:
        while self._phases and self._phases[0].second <= self._now:
            self._begin_phase(self._phases.popleft())
            for row, request in enumerate(self._rows.requests):
                self._rows.chances[row] = self._chances(request)

    def _begin_phase(self, phase: Phase) -> None:
        self._firsts = {name: first_chance(length, self._num_steps) for name, length in phase.lengths.items()}

    def _chances(self, request: SimRequest) -> np.ndarray:
        first = request_chance(self._firsts[request.domain], request.offset)
        return first * DECAY ** np.arange(self._num_steps)

    def _prefill(self) -> bool:
        """Take in what has arrived, as far as there are rows; False: nothing to do."""
        if not self._rows.requests and self._coming[0].second > self._now:
            self._now = self._coming[0].second
        tokens = 0
        while self._coming and self._coming[0].second <= self._now:
            request = self._coming[0]
            is_full = len(self._rows.requests) >= self._truth.max_rows
            if is_full or (tokens and tokens + request.prompt_len > PREFILL_TOKENS):
                break
            tokens += request.prompt_len
            self._num_tokens += 1
            index = self._class_names.index(request.request_class)
            self._rows.add(self._coming.popleft(), self._chances(request), index)
        if tokens == 0:
            return False
        self._now += PREFILL_FIXED_S + PREFILL_TOKEN_S * tokens
        self._finish()
        return True

    def _decode(self) -> None:
        rows = self._rows
        num_rows, kv_tokens = len(rows.requests), int(rows.kv_lens.sum())
        counts = np.bincount(rows.classes, minlength=len(self._class_names))
        lens = tuple(k for k in self._truth.draft_lens if num_rows <= self._truth.table.max_rows(k))
        pairs = tuple((n, float(c)) for n, c in zip(self._class_names, counts, strict=True) if c)
        if num_rows not in self._sizes:
            self._sizes[num_rows] = self._truth.ragged_sizes(num_rows)
        chosen = self._policy.choose(
            View(num_rows, pairs, kv_tokens, lens, self._sizes[num_rows], rows.known)
        )
        decision = chosen if isinstance(chosen, Decision) else Decision(chosen, Reason.COST)
        draft_len = decision.draft_len
        drafts = np.array(decision.row_drafts or (draft_len,) * num_rows)  # [rows]
        seconds = self._account(decision, drafts, lens, kv_tokens)
        seconds *= max(0.5, 1.0 + self._workload.noise * self._source.standard_normal())
        if self._source.random() < self._workload.outliers:
            seconds *= 10.0
        drawn = self._source.random((num_rows, draft_len)) < rows.chances[:, :draft_len]  # [rows, k]
        accepted = np.minimum(np.logical_and.accumulate(drawn, axis=1).sum(axis=1), drafts)  # [rows]
        self._now += seconds
        outcome = Outcome(
            draft_len, num_rows, kv_tokens, seconds, accepted, rows.classes, self._class_names,
            rows.known, decision.row_drafts, rows.tried < NEW_STEPS,
        )  # fmt: skip
        self._policy.observe(outcome)
        rows.tried += drafts > 0
        given = np.minimum(accepted + 1, rows.left)  # [rows]
        self._num_tokens += int(given.sum())
        rows.left -= given
        rows.kv_lens += given
        self._finish()

    def _account(self, decision: Decision, drafts: np.ndarray, lens: Sequence[int], kv_tokens: int) -> float:
        """Count this step and what the best one of one draft length would have been; its expected time."""
        num_rows, draft_len = len(drafts), decision.draft_len
        of_rows = np.cumprod(self._rows.chances, axis=1)  # [rows, steps]
        reached = of_rows.sum(axis=0).cumsum()  # [steps] drafts accepted by k
        tokens = [float(num_rows), *(num_rows + reached)]
        seconds = {k: self._truth.seconds(k, num_rows, kv_tokens) for k in (0, *lens)}
        best_rate = max(float(tokens[k]) / seconds[k] for k in seconds)
        self._lengths[draft_len] += 1
        taken, given = seconds[draft_len], tokens[draft_len]
        if decision.size is not None:
            self._num_ragged += 1
            taken = self._truth.ragged_seconds(decision.size, kv_tokens)
            given = num_rows + float(of_rows[np.arange(of_rows.shape[1]) < drafts[:, None]].sum())
        self._decode_s += taken
        self._best_s += given / best_rate
        return taken

    def _finish(self) -> None:
        for request in self._rows.take_finished():
            self._latency_s += self._now - request.second
