"""Tables of `auto_study.py`'s points: tokens per second of every mode, and `auto` beside the best of them.

A segment is short, so what its drafts happened to score is left out: a step of k drafts counts as the tokens
that such a step gives on average. With simulated acceptance that mean is known; with a real drafter it is
that of all segments of the point, whatever their mode.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmark.h200.auto_points import FIRST, SETTLING

Line = dict[str, Any]
Key = tuple[float, int, int]  # acceptance (0: the drafter's own), context, streams
HOLD = 0.98  # auto against the better of plain and always: at every point
HOLD_MEAN = 0.995
GAIN = 1.02


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second at a point, medians over the rounds."""

    by_mode: dict[str, float]
    by_round: dict[tuple[str, str], float]  # (mode, round)
    first: float | None  # of auto, just after the acceptance had changed
    share: dict[str, float]  # of auto's steps, by draft length
    expected: dict[int, float]  # tokens of a row and step, by draft length

    @property
    def better(self) -> str:
        return max(("plain", "always"), key=lambda mode: self.by_mode[mode])

    @property
    def best(self) -> str:
        """The best in hindsight of those with one draft length."""
        fixed = [mode for mode in self.by_mode if mode not in ("auto", "threshold")]
        return max(fixed, key=lambda mode: self.by_mode[mode])

    def ratio(self, mode: str, other: str) -> float:
        """Median over the rounds, in each of which both ran."""
        rounds = [n for m, n in self.by_round if m == mode]
        return statistics.median(self.by_round[mode, n] / self.by_round[other, n] for n in rounds)


def expected_tokens(survival: Sequence[float]) -> dict[int, float]:
    """Tokens of a row and step by draft length: one, and each draft with the probability that it is taken."""
    return {k: 1.0 + sum(survival[:k]) for k in range(len(survival) + 1)}


def pooled_survival(lines: Iterable[Line]) -> list[float]:
    """P(draft j is taken), over all steps that had one."""
    taken: dict[int, int] = {}
    made: dict[int, int] = {}
    for line in lines:
        for text, counts in line["accepted"].items():
            for depth in range(1, int(text) + 1):
                made[depth] = made.get(depth, 0) + sum(counts)
                taken[depth] = taken.get(depth, 0) + sum(counts[depth:])
    return [taken[depth] / made[depth] for depth in sorted(made)]


def points(lines: Sequence[Line]) -> dict[Key, Rates]:
    known = {line["acceptance"]: line["by_depth"] for line in lines if line["kind"] == "survival"}
    groups: dict[Key, list[Line]] = {}
    for line in lines:
        if line["kind"] == "segment":
            groups.setdefault(_key(line), []).append(line)
    return {key: _rates(group, known.get(key[0])) for key, group in sorted(groups.items())}


def _key(line: Line) -> Key:
    return line["acceptance"] or 0.0, line["context"], line["streams"]


def _rates(lines: Sequence[Line], survival: Sequence[float] | None) -> Rates:
    expected = expected_tokens(survival or pooled_survival(lines))
    by_round, first = {}, None
    for line in lines:
        rows = {int(k): sum(counts) for k, counts in line["accepted"].items()}
        rate = sum(num * expected[k] for k, num in rows.items()) / line["seconds"]
        if line["round"] == FIRST:
            first = rate
        elif line["round"] != SETTLING:
            by_round[line["mode"], line["round"]] = rate
    modes = dict.fromkeys(mode for mode, _ in by_round)
    medians = {m: statistics.median(v for (mode, _), v in by_round.items() if mode == m) for m in modes}
    of_auto = [line for line in lines if line["mode"] == "auto"]
    steady = [line["steps"] for line in of_auto if ("auto", line["round"]) in by_round]
    total = sum(sum(steps.values()) for steps in steady)
    lens = sorted({k for steps in steady for k in steps}, key=int)
    share = {k: sum(steps.get(k, 0) for steps in steady) / total for k in lens}
    return Rates(medians, by_round, first, share, expected)


def tables(lines: Sequence[Line]) -> list[str]:
    found = points(lines)
    if not found:
        return []
    text: list[str] = []
    for acceptance, context in dict.fromkeys((key[0], key[1]) for key in found):
        group = {k[2]: rates for k, rates in found.items() if k[:2] == (acceptance, context)}
        text += [_title(acceptance, context), "", *_table(group), ""]
    text += summary(found)
    left_out = [_place(*_key(line)) for line in lines if line["kind"] == "left_out"]
    if left_out:
        text.append(f"- Not run, the KV pool being too small: {'; '.join(left_out)}.")
    return text


def _title(acceptance: float, context: int) -> str:
    what = f"{acceptance:g} tokens a step with all drafts" if acceptance else "the drafter's own acceptance"
    return f"### {what[0].upper()}{what[1:]}, {f'context {context}' if context else 'prompts of their own'}"


