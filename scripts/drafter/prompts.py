"""Build the training prompts, and read the held-out ones.

    python prompts.py --gguf MODEL.gguf --humaneval HumanEval.jsonl.gz --bfcl DIR --out prompts.npz

Held-out prompts are frozen in `benchmark/prompts/heldout.jsonl`; whatever they were made of (64
HumanEval problems, 64 BFCL functions, 12 tasks, 12 topics) is kept out of the training prompts.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
HELD_OUT = HERE.parents[1] / "benchmark" / "prompts" / "heldout.jsonl"
DOMAINS = ("humaneval_chat", "humaneval_raw", "tasks", "chat_template", "chat_free", "model_turns", "tool")
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
BFCL_FILES = [
    "simple_python",
    "multiple",
    "parallel",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "irrelevance",
    "live_irrelevance",
    "simple_java",
    "simple_javascript",
    "parallel_multiple",
    "live_parallel_multiple",
]
MAX_PROMPT = 448  # tokens

Prompt = tuple[str, str]  # domain, text


def user_prefix() -> str:
    return f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"


def assistant_prefix() -> str:
    return "<|im_end|>\n<|im_start|>assistant\n"


def chat(content: str) -> str:
    """One user turn in the model's chat template."""
    return user_prefix() + content + assistant_prefix()


def load_words() -> dict:
    return json.loads((HERE / "words.json").read_text())


def read_held_out(path: Path = HELD_OUT) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def humaneval_prompts(problems: list[dict], words: dict) -> list[Prompt]:
    """Each problem many times over: its answers differ by temperature and seed."""
    held_out, out = set(words["held_out_humaneval"]), []
    for problem in problems:
        if problem["task_id"] in held_out:
            continue
        for form in words["function_forms"]:
            out += [("humaneval_chat", chat(form.format(code=problem["prompt"])))] * 6
        out += [("humaneval_raw", problem["prompt"])] * 16
    return out


def function_prompts(words: dict, rng: random.Random, count: int) -> list[Prompt]:
    """Made-up Python signatures with a docstring, raw or in a chat turn."""
    out: list[Prompt] = []
    for _ in range(count):
        names = ", ".join(rng.sample(words["arguments"], rng.randint(1, 3)))
        doc = rng.choice(words["tasks"]).capitalize()
        code = f'def {rng.choice(words["function_names"])}({names}):\n    """{doc}."""\n'
        if rng.random() < 0.6:
            head = rng.choice(["", "import math\n\n\n", "from typing import List\n\n\n"])
            out.append(("humaneval_raw", head + code))
        else:
            out.append(("humaneval_chat", chat(rng.choice(words["function_forms"]).format(code=code))))
    return out


def task_prompts(words: dict, rng: random.Random) -> list[Prompt]:
    out: list[Prompt] = []
    for task in words["tasks"]:
        for form in words["code_forms"]:
            for language in words["languages"]:
                if language == "Python" or rng.random() < 0.3:
                    out.append(("tasks", chat(form.format(language=language, task=task))))
    return out


def chat_prompts(words: dict, rng: random.Random) -> list[Prompt]:
    out: list[Prompt] = []
    for topic in words["topics"]:
        for form in words["chat_forms"]:
            out.append(("chat_template", chat(form.format(x=topic, y=rng.choice(words["topics"])))))
    for _ in range(2500):
        a, b, c = rng.randint(2, 99), rng.randint(2, 99), rng.randint(2, 20)
        name, things = rng.choice(words["parameters"]["name"][2]), rng.choice(words["things"])
        text = rng.choice(words["sums"])
        out.append(
            ("chat_template", chat(text.format(a=a, b=b, c=c, ac=a * c, ab=a + b, name=name, things=things)))
        )
    return out


def tool_chat(question: str, tools: list[dict], form: str) -> str:
    """Tools in the system turn, in one of the `tool_forms`."""
    system = form.format(tools=json.dumps(tools))
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}" + assistant_prefix()


def bfcl_prompts(folder: Path, words: dict, held_out: list[str], rng: random.Random) -> list[Prompt]:
    out: list[Prompt] = []
    for name in BFCL_FILES:
        for line in (folder / f"BFCL_v4_{name}.json").read_text().splitlines():
            row = json.loads(line)
            question = [m for m in row["question"][0] if m["role"] == "user"][-1]["content"]
            if any(question + assistant_prefix() in text for text in held_out):
                continue
            tools = row.get("function", [])
            for form in words["tool_forms"]:
                picked = rng.sample(tools, min(len(tools), 2))
                out.append(("tool", tool_chat(question, picked, form)))
    return out


