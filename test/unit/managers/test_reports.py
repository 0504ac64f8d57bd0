"""Places are told once and in order, whatever life a request has. Run alone: pytest THIS_FILE"""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.managers.io_struct import RequestWish, TokenReport
from sglang.srt.managers.reports import RequestReport
from sglang.srt.model_executor.step_plan import Logprobs, PrefillChunk, RowReport, RowWish, Vectors

WISHES = st.builds(
    RequestWish,
    logprobs=st.booleans(),
    logprob_start=st.integers(-1, 12),
    hidden_states=st.sampled_from(["", "all"]),
)


class Life:
    """A place's log-probability and vector are its number."""

    def __init__(self, wish: RequestWish, prompt_len: int) -> None:
        self.report = RequestReport(wish, prompt_len, 0.0)
        self.known = prompt_len  # ids
        self.told: list[TokenReport] = []

    def prefill(self, start: int, sizes: list[int]) -> None:
        """All that is known from ``start`` on; the last chunk chooses an id. Two chunks are on their way."""
        needed = self.report.first_needed
        at = min(start, self.known - 1 if needed is None else min(needed, self.known - 1))
        planned: list[tuple[PrefillChunk, RowWish | None]] = []
        for size in [*sizes, self.known]:
            end = min(at + size, self.known)
            if end == at:
                break
            chunk = PrefillChunk(1, at, (0,) * (end - at), None if end == self.known else 0)
            planned.append((chunk, self.report.of_chunk(0, chunk)))
            at = end
            if len(planned) == 2:
                self.commit(*planned.pop(0))
        for chunk, wish in planned:
            self.commit(chunk, wish)
        self.known += 1

    def commit(self, chunk: PrefillChunk, wish: RowWish | None) -> None:
        if wish is None:
            return
        end = chunk.start + len(chunk.token_ids)
        assert wish.hidden_from is None or 0 <= wish.hidden_from < len(chunk.token_ids)
        if wish.num_prompt:
            assert 0 <= wish.prompt_from < wish.prompt_to <= len(chunk.token_ids) - chunk.is_last
        prompt = range(chunk.start + wish.prompt_from, chunk.start + wish.prompt_to)
        chosen = [end - 1] if wish.logprobs else []
        hidden = [] if wish.hidden_from is None else list(range(chunk.start + wish.hidden_from, end))
        told = RowReport(0, _logprobs(chosen), _logprobs(list(prompt)), _vectors(hidden))
        self.report.add_chunk(told, int(chunk.is_last))

    def decode(self, num_chosen: int, num_kept: int) -> None:
        wish = self.report.of_decode(0)
        places = list(range(self.known - 1, self.known - 1 + num_chosen))
        chosen = places if wish.logprobs else []
        hidden = [] if wish.hidden_from is None else places
        self.report.add_decode(RowReport(0, _logprobs(chosen), hidden=_vectors(hidden)), num_kept)
        self.known += num_kept

    def take(self) -> None:
        self.told.append(self.report.take())


def _logprobs(places: list[int]) -> Logprobs:
    return Logprobs(tuple(map(float, places)))


def _vectors(places: list[int]) -> Vectors:
    return Vectors(array("f", places).tobytes(), 1)


@given(WISHES, st.integers(1, 12), st.data())
def test_every_place_once_and_in_order(wish: RequestWish, prompt_len: int, data: st.DataObject) -> None:
    life = Life(wish, prompt_len)
    starts, sizes = st.integers(0, 30), st.lists(st.integers(1, 5), max_size=4)
    for _ in range(data.draw(st.integers(1, 3), "retractions")):
        life.prefill(data.draw(starts), data.draw(sizes))
        life.take()
        for chosen in data.draw(st.lists(st.integers(1, 4), max_size=3)):
            life.decode(chosen, data.draw(st.integers(1, chosen)))
            if data.draw(st.booleans()):
                life.take()
    life.take()
    prompt = [value for told in life.told for value in told.prompt.own]
    chosen = [value for told in life.told for value in told.chosen.own]
    hidden = [v for told in life.told for part in told.hidden for v in array(part.kind, part.data)]
    start = wish.logprob_start if wish.logprob_start >= 0 else prompt_len
    assert prompt == (list(range(start, prompt_len - 1)) if wish.logprobs else [])
    assert chosen == (list(range(prompt_len - 1, life.known - 1)) if wish.logprobs else [])
    assert hidden == (list(range(life.known - 1)) if wish.hidden_states else [])
