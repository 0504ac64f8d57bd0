"""Made-up prompts of a wanted length: real words (`random`), random tokens, groups with a common prefix."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import chain, cycle, islice

from sglang.benchmark.dataset_files import sharegpt_turns
from sglang.benchmark.dataset_shipped import shipped_texts
from sglang.benchmark.prompt_row import DatasetError, DatasetOptions, PromptRow, Tokenizer

_ROUNDS = 8  # so often a text is mended to have its length in tokens; most need one or two


def random_text(options: DatasetOptions) -> list[PromptRow]:
    """Texts from a ShareGPT-format file, or the shipped prompts without one, repeated or cut to length."""
    tokenizer = options.need_tokenizer("random")
    texts = [t[0] for t in sharegpt_turns(options.dataset_path)] if options.dataset_path else shipped_texts()
    rng = random.Random(options.seed)
    rng.shuffle(texts)
    pieces = cycle([ids for text in texts if (ids := tokenizer.encode(text, add_special_tokens=False))])
    return _random_rows(options, tokenizer, rng, lambda length: list(islice(cycle(next(pieces)), length)))


def random_ids(options: DatasetOptions) -> list[PromptRow]:
    """Tokens drawn at random from the vocabulary."""
    tokenizer = options.need_tokenizer("random-ids")
    rng, usable = random.Random(options.seed), _usable(tokenizer)
    return _random_rows(options, tokenizer, rng, lambda length: rng.choices(usable, k=length))


def _usable(tokenizer: Tokenizer) -> list[int]:
    special = tokenizer.special_ids()
    return [i for i in range(tokenizer.vocab_size) if i not in special]


def _random_rows(
    options: DatasetOptions, tokenizer: Tokenizer, rng: random.Random, make: Callable[[int], list[int]]
) -> list[PromptRow]:
    ratio = options.random_range_ratio
    if not 0 <= ratio <= 1:
        raise DatasetError(f"--random-range-ratio must be from 0 to 1, got {ratio}")
    num_special = len(tokenizer.encode(""))
    rows = []
    for _ in range(options.num_prompts):
        wanted = _length(rng, options.random_input_len, ratio, "--random-input-len")
        output_len = options.output_len or _length(
            rng, options.random_output_len, ratio, "--random-output-len"
        )
        ids = make(max(1, wanted if options.tokenize_prompt else wanted - num_special))
        if options.tokenize_prompt:
            rows.append(PromptRow(ids, len(ids), output_len, domain="random"))
            continue
        text = text_of_length(tokenizer, ids)
        rows.append(PromptRow(text, options.count(text), output_len, domain="random"))
    return rows


def _length(rng: random.Random, most: int, ratio: float, flag: str) -> int:
    if most < 1:
        raise DatasetError(f"{flag} must be at least 1, got {most}")
    return rng.randint(max(1, int(most * ratio)), most)


def text_of_length(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """A text of as many tokens as ``ids``, nearly always: a text may tokenise to other ids than its own."""
    wanted, filler = len(ids), list(ids)
    text = tokenizer.decode(list(ids), skip_special_tokens=False)
    for _ in range(_ROUNDS):
        got = tokenizer.encode(text, add_special_tokens=False)
        if len(got) == wanted:
            break
        got = got[:wanted] if len(got) > wanted else [*got, *islice(cycle(filler), wanted - len(got))]
        text = tokenizer.decode(got, skip_special_tokens=False)
    return text


def shared_prefix(options: DatasetOptions) -> list[PromptRow]:
    """Groups of prompts that begin with the same system prompt, shuffled."""
    tokenizer = options.need_tokenizer("generated-shared-prefix")
    sizes = (options.gsp_num_groups, options.gsp_prompts_per_group, options.gsp_system_prompt_len,
             options.gsp_question_len, options.gsp_output_len)  # fmt: skip
    if min(sizes) < 1:
        raise DatasetError("the --gsp flags must all be at least 1")
    rng, usable = random.Random(options.seed), _usable(tokenizer)

    def made_up(length: int) -> str:
        return text_of_length(tokenizer, rng.choices(usable, k=length))

    def group() -> list[PromptRow]:
        system = made_up(options.gsp_system_prompt_len)
        texts = [
            f"{system}\n\n{made_up(options.gsp_question_len)}" for _ in range(options.gsp_prompts_per_group)
        ]
        length = options.output_len or options.gsp_output_len
        return [PromptRow(text, options.count(text), length, domain="shared-prefix") for text in texts]

    rows = list(chain.from_iterable(group() for _ in range(options.gsp_num_groups)))
    rng.shuffle(rows)
    return rows
