"""Patterns that end a reply: which they are, and at which token. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.managers.io_struct import GenerateRequest
from sglang.srt.managers.request import Request
from sglang.srt.managers.stop_checker import TOO_SLOW, StopChecker, StopHit
from sglang.srt.model_executor.step_plan import SlotSampling
from sglang.srt.sampling.sampling_params import SamplingParams, SamplingParamsError
from sglang.srt.utils import stop_regex

PATTERNS = (
    "a+b", "[ab]{2,3}$", "(?<=b)é", "a(?=..)", "^b*a", r"\bb", "é.", "a|bb", "(a)b?\\1", "b[^b]b", "(?i)AB",
    "日", "a.*é", "[ab]+é日", "(?:ab)+é", "a{3}", " \\bb", "b\\B", "a(?!$)", "(?i)aB+É", "(?m)a$", "a++b",
)  # fmt: skip


def as_text(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


def make(patterns: tuple[str, ...], min_new_tokens: int = 0) -> Request:
    params = SamplingParams(max_new_tokens=9000, stop_regex=patterns, min_new_tokens=min_new_tokens)
    return Request(GenerateRequest("r", [1, 2], params, False, 0.0), 1, 9000, SlotSampling(), frozenset())


def stopped_at(request: Request, ids: list[int], ends: list[int]) -> tuple[int, StopHit | None]:
    """Ids kept, where steps have the ids between ``ends``."""
    checker = StopChecker((), as_text)
    for begin, end in pairwise([0, *ends, len(ids)]):
        hit = checker.check(request, ids[begin:end])
        if hit is not None:
            return begin + hit.num_kept, hit
        request.ids += ids[begin:end]
    return len(ids), None


def told_again(pattern: str, ids: list[int], least: int) -> int | None:
    """The same from whole texts, by Python's own module: ids until something matches that did not before."""
    known: set[tuple[int, int]] = set()
    for count in range(1, len(ids) + 1):
        text = as_text(ids[:count]).rstrip("\ufffd")
        starts = [re.compile(pattern).match(text, start) for start in range(len(text) + 1)]
        spans = {match.span() for match in starts if match is not None}
        if spans - known and count >= least:
            return count
        known = spans
    return None


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(st.sampled_from("abé日 "), max_size=14),
    pattern=st.sampled_from(PATTERNS),
    ends=st.lists(st.integers(1, 20), max_size=5),
    least=st.integers(0, 6),
)
def test_a_reply_ends_where_its_text_first_matches(
    text: str, pattern: str, ends: list[int], least: int
) -> None:
    ids = list(text.encode())
    ends = sorted(end for end in set(ends) if end < len(ids))
    kept, hit = stopped_at(make((pattern,), least), ids, ends)
    expected = told_again(pattern, ids, least)
    assert (hit is None) == (expected is None)
    assert kept == (len(ids) if expected is None else expected)
    if hit is not None:
        assert hit.finish.type == "stop" and hit.finish.matched == pattern and hit.stop_trim is None


@settings(max_examples=8, deadline=None)
@given(ends=st.lists(st.integers(1, 3000), max_size=4), at=st.integers(1030, 3000))
def test_a_long_reply_is_seen_through_a_window(ends: list[int], at: int) -> None:
    """Its beginning is no beginning of the text, and what it shows is no matter of steps."""
    ids = [ord("x")] * at + list(b"yyz") + [ord("x")] * 5
    ends = sorted(end for end in set(ends) if end < len(ids))
    assert stopped_at(make(("^x+z", "(?<=y)z")), ids, ends)[0] == at + 3
    assert stopped_at(make(("^[xy]z",)), ids, ends)[1] is None


def test_at_one_token_ids_come_before_strings_before_patterns() -> None:
    checker = StopChecker((98,), as_text)

    def matched(params: SamplingParams, stop_ids: frozenset[int], new: bytes) -> tuple[int, object]:
        message = GenerateRequest("r", [1], params, False, 0.0)
        hit = checker.check(Request(message, 1, 100, SlotSampling(), stop_ids), list(new))
        assert hit is not None
        return hit.num_kept, hit.finish.matched

    pattern = SamplingParams(stop_regex=("a.",))
    both = SamplingParams(stop=("ab",), stop_regex=("a.",))
    assert matched(pattern, frozenset(), b"xab") == (3, "a.")
    assert matched(both, frozenset(), b"xabc") == (3, "ab")
    assert matched(both, frozenset((98,)), b"xabc") == (3, 98)
    assert matched(both, frozenset((99,)), b"xacab") == (3, 99)
    assert matched(both, frozenset(), b"xacab") == (3, "a.")


