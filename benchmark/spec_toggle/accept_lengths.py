"""Mean accept length by domain on the held-out prompts, beside what the drafter's evaluation gave.

A server that measures less than expected has a wrong drafter: aux layers, a shift by one, stale or cold
draft KV. Tokens and steps are those of speculative steps alone (``meta_info`` of finished requests), the
bonus token included; intervals resample sequences, since the steps of one sequence are alike.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import httpx

from benchmark.spec_toggle import client, servers
from benchmark.spec_toggle.prompts import EXPECTED_ACCEPT, HELDOUT, Prompt, by_domain, read_prompts
from benchmark.spec_toggle.protocols import Wish
from benchmark.spec_toggle.rates import SpecCount, spec_count
from benchmark.spec_toggle.stats import Estimate, ratio_of_sums
from benchmark.spec_toggle.streams import generate, open_streams

ALL = "all"
CHAT = ("chat_template", "chat_free")


@dataclass(frozen=True, slots=True)
class DomainLength:
    """The accept length of one domain, measured and expected."""

    domain: str
    sequences: int
    steps: int
    measured: Estimate
    expected: float | None

    @property
    def verdict(self) -> str:
        """Say whether the expectation lies in the measured interval."""
        if self.expected is None:
            return "no expectation"
        if self.measured.contains(self.expected):
            return "within noise"
        return "LOWER" if self.measured.value < self.expected else "higher"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", help="measure this running server (it must speculate at --concurrency)")
    parser.add_argument("--num-steps", type=_int_list, default=(3,), help="servers to start, e.g. 1,2,3,5")
    parser.add_argument("--per-domain", type=int, help="prompts of each domain (default: all)")
    parser.add_argument("--domains", type=lambda text: tuple(text.split(",")), help="default: all")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt; others count on")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--prompts", type=Path, default=HELDOUT)
    parser.add_argument("--expected", type=Path, default=EXPECTED_ACCEPT)
    parser.add_argument("--server-args", default="", help="further arguments of a started server")
    parser.add_argument("--start-timeout", type=float, default=300.0)
    parser.add_argument("--out", type=Path, help="also append the results to this JSONL file")
    return parser.parse_args()


def main() -> int:
    """Measure one server after the other, and print a table for each."""
    arguments = parse_arguments()
    servers.exit_on_sigterm()
    try:
        if arguments.base_url:
            report(arguments.base_url, arguments)
            return 0
        for num_steps in arguments.num_steps:
            with ExitStack() as stack:
                report(start_server(num_steps, arguments, stack), arguments)
    except (servers.ServerError, client.GenerationError, httpx.HTTPError) as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def start_server(num_steps: int, arguments: argparse.Namespace, stack: ExitStack) -> str:
    """Start a server that always speculates with a chain of ``num_steps`` drafts; return its URL."""
    log_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sglang-accept-")))
    launch = [*servers.embedded_arguments(None, num_steps), *arguments.server_args.split()]
    server = stack.enter_context(servers.running_server(f"spec-{num_steps}", launch, log_dir))
    servers.wait_until_healthy(server, arguments.start_timeout)
    return server.base_url


def report(url: str, arguments: argparse.Namespace) -> None:
    """Measure the server at ``url``; print its table, and append it to the output file."""
    prompts = read_prompts(arguments.prompts, arguments.domains)
    if arguments.per_domain:
        prompts = [p for group in by_domain(prompts).values() for p in group[: arguments.per_domain]]
    drafts = int(asyncio.run(_num_steps(url)))
    wish = Wish(arguments.max_new_tokens, arguments.temperature, ignore_eos=False)
    counts = asyncio.run(measure_domains(url, prompts, wish, arguments.concurrency, arguments.seed))
    expected = read_expected(arguments.expected, drafts, arguments.temperature)
    lengths = compare(counts, expected)
    title = f"{drafts} drafts, temperature {arguments.temperature:g}, {len(prompts)} prompts"
    print(f"{title}, at most {arguments.max_new_tokens} new tokens\n\n{markdown(lengths)}\n", flush=True)
    if arguments.out:
        _append(arguments.out, title, lengths)


async def measure_domains(
    url: str, prompts: Sequence[Prompt], wish: Wish, concurrency: int, seed: int = 0
) -> dict[str, list[SpecCount]]:
    """Run all prompts, ``concurrency`` at a time; return each one's speculative steps by domain."""
    gate = asyncio.Semaphore(concurrency)

    async with open_streams(url) as session:

        async def one(index: int, prompt: Prompt) -> SpecCount:
            async with gate:
                trace = await generate(session, prompt, replace(wish, seed=seed + index))
            return spec_count(trace.meta)

        results = await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))
    counts: dict[str, list[SpecCount]] = {}
    for prompt, result in zip(prompts, results, strict=True):
        counts.setdefault(prompt.domain, []).append(result)
    return counts


def compare(counts: dict[str, list[SpecCount]], expected: dict[str, float]) -> list[DomainLength]:
    """Put the measured lengths beside the expected ones; the last rows are domains together."""
    groups = {**{domain: (domain,) for domain in counts}, "chat": CHAT, ALL: tuple(counts)}
    return [
        DomainLength(
            domain=domain,
            sequences=len(group),
            steps=sum(count.steps for count in group),
            measured=ratio_of_sums([count.tokens for count in group], [count.steps for count in group]),
            expected=expected_together(counts, expected, parts),
        )
        for domain, parts in groups.items()
        if (group := [count for part in parts for count in counts.get(part, [])])
        if any(count.steps for count in group)
    ]


def expected_together(
    counts: dict[str, list[SpecCount]], expected: dict[str, float], parts: Sequence[str]
) -> float | None:
    """Return the length of some domains together, of as many tokens of each as have been measured.

    None where one of them has no expectation.
    """
    tokens = {part: sum(count.tokens for count in counts.get(part, [])) for part in parts}
    if any(part not in expected for part in parts if tokens[part]):
        return None
    return sum(tokens.values()) / sum(count / expected[part] for part, count in tokens.items() if count)


def markdown(lengths: Sequence[DomainLength]) -> str:
    """Return the table."""
    lines = [
        "| domain | sequences | steps | accept length [95 %] | expected | difference | |",
        "|-|-|-|-|-|-|-|",
    ]
    for row in lengths:
        interval = f"{row.measured.value:.2f} [{row.measured.low:.2f}, {row.measured.high:.2f}]"
        wanted = "–" if row.expected is None else f"{row.expected:.2f}"
        difference = "–" if row.expected is None else f"{row.measured.value - row.expected:+.2f}"
        cells = [row.domain, str(row.sequences), str(row.steps), interval, wanted, difference, row.verdict]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def read_expected(path: Path, drafts: int, temperature: float) -> dict[str, float]:
    """Return the expected accept lengths by domain; empty where the file says nothing of this setting."""
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    kind = {0.0: "greedy", 1.0: "t1_shared_noise"}.get(temperature)
    if drafts != table["drafts"] or kind is None:
        return {}
    return {domain: float(row[f"accept_length_{drafts}"]) for domain, row in table[kind].items()}


async def _num_steps(url: str) -> int:
    async with client.open_client(url) as http:
        info = await client.server_info(http)
    return int(info.get("speculative_num_steps") or 0)


def _append(path: Path, title: str, lengths: Sequence[DomainLength]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        for row in lengths:
            interval = [row.measured.low, row.measured.high]
            fields = {"run": title, "domain": row.domain, "sequences": row.sequences, "steps": row.steps}
            fields |= {"accept_length": row.measured.value, "interval": interval, "expected": row.expected}
            file.write(json.dumps(fields) + "\n")


def _int_list(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
