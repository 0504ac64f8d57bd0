"""Print the tables of `docs/drafter.md` from the JSON that evaluate.py wrote.

python tables.py docs/data/drafter/results.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from evaluate import DRAFTS

ORDER = (
    "humaneval_chat",
    "humaneval_raw",
    "tasks",
    "chat_template",
    "chat_free",
    "chat",
    "model_turns",
    "tool",
    "all",
)


def lengths(entry: dict) -> str:
    return " / ".join(f"{entry[f'accept_length_{k}']:.2f}" for k in DRAFTS)


def main() -> None:
    results = json.loads(Path(sys.argv[1]).read_text())
    greedy, noisy = results["greedy"]["head_argmax"], results["t1"]["head_noise"]
    print(
        "| domain | sequences | greedy: a1 to a5 | k = 1 / 2 / 3 / 5 | T = 1: a1 to a5 | k = 1 / 2 / 3 / 5 |"
    )
    print("|-|-|-|-|-|-|")
    for domain in ORDER:
        g, t = greedy[domain], noisy[domain]
        places = [" ".join(f"{x:.3f}"[1:] for x in e["by_position"]) for e in (g, t)]
        print(f"| {domain} | {g['sequences']} | {places[0]} | {lengths(g)} | {places[1]} | {lengths(t)} |")
    print("\n| drafter, 3 drafts |", " | ".join(ORDER), "|")
    print("|-" * (len(ORDER) + 1) + "|")
    for mode, drafters in results.items():
        for drafter, groups in drafters.items():
            row = [f"{groups[d]['accept_length_3']:.2f}" for d in ORDER]
            print(f"| {mode}: {drafter} |", " | ".join(row), "|")


if __name__ == "__main__":
    main()
