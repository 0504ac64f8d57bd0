"""Logit processors that a request brings: a class, sent as SGLang's clients send it.

What a client sends is a pickle, and reading it runs its code: --enable-custom-logit-processor allows that.
"""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final

if TYPE_CHECKING:
    import torch

REQUEST: Final = "__req__"
"""Key of the request itself (a ``ProcessedRequest``) among the parameters of a row."""


class ProcessorError(ValueError):
    """No logit processor can be made of what was sent; the message is for the user."""


class CustomLogitProcessor(ABC):
    """Base of the classes that clients write."""

    @abstractmethod
    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        """logits: [N, V], of N places of one reply -> the same shape, or the tensor itself, changed.

        ``custom_param_list``: for each place the request's ``custom_params``, with the request as it is there
        under ``__req__``. The answer may depend on nothing else: places are visited that never come to be.
        """

    @classmethod
    def to_str(cls) -> str:
        """As the field ``custom_logit_processor`` of a request."""
        return processor_text(cls)


class DisallowedTokensLogitsProcessor(CustomLogitProcessor):
    """``custom_params``: {"token_ids": [...]}, which never come."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        import torch

        from sglang.srt.utils.upload import upload

        vocab_size = logits.shape[1]
        for row, params in zip(logits, custom_param_list or (), strict=False):
            ids = params["token_ids"]
            # Looked at here: CUDA answers an index out of range by failing for ever.
            if not all(type(token) is int and -vocab_size <= token < vocab_size for token in ids):
                raise IndexError(f"token_ids outside the vocabulary of {vocab_size}: {ids}")
            # A list as an index would wait for the device.
            places = upload([token % vocab_size for token in ids], torch.int64, logits.device)
            row.index_fill_(0, places, -float("inf"))
        return logits


class ThinkingBudgetLogitProcessor(CustomLogitProcessor):
    """``custom_params``: {"thinking_budget": n}. After so many tokens a new line and the end of the thinking
    are forced. Where the server knows the model's marks (--reasoning-parser), the sampling parameter
    ``thinking_budget`` does it at no cost.
    """

    THINKING_START_TOKEN_ID: ClassVar[int]
    THINKING_END_TOKEN_ID: ClassVar[int]
    NEW_LINE_TOKEN_ID: ClassVar[int]

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        for row, params in zip(logits, custom_param_list or (), strict=False):
            request, budget = params[REQUEST], params.get("thinking_budget")
            ids = [*request.origin_input_ids, *request.output_ids]
            if type(budget) is not int or budget < 0 or self.THINKING_START_TOKEN_ID not in ids:
                continue
            thought = ids[len(ids) - ids[::-1].index(self.THINKING_START_TOKEN_ID) :]
            if self.THINKING_END_TOKEN_ID in thought or len(thought) < budget:
                continue
            has_line = thought[-1:] == [self.NEW_LINE_TOKEN_ID]
            row[:] = -float("inf")
            row[self.THINKING_END_TOKEN_ID if has_line else self.NEW_LINE_TOKEN_ID] = 0.0
        return logits


class Glm4MoeThinkingBudgetLogitProcessor(ThinkingBudgetLogitProcessor):
    THINKING_START_TOKEN_ID, THINKING_END_TOKEN_ID, NEW_LINE_TOKEN_ID = 151350, 151351, 198


class Qwen3ThinkingBudgetLogitProcessor(ThinkingBudgetLogitProcessor):
    THINKING_START_TOKEN_ID, THINKING_END_TOKEN_ID, NEW_LINE_TOKEN_ID = 151667, 151668, 198


class DeepSeekR1ThinkingBudgetLogitProcessor(ThinkingBudgetLogitProcessor):
    THINKING_START_TOKEN_ID, THINKING_END_TOKEN_ID, NEW_LINE_TOKEN_ID = 128798, 128799, 201


def processor_text(given: type | str) -> str:
    """Of a class, of its import path ("package.module:Class"), or of what has been written already.

    Raises:
        ProcessorError: there is no such class.
    """
    if isinstance(given, str):
        if given.lstrip().startswith("{"):
            return given
        given = _imported(given)
    import dill

    return json.dumps({"callable": dill.dumps(given).hex()})


def _imported(path: str) -> type:
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ProcessorError(f"custom_logit_processor: {path!r} can't be imported: {error}") from error
    if not isinstance(found, type):
        raise ProcessorError(f"custom_logit_processor: {path!r} is no class")
    return found


def load_processor(text: str) -> Any:
    """An instance of the class. Runs what ``text`` holds.

    Raises:
        ProcessorError: it holds no class that can be called with logits.
    """
    try:
        import dill
    except ImportError as error:
        raise ProcessorError("custom_logit_processor needs the package dill where the server runs") from error
    try:
        found = dill.loads(bytes.fromhex(json.loads(text)["callable"]))
        made = found() if isinstance(found, type) else found
    except Exception as error:  # whatever a stranger's pickle raises
        raise ProcessorError(
            f"custom_logit_processor can't be read ({type(error).__name__}: {error}): send what"
            " CustomLogitProcessor.to_str() gives"
        ) from error
    if not callable(made):
        raise ProcessorError("custom_logit_processor holds nothing that can be called with logits")
    return made
