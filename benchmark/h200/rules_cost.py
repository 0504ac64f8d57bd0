"""What rules cost a decode step: requests with one and requests without, in turn, in one process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmark.h200.executors import CHAIN, Records, Wanted, started
from benchmark.h200.rules_runs import MODES, Run, Step
from benchmark.h200.rules_world import EOS, World, compile_all, compiler, missing
from benchmark.h200.shapes import EAGLE3_OF_8B, LLAMA_8B, Folders, write_folder, write_shapes
from sglang.bench_one_batch import random_prompts
from sglang.srt.constrained.compiling import GrammarCompiler
from sglang.srt.constrained.grammar import spec_of
from sglang.srt.managers.io_struct import GenerateRequest
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from sglang.srt.sampling.sampling_params import ChoiceRules, SamplingParams

SMALL: Final[dict[str, Any]] = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 4096,
}  # fmt: skip
PROMPT_LEN: Final = 64
SKIPPED: Final = 2  # first steps
BACKENDS: Final = ("xgrammar", "llguidance")
NO_RULE: Final = "no rule"


def measure(root: Path, device: str, tiny: bool, out: Records) -> None:
    if tiny:
        folders = write_shapes(root / "cost", tiny=True)
    else:
        target = write_folder(root / "cost_target", LLAMA_8B | SMALL)
        drafter = EAGLE3_OF_8B | SMALL | {"num_hidden_layers": 1}
        folders = Folders(target, write_folder(root / "cost_drafter", drafter))
    rows, steps = (2, 8) if tiny else (32, 32)
    context = PROMPT_LEN + steps * 4 + 16
    wanted = Wanted(
        folders, CHAIN, device, rows, rows * context, context, rows, graph_sizes=(1, rows),
        dtype="bfloat16" if device == "cuda" else "float32", dummy=True,
    )  # fmt: skip
    with started(wanted, out, "cost") as executor:
        world = World.of(executor.info.vocab_size, PROMPT_LEN, steps)
        compilers = {name: compiler(world, name) for name in BACKENDS if missing(name) is None}
        for num_rows in (1, rows):
            for mode in ("plain", "spec"):
                _measure_rows(executor, world, compilers, num_rows, mode, out)


def _measure_rows(
    executor: InProcessExecutor,
    world: World,
    compilers: Mapping[str, GrammarCompiler],
    num_rows: int,
    mode: str,
    out: Records,
) -> None:
    kinds = _kinds(world.output_len)
    runs: dict[str, list[Step]] = {}
    for name, message in kinds.items():
        wants = [None] if spec_of(message.sampling) is None else list(compilers)
        for backend in wants:
            grammars = None if backend is None else compilers[backend]
            if grammars is not None:
                compile_all(grammars, [message])
            label = name if backend is None else f"{name}, {backend}"
            runs[label] = _steps(executor, world, grammars, message, num_rows, mode)
    for label, steps in runs.items():
        full = [step for step in steps if step.num_rows == num_rows][SKIPPED:]
        gaps = [later.done_s - step.done_s for step, later in pairwise(full)]
        out.add(
            "cost", rule=label, rows=num_rows, mode=mode, steps=len(full),
            device_ms=1e3 * median(step.device_s for step in full), step_ms=1e3 * median(gaps),
            in_graphs=sum(step.used_graph is True for step in full) / len(full),
        )  # fmt: skip


def _kinds(num_tokens: int) -> dict[str, GenerateRequest]:
    params = SamplingParams(
        max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True, sampling_seed=1, stop_token_ids=(EOS,)
    )
    # No text comes to an end before it is as long as the others.
    free = GenerateRequest("", [], replace(params, min_new_tokens=num_tokens), False, received_ts=0.0)
    made = {
        NO_RULE: free,
        "penalties, biases": _with(
            free, frequency_penalty=0.5, repetition_penalty=1.1, logit_bias=((7, 1.0), (70, -1.0))
        ),
        "bad words": GenerateRequest(
            "", [], free.sampling, False, received_ts=0.0, rules=ChoiceRules(((97, 98), (99, 100, 101)))
        ),
        "grammar": _with(free, regex="[a-z0-9 ]*"),
    }
    if missing("dill") is None:
        banned = replace(free.sampling, custom_params=json.dumps({"token_ids": [7, 70]}))
        made["logit processor"] = GenerateRequest(
            "", [], banned, False, received_ts=0.0, processor=DisallowedTokensLogitsProcessor.to_str()
        )
    return made


def _with(message: GenerateRequest, **params: Any) -> GenerateRequest:
    sampling = replace(message.sampling, **params)
    return GenerateRequest("", [], sampling, False, received_ts=0.0)


def _steps(
    executor: InProcessExecutor,
    world: World,
    grammars: GrammarCompiler | None,
    message: GenerateRequest,
    num_rows: int,
    mode: str,
) -> list[Step]:
    prompts = random_prompts(executor.info.vocab_size, num_rows, PROMPT_LEN)
    messages = [
        GenerateRequest(
            f"r{row}", list(prompt), message.sampling, False, received_ts=0.0, rules=message.rules,
            processor=message.processor,
        )
        for row, prompt in enumerate(prompts)
    ]  # fmt: skip
    run = Run(executor, MODES[mode](), world.decode, grammars, (EOS,), chunk=len(prompts) * PROMPT_LEN)
    run.all_of(messages)
    return run.steps


def table(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    made = ["| rows | mode | rule | device ms | step ms | / no rule | in graphs |", f"|{'---|' * 7}"]
    free = {(line["rows"], line["mode"]): line["step_ms"] for line in lines if line["rule"] == NO_RULE}
    for line in lines:
        ratio = line["step_ms"] / free[line["rows"], line["mode"]]
        made.append(
            f"| {line['rows']} | {line['mode']} | {line['rule']} | {line['device_ms']:.3f} |"
            f" {line['step_ms']:.3f} | {ratio:.2f} | {line['in_graphs']:.2f} |"
        )
    return made
