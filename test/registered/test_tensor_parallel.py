"""The command line of a Kimi-K2.5 server on eight GPUs, on a CPU: several processes, int4 experts, a tree.

Run alone: pytest THIS_FILE; with eight ranks: pytest THIS_FILE -m long
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.quantise import FORMATS, write_quantised
from helpers.server import Server
from helpers.tiny_mla import write_tiny_kimi_k25
from helpers.tiny_models import write_tiny_eagle3
from helpers.tiny_tokenizer import write_byte_tokenizer

KIMI_IGNORES = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
]
KEPT = ("lm_head", "self_attn", "shared_experts", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
THRESHOLD = 2
START_S = 240.0  # eight processes that import torch on two cores
SAID = (
    "--cuda-graph-max-bs: a CPU has no CUDA graphs; every decode step runs eagerly",
    "--attention-backend flashinfer is for GPUs; torch_native is used",
    "--disable-custom-all-reduce: sums over the {size} ranks are made by Gloo",
    "--enable-flashinfer-allreduce-fusion: sums over the {size} ranks",
    "--trust-remote-code: nothing to trust",
    "tensor parallel: {size} workers",
)


def write_models(folder: Path) -> tuple[Path, Path]:
    """Heads and groups of 32 for eight ranks."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 256}
    plain = write_tiny_kimi_k25(
        folder / "plain", **sizes, moe_intermediate_size=256, n_routed_experts=4, max_position_embeddings=2048
    )
    int4 = FORMATS["int4"]
    form = replace(int4, config=int4.config | {"ignore": KIMI_IGNORES}, dense=KEPT)
    target, _ = write_quantised(plain, folder / "int4", form)
    write_byte_tokenizer(target)
    return target, write_tiny_eagle3(folder / "drafter", plain)


def start(folder: Path, size: int) -> Server:
    target, drafter = write_models(folder)
    line = (
        f"--model-path {target} --tp {size} --trust-remote-code --cuda-graph-max-bs 128"
        " --disable-custom-all-reduce --attention-backend flashinfer --enable-flashinfer-allreduce-fusion"
        f" --speculative-algorithm EAGLE3 --speculative-draft-model-path {drafter} --speculative-num-steps 2"
        " --speculative-eagle-topk 4 --speculative-num-draft-tokens 16 --mem-fraction-static 0.88"
        f" --speculative-disable-bs-threshold {THRESHOLD}"
    )
    return Server(*line.split(), "--device", "cpu", "--max-running-requests", "8").wait_ready(START_S)


def generate(server: Server, seed: int, num_tokens: int) -> Any:
    params = {"temperature": 0.8, "sampling_seed": seed, "max_new_tokens": num_tokens, "ignore_eos": True}
    body = {"text": f"prompt {seed}", "sampling_params": params}
    response = httpx.post(f"{server.url}/generate", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def decode_steps(server: Server) -> dict[str, int]:
    info = httpx.get(f"{server.url}/server_info", timeout=10).json()
    steps: dict[str, int] = info["internal_states"][0]["decode_steps"]
    return steps


def check_serving(server: Server, size: int, num_tokens: int) -> None:
    """Below the threshold every step speculates; above it none does, as long as all requests run."""
    for words in SAID:
        assert words.format(size=size) in server.log()
    assert len(workers(server)) == size
    alone = generate(server, 0, num_tokens)
    assert len(alone["output_ids"]) == num_tokens and decode_steps(server)["plain"] == 0
    speculative = decode_steps(server)["spec"]
    assert 0 < speculative < num_tokens
    with ThreadPoolExecutor(4) as clients:
        together = list(clients.map(lambda seed: generate(server, seed, num_tokens), range(4)))
    assert decode_steps(server)["plain"] > 0
    assert all(len(answer["output_ids"]) == num_tokens for answer in together)


def workers(server: Server) -> list[Any]:
    return [p for p in server.members if any("worker_process" in word for word in p.cmdline())]


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[Server]:
    server = start(tmp_path, 2)
    yield server
    server.stop()


def test_two_ranks_serve_and_end_together(two_ranks: Server) -> None:
    check_serving(two_ranks, 2, 24)
    endless = ThreadPoolExecutor(1).submit(
        httpx.post,
        f"{two_ranks.url}/generate",
        json={"text": "a", "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}},
        timeout=60,
    )
    time.sleep(0.5)
    os.kill(workers(two_ranks)[1].pid, signal.SIGKILL)
    assert two_ranks.wait_gone(5.0) < 5.0
    assert two_ranks.process.returncode not in (0, None)
    assert "the tensor-parallel worker 1 process was killed by SIGKILL" in two_ranks.log()
    assert endless.exception() is not None or endless.result().status_code >= 500
    assert two_ranks.leftovers() == []


@pytest.mark.long
def test_eight_ranks_serve(tmp_path: Path) -> None:
    server = start(tmp_path, 8)
    try:
        check_serving(server, 8, 12)
        scheduler = server.child("scheduler_process")
        os.kill(scheduler.pid, signal.SIGKILL)
        assert server.wait_gone(10.0) < 10.0
    finally:
        server.stop()
