"""Step times of the Llama-3.1-8B shape with dummy weights, beside the peer's on the same GPU.

    python benchmark/h200/step_times.py --out step_times.jsonl
    python benchmark/h200/step_times.py --table step_times.jsonl     # the tables again

One executor without a drafter, one with an EAGLE-3 chain of 3 drafts, one with a tree; prompts of 1024
tokens, 256 outputs a row. Their pages are filled once; each case then begins from them. Prefill is timed with
the first two of them in one process, in turn: the GPU's clock, which moves it by 10 %, is the same for both.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.h200.executors import (
    CHAIN,
    TREE,
    Records,
    Shape,
    Wanted,
    add_common_flags,
    device_name,
    started,
)
from benchmark.h200.shapes import Folders, write_shapes
from benchmark.h200.step_tables import tables
from sglang.bench_one_batch import random_prompts
from sglang.bench_one_batch_cases import OneBatch, decode_times, places_needed
from sglang.srt.model_executor.executor import Executor

MODES = {"plain": [0], "spec": [3], "alternate": [3, 0]}  # draft lengths in turn
PARTS = ("plain", "chain", "tree", "start", "prefill")
PREFILL_PASSES = 3  # times the passes of decode cases: they are short


@dataclass(frozen=True, slots=True)
class Sizes:
    plain: tuple[int, ...]
    spec: tuple[int, ...]
    alternate: tuple[int, ...]
    tree: tuple[int, ...]
    prefill: tuple[tuple[int, int], ...]  # rows, prompt tokens
    input_len: int
    output_len: int
    startup: tuple[int, int]  # rows of plain graphs, of speculative ones


FULL = Sizes(
    plain=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    spec=(1, 2, 4, 8, 16, 32, 64, 128),
    alternate=(1, 2, 4, 8, 16, 32, 64),
    tree=(1, 8),
    prefill=((1, 1024), (8, 1024), (32, 1024), (1, 16384)),
    input_len=1024,
    output_len=256,
    startup=(128, 64),
)
TINY = Sizes(
    plain=(1, 2, 4),
    spec=(1, 2),
    alternate=(1, 2),
    tree=(1, 2),
    prefill=((1, 16), (2, 16), (1, 64)),
    input_len=16,
    output_len=12,
    startup=(4, 2),
)


class Filled:
    """An executor whose first pages hold the prompts of the largest batch."""

    def __init__(self, executor: Executor, sizes: Sizes, rows: int) -> None:
        self._executor, self._sizes = executor, sizes
        self._prompts = random_prompts(executor.info.vocab_size, rows, sizes.input_len)
        self._places = places_needed(executor, sizes.input_len, sizes.output_len)
        self._batch(rows).prefill()

    def decode(self, rows: int, draft_lens: Sequence[int], out: Records, **labels: object) -> None:
        batch = self._batch(rows)
        batch.prefill(cached=True)
        times = decode_times(batch.decode_all(draft_lens, self._sizes.output_len))
        assert times is not None
        out.add("decode", batch=rows, **labels, **asdict(times))

    def _batch(self, rows: int) -> OneBatch:
        return OneBatch(self._executor, self._prompts[:rows], self._places)


def prefill_cases(by_drafter: dict[bool, Executor], sizes: Sizes, passes: int, out: Records) -> None:
    """Each shape in every executor in turn; the first round is not counted: kernels may be compiled in it."""
    for rows, length in sizes.prefill:
        for number in range(-1, passes):
            for drafter, executor in by_drafter.items():
                prompts = random_prompts(executor.info.vocab_size, rows, length)
                time = OneBatch(executor, prompts, length + 2).prefill()
                if number >= 0:
                    out.add(
                        "prefill",
                        batch=rows,
                        input_len=length,
                        number=number,
                        drafter=drafter,
                        **asdict(time),
                    )


def decode_cases(
    filled: Filled, sizes: dict[str, tuple[int, ...]], passes: int, out: Records, **labels: object
) -> None:
    for number in range(passes):
        for mode, draft_lens in MODES.items():
            for rows in sizes.get(mode, ()):
                filled.decode(rows, draft_lens, out, mode=mode, number=number, **labels)


@dataclass(frozen=True, slots=True)
class Setting:
    folders: Folders
    sizes: Sizes
    device: str
    passes: int
    out: Records
    choices: Path

    def wanted(self, shape: Shape | None, rows: int, spec_rows: int = 0) -> Wanted:
        sizes = self.sizes
        slack = 2 * sum(shape) if shape else 2
        per_row = sizes.input_len + sizes.output_len + slack
        prefill = max(r * (n + slack) for r, n in sizes.prefill)
        return Wanted(
            self.folders,
            shape,
            self.device,
            rows,
            total_tokens=max(rows * per_row, prefill),
            context_len=max(per_row, *(n + slack for _, n in sizes.prefill)),
            spec_rows=spec_rows,
            graph_sizes=tuple(n for n in sizes.plain if n <= rows),
            dummy=True,
            choices=self.choices,
        )

    def run(self, part: str) -> None:
        runs = {
            "plain": self._run_plain, "chain": self._run_chain, "tree": self._run_tree,
            "start": self._run_start, "prefill": self._run_prefill,
        }  # fmt: skip
        runs[part]()

    def _run_plain(self) -> None:
        rows = max(self.sizes.plain)
        with started(self.wanted(None, rows), self.out, "plain") as executor:
            filled = Filled(executor, self.sizes, rows)
            decode_cases(filled, {"plain": self.sizes.plain}, self.passes, self.out, drafter=False)

    def _run_chain(self) -> None:
        sizes, rows = self.sizes, max(self.sizes.plain)
        with started(self.wanted(CHAIN, rows, max(sizes.spec)), self.out, "chain") as executor:
            by_mode = {"plain": sizes.plain, "spec": sizes.spec, "alternate": sizes.alternate}
            filled = Filled(executor, sizes, rows)
            decode_cases(filled, by_mode, self.passes, self.out, drafter=True)

    def _run_tree(self) -> None:
        rows = max(self.sizes.tree)
        with started(self.wanted(TREE, rows, rows), self.out, "tree") as executor:
            filled = Filled(executor, self.sizes, rows)
            for number in range(self.passes):
                for rows in self.sizes.tree:
                    filled.decode(rows, [TREE[0]], self.out, mode="tree", number=number, drafter=True)

    def _run_start(self) -> None:
        """The start of a server with both sets of graphs, at the default sizes, all kernels timed anew."""
        rows, spec_rows = self.sizes.startup
        wanted = replace(self.wanted(CHAIN, rows, spec_rows), graph_sizes=(), choices=None)
        with started(wanted, self.out, "startup"):
            pass

    def _run_prefill(self) -> None:
        rows = max(rows for rows, _ in self.sizes.prefill)
        small = replace(self.sizes, plain=(1,), output_len=1)  # no decode step is timed here
        of = replace(self, sizes=small)
        with (
            started(of.wanted(None, rows), self.out, "prefill") as plain,
            started(of.wanted(CHAIN, rows, 1), self.out, "prefill with a drafter") as drafting,
        ):
            passes = PREFILL_PASSES * self.passes
            prefill_cases({False: plain, True: drafting}, self.sizes, passes, self.out)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_flags(parser)
    parser.add_argument("--table", type=Path, help="make the tables from this file and run nothing")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--passes", type=int, default=2, help="runs of each case; the better one counts")
    parser.add_argument("--acc-len", type=float, default=2.5, help="simulated tokens of a speculative step")
    args = parser.parse_args(argv)
    if args.table is not None:
        print("\n".join(tables(list(_read(args.table)))))
        return 0
    os.environ["SGLANG_SIMULATE_ACC_LEN"] = str(args.acc_len)
    out = Records(args.out, device_name(args.device))
    with tempfile.TemporaryDirectory(prefix="shapes_") as root:
        folders = write_shapes(Path(root), args.tiny)
        sizes, choices = TINY if args.tiny else FULL, Path(root) / "choices.json"
        setting = Setting(folders, sizes, args.device, args.passes, out, choices)
        for part in args.parts:
            setting.run(part)
    print("\n".join(tables(out.lines)))
    return 0


def _read(file: Path) -> Iterator[dict[str, object]]:
    for line in file.read_text().splitlines():
        yield json.loads(line)


if __name__ == "__main__":
    sys.exit(main())