def _made_up_tool(words: dict, rng: random.Random) -> tuple[dict, str]:
    """A random function and a request for it."""
    name = f"{rng.choice(words['verbs'])}_{rng.choice(words['nouns'])}"
    picked = rng.sample(sorted(words["parameters"]), rng.randint(1, 4))
    fields = {p: words["parameters"][p] for p in picked}
    properties = {p: {"type": kind, "description": doc} for p, (kind, doc, _) in fields.items()}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": picked[: rng.randint(1, len(picked))],
    }
    verb = name.replace("_", " ")
    given = ", ".join(f"{p.replace('_', ' ')} {rng.choice(values)}" for p, (_, _, values) in fields.items())
    tool = {"name": name, "description": verb.capitalize() + ".", "parameters": parameters}
    return tool, rng.choice(words["request_forms"]).format(v=verb, a=given)


def made_up_tool_prompts(words: dict, rng: random.Random, count: int) -> list[Prompt]:
    out: list[Prompt] = []
    for _ in range(count):
        made = [_made_up_tool(words, rng) for _ in range(rng.choice([1, 1, 2, 3]))]
        form = rng.choice(words["tool_forms"])
        out.append(("tool", tool_chat(rng.choice(made)[1], [tool for tool, _ in made], form)))
    for _ in range(count // 3):
        picked = rng.sample(sorted(words["parameters"]), rng.randint(2, 5))
        pairs = "; ".join(f"{p}: {rng.choice(words['parameters'][p][2])}" for p in picked)
        noun = rng.choice(words["nouns"]).replace("_", " ")
        text = rng.choice(words["json_forms"])
        filled = text.format(noun=noun, fields=", ".join(picked), pairs=pairs, n=rng.randint(2, 5))
        out.append(("tool", chat(filled)))
    return out


def build(humaneval: Path, bfcl: Path, seed: int) -> list[Prompt]:
    """All training prompts but the model's own user turns, which are generated on the device."""
    words, rng = load_words(), random.Random(seed)
    held_out = [row["text"] for row in read_held_out()]
    with gzip.open(humaneval, "rt") as lines:
        problems = [json.loads(line) for line in lines]
    prompts = humaneval_prompts(problems, words)
    prompts += function_prompts(words, rng, 6000)
    prompts += task_prompts(words, rng)
    prompts += chat_prompts(words, rng)
    prompts += bfcl_prompts(bfcl, words, held_out, rng)
    prompts += made_up_tool_prompts(words, rng, 9000)
    rng.shuffle(prompts)
    return [p for p in prompts if p[1] not in set(held_out)]


def load_tokenizer(gguf: Path) -> Any:
    """The `tokenizers` object of a GGUF file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).backend_tokenizer


def encode(tokenizer: Any, prompts: list[Prompt], limit: int) -> dict[str, np.ndarray]:
    """Flat token ids, lengths and domain numbers of the prompts of at most `limit` tokens."""
    ids, domains = [], []
    for begin in range(0, len(prompts), 2000):
        part = prompts[begin : begin + 2000]
        encoded = tokenizer.encode_batch([text for _, text in part], add_special_tokens=False)
        for (domain, _), row in zip(part, encoded, strict=True):
            if len(row.ids) <= limit:
                ids.append(np.array(row.ids, np.uint16))
                domains.append(DOMAINS.index(domain))
    lengths = np.array([len(row) for row in ids], np.int32)
    return {"ids": np.concatenate(ids), "lengths": lengths, "domains": np.array(domains, np.int8)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--humaneval", type=Path, required=True)
    parser.add_argument("--bfcl", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.gguf)
    arrays = {
        f"train_{k}": v
        for k, v in encode(tokenizer, build(args.humaneval, args.bfcl, args.seed), MAX_PROMPT).items()
    }
    held_out = [(row["domain"], row["text"]) for row in read_held_out()]
    arrays |= {f"held_out_{k}": v for k, v in encode(tokenizer, held_out, MAX_PROMPT).items()}
    for name, text in (("user_prefix", user_prefix()), ("assistant_prefix", assistant_prefix())):
        arrays[name] = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint16)
    np.savez_compressed(args.out, allow_pickle=False, **arrays)
    for part in ("train", "held_out"):
        counts = np.bincount(arrays[f"{part}_domains"], minlength=len(DOMAINS))
        print(
            part,
            dict(zip(DOMAINS, counts.tolist(), strict=True)),
            "tokens",
            int(arrays[f"{part}_lengths"].sum()),
        )


if __name__ == "__main__":
    main()
