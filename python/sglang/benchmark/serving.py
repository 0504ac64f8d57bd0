"""Measure a running server over HTTP.

    python -m sglang.bench_serving --backend sglang --dataset-name humaneval --num-prompts 100

Speaks HTTP only: SGLang's own API, or OpenAI's as SGLang, vLLM and others serve it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import aiohttp
from tqdm import tqdm

from sglang.benchmark.backends import RequestSettings
from sglang.benchmark.client import auth_headers, open_session, send
from sglang.benchmark.dataset_flags import load_rows
from sglang.benchmark.load import run_load
from sglang.benchmark.metrics import Summary, goodput, summarise
from sglang.benchmark.outcome import Outcome
from sglang.benchmark.prompt_row import DatasetError, PromptRow, Tokenizer
from sglang.benchmark.report import cache_figures, cache_lines, failure_lines, line, serving_lines
from sglang.benchmark.server_info import (
    ServerProblem,
    first_model,
    flush_cache,
    get_json,
    internal_state,
    tokenizer_path,
    wait_until_ready,
)
from sglang.benchmark.serving_flags import ServingFlags, parse
from sglang.benchmark.tokenizer import load_tokenizer
from sglang.srt.utils.flags import ServerArgsError, exit_with_error

_WARMUP_TOKENS: Final = 32
_SETTLE_S: Final = 1.0  # between warming up and measuring
_NEED_TOKENIZER: Final = frozenset({"random", "random-ids", "generated-shared-prefix", "sharegpt", "custom"})


@dataclass(frozen=True, slots=True)
class Run:
    """What a run gave."""

    outcomes: list[Outcome]
    summary: Summary
    server_info: dict[str, Any] | None
    accept_length: float | None


class Bench:
    """One server and one set of flags."""

    def __init__(self, flags: ServingFlags, session: aiohttp.ClientSession) -> None:
        self._flags = flags
        self._session = session

    async def run(self) -> Run:
        """
        Raises:
            ServerProblem, DatasetError: nothing could be measured.
        """
        flags = self._flags
        await wait_until_ready(self._session, flags.url, flags.ready_check_timeout_sec)
        model = flags.model or flags.served_model_name or await first_model(self._session)
        tokenizer = await self._tokenizer(model)
        rows = load_rows(flags, tokenizer, flags.tokenize_prompt)
        settings = RequestSettings(
            flags.served_model_name or model, flags.temperature, flags.top_p, not flags.disable_stream,
            not flags.disable_ignore_eos, flags.extra_body(),
        )  # fmt: skip
        for row in rows:
            flags.kind.request(row, settings)  # one that can't be sent ends the run before it begins
        await self._warm_up(rows[0], settings)
        if flags.flush_cache:
            await flush_cache(self._session)
        began = time.perf_counter()
        outcomes = await self._measure(rows, settings)
        duration = time.perf_counter() - began
        info = await get_json(self._session, "/server_info")
        accept = internal_state(info).get("avg_spec_accept_length") if flags.kind.is_sglang else None
        return Run(outcomes, summarise(outcomes, duration, _retokenized(outcomes, tokenizer)), info, accept)

    async def _tokenizer(self, model: str) -> Tokenizer | None:
        """None where none was named, none can be read, and the data set can do without."""
        flags = self._flags
        found = flags.tokenizer or await tokenizer_path(self._session) or model
        try:
            return load_tokenizer(found, flags.trust_remote_code)
        except DatasetError as error:
            if flags.tokenizer or flags.dataset_name in _NEED_TOKENIZER:
                raise
            print(f"Without a tokenizer: {error}")
            return None

    async def _request(self, row: PromptRow, settings: RequestSettings) -> Outcome:
        kind = self._flags.kind
        body = kind.request(row, settings)
        outcome = await send(self._session, kind.path, body, kind.reader(time.perf_counter()))
        return replace(outcome, prompt_len=row.prompt_len or outcome.prompt_len)

    async def _warm_up(self, row: PromptRow, settings: RequestSettings) -> None:
        """
        Raises:
            ServerProblem: not one request succeeded.
        """
        count = self._flags.warmup_requests
        if not count:
            return
        print(f"Warming up with {count} request(s).")
        short = replace(row, output_len=min(row.output_len, _WARMUP_TOKENS))
        outcomes = await asyncio.gather(*(self._request(short, settings) for _ in range(count)))
        if not any(outcome.success for outcome in outcomes):
            raise ServerProblem(f"the warm-up failed, so nothing was measured: {outcomes[0].error}")
        await asyncio.sleep(_SETTLE_S)

    async def _measure(self, rows: Sequence[PromptRow], settings: RequestSettings) -> list[Outcome]:
        flags = self._flags
        with tqdm(total=len(rows), disable=flags.disable_tqdm) as bar:
            return await run_load(
                rows,
                lambda row: self._request(row, settings),
                flags.request_rate,
                flags.max_concurrency,
                flags.seed,
                lambda _: bar.update(1),
            )


def _retokenized(outcomes: Sequence[Outcome], tokenizer: Tokenizer | None) -> int | None:
    if tokenizer is None:
        return None
    return sum(len(tokenizer.encode(o.text, add_special_tokens=False)) for o in outcomes if o.success)


async def run_serving(flags: ServingFlags) -> Run:
    """
    Raises:
        ServerProblem, DatasetError: nothing could be measured.
    """
    async with open_session(flags.url, {**auth_headers(), **flags.headers()}) as session:
        return await Bench(flags, session).run()


def record(flags: ServingFlags, run: Run) -> dict[str, Any]:
    """The JSON line of a run."""
    made: dict[str, Any] = {
        "tag": flags.tag,
        "backend": flags.backend,
        "dataset_name": flags.dataset_name,
        "request_rate": flags.request_rate,
        "max_concurrency": flags.max_concurrency,
        "sharegpt_output_len": flags.sharegpt_output_len,
        "random_input_len": flags.random_input_len,
        "random_output_len": flags.random_output_len,
        "random_range_ratio": flags.random_range_ratio,
        "server_info": run.server_info,
        **run.summary.record(),
        "accept_length": run.accept_length,
    }
    if flags.goodput:
        made["request_goodput"] = goodput(run.outcomes, flags.goodput_limits(), run.summary.duration)
    if flags.cache_report:
        made["cache_report"] = cache_figures(run.outcomes)
    return made | _details(run.outcomes) if flags.output_details else made


def _details(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "input_lens": [o.prompt_len for o in outcomes],
        "output_lens": [o.output_len for o in outcomes],
        "ttfts": [o.ttft for o in outcomes],
        "itls": [list(o.itl) for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error for o in outcomes],
    }


def default_file(flags: ServingFlags, today: datetime) -> str:
    """Upstream's name for a record's file."""
    what = flags.dataset_name
    if what.startswith("random"):
        what = f"{flags.random_input_len}_{flags.random_output_len}"
    return f"{flags.backend}_{today:%m%d}_{flags.num_prompts}_{what}.jsonl"


def _print(flags: ServingFlags, run: Run, made: dict[str, Any]) -> None:
    shown = serving_lines(
        flags.backend, flags.request_rate, flags.max_concurrency, run.summary, run.accept_length
    )
    if "request_goodput" in made:
        shown.append(line("Request goodput (req/s)", made["request_goodput"]))
    if "cache_report" in made:
        shown += cache_lines(made["cache_report"])
    print("", *shown, "=" * 50, sep="\n")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        flags = parse(sys.argv[1:] if argv is None else argv)
        run = asyncio.run(run_serving(flags))
    except (ServerArgsError, DatasetError, ServerProblem) as error:
        exit_with_error(str(error))
    except KeyboardInterrupt:
        exit_with_error("interrupted")
    for text in failure_lines(run.outcomes):
        print(text, file=sys.stderr)
    if not run.summary.completed:
        exit_with_error("every request failed: there is nothing to report")
    made = record(flags, run)
    _print(flags, run, made)
    file = Path(flags.output_file or default_file(flags, datetime.now()))
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(made) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
