"""What a data set is made of, and what it needs to be made. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Message = dict[str, Any]  # a chat message as the OpenAI API has it: role, content, ...


class DatasetError(ValueError):
    """The data set can't be made; the message is one line that says what to do."""


class Tokenizer(Protocol):
    """What a data set needs of the model's tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...

    def special_ids(self) -> frozenset[int]: ...

    def apply_chat_template(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> str: ...


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One request.

    ``prompt`` is the text to continue (or its ids); where the row is a conversation it is the message
    list itself until a chat template was applied to it, and ``messages`` keeps the list for chat endpoints.
    """

    prompt: str | list[int] | list[Message]
    prompt_len: int  # tokens; 0: not known, as there was no tokenizer
    output_len: int  # tokens to generate
    messages: list[Message] | None = None
    domain: str = ""
    tools: list[dict[str, Any]] | None = None  # to be sent beside the messages; None: none, or in their text
    extra: dict[str, Any] = field(default_factory=dict)  # further fields of this request's body

    def chat_messages(self) -> list[Message]:
        """The conversation; a plain text is its only user turn."""
        if self.messages is not None:
            return self.messages
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        raise DatasetError("a prompt of token ids can't be sent to a chat endpoint: use a data set of texts")


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """Everything that a data set may ask for; each uses what concerns it."""

    num_prompts: int = 1000
    seed: int = 42
    tokenizer: Tokenizer | None = None
    dataset_path: Path | None = None
    apply_chat_template: bool = False  # rows that are texts become a user turn in the model's template
    output_len: int | None = None  # of every row; None: what the data set says
    context_len: int | None = None  # leaves out rows whose prompt and answer are longer together

    random_input_len: int = 1024
    random_output_len: int = 1024
    random_range_ratio: float = 0.0  # lengths are uniform between ratio x length and length
    tokenize_prompt: bool = False  # random data: send ids instead of text

    gsp_num_groups: int = 64
    gsp_prompts_per_group: int = 16
    gsp_system_prompt_len: int = 2048
    gsp_question_len: int = 128
    gsp_output_len: int = 256

    held_out: bool = False  # humaneval: only problems that the embedded model's drafter was not trained on
    native_tools: bool = False  # bfcl: functions beside the messages, not in the system turn's text
    max_tools: int | None = None  # bfcl: at most so many functions a conversation, those of most use (2 to 5
    # thousand tokens of prompt otherwise)

    def count(self, text: str) -> int:
        """Tokens of a prompt; 0 without a tokenizer."""
        return len(self.tokenizer.encode(text)) if self.tokenizer else 0

    def need_tokenizer(self, name: str) -> Tokenizer:
        """
        Raises:
            DatasetError: there is none.
        """
        if self.tokenizer is None:
            raise DatasetError(f"the {name} data set needs the model's tokenizer: give it with --tokenizer")
        return self.tokenizer
