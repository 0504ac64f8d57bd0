"""Is what the GPU puts out right? SmolLM2 with its drafter, greedy, in four parts.

    python benchmark/h200/correctness.py --out correctness.jsonl

reference   every token against the CPU's float32 ones, in plain, speculative and alternating steps. A
            difference counts where the reference's two best logits differ by more than bf16's error.
divergence  how often bf16 tokens differ between plain and speculative steps, beside plain at batch 1
            against plain at a large batch.
acceptance  tokens of a speculative step on the held-out prompts, beside the drafter's evaluation.
padding     what very many replays with padded rows leave in the reserved slot.

The exit code is 1 if a part fails.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.h200.acceptance import CHAT, Accepted, accepted_of, expected_lengths
from benchmark.h200.executors import CHAIN, Records, Wanted, add_common_flags, device_name, started
from benchmark.h200.follow import follow, generate
from benchmark.h200.models import Prompt, add_model_flags, context_of, folders_of, heldout_ids
from benchmark.h200.padding import Reserved, replay
from benchmark.h200.reference import Reference, read_reference
from benchmark.h200.reference_ids import FILE
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.in_process_executor import InProcessExecutor

DRAFTS = CHAIN[0]
MODES = {"plain": [0], "spec": [DRAFTS], "alternate": [DRAFTS, 0]}  # draft lengths in turn
MOST_DIVERGENCE = 1.5  # of plain at batch 1 against plain at a large batch


@dataclass(frozen=True, slots=True)
class Amounts:
    sequences: int  # of the reference
    outputs: int  # of each
    few_rows: int
    many_rows: int
    diverge_prompts: int
    diverge_outputs: int
    accept_prompts: int
    accept_outputs: int
    accept_tolerance: float
    pad_rows: int  # between two captured sizes
    pad_replays: int
    pad_outputs: int


FULL = Amounts(
    sequences=32, outputs=128, few_rows=8, many_rows=32,
    diverge_prompts=96, diverge_outputs=256,
    accept_prompts=312, accept_outputs=256, accept_tolerance=0.02,
    pad_rows=3, pad_replays=100_000, pad_outputs=2000,
)  # fmt: skip
TINY = Amounts(
    sequences=2, outputs=6, few_rows=1, many_rows=2,
    diverge_prompts=2, diverge_outputs=6,
    accept_prompts=4, accept_outputs=6, accept_tolerance=1.0,  # so few tokens say nothing
    pad_rows=3, pad_replays=12, pad_outputs=8,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Check:
    executor: InProcessExecutor
    amounts: Amounts
    reference: Reference
    prompts: list[Prompt]
    eos_ids: tuple[int, ...]
    out: Records

    def compare_with_reference(self) -> bool:
        prompts = [s.prompt for s in self.reference.sequences]
        outputs = [s.output for s in self.reference.sequences]
        bound, fine = self.reference.bf16_error, True
        for mode, draft_lens in MODES.items():
            found = follow(self.executor, prompts, outputs, draft_lens, self.amounts.few_rows)
            margins = [self.reference.sequences[d.sequence].margins[d.position] for d in found]
            beyond = [d for d, margin in zip(found, margins, strict=True) if margin > bound]
            fine &= not beyond
            self.out.add(
                "reference",
                mode=mode,
                ok=not beyond,
                positions=sum(map(len, outputs)),
                decisive_share=self.reference.decisive_share,
                bf16_error=bound,
                differences=len(found),
                largest_margin=max(margins, default=0.0),
                beyond=[(self.reference.sequences[d.sequence].id, d.position) for d in beyond],
            )
        return fine

    def compare_modes(self) -> bool:
        """Against plain decoding at batch 1: the same at a large batch, and speculation at both."""
        few, many = 1, self.amounts.many_rows
        prompts = [prompt.ids for prompt in self.prompts[: self.amounts.diverge_prompts]]
        outputs = generate(self.executor, prompts, self.amounts.diverge_outputs, MODES["plain"], few)
        positions, rates = sum(map(len, outputs)), {}
        for mode, rows in (("plain", many), ("spec", few), ("spec", many)):
            found = follow(self.executor, prompts, outputs, MODES[mode], rows)
            rates[mode, rows] = 1000 * len(found) / positions
            self.out.add(
                "divergence",
                of=f"{mode} at {rows}",
                against=f"plain at {few}",
                positions=positions,
                differences=len(found),
                per_1000=rates[mode, rows],
            )
        worst = max(rates["spec", few], rates["spec", many])
        fine = worst <= MOST_DIVERGENCE * rates["plain", many]
        self.out.add(
            "divergence", of="all", ok=fine, worst=worst, limit=MOST_DIVERGENCE * rates["plain", many]
        )
        return fine

    def compare_acceptance(self) -> bool:
        amounts, prompts = self.amounts, self.prompts[: self.amounts.accept_prompts]
        found = accepted_of(
            self.executor,
            [prompt.ids for prompt in prompts],
            self.eos_ids,
            DRAFTS,
            amounts.accept_outputs,
            amounts.many_rows,
        )
        by_domain: dict[str, Accepted] = {}
        for prompt, counted in zip(prompts, found, strict=True):
            for group in ("all", prompt.domain, *(("chat",) if prompt.domain in CHAT else ())):
                by_domain[group] = by_domain.get(group, Accepted()) + counted
        expected = expected_lengths()
        for domain, counted in by_domain.items():
            wanted = expected.get(domain)
            ratio = counted.length / wanted if wanted else None
            self.out.add(
                "acceptance", domain=domain, tokens=counted.tokens, steps=counted.steps,
                length=counted.length, expected=wanted, ratio=ratio,
            )  # fmt: skip
        fine = abs(by_domain["all"].length / expected["all"] - 1) <= amounts.accept_tolerance
        self.out.add("acceptance", domain="all", ok=fine, tolerance=amounts.accept_tolerance)
        return fine

    def check_padding(self) -> bool:
        """Rows that no captured graph has exactly, plain and speculative steps in turn."""
        amounts, before = self.amounts, Reserved.of(self.executor)
        done = replay(
            self.executor, amounts.pad_rows, amounts.pad_replays, MODES["alternate"], 16, amounts.pad_outputs
        )
        after = Reserved.of(self.executor)
        changed = after.changed(before)
        fine = not changed and after.is_finite
        self.out.add("padding", ok=fine, rows=amounts.pad_rows, replays=done, changed=changed)
        return fine

    @property
    def parts(self) -> dict[str, Callable[[], bool]]:
        return {
            "reference": self.compare_with_reference,
            "divergence": self.compare_modes,
            "acceptance": self.compare_acceptance,
            "padding": self.check_padding,
        }


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    os.environ.pop("SGLANG_SIMULATE_ACC_LEN", None)  # here the drafter's own guesses count
    amounts, folders = TINY if args.tiny else FULL, folders_of(args)
    reference = read_reference(args.reference).cut(amounts.sequences, amounts.outputs)
    longest_output = max(2 * amounts.outputs, 2 * amounts.diverge_outputs, amounts.accept_outputs)
    prompts = heldout_ids(args, folders.target, longest_output)
    longest = max(len(ids) for ids in [*(s.prompt for s in reference.sequences), *(p.ids for p in prompts)])
    rows = max(amounts.many_rows, amounts.pad_rows)
    # A sequence that is begun anew has outputs in its prompt already.
    places = max(rows * (longest + longest_output + 16), amounts.pad_rows * (amounts.pad_outputs + 32))
    wanted = Wanted(
        folders,
        CHAIN,
        args.device,
        rows,
        total_tokens=places,
        context_len=context_of(folders.target),
        spec_rows=rows,
        dtype=args.dtype or ("bfloat16" if args.device == "cuda" else "float32"),
    )
    out = Records(args.out, device_name(args.device))
    eos_ids = ModelConfig.from_folder(folders.target).eos_ids
    with started(wanted, out, "correctness") as executor:
        check = Check(executor, amounts, reference, prompts, eos_ids, out)
        failed = [part for part in args.parts if not check.parts[part]()]
    print(f"failed: {', '.join(failed)}" if failed else f"all of it is right: {', '.join(args.parts)}")
    return 1 if failed else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_flags(parser)
    add_model_flags(parser)
    parts = ("reference", "divergence", "acceptance", "padding")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--reference", type=Path, default=FILE, help="made by reference_ids.py")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
