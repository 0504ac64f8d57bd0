"""meta_info: its fields, and that they look at speculative steps alone. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import asyncio

from sglang.srt.entrypoints.meta_info import finish_reason, meta_info
from sglang.srt.managers.io_struct import FinishReason, RequestStats, TextOutput
from sglang.srt.managers.text_request import Sample, TextRequest
from sglang.srt.sampling.sampling_params import SamplingParams

SPEC = RequestStats(
    prompt_tokens=3,
    completion_tokens=20,
    cached_tokens=2,
    decode_steps_plain=9,
    decode_steps_spec=4,
    spec_tokens=10,
    spec_verify_ct=4,
    spec_num_correct_drafts=6,
    spec_num_proposed_drafts=12,
    spec_correct_drafts_histogram=[1, 1, 1, 1],
)


def sample(stats: RequestStats, finish: FinishReason | None) -> Sample:
    made = Sample("r", TextRequest("x", SamplingParams()), [1, 2, 3], asyncio.Event())
    made.update(TextOutput("r", "t", [1], stats, finish), now=made.created_ts + 2)
    return made


def test_while_it_runs() -> None:
    info = meta_info(sample(SPEC, None), "default")
    assert info["finish_reason"] is None and (info["id"], info["cached_tokens"]) == ("r", 2)
    assert not {name for name in info if name.startswith("spec") or name == "e2e_latency"}


def test_both_generations_of_names() -> None:
    info = meta_info(sample(SPEC, FinishReason("length", length=20)), "v7")
    assert (info["weight_version"], info["e2e_latency"]) == ("v7", 2.0)
    assert (info["decode_steps_plain"], info["decode_steps_spec"]) == (9, 4)
    assert info["spec_accept_length"] == 2.5  # not 20 / 4: plain steps and the prefill gave tokens too
    assert info["spec_accept_rate"] == 0.5
    assert info["spec_num_proposed_drafts"] == info["spec_draft_token_num"] == 12
    assert info["spec_num_correct_drafts"] == info["spec_accept_token_num"] == 6
    assert info["spec_correct_drafts_histogram"] == info["spec_accept_histogram"] == [1, 1, 1, 1]


def test_a_request_that_never_speculated_has_none() -> None:
    info = meta_info(
        sample(RequestStats(3, 5, 0, decode_steps_plain=4), FinishReason("stop", matched="x")), ""
    )
    assert not {name for name in info if name.startswith("spec")}
    assert info["decode_steps_plain"] == 4


def test_finish_reasons() -> None:
    assert finish_reason(FinishReason("stop", matched=2)) == {"type": "stop", "matched": 2}
    assert finish_reason(FinishReason("length", length=4)) == {"type": "length", "length": 4}
    aborted = {"type": "abort", "message": "why", "status_code": None, "err_type": None}
    assert finish_reason(FinishReason("abort", message="why")) == aborted
