"""The command line of our users, over HTTP on GPUs of one host: Kimi-K2.5's layout, int4 experts, a tree.

    python benchmark/h200/user_command.py --ranks 2 --out user_command.jsonl
    python benchmark/h200/user_command.py --ranks 2 --device cpu       # does it run?

A small random model in the head sizes of the released one. The server must start, speculate below its
threshold and decode plainly above it, take another threshold while requests run, and end within 5 s when a
worker is killed. How far the same greedy text goes in both modes is told (bfloat16 rounds), and what the log
says of flags whose wish could not be had.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test"))

import httpx
from helpers.server import Server
from helpers.tiny_tokenizer import write_byte_tokenizer

from benchmark.h200.executors import Records, add_common_flags, device_name
from benchmark.h200.latent_models import CASES

THRESHOLD: Final = 2
TOKENS: Final = 64
START_S: Final = 240.0
GONE_S: Final = 5.0


def start(root: Path, device: str, ranks: int) -> Server:
    case = next(case for case in CASES if case.name == "kimi-int4-eagle3-mla")
    target, drafter = case.folders(root, tiny=False)
    write_byte_tokenizer(target)
    line = (
        f"--model-path {target} --tp {ranks} --trust-remote-code --cuda-graph-max-bs 128"
        " --disable-custom-all-reduce --attention-backend flashinfer --enable-flashinfer-allreduce-fusion"
        f" --speculative-algorithm EAGLE3 --speculative-draft-model-path {drafter} --speculative-num-steps 2"
        " --speculative-eagle-topk 4 --speculative-num-draft-tokens 16 --mem-fraction-static 0.88"
        f" --speculative-disable-bs-threshold {THRESHOLD} --speculative-capture-max-bs 8"
        " --grammar-backend none --context-length 2048 --dtype bfloat16"
    )
    return Server(*line.split(), "--device", device, "--max-total-tokens", "60000").wait_ready(START_S)


class Asking:
    def __init__(self, server: Server) -> None:
        self._url = server.url

    def text(self, seed: int, temperature: float = 0.0, num_tokens: int = TOKENS) -> dict[str, Any]:
        params = {"temperature": temperature, "sampling_seed": seed, "max_new_tokens": num_tokens}
        body = {"text": f"prompt {seed}", "sampling_params": params | {"ignore_eos": True}}
        response = httpx.post(f"{self._url}/generate", json=body, timeout=120)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    def steps(self) -> dict[str, int]:
        info = httpx.get(f"{self._url}/server_info", timeout=10).json()
        steps: dict[str, int] = info["internal_states"][0]["decode_steps"]
        return steps

    def set_threshold(self, value: int | None) -> None:
        change = {"server_args": {"speculative_disable_bs_threshold": value}}
        httpx.post(f"{self._url}/set_internal_state", json=change, timeout=10).raise_for_status()


def same_part(one: Sequence[int], other: Sequence[int]) -> float:
    """Of the ids, those before the first that differs."""
    differ = [place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    return (differ[0] if differ else len(one)) / len(one)


def serve(server: Server, out: Records) -> list[str]:
    """What is wrong."""
    asking, wrong = Asking(server), []
    alone = asking.text(0)["output_ids"]
    if asking.steps()["plain"] or not asking.steps()["spec"]:
        wrong.append(f"one request did not speculate: {asking.steps()}")
    before = asking.steps()
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda seed: asking.text(seed, 0.8), range(8)))
    if asking.steps()["plain"] == before["plain"]:
        wrong.append(f"eight requests did not decode plainly: {asking.steps()}")
    asking.set_threshold(0)
    plain = asking.text(0)["output_ids"]
    with ThreadPoolExecutor(9) as clients:
        running = [clients.submit(asking.text, seed, 0.8, 4 * TOKENS) for seed in range(8)]
        for value in (None, 0, 4, None, THRESHOLD):
            time.sleep(0.1)
            asking.set_threshold(value)
        answers += [one.result() for one in running]
    lengths = {len(answer["output_ids"]) for answer in answers}
    if not lengths <= {TOKENS, 4 * TOKENS}:
        wrong.append(f"answers of other lengths: {lengths}")
    out.add("served", steps=asking.steps(), greedy_alone=same_part(alone, plain), wrong=wrong)
    return wrong


def kill(server: Server, out: Records) -> list[str]:
    asking = Asking(server)
    workers = [p for p in server.members if any("worker_process" in word for word in p.cmdline())]
    with ThreadPoolExecutor(1) as clients:
        endless = clients.submit(asking.text, 0, 0.0, 1500)
        time.sleep(0.3)
        os.kill(workers[-1].pid, signal.SIGKILL)
        seconds = server.wait_gone(2 * GONE_S)
        told = endless.exception() is not None
    code = server.process.returncode
    out.add("killed", gone_s=seconds, status=code, client_told=told)
    return (
        []
        if seconds < GONE_S and code and told
        else [f"gone after {seconds:.1f} s with {code}, told: {told}"]
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_flags(parser)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args(argv)
    out = Records(args.out, device_name(args.device))
    with tempfile.TemporaryDirectory(prefix="user_command_") as root:
        began = time.monotonic()
        server = start(Path(root), args.device, args.ranks)
        try:
            out.add("started", ranks=args.ranks, seconds=time.monotonic() - began)
            wrong = serve(server, out)
            said = re.findall(r"(?:flashinfer|all-reduce|sums over|trust-remote|cuda-graph).*", server.log())
            print("\n".join(said))
            wrong += kill(server, out)
        finally:
            server.stop()
    print("\n".join(f"WRONG: {what}" for what in wrong) or "all of it is right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
