"""Executors for the scripts here, built from the server's own flags, and what starting them took."""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmark.h200.shapes import Folders
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.executor_build import build_executor
from sglang.srt.managers.executor_settings import executor_args
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.server_args import ServerArgs

Shape = tuple[int, int, int]  # draft steps, topk, draft tokens
CHAIN: Shape = (3, 1, 4)
TREE: Shape = (2, 4, 16)


@dataclass(frozen=True, slots=True)
class Wanted:
    folders: Folders
    shape: Shape | None  # None: without the drafter
    device: str
    rows: int  # most that decode at once
    total_tokens: int | None  # None: as many as the memory holds
    context_len: int
    spec_rows: int = 0  # most that speculate at once
    graph_sizes: tuple[int, ...] = ()  # none: the server's default sizes up to ``rows``
    dtype: str = "auto"
    dummy: bool = False
    choices: Path | None = None  # of kernels, which a start of the same model has timed already
    cuda_graphs: bool = True
    extra: tuple[str, ...] = ()  # flags of the server as they are

    def flags(self) -> list[str]:
        words: dict[str, Any] = {
            "--model-path": self.folders.target,
            "--device": self.device,
            "--dtype": self.dtype,
            "--load-format": "dummy" if self.dummy else "auto",
            "--max-running-requests": self.rows,
            "--context-length": self.context_len,
        }
        if self.total_tokens is not None:
            words["--max-total-tokens"] = self.total_tokens
        if self.shape is not None:
            assert self.folders.drafter is not None
            steps, topk, nodes = self.shape
            words |= {
                "--speculative-algorithm": "EAGLE3",
                "--speculative-draft-model-path": self.folders.drafter,
                "--speculative-num-steps": steps,
                "--speculative-eagle-topk": topk,
                "--speculative-num-draft-tokens": nodes,
                "--speculative-capture-max-bs": self.spec_rows,
            }
        flags = [str(word) for pair in words.items() for word in pair] + list(self.extra)
        if self.device != "cuda":
            return flags
        if not self.cuda_graphs:
            return [*flags, "--disable-cuda-graph"]
        if self.choices is not None:
            flags += ["--kernel-choices-file", str(self.choices)]
        if self.graph_sizes:
            return [*flags, "--cuda-graph-bs", *map(str, self.graph_sizes)]
        return [*flags, "--cuda-graph-max-bs", str(self.rows)]


@contextmanager
def started(wanted: Wanted, out: Records, note: str) -> Iterator[InProcessExecutor]:
    """An executor that is gone, with its memory, afterwards. A record says how long its start took."""
    began, free = time.perf_counter(), _free_bytes(wanted.device)
    given = ServerArgs.from_command_line(wanted.flags())
    architecture = ModelConfig.from_folder(wanted.folders.target, wanted.context_len).architecture
    executor = build_executor(executor_args(given.resolve(architecture)))
    seconds = time.perf_counter() - began
    taken = free - _free_bytes(wanted.device)
    out.add("start", note=note, shape=wanted.shape, seconds=seconds, bytes=taken, info=asdict(executor.info))
    try:
        yield executor
    finally:
        executor.shutdown()
        del executor
        gc.collect()
        if wanted.device == "cuda":
            torch.cuda.empty_cache()


def _free_bytes(device: str) -> int:
    return int(torch.cuda.mem_get_info()[0]) if device == "cuda" else 0


@dataclass
class Records:
    """What was measured: lines of JSON as they come, and all of them for the tables."""

    file: Path | None
    device: str
    lines: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kind: str, **values: Any) -> None:
        # Through JSON and back, so that a table made from the file is the table made now.
        text = json.dumps({"kind": kind, "device": self.device} | values, default=str)
        self.lines.append(json.loads(text))
        print(text, flush=True)
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(text + "\n")


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--out", type=Path, help="append the records to this file, as JSON lines")
    parser.add_argument(
        "--tiny", action="store_true", help="small and short: does it run? figures mean nothing"
    )


def device_name(device: str) -> str:
    return str(torch.cuda.get_device_name()) if device == "cuda" else "cpu"
