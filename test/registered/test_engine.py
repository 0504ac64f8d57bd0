"""sglang.Engine, in the test's own process. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers.server import write_tiny_pair

import sglang
from sglang.srt.entrypoints.prepare import StartError
from sglang.srt.managers.text_request import RequestError
from sglang.srt.utils.flags import ServerArgsError

GREEDY = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
ENDLESS = {**GREEDY, "max_new_tokens": 3000}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_tiny_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def engine(folders: tuple[Path, Path]) -> Iterator[sglang.Engine]:
    with sglang.Engine(
        model_path=str(folders[0]),
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(folders[1]),
        speculative_num_steps=2,
        speculative_eagle_topk=2,
        speculative_num_draft_tokens=5,
        disable_overlap_schedule=True,
        enable_return_hidden_states=True,
        enable_custom_logit_processor=True,
    ) as engine:
        yield engine


def test_generate(engine: sglang.Engine) -> None:
    one: Any = engine.generate("hello", GREEDY)
    assert len(one["output_ids"]) == 16 and one["meta_info"]["spec_verify_ct"] > 0
    several: Any = engine.generate(["hello", "x"], GREEDY)
    assert several[0]["output_ids"] == one["output_ids"]
    by_ids: Any = engine.generate(input_ids=list(b"hello"), sampling_params=GREEDY)
    assert by_ids["text"] == one["text"]


def test_a_custom_logit_processor_as_a_class_or_by_its_path(engine: sglang.Engine) -> None:
    path = "sglang.srt.sampling.custom_logit_processor:DisallowedTokensLogitsProcessor"
    free: Any = engine.generate("hello", GREEDY)
    banned = {**GREEDY, "custom_params": {"token_ids": free["output_ids"][3:6]}}
    module, _, name = path.partition(":")
    for given in (path, getattr(importlib.import_module(module), name)):
        one: Any = engine.generate("hello", banned, custom_logit_processor=given)
        assert len(one["output_ids"]) == 16
        assert not set(one["output_ids"]) & set(free["output_ids"][3:6])
    with pytest.raises(RequestError, match="can't be read"):
        engine.generate("hello", GREEDY, custom_logit_processor='{"callable": "00"}')


def test_stream(engine: sglang.Engine) -> None:
    whole: Any = engine.generate("stream", GREEDY)
    chunks: Any = list(engine.generate("stream", GREEDY, stream=True))
    assert len(chunks) > 2 and chunks[-1]["output_ids"] == whole["output_ids"]


def test_logprobs_and_hidden_states_are_those_of_transformers(
    engine: sglang.Engine, folders: tuple[Path, Path]
) -> None:
    from transformers import AutoModelForCausalLM

    prompt = list(b"log-probabilities")
    wishes: dict[str, Any] = {
        "return_logprob": True, "logprob_start_len": 3, "top_logprobs_num": 2, "token_ids_logprob": [65, 200],
        "return_text_in_logprobs": True, "return_hidden_states": True,
    }  # fmt: skip
    answer: Any = engine.generate(input_ids=prompt, sampling_params=GREEDY, **wishes)
    meta, ids = answer["meta_info"], [*prompt, *answer["output_ids"]]
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
        out = model(torch.tensor([ids]), output_hidden_states=True)
    logprobs, states = out.logits[0].log_softmax(-1), out.hidden_states[-1][0]

    (none, first, text), *told = [*meta["input_token_logprobs"], *meta["output_token_logprobs"]]
    assert (none, first, text) == (None, ids[3], chr(ids[3]))
    assert [token for _, token, _ in told] == ids[4:] and meta["output_token_logprobs_length"] == 16
    places = range(3, len(ids) - 1)
    expected = [float(logprobs[at, ids[at + 1]]) for at in places]
    assert [value for value, _, _ in told] == pytest.approx(expected, abs=1e-4)
    none, *tops = [*meta["input_top_logprobs"], *meta["output_top_logprobs"]]
    assert none is None
    for at, top in zip(places, tops, strict=True):
        assert [token for _, token, _ in top] == logprobs[at].topk(2).indices.tolist()
    none, *named = [*meta["input_token_ids_logprobs"], *meta["output_token_ids_logprobs"]]
    for at, ((of_a, a, letter), (of_byte, byte, half)) in zip(places, named, strict=True):
        assert (a, letter, byte, half) == (65, "A", 200, "\ufffd")
        assert [of_a, of_byte] == pytest.approx(logprobs[at, [65, 200]].tolist(), abs=1e-4)
    matrix, *vectors = meta["hidden_states"]
    assert len(matrix) == len(prompt) and len(vectors) == 15
    torch.testing.assert_close(torch.tensor([*matrix, *vectors]), states[:-1], atol=1e-3, rtol=1e-3)
    last: Any = engine.generate(input_ids=prompt, sampling_params=GREEDY, return_hidden_states="last")
    torch.testing.assert_close(
        torch.tensor(last["meta_info"]["hidden_states"]), states[-2], atol=1e-3, rtol=1e-3
    )
    assert "output_token_logprobs" not in last["meta_info"]


def test_each_prompt_has_wishes_of_its_own(engine: sglang.Engine) -> None:
    answers: Any = engine.generate(
        ["one", "two", "three"],
        {**GREEDY, "n": 2},
        return_logprob=[True, False, True],
        logprob_start_len=[0, -1, 5],
        top_logprobs_num=[0, 0, 1],
        token_ids_logprob=[[1], None, []],
    )
    infos = [answer["meta_info"] for answer in answers]
    assert [len(info.get("input_token_logprobs", "no")) for info in infos] == [3, 3, 2, 2, 0, 0]
    assert ["output_top_logprobs" in info for info in infos] == [False] * 4 + [True] * 2
    assert ["output_token_ids_logprobs" in info for info in infos] == [True] * 2 + [False] * 4
    assert [entry[2] for entry in infos[0]["output_token_logprobs"]] == [None] * 16


WRONG: dict[str, dict[str, Any]] = {
    "logprob_start_len (6)": {"return_logprob": True, "logprob_start_len": 6},
    "logprob_start_len must be": {"return_logprob": True, "logprob_start_len": -2},
    "return_logprob must be true or false": {"return_logprob": 1},
    "top_logprobs_num has 2": {"top_logprobs_num": [1, 2]},
    "top_logprobs_num must be": {"top_logprobs_num": 5000},
    "more logprobs": {"return_logprob": True, "top_logprobs_num": 1000},
    "id 256 is outside": {"return_logprob": True, "token_ids_logprob": [256]},
    "a list of token ids": {"token_ids_logprob": ["a"]},
    "has 2 lists": {"token_ids_logprob": [[1], [2]]},
    'return_hidden_states must be true, false or "last"': {"return_hidden_states": "first"},
}


@pytest.mark.parametrize("words", WRONG)
def test_wishes_that_cannot_be_met(engine: sglang.Engine, words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)):
        engine.generate("hello", GREEDY, **WRONG[words])


def test_async(engine: sglang.Engine) -> None:
    async def both() -> tuple[Any, list[Any]]:
        whole = await engine.async_generate("async", GREEDY)
        chunks: Any = await engine.async_generate("async", GREEDY, stream=True)
        return whole, [chunk async for chunk in chunks]

    whole, chunks = asyncio.run(both())
    assert chunks[-1]["output_ids"] == whole["output_ids"]


def test_what_nobody_wants_ends(engine: sglang.Engine) -> None:
    chunks: Any = engine.generate("endless", ENDLESS, stream=True)
    next(chunks)
    chunks.close()

    async def cancelled() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.async_generate("endless", ENDLESS), 0.3)

    asyncio.run(cancelled())
    for _ in range(100):
        if engine.get_server_info()["internal_states"][0]["num_running_reqs"] == 0:
            break
    assert engine.get_server_info()["internal_states"][0]["num_running_reqs"] == 0
    assert engine.flush_cache()


def test_errors(engine: sglang.Engine, folders: tuple[Path, Path]) -> None:
    with pytest.raises(RequestError, match="top_p"):
        engine.generate("a", {"top_p": 3})
    with pytest.raises(RequestError, match="image_data"):
        engine.generate("a", image_data="x")
    with pytest.raises(TypeError, match="promt"):
        engine.generate(promt="a")
    with pytest.raises(ValueError, match="threshold"):
        engine.set_internal_state({"speculative_disable_bs_threshold": -3})
    assert engine.set_internal_state({"speculative_disable_bs_threshold": 3}) == {
        "speculative_disable_bs_threshold": 3
    }
    with pytest.raises(ServerArgsError, match="model_path"):
        sglang.Engine(model_pth=str(folders[0]))
    with pytest.raises(ServerArgsError, match="/metrics"):
        sglang.Engine(model_path=str(folders[0]), enable_metrics=True)
    with pytest.raises(StartError, match="does not exist"):
        sglang.Engine(model_path=str(folders[0] / "nowhere"))


def test_shutdown_leaves_no_process(folders: tuple[Path, Path]) -> None:
    before = set(psutil.Process().children(recursive=True))
    engine = sglang.Engine(sglang.ServerArgs(model_path=str(folders[0]), log_level="error"))
    started = set(psutil.Process().children(recursive=True)) - before
    assert len(started) == 2
    engine.shutdown()
    engine.shutdown()
    engine.abort_request(abort_all=True)
    assert not any(process.is_running() for process in started)
    with pytest.raises(RuntimeError, match="shut down"):
        engine.generate("x")
