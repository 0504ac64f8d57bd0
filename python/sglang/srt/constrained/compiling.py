"""Grammars are compiled beside the scheduler's loop, each once, and not for ever.

All methods are called by the scheduler's thread; other threads only compile.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

from sglang.srt.constrained.grammar import (
    CompiledGrammar,
    GrammarBackend,
    GrammarError,
    GrammarKind,
    GrammarSpec,
    check_json,
)
from sglang.srt.constrained.vocabulary import Vocabulary

TIME_LIMIT_S: Final = 60.0
MOST_AT_ONCE: Final = 2
MOST_THREADS: Final = 8  # those that nobody waits for any more counted too: a thread can't be stopped
MOST_CACHED: Final = 512
MOST_CACHED_BYTES: Final = 1 << 30


class Compilation:
    """Of one grammar, for all requests that have it."""

    def __init__(self, spec: GrammarSpec) -> None:
        self.spec = spec
        self.compiled: CompiledGrammar | None = None
        self.error: str | None = None
        self.since_ts = 0.0  # it waits; from its begin on: it is compiled

    @property
    def is_done(self) -> bool:
        return self.compiled is not None or self.error is not None


class GrammarCompiler:
    def __init__(
        self,
        make_backend: Callable[[], tuple[GrammarBackend, Vocabulary]],
        time_limit_s: float = TIME_LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``make_backend`` is called once, by a compiling thread: it may take seconds."""
        self._make_backend = make_backend
        self._time_limit_s = time_limit_s
        self._clock = clock
        self._lock = threading.Lock()
        self._backend: tuple[GrammarBackend, Vocabulary] | None = None
        self._cache: OrderedDict[GrammarSpec, Compilation] = OrderedDict()
        self._queued: deque[Compilation] = deque()
        self._running: list[Compilation] = []
        self._threads: list[threading.Thread] = []
        self._changed = threading.Event()

    @property
    def vocabulary(self) -> Vocabulary:
        """Known as soon as a grammar has been compiled."""
        assert self._backend is not None
        return self._backend[1]

    def preload(self) -> None:
        """Make the backend now, and wait for it. If that can't be done, requests will hear why."""
        with contextlib.suppress(GrammarError):
            self._get_backend()

    def compilation(self, spec: GrammarSpec) -> Compilation:
        """Begun now, or before."""
        found = self._cache.get(spec)
        if found is not None:
            self._cache.move_to_end(spec)
            return found
        begun = Compilation(spec)
        begun.since_ts = self._clock()
        self._cache[spec] = begun
        self._queued.append(begun)
        self.poll()
        return begun

    def poll(self) -> None:
        """Give up what takes too long, and begin what waits."""
        now = self._clock()
        for compilation in [*self._running, *self._queued]:
            if not compilation.is_done and now - compilation.since_ts > self._time_limit_s:
                self._give_up(compilation)
        self._running = [c for c in self._running if not c.is_done]
        self._queued = deque(c for c in self._queued if not c.is_done)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        while self._queued and len(self._running) < MOST_AT_ONCE and len(self._threads) < MOST_THREADS:
            self._start(self._queued.popleft())
        self._trim()

    def wait(self, timeout_s: float) -> None:
        """For some compilation to end."""
        self._changed.wait(timeout_s)
        self._changed.clear()

    def _give_up(self, compilation: Compilation) -> None:
        """One that never began is forgotten: others were slow, and it may be asked for again."""
        kind, limit = compilation.spec.kind.value, f"{self._time_limit_s:g} s"
        if compilation in self._running:
            compilation.error = f"compiling the {kind} takes longer than {limit}: simplify it"
        else:
            compilation.error = f"the {kind} has waited {limit} for others to be compiled: try again later"
            del self._cache[compilation.spec]

    def _start(self, compilation: Compilation) -> None:
        compilation.since_ts = self._clock()
        self._running.append(compilation)
        thread = threading.Thread(target=self._run, args=(compilation,), name="grammar", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, compilation: Compilation) -> None:
        try:
            backend = self._get_backend()[0]
            if compilation.spec.kind in (GrammarKind.JSON, GrammarKind.STRUCTURAL_TAG):
                check_json(compilation.spec)
            compiled = backend.compile(compilation.spec)
            if compilation.error is None:  # else it is too late
                compilation.compiled = compiled
        except GrammarError as error:
            compilation.error = str(error)
        except BaseException as error:  # the thread's edge: it must not end the server, nor be waited for
            compilation.error = f"the grammar backend failed: {type(error).__name__}: {error}"[:500]
        self._changed.set()

    def _get_backend(self) -> tuple[GrammarBackend, Vocabulary]:
        with self._lock:
            if self._backend is None:
                self._backend = self._make_backend()
            return self._backend

    def _trim(self) -> None:
        """Forget what was used longest ago; who uses it keeps it."""
        done = [c for c in self._cache.values() if c.is_done]
        num_bytes = sum(c.compiled.num_bytes for c in done if c.compiled is not None)
        while done and (len(done) > MOST_CACHED or num_bytes > MOST_CACHED_BYTES):
            oldest = done.pop(0)
            num_bytes -= oldest.compiled.num_bytes if oldest.compiled is not None else 0
            del self._cache[oldest.spec]
