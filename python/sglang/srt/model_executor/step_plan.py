"""What the scheduler tells the executor to do in one step, and what it hears back.

Plain frozen data: no tensors, no request objects, no torch. A plan is complete: an executor that
has carried out plans 0 … n-1 needs nothing else to carry out plan n. Ids in it are *slots* (index
of a request's row in the device state), never rows of a batch.

Between two steps a slot has ``L`` committed tokens ``x_0 … x_{L-1}`` (their KV is in the target
cache) and one chosen token ``x_L`` that is not in the cache yet. Every step reads and leaves
exactly that state, whatever its mode.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

PAD_SLOT = 0
"""Reserved slot that padded rows use; never admitted."""

PAD_PAGE = 0
"""Reserved page that every unused page-table entry points to; never allocated."""


class StepKind(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"  # prefill chunks and decode rows in one forward; always draft_len 0
    IDLE = "idle"  # nothing to run


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """How tokens of one slot are chosen. ``temperature`` 0 means greedy (no noise)."""

    temperature: float = 1.0
    top_k: int = -1  # -1: all
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    suppressed_ids: tuple[int, ...] = ()  # may not be chosen before min_new_tokens outputs
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # already hashed with the index of the sample where n > 1
    draft_cap: int | None = None  # most drafts accepted a step; None: no cap


@dataclass(frozen=True, slots=True)
class ProcessorSpec:
    """A slot's custom logit processor."""

    text: str  # as the client sent it
    params: str  # its custom_params, as JSON
    rid: str


@dataclass(frozen=True, slots=True)
class SlotAdmission:
    """A slot begins a new life: the executor resets every per-slot row of its state.

    ``cached_len`` places are already filled (prefix hit; their pages are in ``page_writes`` of the
    same plan). ``output_ids`` are outputs known already (a retracted request coming back), which
    penalties must count.
    """

    slot: int
    prompt_len: int  # ids with index >= prompt_len are outputs
    cached_len: int
    sampling: SlotSampling
    output_ids: tuple[int, ...] = ()
    known_ids: tuple[int, ...] = ()  # at positions 0 … cached_len, where ``ExecutorInfo.wants_ids``
    processor: ProcessorSpec | None = None


@dataclass(frozen=True, slots=True)
class PageWrite:
    """``page_table[slot, start : start + len(pages)] = pages``."""

    slot: int
    start: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Known ids at positions ``start … start + len(token_ids) - 1`` of a slot.

    ``next_id`` is the id at position ``start + len(token_ids)``: with a drafter it is the pair of
    the chunk's last position. None on the last chunk, which chooses that id.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    next_id: int | None

    @property
    def is_last(self) -> bool:
        return self.next_id is None


