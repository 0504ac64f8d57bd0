"""Messages become prompts as transformers renders them. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.tiny_tokenizer import write_byte_tokenizer

from sglang.srt.managers.chat_templates import ChatTemplate, load_chat_template
from sglang.srt.managers.text_request import RequestError
from sglang.srt.utils.text_tokenizer import TextTokenizer, TokenizerError

MESSAGES = [
    {"role": "system", "content": "Be ünbrief."},
    {"role": "user", "content": "<b>1 & 2</b>"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "and?"},
]
TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'system' %}\n  [{{ m.content }}]\n"
    "  {% continue %}{% endif %}\n{{ m['role'] }}: {{ m['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m | tojson }}{% endif %}{% endfor %}{{ tools is none }}",
]


@pytest.mark.parametrize("source", TEMPLATES)
def test_same_as_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    theirs, _ = render_jinja_template(
        conversations=[MESSAGES], chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES) == theirs[0]


def test_continuing_the_last_message() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}assistant:", {})
    begun = [*MESSAGES[:2], {"role": "assistant", "content": "It is"}]
    assert template.render(begun, continue_final_message=True).endswith("2</b>;assistant:It is")
    with pytest.raises(RequestError, match="assistant"):
        template.render(MESSAGES, continue_final_message=True)


def test_options_reach_the_template() -> None:
    template = ChatTemplate("{% if thinking %}hmm{% endif %}", {})
    assert (template.render([], {"thinking": True}), template.render([])) == ("hmm", "")


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "self"])
def test_options_can_not_stand_for_what_the_server_sets(name: str) -> None:
    with pytest.raises(RequestError, match=f"chat_template_kwargs can't set {name}"):
        ChatTemplate("x", {}).render(MESSAGES, {name: False, "thinking": True})


def test_what_a_template_refuses_is_the_clients_error() -> None:
    template = ChatTemplate("{{ raise_exception('no system message please') }}", {})
    with pytest.raises(RequestError, match="no system message please"):
        template.render(MESSAGES)


def test_a_template_can_not_reach_out() -> None:
    template = ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(RequestError):
        template.render(MESSAGES)


def test_where_templates_come_from(tmp_path: Path) -> None:
    folder = write_byte_tokenizer(tmp_path / "t", chat_template="from the config")

    def found(given: str | None = None) -> str | None:
        template = load_chat_template(TextTokenizer.from_folder(folder), given)
        return None if template is None else template.render([])

    assert found() == "from the config"
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "by name"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert found() == "by name"
    (folder / "tokenizer_config.json").write_text("{}")
    assert found() is None
    (folder / "chat_template.jinja").write_text("from a file")
    assert found() == "from a file"
    (tmp_path / "mine.jinja").write_text("mine")
    assert found(str(tmp_path / "mine.jinja")) == "mine"


def test_bad_templates_are_one_line(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.from_folder(write_byte_tokenizer(tmp_path / "t"))
    (tmp_path / "bad.jinja").write_text("{% if %}")
    for name in ("bad.jinja", "missing.jinja"):
        with pytest.raises(TokenizerError, match="template") as caught:
            load_chat_template(tokenizer, str(tmp_path / name))
        assert "\n" not in str(caught.value)
