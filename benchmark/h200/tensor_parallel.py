"""A model over several GPUs: links, sums, step times, equal tokens, and how a lost worker ends the server.

    python benchmark/h200/tensor_parallel.py --out tensor_parallel.jsonl
    python benchmark/h200/tensor_parallel.py --parts same kill        # some of it
    python benchmark/h200/tensor_parallel.py --parts sums steps --ways pushes flashinfer --experts
    python benchmark/h200/tensor_parallel.py --device cpu --tiny      # does it run? figures mean nothing

links: how long the look at the links takes, and what it finds. sums: ``all_reduce.py``. same: a small model
(dummy weights), token by token, over 1 GPU and over several, plain and speculating, while the ranks' states
are compared after every step; in float32 texts must be equal, in bfloat16 it is said how far they are, beside
how far one GPU is from itself at another batch size. kill: a worker is killed while steps run. steps: step
times of the Llama-3.1-8B shape over 1 and over several GPUs, plain and EAGLE-3 with simulated acceptance;
with ``--experts`` of Qwen3-30B-A3B's, plain: a layer of it launches the norm before its experts by itself.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.h200 import all_reduce
from benchmark.h200.executors import CHAIN, Records, Wanted, add_common_flags, device_name
from benchmark.h200.shapes import (
    EAGLE3_OF_8B,
    LLAMA_8B,
    QWEN3_MOE,
    TINY_MOE,
    Folders,
    write_folder,
    write_shapes,
)
from benchmark.h200.step_times import TINY, Filled, Sizes, decode_cases
from sgl_kernel.communication.flashinfer import load_kernels
from sglang.bench_one_batch import random_prompts
from sglang.bench_one_batch_cases import OneBatch, places_needed
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.link_report import check_flashinfer, check_links
from sglang.srt.managers.executor_settings import executor_args
from sglang.srt.managers.executor_start import start_executor
from sglang.srt.model_executor.executor import Executor
from sglang.srt.model_executor.multi_process_executor import MultiProcessExecutor, WorkerError
from sglang.srt.server_args import ServerArgs

PARTS = ("links", "sums", "same", "kill", "steps")
FULL = Sizes(
    plain=(1, 2, 4, 8, 16, 32, 64),
    spec=(1, 2, 4, 8, 16, 32, 64),
    alternate=(),
    tree=(),
    prefill=((1, 1024),),
    input_len=1024,
    output_len=96,
    startup=(64, 64),
)
SMALL: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
SMALL_TARGET = LLAMA_8B | SMALL
SMALL_DRAFTER = EAGLE3_OF_8B | SMALL | {"num_hidden_layers": 1, "draft_vocab_size": 8000}
LENS = {"plain": [0], "speculating": [3], "switching": [3, 0, 0, 3, 3]}
LIMIT_S = 5.0  # from a worker's death to the end
FLAGS_OF = {
    "one": (),
    "pushes": (),
    "nccl": ("--disable-custom-all-reduce",),
    "flashinfer": ("--enable-flashinfer-allreduce-fusion",),
}


@dataclass(frozen=True, slots=True)
class Setting:
    root: Path
    device: str
    tiny: bool
    ranks: int
    passes: int
    ways: tuple[str, ...]
    experts: bool
    out: Records

    @contextmanager
    def started(self, wanted: Wanted, ranks: int, note: str, failed: list[str]) -> Iterator[Executor]:
        """As a server starts it; what a worker's end has to say goes to ``failed``."""
        flags = [*wanted.flags(), "--tp-size", str(ranks)]
        given = ServerArgs.from_command_line(flags)
        architecture = ModelConfig.from_folder(wanted.folders.target, wanted.context_len).architecture
        began = time.perf_counter()
        executor = start_executor(executor_args(given.resolve(architecture)), "info", failed.append)
        seconds = time.perf_counter() - began
        self.out.add("start", note=note, ranks=ranks, seconds=seconds, info=asdict(executor.info))
        try:
            yield executor
        finally:
            executor.shutdown()

    def small(self, dtype: str) -> Wanted:
        if self.tiny:
            folders = write_shapes(self.root / "tiny", tiny=True)
        else:
            target = write_folder(self.root / "small", SMALL_TARGET)
            folders = Folders(target, write_folder(self.root / "small_drafter", SMALL_DRAFTER))
        rows = 4
        return Wanted(
            folders, CHAIN, self.device, rows, total_tokens=rows * 400, context_len=300, spec_rows=rows,
            dtype=dtype, dummy=True,
        )  # fmt: skip