@dataclass(frozen=True, slots=True)
class RowWish:
    """What a row is to tell beside its ids. Offsets count from the beginning of the row's prefill chunk."""

    row: int  # of the plan: decode slots first, then chunks
    logprobs: bool = False  # of the ids that it chooses …
    prompt_from: int = 0  # … and of the known ids that follow the chunk's tokens from here …
    prompt_to: int = 0  # … to here
    num_top: int = 0  # also of so many ids that are the likeliest there
    token_ids: tuple[int, ...] = ()  # and of these
    temperature: float = 1.0  # that the logits of its choices are divided by
    hidden_from: int | None = None  # hidden states: of a chunk's tokens from here on, or behind a row's ids

    @property
    def num_prompt(self) -> int:
        return max(0, self.prompt_to - self.prompt_from)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Order of application: admissions, page writes, then the forward.

    The result's rows are the decode slots in order, then the prefill chunks in order.
    """

    step_id: int
    kind: StepKind
    decode_slots: tuple[int, ...] = ()
    decode_len_bounds: tuple[int, ...] = ()  # per decode slot: L is at most this before the step
    draft_len: int = 0  # draft forwards; 0: plain
    row_drafts: tuple[int, ...] = ()  # of which each decode slot verifies so many; (): all of them
    prefill: tuple[PrefillChunk, ...] = ()
    admissions: tuple[SlotAdmission, ...] = ()
    page_writes: tuple[PageWrite, ...] = ()
    masked: bool = False  # the choice waits for the step's ``StepMidInput``
    wishes: tuple[RowWish, ...] = ()  # of some rows

    def __post_init__(self) -> None:
        assert len(self.decode_slots) == len(self.decode_len_bounds)
        assert self.draft_len == 0 or not self.prefill, "a step with prefill rows is never speculative"
        if self.row_drafts:
            assert len(self.row_drafts) == len(self.decode_slots)
            assert min(self.row_drafts) >= 0 and 0 < max(self.row_drafts) <= self.draft_len
            assert not self.masked, "who chooses behind the host verifies all drafts"

    @property
    def num_rows(self) -> int:
        return len(self.decode_slots) + len(self.prefill)

    @property
    def drafts_of_rows(self) -> tuple[int, ...]:
        """How many drafts each decode slot verifies."""
        return self.row_drafts or (self.draft_len,) * len(self.decode_slots)


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """What a masked speculative step is about to verify: the ids of every decode row's N nodes, rows in the
    plan's order. Node 0 is the row's last token.
    """

    step_id: int
    tokens: tuple[tuple[int, ...], ...]
    parents: tuple[tuple[int, ...], ...] | None = None  # of a tree, the root's is -1; None: chains


@dataclass(frozen=True, slots=True)
class RowEdit:
    """A row whose logits a custom logit processor changes, node by node."""

    row: int  # as in the result
    slot: int
    prompt_len: int
    ids: tuple[int, ...]  # all known ids
    paths: tuple[tuple[int, ...], ...]  # of each node: the ids behind these, its own the last; () of the root


@dataclass(frozen=True, slots=True)
class StepMidInput:
    """What the choices of a masked step wait for: the ids that some of its rows may choose.

    ``masks`` are int32 words in native order, [len(rows), num_nodes, words]: bit ``t % 32`` of word
    ``t // 32`` allows id ``t``. Rows that are not named may choose anything. The memory holds them until
    the step is done.
    """

    step_id: int
    rows: tuple[int, ...] = ()  # as in the result, ascending
    num_nodes: int = 1
    masks: memoryview = memoryview(b"")
    edits: tuple[RowEdit, ...] = ()


@dataclass(frozen=True, slots=True)
class Logprobs:
    """At some places of one text, in order. What can't be chosen at all has the lowest float32."""

    own: tuple[float, ...] = ()  # of the id that is there
    top: tuple[tuple[float, ...], ...] = ()  # of the likeliest ids, the likeliest first; () if not asked for
    top_ids: tuple[tuple[int, ...], ...] = ()
    named: tuple[tuple[float, ...], ...] = ()  # of the wish's ``token_ids``; () if there are none

    def first(self, count: int) -> Logprobs:
        if count >= len(self.own):
            return self
        return Logprobs(self.own[:count], self.top[:count], self.top_ids[:count], self.named[:count])


@dataclass(frozen=True, slots=True)
class Vectors:
    """Floating-point vectors in native order."""

    data: bytes = b""
    size: int = 0  # numbers of one
    kind: str = "f"  # f: float32, d: float64

    @property
    def count(self) -> int:
        return len(self.data) // self._bytes_each if self.data else 0

    @property
    def _bytes_each(self) -> int:
        return self.size * (8 if self.kind == "d" else 4)

    def first(self, count: int) -> Vectors:
        return replace(self, data=self.data[: count * self._bytes_each])

    def last(self) -> Vectors:
        return replace(self, data=self.data[-self._bytes_each :])


@dataclass(frozen=True, slots=True)
class RowReport:
    """The answer to a ``RowWish``."""

    row: int
    chosen: Logprobs = Logprobs()  # of the row's tokens
    prompt: Logprobs = Logprobs()
    hidden: Vectors = Vectors()  # after the last norm


