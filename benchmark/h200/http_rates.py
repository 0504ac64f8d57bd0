"""Tokens per second over HTTP, scheduler and all, beside those of static batches on the same GPU.

    python benchmark/h200/http_rates.py --out http_rates.jsonl
    python benchmark/h200/http_rates.py --beside step_times.jsonl  # of step_times.py, not own batches

A server of the Llama-3.1-8B shape with dummy weights and an EAGLE-3 head, simulated acceptance, no prefix
cache. Its threshold makes it plain (0) or speculative; all streams begin at once, 1024 tokens in and 256
out, greedy. A rate is tokens over time, from when every stream has its first token until one has ended.
When the server is gone, the same batches run without it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.h200.executors import CHAIN, Records, Wanted, add_common_flags, device_name, started
from benchmark.h200.http_streams import Wave, run_wave
from benchmark.h200.http_tables import eager_steps, tables, wrong_modes
from benchmark.h200.plain_tokenizer import write_tokenizer
from benchmark.h200.shapes import Folders, write_shapes
from benchmark.spec_toggle import client
from benchmark.spec_toggle.rates import add_spec_counts, spec_count, wave_rate
from benchmark.spec_toggle.servers import Server, exit_on_sigterm, running_server, wait_until_healthy
from sglang.bench_one_batch import random_prompts
from sglang.bench_one_batch_cases import OneBatch, decode_times, places_needed
from sglang.srt.configs.model_config import ModelConfig

MODES = {"plain": 0, "spec": CHAIN[0]}  # drafts
THRESHOLD = "speculative_disable_bs_threshold"
START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Sizes:
    rows: tuple[int, ...]
    input_len: int
    output_len: int
    host_rows: int  # one plain run of so many streams, for the host's time a step
    host_output_len: int


FULL = Sizes(rows=(1, 16, 64), input_len=1024, output_len=256, host_rows=128, host_output_len=64)
TINY = Sizes(rows=(1, 2), input_len=16, output_len=120, host_rows=4, host_output_len=40)


@dataclass(frozen=True, slots=True)
class Look:
    """The server at one moment."""

    moment: float
    state: dict[str, Any]
    cpu_s: dict[str, float]  # by process


class Driver:
    """Runs waves of streams against a server."""

    def __init__(self, server: Server, vocab_size: int, sizes: Sizes, out: Records) -> None:
        self._url, self._vocab_size, self._sizes, self._out = server.base_url, vocab_size, sizes, out
        launcher = psutil.Process(server.process.pid)
        self._processes = {"client": psutil.Process(), "http": launcher}
        for child in launcher.children():
            name = next(n for n in ("scheduler", "detokenizer") if n in " ".join(child.cmdline()))
            self._processes[name] = child

    async def run(self, passes: int) -> None:
        sizes, most = self._sizes, max(self._sizes.rows)
        for number in range(passes):
            for mode in MODES:
                await self._choose(mode, most)
                for rows in sizes.rows:
                    await self._wave(mode, rows, sizes.output_len, number=number)
        if sizes.host_rows:
            await self._choose("plain", most)
            await self._wave("plain", sizes.host_rows, sizes.host_output_len, number=0)

    async def _choose(self, mode: str, most: int) -> None:
        async with client.open_client(self._url) as http:
            await client.set_internal_state(http, {THRESHOLD: most if MODES[mode] else 0})

    async def _wave(self, mode: str, rows: int, output_len: int, number: int) -> None:
        prompts = random_prompts(self._vocab_size, rows, self._sizes.input_len)
        sampling = {"temperature": 0.0, "max_new_tokens": output_len, "ignore_eos": True}
        async with client.open_client(self._url) as http:

            async def look() -> Look:
                state = await client.internal_state(http)
                return Look(time.perf_counter(), state, self._cpu_seconds())

            await client.internal_state(http)  # so that the connection is there
            wave = await run_wave(self._url, prompts, sampling, look)
            # The step that was on its way when the last stream ended has been counted too.
            final = await client.internal_state(http)
        figures = figures_of(wave) | {"eager_steps": final.get("cuda_graph_eager_steps")}
        self._out.add("http", batch=rows, mode=mode, number=number, output_len=output_len, **figures)

    def _cpu_seconds(self) -> dict[str, float]:
        times = {name: process.cpu_times() for name, process in self._processes.items()}
        return {name: t.user + t.system for name, t in times.items()}


def figures_of(wave: Wave) -> dict[str, Any]:
    """Rate and acceptance of the streams; of the time in which all ran, what the server's parts did."""
    before, after = wave.before, wave.after
    rate = wave_rate(wave.traces)
    accepted = add_spec_counts(spec_count(trace.meta) for trace in wave.traces)
    tokens_per_row = accepted.accept_length or 1.0
    seconds = after.moment - before.moment
    host = {k: v - before.state["decode_host_time"][k] for k, v in after.state["decode_host_time"].items()}
    steps = {k: v - before.state["decode_steps"][k] for k, v in after.state["decode_steps"].items()}
    return {
        "tokens_per_s": rate.decode_rate,
        "tokens_per_row": tokens_per_row,
        "wall_step_s": len(wave.traces) * tokens_per_row / rate.decode_rate if rate.decode_rate else 0.0,
        "first_token_s": max(trace.times[0] - trace.started for trace in wave.traces),
        "steps": steps,
        "retractions": sum(trace.meta["num_retractions"] for trace in wave.traces),
        "schedule_us": 1e6 * host["schedule_s"] / host["steps"] if host["steps"] else None,
        "launch_us": 1e6 * host["launch_s"] / host["steps"] if host.get("launch_s") else None,
        "cpu_share": {name: (s - before.cpu_s[name]) / seconds for name, s in after.cpu_s.items()},
    }


