"""Token ids against transformers' own reading of the GGUF file.

transformers takes tokens and merges from the file and leaves out its pre-tokenizer type (``smollm``: every
digit by itself). So there are two comparisons: with that rule put back, ids are equal on every line;
without it, on every line but those with two or more white-space characters before a digit, or with a
numeral other than 0 to 9: there the rule matters, and the file's is followed.
"""

import pytest
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from unit.embedded.conftest import Conversion
from unit.embedded.text_corpus import code_lines, prose_lines, unicode_lines


@pytest.fixture(scope="module")
def tokenizer(conversion: Conversion) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(conversion.folder)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    found = code_lines(6000) + prose_lines(1500) + unicode_lines(1500)
    assert len(set(found)) >= 5000
    return found


def _ids(tokenizer: PreTrainedTokenizerBase, lines: list[str]) -> list[list[int]]:
    return tokenizer(lines, add_special_tokens=False)["input_ids"]


def _digit_rule_matters(line: str) -> bool:
    """Whether splitting digits off first can change the ids of ``line``."""
    return any(
        char.isnumeric() and (not char.isascii() or line[max(0, i - 2) : i].isspace() and i >= 2)
        for i, char in enumerate(line)
    )


def test_ids_equal_transformers_with_the_files_digit_rule(
    tokenizer: PreTrainedTokenizerBase, reference_tokenizer: PreTrainedTokenizerBase, lines: list[str]
) -> None:
    backend = reference_tokenizer.backend_tokenizer
    as_read = backend.pre_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), as_read])
    try:
        expected = _ids(reference_tokenizer, lines)
    finally:
        backend.pre_tokenizer = as_read
    assert _ids(tokenizer, lines) == expected


def test_ids_equal_transformers_as_it_is(
    tokenizer: PreTrainedTokenizerBase, reference_tokenizer: PreTrainedTokenizerBase, lines: list[str]
) -> None:
    pairs = zip(lines, _ids(tokenizer, lines), _ids(reference_tokenizer, lines), strict=True)
    different = [line for line, ours, theirs in pairs if ours != theirs]
    assert [line for line in different if not _digit_rule_matters(line)] == []
    ordinary = [line for line in lines if not _digit_rule_matters(line)]
    assert len(ordinary) >= 5000


def test_decode_gives_the_text_back(tokenizer: PreTrainedTokenizerBase, lines: list[str]) -> None:
    encoded = _ids(tokenizer, lines)
    unknown = tokenizer.unk_token_id
    decoded = tokenizer.batch_decode(encoded, skip_special_tokens=False)
    pairs = zip(lines, encoded, decoded, strict=True)
    assert [line for line, ids, text in pairs if text != line and unknown not in ids] == []


def test_every_digit_is_a_token(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.convert_ids_to_tokens(_ids(tokenizer, ["x = 2026"])[0])[-4:] == ["2", "0", "2", "6"]


def test_special_tokens(
    tokenizer: PreTrainedTokenizerBase, reference_tokenizer: PreTrainedTokenizerBase
) -> None:
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<|im_end|>", 2, 2)
    assert (tokenizer.bos_token, tokenizer.unk_token) == ("<|im_start|>", "<|endoftext|>")
    text = "a<|im_end|>\n<|im_start|>user b<file_sep>c \x04"
    assert _ids(tokenizer, [text]) == _ids(reference_tokenizer, [text])
    assert tokenizer.decode(_ids(tokenizer, ["hi<|im_end|>"])[0], skip_special_tokens=True) == "hi"


def test_chat_template(
    tokenizer: PreTrainedTokenizerBase, reference_tokenizer: PreTrainedTokenizerBase
) -> None:
    messages = [
        {"role": "user", "content": "What is 12 + 30?"},
        {"role": "assistant", "content": "42"},
        {"role": "user", "content": "Sure?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n42<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )
    system = [{"role": "system", "content": "Be brief."}, *messages]
    assert tokenizer.apply_chat_template(system, tokenize=False) == reference_tokenizer.apply_chat_template(
        system, tokenize=False
    )
