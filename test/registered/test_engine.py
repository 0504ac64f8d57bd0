"""sglang.Engine, in the test's own process. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
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
    ) as engine:
        yield engine


def test_generate(engine: sglang.Engine) -> None:
    one: Any = engine.generate("hello", GREEDY)
    assert len(one["output_ids"]) == 16 and one["meta_info"]["spec_verify_ct"] > 0
    several: Any = engine.generate(["hello", "x"], GREEDY)
    assert several[0]["output_ids"] == one["output_ids"]
    by_ids: Any = engine.generate(input_ids=list(b"hello"), sampling_params=GREEDY)
    assert by_ids["text"] == one["text"]


def test_stream(engine: sglang.Engine) -> None:
    whole: Any = engine.generate("stream", GREEDY)
    chunks: Any = list(engine.generate("stream", GREEDY, stream=True))
    assert len(chunks) > 2 and chunks[-1]["output_ids"] == whole["output_ids"]


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
