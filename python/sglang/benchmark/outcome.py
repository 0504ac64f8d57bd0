"""What became of one request, and how it is put together while its stream runs."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request that has ended. Times are seconds; ``error`` is empty where it succeeded."""

    started: float  # time.perf_counter() when it was sent
    latency: float = 0.0
    ttft: float = 0.0
    itl: tuple[float, ...] = ()  # a token after the first event's each: k tokens at once are k equal ones
    text: str = ""
    prompt_len: int = 0
    output_len: int = 0
    cached_tokens: int | None = None  # of the prompt; None: the server does not say
    finish: str = ""  # why generation ended, as the server says it
    error: str = ""

    @property
    def success(self) -> bool:
        return not self.error

    def token_times(self) -> list[float]:
        """When tokens came, by the clock of ``started``; those of the first event count as one."""
        times = [self.started + self.ttft]
        for gap in self.itl:
            times.append(times[-1] + gap)
        return times


@dataclass(slots=True)
class TokenTimes:
    """Arrival of tokens, kept as what benchmarks report."""

    started: float
    first: float | None = None
    last: float = 0.0
    count: int = 0
    itl: list[float] = field(default_factory=list)

    def reach(self, now: float, count: int) -> None:
        """``count`` tokens are there now."""
        new = count - self.count
        if new <= 0:
            return
        if self.first is None:
            self.first = now
        else:
            self.itl += [(now - self.last) / new] * new
        self.last, self.count = now, count

    def ttft(self, ended: float) -> float:
        return (ended if self.first is None else self.first) - self.started
