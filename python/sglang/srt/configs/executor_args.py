"""Plain arguments an executor is built from; ``server_args`` fills them in for a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExecutorArgs:
    model_path: str
    draft_model_path: str | None = None
    draft_kind: str | None = None  # of speculative_args.py; None: EAGLE3 with a draft_model_path, else none
    load_format: str = "auto"  # auto, safetensors, pt, gguf, or dummy: random weights
    draft_load_format: str | None = None  # None: as the target's
    quantization: str | None = None  # None: whatever the files say; else they must say the same
    draft_quantization: str | None = None
    dtype: str = "auto"  # auto: float32 on a CPU, the checkpoint's elsewhere
    kv_cache_dtype: str = "auto"  # auto, bfloat16 and bf16: the run's dtype; fp8_e4m3
    device: str = "cpu"  # or cuda
    tp_size: int = 1  # ranks that the model is split over
    page_size: int = 1
    max_total_tokens: int | None = None  # KV tokens; None: as many as mem_fraction_static allows
    # On a CPU of the memory available after the weights, for KV; on CUDA of all, for weights, KV and graphs.
    mem_fraction_static: float = 0.6
    max_running_requests: int = 128  # slots
    context_length: int | None = None  # None: the model's
    attention_backend: str = "torch_native"  # on CUDA: triton
    fp4_gemm_backend: str = "auto"  # of fp4_args.py; flashinfer_cutlass: inputs of NVFP4 layers in NVFP4 too
    moe_runner_backend: str = "auto"  # the same for experts
    num_steps: int = 3
    topk: int = 1
    num_draft_tokens: int = 0  # the root counts; 0: num_steps + 1
    # Decode rows a speculative step may have; None: all slots, on CUDA the plain graphs' largest.
    capture_max_bs: int | None = None
    # Draft lengths of the speculative steps to prepare, and the most rows of each (None: capture_max_bs);
    # (): num_steps alone. Where nothing is captured, steps of every length can be run.
    spec_rows: tuple[tuple[int, int | None], ...] = ()
    ragged_steps: bool = False  # `auto` may give rows draft lengths of their own: steps for that are captured
    measure_costs: bool = False  # at the start, for ExecutorInfo.costs
    measure_costs_s: float | None = None  # what that may take; None: a few seconds, as a server may
    # The rest is for CUDA.
    disable_custom_all_reduce: bool = False  # sums over ranks by NCCL alone
    fuse_all_reduce: bool = False  # but those added to the residual stream by our own kernels all the same
    flashinfer_sums: bool = False  # FlashInfer's kernel is one of the ways for sums that are normed
    chunked_prefill_size: int | None = None  # prompt tokens of a step; None: the device's; -1: whole prompts
    max_prefill_tokens: int = 16384
    cuda_graph_max_bs: int | None = None  # None: 256, but no more than there are slots
    cuda_graph_bs: tuple[int, ...] | None = None  # exactly these sizes
    disable_cuda_graph: bool = False
    disable_cuda_graph_padding: bool = False
    masked_steps: bool = False  # there may be grammars: graphs for steps with masks are captured too
    kernel_choices_file: str | None = (
        None  # JSON: the fastest kernel of every product; None: timed at every start
    )
