"""Send one static batch to a server and time it.

python -m sglang.bench_one_batch_server --base-url http://localhost:30000 --batch-size 1 16 --input-len 512
python -m sglang.bench_one_batch_server --model-path M --batch-size 8 --input-len 1024 --output-len 64
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import aiohttp

from sglang.benchmark.backends import BACKENDS, RequestSettings
from sglang.benchmark.batch_metrics import BatchFigures, batch_figures
from sglang.benchmark.batch_reader import BatchReader
from sglang.benchmark.client import auth_headers, open_session, send
from sglang.benchmark.datasets import load
from sglang.benchmark.load import run_load
from sglang.benchmark.one_batch_flags import PROG, OneBatchFlags, parse
from sglang.benchmark.outcome import Outcome
from sglang.benchmark.prompt_row import DatasetError, DatasetOptions, PromptRow, Tokenizer
from sglang.benchmark.report import line, title
from sglang.benchmark.server_info import (
    ServerProblem,
    first_model,
    flush_cache,
    get_json,
    internal_state,
    tokenizer_path,
    wait_until_ready,
)
from sglang.benchmark.server_process import free_port, running_server
from sglang.benchmark.tokenizer import load_tokenizer
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.flags import ServerArgsError, exit_with_error

_READY_S: Final = 60.0
_WARMUP_TOKENS: Final = 16
_UNKNOWN: Final = -1.0
_DIGITS: Final = {"latency": 4, "last_ttft": 4, "steady_state_window_s": 4, "cache_hit_rate": 4}
_FLUSH: Final = {"sglang": "/flush_cache", "vllm": "/reset_prefix_cache"}


class BatchBench:
    """One server and one set of flags."""

    def __init__(
        self, flags: OneBatchFlags, session: aiohttp.ClientSession, model: str, tokenizer: Tokenizer
    ) -> None:
        self._flags = flags
        self._session = session
        self._tokenizer = tokenizer
        self._kind = BACKENDS[flags.backend]
        self._settings = RequestSettings(model, flags.temperature, None, True, not flags.disable_ignore_eos)

    async def run_case(self, size: int, input_len: int, output_len: int) -> dict[str, Any]:
        """One record.

        Raises:
            ServerProblem, DatasetError: the case can't be measured.
        """
        rows = self._rows(size, input_len, output_len)
        await self._check_room(rows)
        await flush_cache(self._session, _FLUSH[self._flags.backend])
        if self._flags.cache_hit_rate:
            await self._fill_cache(rows)
        figures = batch_figures(await self._send(rows), output_len)
        info = internal_state(await get_json(self._session, "/server_info"))
        return self._record(rows, output_len, figures, info)

    def _rows(self, size: int, input_len: int, output_len: int) -> list[PromptRow]:
        flags, tokenizer = self._flags, self._tokenizer
        if flags.fixed_prompt_file:
            ids = tokenizer.encode(_fixed_text(flags, tokenizer))
            return [PromptRow(ids, len(ids), output_len)] * size
        groups = min(flags.gsp_num_groups, size)
        options = DatasetOptions(
            num_prompts=size,
            seed=flags.seed,
            tokenizer=tokenizer,
            dataset_path=Path(flags.dataset_path) if flags.dataset_path else None,
            apply_chat_template=flags.apply_chat_template,
            output_len=output_len,
            random_input_len=input_len,
            random_range_ratio=1.0,
            tokenize_prompt=True,
            gsp_num_groups=groups,
            gsp_prompts_per_group=-(-size // groups),
            gsp_system_prompt_len=flags.gsp_system_prompt_len,
            gsp_question_len=flags.gsp_question_len,
        )
        return [self._as_ids(row) for row in load(flags.dataset_name, options)[:size]]

    def _as_ids(self, row: PromptRow) -> PromptRow:
        ids = self._tokenizer.encode(row.prompt) if isinstance(row.prompt, str) else row.prompt
        return PromptRow(ids, len(ids), row.output_len)

    async def _check_room(self, rows: Sequence[PromptRow]) -> None:
        """
        Raises:
            ServerProblem: the server says that it can't run the batch at once.
        """
        state = internal_state(await get_json(self._session, "/server_info"))
        most = state.get("effective_max_running_requests_per_dp")
        places = (state.get("memory_usage") or {}).get("token_capacity")
        needed = sum(row.prompt_len + row.output_len for row in rows)
        if most is not None and len(rows) > most:
            raise ServerProblem(f"a batch of {len(rows)}: the server runs at most {most} requests at once")
        if places is not None and needed > places:
            raise ServerProblem(f"a batch of {needed} tokens: the server's KV cache has {places} places")

    async def _fill_cache(self, rows: Sequence[PromptRow]) -> None:
        """Make the beginning of every prompt known to the prefix cache."""
        rate = self._flags.cache_hit_rate
        heads = [replace(row, prompt=row.prompt[: int(row.prompt_len * rate)], output_len=1) for row in rows]
        await self._send([row for row in heads if row.prompt])

    async def _send(self, rows: Sequence[PromptRow]) -> list[Outcome]:
        """
        Raises:
            ServerProblem: a request failed.
        """
        if not rows:
            return []
        together = self._flags.backend == "sglang" and not self._flags.parallel_batch
        outcomes = await (self._send_as_one(rows) if together else self._send_each(rows))
        failed = next((o.error for o in outcomes if not o.success), None)
        if failed:
            raise ServerProblem(f"the batch failed: {failed}")
        return [replace(o, prompt_len=row.prompt_len) for o, row in zip(outcomes, rows, strict=True)]

    async def _send_as_one(self, rows: Sequence[PromptRow]) -> list[Outcome]:
        body = self._kind.request(rows[0], self._settings)
        body["input_ids"] = [row.prompt for row in rows]
        reader = BatchReader(time.perf_counter(), len(rows))
        whole = await send(self._session, self._kind.path, body, reader)
        return reader.outcomes() if whole.success else [whole] * len(rows)

    async def _send_each(self, rows: Sequence[PromptRow]) -> list[Outcome]:
        async def one(row: PromptRow) -> Outcome:
            body = self._kind.request(row, self._settings)
            return await send(self._session, self._kind.path, body, self._kind.reader(time.perf_counter()))

        return await run_load(rows, one, float("inf"), None, 0, lambda _: None)

    def _record(
        self, rows: Sequence[PromptRow], output_len: int, figures: BatchFigures, state: dict[str, Any]
    ) -> dict[str, Any]:
        values: dict[str, Any] = {
            "run_name": self._flags.run_name,
            "batch_size": len(rows),
            "input_len": sum(row.prompt_len for row in rows) // len(rows),
            "output_len": output_len,
            **asdict(figures),
            "last_gen_throughput": state.get("last_gen_throughput", _UNKNOWN),
            "acc_length": state.get("avg_spec_accept_length") or _UNKNOWN,
        }
        return {k: round(v, _DIGITS.get(k, 2)) if isinstance(v, float) else v for k, v in values.items()}


def _fixed_text(flags: OneBatchFlags, tokenizer: Tokenizer) -> str:
    path = Path(flags.fixed_prompt_file or "")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DatasetError(f"--fixed-prompt-file {path} can't be read: {reason}") from error
    if not flags.apply_chat_template:
        return text
    return tokenizer.apply_chat_template([{"role": "user", "content": text}], None)


async def _run_all(flags: OneBatchFlags, url: str) -> int:
    """Print and write every case's record; how many there were."""
    async with open_session(url, auth_headers()) as session:
        await wait_until_ready(session, url, _READY_S)
        model = await first_model(session)
        folder = flags.local_tokenizer_path or await tokenizer_path(session) or model
        bench = BatchBench(flags, session, model, load_tokenizer(folder))
        cases = list(product(flags.batch_size, flags.input_len, flags.output_len))
        done, cold = 0, not flags.skip_warmup
        for size, input_len, output_len in cases:
            try:
                if cold:
                    await bench.run_case(size, input_len, min(output_len, _WARMUP_TOKENS))
                cold = False
                record = await bench.run_case(size, input_len, output_len)
            except ServerProblem as error:
                print(f"batch {size}, {input_len} + {output_len} tokens: {error}", file=sys.stderr)
                continue
            done += 1
            _show(record)
            with Path(flags.result_filename).open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")
        return done


def _show(record: dict[str, Any]) -> None:
    print(title(f" batch {record['batch_size']} ", "="))
    for name, value in record.items():
        print(line(name, "unknown" if value is None else value))


def _server(flags: OneBatchFlags, words: Sequence[str]) -> AbstractContextManager[str]:
    """The URL of the one that runs, or of one that is started; a port that is free unless one is given."""
    if flags.base_url:
        return nullcontext(flags.base_url.rstrip("/").removesuffix("/v1"))
    args = ServerArgs.from_command_line(words, PROG)
    given = any(word.partition("=")[0] == "--port" for word in words)
    port = args.port if given else free_port()
    return running_server([*words, "--port", str(port)], args.host, port)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        flags, words = parse(sys.argv[1:] if argv is None else argv)
        with _server(flags, words) as url:
            done = asyncio.run(_run_all(flags, url))
    except (ServerArgsError, DatasetError, ServerProblem) as error:
        exit_with_error(str(error))
    except KeyboardInterrupt:
        exit_with_error("interrupted")
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
