"""Messages become prompts as transformers renders them. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_tokenizer import write_byte_tokenizer

from sglang.srt.managers.chat_templates import ChatTemplate, load_chat_template
from sglang.srt.managers.templates_kimi import typescript_tools
from sglang.srt.managers.text_request import RequestError
from sglang.srt.utils.text_tokenizer import TextTokenizer, TokenizerError

MESSAGES = [
    {"role": "system", "content": "Be ünbrief."},
    {"role": "user", "content": "<b>1 & 2</b>"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "and?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "What it is like\n\nnow",
            "parameters": {
                "type": "object",
                "required": ["town"],
                "properties": {
                    "unit": {"enum": ["c", "f"], "type": "string", "default": "c"},
                    "town": {"type": "string", "description": "Which", "maxLength": 9, "minLength": 1},
                },
            },
        },
    }
]
# In the manner of the templates of GLM-4.7 and Kimi-K2.5, with every construct that those have.
FOLDER = Path(__file__).resolve().parents[2] / "helpers" / "chat_templates"
GLM, KIMI = (FOLDER / "glm.jinja").read_text(), (FOLDER / "kimi.jinja").read_text()
TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "Rain in 東京?"}]},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": " Look it up. ",
        "tool_calls": [
            {
                "id": "functions.get_weather:0",
                "type": "function",
                "function": {"name": "get_weather", "arguments": {"town": "東京", "days": [1]}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "functions.get_weather:0", "content": "yes"},
    {"role": "tool", "content": "no"},
]
TEMPLATES = [
    GLM,
    KIMI,
    "{{ strftime_now('%Y') }}{% set r = messages | map(attribute='role') | list %}{{ r | join(',') }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages[-1]['content'][:3] }}"
    "{{ {'b': 1, 'a': ['<', 'é']} | tojson(indent=2) }}{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}"
    "{{ '%s' | format('x') }}{{ messages[0] is mapping }}{{ 'a\nb'.split('\n')[-1].lstrip() }}"
    "{{ documents is none }}",
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


@pytest.mark.parametrize("source", [GLM, KIMI])
@pytest.mark.parametrize(
    "options", [{}, {"enable_thinking": False, "thinking": False}, {"clear_thinking": False}]
)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_tools_and_reasoning_as_transformers(
    source: str, options: dict[str, bool], tools: list[Any] | None
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    given = dict(options)
    if source is KIMI and tools:
        given["tools_ts_str"] = DECLARED
    theirs, _ = render_jinja_template(
        conversations=[TURNS], chat_template=source, add_generation_prompt=True, tools=tools, **given
    )
    assert ChatTemplate(source, {}).render(TURNS, options, tools=tools) == theirs[0]


DECLARED = """# Tools

## functions
namespace functions {
// What it is like

// now
type get_weather = (_: {
  // Which
  // maxLength: 9, minLength: 1
  town: string,
  // Default: "c"
  unit?: "c" | "f"
}) => any;
}
"""


def test_thinking_on_and_off() -> None:
    glm, kimi = ChatTemplate(GLM, {}), ChatTemplate(KIMI, {})
    assert glm.render(MESSAGES).endswith("<|assistant|><think>")
    assert glm.render(MESSAGES, {"enable_thinking": False}).endswith("<|assistant|></think>")
    assert kimi.render(MESSAGES).endswith("<|im_middle|><think>")
    assert kimi.render(MESSAGES, {"thinking": False}).endswith("<|im_middle|><think></think>")
    # Reasoning before the last answer is left out, and what leads to the next one is kept.
    assert "<think> Look it up. </think>" in kimi.render(TURNS)
    assert "Look" not in kimi.render([*TURNS, {"role": "assistant", "content": "Yes."}, TURNS[0]])


def test_kimis_tools_in_their_order() -> None:
    """Without declarations they are JSON, its keys sorted, as that model has been trained on them."""
    shown = ChatTemplate("{{ tools | tojson(separators=(',', ':')) }}", {}, is_kimi=True).render(
        [], tools=TOOLS
    )
    assert shown.startswith('[{"function":{"description":"What') and '"default":"c","enum":["c","f"]' in shown
    assert ChatTemplate("{{ tools | tojson }}", {}).render([], tools=TOOLS) == json.dumps(TOOLS)


def schema_of(**properties: Any) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": properties}
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


SHAPES = {
    "x?: number | null": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "x?: string | Array<any>": {"type": ["string", "array"]},
    "x?: Array<boolean>": {"type": "array", "items": {"type": "boolean"}},
    "x?: Array<any>": {"type": "array"},
    "x?: {}": {"type": "object"},
    "x?: any": {},
    'x?: 1 | "a" | null': {"enum": [1, "a", None]},
    "// maxItems: 2\n  x?: Array<\n    // one\n    string\n  >": {
        "type": "array",
        "maxItems": 2,
        "items": {"type": "string", "description": "one"},
    },
    "x?: {\n    a: string,\n    [k: string]: never\n  }": {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "x?: {\n    [k: string]: number\n  }": {"type": "object", "additionalProperties": {"type": "number"}},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_declared_types(shape: str) -> None:
    assert f"type f = (_: {{\n  {shape}\n}}) => any;" in (typescript_tools(schema_of(x=SHAPES[shape])) or "")


def test_declared_names() -> None:
    tools = schema_of(x={"$ref": "#/$defs/Node"}, y={"$ref": "#"})
    tools[0]["function"]["parameters"]["$defs"] = {"Node": {"type": "object", "description": "A node"}}
    assert typescript_tools(tools) == (
        "# Tools\n\n## functions\nnamespace functions {\ninterface parameters {\n"
        "  x?: Node,\n  y?: parameters\n}\n"
        "// A node\ninterface Node {}\ntype f = (_: parameters) => any;\n}\n"
    )


@pytest.mark.parametrize(
    "schema", [{"$ref": "#/$defs/None"}, {"$ref": "other.json"}, {"description": "no type"}, 7]
)
def test_what_can_not_be_declared_stays_json(schema: Any) -> None:
    assert typescript_tools(schema_of(x=schema)) is None
    template = ChatTemplate("{{ tools_ts_str or 'as JSON' }}", {})
    assert template.render([], tools=schema_of(x=schema)) == "as JSON"


def test_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    folder = write_byte_tokenizer(tmp_path / "t")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("with {{ tools[0].type }}s")
    (folder / "chat_template.jinja").write_text("plain")
    template = load_chat_template(TextTokenizer.from_folder(folder), None)
    assert template is not None
    assert (template.render([]), template.render([], tools=TOOLS)) == ("plain", "with functions")
    processor = write_byte_tokenizer(tmp_path / "p", chat_template=None)
    (processor / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    template = load_chat_template(TextTokenizer.from_folder(processor), None)
    assert template is not None and template.render([]) == "of the processor"


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
