"""The study's picture: rates and deltas by streams, one line a column, its interval as a band."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmark.spec_toggle.columns import AUTO
from benchmark.spec_toggle.records import PLAIN, PLAIN_WITH_DRAFTER, SPEC, TOGGLE
from benchmark.spec_toggle.stats import Estimate
from benchmark.spec_toggle.study_points import Point, crossings
from benchmark.spec_toggle.study_records import FIXED

COLOURS: Final = {
    PLAIN: "#d9822b",
    SPEC: "#2a7f9e",
    TOGGLE: "#333333",
    AUTO: "#7b3fa0",
    PLAIN_WITH_DRAFTER: "#a08a60",
}
_FURTHER: Final = ("#4c9a2a", "#b03a2e", "#5b7bd5", "#c2185b")
_DASHES: Final = {TOGGLE: "--", AUTO: "-.", PLAIN_WITH_DRAFTER: ":"}
_MARKERS: Final = {PLAIN: "o", SPEC: "s", TOGGLE: "D", AUTO: "^", PLAIN_WITH_DRAFTER: "v"}
_GREY: Final = "#8a8a8a"


def draw(points: Sequence[Point], base: str, paths: Sequence[Path]) -> None:
    """Write the picture to each path; the suffix says in which format (png, svg)."""
    domains = list(dict.fromkeys(point.domain for point in points if point.domain != FIXED))
    if not domains:
        return
    figure, axes = plt.subplots(
        2, len(domains), figsize=(6.4 * len(domains), 7.6), sharex=True, squeeze=False,
        height_ratios=[3, 2], layout="constrained",
    )  # fmt: skip
    looks = _looks(points)
    for index, domain in enumerate(domains):
        of_domain = [point for point in points if point.domain == domain]
        _draw_rates(axes[0, index], of_domain, looks)
        _draw_ratios(axes[1, index], of_domain, base, looks)
        axes[0, index].set_title(f"{domain} prompts", loc="left", fontsize=13)
        counts = sorted({point.streams for point in of_domain})
        axes[1, index].set_xscale("log", base=2)
        axes[1, index].set_xticks(counts, [str(count) for count in counts])
        axes[1, index].minorticks_off()
        axes[1, index].set_xlabel("streams at once", fontsize=12)
    axes[0, 0].set_ylabel("tok/s, all streams", fontsize=12)
    axes[1, 0].set_ylabel(f"tok/s over {base}'s", fontsize=12)
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    plt.close(figure)


def _looks(points: Sequence[Point]) -> dict[str, dict[str, Any]]:
    """Return how each column's line looks."""
    columns = dict.fromkeys((point.column, point.mode) for point in points)
    further = iter(_FURTHER * len(columns))
    seen: set[str] = set()
    looks = {}
    for column, mode in columns:
        is_known = mode in COLOURS and mode not in seen  # a second server's mode gets another colour
        seen.add(mode)
        looks[column] = {
            "color": COLOURS[mode] if is_known else next(further),
            "linestyle": _DASHES.get(mode, "-"),
            "marker": _MARKERS.get(mode, "o"),
        }
    return looks


def _draw_rates(axes: Any, points: Sequence[Point], looks: dict[str, dict[str, Any]]) -> None:
    for column in dict.fromkeys(point.column for point in points):
        row = [(p.streams, p.total) for p in points if p.column == column]
        _line(axes, row, column, looks[column])
    axes.set_yscale("log")
    values = [point.total.value for point in points]
    axes.set_ylim(min(values) / 1.6, max(values) * 1.6)  # the lines': a band of few runs may be wider
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    _tidy(axes)
    axes.legend(frameon=False, fontsize=11)


def _draw_ratios(axes: Any, points: Sequence[Point], base: str, looks: dict[str, dict[str, Any]]) -> None:
    axes.axhline(1.0, color=_GREY, linewidth=1.0)
    for column in dict.fromkeys(point.column for point in points if point.column != base):
        row = [(p.streams, p.over_base) for p in points if p.column == column and p.over_base is not None]
        _line(axes, row, column, looks[column])
    for crossing in crossings(points):
        mode = next(point.mode for point in points if point.column == crossing.column)
        if mode == SPEC and crossing.streams is not None:
            axes.axvline(crossing.streams, color=COLOURS[SPEC], linestyle=":", linewidth=1.4)
            axes.annotate(
                f"crossover {crossing.streams:.3g}", (crossing.streams, 0.97), rotation=90,
                va="top", ha="right", xycoords=("data", "axes fraction"), xytext=(-3, 0),
                textcoords="offset points", fontsize=10, color=COLOURS[SPEC],
            )  # fmt: skip
    values = [1.0, *(point.over_base.value for point in points if point.over_base is not None)]
    margin = 0.25 * (max(values) - min(values)) + 0.05
    axes.set_ylim(min(values) - margin, max(values) + margin)
    _tidy(axes)


def _line(axes: Any, row: Sequence[tuple[int, Estimate]], label: str, look: dict[str, Any]) -> None:
    if not row:
        return
    streams = [count for count, _ in row]
    axes.plot(streams, [estimate.value for _, estimate in row], label=label, markersize=5, **look)
    known = [(count, e) for count, e in row if e.low > 0]
    low, high = [e.low for _, e in known], [e.high for _, e in known]
    axes.fill_between([c for c, _ in known], low, high, color=look["color"], alpha=0.15, linewidth=0)


def _tidy(axes: Any) -> None:
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=11)
    axes.tick_params(axis="y", which="minor", labelsize=9)