@dataclass(frozen=True, slots=True)
class Setting:
    folders: Folders
    tokenizer: Path
    sizes: Sizes
    wanted: Wanted
    passes: int
    out: Records
    log_dir: Path

    @property
    def vocab_size(self) -> int:
        return ModelConfig.from_folder(self.folders.target).vocab_size

    def server_flags(self, more: Sequence[str]) -> list[str]:
        return [
            *self.wanted.flags(), "--tokenizer-path", str(self.tokenizer), "--disable-radix-cache",
            "--served-model-name", "dummy", "--enable-metrics", *more,
        ]  # fmt: skip

    def measure_server(self, more: Sequence[str]) -> None:
        began = time.perf_counter()
        with running_server("server", self.server_flags(more), self.log_dir) as server:
            wait_until_healthy(server, START_TIMEOUT_S)
            self.out.add("server", seconds=time.perf_counter() - began, flags=list(more))
            asyncio.run(Driver(server, self.vocab_size, self.sizes, self.out).run(self.passes))

    def measure_batches(self) -> None:
        """What bench_one_batch does, from pages that are filled once."""
        sizes, most = self.sizes, max(self.sizes.rows)
        with started(self.wanted, self.out, "batches") as executor:
            prompts = random_prompts(executor.info.vocab_size, most, sizes.input_len)
            places = places_needed(executor, sizes.input_len, sizes.output_len)
            OneBatch(executor, prompts, places).prefill()
            for number in range(self.passes):
                for mode, draft_len in MODES.items():
                    for rows in sizes.rows:
                        batch = OneBatch(executor, prompts[:rows], places)
                        batch.prefill(cached=True)
                        times = decode_times(batch.decode_all([draft_len], sizes.output_len))
                        assert times is not None
                        labels = {"batch": rows, "mode": mode, "drafter": True, "number": number}
                        self.out.add("decode", **labels, **asdict(times))


def wanted_of(folders: Folders, sizes: Sizes, device: str, choices: Path) -> Wanted:
    """For the server and for the executor beside it; the second start takes over the first one's kernels."""
    slack = 32  # places of the drafts of the steps in flight
    cases = [(rows, sizes.output_len) for rows in sizes.rows] + [(sizes.host_rows, sizes.host_output_len)]
    return Wanted(
        folders,
        CHAIN,
        device,
        rows=max(rows for rows, _ in cases),
        total_tokens=max(rows * (sizes.input_len + length + slack) for rows, length in cases),
        context_len=sizes.input_len + max(length for _, length in cases) + slack,
        spec_rows=max(sizes.rows),
        graph_sizes=tuple(sorted({rows for rows, _ in cases if rows})),
        dummy=True,
        choices=choices,
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    os.environ["SGLANG_SIMULATE_ACC_LEN"] = str(args.acc_len)
    out = Records(args.out, device_name(args.device))
    sizes = TINY if args.tiny else FULL
    with tempfile.TemporaryDirectory(prefix="http_rates_") as name:
        root = Path(name)
        folders = write_shapes(root, args.tiny)
        vocab_size = ModelConfig.from_folder(folders.target).vocab_size
        tokenizer = args.tokenizer_path or write_tokenizer(root / "tokenizer", vocab_size)
        wanted = wanted_of(folders, sizes, args.device, root / "choices.json")
        setting = Setting(folders, tokenizer, sizes, wanted, args.passes, out, root)
        setting.measure_server(args.server_flags)
        if args.beside is None:
            setting.measure_batches()
    beside = [] if args.beside is None else [json.loads(x) for x in args.beside.read_text().splitlines()]
    lines = out.lines + [line for line in beside if line["kind"] == "decode"]
    print("\n".join(tables(lines)))
    faults = [*eager_steps(lines), *wrong_modes(lines)]
    print("\n".join(f"wrong: {fault}" for fault in faults), end="\n" if faults else "")
    return 1 if faults else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_flags(parser)
    parser.add_argument("--beside", type=Path, help="records of step_times.py to compare with")
    parser.add_argument("--passes", type=int, default=2, help="runs of each case; the better one counts")
    parser.add_argument("--acc-len", type=float, default=2.5, help="simulated tokens of a speculative step")
    parser.add_argument("--tokenizer-path", type=Path, help="default: a made-up one, written for the run")
    parser.add_argument(
        "--server-flags", nargs=argparse.REMAINDER, default=[], help="all that follows goes to the server"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
