"""What a user may write as sampling parameters."""

from __future__ import annotations

from typing import Any

import pytest

from sglang.srt.sampling.sampling_params import SamplingParams, SamplingParamsError


def test_defaults_are_upstreams() -> None:
    params = SamplingParams.from_dict({})
    assert (params.max_new_tokens, params.temperature, params.top_p, params.top_k) == (128, 1.0, 1.0, -1)
    assert not params.greedy and params.skip_special_tokens and params.spaces_between_special_tokens


def test_given_values_win_over_defaults_and_none_means_not_given() -> None:
    params = SamplingParams.from_dict({"temperature": 0.3, "top_p": None}, {"temperature": 0.9, "top_p": 0.5})
    assert (params.temperature, params.top_p) == (0.3, 0.5)


def test_stops_and_biases_are_normalised() -> None:
    params = SamplingParams.from_dict(
        {"stop": "end", "stop_token_ids": [9, 4], "logit_bias": {"7": 1, "3": -2.5}}
    )
    assert params.stop == ("end",) and params.stop_token_ids == (4, 9)
    assert params.logit_bias == ((3, -2.5), (7, 1.0))


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-7])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    assert SamplingParams.from_dict({"temperature": temperature}).greedy


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 2.5}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": 4, "min_new_tokens": 5}, "min_new_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 33}, "32"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"n": 0}, "n must"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"sampling_seed": 2**63}, "sampling_seed"),
        ({"sampling_seed": 10**400}, "sampling_seed"),
        ({"max_new_tokens": 10**400}, "max_new_tokens"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": -(10**400)}, "top_p"),
        ({"n": float("inf")}, "n must"),
        ({"sampling_seed": -(2**63) - 1}, "sampling_seed"),
        ({"speculative_draft_len": -1}, "speculative_draft_len"),
        ({"no_such_parameter": "{}"}, "no_such_parameter"),
        ({"json_schema": "{}", "regex": "a"}, "json_schema and regex are given: only one of them can be"),
        ({"json_schema": 7}, "json_schema must be text or an object"),
        ({"regex": {"a": 1}}, "regex must be text, got"),
        ({"ebnf": "x" * ((1 << 20) + 1)}, "ebnf may have at most 1048576 characters, got 1048577"),
        ({"regex": "\ud800"}, "regex must be Unicode text"),
        # What JSON can say and no device can hold: each of these ended the process, or was an error 500.
        ({"top_k": 2**63}, "top_k"),
        ({"speculative_draft_len": 2**63}, "speculative_draft_len"),
        ({"max_new_tokens": 2**64}, "max_new_tokens"),
        ({"max_new_tokens": float("inf")}, "max_new_tokens"),
        ({"top_k": float("nan")}, "top_k"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": 1e39}, "temperature"),
        ({"stop_token_ids": [2**64]}, "stop_token_ids"),
        ({"logit_bias": {"7": float("nan")}}, "logit_bias"),
        ({"logit_bias": {"7": 1e39}}, "logit_bias"),
        ({"logit_bias": [[float("inf"), 1.0]]}, "logit_bias"),
        ({"logit_bias": {str(2**64): 1.0}}, "logit_bias"),
        ({"stop": ["\ud800"]}, "stop"),
        # A slot's lists have a fixed size on a GPU.
        ({"stop_token_ids": list(range(257))}, "stop_token_ids may have at most 256 entries, got 257"),
        (
            {"logit_bias": {str(i): 1 for i in range(1025)}},
            "logit_bias may have at most 1024 entries, got 1025",
        ),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SamplingParamsError, match=said):
        SamplingParams.from_dict(given)


def test_the_longest_lists_are_taken() -> None:
    given = {"stop_token_ids": list(range(256)), "logit_bias": {str(i): 1 for i in range(1024)}}
    params = SamplingParams.from_dict(given)
    assert len(params.stop_token_ids) == 256 and len(params.logit_bias) == 1024


def test_a_minimum_without_a_maximum_is_bounded_too() -> None:
    with pytest.raises(SamplingParamsError, match="min_new_tokens"):
        SamplingParams.from_dict({"min_new_tokens": 2**63 - 1}, {"max_new_tokens": None})
