"""What padded rows leave behind: nothing. The reserved slot's state, and its page."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.bench_one_batch import random_prompts
from sglang.bench_one_batch_cases import OneBatch, places_needed
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.model_executor.step_plan import PAD_PAGE, PAD_SLOT


@dataclass(frozen=True, slots=True)
class Reserved:
    """Copies on the host."""

    state: dict[str, torch.Tensor]
    pages: list[torch.Tensor]  # of each of the pools' tensors: [layers, page, …]

    @staticmethod
    def of(executor: InProcessExecutor) -> Reserved:
        worker, size = executor.worker, executor.info.page_size
        names = ("seq_len", "next_token", "draft_feature", "page_table")
        state = {name: getattr(worker.state, name)[PAD_SLOT].cpu().clone() for name in names}
        place = PAD_PAGE * size
        tensors = [tensor for pool in worker.pools for tensor in pool.tensors]
        pages = [tensor[:, place : place + size].float().cpu() for tensor in tensors]
        return Reserved(state, pages)

    def changed(self, before: Reserved) -> list[str]:
        """Names of what is not, bit for bit, as it was."""
        names = [name for name, value in self.state.items() if not torch.equal(value, before.state[name])]
        pairs = zip(self.pages, before.pages, strict=True)
        return names + [
            f"page of pool {i}" for i, (now, then) in enumerate(pairs) if not torch.equal(now, then)
        ]

    @property
    def is_finite(self) -> bool:
        return all(bool(page.isfinite().all()) for page in self.pages)


def replay(
    executor: InProcessExecutor, rows: int, steps: int, draft_lens: list[int], input_len: int, output_len: int
) -> int:
    """Decode steps of ``rows`` rows, at least ``steps`` of them; returns how many. A graph of more rows
    than that pads them."""
    prompts = random_prompts(executor.info.vocab_size, rows, input_len)
    places, done = places_needed(executor, input_len, output_len), 0
    while done < steps:
        batch = OneBatch(executor, prompts, places)
        batch.prefill()
        done += len(batch.decode_all(draft_lens, output_len))
    return done
