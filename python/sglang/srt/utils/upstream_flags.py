"""Flags that SGLang has and this server does not, with what to do instead. Plain data."""

from __future__ import annotations

from typing import Final

_EXACT: Final = (
    "verification is exact here (a draft is kept only if the model chooses it itself): leave it out"
)
_NO_GRAPHS: Final = "there are no CUDA graphs on the CPU backend: leave it out"
_ONE_DEVICE: Final = "this server runs on one device: leave it out"
_CHAIN_OR_TREE: Final = "only EAGLE-3 drafters are supported: leave it out"
_NO_LORA: Final = "serve a merged checkpoint instead"
_NO_PARSERS: Final = "the reply's text is returned as the model wrote it: parse it in the client"
_NO_QUANT: Final = "only unquantised checkpoints are supported: choose one, or convert it to bfloat16"
_ATTENTION: Final = "one backend serves prefill and decode: use --attention-backend"

_HINTS: Final[dict[str, tuple[str, ...]]] = {
    _EXACT: ("speculative-use-rejection-sampling", "speculative-use-block-verification"),
    _CHAIN_OR_TREE: (
        "speculative-token-map", "speculative-attention-mode", "speculative-draft-window-size",
        "speculative-draft-sink-size", "speculative-moe-runner-backend", "speculative-moe-a2a-backend",
        "speculative-dsa-topk-backend", "speculative-enable-w4a4-mxfp4-megamoe", "enable-multi-layer-eagle",
        "speculative-dflash-block-size", "speculative-domino-candidate-pool-size",
        "speculative-dspark-block-size", "speculative-dspark-sps-table-path",
        "speculative-dspark-confidence-sts-path", "speculative-dspark-align-verify-tokens-to-graph-tier",
        "speculative-ngram-min-bfs-breadth", "speculative-ngram-max-bfs-breadth",
        "speculative-ngram-match-type", "speculative-ngram-max-trie-depth", "speculative-ngram-capacity",
        "speculative-ngram-external-corpus-path", "speculative-ngram-external-sam-budget",
        "speculative-ngram-external-corpus-max-tokens", "uno-lora-path", "decoupled-spec-role",
        "decoupled-spec-rank", "decoupled-spec-bind-endpoint", "decoupled-spec-connect-endpoints",
    ),
    "use --speculative-disable-bs-threshold N, which chooses the mode of every step": (
        "speculative-adaptive", "speculative-adaptive-config",
    ),
    "give a local folder with --model-path or --speculative-draft-model-path": (
        "revision", "speculative-draft-model-revision", "download-dir",
    ),
    _NO_QUANT: (
        "quantization", "quantization-param-path", "speculative-draft-model-quantization", "torchao-config",
        "model-loader-extra-config", "fp8-gemm-backend", "modelopt-quant",
    ),
    "the KV cache has the model's dtype: use --dtype": ("kv-cache-dtype", "speculative-draft-kv-cache-dtype"),
    _ATTENTION: (
        "decode-attention-backend", "prefill-attention-backend", "speculative-draft-attention-backend",
        "mm-attention-backend",
    ),
    _NO_GRAPHS: (
        "cuda-graph-max-bs", "cuda-graph-bs", "cuda-graph-config", "cuda-graph-backend-decode",
        "cuda-graph-backend-prefill", "cuda-graph-max-bs-decode", "cuda-graph-max-bs-prefill",
        "cuda-graph-bs-decode", "cuda-graph-bs-prefill", "disable-prefill-cuda-graph",
        "disable-decode-cuda-graph", "disable-cuda-graph", "disable-cuda-graph-padding",
        "enable-torch-compile", "torch-compile-max-bs", "enable-piecewise-cuda-graph",
    ),
    _ONE_DEVICE: (
        "attn-dp-size", "enable-dp-attention", "enable-dp-lm-head", "load-balance-method", "nnodes",
        "node-rank", "dist-init-addr", "nccl-init-addr", "dist-timeout", "nccl-port", "moe-dense-tp-size",
        "disable-custom-all-reduce", "enable-symm-mem", "enable-nccl-nvls", "enable-mscclpp",
        "enable-flashinfer-allreduce-fusion", "base-gpu-id", "gpu-id-step", "enable-two-batch-overlap",
        "moe-runner-backend", "moe-a2a-backend", "disable-shared-experts-fusion",
    ),
    _NO_LORA: ("enable-lora", "lora-paths", "max-loras-per-batch", "max-lora-rank"),
    _NO_PARSERS: ("reasoning-parser", "tool-call-parser"),
    "constrained decoding is not supported: leave it out": (
        "grammar-backend", "constrained-json-whitespace-pattern", "disable-outlines-disk-cache",
    ),
    "requests run first come, first served: leave it out": (
        "schedule-policy", "schedule-conservativeness", "enable-priority-scheduling", "retraction-policy",
        "enable-prefill-delayer", "num-continuous-decode-steps", "scheduler-recv-interval",
    ),
    "only text generation is supported: leave it out": (
        "is-embedding", "enable-multimodal", "completion-template", "skip-tokenizer-init",
    ),
    "set what you need in the request": (
        "preferred-sampling-params", "stream-response-default-include-usage", "allow-auto-truncate",
        "enable-custom-logit-processor", "enable-return-hidden-states",
    ),
    "leave it out": (
        "json-model-override-args", "model-impl", "admin-api-key", "enable-cache-report",
        "tokenizer-worker-num", "tokenizer-mode", "fastapi-root-path", "config", "warmups",
        "radix-eviction-policy", "enable-hierarchical-cache", "sampling-backend",
        "triton-attention-num-kv-splits",
        "flashinfer-mla-disable-ragged", "enable-deterministic-inference", "enable-memory-saver",
        "cpu-offload-gb", "watchdog-timeout", "soft-watchdog-timeout", "sleep-on-idle", "disaggregation-mode",
        "disaggregation-transfer-backend", "disaggregation-bootstrap-port", "log-level-http", "log-requests",
        "log-requests-level", "enable-metrics-for-all-schedulers", "bucket-time-to-first-token",
        "bucket-inter-token-latency", "bucket-e2e-request-latency", "prompt-tokens-buckets",
        "generation-tokens-buckets", "extra-metric-labels", "enable-request-time-stats-logging",
        "crash-dump-folder", "enable-trace", "export-metrics-to-file", "show-time-cost", "spec-trace-dir",
    ),
}  # fmt: skip


def refused_flags() -> dict[str, str]:
    """Option -> one line that says what to do instead."""
    return {
        f"--{name}": f"SGLang has --{name}; this server does not: {hint}"
        for hint, names in _HINTS.items()
        for name in names
    }
