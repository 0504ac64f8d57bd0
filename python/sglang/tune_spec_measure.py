"""One shape of speculation on one executor: what its steps cost, and how many drafts are accepted."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from tqdm import tqdm

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.executor_build import build_executor
from sglang.srt.managers.executor_settings import executor_args
from sglang.srt.managers.io_struct import GenerateRequest, RequestStats, TokenBatch
from sglang.srt.managers.metrics import NullSink
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.model_executor.executor import Executor
from sglang.srt.model_executor.step_plan import SpecShape
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.cost_table import CostTable
from sglang.srt.speculative.toggle import decide_by_threshold
from sglang.srt.utils.flags import ServerArgsError
from sglang.srt.utils.text_tokenizer import TextTokenizer
from sglang.tune_spec_choice import ShapeFigures, survival


@dataclass(frozen=True, slots=True)
class Measured:
    figures: ShapeFigures
    kv_len: float  # places of a row halfway through its answer, on average
    device: str
    seconds: float


def with_shape(args: ServerArgs, shape: SpecShape) -> ServerArgs:
    """Arguments, not resolved yet, of a server that measures its steps and prepares all draft lengths."""
    return replace(
        args,
        speculative_num_steps=shape.num_steps,
        speculative_eagle_topk=shape.topk,
        speculative_num_draft_tokens=shape.num_draft_tokens,
        speculative_disable_bs_threshold="auto",
    )


def measure_shape(
    args: ServerArgs,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    rows: int,
    cost_s: float,
) -> Measured:
    """``args``: resolved, of ``with_shape``. The executor and its memory are gone when this returns.

    ``rows``: prompts that are decoded at once; ``cost_s``: what the timing of steps may take.
    """
    began = time.perf_counter()
    executor = build_executor(replace(executor_args(args), measure_costs_s=cost_s))
    try:
        info = executor.info
        assert info.spec is not None
        table = CostTable.from_costs(info.costs, padded=bool(info.graphs))
        stats = decode_all(executor, args, prompts, sampling, rows)
        histogram = [0] * (info.spec.num_steps + 1)
        for one in stats:
            for accepted, count in enumerate(one.spec_correct_drafts_histogram):
                histogram[accepted] += count
        if not any(histogram):
            raise ServerArgsError(
                "the model ended every answer at once, so no draft was seen: give other prompts (--prompts)"
            )
        kv_len = sum(one.prompt_tokens + one.completion_tokens / 2 for one in stats) / len(stats)
        seen = survival(histogram, info.spec.num_steps)
        figures = ShapeFigures(info.spec, table, seen, info.max_spec_rows)
        return Measured(figures, kv_len, info.device_name, time.perf_counter() - began)
    finally:
        executor.shutdown()
        del executor
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()


def decode_all(
    executor: Executor,
    args: ServerArgs,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    rows: int,
) -> list[RequestStats]:
    """Answers to all prompts, every step with all drafts; what each request met."""
    assert args.model_path is not None and args.tokenizer_path is not None
    tokenizer, info = TextTokenizer.from_folder(args.tokenizer_path), executor.info
    found: list[RequestStats] = []
    bar = tqdm(total=len(prompts), desc="Decoding prompts", disable=None)  # None: only on a terminal

    def emitted(batch: TokenBatch) -> None:
        for output in batch.outputs:
            if output.finish is None:
                continue
            if output.finish.type == "abort":
                raise ServerArgsError(f"a prompt was refused: {output.finish.message}")
            found.append(output.stats)
            bar.update()

    scheduler = Scheduler(
        executor=executor,
        config=SchedulerConfig(
            max_running_requests=min(rows, info.num_slots, info.max_spec_rows),
            chunked_prefill_size=args.chunked_prefill_size or info.default_chunk,
            max_prefill_tokens=args.max_prefill_tokens,
        ),
        policy=decide_by_threshold,
        cache=RadixCache(info.page_size),
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        eos_ids=tokenizer.stop_ids(ModelConfig.from_folder(args.model_path, args.context_length).eos_ids),
        emit=emitted,
        reply=lambda reply: None,
        metrics=NullSink(),
        clock=time.time,
    )
    for number, ids in enumerate(prompts):
        params = sampling.for_sample(seed=number)
        scheduler.receive(GenerateRequest(f"p{number}", list(ids), params, stream=False, received_ts=0.0))
    scheduler.drain()
    bar.close()
    return found
