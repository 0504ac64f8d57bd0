"""A short run of every mode, for compute-sanitizer: two small models whose heads are as large as real ones.

    compute-sanitizer --tool memcheck python benchmark/h200/memcheck.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \\
        python benchmark/h200/memcheck.py --graphs off

The second form gives every tensor an allocation of its own, so an access just outside it is found too; CUDA
graphs can't be captured then. Nothing is timed: each product takes one of our kernels, another one for
another shape. Acceptance is simulated, so that drafts are taken and refused. Ends with "ok".
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

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
from benchmark.h200.memcheck_choices import write_choices
from benchmark.h200.padding import Reserved
from benchmark.h200.shapes import EAGLE3_OF_8B, LLAMA_8B, Folders, write_folder
from sglang.bench_one_batch_cases import OneBatch
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.model_executor.step_plan import (
    PageWrite,
    PrefillChunk,
    SlotAdmission,
    SlotSampling,
    StepKind,
    StepPlan,
)

VOCAB, DRAFT_VOCAB, HIDDEN, INNER = 4096, 2048, 512, 1024
MODELS = {"d128": (8, 2, 128), "d64": (6, 2, 64)}  # heads, KV heads, head size
SHAPES = {"chain": CHAIN, "tree": TREE}
SIZES = (1, 4)  # of graphs: three rows run padded, six eagerly
MOST_ROWS, MOST_SPEC_ROWS = 6, 4
PROMPT_LENS = (70, 33, 1, 130, 17, 64)
PREFILL_TOKENS = 48  # of a step, so that prompts are cut
PLACES = 176  # of a row

# Rows of every kind beside each other; ids are below VOCAB.
SAMPLINGS = (
    SlotSampling(temperature=0.0),
    SlotSampling(
        temperature=0.8, frequency_penalty=0.3, presence_penalty=0.2, repetition_penalty=1.2,
        min_new_tokens=4, suppressed_ids=(2, 7), logit_bias=((5, 4.0), (4095, -3.0)), seed=11,
    ),
    SlotSampling(temperature=1.0, top_k=20, top_p=0.9, min_p=0.02, seed=12),
    SlotSampling(temperature=0.0, repetition_penalty=1.3, draft_cap=1),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    rows: int
    draft_lens: tuple[int, ...]  # of the steps, in turn
    samplings: tuple[SlotSampling, ...]  # of the rows, in turn


def write_model(root: Path, name: str) -> Folders:
    heads, kv_heads, size = MODELS[name]
    small: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "vocab_size": VOCAB,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    # The outputs of "layer -1" (the embedding), 0 and 1: all that a model of two layers has.
    drafter = {"draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}
    return Folders(
        write_folder(root / name / "target", LLAMA_8B | small | {"num_hidden_layers": 2}),
        write_folder(root / name / "drafter", EAGLE3_OF_8B | small | drafter),
    )


def cases_of(num_steps: int) -> Iterator[Case]:
    greedy, mixed = SAMPLINGS[:1], SAMPLINGS
    for draft_lens in ((0,), (num_steps,), (num_steps, 0)):
        yield Case(1, draft_lens, greedy)
        yield Case(3, draft_lens, mixed)
        yield Case(4, draft_lens, mixed)
    yield Case(4, (num_steps,), greedy)
    yield Case(MOST_ROWS, (0,), mixed)


def run_case(executor: InProcessExecutor, case: Case, num_steps: int) -> list[bool | None]:
    """Whether each decode step was a CUDA graph's."""
    batch = _batch(executor, case.rows, case.samplings)
    batch.prefill()
    return [step.used_graph for step in batch.decode_all(case.draft_lens, PLACES, max_steps=num_steps)]


