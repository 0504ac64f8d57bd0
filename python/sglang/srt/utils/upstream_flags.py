"""Flags that SGLang has and this server does not, with what to do instead. Plain data."""

from __future__ import annotations

from typing import Final

_EXACT: Final = (
    "verification is exact here (a draft is kept only if the model chooses it itself): leave it out"
)
_GRAPHS: Final = (
    "a decode step is one CUDA graph: use --cuda-graph-max-bs, --cuda-graph-bs or --disable-cuda-graph,"
    " or leave it out"
)
_ONE_DEVICE: Final = "this server runs on one device: leave it out"
_CHAIN_OR_TREE: Final = "only EAGLE-3 drafters are supported: leave it out"
_NO_LORA: Final = "serve a merged checkpoint instead"
_NO_QUANT: Final = "a checkpoint is used as its files are quantised, and nothing else is: leave it out"
_ATTENTION: Final = "one backend serves prefill and decode: use --attention-backend"

_HINTS: Final[dict[str, tuple[str, ...]]] = {
    _EXACT: ("speculative-use-rejection-sampling", "speculative-use-block-verification"),
    _CHAIN_OR_TREE: (
        "speculative-token-map", "speculative-attention-mode", "speculative-draft-window-size",
        "speculative-draft-sink-size", "speculative-moe-runner-backend", "speculative-moe-a2a-backend",
        "speculative-dsa-topk-backend", "speculative-enable-w4a4-mxfp4-megamoe",
        "no-speculative-enable-w4a4-mxfp4-megamoe", "enable-multi-layer-eagle",
        "speculative-dflash-block-size", "speculative-domino-candidate-pool-size",
        "speculative-dspark-block-size", "speculative-dspark-sps-table-path",
        "speculative-dspark-confidence-sts-path", "speculative-dspark-align-verify-tokens-to-graph-tier",
        "speculative-ngram-min-bfs-breadth", "speculative-ngram-max-bfs-breadth",
        "speculative-ngram-match-type", "speculative-ngram-max-trie-depth", "speculative-ngram-capacity",
        "speculative-ngram-external-corpus-path", "speculative-ngram-external-sam-budget",
        "speculative-ngram-external-corpus-max-tokens", "speculative-ngram-min-match-window-size",
        "speculative-ngram-max-match-window-size", "speculative-ngram-branch-length", "uno-lora-path",
        "decoupled-spec-role", "decoupled-spec-rank", "decoupled-spec-bind-endpoint",
        "decoupled-spec-connect-endpoints",
    ),
    "use --speculative-disable-bs-threshold auto, which chooses the number of drafts of every step": (
        "speculative-adaptive", "speculative-adaptive-config",
    ),
    "give a local folder with --model-path or --speculative-draft-model-path": (
        "revision", "speculative-draft-model-revision", "download-dir",
    ),
    _NO_QUANT: (
        "quantization-param-path", "torchao-config", "model-loader-extra-config", "fp8-gemm-backend",
        "modelopt-quant",
    ),
    "the drafter's cache is as the target's: use --kv-cache-dtype": ("speculative-draft-kv-cache-dtype",),
    _ATTENTION: (
        "decode-attention-backend", "prefill-attention-backend", "speculative-draft-attention-backend",
        "mm-attention-backend",
    ),
    _GRAPHS: (
        "cuda-graph-config", "cuda-graph-backend-decode", "cuda-graph-backend-prefill",
        "cuda-graph-max-bs-prefill", "cuda-graph-bs-prefill", "disable-prefill-cuda-graph",
        "enable-torch-compile", "torch-compile-max-bs", "enable-piecewise-cuda-graph",
        "disable-piecewise-cuda-graph", "piecewise-cuda-graph-max-tokens", "piecewise-cuda-graph-tokens",
        "piecewise-cuda-graph-compiler", "enable-profile-cuda-graph", "enable-cudagraph-gc",
    ),
    _ONE_DEVICE: (
        "attn-dp-size", "enable-dp-attention", "enable-dp-lm-head", "load-balance-method", "nnodes",
        "node-rank", "dist-init-addr", "nccl-init-addr", "dist-timeout", "nccl-port", "moe-dense-tp-size",
        "enable-symm-mem", "enable-nccl-nvls", "enable-mscclpp",
        "base-gpu-id", "gpu-id-step", "enable-two-batch-overlap",
        "moe-a2a-backend", "disable-shared-experts-fusion", "enable-ep-moe",
        "enable-deepep-moe", "deepep-mode", "deepep-config", "ep-num-redundant-experts",
        "ep-dispatch-algorithm", "init-expert-location", "enable-eplb", "eplb-algorithm",
        "eplb-rebalance-num-iterations", "elastic-ep-backend", "mooncake-ib-device",
        "enable-single-batch-overlap", "tbo-token-distribution-threshold", "enable-p2p-check",
        "enable-torch-symm-mem", "pp-max-micro-batch-size", "pp-async-batch-depth", "numa-node",
    ),
    "put a proxy that speaks TLS in front of it": (
        "ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-keyfile-password", "enable-ssl-refresh",
    ),
    _NO_LORA: (
        "enable-lora", "lora-paths", "max-loras-per-batch", "max-lora-rank", "lora-backend",
        "lora-target-modules", "max-loaded-loras", "lora-eviction-policy", "enable-lora-overlap-loading",
    ),
    "outlines is not used here: leave it out": ("disable-outlines-disk-cache",),
    "requests run first come, first served, or by --enable-priority-scheduling: leave it out": (
        "schedule-policy", "schedule-conservativeness", "retraction-policy",
        "enable-prefill-delayer", "num-continuous-decode-steps", "scheduler-recv-interval",
        "default-priority-value", "prefill-max-requests", "enable-dynamic-chunking",
    ),
    "only text generation is supported: leave it out": (
        "is-embedding", "enable-multimodal", "completion-template", "skip-tokenizer-init",
        "limit-mm-data-per-request", "mm-process-config", "mm-max-concurrent-calls",
        "mm-per-request-timeout", "mm-enable-dp-encoder", "disable-fast-image-processor",
        "keep-mm-feature-on-device", "encoder-only", "language-only", "encoder-urls", "dllm-algorithm",
        "dllm-algorithm-config", "multi-item-scoring-delimiter",
    ),
    "set what you need in the request": (
        "preferred-sampling-params", "allow-auto-truncate",
    ),
    "there is one scheduler, and --enable-metrics shows it: leave it out": (
        "enable-metrics-for-all-schedulers",
    ),
    "a server with nothing to do uses no CPU: leave it out": ("sleep-on-idle",),
    "use --enable-request-time-stats-logging": ("show-time-cost",),
    "--log-requests writes JSON to the log, --export-metrics-to-file to files": (
        "log-requests-format", "log-requests-target",
    ),
    "one request warms the server up: use --skip-server-warmup, or leave it out": ("warmups",),
    "leave it out": (
        "json-model-override-args", "model-impl", 
        "tokenizer-mode",
        "radix-eviction-policy", "enable-hierarchical-cache", "hicache-ratio", "hicache-size",
        "hicache-write-policy", "hicache-io-backend", "hicache-mem-layout", "hicache-storage-backend",
        "hicache-storage-prefetch-policy", "hicache-storage-backend-extra-config", "enable-lmcache",
        "sampling-backend", "swa-full-tokens-ratio", "disable-hybrid-swa-memory",
        "disable-chunked-prefix-cache", "enable-nan-detection", "rl-on-policy-target",
        "enable-double-sparsity", "delete-ckpt-after-loading", "weight-loader-disable-mmap",
        "weight-loader-prefetch-checkpoints", "enable-weights-cpu-backup", "enable-draft-weights-cpu-backup",
        "enable-tokenizer-batch-encode", "disable-tokenizer-batch-decode", "enable-fp32-lm-head",
        "triton-attention-reduce-in-fp32", "triton-attention-split-tile-size", "disable-flashinfer-autotune",
        "offload-group-size", "offload-num-in-group", "offload-prefetch-step", "offload-mode",
        "tool-server", "hf-chat-template-name", "stream-output", "grpc-mode", "forward-hooks",
        "enable-pdmux", "kv-events-config",
        "gc-warning-threshold-secs",
        "debug-tensor-dump-output-folder", "file-storage-path",
        "triton-attention-num-kv-splits",
        "flashinfer-mla-disable-ragged", "enable-deterministic-inference", "enable-memory-saver",
        "cpu-offload-gb", "disaggregation-mode",
        "disaggregation-transfer-backend", "disaggregation-bootstrap-port",
        "spec-trace-dir",
    ),
}  # fmt: skip


def refused_flags() -> dict[str, str]:
    """Option -> one line that says what to do instead."""
    return {
        f"--{name}": f"SGLang has --{name}; this server does not: {hint}"
        for hint, names in _HINTS.items()
        for name in names
    }
