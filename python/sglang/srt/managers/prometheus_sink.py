"""Scheduler metrics for Prometheus, under upstream's names.

The scheduler is not the process that answers /metrics, so the launcher sets PROMETHEUS_MULTIPROC_DIR
before this module is imported; values then travel through files in that folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from sglang.srt.managers.metrics import DecodeReport, EngineConstants, IntervalReport, Load, PrefillReport

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkLabels:
    model_name: str
    engine_type: str = "unified"
    tp_rank: int = 0
    pp_rank: int = 0
    moe_ep_rank: int = 0


_COMPUTED, _CACHED, _DECODED = "prefill_compute", "prefill_cache", "decode"

GAUGES = {
    "num_running_reqs": "Requests that prefill or decode.",
    "num_queue_reqs": "Requests that wait.",
    "num_grammar_queue_reqs": "Requests that wait for their grammars.",
    "num_used_tokens": "KV places in use, those of evictable prefixes left out.",
    "num_paused_reqs": "Requests that would run if the server were not paused.",
    "kv_used_tokens": "KV places in use, those of evictable prefixes left out.",
    "token_usage": "Part of the KV places in use.",
    "full_token_usage": "Part of the KV places in use (of layers with full attention; there are no others).",
    "kv_available_tokens": "KV places that are free or hold evictable prefixes.",
    "kv_evictable_tokens": "KV places of evictable prefixes.",
    "utilization": "Requests that run, as a part of those that can.",
    "decode_sum_seq_lens": "Tokens of the requests of the last decode step before it, prompts counted.",
    "fwd_occupancy": "Percent of the last log interval in which the device worked (idle time left out).",
    "gen_throughput": "Tokens per second over the last log interval.",
    "cache_hit_rate": "Part of the last prefill's tokens that the prefix cache had.",
    "max_total_num_tokens": "KV places.",
    "page_size": "KV places of a page.",
    "num_pages": "KV pages.",
    "context_len": "Most tokens of one request.",
    "weight_memory_usage_gb": "Memory of the weights.",
    "kv_cache_memory_usage_gb": "Memory of the KV pools.",
    "num_retracted_reqs": "Requests retracted in the last log interval.",
}
SPEC_GAUGES = {
    "spec_num_steps": "Draft steps of a speculative step.",
    "spec_num_draft_tokens": "Rows a request takes in a verification.",
    "spec_draft_len": "Drafts of the last decode step; 0: plain.",
    "spec_accept_length": "Tokens per row of the last interval's speculative steps; NaN: there were none.",
    "spec_accept_rate": "Part of the last interval's drafts accepted; NaN: there were none.",
}
COUNTERS = {
    "cached_tokens": ("Prompt tokens found in the prefix cache.", ("cache_source",)),
    "num_aborted_requests": ("Requests aborted or refused.", ()),
    "num_retracted_requests": ("Retractions.", ()),
    "num_retracted_input_tokens": ("Prompt tokens of retracted requests.", ()),
    "num_retracted_output_tokens": ("Output tokens of retracted requests.", ()),
    "evicted_tokens": ("KV places evicted from the prefix cache.", ()),
    "realtime_tokens": ("Tokens as they are made: prompts computed or cached, and answers.", ("mode",)),
    "decode_steps": ("Decode steps.", ("mode",)),
    "decode_tokens": ("Tokens emitted by decode steps.", ("mode",)),
}
GRAPH_GAUGES = {"is_cuda_graph": "Whether the last decode step was a CUDA graph."}
GRAPH_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cuda_graph_passes": ("Decode steps with a CUDA graph and without.", ("mode",)),
    "cuda_graph_eager_steps": ("Decode steps that no CUDA graph covered.", ()),
}
SPEC_COUNTERS = {
    "spec_verify_calls": ("Rows verified.", ()),
    "spec_decisions": ("Decode steps by drafts and the reason for them.", ("draft_len", "reason")),
    "spec_switches": ("Changes of mode between decode steps.", ("to", "reason")),
}


class PrometheusSink:
    def __init__(
        self,
        labels: SinkLabels,
        registry: CollectorRegistry = REGISTRY,
        extra_labels: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._labels = {name: str(value) for name, value in asdict(labels).items()} | dict(extra_labels)
        self._registry = registry
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._gauge_samples: dict[str, Gauge] = {}
        self._counter_samples: dict[tuple[str, ...], Counter] = {}  # by name and further labels' values
        self._num_retracted = 0
        self._max_running = 0
        self._make(GAUGES, COUNTERS)

    def _make(self, gauges: dict[str, str], counters: dict[str, tuple[str, tuple[str, ...]]]) -> None:
        names = list(self._labels)
        for name, text in gauges.items():
            self._gauges[name] = Gauge(
                f"sglang:{name}", text, names, multiprocess_mode="mostrecent", registry=self._registry
            )
        for name, (text, extra) in counters.items():
            self._counters[name] = Counter(f"sglang:{name}", text, [*names, *extra], registry=self._registry)

    def _set(self, name: str, value: float) -> None:
        sample = self._gauge_samples.get(name)
        if sample is None:  # looking a sample up by its labels takes longer than setting it
            sample = self._gauge_samples[name] = self._gauges[name].labels(**self._labels)
        sample.set(value)

    def _count(self, name: str, value: float, **extra: str) -> None:
        key = (name, *extra.values())
        sample = self._counter_samples.get(key)
        if sample is None:
            sample = self._counter_samples[key] = self._counters[name].labels(**self._labels, **extra)
        sample.inc(value)

    def constants(self, constants: EngineConstants) -> None:
        self._max_running = constants.max_running
        self._set("max_total_num_tokens", constants.token_capacity)
        self._set("page_size", constants.page_size)
        self._set("num_pages", constants.num_pages)
        self._set("context_len", constants.context_len)
        self._set("weight_memory_usage_gb", constants.weight_bytes / GIB)
        self._set("kv_cache_memory_usage_gb", constants.kv_bytes / GIB)
        for mode in ("plain", "spec") if constants.spec_num_steps is not None else ("plain",):
            self._count("decode_steps", 0, mode=mode)
            self._count("decode_tokens", 0, mode=mode)
        for name in ("num_aborted_requests", "num_retracted_requests"):
            self._count(name, 0)
        if constants.has_graphs:
            self._make(GRAPH_GAUGES, GRAPH_COUNTERS)
            self._count("cuda_graph_eager_steps", 0)
            self._set_graph_memory(constants.graph_bytes)
        if constants.spec_num_steps is not None and constants.spec_num_draft_tokens is not None:
            self._make(SPEC_GAUGES, SPEC_COUNTERS)
            self._set("spec_num_steps", constants.spec_num_steps)
            self._set("spec_num_draft_tokens", constants.spec_num_draft_tokens)
            self._count("spec_verify_calls", 0)

    def _set_graph_memory(self, graph_bytes: tuple[tuple[str, int], ...]) -> None:
        text = "Memory that the CUDA graphs hold, by their set."
        gauge = Gauge(
            "sglang:graph_memory_usage_gb", text, [*self._labels, "phase"], multiprocess_mode="mostrecent",
            registry=self._registry,
        )  # fmt: skip
        for phase, size in graph_bytes:
            gauge.labels(**self._labels, phase=phase).set(size / GIB)

    def load(self, load: Load) -> None:
        self._set("num_running_reqs", load.num_running)
        self._set("num_queue_reqs", load.num_queued)
        if self._max_running:
            self._set("utilization", load.num_running / self._max_running)
        self._set("num_grammar_queue_reqs", load.num_grammar_queued)
        self._set("num_paused_reqs", load.num_paused)
        self._set("num_used_tokens", load.num_used_tokens)
        self._set("kv_used_tokens", load.num_used_tokens)
        self._set("token_usage", load.token_usage)
        self._set("full_token_usage", load.token_usage)
        self._set("kv_available_tokens", load.num_available_tokens)
        self._set("kv_evictable_tokens", load.num_evictable_tokens)

    def decode_step(self, report: DecodeReport) -> None:
        self._count("decode_steps", 1, mode=report.mode)
        self._count("decode_tokens", report.num_tokens, mode=report.mode)
        self._count("realtime_tokens", report.num_tokens, mode=_DECODED)
        self._set("decode_sum_seq_lens", report.sum_seq_lens)
        if "spec_draft_len" in self._gauges:
            self._set("spec_draft_len", report.draft_len)
        if report.draft_len:
            self._count("spec_verify_calls", report.num_rows)

    def graph_step(self, used_graph: bool) -> None:
        self._set("is_cuda_graph", used_graph)
        self._count("cuda_graph_passes", 1, mode="decode_cuda_graph" if used_graph else "decode_none")
        if not used_graph:
            self._count("cuda_graph_eager_steps", 1)

    def prefill_step(self, report: PrefillReport) -> None:
        total = report.num_tokens + report.num_cached_tokens
        self._set("cache_hit_rate", report.num_cached_tokens / total if total else 0.0)
        self._count("cached_tokens", report.num_cached_tokens, cache_source="device")
        self._count("realtime_tokens", report.num_tokens, mode=_COMPUTED)
        self._count("realtime_tokens", report.num_cached_tokens, mode=_CACHED)

    def interval(self, report: IntervalReport) -> None:
        self._set("gen_throughput", report.gen_throughput)
        if report.occupancy is not None:
            self._set("fwd_occupancy", 100 * report.occupancy)
        self._set("num_retracted_reqs", self._num_retracted)
        self._num_retracted = 0
        self._set_or_hide("spec_accept_length", report.accept_length)
        self._set_or_hide("spec_accept_rate", report.accept_rate)

    def _set_or_hide(self, name: str, value: float | None) -> None:
        # A gauge in a multiprocess file cannot be removed: NaN is what GET /metrics leaves out
        # (entrypoints/metrics_endpoint.py). A figure that never existed has no sample at all.
        if value is not None:
            self._set(name, value)
        elif name in self._gauges and self._has_sample(name):
            self._set(name, float("nan"))

    def _has_sample(self, name: str) -> bool:
        return any(metric.samples for metric in self._gauges[name].collect())

    def decided(self, draft_len: int, reason: str) -> None:
        self._count("spec_decisions", 1, draft_len=str(draft_len), reason=reason)

    def switched(self, to: str, reason: str) -> None:
        self._count("spec_switches", 1, to=to, reason=reason)

    def retracted(self, num_input_tokens: int, num_output_tokens: int) -> None:
        self._num_retracted += 1
        self._count("num_retracted_requests", 1)
        self._count("num_retracted_input_tokens", num_input_tokens)
        self._count("num_retracted_output_tokens", num_output_tokens)

    def finished(self, aborted: bool) -> None:
        if aborted:
            self._count("num_aborted_requests", 1)

    def evicted(self, num_tokens: int) -> None:
        self._count("evicted_tokens", num_tokens)
