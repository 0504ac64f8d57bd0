"""From a server's settings to an executor's."""

from __future__ import annotations

from typing import Final

from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.configs.grammar_args import NO_BACKEND
from sglang.srt.configs.speculative_args import AUTO
from sglang.srt.managers.mode_args import may_be_ragged, spec_rows
from sglang.srt.server_args import ServerArgs

DEFAULT_RUNNING_REQUESTS: Final = 128
DEFAULT_MEM_FRACTION: Final = {"cpu": 0.6, "cuda": 0.88}


def executor_args(args: ServerArgs) -> ExecutorArgs:
    """``args`` are resolved."""
    assert args.model_path is not None and args.attention_backend is not None and args.device is not None
    speculates = args.speculative_algorithm is not None
    threshold, capture = args.speculative_disable_bs_threshold, args.speculative_capture_max_bs
    if capture is None and isinstance(threshold, int) and threshold > 0:
        capture = threshold
    return ExecutorArgs(
        model_path=args.model_path,
        draft_model_path=args.speculative_draft_model_path if speculates else None,
        draft_kind=args.speculative_algorithm,
        load_format=args.load_format,
        draft_load_format=args.speculative_draft_load_format,
        quantization=args.quantization,
        draft_quantization=args.speculative_draft_model_quantization,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        device=args.device,
        tp_size=args.tp_size,
        page_size=args.page_size,
        max_total_tokens=args.max_total_tokens,
        mem_fraction_static=args.mem_fraction_static or DEFAULT_MEM_FRACTION[args.device],
        max_running_requests=args.max_running_requests or DEFAULT_RUNNING_REQUESTS,
        context_length=args.context_length,
        attention_backend=args.attention_backend,
        fp4_gemm_backend=args.fp4_gemm_backend,
        moe_runner_backend=args.moe_runner_backend,
        num_steps=args.speculative_num_steps or 0,
        topk=args.speculative_eagle_topk or 1,
        num_draft_tokens=args.speculative_num_draft_tokens or 0,
        capture_max_bs=capture,
        spec_rows=spec_rows(args) if speculates and args.device == "cuda" else (),
        ragged_steps=may_be_ragged(args),
        measure_costs=threshold == AUTO and args.speculative_auto_table is None,
        disable_custom_all_reduce=args.disable_custom_all_reduce,
        fuse_all_reduce=args.enable_flashinfer_allreduce_fusion,
        chunked_prefill_size=args.chunked_prefill_size,
        max_prefill_tokens=args.max_prefill_tokens,
        cuda_graph_max_bs=args.cuda_graph_max_bs,
        cuda_graph_bs=args.cuda_graph_bs,
        disable_cuda_graph=args.disable_cuda_graph,
        disable_cuda_graph_padding=args.disable_cuda_graph_padding,
        masked_steps=args.grammar_backend != NO_BACKEND,
        kernel_choices_file=args.kernel_choices_file,
    )