def run_links(setting: Setting) -> bool:
    if setting.device != "cuda":
        print("links: none to look at on a CPU")
        return True
    report = check_links(setting.ranks, pushes=True)
    values = {name: getattr(report, name) for name in report.__struct_fields__}
    setting.out.add("links", ranks=setting.ranks, **values)
    right = report.copies and report.pushes
    if right and "flashinfer" in setting.ways:
        tried = check_flashinfer(setting.ranks)
        setting.out.add(
            "flashinfer", ranks=setting.ranks, right=tried.flashinfer, why=tried.why,
            seconds=tried.seconds,
        )  # fmt: skip
        right = tried.flashinfer
    return right


def run_sums(setting: Setting) -> bool:
    with_norms = "flashinfer" in setting.ways
    return all_reduce.run_all(setting.ranks, setting.device, setting.out.file, flashinfer=with_norms) == 0


def texts_of(executor: Executor, num_tokens: int, rows: int) -> dict[str, list[list[int]]]:
    """Of the first rows of one batch, in every mode."""
    found = {}
    prompts = random_prompts(executor.info.vocab_size, 4, 64)[:rows]
    places = places_needed(executor, 64, num_tokens)
    for mode, lens in LENS.items():
        batch = OneBatch(executor, prompts, places)
        batch.prefill()
        batch.decode_all(lens, num_tokens)
        found[mode] = [output[:num_tokens] for output in batch.outputs()]
    return found