def _table(group: dict[int, Rates]) -> list[str]:
    modes = list(next(iter(group.values())).by_mode)
    head = ["streams", *modes, "auto / better", "auto / best", "best"]
    head += ["first steps / better", "auto's drafts"]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for streams, rates in group.items():
        first = "" if rates.first is None else f"{rates.first / rates.by_mode[rates.better]:.3f}"
        cells = [str(streams), *(f"{rates.by_mode[mode]:.0f}" for mode in modes)]
        cells += [f"{rates.ratio('auto', rates.better):.3f}", f"{rates.ratio('auto', rates.best):.3f}"]
        cells += [rates.best, first, ", ".join(f"{k}: {part:.0%}" for k, part in rates.share.items())]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def crossover(lines: Sequence[Line], acceptance: float | None, context: int) -> int | None:
    """Rows up to which speculating always pays, between the points about it; None: the points don't tell."""
    found = {k[2]: r for k, r in points(lines).items() if k[:2] == (acceptance or 0.0, context)}
    gains = [(streams, rates.by_mode["always"] / rates.by_mode["plain"]) for streams, rates in found.items()]
    for (low, before), (high, after) in pairwise(gains):
        if before >= 1.0 > after:
            return round(low + (high - low) * (before - 1.0) / (before - after))
    return None


def edge_tables(lines: Sequence[Line]) -> list[str]:
    """Runs about the threshold: the rows that steps had, and tokens per second of each mode."""
    runs = [line for line in lines if line["kind"] == "edge"]
    if not runs:
        return []
    known = {line["acceptance"]: line["by_depth"] for line in lines if line["kind"] == "survival"}
    expected = expected_tokens(known.get(runs[0]["acceptance"]) or pooled_survival(runs))
    by_mode: dict[str, list[float]] = {}
    for run in runs:
        decoded = sum(sum(counts) * expected[int(k)] for k, counts in run["accepted"].items())
        by_mode.setdefault(run["mode"], []).append((decoded + run["num_first"]) / run["seconds"])
    better = max(("plain", "always"), key=lambda mode: statistics.median(by_mode[mode]))
    rows: dict[int, int] = {}
    for run in runs:
        for text, num in run["rows"].items():
            rows[int(text)] = rows.get(int(text), 0) + num
    total, threshold = sum(rows.values()), runs[0]["threshold"]
    about = ", ".join(f"{n}: {num / total:.0%}" for n, num in sorted(rows.items()))
    text = [
        f"### At the threshold {threshold}, prompts arriving",
        "",
        f"Decoding rows of the steps: {about}.",
        "",
        "| mode | tok/s | / better | switches | prefill steps | eager steps |",
        "|" + "---|" * 6,
    ]
    for mode, rates in by_mode.items():
        of = [run for run in runs if run["mode"] == mode]
        ratio = statistics.median(a / b for a, b in zip(rates, by_mode[better], strict=True))
        counts = [sum(run[name] for run in of) for name in ("switches", "prefill_steps", "eager_steps")]
        cells = [mode, f"{statistics.median(rates):.0f}", f"{ratio:.3f}", *map(str, counts)]
        text.append("| " + " | ".join(cells) + " |")
    return text


def start_lines(lines: Sequence[Line]) -> list[str]:
    """What starting took, and the graphs that were captured."""
    text = []
    for line in lines:
        if line["kind"] != "start":
            continue
        sets = line["info"]["graphs"]
        graphs = ", ".join(f"{g['draft_len']} drafts: {len(g['sizes'])}" for g in sets)
        captured = (
            f"; CUDA graphs ({graphs}) in {sum(g['seconds'] for g in sets):.1f} s and"
            f" {sum(g['bytes'] for g in sets) / 2**30:.2f} GiB"
        )
        costs = f"; {len(line['info']['costs'])} step costs" if line["info"]["costs"] else ""
        text.append(f"- Start ({line['note']}): {line['seconds']:.1f} s{captured if sets else ''}{costs}.")
    return text


def summary(found: dict[Key, Rates]) -> list[str]:
    """What issue and documents ask: auto against the better of plain and always."""
    held = {key: rates.ratio("auto", rates.better) for key, rates in found.items()}
    worst = min(held, key=lambda key: held[key])
    mean, low = statistics.fmean(held.values()), [key for key in held if held[key] < HOLD]
    gains = [key for key in held if held[key] > GAIN and found[key].best not in ("plain", "always")]
    most = max(held, key=lambda key: held[key])
    hindsight = [rates.ratio("auto", rates.best) for rates in found.values()]
    threshold = [rates.ratio("threshold", rates.better) for rates in found.values()]
    middle = max(r.by_mode[r.best] / r.by_mode[r.better] for r in found.values())
    return [
        f"- auto / better of plain and always, {len(held)} points: lowest {held[worst]:.3f}"
        f" ({_place(*worst)}), mean {mean:.4f}; {len(low)} below {HOLD}"
        f"{': ' + '; '.join(_place(*key) for key in low) if low else ''}. Bars: {HOLD} everywhere"
        f" ({'held' if not low else 'MISSED'}), {HOLD_MEAN} on average"
        f" ({'held' if mean >= HOLD_MEAN else 'MISSED'}).",
        f"- Above {GAIN} by a draft length that neither uses: {len(gains)} points; the most is"
        f" {held[most]:.3f} ({_place(*most)}, best in hindsight {found[most].best}). The best in hindsight is"
        f" at most {middle:.3f} of the better of the two.",
        f"- auto / best in hindsight: lowest {min(hindsight):.3f}, mean {statistics.fmean(hindsight):.4f}.",
        f"- threshold / better: lowest {min(threshold):.3f}, mean {statistics.fmean(threshold):.4f}.",
    ]


def _place(acceptance: float, context: int, streams: int) -> str:
    parts = [f"acceptance {acceptance:g}"] if acceptance else []
    parts += [f"context {context}"] if context else []
    return ", ".join([*parts, f"{streams} streams"])
