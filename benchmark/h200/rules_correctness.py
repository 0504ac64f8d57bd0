"""Are rules about what may come right on the GPU: grammars, penalties, bad words, thinking, logit processors?

    python benchmark/h200/rules_correctness.py --out rules_correctness.jsonl
    python benchmark/h200/rules_correctness.py --device cpu --tiny       # does it run?

A small random Llama with an EAGLE-3 drafter, chains and trees, through the scheduler and an executor as a
server builds it. Every rule, greedy and seeded, in one batch with rows that have none; three batches: rules
that the device knows alone, rules that need masks of the host, and custom logit processors.

rules  the batch in plain, speculative and alternating steps. Every id is beside the choice that plain PyTorch
       on the CPU makes of the text before it, in float32: ``differ`` counts places where another id is the
       best there, ``short`` is how far the chosen one is below it. It fails where something forbidden came, a
       text is not its grammar's, decode steps ran without a graph though no processor forces them to, or
       something waited for the GPU; in float32 also where ``short`` is more than rounding, so texts of two
       modes differ at near ties alone.
cost   of a decode step of a vocabulary of 128,256: milliseconds on the device, and from result to result.

The exit code is 1 if a part fails, or had to be left out.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test"))

from helpers.kernel_executor import kernel_executor
from helpers.replaying_capture import ReplayingCapture
from helpers.tiny_models import write_tiny_eagle3, write_tiny_llama

from benchmark.h200 import rules_cost
from benchmark.h200.executors import Records, Wanted, add_common_flags, device_name, started
from benchmark.h200.rules_reference import BROKEN, Judged, Reference, told_error
from benchmark.h200.rules_runs import MODES, Answer, Run, Step, waits_noted
from benchmark.h200.rules_world import (
    BATCHES,
    EOS,
    FREE,
    World,
    bare_requests,
    compile_all,
    compiler,
    missing,
    requests_of,
)
from benchmark.h200.shapes import Folders
from sglang.srt.constrained.grammar import spec_of
from sglang.srt.managers.io_struct import GenerateRequest
from sglang.srt.model_executor.graph_sizes import GraphSizes
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.model_executor.split_graphs import SplitGraphs, split_sizes
from sglang.srt.model_executor.step_graphs import DecodeSteps, StepGraphs
from sglang.srt.sampling import logit_edits

ROWS: Final = 32
GRAPH_SIZES: Final = (1, 8, ROWS)
SHAPES: Final = {"chain": (3, 1, 4), "tree": (3, 4, 8)}
BACKENDS: Final = {"chain": "xgrammar", "tree": "llguidance"}
ROUNDING: Final = 1e-3  # of a float32 score
HIDDEN: Final = 1e-3  # of the hidden states' spread
SIZES: Final[dict[str, Any]] = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024,
}  # fmt: skip
TINY: Final[dict[str, Any]] = {"num_hidden_layers": 4, "max_position_embeddings": 1024}


@dataclass
class Setting:
    world: World
    folders: Folders
    device: str
    out: Records
    choices: Path
    references: dict[str, Reference] = field(default_factory=dict)  # by grammar backend
    left_out: list[str] = field(default_factory=list)

    @property
    def context(self) -> int:
        return max(self.world.prompt_len, *FREE.values()) + self.world.output_len + 16

    @contextmanager
    def executor(self, shape: str, dtype: str, on_cpu: bool = False) -> Iterator[InProcessExecutor]:
        total = ROWS * self.context
        if self.device == "cpu" and not on_cpu:
            folders = self.folders
            made = kernel_executor(
                folders.target, folders.drafter, SHAPES[shape], 1, ROWS, total, self.context
            )
            _capture(made, SHAPES[shape][0])
            try:
                yield made
            finally:
                made.shutdown()
            return
        wanted = Wanted(
            self.folders, SHAPES[shape], "cpu" if on_cpu else self.device, ROWS, total, self.context, ROWS,
            graph_sizes=GRAPH_SIZES, dtype=dtype, choices=self.choices,
        )  # fmt: skip
        with started(wanted, self.out, f"{shape}, {dtype}, {wanted.device}") as executor:
            yield executor

    def reference(self, backend: str) -> Reference:
        if backend not in self.references:
            reason = missing(backend)
            grammars = compiler(self.world, backend) if reason is None else None
            if reason is not None:
                self.left_out.append(f"grammars: without {reason}")
            self.references[backend] = Reference(self.world, self.folders.target, grammars, self.context)
        return self.references[backend]

    def run(
        self, executor: InProcessExecutor, mode: str, messages: Sequence[GenerateRequest], backend: str
    ) -> Run:
        reference = self.reference(backend)
        run = Run(executor, MODES[mode](), self.world.decode, reference.grammars, (EOS,))
        run.all_of(messages)
        return run

    def batches(self, bare: Mapping[str, Sequence[int]], backend: str) -> dict[str, list[GenerateRequest]]:
        """Those that can be run with what is installed."""
        names = [name for name in BATCHES if name != "processors" or missing("dill") is None]
        grammars = self.reference(backend).grammars
        made = {}
        for name in names:
            messages = requests_of(self.world, name, bare)
            if grammars is None:
                messages = [m for m in messages if spec_of(m.sampling) is None]
            else:
                compile_all(grammars, messages)
            made[name] = messages
        return made


def _capture(executor: InProcessExecutor, draft_len: int) -> None:
    """Graphs as on a GPU, but for what a replay is."""
    worker = executor.worker
    config, decode_steps = worker.config, worker.decode_steps
    assert decode_steps is not None
    sizes, step = GraphSizes({0: GRAPH_SIZES, draft_len: GRAPH_SIZES}, pad=True), decode_steps.step
    graphs = StepGraphs(step, ReplayingCapture(), sizes, config.spec, config.device)
    graphs.capture_all()
    split = SplitGraphs(
        step, ReplayingCapture(), split_sizes(sizes), config.spec, config.vocab_size, config.device
    )
    split.capture_all()
    worker._decode_steps = DecodeSteps(step, graphs, config.device, split)


@dataclass(frozen=True, slots=True)
class Batch:
    """Of one executor: what it is asked, what a CPU said, and what plain steps did."""

    setting: Setting
    shape: str
    dtype: str
    name: str
    messages: list[GenerateRequest]
    of_cpu: dict[str, Answer]
    plain: dict[str, Answer] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        return self.dtype == "float32"

    def check(self, executor: InProcessExecutor, mode: str) -> bool:
        setting, began = self.setting, time.perf_counter()
        with waits_noted(setting.device) as waits:
            run = setting.run(executor, mode, self.messages, BACKENDS[self.shape])
        seconds = time.perf_counter() - began
        if mode == "plain":
            self.plain.update(run.answers)
        faults, values = self._judged(run.answers)
        values |= self._beside(run.answers, faults)
        values |= _of_steps(run.steps)
        if mode != "plain" and values["tokens_a_row"] <= 1:
            faults.append("no draft was accepted")
        if self.name != "processors" and values["in_graphs"] < 1:
            faults.append("steps without a graph")
        if self.name != "processors" and waits:
            faults.append("something waited for the GPU")
        setting.out.add(
            "rules", shape=self.shape, dtype=self.dtype, batch=self.name, mode=mode, ok=not faults,
            faults=faults, texts=len(self.messages), **values, waits=len(waits),
            where=sorted(set(waits))[:5], seconds=seconds,
        )  # fmt: skip
        return not faults

    def _judge(self, message: GenerateRequest, answer: Answer) -> Judged:
        return self.setting.reference(BACKENDS[self.shape]).judge(message, answer.ids)

    def _judged(self, answers: Mapping[str, Answer]) -> tuple[list[str], dict[str, Any]]:
        faults, short, told, whole = [], list[float](), 0.0, 0
        for message in self.messages:
            answer = answers[message.rid]
            judged = self._judge(message, answer)
            short += judged.short
            if judged.worst > (ROUNDING if self.is_exact else BROKEN):
                faults.append(f"{message.rid}: {judged.worst:.3g} short")
            if not judged.text_ok:
                faults.append(f"{message.rid}: not its grammar's")
            if not _ends_well(message, answer):
                faults.append(f"{message.rid}: ended by {answer.finish}")
            ended = answer.finish is not None and answer.finish.type == "stop"
            whole += ended and spec_of(message.sampling) is not None
            if message.wish is not None and message.wish.logprobs:
                told = max(told, told_error(judged, message, answer.ids, answer.report))
        if self.is_exact and told > ROUNDING:
            faults.append(f"logprobs are off by {told:.3g}")
        differ = [gap for gap in short if gap > 0]
        values = {
            "places": len(short), "differ": len(differ), "short": max(differ, default=0.0),
            "logprobs": told, "whole_texts": whole,
        }  # fmt: skip
        return faults, values

    def _beside(self, answers: Mapping[str, Answer], faults: list[str]) -> dict[str, Any]:
        """Beside plain steps of the same executor, and beside a CPU's."""
        unlike, gap = self._unlike(answers, self.plain)
        of_cpu, cpu_gap = self._unlike(answers, self.of_cpu)
        if self.is_exact and max(gap, cpu_gap) > ROUNDING:
            faults.append(f"texts part where ids are {max(gap, cpu_gap):.3g} apart")
        hidden = 0.0
        for message in self.messages:
            if message.wish is not None and message.wish.hidden_states:
                mine, theirs = (of[message.rid].hidden() for of in (answers, self.plain))
                if len(mine) != len(message.input_ids) + self.setting.world.output_len - 1:
                    faults.append(f"{message.rid}: {len(mine)} hidden states")
                same = _common(answers[message.rid].ids, self.plain[message.rid].ids)
                upto = len(message.input_ids) + same
                hidden = max(hidden, float((mine[:upto] - theirs[:upto]).abs().max() / theirs.std()))
        if self.is_exact and hidden > HIDDEN:
            faults.append(f"hidden states are off by {hidden:.3g}")
        bare = {choice: self.plain[f"bare/{choice}"].ids for choice in ("greedy", "seeded")}
        others = [m.rid for m in self.messages if m.rid not in FREE]
        changed = sum(self.plain[rid].ids != bare[rid.partition("/")[2]] for rid in others)
        return {
            "unlike_plain": unlike, "plain_gap": gap, "unlike_cpu": of_cpu, "cpu_gap": cpu_gap,
            "cpu_share": self._share(answers), "hidden": hidden, "changed": changed,
        }  # fmt: skip

    def _unlike(self, answers: Mapping[str, Answer], others: Mapping[str, Answer]) -> tuple[int, float]:
        """Texts that differ, and how far the ids are apart where they begin to."""
        count, gap = 0, 0.0
        for message in self.messages:
            pair = answers[message.rid], others[message.rid]
            if pair[0].ids == pair[1].ids:
                continue
            count, place = count + 1, _common(pair[0].ids, pair[1].ids)
            for answer in pair:
                gap = max(gap, *self._judge(message, answer).short[place : place + 1], 0.0)
        return count, gap

    def _share(self, answers: Mapping[str, Answer]) -> float:
        """Of the CPU's ids, those up to a text's first that differs."""
        same = sum(_common(answers[rid].ids, answer.ids) for rid, answer in self.of_cpu.items())
        return same / sum(len(answer.ids) for answer in self.of_cpu.values())


