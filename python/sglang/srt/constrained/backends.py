"""The libraries that know grammars, by name. They are imported when the first grammar comes (or by
``preload``): a server that never sees one does not pay for them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from sglang.srt.constrained.grammar import GrammarBackend, GrammarError, JsonOptions
from sglang.srt.constrained.vocabulary import Vocabulary, read_vocabulary
from sglang.srt.utils.text_tokenizer import TextTokenizer


def backend_maker(
    name: str, tokenizer: TextTokenizer, vocab_size: int, stop_ids: tuple[int, ...], options: JsonOptions
) -> Callable[[], tuple[GrammarBackend, Vocabulary]]:
    """For ``GrammarCompiler``. ``vocab_size``: the model's rows of logits."""

    def make() -> tuple[GrammarBackend, Vocabulary]:
        if find_spec(name) is None:
            raise GrammarError(
                f"structured output needs the package {name} where the server runs: install it"
            )
        vocabulary = read_vocabulary(tokenizer, vocab_size, stop_ids)
        return _make(name, vocabulary, options), vocabulary

    return make


def _make(name: str, vocabulary: Vocabulary, options: JsonOptions) -> GrammarBackend:
    if name == "llguidance":
        from sglang.srt.constrained.llguidance_backend import LLGuidanceBackend

        return LLGuidanceBackend(vocabulary, options)
    assert name == "xgrammar", name
    from sglang.srt.constrained.xgrammar_backend import XGrammarBackend

    return XGrammarBackend(vocabulary, options)
