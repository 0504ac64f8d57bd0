"""Every setting of a server: one table (the fields), from which the command line is made.

A flag that is here works. What SGLang has and this server does not is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sglang.srt.configs.fp4_args import check_fp4_flags
from sglang.srt.configs.grammar_args import BACKENDS, check_grammar_flags
from sglang.srt.configs.graph_args import attention_backend, check_graph_flags
from sglang.srt.configs.operations_args import LOG_LEVELS, check_operations
from sglang.srt.configs.parser_args import REASONING_PARSERS, TOOL_CALL_PARSERS
from sglang.srt.configs.priority_args import PriorityArgs, check_priority_flags
from sglang.srt.configs.quant_args import QUANTIZATIONS
from sglang.srt.configs.speculative_args import Threshold, parse_threshold
from sglang.srt.server_args_checks import check_parallel, check_ranges, speculative_values
from sglang.srt.utils.config_file import config_file, read_config_file
from sglang.srt.utils.flags import ServerArgsError, check_keywords, flag, parse_flags, refuse_empty
from sglang.srt.utils.gpu import has_gpu
from sglang.srt.utils.upstream_flags import refused_flags

SECRETS = ("api_key", "admin_api_key")  # fields that are shown to nobody


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs(PriorityArgs):
    """As given by the user; ``resolve`` returns one with the derived values filled in."""

    # ---- model
    model_path: str | None = flag(
        None,
        str,
        "model",
        "folder of the model; without it the embedded model is served",
        aliases=("--model",),
    )
    tokenizer_path: str | None = flag(None, str, "model", "folder of the tokenizer (default: the model's)")
    load_format: str = flag(
        "auto",
        str,
        "model",
        "gguf: from the one .gguf file in the folder, beside its config.json and tokenizer; dummy: random"
        " weights of the right shapes; auto: what is there",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    trust_remote_code: bool = flag(
        False,
        bool,
        "model",
        "may be given, as in commands for SGLang; code from a checkpoint is never run here",
    )
    context_length: int | None = flag(
        None, int, "model", "most tokens of a request (default: the model's limit)"
    )
    dtype: str = flag(
        "auto",
        str,
        "model",
        "dtype of the weights and what is computed; auto: the checkpoint's, float32 on a CPU",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32", "float64"),
    )
    kv_cache_dtype: str = flag(
        "auto",
        str,
        "model",
        "type of keys, values and latents in the cache; auto, bfloat16, bf16: the model's; fp8_e4m3: half the"
        " memory and reading, without scales, the same for every step",
        choices=("auto", "bfloat16", "bf16", "fp8_e4m3"),
    )
    quantization: str | None = flag(
        None,
        str,
        "model",
        "how the model's files are quantised: they say so themselves, and what contradicts them is refused",
        choices=QUANTIZATIONS,
    )
    device: str | None = flag(
        None,
        str,
        "model",
        "where the model runs (default: cuda where there is a GPU)",
        choices=("cpu", "cuda"),
    )
    served_model_name: str | None = flag(None, str, "model", "name the API shows (default: the model path)")
    weight_version: str = flag("default", str, "model", "shown in meta_info and /model_info")
    chat_template: str | None = flag(
        None, str, "model", "Jinja file to use instead of the tokenizer's template"
    )
    tool_call_parser: str | None = flag(
        None, str, "model", "how the model writes calls of tools", choices=TOOL_CALL_PARSERS
    )
    reasoning_parser: str | None = flag(
        None, str, "model", "how the model marks its reasoning", choices=REASONING_PARSERS
    )
    sampling_defaults: str = flag(
        "model",
        str,
        "model",
        "where the OpenAI endpoints take sampling defaults from: generation_config.json, or OpenAI's own",
        choices=("model", "openai"),
    )
    random_seed: int | None = flag(None, int, "model", "seed of requests that bring none (default: random)")

    # ---- HTTP
    host: str = flag("127.0.0.1", str, "HTTP server", "address to listen on")
    port: int = flag(30000, int, "HTTP server", "port to listen on")
    tokenizer_worker_num: int = flag(
        1,
        int,
        "HTTP server",
        "processes that answer clients and tokenise; more than one where one core can't write all streams",
    )
    skip_server_warmup: bool = flag(False, bool, "HTTP server", "open without running a request first")
    stream_interval: int = flag(1, int, "HTTP server", "tokens between two chunks of a stream")
    incremental_streaming_output: bool = flag(
        False,
        bool,
        "HTTP server",
        "/generate streams what is new in each chunk rather than everything so far",
    )
    enable_cache_report: bool = flag(
        False,
        bool,
        "HTTP server",
        "usage of the OpenAI endpoints says how many of the prompt's tokens were in the prefix cache",
    )
    stream_response_default_include_usage: bool = flag(
        False,
        bool,
        "HTTP server",
        "streams of the OpenAI endpoints end with the usage, also where a request does not ask for it",
    )

    # ---- memory and schedule
    mem_fraction_static: float | None = flag(
        None,
        float,
        "memory and schedule",
        "share of the GPU's memory for weights, KV cache and CUDA graphs (default: 0.88); on a CPU, share of"
        " what the weights leave for the KV cache (default: 0.6)",
    )
    max_total_tokens: int | None = flag(None, int, "memory and schedule", "tokens the KV cache holds")
    max_running_requests: int | None = flag(None, int, "memory and schedule", "requests that run at once")
    max_queued_requests: int | None = flag(
        None, int, "memory and schedule", "requests that may wait; more are refused with status 503"
    )
    chunked_prefill_size: int | None = flag(
        None,
        int,
        "memory and schedule",
        "most prompt tokens of one request in one step (-1: whole prompts; default: 512 on a CPU, 8192 on a"
        " GPU, 16384 on one of more than 100 GB)",
    )
    max_prefill_tokens: int = flag(16384, int, "memory and schedule", "most prompt tokens in one step")
    page_size: int = flag(1, int, "memory and schedule", "tokens in a page of the KV cache")
    enable_mixed_chunk: bool = flag(
        False, bool, "memory and schedule", "let prompt chunks and decoding requests share a step"
    )
    disable_overlap_schedule: bool = flag(
        False, bool, "memory and schedule", "finish each step before planning the next"
    )
    disable_radix_cache: bool = flag(False, bool, "memory and schedule", "do not reuse prefixes of prompts")
    attention_backend: str | None = flag(
        None,
        str,
        "memory and schedule",
        "triton on a GPU (flashinfer: prefill by it, all else by triton), torch_native on a CPU",
    )
    fp4_gemm_backend: str = flag(
        "auto",
        str,
        "memory and schedule",
        "how linear layers in NVFP4 are multiplied: auto, triton: our own kernels, inputs in half precision;"
        " flashinfer_cutlass: inputs in NVFP4 too, by FlashInfer on SM100 and SM120",
    )
    moe_runner_backend: str = flag(
        "auto",
        str,
        "memory and schedule",
        "how experts are multiplied: auto, triton: our own kernels; flashinfer_cutlass: those in NVFP4 with"
        " inputs in NVFP4 too, by FlashInfer on SM100 and SM120",
    )
    cuda_graph_max_bs: int | None = flag(
        None,
        int,
        "memory and schedule",
        "most requests of a plain decode step for which a CUDA graph is captured (default: 256, or"
        " --max-running-requests); larger steps run eagerly",
        aliases=("--cuda-graph-max-bs-decode",),
    )
    cuda_graph_bs: tuple[int, ...] | None = flag(
        None,
        int,
        "memory and schedule",
        "sizes for which CUDA graphs are captured, instead of the usual ones",
        aliases=("--cuda-graph-bs-decode",),
        many=True,
    )
    disable_cuda_graph: bool = flag(
        False,
        bool,
        "memory and schedule",
        "run every decode step eagerly",
        aliases=("--disable-decode-cuda-graph",),
    )
    disable_cuda_graph_padding: bool = flag(
        False, bool, "memory and schedule", "use a CUDA graph only for a batch of exactly its size"
    )
    kernel_choices_file: str | None = flag(
        None,
        str,
        "memory and schedule",
        "JSON file with the fastest kernel of every matrix product: read where it exists, completed by timing"
        " at the start, written (default: timed at every start)",
    )
    tp_size: int = flag(
        1,
        int,
        "parallel",
        "processes that the model is split over, a GPU each",
        aliases=("--tp", "--tensor-parallel-size"),
    )
    dp_size: int = flag(1, int, "parallel", "only 1 works now", aliases=("--dp", "--data-parallel-size"))
    ep_size: int = flag(1, int, "parallel", "only 1 works now", aliases=("--ep", "--expert-parallel-size"))
    pp_size: int = flag(1, int, "parallel", "only 1 works now", aliases=("--pp", "--pipeline-parallel-size"))

    disable_custom_all_reduce: bool = flag(
        False,
        bool,
        "parallel",
        "sums over GPUs by NCCL alone, not by our own kernels where these are faster",
    )
    enable_flashinfer_allreduce_fusion: bool = flag(
        False,
        bool,
        "parallel",
        "sums over GPUs with the residual stream and its RMS norm in one kernel, also with"
        " --disable-custom-all-reduce: FlashInfer's where it can be had and is the fastest, else our own",
    )

    # ---- speculative decoding
    speculative_algorithm: str | None = flag(
        None,
        str,
        "speculative decoding",
        "EAGLE3: a drafter that reads the model's hidden states; EAGLE or NEXTN: the draft head that the"
        " model's own files hold; STANDALONE: a small model with the same tokenizer; NGRAM: what followed the"
        " same tokens before; NONE: plain decoding, also for the embedded model",
    )
    speculative_draft_model_path: str | None = flag(
        None,
        str,
        "speculative decoding",
        "folder of the drafter (EAGLE or NEXTN: default the model's)",
        aliases=("--speculative-draft-model",),
    )
    speculative_draft_load_format: str | None = flag(
        None,
        str,
        "speculative decoding",
        "as --load-format, for the drafter (default: the same)",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    speculative_draft_model_quantization: str | None = flag(
        None,
        str,
        "speculative decoding",
        "as --quantization, for the drafter (default: what its files say)",
        choices=QUANTIZATIONS,
    )
    speculative_num_steps: int | None = flag(None, int, "speculative decoding", "draft forwards in a step")
    speculative_eagle_topk: int | None = flag(
        None, int, "speculative decoding", "drafts kept at each node; 1: a chain"
    )
    speculative_num_draft_tokens: int | None = flag(
        None, int, "speculative decoding", "rows a request has in the target's forward, the root counted"
    )
    speculative_accept_threshold_single: float = flag(1.0, float, "speculative decoding", "only 1.0: exact")
    speculative_accept_threshold_acc: float = flag(1.0, float, "speculative decoding", "only 1.0: exact")
    speculative_disable_bs_threshold: Threshold = flag(
        None,
        str,
        "speculative decoding",
        "a decode step with more requests than this runs plain; 0: never speculate; auto: every step has the"
        " number of drafts that promises the most tokens per second, by step times measured at the start and"
        " the acceptance seen; unset: always (with the embedded model: its own threshold)",
    )
    speculative_bs_schedule: str | None = flag(
        None,
        str,
        "speculative decoding",
        "instead of a threshold: drafts by the number of decoding requests, as 1-4:5,5-16:3,17-32:1,33-:0",
    )
    speculative_auto_table: str | None = flag(
        None,
        str,
        "speculative decoding",
        "JSON file from which auto takes step times and acceptance to begin with, as python -m"
        " sglang.tune_spec --save writes it (default: step times are measured at the start)",
    )
    speculative_capture_max_bs: int | None = flag(
        None,
        int,
        "speculative decoding",
        "most requests a speculative step is prepared for, and so how far the threshold can be raised later"
        " (default: the threshold, or as the schedule says; else as many as decode at once)",
    )

    # ---- structured output
    grammar_backend: str = flag(
        "xgrammar",
        str,
        "structured output",
        "library for JSON schemas, regular expressions, EBNF and structural tags; none: they are refused",
        choices=BACKENDS,
    )
    constrained_json_whitespace_pattern: str | None = flag(
        None,
        str,
        "structured output",
        "regular expression of the white space that JSON may have (llguidance alone; default: any)",
    )
    constrained_json_disable_any_whitespace: bool = flag(
        False, bool, "structured output", "JSON has no white space but in its strings"
    )

    # ---- observability
    log_level: str = flag("info", str, "observability", "what is logged", choices=LOG_LEVELS)
    decode_log_interval: int = flag(40, int, "observability", "decode steps between two log lines")
    enable_metrics: bool = flag(False, bool, "observability", "serve Prometheus metrics at /metrics")

    @staticmethod
    def from_command_line(argv: Sequence[str], prog: str = "python -m sglang.launch_server") -> ServerArgs:
        description = "Serve a language model over HTTP, with speculation that is chosen step by step."
        file = config_file(argv)
        given = {} if file is None else _from_file(file)
        values = parse_flags(ServerArgs, argv, prog, description, refused_flags(), given)
        refuse_empty(ServerArgs, values)
        return ServerArgs(**_with_number_threshold(values))

    @staticmethod
    def from_keywords(**values: Any) -> ServerArgs:
        file = values.get("config")
        if isinstance(file, str) and file:
            values = {**_from_file(file), **values}
        return ServerArgs(**_checked_keywords(values))

    def resolve(self, architecture: str | None) -> ServerArgs:
        """Check everything that can be checked without the model, and fill in derived values.

        ``model_path`` is set by now; ``architecture`` is the first of the model's ``config.json``.

        Raises:
            ServerArgsError: one line for the user.
        """
        assert self.model_path is not None
        check_ranges(self)
        check_operations(self)
        check_priority_flags(self)
        check_grammar_flags(
            self.grammar_backend,
            self.constrained_json_whitespace_pattern,
            self.constrained_json_disable_any_whitespace,
        )
        device = self.device or ("cuda" if has_gpu() else "cpu")
        check_parallel(self)
        check_fp4_flags(self.fp4_gemm_backend, self.moe_runner_backend, device)
        check_graph_flags(
            device,
            self.cuda_graph_max_bs,
            self.cuda_graph_bs,
            self.disable_cuda_graph,
            self.disable_cuda_graph_padding,
            self.kernel_choices_file is not None,
        )
        return replace(
            self,
            device=device,
            tokenizer_path=self.tokenizer_path or self.model_path,
            served_model_name=self.served_model_name or self.model_path,
            attention_backend=attention_backend(self.attention_backend, device),
            **speculative_values(self, architecture),
        )

    def public_dict(self) -> dict[str, Any]:
        """Everything that may be shown to a client: not the keys."""
        values = asdict(self)
        for name in SECRETS:
            values[name] = None if values[name] is None else "***"
        return values


_THRESHOLD = "speculative_disable_bs_threshold"


def _from_file(file: str) -> dict[str, Any]:
    values = read_config_file(file, ServerArgs)
    try:
        return _checked_keywords(values)
    except ServerArgsError as error:
        raise ServerArgsError(f"--config {file}: {error}") from error


def _checked_keywords(values: Mapping[str, Any]) -> dict[str, Any]:
    refuse_empty(ServerArgs, values)
    values = _with_number_threshold(values)
    check_keywords(ServerArgs, {k: v for k, v in values.items() if k != _THRESHOLD}, refused_flags())
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


def _with_number_threshold(values: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(values)
    if given.get(_THRESHOLD) is not None:
        given[_THRESHOLD] = parse_threshold(given[_THRESHOLD])
    return given
