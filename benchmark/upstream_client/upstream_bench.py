"""PyPI's SGLang client (``sglang.benchmark.serving``) against this server: upstream_bench.py --python PYTHON

Its backends sglang, sglang-oai, sglang-oai-chat and vllm, its data sets random and sharegpt (the file is made
of the prompts that ship here). Every request must be answered with as many tokens as the client asked for,
and its SGLang backends must find the accept length. `make upstream-bench` makes the environment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmark"))

from doc_section import replace_section  # noqa: E402

from sglang.benchmark.dataset_shipped import DATA  # noqa: E402
from sglang.benchmark.server_process import free_port, running_server  # noqa: E402

BACKENDS: Final = ("sglang", "sglang-oai", "sglang-oai-chat", "vllm")
DATASETS: Final = ("random", "sharegpt")
_FIGURES: Final = ("completed", "total_input_tokens", "total_output_tokens", "output_throughput")
_TIMES: Final = ("median_ttft_ms", "median_tpot_ms", "p99_itl_ms")


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="upstream") as folder:
        conversations = Path(folder) / "sharegpt.json"
        conversations.write_text(json.dumps(list(_conversations())))
        port = free_port()
        with running_server(["--port", str(port), *options.server], "127.0.0.1", port) as url:
            runs = [
                _run(backend, dataset, conversations, url, options)
                for dataset in DATASETS
                for backend in BACKENDS
            ]
    table = _table(runs, options)
    print(table)
    if options.update_doc is not None:
        replace_section(options.update_doc, "upstream-bench", table)
    faults = [fault for run in runs for fault in _faults(run, options)]
    print("\n".join(faults), file=sys.stderr)
    return 1 if faults else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # The client runs in a folder of its own.
    python = "of the environment with PyPI's sglang"
    parser.add_argument("--python", type=lambda word: Path(word).absolute(), required=True, help=python)
    parser.add_argument("--num-prompts", type=int, default=12, help="of each run (default: 12)")
    parser.add_argument("--output-len", type=int, default=32, help="tokens of each answer (default: 32)")
    parser.add_argument("--update-doc", type=Path, help="document that gets the table")
    parser.add_argument("server", nargs="*", help="flags of the server, after --")
    return parser.parse_args()


def _conversations() -> Iterator[dict[str, Any]]:
    """As ShareGPT's file has them. Of the answers the client uses the length alone."""
    answers = [json.loads(line)["code"] for line in (DATA / "humaneval.jsonl").read_text().splitlines()]
    questions = [json.loads(line)["question"] for line in (DATA / "chat.jsonl").read_text().splitlines()]
    for number, answer in enumerate(answers):
        said = [("human", questions[number % len(questions)]), ("gpt", answer)]
        yield {"conversations": [{"from": who, "value": text} for who, text in said]}


def _run(
    backend: str, dataset: str, conversations: Path, url: str, options: argparse.Namespace
) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/server_info") as answer:
        tokenizer = json.load(answer)["tokenizer_path"]
    output = conversations.with_name(f"{dataset}_{backend}.jsonl")
    lengths = ["--sharegpt-output-len", str(options.output_len)]
    if dataset == "random":
        lengths = ["--random-input-len", "64", "--random-output-len", str(options.output_len)]
        lengths += ["--random-range-ratio", "1.0"]
    words = [str(options.python), str(Path(__file__).with_name("serve_bench.py")), "--backend", backend]
    words += ["--base-url", url, "--dataset-name", dataset, "--dataset-path", str(conversations)]
    words += ["--tokenizer", tokenizer, "--num-prompts", str(options.num_prompts), *lengths]
    words += ["--max-concurrency", "4", "--output-file", str(output), "--disable-tqdm"]
    client = subprocess.run(
        words,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        cwd=conversations.parent,
        stdout=2,
    )
    line = output.read_text().splitlines()[-1] if output.exists() else "{}"
    return {**json.loads(line), "exit_code": client.returncode, "backend": backend, "dataset": dataset}


def _faults(run: dict[str, Any], options: argparse.Namespace) -> Iterator[str]:
    where = f"{run['backend']} with {run['dataset']}"
    if run["exit_code"]:
        yield f"{where}: the client ended with code {run['exit_code']}"
    for name, wanted in (
        ("completed", options.num_prompts),
        ("total_output_tokens", options.num_prompts * options.output_len),
    ):
        if run.get(name) != wanted:
            yield f"{where}: {name} is {run.get(name)}, not {wanted}"
    looks_for_it = run["backend"].startswith("sglang")
    if looks_for_it and not run.get("accept_length") and "NONE" not in options.server:
        yield f"{where}: the client found no accept length"
    if not run.get("server_info"):
        yield f"{where}: the client got no /server_info"


def _table(runs: list[dict[str, Any]], options: argparse.Namespace) -> str:
    titles = (
        "answered",
        "input tokens",
        "output tokens",
        "tok/s",
        "TTFT p50 ms",
        "TPOT p50 ms",
        "ITL p99 ms",
    )
    lines = [
        f"{options.num_prompts} requests of {options.output_len} tokens in each run, 4 at a time, on"
        f" {os.cpu_count()} cores that other work may have shared.",
        "",
        f"| backend | data set | {' | '.join(titles)} | accept length |",
        f"|-|-|{'-|' * (len(titles) + 1)}",
    ]
    for run in runs:
        figures = [_shown(run.get(name)) for name in (*_FIGURES, *_TIMES, "accept_length")]
        lines.append(f"| {run['backend']} | {run['dataset']} | {' | '.join(figures)} |")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