def equal_share(texts: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """Of the tokens up to the first that differs."""
    same = total = 0
    for text, other in zip(texts, others, strict=True):
        differs = [i for i, pair in enumerate(zip(text, other, strict=True)) if pair[0] != pair[1]]
        same += differs[0] if differs else len(text)
        total += len(text)
    return same / total


def run_same(setting: Setting) -> bool:
    os.environ["SGLANG_CHECK_RANKS_AGREE"] = "1"
    num_tokens, right = 24 if setting.tiny else 96, True
    try:
        for dtype in ("float32", "bfloat16"):
            by_ranks, alone = {}, {}
            for ranks in (1, setting.ranks):
                failed: list[str] = []
                with setting.started(setting.small(dtype), ranks, f"same, {dtype}", failed) as executor:
                    by_ranks[ranks] = texts_of(executor, num_tokens, 4)
                    if ranks == 1:
                        alone = texts_of(executor, num_tokens, 1)
                right &= not failed
            for mode, texts in by_ranks[1].items():
                share = equal_share(texts, by_ranks[setting.ranks][mode])
                itself = equal_share(texts[:1], alone[mode])
                right &= dtype != "float32" or share == 1.0
                setting.out.add("same", dtype=dtype, mode=mode, equal=share, one_gpu_other_batch=itself)
    finally:
        del os.environ["SGLANG_CHECK_RANKS_AGREE"]
    return right


def run_kill(setting: Setting) -> bool:
    """The last worker, in the middle of steps that others wait for."""
    failed: list[str] = []
    ended = threading.Event()
    with setting.started(setting.small("float32"), setting.ranks, "kill", failed) as executor:
        assert isinstance(executor, MultiProcessExecutor)
        prompts = random_prompts(executor.info.vocab_size, 4, 64)
        batch = OneBatch(executor, prompts, places_needed(executor, 64, 200))
        batch.prefill()
        victim, moment = executor.children[-1], [0.0]

        def kill() -> None:
            time.sleep(0.05)
            moment[0] = time.monotonic()
            os.kill(victim.process.pid, signal.SIGKILL)

        threading.Thread(target=kill).start()
        error = ""
        try:
            while True:
                batch.decode_all([3, 0], 200)
                batch = OneBatch(executor, prompts, places_needed(executor, 64, 200))
                batch.prefill(cached=True)
        except WorkerError as caught:
            error = str(caught)
        seen = time.monotonic() - moment[0]
        while not failed and time.monotonic() - moment[0] < 2 * LIMIT_S:
            ended.wait(0.01)
        told = time.monotonic() - moment[0]
        gone = all(child.exit_code() is not None for child in executor.children)
    right = bool(failed) and told < LIMIT_S and victim.name in error and gone
    setting.out.add("kill", error=error, step_failed_s=seen, server_told_s=told, all_gone=gone, right=right)
    return right


def run_steps(setting: Setting) -> bool:
    sizes = TINY if setting.tiny else FULL
    if setting.experts:
        folders = Folders(write_folder(setting.root / "moe", TINY_MOE if setting.tiny else QWEN3_MOE), None)
        by_mode = {"plain": sizes.plain}
    else:
        folders = write_shapes(setting.root / "8b", setting.tiny)
        by_mode = {"plain": sizes.plain, "spec": sizes.spec}
    rows, right = max(sizes.plain), True
    slack = 2 * sum(CHAIN)
    per_row = sizes.input_len + sizes.output_len + slack
    os.environ["SGLANG_SIMULATE_ACC_LEN"] = "2.5"
    try:
        for way in setting.ways:
            ranks = 1 if way == "one" else setting.ranks
            wanted = Wanted(
                folders, CHAIN if folders.drafter else None, setting.device, rows,
                total_tokens=rows * per_row, context_len=per_row,
                spec_rows=max(sizes.spec), graph_sizes=sizes.plain, dummy=True,
                choices=setting.root / f"choices_{ranks}.json", extra=FLAGS_OF[way],
            )  # fmt: skip
            failed: list[str] = []
            with setting.started(wanted, ranks, f"steps, {way}", failed) as executor:
                filled = Filled(executor, sizes, rows)
                decode_cases(filled, by_mode, setting.passes, setting.out, way=way, ranks=ranks)
            right &= not failed
    finally:
        del os.environ["SGLANG_SIMULATE_ACC_LEN"]
    print("\n".join(step_table(setting.out.lines, setting.ways)))
    return right


def step_table(lines: Sequence[dict[str, Any]], ways: Sequence[str]) -> list[str]:
    """Milliseconds from one step's end to the next one's, the better of the passes."""
    found = [line for line in lines if line["kind"] == "decode"]
    heads = [f"{mode}, {way}" for mode in ("plain", "spec") for way in ways]
    rows = [f"| rows | {' | '.join(f'{head}, ms' for head in heads)} |", "|---|" + "---|" * len(heads)]
    for batch in sorted({line["batch"] for line in found}):
        cells = []
        for mode in ("plain", "spec"):
            for way in ways:
                labels = {"mode": mode, "way": way, "batch": batch}
                times = [x["wall_step_s"] for x in found if all(x[k] == v for k, v in labels.items())]
                cells.append(f"{1e3 * min(times):.2f}" if times else "")
        rows.append(f"| {batch} | {' | '.join(cells)} |")
    return rows


RUNS: dict[str, Callable[[Setting], bool]] = {
    "links": run_links, "sums": run_sums, "same": run_same, "kill": run_kill, "steps": run_steps,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_flags(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--experts", action="store_true", help="the part steps with a mixture of experts")
    parser.add_argument("--passes", type=int, default=1)
    ways = ("one", "pushes", "nccl")
    parser.add_argument(
        "--ways", nargs="+", choices=tuple(FLAGS_OF), default=ways,
        help="of the part steps; flashinfer: its kernels among those tried, in the part sums too",
    )  # fmt: skip
    args = parser.parse_args(argv)
    out, failed = Records(args.out, device_name(args.device)), []
    if "flashinfer" in args.ways and args.device == "cuda":
        load_kernels(build=True)  # a server takes them only where they are compiled
    with tempfile.TemporaryDirectory(prefix="tensor_parallel_") as root:
        setting = Setting(
            Path(root), args.device, args.tiny, args.ranks, args.passes, tuple(args.ways), args.experts, out
        )
        for part in args.parts:
            began = time.perf_counter()
            if not RUNS[part](setting):
                failed.append(part)
            print(f"{part}: {time.perf_counter() - began:.1f} s", flush=True)
    print(f"failed: {', '.join(failed)}" if failed else f"all of it is right: {', '.join(args.parts)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
