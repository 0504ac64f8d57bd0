"""GET /v1/responses/{id}/input_items: what the model had read before it replied, page by page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.entrypoints.responses.talk import Item
from sglang.srt.managers.text_request import RequestError


def items_page(talk: Sequence[Item], after: str | None, limit: int, newest_first: bool) -> dict[str, Any]:
    """
    Raises:
        RequestError: there is no item ``after``.
    """
    items = list(reversed(talk)) if newest_first else list(talk)
    if after is not None:
        place = next((number for number, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise RequestError(f"after: this response has no input item {after!r}")
        items = items[place + 1 :]
    shown = [_shown(item) for item in items[:limit]]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > limit,
    }


def _shown(item: Item) -> Item:
    """In full: a client may have left out what is clear without it."""
    kind = item.get("type", "message")
    whole = {"type": kind, "status": "completed", **item}
    content = item.get("content")
    if kind != "message" or not isinstance(content, str):
        return whole
    part: Item = {"type": "input_text", "text": content}
    if item["role"] == "assistant":
        part = {"type": "output_text", "text": content, "annotations": [], "logprobs": []}
    return {**whole, "content": [part]}
