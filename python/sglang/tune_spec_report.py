"""What `tune_spec` prints: expected rates of every shape, and the flags to use."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sglang.srt.model_executor.step_plan import SpecShape
from sglang.tune_spec_choice import ShapeFigures, best_fixed, choose_best, score


def report(
    found: Sequence[ShapeFigures], sizes: Sequence[int], kv_len: float, table: str | None
) -> list[str]:
    """``table``: the file that was saved."""
    best, fixed = choose_best(found, sizes, kv_len), best_fixed(found, sizes, kv_len)
    auto = f" --speculative-auto-table {table}" if table else ""
    threshold = f"--speculative-disable-bs-threshold {fixed.threshold}"
    if fixed.threshold is None:
        threshold = "(and no threshold: always)"
    gains = [
        _gain(best.figures, sizes, kv_len, best.schedule_score),
        _gain(fixed.figures, sizes, kv_len, fixed.threshold_score),
    ]
    return [
        f"Expected tokens per second, {kv_len:.0f} tokens of context a row:",
        "",
        *_rates(found, sizes, kv_len),
        "",
        *(f"Acceptance by depth, {_name(f.shape)}: {_percent(f.parts())}" for f in found),
        "",
        "Flags, every step with the number of drafts that promises most:",
        f"  {_flags(best.figures.shape)} --speculative-disable-bs-threshold auto{auto}",
        f"Flags with a schedule ({gains[0]}):",
        f"  {_flags(best.figures.shape)} --speculative-bs-schedule {best.schedule}",
        f"Flags with a threshold ({gains[1]}):",
        f"  {_flags(fixed.figures.shape)} {threshold}",
    ]


def _rates(found: Sequence[ShapeFigures], sizes: Sequence[int], kv_len: float) -> list[str]:
    head = ["steps, topk, draft tokens", "tokens a step", *(f"{rows} rows" for rows in sizes)]
    plain = [max(figures.rate(0, rows, kv_len) for figures in found) for rows in sizes]
    lines = [_line(head), "|" + "---|" * len(head), _line(["plain", "1.00", *(f"{r:.0f}" for r in plain)])]
    for figures in found:
        for draft_len in range(1, figures.shape.num_steps + 1):
            shape, most = figures.shape, figures.max_rows
            rates = [f"{figures.rate(draft_len, n, kv_len):.0f}" if n <= most else "" for n in sizes]
            name = f"{draft_len}, {shape.topk}, {shape.num_nodes(draft_len)}"
            lines.append(_line([name, f"{figures.expected_tokens(draft_len):.2f}", *rates]))
    return lines


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _name(shape: SpecShape) -> str:
    return f"{shape.num_steps} steps, topk {shape.topk}, {shape.num_draft_tokens} draft tokens"


def _flags(shape: SpecShape) -> str:
    return (
        f"--speculative-num-steps {shape.num_steps} --speculative-eagle-topk {shape.topk}"
        f" --speculative-num-draft-tokens {shape.num_draft_tokens}"
    )


def _percent(parts: Sequence[float]) -> str:
    return ", ".join(f"{part:.0%}" for part in parts)


def _gain(figures: ShapeFigures, sizes: Sequence[int], kv_len: float, reached: float) -> str:
    """Geometric means over the sizes."""
    full = figures.shape.num_steps
    plain, always = (score(figures, sizes, [k] * len(sizes), kv_len) for k in (0, full))
    return f"{math.exp(reached - plain):.2f}x of plain, {math.exp(reached - always):.2f}x of always"
