"""The script that compares HTTP with static batches, in its small form on the CPU."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.h200 import http_rates
from benchmark.h200.executors import Records
from benchmark.h200.http_streams import events_of, run_wave
from benchmark.h200.http_tables import bars, eager_steps, tables, wrong_modes
from benchmark.h200.plain_tokenizer import write_tokenizer
from benchmark.h200.shapes import write_shapes
from benchmark.spec_toggle.client import GenerationError
from sglang.srt.managers.executor_settings import executor_args
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.text_tokenizer import TextTokenizer


def _lines(file: Path, kind: str) -> list[dict[str, Any]]:
    return [x for x in map(json.loads, file.read_text().splitlines()) if x["kind"] == kind]


def test_a_server_and_static_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "-1")  # put back afterwards: the script sets it
    file = tmp_path / "out.jsonl"
    flags = ["--tiny", "--device", "cpu", "--passes", "1", "--acc-len", "2"]
    assert http_rates.main([*flags, "--out", str(file)]) == 0
    http = {(x["mode"], x["batch"]): x for x in _lines(file, "http")}
    assert http.keys() == {("plain", 1), ("plain", 2), ("spec", 1), ("spec", 2), ("plain", 4)}
    for (mode, _), line in http.items():
        assert line["tokens_per_row"] == pytest.approx(2 if mode == "spec" else 1, abs=0.1)
        assert line["steps"][mode] > 0 and sum(line["steps"].values()) == line["steps"][mode]
        assert line["schedule_us"] > 0 and line["retractions"] == 0
    assert {(x["mode"], x["batch"]) for x in _lines(file, "decode")} == http.keys() - {("plain", 4)}
    printed = capsys.readouterr().out
    assert "| HTTP / bench, spec, 2 rows |" in printed
    # The same tables from the two halves of the file.
    lines = [json.loads(x) for x in file.read_text().splitlines()]
    assert "\n".join(tables(lines)) in printed


@pytest.mark.parametrize("tiny", [False, True])
def test_the_gpus_flags_are_flags_of_the_server(tiny: bool, tmp_path: Path) -> None:
    folders, sizes = write_shapes(tmp_path, tiny), http_rates.TINY if tiny else http_rates.FULL
    wanted = http_rates.wanted_of(folders, sizes, "cuda", tmp_path / "choices.json")
    out = Records(None, "d")
    setting = http_rates.Setting(folders, tmp_path / "tokenizer", sizes, wanted, 1, out, tmp_path)
    given = ServerArgs.from_command_line(setting.server_flags(["--stream-interval", "4"]))
    args = given.resolve("LlamaForCausalLM")
    assert args.disable_radix_cache and args.stream_interval == 4
    built = executor_args(args)
    assert built.cuda_graph_bs == ((1, 2, 4) if tiny else (1, 16, 64, 128))
    assert built.max_running_requests == built.cuda_graph_bs[-1] and built.capture_max_bs == max(sizes.rows)
    assert built.max_total_tokens is not None and built.context_length is not None
    for rows, length in ((max(sizes.rows), sizes.output_len), (sizes.host_rows, sizes.host_output_len)):
        assert rows * (sizes.input_len + length) < built.max_total_tokens
        assert sizes.input_len + length < built.context_length


def _chunks(*events: bytes) -> bytes:
    chunks = (b"data: " + event + b"\n\n" for event in events)
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 7, 50, 1000])
def test_events_have_the_time_of_their_last_byte(size: int) -> None:
    whole = _chunks(b'{"a": "\\r\\n0"}', b'{"b": 2}', b"[DONE]")
    pieces = [(float(at), whole[at : at + size]) for at in range(0, len(whole), size)]
    found = list(events_of(pieces))
    assert [data for _, data in found] == [b'{"a": "\\r\\n0"}', b'{"b": 2}']
    for arrived, data in found:
        last = whole.index(data) + len(data) + 1  # its two line ends
        assert arrived <= last < arrived + size


def _event(count: int, finish: dict[str, str] | None = None) -> bytes:
    meta = {"completion_tokens": count, "finish_reason": finish}
    return json.dumps({"output_ids": [1] * count, "meta_info": meta}).encode()


WHOLE = _chunks(_event(1), _event(3), _event(5, {"type": "length"}), b"[DONE]")
Looks = list[str]


def _wave(answers: list[bytes], looks: Looks) -> list[tuple[int, ...]]:
    """Counts of each stream from a server that gives one answer a connection, byte by byte."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b'"stream": true}')
        for byte in answers.pop():
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        writer.close()

    async def look() -> None:
        looks.append(f"{len(answers)} left")

    async def run(look: Callable[[], Awaitable[None]]) -> list[tuple[int, ...]]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            prompts = [[1, 2]] * len(answers)
            wave = await run_wave(f"http://127.0.0.1:{port}", prompts, {}, look)
        return [trace.counts for trace in wave.traces]

    return asyncio.run(run(look))


