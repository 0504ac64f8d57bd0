"""Plain arguments an executor is built from; ``server_args`` fills them in for a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExecutorArgs:
    model_path: str
    draft_model_path: str | None = None  # None: no drafter
    load_format: str = "auto"  # auto, safetensors, pt, or dummy: random weights
    draft_load_format: str | None = None  # None: as the target's
    dtype: str = "auto"  # auto: float32 on a CPU, the checkpoint's elsewhere
    device: str = "cpu"
    page_size: int = 1
    max_total_tokens: int | None = None  # KV tokens; None: as many as mem_fraction_static allows
    mem_fraction_static: float = 0.6  # of the memory available after the weights
    max_running_requests: int = 128  # slots
    context_length: int | None = None  # None: the model's
    attention_backend: str = "torch_native"
    num_steps: int = 3
    topk: int = 1
    num_draft_tokens: int = 0  # the root counts; 0: num_steps + 1
    capture_max_bs: int | None = None  # decode rows a speculative step may have; None: all slots
