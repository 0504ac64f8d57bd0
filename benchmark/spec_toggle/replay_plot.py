"""The picture of a trace's replays: load, speed, waits, and the mode of the steps as strips."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmark.spec_toggle.columns import AUTO
from benchmark.spec_toggle.records import PLAIN, PLAIN_WITH_DRAFTER, SPEC, TOGGLE
from benchmark.spec_toggle.replay_figures import Second

COLOURS: Final = {
    PLAIN: "#d9822b",
    PLAIN_WITH_DRAFTER: "#d9822b",
    SPEC: "#2a7f9e",
    TOGGLE: "#333333",
    AUTO: "#7b3fa0",
}
_FURTHER: Final = ("#4c9a2a", "#b03a2e", "#5b7bd5", "#c2185b")
_PLAIN_STEP: Final = "#d9822b"
_SPEC_STEPS: Final = ("#a9d3e2", "#62aac4", "#2a7f9e", "#12566f")
"""Of 1, 2, 3, and more drafts."""
_IDLE: Final = "#eeeeee"


def draw(seconds: Sequence[Second], title: str, paths: Sequence[Path]) -> None:
    """Write the picture of the first round's replays; each path's suffix says in which format."""
    shown = [second for second in seconds if second.round == 0]
    columns = list(dict.fromkeys(second.column for second in shown))
    figure, (load, speed, waits, strip) = plt.subplots(
        4, 1, figsize=(10, 8.4 + 0.3 * len(columns)), sharex=True, layout="constrained",
        height_ratios=[3, 3, 3, 0.5 + 0.5 * len(columns)],
    )  # fmt: skip
    colours = _colours(columns)
    for name in columns:
        rows = [second for second in shown if second.column == name]
        at = [row.second + 0.5 for row in rows]
        load.plot(at, [row.running for row in rows], color=colours[name], label=name)
        load.plot(at, [row.waiting for row in rows], color=colours[name], linestyle=":", linewidth=1.2)
        speed.plot(at, [row.tokens for row in rows], color=colours[name])
        decoding = [row for row in rows if row.itl_p99 > 0]
        waits.plot(
            [r.second + 0.5 for r in decoding], [1e3 * r.itl_p99 for r in decoding], color=colours[name]
        )
    load.set_ylabel("requests running\n(dotted: waiting)", fontsize=11)
    load.legend(frameon=False, fontsize=11, loc="upper left")
    speed.set_ylabel("tokens in\neach second", fontsize=11)
    waits.set_yscale("log")
    waits.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    waits.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    waits.tick_params(axis="y", which="minor", labelsize=9)
    waits.set_ylabel("ITL p99, ms", fontsize=11)
    _strips(strip, shown, columns)
    load.set_title(title, loc="left", fontsize=13)
    for axes in (load, speed, waits):
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    for axes in (load, speed, waits, strip):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=10)
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    plt.close(figure)


def _strips(axes: Any, seconds: Sequence[Second], columns: Sequence[str]) -> None:
    """Draw a strip a column: how much of each second's steps speculated, and with how many drafts."""
    for row, name in enumerate(columns):
        for second in (s for s in seconds if s.column == name):
            base = float(row)
            for colour, share in _shares(second):
                axes.broken_barh([(second.second, 1.0)], (base, 0.8 * share), color=colour, linewidth=0)
                base += 0.8 * share
    axes.set_yticks([row + 0.4 for row in range(len(columns))], columns)
    axes.invert_yaxis()
    axes.set_xlabel(
        "seconds (strips: orange plain steps, blue speculative ones, darker with more drafts; grey: none)",
        fontsize=11,
    )


def _shares(second: Second) -> list[tuple[str, float]]:
    """Return (colour, part of the second's steps) of each number of drafts, the most drafts first."""
    steps = {int(drafts): count for drafts, count in second.by_drafts.items()}
    if not steps:  # a server that doesn't count them by drafts
        steps = {0: second.plain_steps or 0, len(_SPEC_STEPS): second.spec_steps or 0}
    total = sum(steps.values())
    if not total:
        return [(_IDLE, 1.0)]
    return [
        (_PLAIN_STEP if drafts == 0 else _SPEC_STEPS[min(drafts, len(_SPEC_STEPS)) - 1], count / total)
        for drafts, count in sorted(steps.items(), reverse=True)
    ]


def _colours(columns: Sequence[str]) -> dict[str, str]:
    further = iter(_FURTHER * len(columns))
    return {name: COLOURS.get(name) or next(further) for name in columns}