def test_a_search_without_end_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_regex, "TIME_LIMIT_S", 0.02)
    _, hit = stopped_at(make(("(a|aa)+[bc]",)), [97] * 200, [150])
    assert hit is not None and hit.finish.type == "abort"
    assert hit.finish.message == TOO_SLOW and hit.finish.status_code == 400


def test_the_searches_at_a_token_share_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((0.0, 0.15, 1.0, 1.15, 2.0, 2.1))  # a search takes 0.15 s
    monkeypatch.setattr(stop_regex, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    patience = stop_regex.Patience()
    assert [patience.spend(lambda limit_s: limit_s) for _ in range(2)] == pytest.approx([0.2, 0.05])
    with pytest.raises(stop_regex.StopRegexTooSlow):
        patience.spend(lambda limit_s: limit_s)


def test_slow_searches_may_come_now_and_then_but_not_at_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(took=0.0, perf_counter=lambda: clock.took)
    monkeypatch.setattr(stop_regex, "time", clock)
    patience = stop_regex.Patience()

    def token_that_takes(seconds: float) -> None:
        def search(limit_s: float) -> None:
            if seconds > limit_s:
                raise TimeoutError
            clock.took += seconds

        patience.next_token()
        patience.spend(search)

    for seconds, tokens in ((0.0009, 1000), (0.15, 1), (0.0001, 200), (0.15, 1)):  # all of these are borne
        for _ in range(tokens):
            token_that_takes(seconds)
    with pytest.raises(stop_regex.StopRegexTooSlow):
        token_that_takes(0.1)


def check_tail(pieces: list[bytes]) -> None:
    """It is as a whole decode has it, and never are more than a few ids decoded."""
    tail, decoded = stop_regex.ReplyTail(), []

    def decode(some: list[int]) -> str:
        decoded.append(len(some))
        return b"".join(pieces[number] for number in some).decode(errors="replace")

    for count in range(1, len(pieces) + 1):
        tail.push(count - 1, decode)
        whole = b"".join(pieces[:count]).decode(errors="replace")
        assert tail.text.rstrip("\ufffd") == whole.rstrip("\ufffd")
    assert max(decoded, default=0) <= stop_regex._CONTEXT + stop_regex._MOST_OPEN + 1


@settings(max_examples=100)
@given(st.lists(st.integers(0, 255) | st.sampled_from(list("é日😀".encode())), max_size=50))
def test_a_tail_grows_by_its_last_ids(ids: list[int]) -> None:
    check_tail([bytes([number]) for number in ids])


@settings(max_examples=100)
@given(st.text(st.sampled_from("aé日😀"), max_size=12), st.sets(st.integers(1, 47)))
def test_ids_may_end_inside_characters_one_after_the_other(text: str, cuts: set[int]) -> None:
    data = text.encode()
    cuts |= {at for at in range(8, len(data), 8)}  # so that there are never more than allowed
    check_tail([data[a:b] for a, b in pairwise([0, *sorted(c for c in cuts if c < len(data)), len(data)])])


def test_a_tail_has_the_last_ids_alone() -> None:
    text, tail = "aé日" * 900, stop_regex.ReplyTail()
    ids = list(text.encode())
    for token in ids:
        tail.push(token, as_text)
    assert text.endswith(tail.text) and tail.has_left
    assert 0 <= len(tail.text.encode()) - stop_regex.MOST_IDS < 3  # a character is its last id's


def test_what_can_begin_no_match_is_not_looked_at_again() -> None:
    search = stop_regex.StopSearch(["x[0-9]{3}y", "(?<=q)z"])
    for number, token in enumerate(b"ab x12x123 " * 50, start=1):
        search.push(token, as_text)
        assert search.completed() is None
        assert number - 5 <= search._begins[0] <= number and search._begins[1] == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("(", "is no regular expression"),
        ("a*", "matches an empty text"),
        (["x", "$"], "matches an empty text"),
        ("x" * 5000, "at most 4096 characters"),
        (5, "must be a non-empty string"),
        (["a"] * 33, "at most 32"),
    ],
)
def test_what_is_no_stop_regex_is_refused(given: object, message: str) -> None:
    with pytest.raises(SamplingParamsError, match=message):
        SamplingParams.from_dict({"stop_regex": given})


def test_one_pattern_or_several() -> None:
    assert SamplingParams.from_dict({"stop_regex": "a+"}).stop_regex == ("a+",)
    assert SamplingParams.from_dict({"stop_regex": ["a", "b"]}).stop_regex == ("a", "b")
