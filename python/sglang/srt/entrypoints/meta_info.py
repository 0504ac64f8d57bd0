"""``meta_info``: the figures of one sample, under SGLang's names."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.io_struct import FinishReason, RequestStats
from sglang.srt.managers.text_request import Sample


def finish_reason(finish: FinishReason | None) -> dict[str, Any] | None:
    """Only the fields that the type has."""
    if finish is None:
        return None
    names = {"stop": ("matched",), "length": ("length",), "abort": ("message", "status_code", "err_type")}
    return {"type": finish.type, **{name: getattr(finish, name) for name in names[finish.type]}}


def meta_info(sample: Sample, weight_version: str, begin: int = 0, encoded: bool = False) -> dict[str, Any]:
    """``begin``: of lists with an entry for each output id, the first one shown; ``encoded``: what is large
    is JSON already.
    """
    stats = sample.stats
    info: dict[str, Any] = {
        "id": sample.rid,
        "finish_reason": finish_reason(sample.finish),
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "cached_tokens": stats.cached_tokens,
        "reasoning_tokens": 0,
        "weight_version": weight_version,
        "num_retractions": stats.num_retractions,
    }
    if sample.told is not None:
        info |= sample.told.meta_info(begin, sample.finished_ts is not None, encoded)
    if sample.finished_ts is None:
        return info
    info["e2e_latency"] = sample.finished_ts - sample.created_ts
    info["decode_steps_plain"] = stats.decode_steps_plain
    info["decode_steps_spec"] = stats.decode_steps_spec
    return info | spec_info(stats)


def spec_info(stats: RequestStats) -> dict[str, Any]:
    """Both generations of names; nothing for a request that never speculated.

    They look at speculative steps alone, so they mean the same with and without plain steps between.
    """
    if stats.spec_verify_ct == 0:
        return {}
    proposed = stats.spec_num_proposed_drafts
    histogram = list(stats.spec_correct_drafts_histogram)
    return {
        "spec_accept_rate": stats.spec_num_correct_drafts / proposed if proposed else 0.0,
        "spec_accept_length": stats.spec_tokens / stats.spec_verify_ct,
        "spec_verify_ct": stats.spec_verify_ct,
        "spec_num_correct_drafts": stats.spec_num_correct_drafts,
        "spec_num_proposed_drafts": proposed,
        "spec_correct_drafts_histogram": histogram,
        "spec_accept_token_num": stats.spec_num_correct_drafts,
        "spec_draft_token_num": proposed,
        "spec_accept_histogram": histogram,
    }