def _common(ids: Sequence[int], others: Sequence[int]) -> int:
    pairs = zip(ids, others, strict=False)
    return next((i for i, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(ids), len(others)))


def _ends_well(message: GenerateRequest, answer: Answer) -> bool:
    assert answer.finish is not None
    if message.rid.startswith("broken/"):
        return answer.finish.type == "abort" and len(answer.ids) == 3
    return answer.finish.type in ("length", "stop")


def _of_steps(steps: Sequence[Step]) -> dict[str, Any]:
    in_graphs = sum(step.used_graph is True for step in steps)
    spec = [step for step in steps if step.draft_len]
    return {
        "steps": len(steps),
        "spec_steps": len(spec),
        "masked": sum(step.masked for step in steps) / max(1, len(steps)),
        "in_graphs": in_graphs / max(1, len(steps)),
        "tokens_a_row": sum(s.num_tokens for s in spec) / max(1, sum(s.num_rows for s in spec)),
    }


def check_shape(setting: Setting, shape: str, dtypes: Sequence[str]) -> bool:
    backend, right = BACKENDS[shape], True
    of_cpu: dict[str, dict[str, Answer]] = {}
    with setting.executor(shape, "float32", on_cpu=True) as executor:
        free = setting.run(executor, "plain", bare_requests(setting.world), backend).answers
        batches = setting.batches({rid: answer.ids for rid, answer in free.items()}, backend)
        for name, messages in batches.items():
            of_cpu[name] = setting.run(executor, "plain", messages, backend).answers
    for dtype in dtypes:
        try:
            with setting.executor(shape, dtype) as executor:
                for name, messages in batches.items():
                    batch = Batch(setting, shape, dtype, name, messages, of_cpu[name])
                    for mode in MODES:
                        right &= batch.check(executor, mode)
        except Exception as error:  # of whatever kind: what the other executors do is wanted all the same
            traceback.print_exc()
            setting.out.add("error", shape=shape, dtype=dtype, error=f"{type(error).__name__}: {error}")
            right = False
    return right


