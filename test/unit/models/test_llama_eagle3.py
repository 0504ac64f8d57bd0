"""The EAGLE-3 draft layer against its formulas written out in float64, and its checkpoints' variants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.attention_reference import attend_one
from helpers.run_model import MAX_TOKENS, load_target, make_attention
from helpers.tiny_models import write_folder, write_tiny_eagle3, write_tiny_llama, write_tiny_qwen2
from safetensors.torch import load_file

from sglang.srt.configs.model_config import ModelConfig, ModelConfigError
from sglang.srt.layers.attention.base import Block, DecodeRows, PrefillRows
from sglang.srt.layers.attention.heads import Positions
from sglang.srt.model_loader.checkpoint import open_source
from sglang.srt.model_loader.weight_source import WeightError
from sglang.srt.models.dense import DenseModel
from sglang.srt.models.eagle3 import Eagle3Model
from sglang.srt.models.llama_eagle3 import LlamaEagle3
from sglang.srt.models.registry import build_drafter

D, NQ, NKV, HIDDEN = 16, 8, 4, 64
T = 12


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> DenseModel:
    return load_target(write_tiny_llama(tmp_path_factory.mktemp("target")), torch.float64)


def load(folder: Path, target: DenseModel, load_format: str = "auto") -> Eagle3Model:
    config = ModelConfig.from_draft_folder(folder, 300)
    source = open_source(folder, load_format, torch.float64, "cpu")
    return build_drafter(config, source, target, torch.float64, "cpu", MAX_TOKENS)


def write(folder: Path, target: DenseModel, **options: Any) -> Path:
    return write_tiny_eagle3(folder, target.config.path, **options)


def rewrite(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """Add fields and tensors to a folder."""
    old = json.loads((folder / "config.json").read_text())
    return write_folder(folder, old | config, load_file(folder / "model.safetensors") | tensors)


def inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 256, (T,), generator=g)
    return ids, torch.randn(T, HIDDEN, generator=g, dtype=torch.float64), torch.arange(T)


def kv(
    drafter: Eagle3Model, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [T, nkv, d] that a sync writes."""
    assert isinstance(drafter, LlamaEagle3)
    product = drafter.attention.entries(drafter.pairs(ids, hidden), Positions(drafter.rope, positions))
    _, k, v = product.turned()
    assert k is not None and v is not None
    return k, v


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Pairs (i, i + d/2) as complex numbers, theta 10000. x: [T, heads, d]."""
    pairs = torch.complex(x[..., : D // 2].contiguous(), x[..., D // 2 :].contiguous())
    turn = positions.double()[:, None] * 10000.0 ** (-torch.arange(D // 2, dtype=torch.float64) * 2 / D)
    turned = pairs * torch.polar(torch.ones_like(turn), turn)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def reference_layer(
    folder: Path, target: DenseModel, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a [T, H], k and v [T, nkv, d] of a causal pass."""
    w = {n: t.double() for n, t in load_file(folder / "model.safetensors").items()}
    p, attn = "midlayer.", "midlayer.self_attn."
    x = torch.cat(
        (
            norm(target.embed.weight[ids], w[f"{p}input_layernorm.weight"]),
            norm(hidden, w[f"{p}hidden_norm.weight"]),
        ),
        -1,
    )
    q = rotate((x @ w[f"{attn}q_proj.weight"].T).view(T, NQ, D), positions)
    k = rotate((x @ w[f"{attn}k_proj.weight"].T).view(T, NKV, D), positions)
    v = (x @ w[f"{attn}v_proj.weight"].T).view(T, NKV, D)
    heads = torch.stack([attend_one(q[t], k, v, torch.arange(T) <= t) for t in range(T)])
    a = hidden + heads.flatten(1) @ w[f"{attn}o_proj.weight"].T
    y = norm(a, w[f"{p}post_attention_layernorm.weight"])
    gate = y @ w[f"{p}mlp.gate_proj.weight"].T
    a = a + (gate * gate.sigmoid() * (y @ w[f"{p}mlp.up_proj.weight"].T)) @ w[f"{p}mlp.down_proj.weight"].T
    return a, k, v


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape and got.dtype == torch.float64
    assert torch.allclose(got, expected, rtol=1e-9, atol=1e-9)


