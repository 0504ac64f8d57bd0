from __future__ import annotations

from typing import Any

import pytest

from sglang.srt.managers.io_struct import FinishReason, GenerateRequest
from sglang.srt.managers.request import Request
from sglang.srt.managers.stop_checker import StopChecker, StopHit
from sglang.srt.model_executor.step_plan import SlotSampling
from sglang.srt.sampling.sampling_params import SamplingParams

EOS = 0


def as_letters(ids: list[int]) -> str:
    return "".join(chr(ids_) for ids_ in ids)


def as_bytes(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


def make(outputs: str = "", max_new: int = 100, **params: Any) -> Request:
    message = GenerateRequest("r", [1, 2], SamplingParams(max_new_tokens=max_new, **params), False, 0.0)
    stop_ids = StopChecker((EOS,), as_letters).stop_ids(message.sampling)
    request = Request(message, 1, max_new, SlotSampling(), frozenset(stop_ids))
    request.ids += [ord(letter) for letter in outputs]
    return request


def check(request: Request, new: str) -> StopHit | None:
    return StopChecker((EOS,), as_letters).check(request, [ord(letter) for letter in new])


def stop(matched: int | str) -> FinishReason:
    return FinishReason(type="stop", matched=matched)


def test_nothing_stops() -> None:
    assert check(make("abc", stop=("xy",)), "defg") is None


@pytest.mark.parametrize(
    ("outputs", "new", "stops", "kept", "matched"),
    [
        ("ab", "cdef", ("d",), 2, "d"),  # early in an accepted run
        ("ab", "cdef", ("bc",), 1, "bc"),  # began before the run
        ("ab", "cdef", ("f",), 4, "f"),
        ("ab", "cdef", ("ef", "cd"), 2, "cd"),  # the first in the text wins
        ("", "xend", ("end", "xen"), 3, "xen"),
        ("aaaaaaaaaaaaaaaaaaaaaaaaaaab", "c", ("bc",), 1, "bc"),
    ],
)
def test_stop_strings(outputs: str, new: str, stops: tuple[str, ...], kept: int, matched: str) -> None:
    hit = check(make(outputs, stop=stops), new)
    assert hit == StopHit(kept, stop(matched), matched)


@pytest.mark.parametrize("params", [{}, {"stop": ("a",)}, {"stop_token_ids": (97,)}, {"stop_regex": ("a",)}])
def test_a_limit_of_nothing_keeps_nothing(params: dict[str, Any]) -> None:
    assert check(make(max_new=0, **params), "a") == StopHit(0, FinishReason(type="length", length=0))


def test_no_stop_trim_keeps_the_string() -> None:
    assert check(make("", stop=("b",), no_stop_trim=True), "abc") == StopHit(2, stop("b"), None)


def test_the_prompt_is_not_searched() -> None:
    request = make("", stop=("ab",))
    request.ids = [1, ord("a")]
    assert check(request, "b") is None


def test_stop_ids_and_eos() -> None:
    checker = StopChecker((EOS,), as_letters)
    assert checker.check(make(), [7, EOS, 9]) == StopHit(2, stop(EOS))
    assert checker.check(make(ignore_eos=True), [7, EOS, 9]) is None
    assert checker.check(make(ignore_eos=True, stop_token_ids=(9,)), [7, EOS, 9]) == StopHit(3, stop(9))


def test_length_cuts_a_run() -> None:
    hit = check(make("abc", max_new=5), "defg")
    assert hit == StopHit(2, FinishReason(type="length", length=5))


def test_at_one_token_length_comes_before_ids_before_strings() -> None:
    checker = StopChecker((EOS,), as_letters)
    hit = checker.check(make("a", max_new=2, stop=("\0",)), [EOS])
    assert hit is not None and hit.finish.type == "length"
    hit = checker.check(make("a", stop=("\0",)), [EOS])
    assert hit is not None and hit.finish.matched == EOS
    # A string that is complete before that token comes first.
    hit = checker.check(make("a", max_new=3, stop=("b",)), [ord("b"), EOS])
    assert hit == StopHit(1, stop("b"), "b")


def test_min_new_tokens() -> None:
    checker = StopChecker((EOS,), as_letters)
    assert checker.check(make("a", min_new_tokens=3), [EOS, 5]) is None
    assert checker.check(make("abc", min_new_tokens=3), [EOS]) == StopHit(1, stop(EOS))
    request = make("", min_new_tokens=4, stop=("ab",))
    assert check(request, "abxx") is None  # complete too early: passed over
    assert check(request, "abxxab") == StopHit(6, stop("ab"), "ab")  # an old match hides no new one
    request.ids += [ord(letter) for letter in "abxx"]
    assert check(request, "x") is None
    assert check(request, "ab") == StopHit(2, stop("ab"), "ab")


def test_a_stop_string_of_characters_that_take_several_ids() -> None:
    checker = StopChecker((EOS,), as_bytes)
    request = make("", stop=("…é",))
    ids = list("xx…é!".encode())
    for index, token in enumerate(ids):
        hit = checker.check(request, [token])
        if hit is not None:
            assert bytes(ids[: index + 1]).decode() == "xx…é"
            return
        request.ids.append(token)
    raise AssertionError("not found")


def test_decoding_is_bounded() -> None:
    lengths: list[int] = []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return as_letters(ids)

    request = make("a" * 5000, max_new=9000, stop=("zzz",))
    assert StopChecker((EOS,), decode).check(request, [ord("b")] * 4) is None
    assert lengths == [3 + 4 + 4]