@dataclass(frozen=True, slots=True)
class StepResult:
    """``tokens[row]`` are the ids chosen by that row, in order.

    A decode row has 1 … draft_len + 1 of them, the last chunk of a prefill exactly 1, an earlier
    chunk none. ``faults[row]`` says that the logits after these tokens (there may be none) were not
    finite: the request must end there with an error, unless its tokens end it already.
    """

    step_id: int
    tokens: tuple[tuple[int, ...], ...]
    faults: tuple[bool, ...]
    device_time_s: float  # seconds the step ran on the device
    used_graph: bool | None = None  # a decode step's, on a device with CUDA graphs; False: it ran eagerly
    launch_time_s: float = 0.0  # seconds the host took to launch it; on a CPU that is the whole step
    reports: tuple[RowReport, ...] = ()  # as the plan's wishes


@dataclass(frozen=True, slots=True)
class SpecShape:
    """Shape of speculation: ``num_draft_tokens`` counts the root; a chain has topk 1."""

    num_steps: int
    topk: int = 1
    num_draft_tokens: int = 0  # 0: num_steps + 1

    def __post_init__(self) -> None:
        if self.num_draft_tokens == 0:
            object.__setattr__(self, "num_draft_tokens", self.num_steps + 1)

    def pool_size(self, draft_len: int) -> int:
        """Candidate nodes of a tree of ``draft_len`` levels, without the root."""
        return self.topk + (draft_len - 1) * self.topk**2

    def num_nodes(self, draft_len: int) -> int:
        """Rows a slot takes in the target forward (1 in a plain step)."""
        if draft_len == 0:
            return 1
        if self.topk == 1:
            return draft_len + 1
        return min(self.num_draft_tokens, self.pool_size(draft_len) + 1)


@dataclass(frozen=True, slots=True, order=True)
class RaggedSize:
    """A step whose rows verify different numbers of its drafts."""

    draft_len: int  # draft forwards, of all rows
    rows: int
    tokens: int  # that all rows verify together, padded rows too


@dataclass(frozen=True, slots=True)
class GraphSet:
    """The CUDA graphs captured for one draft length."""

    draft_len: int  # 0: plain
    sizes: tuple[int, ...]  # rows, ascending
    seconds: float  # that the capture took
    bytes: int
    ragged: tuple[
        tuple[int, int], ...
    ] = ()  # (rows, tokens) of those whose rows have their own draft lengths

    @property
    def name(self) -> str:
        return "spec" if self.draft_len else "plain"


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a decode step of one size: fixed_s + per_kv_token_s * (sum of the rows' KV lengths)."""

    draft_len: int  # 0: plain
    rows: int
    fixed_s: float
    per_kv_token_s: float
    tokens: int = 0  # that all rows verify together, as in ``RaggedSize``; 0: every row all its drafts


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What a scheduler must know of an executor."""

    num_slots: int  # usable ones, PAD_SLOT not counted; they are 1 … num_slots
    num_pages: int  # usable ones, PAD_PAGE not counted; they are 1 … num_pages
    page_size: int
    context_len: int  # most tokens of one request, prompt and output
    vocab_size: int
    spec: SpecShape | None  # None: no drafter
    max_spec_rows: int  # decode rows a speculative step may have; 0 without a drafter
    weight_bytes: int = 0
    kv_bytes: int = 0
    device: str = "cpu"  # or cuda
    device_name: str = "cpu"  # a GPU's own
    default_chunk: int = 512  # prompt tokens of a step where the user says nothing
    graphs: tuple[GraphSet, ...] = ()
    costs: tuple[StepCost, ...] = ()  # () where nothing was measured
    wants_ids: bool = False  # its drafter goes by tokens: admissions say those that no prefill will
    draft_lens: tuple[int, ...] = ()  # of the speculative steps prepared, ascending; () without a drafter

    def most_rows(self, draft_len: int) -> int:
        """Decode rows that a speculative step of ``draft_len`` may have; 0: there are none of that length."""
        if draft_len not in self.draft_lens:
            return 0
        return next((g.sizes[-1] for g in self.graphs if g.draft_len == draft_len), self.max_spec_rows)

    @property
    def ragged_sizes(self) -> tuple[RaggedSize, ...]:
        """Of captured steps whose rows have draft lengths of their own."""
        return tuple(sorted(RaggedSize(g.draft_len, *size) for g in self.graphs for size in g.ragged))
