"""The held-out prompts, by domain."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Final

PROMPTS_FOLDER: Final = Path(__file__).resolve().parents[1] / "prompts"
HELDOUT: Final = PROMPTS_FOLDER / "heldout.jsonl"
EXPECTED_ACCEPT: Final = PROMPTS_FOLDER / "expected_accept.json"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: ``text`` is complete (chat template applied where there is one)."""

    id: str
    domain: str
    text: str  # "" where only the messages are known
    messages: tuple[dict[str, Any], ...] | None = None  # the same as a conversation, for chat endpoints

    def chat_messages(self) -> list[dict[str, Any]]:
        """Return the conversation; a mere text is its only user turn."""
        if self.messages is not None:
            return list(self.messages)
        return [{"role": "user", "content": self.text}]


def read_prompts(path: Path = HELDOUT, domains: Sequence[str] | None = None) -> list[Prompt]:
    """Read the prompts of the given domains (all where None), in the file's order.

    Raises:
        ValueError: a domain that the file doesn't have.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    prompts = [Prompt(row["id"], row["domain"], row["text"]) for row in rows]
    if domains is None:
        return prompts
    missing = set(domains) - {prompt.domain for prompt in prompts}
    if missing:
        raise ValueError(f"{path.name} has no domain {', '.join(sorted(missing))}")
    return [prompt for prompt in prompts if prompt.domain in domains]


def by_domain(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """Group prompts by domain, keeping their order."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.domain, []).append(prompt)
    return groups


def interleaved(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Take one prompt of each domain in turn, so that any stretch of the list is a fair mix."""
    turns = zip_longest(*by_domain(prompts).values())
    return [prompt for turn in turns for prompt in turn if prompt is not None]


def stretch(prompts: Sequence[Prompt], start: int, count: int) -> list[Prompt]:
    """Return ``count`` prompts from index ``start`` on, going round at the end."""
    begin = start % len(prompts)
    cycle = [*prompts[begin:], *prompts[:begin]]
    times = -(-count // len(cycle))
    return list(islice(cycle * times, count))
