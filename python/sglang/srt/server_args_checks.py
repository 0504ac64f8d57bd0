"""What is wrong with a server's arguments, and what is derived from them (``ServerArgs.resolve``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.configs import fp4_args
from sglang.srt.configs.graph_args import replaced_on_cpu
from sglang.srt.configs.speculative_args import (
    check_capture,
    check_draft_folder,
    check_exact_verification,
    check_one_mode,
    parse_algorithm,
    resolve_shape,
)
from sglang.srt.utils.flags import ServerArgsError

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

# Beyond these a mistake is likelier than a wish: every slot has rows of state, every page is one piece.
_MOST_RANKS = 64
_MOST = {"max_running_requests": 8192, "page_size": 1024, "tokenizer_worker_num": 64}


def check_ranges(args: ServerArgs) -> None:
    def need(ok: bool, message: str) -> None:
        if not ok:
            raise ServerArgsError(message)

    for name in (
        "max_total_tokens", "max_running_requests", "max_prefill_tokens", "page_size",
        "stream_interval", "decode_log_interval", "speculative_capture_max_bs", "cuda_graph_max_bs",
        "tokenizer_worker_num",
    ):  # fmt: skip
        value = getattr(args, name)
        need(value is None or value >= 1, f"--{name.replace('_', '-')} must be at least 1, got {value}")
    for name, most in _MOST.items():
        value = getattr(args, name)
        need(
            value is None or value <= most, f"--{name.replace('_', '-')} must be at most {most}, got {value}"
        )
    need(
        args.context_length is None or args.context_length >= 2,
        f"--context-length must be at least 2 (a prompt and an answer), got {args.context_length}",
    )
    queued = args.max_queued_requests
    need(queued is None or queued >= 0, f"--max-queued-requests must be at least 0, got {queued}")
    chunk = args.chunked_prefill_size
    need(
        chunk is None or chunk == -1 or chunk >= 1,
        f"--chunked-prefill-size must be at least 1, or -1 for whole prompts; got {chunk}",
    )
    fraction = args.mem_fraction_static
    need(
        fraction is None or 0 < fraction < 1,
        f"--mem-fraction-static must be between 0 and 1, got {fraction}",
    )
    need(0 <= args.port <= 65535, f"--port must be from 0 (any free one) to 65535, got {args.port}")


def check_parallel(args: ServerArgs) -> None:
    for name in ("dp", "ep", "pp"):
        size = getattr(args, f"{name}_size")
        if size != 1:
            raise ServerArgsError(
                f"--{name}-size {size} is not supported yet: use 1, or leave it out; --tp-size splits a model"
            )
    if not 1 <= args.tp_size <= _MOST_RANKS:
        raise ServerArgsError(f"--tp-size must be from 1 to {_MOST_RANKS}, got {args.tp_size}")


def speculative_values(args: ServerArgs, architecture: str | None) -> dict[str, Any]:
    check_exact_verification(args.speculative_accept_threshold_single, args.speculative_accept_threshold_acc)
    algorithm = parse_algorithm(args.speculative_algorithm)
    if algorithm is None:
        _refuse_without_algorithm(args)
        return {"speculative_algorithm": None}
    check_draft_folder(algorithm, args.speculative_draft_model_path)
    check_one_mode(args.speculative_disable_bs_threshold, args.speculative_bs_schedule)
    check_capture(args.speculative_disable_bs_threshold, args.speculative_capture_max_bs)
    shape = resolve_shape(
        args.speculative_num_steps,
        args.speculative_eagle_topk,
        args.speculative_num_draft_tokens,
        architecture,
        algorithm,
    )
    return {
        "speculative_algorithm": algorithm,
        "speculative_num_steps": shape.num_steps,
        "speculative_eagle_topk": shape.eagle_topk,
        "speculative_num_draft_tokens": shape.num_draft_tokens,
        "speculative_draft_load_format": args.speculative_draft_load_format or args.load_format,
    }


def _refuse_without_algorithm(args: ServerArgs) -> None:
    for name in (
        "speculative_disable_bs_threshold", "speculative_capture_max_bs", "speculative_draft_model_path",
        "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens",
        "speculative_draft_load_format", "speculative_bs_schedule", "speculative_auto_table",
        "speculative_draft_model_quantization",
    ):  # fmt: skip
        if getattr(args, name) is not None:
            raise ServerArgsError(
                f"--{name.replace('_', '-')} needs a drafter: add --speculative-algorithm EAGLE3"
                " --speculative-draft-model-path FOLDER, or leave it out"
            )


def replacements(given: ServerArgs, resolved: ServerArgs) -> list[str]:
    """A line for each flag that needs what is not here, with what is used instead."""
    assert resolved.device is not None
    lines = replaced_on_cpu(given.cuda_graph_max_bs, given.cuda_graph_bs, given.attention_backend)
    lines += fp4_args.replaced_on_cpu(given.fp4_gemm_backend, given.moe_runner_backend)
    lines = lines if resolved.device == "cpu" else []
    return lines + replaced_sums(given, resolved.device)


def replaced_sums(given: ServerArgs, device: str) -> list[str]:
    """Of the flags that say how sums over the ranks are made."""
    own, fused = "--disable-custom-all-reduce", "--enable-flashinfer-allreduce-fusion"
    asked = [(given.disable_custom_all_reduce, own), (given.enable_flashinfer_allreduce_fusion, fused)]
    sums = ""
    if given.tp_size == 1:
        sums = "there is one rank, and nothing to sum"
    elif device == "cpu":
        sums = f"sums over the {given.tp_size} ranks are made by Gloo, through the loopback interface"
    return [f"{name}: {sums}" for is_asked, name in asked if is_asked and sums]


def shape_warning(args: ServerArgs, architecture: str | None) -> str:
    """A sentence about a value that ``resolve`` changes; empty if it changes none."""
    algorithm = parse_algorithm(args.speculative_algorithm)
    if algorithm is None:
        return ""
    return resolve_shape(
        args.speculative_num_steps,
        args.speculative_eagle_topk,
        args.speculative_num_draft_tokens,
        architecture,
        algorithm,
    ).warning