def test_layer_kv_and_logits_are_the_formulas(tmp_path: Path, target: DenseModel) -> None:
    folder = write(tmp_path, target)
    drafter = load(folder, target)
    ids, hidden, positions = inputs()
    expected_a, expected_k, expected_v = reference_layer(folder, target, ids, hidden, positions)

    attention = make_attention(drafter.kv_shape, 4, torch.float64)
    attn = attention.prefill(PrefillRows((1,), (0,), (T,)))
    a = drafter.layer(ids, hidden, positions, attn, write=True)
    close(a, expected_a)
    k, v = kv(drafter, ids, hidden, positions)
    close(k, expected_k)
    close(v, expected_v)
    places = attention.places(torch.ones(T, dtype=torch.int64), positions)
    assert torch.equal(attention.pool.keys(0)[places], k)
    assert torch.equal(attention.pool.values(0)[places], v)

    w = load_file(folder / "model.safetensors")
    close(drafter.logits(a), norm(expected_a, w["norm.weight"]) @ w["lm_head.weight"].double().T)
    aux = torch.randn(T, 3 * HIDDEN, dtype=torch.float64)
    close(drafter.feature(aux), aux @ w["fc.weight"].double().T)


def test_first_draft_forward_reads_the_synced_place(tmp_path: Path, target: DenseModel) -> None:
    """After a KV-only sync, a forward that writes nothing gives what the full layer gave there."""
    drafter = load(write(tmp_path, target), target)
    ids, hidden, positions = inputs(1)
    full = make_attention(drafter.kv_shape, 1, torch.float64)
    rows = PrefillRows((2,), (0,), (T,))
    expected = drafter.layer(ids, hidden, positions, full.prefill(rows), write=True)
    synced = make_attention(drafter.kv_shape, 1, torch.float64)
    k, v = kv(drafter, ids, hidden, positions)
    synced.pool.write(0, synced.places(torch.full((T,), 2), positions), k, v)
    before = synced.pool.kv.clone()
    none = DecodeRows(torch.tensor([2]), torch.tensor([T]), T, 1, Block.NONE)
    a = drafter.layer(ids[-1:], hidden[-1:], positions[-1:], synced.decode(none), write=False)
    close(a, expected[-1:])
    assert torch.equal(synced.pool.kv.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.parametrize("layer_prefix", ["midlayer.", "layers.0."])
@pytest.mark.parametrize("model_prefix", ["", "model."])
@pytest.mark.parametrize("with_embedding", [False, True])
def test_names_in_checkpoints(
    tmp_path: Path, target: DenseModel, layer_prefix: str, model_prefix: str, with_embedding: bool
) -> None:
    plain = load(write(tmp_path / "plain", target), target)
    options = {"layer_prefix": layer_prefix, "model_prefix": model_prefix, "with_embedding": with_embedding}
    other = load(write(tmp_path / "other", target, **options), target)
    ids, hidden, positions = inputs()
    assert torch.equal(kv(plain, ids, hidden, positions)[0], kv(other, ids, hidden, positions)[0])
    assert torch.equal(plain.logits(hidden), other.logits(hidden))
    assert torch.equal(plain.target_ids, other.target_ids)
    assert other.embed is target.embed


def test_a_pytorch_file(tmp_path: Path, target: DenseModel) -> None:
    folder = write(tmp_path, target)
    expected = load(folder, target)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    _, hidden, _ = inputs()
    assert torch.equal(load(folder, target).logits(hidden), expected.logits(hidden))


def test_target_ids_are_offsets(tmp_path: Path, target: DenseModel) -> None:
    folder = write(tmp_path, target)
    tensors = load_file(folder / "model.safetensors")
    ids = load(folder, target).target_ids
    assert torch.equal(ids, torch.arange(192) + tensors["d2t"])
    assert torch.equal(ids, tensors["t2d"].nonzero()[:, 0])


def test_whole_vocabulary_shares_the_lm_head(tmp_path: Path, target: DenseModel) -> None:
    drafter = load(write(tmp_path, target, draft_vocab=None), target)
    assert drafter.lm_head is target.lm_head
    assert torch.equal(drafter.target_ids, torch.arange(256))


def test_default_and_explicit_aux_layers(tmp_path: Path, target: DenseModel) -> None:
    assert load(write(tmp_path, target), target).aux_layers == (2, 2, 1)
    explicit = {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    assert load(write(tmp_path, target, eagle_config=explicit), target).aux_layers == (1, 2, 4)


def test_norms_before_fc_and_bias(tmp_path: Path, target: DenseModel) -> None:
    folder = write(tmp_path, target, bias=True)
    fc = load_file(folder / "model.safetensors")["fc.weight"].double()
    bias, whole = torch.randn(HIDDEN), torch.randn(3 * HIDDEN)
    aux = torch.randn(T, 3 * HIDDEN, dtype=torch.float64)
    rewrite(folder, {"norm_before_fc": True}, {"fc.bias": bias, "input_norm.weight": whole})
    close(load(folder, target).feature(aux), norm(aux, whole) @ fc.T + bias.double())


@pytest.mark.parametrize(
    "names", [("fc_norm.0", "fc_norm.1", "fc_norm.2"), ("aux_norm_low", "aux_norm_mid", "aux_norm_high")]
)
def test_norm_of_each_hidden_state(tmp_path: Path, target: DenseModel, names: tuple[str, ...]) -> None:
    folder = write(tmp_path, target)
    fc = load_file(folder / "model.safetensors")["fc.weight"].double()
    weights = {f"{name}.weight": torch.randn(HIDDEN) for name in names}
    rewrite(folder, {"fc_norm": True}, weights)
    aux = torch.randn(T, 3 * HIDDEN, dtype=torch.float64)
    parts = [norm(a, w) for a, w in zip(aux.split(HIDDEN, 1), weights.values(), strict=True)]
    close(load(folder, target).feature(aux), torch.cat(parts, 1) @ fc.T)


def test_norm_output(tmp_path: Path, target: DenseModel) -> None:
    folder = write(tmp_path, target, norm_output=True)
    drafter = load(folder, target)
    ids, hidden, positions = inputs()
    expected, _, _ = reference_layer(folder, target, ids, hidden, positions)
    attn = make_attention(drafter.kv_shape, 4, torch.float64).prefill(PrefillRows((1,), (0,), (T,)))
    a = drafter.layer(ids, hidden, positions, attn, write=True)
    w = load_file(folder / "model.safetensors")
    close(a, norm(expected, w["norm.weight"]))
    close(drafter.logits(a), a @ w["lm_head.weight"].double().T)


def test_another_width_needs_its_own_embedding(tmp_path: Path) -> None:
    wide = load_target(write_tiny_llama(tmp_path / "t", hidden_size=96, head_dim=24), torch.float64)
    folder = write(tmp_path / "d", wide, hidden_size=64)
    with pytest.raises(WeightError, match="missing: embed_tokens.weight"):
        load(folder, wide)
    rewrite(folder, {}, {"embed_tokens.weight": torch.randn(256, HIDDEN)})
    drafter = load(folder, wide)
    assert drafter.embed is not wide.embed and drafter.feature_size == HIDDEN
    assert drafter.feature(torch.zeros(2, 3 * 96, dtype=torch.float64)).shape == (2, HIDDEN)


def test_what_is_refused(tmp_path: Path, target: DenseModel) -> None:
    folder = write(tmp_path / "a", target)
    rewrite(folder, {}, {"d2t": torch.full((192,), 250)})
    with pytest.raises(ModelConfigError, match="d2t names ids outside"):
        load(folder, target)
    folder = rewrite(write(tmp_path / "b", target), {}, {"layers.3.x": torch.zeros(1)})
    with pytest.raises(WeightError, match="unexpected: layers.3.x"):
        load(folder, target)
    other = write_tiny_qwen2(tmp_path / "c", vocab_size=300)
    with pytest.raises(ModelConfigError, match="vocabulary 256, but the target's is 300"):
        load(folder, load_target(other, torch.float64))


def test_dummy_weights(tmp_path: Path, target: DenseModel) -> None:
    drafter = load(write(tmp_path, target), target, "dummy")
    _, hidden, _ = inputs()
    assert torch.isfinite(drafter.logits(hidden)).all()
    assert torch.equal(drafter.target_ids, torch.arange(192))