def _print_tables(out: Records) -> None:
    names = (
        "shape", "dtype", "batch", "mode", "ok", "texts", "changed", "places", "differ", "short",
        "unlike_plain", "plain_gap", "unlike_cpu", "cpu_share", "cpu_gap", "logprobs", "hidden",
        "whole_texts", "tokens_a_row", "masked", "in_graphs", "waits", "seconds",
    )  # fmt: skip
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    lines = [line for line in out.lines if line["kind"] == "rules"]
    for line in lines:
        values = [f"{line[n]:.3g}" if isinstance(line[n], float) else str(line[n]) for n in names]
        print(f"| {' | '.join(values)} |")
    for line in lines:
        for fault in [*line["faults"], *(f"waited: {place}" for place in line["where"])]:
            print(f"{line['shape']} {line['dtype']} {line['batch']} {line['mode']}: {fault}")
    cost = [line for line in out.lines if line["kind"] == "cost"]
    print("\n".join(rules_cost.table(cost)) if cost else "no cost was measured")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    # One of the processors fails, as it must: no log is wanted of that.
    logging.getLogger(logit_edits.__name__).setLevel(logging.CRITICAL)
    out, failed, began = Records(args.out, device_name(args.device)), [], time.perf_counter()
    world = World.of(515, 24, 12) if args.tiny else World.of(5003, 30, 48)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        size = len(world.tokens)
        target = write_tiny_llama(root / "target", vocab_size=size, **(TINY if args.tiny else SIZES))
        own = {} if args.tiny else {"num_key_value_heads": 8, "head_dim": 64}
        drafter = write_tiny_eagle3(root / "drafter", target, draft_vocab=size * 2 // 3, **own)
        setting = Setting(world, Folders(target, drafter), args.device, out, root / "choices.json")
        reason = missing("dill")
        if reason is not None:
            setting.left_out.append(f"custom logit processors: without {reason}")
        dtypes = ("float32", "bfloat16") if args.device == "cuda" else ("float32",)
        for shape in args.shapes:
            if not check_shape(setting, shape, dtypes):
                failed.append(shape)
        if "cost" in args.parts:
            try:
                rules_cost.measure(root, args.device, args.tiny, out)
            except Exception:  # what is known so far is wanted all the same
                traceback.print_exc()
                failed.append("cost")
    _print_tables(out)
    print(f"{time.perf_counter() - began:.0f} s")
    if setting.left_out:
        print(f"left out: {'; '.join(setting.left_out)}")
    if failed or not setting.left_out:
        print(f"failed: {', '.join(failed)}" if failed else "all of it is right")
    return 1 if failed or setting.left_out else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_flags(parser)
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--parts", nargs="*", choices=["cost"], default=["cost"], help="beside the shapes")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
