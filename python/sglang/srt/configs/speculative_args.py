"""The rules for the speculative flags. Pure functions of plain values, tested by tables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from sglang.srt.utils.flags import ServerArgsError

AUTO: Final = "auto"
"""The threshold that stands for: the best draft length of every step, by measured costs and acceptance."""

Threshold = int | Literal["auto"] | None

EAGLE3: Final = "EAGLE3"  # a draft layer of its own folder that reads hidden states of the target
NEXTN: Final = "NEXTN"  # the draft head (MTP) that is stored with a target
STANDALONE: Final = "STANDALONE"  # another model with the same vocabulary
NGRAM: Final = "NGRAM"  # no model: what followed the same tokens before

NEEDS_FOLDER: Final = (EAGLE3, STANDALONE)
CHAINS_ONLY: Final = (STANDALONE, NGRAM)

_ALGORITHMS: Final = {
    "EAGLE3": EAGLE3,
    "EAGLE": NEXTN,
    "NEXTN": NEXTN,
    "STANDALONE": STANDALONE,
    "NGRAM": NGRAM,
}
_NO_DRAFTER: Final = "NONE"
_KNOWN_ELSEWHERE: Final = ("DFLASH", "DSPARK", "UNO", "FROZEN_KV_MTP")
_NGRAM_STEPS: Final = 5  # guesses cost nothing, and a text that repeats itself does so for long
MOST_STEPS = 32
MOST_DRAFT_TOKENS = 64  # rows a request may take in the target's forward
_LONG_CHAIN_FAMILIES = ("LlamaForCausalLM", "Grok1ForCausalLM", "Grok1ModelForCausalLM")


@dataclass(frozen=True, slots=True)
class SpeculativeShape:
    num_steps: int
    eagle_topk: int
    num_draft_tokens: int  # the root counts
    warning: str = ""


def parse_algorithm(given: str | None) -> str | None:
    """One of the kinds above, or None where nothing (or NONE) is asked for."""
    if given is None or given.upper() == _NO_DRAFTER:
        return None
    name = given.upper()
    if name in _ALGORITHMS:
        return _ALGORITHMS[name]
    why = "not supported yet" if name in _KNOWN_ELSEWHERE else "unknown"
    raise ServerArgsError(
        f"--speculative-algorithm {given} is {why}; supported: EAGLE3 and STANDALONE (with"
        " --speculative-draft-model-path), EAGLE or NEXTN (the model's own draft head), NGRAM, or NONE for"
        " plain decoding"
    )


def check_draft_folder(algorithm: str, folder: str | None) -> None:
    """``algorithm``: one of the kinds above."""
    if algorithm in NEEDS_FOLDER and folder is None:
        raise ServerArgsError(
            f"--speculative-algorithm {algorithm} needs --speculative-draft-model-path,"
            " the folder of the drafter"
        )
    if algorithm == NGRAM and folder is not None:
        raise ServerArgsError(
            f"--speculative-draft-model-path {folder} has no use with --speculative-algorithm NGRAM, which"
            " guesses from the text itself: leave one of them out"
        )


def resolve_shape(
    num_steps: int | None,
    eagle_topk: int | None,
    num_draft_tokens: int | None,
    architecture: str | None,
    algorithm: str = EAGLE3,
) -> SpeculativeShape:
    """Fill in what was not given; ``architecture`` is the target's, for the table of defaults."""
    if num_steps is None:
        if eagle_topk is not None or num_draft_tokens is not None:
            raise ServerArgsError(
                "--speculative-eagle-topk and --speculative-num-draft-tokens need --speculative-num-steps:"
                " give all three, or none of them for the model's defaults"
            )
        if algorithm == NGRAM:
            return SpeculativeShape(_NGRAM_STEPS, 1, _NGRAM_STEPS + 1)
        is_long = algorithm == EAGLE3 and architecture in _LONG_CHAIN_FAMILIES
        return SpeculativeShape(*((5, 4, 8) if is_long else (3, 1, 4)))
    topk = 1 if eagle_topk is None else eagle_topk
    if topk > 1 and algorithm in CHAINS_ONLY:
        raise ServerArgsError(
            f"--speculative-eagle-topk {topk} is not supported with --speculative-algorithm {algorithm},"
            " which drafts chains: use 1, or leave it out"
        )
    if num_steps < 1:
        raise ServerArgsError(
            f"--speculative-num-steps must be at least 1, got {num_steps}"
            " (never speculating is --speculative-disable-bs-threshold 0)"
        )
    if num_steps > MOST_STEPS:
        raise ServerArgsError(f"--speculative-num-steps must be at most {MOST_STEPS}, got {num_steps}")
    if topk < 1:
        raise ServerArgsError(f"--speculative-eagle-topk must be at least 1, got {topk}")
    if topk == 1:
        return _chain(num_steps, num_draft_tokens)
    return _tree(num_steps, topk, num_draft_tokens)