def test_streams_are_read_whatever_the_pieces() -> None:
    looks: Looks = []
    assert _wave([WHOLE, WHOLE, WHOLE], looks) == [(1, 3, 5)] * 3
    assert looks == ["0 left", "0 left"]  # all had begun


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\nno such thing", "answered"),
        (WHOLE[:-30], "closed the connection"),
        (_chunks(_event(1), b'{"error": "out of luck"}'), "out of luck"),
    ],
)
def test_a_stream_that_fails_ends_the_run(answer: bytes, message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        _wave([answer, WHOLE], [])


def test_a_made_up_tokenizer_has_every_id(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.from_folder(write_tokenizer(tmp_path / "t", 1000))
    assert tokenizer.vocab_size == 1000 and tokenizer.is_byte_level
    assert len({tokenizer.decode([i]) for i in range(256, 1000)}) == 744
    assert tokenizer.decode([256, 257]) == " aa ab" and tokenizer.eos_token_id is None


def _http(mode: str, batch: int, rate: float, **changes: Any) -> dict[str, Any]:
    line = {
        "kind": "http", "device": "d", "mode": mode, "batch": batch, "number": 0, "tokens_per_s": rate,
        "tokens_per_row": 1.0, "wall_step_s": batch / rate, "first_token_s": 0.1, "retractions": 0,
        "steps": {"plain": 9, "spec": 0}, "schedule_us": 300.0, "launch_us": 100.0, "eager_steps": 0,
        "cpu_share": {"http": 0.5, "scheduler": 0.5, "detokenizer": 0.1, "client": 0.2},
    }  # fmt: skip
    return line | changes


def _batch(mode: str, batch: int, rate: float, drafter: bool = True) -> dict[str, Any]:
    return {
        "kind": "decode", "device": "d", "mode": mode, "batch": batch, "drafter": drafter,
        "tokens_per_s": rate, "tokens_per_row": 1.0, "wall_step_s": batch / rate,
    }  # fmt: skip


def test_tables_take_the_better_pass_and_judge_it() -> None:
    lines = [
        _http("plain", 1, 200.0), _http("plain", 1, 240.0), _batch("plain", 1, 250.0),
        _batch("plain", 1, 999.0, drafter=False),
        _http("plain", 64, 8000.0), _batch("plain", 64, 9000.0),
        _http("plain", 128, 400_000.0, launch_us=300.0),
    ]  # fmt: skip
    found = {bar.what: (round(bar.value, 3), bar.verdict) for bar in bars(lines)}
    assert found == {
        "HTTP / bench, plain, 1 rows": (0.96, "reached"),
        "HTTP / bench, plain, 64 rows": (0.889, "MISSED"),
        "host µs / step µs, plain, 64 rows": (0.05, "reached"),
        "host µs / step µs, plain, 128 rows": (1.875, "MISSED"),
        "host µs a step, plain, 128 rows": (600.0, "MISSED"),
    }
    assert "| 1 | plain | 240 (200) | 250 (250) | 0.960 | 1.000 | 1.000 | 4.17 | 4.00 | 0.10 |" in tables(
        lines
    )
    assert eager_steps(lines) == [] and wrong_modes(lines) == []


def test_what_must_not_happen_is_told() -> None:
    lines = [
        _http("plain", 1, 200.0, steps={"plain": 9, "spec": 2}),
        _http("spec", 1, 200.0, steps={"plain": 0, "spec": 2}, retractions=3, eager_steps=4),
    ]
    assert eager_steps(lines) == ["4 decode steps over HTTP ran without a CUDA graph"]
    assert wrong_modes(lines) == [
        "plain, 1 rows, pass 0: 2 steps of the other mode", "spec, 1 rows, pass 0: 3 requests were retracted"
    ]  # fmt: skip
    assert eager_steps([_http("plain", 1, 200.0, eager_steps=None)]) == []  # a CPU
