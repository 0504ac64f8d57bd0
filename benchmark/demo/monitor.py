"""What the demo notes a few times a second: the server's own account and the clients' count."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median_high
from typing import Any, Final

PLAIN: Final = "plain"
SPEC: Final = "spec"
IDLE: Final = "idle"


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment of the demo."""

    seconds: float  # since the demo began
    streams: int  # that the demo keeps open
    running: int  # requests running in the server
    threshold: int | str | None  # speculative_disable_bs_threshold
    mode: str  # of the decode steps since the sample before: plain, spec or idle
    draft_len: int  # of the last decode step
    plain_steps: int  # decode steps of the server so far
    spec_steps: int
    switches: int  # changes of mode so far
    tokens_per_second: float
    accept_length: float | None  # tokens a step gave a stream, over the counting window
    lifetime_accept_length: float | None  # the server's avg_spec_accept_length


def take_sample(
    seconds: float,
    streams: int,
    state: dict[str, Any],
    rate: float,
    tokens_per_step: float | None,
    before: Sample | None,
) -> Sample:
    """Make a sample of ``internal_states[0]`` and of the clients' figures."""
    steps = state.get("decode_steps") or {}
    plain, spec = int(steps.get("plain", 0)), int(steps.get("spec", 0))
    gained_plain = plain - (before.plain_steps if before else 0)
    gained_spec = spec - (before.spec_steps if before else 0)
    draft_len = int(state.get("spec_draft_len") or 0)
    running = state.get("num_running_reqs")
    return Sample(
        seconds=round(seconds, 3),
        streams=streams,
        running=streams if running is None else int(running),
        threshold=state.get("speculative_disable_bs_threshold"),
        mode=_mode(gained_plain, gained_spec, draft_len),
        draft_len=draft_len,
        plain_steps=plain,
        spec_steps=spec,
        switches=int(state.get("spec_switches") or 0),
        tokens_per_second=round(rate, 2),
        accept_length=tokens_per_step,
        lifetime_accept_length=state.get("avg_spec_accept_length"),
    )


def _mode(gained_plain: int, gained_spec: int, draft_len: int) -> str:
    """Return the mode of most steps since the last sample; of the last one where they tie."""
    if gained_plain == gained_spec == 0:
        return IDLE
    if gained_plain == gained_spec:
        return SPEC if draft_len else PLAIN
    return SPEC if gained_spec > gained_plain else PLAIN


@dataclass(frozen=True, slots=True)
class Plateau:
    """A stretch of the demo with one number of streams."""

    begin: float  # seconds since the demo began
    end: float
    streams: int
    samples: tuple[Sample, ...]

    @property
    def settled(self) -> Sequence[Sample]:
        """The samples after the change has gone through the counting window: the later half."""
        return self.samples[len(self.samples) // 2 :]

    def mode(self) -> str:
        """Return the mode of most settled samples."""
        modes = [sample.mode for sample in self.settled if sample.mode != IDLE]
        return max(sorted(set(modes)), key=modes.count) if modes else IDLE

    def running(self) -> int:
        """Return the median of the requests that ran in the server, settled."""
        return median_high(sample.running for sample in self.settled) if self.settled else 0

    def rate(self) -> float:
        """Return the mean tokens per second, settled."""
        return fmean(sample.tokens_per_second for sample in self.settled) if self.settled else 0.0

    def accept_length(self) -> float | None:
        """Return the mean tokens a step gave a stream, settled."""
        known = [sample.accept_length for sample in self.settled if sample.accept_length is not None]
        return fmean(known) if known else None


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write the samples as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(sample)) + "\n" for sample in samples), encoding="utf-8")
