"""Where every live request stands: held, waiting, prefilling or decoding, in order.

A finished request is in none of them, though a step in flight may still hold its slot and pages.
"""

from __future__ import annotations

import bisect
from collections import deque

from sglang.srt.managers.request import Request, RequestState


class RequestTable:
    def __init__(self, by_priority: bool = False) -> None:
        self._by_priority = by_priority  # of those that wait; else in the order in which they came
        self.held: dict[str, Request] = {}  # by rid: their grammars are being compiled
        self.waiting: deque[Request] = deque()
        self.prefilling: dict[str, Request] = {}  # by rid, in order of admission
        self.decoding: dict[str, Request] = {}  # by rid, in the order they began
        self._by_rid: dict[str, Request] = {}
        self._names: set[str] = set()
        self._num_queued_tokens = 0

    @property
    def num_queued(self) -> int:
        return len(self.held) + len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def num_pending_tokens(self) -> int:
        """Ids to compute before their requests decode; what the prefix cache has of them shows later."""
        unfilled = (r.prefill_len - r.kv_committed_len for r in self.prefilling.values())
        return self._num_queued_tokens + sum(unfilled)

    @property
    def is_empty(self) -> bool:
        return not self._by_rid

    def get(self, rid: str) -> Request | None:
        return self._by_rid.get(rid)

    def has_name(self, name: str) -> bool:
        """Whoever asked for it."""
        return name in self._names

    def all(self) -> list[Request]:
        return list(self._by_rid.values())

    def running(self) -> list[Request]:
        return [*self.prefilling.values(), *self.decoding.values()]

    def enqueue(self, request: Request) -> None:
        self._add(request)
        self._wait(request)

    def hold(self, request: Request) -> None:
        """In the table, and not waiting to run yet."""
        self._add(request)
        request.state = RequestState.HELD
        self.held[request.rid] = request
        self._num_queued_tokens += len(request.ids)

    def release_held(self, request: Request) -> None:
        self._leave(request)
        request.state = RequestState.WAITING
        self._wait(request)

    def admit_front(self) -> Request:
        request = self.waiting.popleft()
        self._num_queued_tokens -= len(request.ids)
        self._enter(request, RequestState.PREFILL)
        return request

    def begin_decoding(self, request: Request) -> None:
        self._leave(request)
        self._enter(request, RequestState.DECODE)

    def requeue_front(self, request: Request) -> None:
        self._leave(request)
        self._enter(request, RequestState.WAITING)

    def remove(self, request: Request) -> None:
        self._leave(request)
        del self._by_rid[request.rid]
        self._names.remove(request.name)
        request.state = RequestState.FINISHED

    def _add(self, request: Request) -> None:
        assert request.rid not in self._by_rid and request.name not in self._names
        self._by_rid[request.rid] = request
        self._names.add(request.name)

    def _wait(self, request: Request, first: bool = False) -> None:
        self._num_queued_tokens += len(request.ids)
        if self._by_priority:  # one that comes back came before those of its priority
            bisect.insort(self.waiting, request, key=lambda r: (-r.priority, r.arrival))
        elif first:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)

    def _enter(self, request: Request, state: RequestState) -> None:
        request.state = state
        if state is RequestState.WAITING:
            self._wait(request, first=True)
        elif state is RequestState.PREFILL:
            self.prefilling[request.rid] = request
        else:
            self.decoding[request.rid] = request

    def _leave(self, request: Request) -> None:
        if request.state in (RequestState.HELD, RequestState.WAITING):
            self._num_queued_tokens -= len(request.ids)
        if request.state is RequestState.HELD:
            del self.held[request.rid]
        elif request.state is RequestState.WAITING:
            self.waiting.remove(request)
        elif request.state is RequestState.PREFILL:
            del self.prefilling[request.rid]
        else:
            assert request.state is RequestState.DECODE
            del self.decoding[request.rid]
