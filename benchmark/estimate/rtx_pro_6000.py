"""Tokens a second that Kimi-K2.5 should reach on 8 RTX PRO 6000, from times of one rank on an H200.

    python benchmark/estimate/rtx_pro_6000.py                                  # from bytes alone
    python benchmark/estimate/rtx_pro_6000.py --stack docs/data/h200/rank_stack.jsonl
    python benchmark/estimate/rtx_pro_6000.py --stack FILE --links nccl --write docs/estimate_rtx_pro_6000.md

An estimate and no measurement: nothing of it ran on such a card. Without ``--stack`` every step reaches a
fixed share of the bandwidth limit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.doc_section import replace_section
from benchmark.estimate.assumptions import (
    ACCEPT_LENGTHS,
    NCCL,
    PUBLIC,
    PUBLIC_ROWS,
    PUSHED,
    RTX_PRO_6000,
    USUAL_SHARE,
)
from benchmark.estimate.steps import Estimate, Measured, Range, RankShape
from benchmark.h200.rank_shapes import shape_of

LINKS: Final = {"pushed": PUSHED, "nccl": NCCL}
BATCHES: Final = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS: Final = (1024, 16384, 65536)
MOST_REQUESTS: Final = 256
EXPERT_BITS: Final = 4.5  # int4 with a bfloat16 scale for 32 of them
SECTION: Final = "estimate"


def shown(rate: Range) -> str:
    """Tokens a second; one number where the bounds are alike."""
    low, high = (f"{value:.0f}" for value in (rate.low, rate.high))
    return low if low == high else f"{low}-{high}"


def rates(estimate: Estimate, context: int) -> str:
    titles = ["requests", "plain", *(f"EAGLE-3, {a} a step ({name})" for name, a in ACCEPT_LENGTHS.items())]
    lines = ["| " + " | ".join([*titles, "public EAGLE-3 / plain"]) + " |", "|---" * (len(titles) + 1) + "|"]
    public = dict(zip(PUBLIC_ROWS, PUBLIC[context], strict=True))
    for batch in BATCHES:
        plain = estimate.plain_rate(batch, context)
        cells = [str(batch), shown(plain)]
        for accept_length in ACCEPT_LENGTHS.values():
            spec = estimate.spec_rate(batch, context, accept_length)
            cells.append(f"**{shown(spec)}**" if spec.middle > plain.middle else shown(spec))
        if not estimate.fits(batch, context, drafter=True):
            cells[0] += " (does not fit)"
        spec_public, plain_public = public[batch]
        lines.append("| " + " | ".join([*cells, f"{spec_public:g} / {plain_public:g}"]) + " |")
    return "\n".join(lines)


def parts(estimate: Estimate, context: int) -> str:
    """Where the milliseconds of a step go."""
    lines = [
        "| requests | plain: reading | ranks' sums | logits | spec: reading | sums | logits | drafts |",
        "|---" * 8 + "|",
    ]
    for batch in BATCHES:
        cells = [str(batch)]
        for queries in (1, 4):
            stack, tokens = estimate.stack(batch, context, queries), batch * queries
            logits = estimate.logits(tokens)
            cells += [
                f"{1e3 * seconds:.2f}"
                for seconds in (stack.middle, estimate.together(tokens) - logits, logits)
            ]
        lines.append("| " + " | ".join([*cells, f"{1e3 * estimate.drafts(batch, 3):.2f}"]) + " |")
    return "\n".join(lines)


def crossovers(estimates: Sequence[Estimate]) -> str:
    names = [f"{a} a step" for a in ACCEPT_LENGTHS.values()]
    titles = ["sums", "context", "requests that fit", *names, "public"]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for estimate in estimates:
        for context in CONTEXTS:
            cells, largest = [], 0
            for accept_length in ACCEPT_LENGTHS.values():
                wins, largest = estimate.plain_wins(context, accept_length, MOST_REQUESTS)
                cells.append(", ".join(f"{r.start} to {r.stop - 1}" for r in wins) or "none")
            public = next((n for n, (s, p) in zip(PUBLIC_ROWS, PUBLIC[context], strict=True) if p >= s), None)
            cells.append("none" if public is None else f"from {public}")
            row = [estimate.links.name, f"{context // 1024}k", str(largest), *cells]
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def report(measured: Measured | None, links: str) -> str:
    text = shape_of("kimi", tiny=False)["text_config"]
    shape = RankShape.of(text, EXPERT_BITS)
    estimate = Estimate(shape, RTX_PRO_6000, LINKS[links], measured)
    if measured is None:
        basis = (
            "No step times of an H200 are in these tables: every step is taken to read its bytes at"
            f" {USUAL_SHARE:.0%} of {RTX_PRO_6000.bandwidth / 1e12:.2f} TB/s."
        )
    else:
        same = (
            "all" if measured.layers == shape.num_layers else f"only {measured.layers} of {shape.num_layers}"
        )
        basis = (
            f"From step times of one rank on an H200 ({same} layers; copying at"
            f" {measured.bandwidth / 1e12:.2f} TB/s). A range: what a step took there beside reading its"
            " bytes grows as reading does (the lower rate), or stays as it is (the higher). Batches between"
            " those measured (1, 4, 16 and 64, as far as the cache held them) lie between them, larger ones"
            " are taken to be as the largest."
        )
    sections = [
        basis,
        f"A rank holds {shape.weight_bytes / 1e9:.1f} GB of weights, and {shape.token_bytes / 1e3:.1f} KB of"
        f" cache for every token. Sums: {estimate.links.name}.",
    ]
    for context in CONTEXTS:
        sections += [
            f"**Context {context // 1024}k**, tokens a second of all requests (bold: EAGLE-3 gives more)",
            rates(estimate, context),
        ]
    sections += ["**Where the time goes**, ms of a step at 1k", parts(estimate, 1024)]
    both = [Estimate(shape, RTX_PRO_6000, way, measured) for way in LINKS.values()]
    sections += [
        "**At which numbers of requests plain steps give as much or more**, of those that fit",
        crossovers(both),
    ]
    return "\n\n".join(sections)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stack", type=Path, help="records of benchmark/h200/rank_stack.py --model kimi")
    parser.add_argument(
        "--links", choices=LINKS, default="pushed", help="how ranks sum (default: %(default)s)"
    )
    parser.add_argument(
        "--write", type=Path, help="put the tables into this document instead of printing them"
    )
    args = parser.parse_args(argv)
    text = report(None if args.stack is None else Measured.read(args.stack, "kimi"), args.links)
    if args.write is None:
        print(text)
    else:
        replace_section(args.write, SECTION, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
