"""The scripts that measure and check on a GPU, in their small form on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.server import server_environment
from helpers.tiny_executor import draft_folder, target_folder, tiny_executor
from helpers.tiny_tokenizer import write_byte_tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.h200 import correctness, ragged, ragged_auto, reference_ids, smollm2_streams, step_times
from benchmark.h200.acceptance import Accepted, accepted_of
from benchmark.h200.executors import CHAIN, TREE, Records
from benchmark.h200.follow import Difference, follow, generate
from benchmark.h200.padding import Reserved, replay
from benchmark.h200.reference import Continuation, Reference, read_reference, write_reference
from benchmark.h200.reference_ids import check_outputs, margins_and_errors
from benchmark.h200.shapes import write_shapes
from benchmark.h200.step_tables import bars, tables
from sglang.srt.managers.executor_settings import executor_args
from sglang.srt.server_args import ServerArgs

ROOT = Path(__file__).resolve().parents[3]
PROMPTS = [[5, 6, 7], [200] * 9, [1, 2, 3, 4, 5, 6, 90]]


def _lines(file: Path, kind: str) -> list[dict[str, Any]]:
    return [x for x in map(json.loads, file.read_text().splitlines()) if x["kind"] == kind]


@pytest.fixture
def model_flags(tmp_path: Path) -> list[str]:
    """A tiny model with a drafter, and four prompts of three domains."""
    tokenizer = write_byte_tokenizer(tmp_path / "tokenizer")
    domains = ("tasks", "chat_free", "tool", "tool")
    rows = [{"id": f"p{i}", "domain": d, "text": f"say {i} twice"} for i, d in enumerate(domains)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, rows)))
    return [
        "--model-path", str(target_folder()), "--draft-model-path", str(draft_folder()),
        "--tokenizer-path", str(tokenizer), "--prompts", str(prompts),
    ]  # fmt: skip


def test_step_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "-1")  # put back afterwards: the script sets it
    file = tmp_path / "out.jsonl"
    assert step_times.main(["--tiny", "--device", "cpu", "--out", str(file), "--acc-len", "2"]) == 0
    decode = _lines(file, "decode")
    cases = {(x["mode"], x["drafter"], x["batch"]) for x in decode}
    assert cases == (
        {("plain", drafter, n) for drafter in (False, True) for n in (1, 2, 4)}
        | {(mode, True, n) for mode in ("spec", "alternate", "tree") for n in (1, 2)}
    )
    assert len(decode) == 2 * len(cases) and all(x["wall_step_s"] > 0 for x in decode)
    for line in decode:
        mean = {"plain": 1, "spec": 2, "tree": 2, "alternate": 1.5}[line["mode"]]
        assert line["tokens_per_row"] == pytest.approx(mean, abs=0.1)
    assert len(_lines(file, "prefill")) == 2 * 2 * 3 * step_times.PREFILL_PASSES
    starts = ["plain", "chain", "tree", "startup", "prefill", "prefill with a drafter"]
    assert [x["note"] for x in _lines(file, "start")] == starts
    printed = capsys.readouterr().out
    assert step_times.main(["--table", str(file)]) == 0
    assert capsys.readouterr().out in printed


@pytest.mark.parametrize("tiny", [False, True])
def test_the_gpus_flags_are_flags_of_the_server(tiny: bool, tmp_path: Path) -> None:
    folders, sizes = write_shapes(tmp_path, tiny), step_times.TINY if tiny else step_times.FULL
    setting = step_times.Setting(folders, sizes, "cuda", 1, Records(None, "d"), tmp_path / "choices.json")
    for shape in (None, CHAIN, TREE):
        wanted = setting.wanted(shape, rows=4, spec_rows=2)
        args = ServerArgs.from_command_line(wanted.flags()).resolve("LlamaForCausalLM")
        built = executor_args(args)
        assert (built.device, built.attention_backend, built.load_format) == ("cuda", "triton", "dummy")
        assert built.cuda_graph_bs == (1, 2, 4) and built.capture_max_bs == (2 if shape else None)
        assert built.kernel_choices_file == str(tmp_path / "choices.json")
    default = replace(setting.wanted(CHAIN, 4, 2), graph_sizes=(), choices=None)
    built = executor_args(ServerArgs.from_command_line(default.flags()).resolve("LlamaForCausalLM"))
    assert (built.cuda_graph_max_bs, built.cuda_graph_bs, built.kernel_choices_file) == (4, None, None)


def _decode(mode: str, drafter: bool, batch: int, *ms: float, rate: float = 1.0) -> list[dict[str, Any]]:
    return [
        {
            "kind": "decode", "device": "d", "mode": mode, "drafter": drafter, "batch": batch,
            "wall_step_s": value / 1e3, "tokens_per_s": rate,
        }
        for value in ms
    ]  # fmt: skip


GRAPHS = [
    {"draft_len": 0, "sizes": [1, 2, 4], "seconds": 5.0, "bytes": 1.2e9},
    {"draft_len": 3, "sizes": [1], "seconds": 4.0, "bytes": 2e9},
]


def test_tables_take_the_better_pass_and_judge_it() -> None:
    lines = [
        *_decode("plain", False, 1, 4.4, 4.2, rate=238.0),
        *_decode("plain", True, 1, 4.25, 4.3),
        *_decode("spec", True, 1, 5.4),
        *_decode("alternate", True, 1, 5.2),
        *_decode("plain", False, 128, 10.97 / 1.04),
        *_decode("spec", True, 128, 21.67 * 0.8),
        *(
            {"kind": "prefill", "device": "d", "batch": 8, "input_len": 1024, "number": n} | values
            for n, seconds in enumerate((0.2, 0.3, 0.4))
            for values in ({"drafter": False, "wall_s": seconds}, {"drafter": True, "wall_s": 1.1 * seconds})
        ),
        {"kind": "start", "device": "d", "note": "startup", "seconds": 50.0, "info": {"graphs": GRAPHS}},
    ]
    found = {bar.what: (round(bar.value, 3), bar.verdict) for bar in bars(lines)}
    assert found == {
        "plain, batch 1, tok/s": (238.0, "reached"),
        "EAGLE-3, batch 1, ms": (5.4, "within 3 %"),
        "plain with / without drafter, batch 1": (1.012, "reached"),
        "alternating / mean, batch 1": (1.078, "MISSED"),
        "plain, batch 128, peer / ours": (1.04, "within 3 %"),
        "EAGLE-3, batch 128, ours / peer": (0.8, "reached"),
        "prefill 8 x 1024, peer / ours": (0.915, "MISSED"),
        "prefill 8 x 1024 with drafter, peer / ours": (0.868, "MISSED"),
        "prefill 8 x 1024, with / without drafter": (1.1, "MISSED"),
        "start with both sets, all of it, s": (50.0, "reached"),
        "graphs, GB": (3.2, "MISSED"),
    }
    text = "\n".join(tables(lines))
    assert "| startup | 50.0 | draft_len 0: 3, draft_len 3: 1 | 9.0 | 3.20 |" in text
    assert "| 1 | 4.20 (4.40) | 1.188 | 238 | 4.25 (4.30) | 1.012 | 5.40 (5.40) |" in text


@pytest.mark.parametrize("draft_lens", [[0], [3], [3, 0]])
@pytest.mark.parametrize("rows", [1, 2])
def test_follow_finds_what_differs_and_goes_on(draft_lens: list[int], rows: int) -> None:
    executor = tiny_executor((3, 1, 4))
    outputs = generate(executor, PROMPTS, 12, [0], rows=3)
    assert follow(executor, PROMPTS, outputs, draft_lens, rows) == []
    # The second sequence says something else at 4, and what follows from that; at its end too.
    wrong = [*outputs[1][:4], (outputs[1][4] + 1) % 256]
    [rest] = generate(executor, [[*PROMPTS[1], *wrong]], 7, [0], rows=1)
    followed = [outputs[0], [*wrong, *rest[:6], (rest[6] + 1) % 256], outputs[2]]
    found = follow(executor, PROMPTS, followed, draft_lens, rows)
    executor.shutdown()
    assert found == [
        Difference(1, 4, wrong[4], outputs[1][4]),
        Difference(1, 11, followed[1][11], rest[6]),
    ]


def test_margins_and_errors() -> None:
    exact = torch.tensor([[1.0, 5.0, 4.5], [3.0, 0.0, 1.0]])
    rounded = torch.tensor([[9.0, 5.0, 5.25], [3.0, 0.0, 0.75]])
    assert margins_and_errors(exact, rounded) == ([0.5, 2.0], [0.75, 0.25])
    reference = Reference("m", [Continuation("a", [1], [1, 0], *margins_and_errors(exact, rounded))])
    assert (reference.bf16_error, reference.decisive_share) == (0.75, 0.5)


def test_outputs_that_the_model_would_not_choose_are_no_reference() -> None:
    exact = torch.tensor([[1.0, 5.0, 4.9996], [3.0, 0.0, 1.0]])
    check_outputs(exact, [1, 0])
    check_outputs(exact, [2, 0])
    with pytest.raises(AssertionError, match="2.0000 below"):
        check_outputs(exact, [1, 2])


def test_the_references_file_is_whole() -> None:
    reference = read_reference(reference_ids.FILE)
    assert {len(s.output) for s in reference.sequences} == {128} and len(reference.sequences) == 32
    assert {len(x) for s in reference.sequences for x in (s.margins, s.bf16_errors)} == {128}
    assert 0.3 < reference.bf16_error < 1 and reference.decisive_share > 0.75


def test_reference_and_correctness(model_flags: list[str], tmp_path: Path) -> None:
    file, out = tmp_path / "reference.jsonl", tmp_path / "out.jsonl"
    made = ["--num-prompts", "2", "--output-len", "6", "--rows", "2", "--file", str(file)]
    assert reference_ids.main([*model_flags, *made]) == 0
    reference = read_reference(file)
    assert [len(s.output) for s in reference.sequences] == [6, 6]
    assert all(margin > 0 for s in reference.sequences for margin in s.margins)
    flags = [*model_flags, "--tiny", "--device", "cpu", "--reference", str(file), "--out", str(out)]
    assert correctness.main(flags) == 0
    assert [x["ok"] for x in _lines(out, "reference")] == [True] * 3
    assert {x["domain"] for x in _lines(out, "acceptance")} == {"all", "chat", "chat_free", "tasks", "tool"}
    assert _lines(out, "padding")[0]["replays"] >= 12
    # One token is wrong where the margin is large: every mode must say so.
    [first, second] = reference.sequences
    spoiled = [*first.output[:-1], (first.output[-1] + 1) % 256]
    sure = Continuation(first.id, first.prompt, spoiled, [9.0] * 6, first.bf16_errors)
    write_reference(Reference("m", [sure, second]), file)
    out.unlink()
    assert correctness.main([*flags, "--parts", "reference"]) == 1
    assert [x["beyond"] for x in _lines(out, "reference")] == [[[first.id, 5]]] * 3
    # The same difference does not count where the two best are nearly equal.
    write_reference(Reference("m", [Continuation(*(*_fields(sure)[:3], [0.0] * 6, [0.1] * 6)), second]), file)
    assert correctness.main([*flags, "--parts", "reference"]) == 0


def _fields(sequence: Continuation) -> list[Any]:
    return [getattr(sequence, name) for name in Continuation.__slots__]


def test_acceptance_stops_at_the_end_of_the_text() -> None:
    executor = tiny_executor((3, 1, 4))
    whole = accepted_of(executor, PROMPTS, (), 3, 12, rows=2)
    assert [counted.tokens for counted in whole] == [11, 11, 11]  # not the prefill's token
    [output, *_] = generate(executor, PROMPTS, 12, [3], rows=1)
    end = output[4]
    cut, *others = accepted_of(executor, PROMPTS, (end,), 3, 12, rows=3)
    executor.shutdown()
    assert cut.tokens == output.index(end) and 1 <= cut.steps <= whole[0].steps
    assert Accepted(5, 2) + Accepted(1, 1) == Accepted(6, 3) and Accepted(6, 3).length == 2


def test_padding_sees_every_change() -> None:
    executor = tiny_executor((3, 1, 4))
    before = Reserved.of(executor)
    assert replay(executor, 3, 20, [3, 0], 8, 9) >= 20
    assert Reserved.of(executor).changed(before) == [] and before.is_finite
    state, pools = executor.worker.state, executor.worker.pools
    state.seq_len[0] += 1
    state.page_table[0, 3] = 7
    pools[1].kv[0, 0, 0, 0, 0] = float("nan")
    after = Reserved.of(executor)
    executor.shutdown()
    assert after.changed(before) == ["seq_len", "page_table", "page of pool 1"] and not after.is_finite


def test_streams(model_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    flags = [*model_flags, "--tiny", "--device", "cpu", "--out", str(out), "--passes", "1"]
    assert smollm2_streams.main([*flags, "--threshold", "1"]) == 0
    found = {(x["mode"], x["streams"]): x["draft_len"] for x in _lines(out, "streams")}
    assert found == {
        ("plain", 1): 0, ("plain", 2): 0, ("plain+drafter", 1): 0, ("plain+drafter", 2): 0,
        ("spec", 1): 3, ("spec", 2): 3, ("toggle", 1): 3, ("toggle", 2): 0,
    }  # fmt: skip
    assert capsys.readouterr().out.count("\n| ") == 3


ABSENT = ("fastapi", "uvicorn", "starlette", "pydantic", "zmq", "msgspec", "httpx", "gguf", "jinja2")
WITHOUT_SERVER = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import sglang.bench_one_batch
from benchmark.h200 import correctness, smollm2_streams, step_times
step_times.main(["--tiny", "--device", "cpu", "--parts", "plain", "tree", "--passes", "1"])
"""