def run_mixed(executor: InProcessExecutor) -> None:
    """A new row's prompt in two steps that decode the others too; then all decode together."""
    batch = _batch(executor, 2, SAMPLINGS)
    batch.prefill()
    slot, prompt = 3, _prompt(3, 40)
    first_page = 1 + (slot - 1) * -(-PLACES // executor.info.page_size)
    pages = tuple(range(first_page, first_page + -(-PLACES // executor.info.page_size)))
    plans = [
        StepPlan(
            900,
            StepKind.MIXED,
            prefill=(PrefillChunk(slot, 0, prompt[:25], prompt[25]),),
            admissions=(SlotAdmission(slot, len(prompt), 0, SAMPLINGS[2]),),
            page_writes=(PageWrite(slot, 0, pages),),
        ),
        StepPlan(901, StepKind.MIXED, prefill=(PrefillChunk(slot, 25, prompt[25:], None),)),
    ]
    lengths = [len(row.prompt) + len(row.output) - 1 for row in batch.rows]
    for ahead, plan in enumerate(plans):
        decoding = tuple(row.slot for row in batch.rows)
        bounds = tuple(length + ahead for length in lengths)
        _finish(executor, replace(plan, decode_slots=decoding, decode_len_bounds=bounds))
    bounds = (*(length + len(plans) for length in lengths), len(prompt))
    _finish(executor, StepPlan(902, StepKind.DECODE, (1, 2, slot), bounds))


def _finish(executor: InProcessExecutor, plan: StepPlan) -> None:
    result = executor.launch(plan).wait()
    assert not any(result.faults), "logits that are not finite"


def _batch(executor: InProcessExecutor, rows: int, samplings: Sequence[SlotSampling]) -> OneBatch:
    prompts = [_prompt(row, PROMPT_LENS[row]) for row in range(rows)]
    batch = OneBatch(executor, prompts, PLACES, PREFILL_TOKENS)
    for index, row in enumerate(batch.rows):
        row.sampling = samplings[index % len(samplings)]
    return batch


def _prompt(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB) for _ in range(length))


def wanted_of(folders: Folders, shape: Shape, device: str, graphs: bool, choices: Path | None) -> Wanted:
    return Wanted(
        folders,
        shape,
        device,
        rows=MOST_ROWS,
        total_tokens=MOST_ROWS * PLACES,
        context_len=PLACES,
        spec_rows=MOST_SPEC_ROWS,
        graph_sizes=SIZES,
        dtype="bfloat16",
        dummy=True,
        choices=choices,
        cuda_graphs=graphs,
    )


def run_start(wanted: Wanted, num_steps: int, note: str, out: Records) -> bool:
    """Whether the reserved slot and page are as they were, too."""
    assert wanted.shape is not None
    with started(wanted, out, note) as executor:
        before = Reserved.of(executor)
        used = Counter(x for case in cases_of(wanted.shape[0]) for x in run_case(executor, case, num_steps))
        run_mixed(executor)
        after = Reserved.of(executor)
        changed = after.changed(before)
        steps = {"graph": used[True], "eager": used[False] + used[None]}
        out.add("memcheck", note=note, steps=steps, changed=changed, finite=after.is_finite)
    return not changed and after.is_finite


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    os.environ["SGLANG_SIMULATE_ACC_LEN"] = "2.5"
    out, fine = Records(args.out, device_name(args.device)), True
    graphs = [word == "on" for word in args.graphs] if args.device == "cuda" else [False]
    models, num_steps = (args.models[:1], 3) if args.tiny else (args.models, 6)
    with tempfile.TemporaryDirectory(prefix="memcheck_") as name:
        root = Path(name)
        choices = root / "choices.json" if args.device == "cuda" else None
        if choices is not None:
            write_choices(choices, _widths())
        for model, shape, captured in product(models, args.shapes, graphs):
            wanted = wanted_of(write_model(root, model), SHAPES[shape], args.device, captured, choices)
            note = f"{model}, {shape}, graphs {'on' if captured else 'off'}"
            fine &= run_start(wanted, num_steps, note, out)
    print("ok" if fine else "the reserved slot or page has changed")
    return 0 if fine else 1


def _widths() -> set[int]:
    """Every number of rows or columns that a weight of these models has."""
    widths = {VOCAB, DRAFT_VOCAB, HIDDEN, 2 * HIDDEN, 3 * HIDDEN, INNER, 2 * INNER}
    for heads, kv_heads, size in MODELS.values():
        widths |= {heads * size, (heads + 2 * kv_heads) * size}
    return widths


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_flags(parser)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--graphs", nargs="+", choices=("on", "off"), default=["on", "off"])
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
