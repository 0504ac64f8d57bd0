"""Is a small random model right on the GPU? What ``latent_correctness`` and ``dense_correctness`` compare.

Of every case (a model and a drafter), in bfloat16:

logits   of one text through the model itself: prefill in two chunks, four decode steps, a verification of
         four. The error is beside that of the CPU in bfloat16; it fails at more than twice as much.
tokens   through an executor as a server builds it, with graphs, and without: every token of the CPU's float32
         texts, in plain, speculative and alternating steps. A difference counts where the two best logits are
         further apart than twice what bfloat16 changes on the CPU.
drafts   tokens a speculative step puts out, beside the CPU's; it fails at less than 0.8 of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmark.h200.executors import Records, Wanted, add_common_flags, device_name, started
from benchmark.h200.follow import follow, generate
from benchmark.h200.reference_ids import TeacherForced, margins_and_errors
from benchmark.h200.shapes import Folders
from benchmark.h200.small_models import Case
from sglang.bench_one_batch import random_prompts
from sglang.bench_one_batch_cases import OneBatch, places_needed
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.base import DecodeRows, LayerAttention, PrefillRows
from sglang.srt.managers.executor_build_attention import kernel_attention
from sglang.srt.model_executor.config import WorkerConfig
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.model_loader.checkpoint import open_source
from sglang.srt.models import packed
from sglang.srt.models.registry import build_model

ROWS = 4
NUM_SINGLE, NUM_VERIFIED = 4, 4  # tokens at the end of the text that are decoded, and verified at once


@dataclass(frozen=True, slots=True)
class Lengths:
    prompt: int
    output: int
    text: int  # of the logits' part


FULL, TINY = Lengths(120, 32, 600), Lengths(20, 8, 60)


class OnDevice:
    """A model over the kernels, without an executor. On a CPU over their references."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
        kv_dtype: torch.dtype | None,
    ) -> None:
        config = ModelConfig.from_folder(folder)
        source = open_source(folder, "auto", dtype, device, config.quant)
        with mock.patch.object(packed, "wants_kernels", lambda device: True):  # as on CUDA
            self._model = build_model(config, source, dtype, device, max_len)
        self._device = device
        pages = -(-max_len // 16)
        of_worker = WorkerConfig(
            device=device, dtype=dtype, num_slots=1, num_pages=pages, page_size=16, context_len=max_len,
            vocab_size=config.vocab_size, spec=None, max_spec_rows=0, kv_dtype=kv_dtype, feature_size=0,
        )  # fmt: skip
        table = torch.arange(1, pages + 1, dtype=torch.int32, device=device).expand(2, -1).contiguous()
        self._attention = kernel_attention(self._model, of_worker, table)[1]
        self._attention.reserve(1, NUM_VERIFIED)

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[T, V] float32: two chunks, single tokens, and the last few at once."""
        last = len(ids) - NUM_VERIFIED
        first = last - NUM_SINGLE
        half = first // 2
        parts = [self._run(ids, 0, half, self._chunk(0, half))]
        parts.append(self._run(ids, half, first, self._chunk(half, first)))
        for position in range(first, last):
            parts.append(self._run(ids, position, position + 1, self._rows(position, 1)))
        parts.append(self._run(ids, last, len(ids), self._rows(last, NUM_VERIFIED)))
        return torch.cat(parts).float().cpu()

    def _chunk(self, begin: int, end: int) -> LayerAttention:
        return self._attention.prefill(PrefillRows((1,), (begin,), (end - begin,)))

    def _rows(self, position: int, num: int) -> LayerAttention:
        slots = torch.tensor([1], device=self._device)
        return self._attention.decode(DecodeRows(slots, slots * position, position, num))

    def _run(self, ids: Sequence[int], begin: int, end: int, attention: LayerAttention) -> torch.Tensor:
        tokens = torch.tensor(ids[begin:end], device=self._device)
        positions = torch.arange(begin, end, device=self._device)
        return self._model.logits(self._model.forward(tokens, positions, attention)[0])


@dataclass(frozen=True, slots=True)
class Setting:
    case: Case
    target: Path
    wanted: Wanted
    lengths: Lengths
    out: Records

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.wanted.device == "cuda" else torch.float32

    @property
    def kv_dtype(self) -> torch.dtype | None:
        return torch.float8_e4m3fn if self.case.fp8_cache else None

    def add(self, part: str, ok: bool, **values: Any) -> bool:
        self.out.add(part, case=self.case.name, ok=ok, **values)
        return ok

    @contextmanager
    def executor(self, on_cpu: bool = False, graphs: bool = True) -> Iterator[InProcessExecutor]:
        wanted = replace(self.wanted, cuda_graphs=graphs)
        if on_cpu:
            wanted = replace(wanted, device="cpu", dtype="float32")
        with started(wanted, self.out, f"{self.case.name}, {wanted.device}") as executor:
            yield executor


def compare_logits(setting: Setting) -> bool:
    """Errors are relative to the logits' spread."""
    [text], length = random_prompts(250, 1, setting.lengths.text), setting.lengths.text + 1
    ids = [3 + token % 240 for token in text]
    exact, rounded = (
        TeacherForced(setting.target, dtype, length, setting.kv_dtype).logits([*ids, 0], len(ids))
        for dtype in (torch.float32, torch.bfloat16)
    )
    device = torch.device(setting.wanted.device)
    got = OnDevice(setting.target, setting.dtype, device, length + 16, setting.kv_dtype).logits(ids)
    spread = exact.std()
    error, of_cpu = ((logits - exact).square().mean().sqrt() / spread for logits in (got, rounded))
    worst, worst_of_cpu = ((logits - exact).abs().max() / spread for logits in (got, rounded))
    return setting.add(
        "logits", bool(error <= 2 * of_cpu), error=float(error), cpu_bf16=float(of_cpu), worst=float(worst),
        worst_cpu_bf16=float(worst_of_cpu),
    )  # fmt: skip


def compare_tokens(setting: Setting) -> bool:
    lengths, steps = setting.lengths, setting.case.shape[0]
    prompts = [[3 + token % 240 for token in ids] for ids in random_prompts(250, ROWS, lengths.prompt)]
    with setting.executor(on_cpu=True) as oracle:
        outputs = generate(oracle, prompts, lengths.output, [0], ROWS)
        wanted_rate = tokens_a_step(oracle, prompts, lengths.output, steps)
    margins, bound = _margins(setting, prompts, outputs)
    modes, right = {"plain": [0], "spec": [steps], "alternate": [steps, 0]}, True
    for graphs in (True, False) if setting.wanted.device == "cuda" else (True,):
        with setting.executor(graphs=graphs) as executor:
            for mode, draft_lens in modes.items():
                found = follow(executor, prompts, outputs, draft_lens, ROWS)
                largest = max((margins[d.sequence][d.position] for d in found), default=0.0)
                right &= setting.add(
                    "tokens", largest <= bound, graphs=graphs, mode=mode, positions=ROWS * lengths.output,
                    differences=len(found), largest_margin=largest, bound=bound,
                )  # fmt: skip
            rate = tokens_a_step(executor, prompts, lengths.output, steps)
        fine = rate >= 0.8 * wanted_rate
        right &= setting.add("drafts", fine, graphs=graphs, tokens_a_step=rate, cpu=wanted_rate)
    return right


def tokens_a_step(
    executor: InProcessExecutor, prompts: Sequence[Sequence[int]], output_len: int, steps: int
) -> float:
    """Of a row, speculating all the time."""
    longest = max(map(len, prompts))
    batch = OneBatch(executor, prompts, places_needed(executor, longest, output_len))
    batch.prefill()
    done = batch.decode_all([steps], output_len)
    whole = [step for step in done if step.is_full]
    return sum(step.num_tokens for step in whole) / sum(len(step.slots) for step in whole)


def _margins(
    setting: Setting, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> tuple[list[list[float]], float]:
    """Of every token of the outputs; and what bfloat16 may change."""
    length = setting.lengths.prompt + setting.lengths.output
    dtypes = torch.float32, torch.bfloat16
    models = [TeacherForced(setting.target, dtype, length, setting.kv_dtype) for dtype in dtypes]
    margins, worst = [], 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        exact, rounded = (model.logits([*prompt, *output], len(output)) for model in models)
        of_text, errors = margins_and_errors(exact, rounded)
        margins.append(of_text)
        worst = max(worst, *errors)
    return margins, 2 * worst


def setting_of(case: Case, root: Path, args: argparse.Namespace, out: Records) -> Setting:
    lengths = TINY if args.tiny else FULL
    target, drafter = case.folders(root, args.tiny)
    steps, topk, nodes = case.shape
    flags = ["--speculative-algorithm", case.algorithm, "--speculative-num-steps", str(steps)]
    flags += ["--speculative-eagle-topk", str(topk), "--speculative-num-draft-tokens", str(nodes)]
    if drafter is not None:
        flags += ["--speculative-draft-model-path", str(drafter)]
    flags += ["--kv-cache-dtype", "fp8_e4m3"] if case.fp8_cache else []
    context = 2 * (lengths.prompt + lengths.output) + 64
    wanted = Wanted(
        Folders(target, drafter), None, args.device, ROWS, total_tokens=ROWS * context, context_len=context,
        graph_sizes=(1, ROWS), dtype="bfloat16" if args.device == "cuda" else "float32",
        choices=root / "choices.json", extra=tuple(flags),
    )  # fmt: skip
    return Setting(case, target, wanted, lengths, out)


def run(cases: Sequence[Case], about: str, argv: Sequence[str] | None) -> int:
    """The exit code: 1 if a part fails."""
    args = _parse(cases, about, argv)
    out, failed = Records(args.out, device_name(args.device)), []
    with tempfile.TemporaryDirectory() as root:
        for case in cases:
            if args.cases and case.name not in args.cases:
                continue
            began, setting = time.perf_counter(), setting_of(case, Path(root), args, out)
            failed += [
                f"{case.name}: {part.__name__}"
                for part in (compare_logits, compare_tokens)
                if not part(setting)
            ]
            out.add("case", case=case.name, seconds=time.perf_counter() - began)
    _print_table(out)
    print(f"failed: {', '.join(failed)}" if failed else "all of it is right")
    return 1 if failed else 0


def _print_table(out: Records) -> None:
    for line in out.lines:
        if line["kind"] == "start":
            continue
        values = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in line.items()]
        print("; ".join(value for value in values if not value.startswith("device ")))


def _parse(cases: Sequence[Case], about: str, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=__doc__
    )
    add_common_flags(parser)
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in cases], help="default: all")
    return parser.parse_args(argv)