def _chain(num_steps: int, num_draft_tokens: int | None) -> SpeculativeShape:
    nodes = num_steps + 1
    if num_draft_tokens in (None, nodes):
        return SpeculativeShape(num_steps, 1, nodes)
    return SpeculativeShape(
        num_steps,
        1,
        nodes,
        f"--speculative-num-draft-tokens {num_draft_tokens} is changed to {nodes}:"
        " with --speculative-eagle-topk 1 it is --speculative-num-steps + 1",
    )


def _tree(num_steps: int, topk: int, num_draft_tokens: int | None) -> SpeculativeShape:
    most = min(topk + (num_steps - 1) * topk**2 + 1, MOST_DRAFT_TOKENS)
    if num_draft_tokens is None or not 2 <= num_draft_tokens <= most:
        got = "it was not given" if num_draft_tokens is None else f"got {num_draft_tokens}"
        raise ServerArgsError(
            f"--speculative-num-draft-tokens must be from 2 to {most}"
            f" with --speculative-num-steps {num_steps} and --speculative-eagle-topk {topk}; {got}"
        )
    return SpeculativeShape(num_steps, topk, num_draft_tokens)


def parse_threshold(given: str | int | None) -> Threshold:
    """``--speculative-disable-bs-threshold`` as a number, or auto; None where it is not given."""
    if given is None:
        return None
    if str(given).strip() == AUTO:
        return AUTO
    if isinstance(given, bool) or not re.fullmatch(r"[0-9]{1,9}", str(given).strip()):
        raise ServerArgsError(
            "--speculative-disable-bs-threshold takes the most decoding requests that still speculate,"
            f" a whole number from 0 (never speculate), or auto, or is left out (always speculate);"
            f" got {given!r}"
        )
    return int(given)


def check_one_mode(threshold: Threshold, bs_schedule: str | None) -> None:
    if threshold is not None and bs_schedule is not None:
        raise ServerArgsError(
            f"--speculative-disable-bs-threshold {threshold} and --speculative-bs-schedule both say when to"
            " speculate: leave one out"
        )


def check_capture(threshold: Threshold, capture_max_bs: int | None) -> None:
    if not isinstance(threshold, int) or capture_max_bs is None or threshold <= capture_max_bs:
        return
    raise ServerArgsError(
        f"--speculative-disable-bs-threshold {threshold} needs speculative steps of {threshold} requests:"
        f" raise --speculative-capture-max-bs {capture_max_bs} to at least that, or leave it out"
    )


def check_exact_verification(threshold_single: float, threshold_acc: float) -> None:
    if threshold_single == 1.0 and threshold_acc == 1.0:
        return
    raise ServerArgsError(
        "--speculative-accept-threshold-single and --speculative-accept-threshold-acc other than 1.0 have no"
        " meaning here: verification is exact (a draft is kept only if the model chooses it itself);"
        " leave them out"
    )
