"""What draft lengths of each request's own would be worth inside one step, against the best common length.

    python benchmark/policy_sim/ragged.py --costs TABLE.json --out ragged.jsonl
    python benchmark/policy_sim/ragged.py --table ragged.jsonl

A ragged step verifies only the drafts it is given: its time is that of its query tokens (``structure.py``),
and of as many draft forwards over all rows as its longest draft has. *Bound*: every request's chances are
known, no padding; the allocation is the best there is (drafts sorted by chance, the best number of them).
*Estimated*: chances are learned request by request, shrunk to what new requests show, and query tokens are
padded to the sizes graphs exist for; against a common length chosen by the same knowledge. Both may take the
graph of more query tokens where that is faster.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.policy_sim.structure import StepStructure, line, structure_of
from benchmark.policy_sim.tables import rounded
from benchmark.policy_sim.workload import DECAY, SPREAD, first_chance, request_chance
from sglang.srt.model_executor.graph_sizes import default_sizes
from sglang.srt.speculative.auto_table import AutoTable

STREAMS: Final = (4, 8, 16, 32, 64, 128, 250)
MIXES: Final = {
    "2.5 and 1.2": (2.5, 1.2),
    "2.8 and 1.2": (2.8, 1.2),
    "2.5 and 1.5": (2.5, 1.5),
    "all 2.0": (2.0, 2.0),
}
OUTPUT: Final = 256  # tokens of a request
PRIOR_DRAFTS: Final = 6.0  # that a new request's chances count as
NEW_STEPS: Final = 4  # of a request, which show what new ones are like
KEPT: Final = 0.98  # of what a request's earlier steps showed, a step
FAR: Final = 4096.0  # query tokens; beyond what was measured, verification grows as they do, up to there


class Costs:
    """Times of a step of ``rows`` rows, for any number of drafts verified."""

    def __init__(
        self, structure: StepStructure, rows: int, kv_tokens: float, num_steps: int, pad: bool
    ) -> None:
        most, longest_s = structure.verify[-1]
        points = (*structure.verify, (FAR, longest_s * FAR / most))
        tokens = np.arange(rows, rows * (num_steps + 1) + 1)  # [drafts + 1] query tokens
        # Some numbers of query tokens are slow; a step of such a number can be padded to a faster one.
        sizes = np.array(default_sizes(int(FAR))) if pad else np.arange(1, int(FAR) + 1)
        times = np.interp(sizes, [x for x, _ in points], [y for _, y in points])
        verify = np.minimum.accumulate(times[::-1])[::-1][np.searchsorted(sizes, tokens)]
        self.by_drafts = verify + structure.per_kv_token_s * kv_tokens  # [drafts + 1] without draft forwards
        self.forward_s = line(structure.draft, rows)
        self.rows = rows
        self.num_steps = num_steps

    def common(self, reached: np.ndarray) -> int:
        """The best common length. ``reached`` [rows, steps]: chance that a draft is accepted."""
        rates = [
            (self.rows + reached[:, :k].sum()) / self.seconds(k, self.rows * k)
            for k in range(self.num_steps + 1)
        ]
        return int(np.argmax(rates))

    def ragged(self, reached: np.ndarray) -> np.ndarray:
        """The best number of drafts for each row: [rows]."""
        best_rate, best = self.rows / self.seconds(0, 0), np.zeros(self.rows, np.int64)
        for longest in range(1, self.num_steps + 1):
            flat = reached[:, :longest].ravel()
            order = np.argsort(-flat, kind="stable")
            gained = np.concatenate(([0.0], flat[order].cumsum()))  # [drafts + 1]
            seconds = self.by_drafts[: len(gained)] + longest * self.forward_s
            rates = (self.rows + gained) / seconds
            number = int(rates.argmax())
            if rates[number] > best_rate:
                # Chances fall with the depth, so that a row's chosen drafts are its first ones.
                best_rate = float(rates[number])
                best = np.bincount(order[:number] // longest, minlength=self.rows)
        return best

    def seconds(self, longest: int, drafts: int) -> float:
        return float(self.by_drafts[drafts]) + longest * self.forward_s


class _Batch:
    """Requests of a mix that run for ever: one that ends is followed by another of its kind."""

    def __init__(self, lengths: tuple[float, float], num_steps: int, rows: int) -> None:
        self.num_steps = num_steps
        self.source = np.random.default_rng(0)  # of what happens in steps
        self._domains = [first_chance(length, num_steps) for length in lengths]
        # Each row has its own, so that two policies meet the same requests.
        self._requests = [np.random.default_rng((1, row)) for row in range(rows)]

    def chances(self, row: int) -> np.ndarray:
        """[steps] of a new request: even rows are of the first kind."""
        first = request_chance(self._domains[row % 2], self._requests[row].normal(0.0, SPREAD))
        return first * DECAY ** np.arange(self.num_steps)


def bound(costs: Costs, batch: _Batch, draws: int) -> tuple[float, float]:
    """Tokens a second with the best common and with the best ragged lengths, chances known."""
    totals = np.zeros((2, 2))  # [common, ragged] x [tokens, seconds]
    for _ in range(draws):
        reached = np.cumprod([batch.chances(row) for row in range(costs.rows)], axis=1)  # [rows, steps]
        k = costs.common(reached)
        for index, lengths in enumerate((np.full(costs.rows, k), costs.ragged(reached))):
            totals[index] += _expected(costs, reached, lengths)
    return totals[0, 0] / totals[0, 1], totals[1, 0] / totals[1, 1]


def _expected(costs: Costs, reached: np.ndarray, lengths: np.ndarray) -> tuple[float, float]:
    """Tokens and seconds of a step with these drafts."""
    given = np.arange(reached.shape[1]) < lengths[:, None]  # [rows, steps]
    return costs.rows + float((reached * given).sum()), costs.seconds(int(lengths.max()), int(lengths.sum()))


class Learner:
    """One chance a request for drafts of any depth, from its own drafts, shrunk to that of new requests.

    (A chance for each depth would never be learned where no draft of that depth is tried.)
    """

    def __init__(self, rows: int, num_steps: int) -> None:
        self._num_steps = num_steps
        self._tried = np.zeros(rows)
        self._accepted = np.zeros(rows)
        self._age = np.zeros(rows)
        self._new_tried, self._new_accepted = 16.0, 10.0

    def reached(self) -> np.ndarray:
        """[rows, steps] estimated chance that a draft is accepted."""
        prior = self._new_accepted / self._new_tried
        chances = (PRIOR_DRAFTS * prior + self._accepted) / (PRIOR_DRAFTS + self._tried)  # [rows]
        return np.asarray(chances[:, None] ** np.arange(1, self._num_steps + 1))

    def observe(self, lengths: np.ndarray, accepted: np.ndarray) -> None:
        tried = np.minimum(accepted + 1, lengths)  # [rows]
        self._tried = KEPT * self._tried + tried
        self._accepted = KEPT * self._accepted + accepted
        is_new = self._age < NEW_STEPS
        self._new_tried = 0.999 * self._new_tried + float(tried[is_new].sum())
        self._new_accepted = 0.999 * self._new_accepted + float(accepted[is_new].sum())
        self._age += 1

    def forget(self, row: int) -> None:
        self._tried[row] = self._accepted[row] = self._age[row] = 0.0


def estimated(costs: Costs, batch: _Batch, is_ragged: bool, num_steps: int) -> float:
    """Tokens a second over so many steps at 64 rows (the first fifth left out), chances learned."""
    rows = costs.rows
    num_steps = max(
        num_steps // 2, num_steps * 64 // rows
    )  # as many requests at any number of streams, nearly
    chances = np.array([batch.chances(row) for row in range(rows)])  # [rows, steps]
    left = batch.source.integers(1, OUTPUT, rows)  # [rows] tokens to give yet
    learner = Learner(rows, batch.num_steps)
    tokens = seconds = 0.0
    for step in range(num_steps):
        believed = learner.reached()
        lengths = costs.ragged(believed) if is_ragged else np.full(rows, costs.common(believed))
        drawn = batch.source.random(chances.shape) < chances
        accepted = np.minimum(np.logical_and.accumulate(drawn, axis=1).sum(axis=1), lengths)  # [rows]
        learner.observe(lengths, accepted)
        if step >= num_steps // 5:
            of_step = _expected(costs, np.cumprod(chances, axis=1), lengths)
            tokens, seconds = tokens + of_step[0], seconds + of_step[1]
        left -= accepted + 1
        for row in np.flatnonzero(left <= 0):
            chances[row], left[row] = batch.chances(int(row)), OUTPUT
            learner.forget(int(row))
    return tokens / seconds


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    loaded = AutoTable.from_json(args.costs.read_text())
    structure, num_steps = structure_of(loaded.table.costs), loaded.shape.num_steps
    cases = [(mix, kv, n) for mix in MIXES for kv in args.kv for n in args.streams]
    for mix, kv, streams in tqdm(cases, unit="case", disable=args.quiet):
        exact = Costs(structure, streams, kv * streams, num_steps, pad=False)
        padded = Costs(structure, streams, kv * streams, num_steps, pad=True)
        rates = bound(exact, _Batch(MIXES[mix], num_steps, streams), args.draws)
        learned = [
            estimated(padded, _Batch(MIXES[mix], num_steps, streams), kind, args.steps)
            for kind in (False, True)
        ]
        yield {
            "mix": mix,
            "kv": kv,
            "streams": streams,
            "common": rates[0],
            "bound": rates[1] / rates[0] - 1.0,
            "common_estimated": learned[0],
            "estimated": learned[1] / learned[0] - 1.0,
        }


def markdown(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Gains by streams: bound / estimated."""
    streams = sorted({line["streams"] for line in lines})
    cases = list(dict.fromkeys((line["mix"], line["kv"]) for line in lines))
    found = {(x["mix"], x["kv"], x["streams"]): x for x in lines}
    rows = []
    for mix, kv in cases:
        cells = [found[mix, kv, n] for n in streams]
        gains = [f"{100 * c['bound']:+.1f} / {100 * c['estimated']:+.1f}" for c in cells]
        rows.append(f"| {mix} | {kv} | " + " | ".join(gains) + " |")
    header = "| tokens a 3-draft step | context | " + " | ".join(map(str, streams)) + " |"
    return [header, "|---|---|" + "---|" * len(streams), *rows]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--costs", type=Path, help="JSON as --speculative-auto-table reads it")
    parser.add_argument("--out", type=Path, help="JSONL, one line a case")
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--kv", type=int, nargs="+", default=[1024, 8192], help="tokens of a row's context")
    parser.add_argument("--draws", type=int, default=100, help="batches of the bound (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1500, help="of an estimated run (default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--table", type=Path, help="print the table of a JSONL written before, run nothing")
    args = parser.parse_args(argv)
    if args.table is None and (args.costs is None or args.out is None):
        parser.error("give --costs and --out to run, or --table to print the table of a run")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.table is None:
        with args.out.open("w") as out:
            for found in run(args):
                out.write(json.dumps(rounded(found)) + "\n")
                out.flush()
    lines = [json.loads(text) for text in (args.table or args.out).read_text().splitlines()]
    print("\n".join(markdown(lines)))


if __name__ == "__main__":
    main()
