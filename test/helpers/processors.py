"""Custom logit processors of tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


def fickle(prompt_len: int, outputs: Sequence[int], modulus: int, vocab_size: int) -> set[int]:
    """What may follow: it depends on every id before."""
    key = prompt_len + sum((place + 1) * token for place, token in enumerate(outputs))
    return {token for token in range(vocab_size) if (token + key) % modulus}


class Fickle(CustomLogitProcessor):
    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        assert custom_param_list is not None and len(custom_param_list) == len(logits)
        made = torch.full_like(logits, -torch.inf)
        for row, params in enumerate(custom_param_list):
            request = params["__req__"]
            ids = fickle(
                len(request.origin_input_ids), request.output_ids, params["modulus"], logits.shape[1]
            )
            kept = torch.tensor(sorted(ids))
            made[row, kept] = logits[row, kept]
        return made


class Broken(CustomLogitProcessor):
    """Fails at the fourth token."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        assert custom_param_list is not None
        if any(len(params["__req__"].output_ids) >= 3 for params in custom_param_list):
            raise RuntimeError("as it must be")
        return logits


class WrongShape(CustomLogitProcessor):
    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        return logits[:, :5]
