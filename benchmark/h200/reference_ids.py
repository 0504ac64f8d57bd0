"""Write the reference of ``correctness.py``: greedy ids on the CPU in float32, margins, and bf16's errors.

    python benchmark/h200/reference_ids.py

Ids come from plain decoding. Margins come from one forward over each whole sequence, in float32 and in
bf16; the bf16 error at a position is how much the difference of the two best logits changes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmark.h200.executors import Records, Wanted, started
from benchmark.h200.follow import generate
from benchmark.h200.models import add_model_flags, context_of, folders_of, heldout_ids
from benchmark.h200.reference import Continuation, Reference, write_reference
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.base import PrefillRows
from sglang.srt.managers.executor_build_drafter import native_attention
from sglang.srt.model_loader.checkpoint import open_source
from sglang.srt.models.registry import build_model

FILE = Path(__file__).parent / "smollm2_reference.jsonl"
_ROUNDING = 1e-3  # of a float32 logit


class TeacherForced:
    """A model on the CPU that is shown whole sequences."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, max_len: int, kv_dtype: torch.dtype | None = None
    ) -> None:
        config = ModelConfig.from_folder(folder)
        self._model = build_model(
            config, open_source(folder, "auto", dtype, "cpu", config.quant), dtype, "cpu", max_len
        )
        pool = self._model.kv_shape.make_pool(max_len, 1, kv_dtype or dtype, "cpu", dtype)
        # Slot 1 owns all pages, in order.
        table = torch.arange(1, max_len + 1, dtype=torch.int32).expand(2, -1).contiguous()
        self._attention = native_attention(pool, table)

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], num_outputs: int) -> torch.Tensor:
        """[num_outputs, V] float32: those the last ``num_outputs`` ids were chosen from."""
        attention = self._attention.prefill(PrefillRows((1,), (0,), (len(ids),)))
        hidden, _ = self._model.forward(torch.tensor(ids), torch.arange(len(ids)), attention)
        return self._model.logits(hidden[-num_outputs - 1 : -1]).float()


def margins_and_errors(exact: torch.Tensor, rounded: torch.Tensor) -> tuple[list[float], list[float]]:
    """exact, rounded: [T, V] logits. Of the two best by ``exact``: their difference, and by how much
    ``rounded`` has it otherwise."""
    best, index = exact.topk(2, dim=-1)
    other = rounded.gather(1, index)
    margin = best[:, 0] - best[:, 1]
    return margin.tolist(), (other[:, 0] - other[:, 1] - margin).abs().tolist()


def check_outputs(exact: torch.Tensor, output: Sequence[int]) -> None:
    """Decoding and one forward over it all must agree, but for float32's own rounding. exact: [T, V]."""
    chosen = exact.gather(1, torch.tensor(output)[:, None])[:, 0]
    short = exact.max(dim=1).values - chosen
    assert bool((short < _ROUNDING).all()), f"outputs are {short.max():.4f} below the best logit"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_flags(parser)
    parser.add_argument("--num-prompts", type=int, default=32, help="a mix of the held-out prompts' domains")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8, help="decoded at a time")
    parser.add_argument("--file", type=Path, default=FILE)
    args = parser.parse_args(argv)
    folders = folders_of(args)
    prompts = heldout_ids(args, folders.target, args.output_len)[: args.num_prompts]
    longest = max(len(prompt.ids) for prompt in prompts) + args.output_len
    places, context = args.rows * (longest + 8), context_of(folders.target)
    wanted = Wanted(folders, None, "cpu", args.rows, places, context, dtype="float32")
    with started(wanted, Records(None, "cpu"), "reference") as executor:
        outputs = generate(executor, [prompt.ids for prompt in prompts], args.output_len, [0], args.rows)
    both = [TeacherForced(folders.target, dtype, longest) for dtype in (torch.float32, torch.bfloat16)]
    sequences = []
    for prompt, output in zip(prompts, outputs, strict=True):
        exact, rounded = (model.logits([*prompt.ids, *output], len(output)) for model in both)
        check_outputs(exact, output)
        margins, errors = margins_and_errors(exact, rounded)
        sequences.append(Continuation(prompt.id, list(prompt.ids), output, margins, errors))
    reference = Reference(folders.target.name, sequences)
    write_reference(reference, args.file)
    print(
        f"{len(sequences)} sequences; bf16 error {reference.bf16_error:.3f};"
        f" {reference.decisive_share:.1%} of the positions have a larger margin"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
