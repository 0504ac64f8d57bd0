"""The client of the streaming benchmark counts right and knows ages. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmark" / "http_streaming"))

from stamps import TICK_S, Stamper, StampReader
from stream_client import Seen, Stream

from sglang.embedded.model import embedded_model_path
from sglang.srt.utils.text_tokenizer import TextTokenizer

FOLDER = Path(__file__).resolve().parents[3] / "benchmark" / "http_streaming"


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.from_folder(embedded_model_path())


@pytest.fixture(scope="module")
def reader(tokenizer: TextTokenizer) -> StampReader:
    return StampReader(tokenizer)


def test_a_word_tells_its_age(tokenizer: TextTokenizer, reader: StampReader) -> None:
    assert reader.longest_s > 3.1
    clock = [0.0]
    stamper = Stamper(tokenizer, lambda: clock[0])
    for made, age in ((0.0, 0.0), (123456.7, 0.0421), (7.9999, 3.0)):
        clock[0] = made
        word = tokenizer.token_bytes(stamper.token())
        assert word[:1] == b" " and age - 1e-6 <= reader.age_s(word[1:], made + age) <= age + TICK_S + 1e-6


async def _feed(data: bytes, cuts: list[int], path: str, reader: StampReader) -> tuple[Stream, Seen]:
    seen = Seen()
    stream = Stream(path, {}, reader, seen)
    borders = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    for start, end in zip(borders, borders[1:], strict=False):
        stream.get_buffer(-1)[: end - start] = data[start:end]
        stream.buffer_updated(end - start)
    return stream, seen


@settings(max_examples=20, deadline=None)
@given(counts=st.lists(st.integers(0, 3), min_size=1, max_size=8), cuts=st.lists(st.integers(0, 10**6)))
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_counts_hang_on_events_and_not_on_packets(
    reader: StampReader, path: str, counts: list[int], cuts: list[int]
) -> None:
    word = f" {reader.some_word.decode()}"
    text, events = "", []
    for number, count in enumerate(counts):
        text += word * count
        last = number == len(counts) - 1
        if path == "/generate":
            reason = {"type": "length"} if last else None
            events.append({"text": text, "meta_info": {"finish_reason": reason}})
        else:
            events.append({"choices": [{"delta": {"content": word * count}}]})
            if last:
                events.append({"choices": [{"delta": {}, "finish_reason": "length"}]})
    lines = [b"data: " + json.dumps(e, separators=(",", ":")).encode() + b"\n\n" for e in events]
    data = b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(lines) + b"data: [DONE]\n\n"
    stream, seen = asyncio.run(_feed(data, cuts, path, reader))
    assert (seen.tokens, seen.chunks) == (sum(counts), sum(count > 0 for count in counts))
    assert stream.ended.result() == "done" and stream.num_ends == 1


@pytest.mark.long
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_a_chunk_is_timed_for_each_endpoint(path: str) -> None:
    script = [sys.executable, str(FOLDER / "chunk_cpu.py"), "--streams", "3", "--rounds", "5", "--path", path]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, check=True)
    found = re.fullmatch(r"(\S+), 3 streams, us a chunk: median (\S+), .* at most (\S+)\n", done.stdout)
    assert found is not None and found[1] == path, done.stdout
    assert done.stderr == ""
    assert 0 < float(found[3]) <= float(found[2]) < 1e6
