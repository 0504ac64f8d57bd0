"""One hour of the embedded model, the mode flipped every second: nothing may drift, nothing may grow.

    make soak; for less: make soak ARGS="--minutes 15"

Clients ask the same few prompts again and again, whose beginnings are the same for several; some abort. The
threshold goes from "always" to "never" and back every second. The exit code is 1 if the accept length of the
last 5 minutes is not within 2 % of that of the first 5 (of a shorter run: thirds, and within what chance
allows), or if memory, descriptors, requests or KV places grow.
"""

import argparse
import asyncio
import itertools
import random
import sys
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any, Final

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "spec_toggle"))
from acceptance import Answer, compare
from footprint import Footprint, growth, held_when_idle, look
from prompts import Prompt, interleaved, read_prompts
from servers import Server, running_server, wait_until_healthy

_WINDOW_S: Final = 300.0
_TOLERANCE: Final = 0.02
_FLIP_S: Final = 1.0
_LOOK_S: Final = 5.0
_SETTLE_S: Final = 30.0  # of a longer run, before it is looked at: caches and allocators fill
_TOKENS: Final = (48, 96)  # of the answers to a prompt, always the same number
_ABORTED_PART: Final = 0.15
_PREFIX: Final = "You answer questions about programs, one after the other, without any preamble.\n\n"


class Soak:
    def __init__(
        self, server: Server, session: aiohttp.ClientSession, prompts: list[Prompt], seed: int
    ) -> None:
        self.answers: list[Answer] = []
        self.footprints: list[Footprint] = []
        self.wrong: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self._server = server
        self._session = session
        self._random = random.Random(seed)
        self._tokens = {prompt.id: self._random.randrange(*_TOKENS) for prompt in prompts}
        self._prompts = itertools.cycle(prompts)
        self._began = time.monotonic()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._began

    async def client(self) -> None:
        """Ask for ever; cancelled at the end."""
        while True:
            prompt = next(self._prompts)
            try:
                if self._random.random() < _ABORTED_PART:
                    await self._abort(prompt)
                else:
                    await self._ask(prompt)
            except (aiohttp.ClientError, TimeoutError) as error:
                self.wrong[f"a request failed: {type(error).__name__} {error}"] += 1
                await asyncio.sleep(1.0)

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": self._tokens[prompt.id], "ignore_eos": True}
        return {"text": _PREFIX + prompt.text, "sampling_params": sampling, "rid": uuid.uuid4().hex}

    async def _ask(self, prompt: Prompt) -> None:
        async with self._session.post("/generate", json=self._body(prompt)) as response:
            answer = await response.json()
        if response.status != 200:
            self.wrong[f"a request was answered with {response.status}: {answer}"] += 1
            return
        info = answer["meta_info"]
        self.ended["answered"] += 1
        if info["completion_tokens"] != self._tokens[prompt.id]:
            self.wrong["an answer had another number of tokens than it was to have"] += 1
        if verified := info.get("spec_verify_ct", 0):
            emitted = round(info["spec_accept_length"] * verified)
            self.answers.append(Answer(prompt.id, self.now_s, emitted, verified))

    async def _abort(self, prompt: Prompt) -> None:
        """By its id while it is waited for, or by going away."""
        body = self._body(prompt)
        asking = asyncio.create_task(self._finish_reason(body))
        try:
            await asyncio.sleep(self._random.uniform(0.0, 2.0))
            if self._random.random() < 0.5:
                asking.cancel()
                await asyncio.wait({asking})
                self.ended["went away"] += 1
                return
            async with self._session.post("/abort_request", json={"rid": body["rid"]}):
                pass
            self.ended[f"aborted, ended by {await asking}"] += 1
        finally:
            asking.cancel()  # where the run ends meanwhile

    async def _finish_reason(self, body: dict[str, Any]) -> str:
        async with self._session.post("/generate", json=body) as response:
            reason: str = (await response.json())["meta_info"]["finish_reason"]["type"]
            return reason

    async def flip(self) -> None:
        """Always speculate for a second, then never for a second."""
        for threshold in itertools.cycle((None, 0)):
            change = {"server_args": {"speculative_disable_bs_threshold": threshold}}
            async with self._session.post("/set_internal_state", json=change) as response:
                if response.status != 200:
                    self.wrong[f"the mode could not be set: {await response.text()}"] += 1
            await asyncio.sleep(_FLIP_S)

    async def watch(self) -> None:
        """Look at the processes now and then."""
        while True:
            self.footprints.append(look(self._server.process.pid, self._began))
            await asyncio.sleep(_LOOK_S)


async def run(server: Server, flags: argparse.Namespace) -> tuple[Soak, dict[str, Any]]:
    prompts = interleaved(read_prompts())[: flags.prompts]
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(server.base_url, timeout=timeout) as session:
        soak = Soak(server, session, prompts, flags.seed)
        working = [asyncio.create_task(soak.client()) for _ in range(flags.streams)]
        working += [asyncio.create_task(soak.flip()), asyncio.create_task(soak.watch())]
        await asyncio.wait(working, timeout=flags.minutes * 60, return_when=asyncio.FIRST_EXCEPTION)
        for task in working:
            task.cancel()
        for error in await asyncio.gather(*working, return_exceptions=True):
            if isinstance(error, Exception):
                raise error
        async with session.get("/server_info") as response:
            info: dict[str, Any] = (await response.json())["internal_states"][0]
    return soak, info


def report(soak: Soak, info: dict[str, Any], seconds: float) -> list[str]:
    """Print the figures; what is wrong."""
    window = min(_WINDOW_S, seconds / 3)
    settle = min(_SETTLE_S, seconds / 10)
    drift = compare([one for one in soak.answers if one.at_s >= settle], window)
    print(f"requests: {dict(sorted(soak.ended.items()))}")
    print(f"decode steps: {info['decode_steps']}, switches: {info['spec_switches']}")
    print(f"windows of {window:.0f} s: {drift}")
    lines, grown = growth([one for one in soak.footprints if one.at_s >= settle], window)
    print("\n".join(lines))
    wrong = [f"{what} ({count} times)" for what, count in soak.wrong.items()]
    if drift.is_more_than(_TOLERANCE, by_chance_too=seconds < 12 * _WINDOW_S):
        wrong.append(f"the accept length drifted: {drift}")
    return wrong + grown


def main() -> int:
    """Run it, print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-dir", default=".cache/soak", help="of the server's log")
    flags = parser.parse_args()
    folder = Path(flags.log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with running_server("soak", [], folder) as server:
        wait_until_healthy(server, 120)
        soak, info = asyncio.run(run(server, flags))
        wrong = report(soak, info, flags.minutes * 60)
        wrong += held_when_idle(server.base_url)
        if server.process.poll() is not None:
            wrong.append(f"the server ended:\n{server.log_tail()}")
    print("\n".join(f"WRONG: {line}" for line in wrong) or "nothing drifted, nothing grew")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