def test_a_machine_without_the_servers_packages_will_do(tmp_path: Path) -> None:
    """torch's own import looks for some of these too, and can do without them."""
    env = server_environment(tmp_path)
    env["PYTHONPATH"] = f"{env.get('PYTHONPATH', '')}:{ROOT}"
    done = subprocess.run([sys.executable, "-c", WITHOUT_SERVER], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "| 1 |" in done.stdout


def test_ragged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("SGLANG_SIMULATE_ACC_LEN", "SGLANG_SIMULATE_ACC_METHOD"):
        monkeypatch.setenv(name, "")  # put back afterwards: the script sets them
    file = tmp_path / "out.jsonl"
    assert ragged.main(["--tiny", "--device", "cpu", "--out", str(file)]) == 0
    printed = capsys.readouterr().out.splitlines()
    for line in _lines(file, "turn"):
        verified = line["verified"] or line["rows"] * (line["draft_len"] + 1)
        assert line["rows"] <= line["tokens"] <= verified and line["expected"] <= verified
    found = {(tuple(x["mix"]), x["draft_len"]) for x in _lines(file, "turn") if not x["verified"]}
    assert found == {(mix, k) for mix in ragged.MIXES for k in range(4)}
    assert ragged.main(["--table", str(file)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert (
        printed[-len(table) :] == table and len([x for x in table if x.startswith("| 8 | 16 | 2.5 and")]) == 2
    )


def test_auto_with_and_without_draft_lengths_of_rows_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("SGLANG_SIMULATE_ACC_LEN", "SGLANG_SIMULATE_ACC_METHOD"):
        monkeypatch.setenv(name, "")  # put back afterwards: the script sets them
    file = tmp_path / "out.jsonl"
    assert ragged.main(["--auto", "--tiny", "--device", "cpu", "--out", str(file)]) == 0
    printed = capsys.readouterr().out.splitlines()
    lines = _lines(file, "auto")
    assert {(line["mode"], tuple(line["mix"])) for line in lines} == {
        (mode, mix) for mode in (ragged_auto.COMMON, ragged_auto.OWN) for mix in ragged.MIXES
    }
    for line in lines:
        own = sum(count for kind, count in line["steps"].items() if "drafts" in kind)
        assert line["mode"] == ragged_auto.OWN or own == 0
        assert line["tokens"] >= line["streams"] * sum(line["steps"].values())
    assert any("drafts" in kind for line in lines for kind in line["steps"])
    assert ragged.main(["--auto", "--table", str(file)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert printed[-len(table) :] == table and len(table) == 2 + len(ragged.MIXES)
