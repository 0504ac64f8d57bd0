"""What a study compares: servers, ours or anybody's, and the modes that one of ours is switched through."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

from benchmark.spec_toggle import client
from benchmark.spec_toggle.protocols import CHAT, NATIVE, Protocol
from benchmark.spec_toggle.records import PLAIN, PLAIN_WITH_DRAFTER, SPEC, TOGGLE
from benchmark.spec_toggle.servers import Server, ServerError

THRESHOLD: Final = "speculative_disable_bs_threshold"
AUTO: Final = "auto"
STUDY_MODES: Final = (PLAIN, SPEC, TOGGLE, AUTO, PLAIN_WITH_DRAFTER)


@dataclass(frozen=True, slots=True)
class Target:
    """A server that takes requests."""

    name: str
    base_url: str
    protocol: Protocol
    model: str = ""  # its name at the OpenAI endpoints
    headers: Mapping[str, str] | None = None
    is_ours: bool = False  # answers /server_info with the toggle's state
    num_steps: int = 0  # drafts of a speculative step; 0: none
    tokenizer: str = ""  # the folder that it says its tokenizer is in
    process: Server | None = None  # where this program started it


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the study: a server, and what is set on it (while it runs) before its runs."""

    name: str
    mode: str  # of STUDY_MODES; "" for a server whose mode is its own
    target: Target
    change: dict[str, Any] | None = None  # server_args of POST /set_internal_state


def mode_change(mode: str, threshold: int) -> dict[str, Any]:
    """Return the setting that makes a server with a drafter run in a mode."""
    values = {SPEC: None, TOGGLE: threshold, AUTO: "auto", PLAIN: 0, PLAIN_WITH_DRAFTER: 0}
    return {THRESHOLD: values[mode]}


def own_columns(
    plain: Target | None, drafting: Target | None, modes: Sequence[str], threshold: int
) -> list[Column]:
    """Return the columns of a server without a drafter and of one with it; either may not be there."""
    columns = []
    for mode in modes:
        if mode == PLAIN and plain is not None:
            columns.append(Column(mode, mode, plain))
        elif mode != PLAIN and drafting is not None:
            columns.append(Column(mode, mode, drafting, mode_change(mode, threshold)))
    return columns


def columns_of_running(target: Target, modes: Sequence[str], threshold: int) -> list[Column]:
    """Return the columns of a server that was running: one, or one a mode if its mode can be switched."""
    if not (target.is_ours and target.num_steps):
        return [Column(target.name, PLAIN if target.is_ours else "", target)]
    wanted = [PLAIN_WITH_DRAFTER if mode == PLAIN else mode for mode in modes]
    return [
        Column(f"{target.name}:{mode}", mode, target, mode_change(mode, threshold))
        for mode in dict.fromkeys(wanted)
    ]


async def probe(
    name: str,
    base_url: str,
    protocol: Protocol | None = None,
    headers: Mapping[str, str] | None = None,
    process: Server | None = None,
) -> Target:
    """Ask a running server what it is. Without a protocol: SGLang's own where it answers /server_info.

    Raises:
        ServerError: nothing answers there.
    """
    url = base_url.rstrip("/").removesuffix("/v1")
    async with client.open_client(url, timeout_s=30.0, headers=headers) as http:
        try:
            info = await _answer(http, "/server_info")
            models = await _answer(http, "/v1/models")
        except httpx.HTTPError as error:
            raise ServerError(f"no server answers at {url}: {type(error).__name__}: {error}") from error
    if not info and not models:
        raise ServerError(f"{url} answers neither /server_info nor /v1/models: is it a model server?")
    listed = models.get("data") or [{}]
    states = info.get("internal_states") or [{}]
    return Target(
        name=name,
        base_url=url,
        protocol=protocol or (NATIVE if info.get("internal_states") else CHAT),
        model=str(listed[0].get("id", "")),
        headers=headers,
        is_ours=THRESHOLD in states[0],
        num_steps=int(info.get("speculative_num_steps") or 0),
        tokenizer=str(info.get("tokenizer_path") or info.get("model_path") or ""),
        process=process,
    )


async def apply_change(column: Column) -> None:
    """Set the column's mode on its server.

    Raises:
        ServerRefusal: the server did not take it.
    """
    if column.change is not None:
        async with client.open_client(column.target.base_url, headers=column.target.headers) as http:
            await client.set_internal_state(http, column.change)


async def _answer(http: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """Return what a GET says; nothing where the server has no such page."""
    response = await http.get(path)
    if response.status_code in (401, 403):
        raise ServerError(f"{path} answered {response.status_code}: give the key with --api-key")
    if response.status_code != 200:
        return {}
    body = response.json()
    return body if isinstance(body, dict) else {}
