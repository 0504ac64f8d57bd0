"""Write and read a head in the published EAGLE-3 format (LlamaForCausalLMEagle3, `midlayer.*`).

python export.py --head DIR --out DIR
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from dims import Dims
from head import DraftHead
from safetensors.torch import load_file, save_file
from torch import Tensor


def head_config(dims: Dims) -> dict:
    """config.json; no aux layer ids, so the default rule (inputs of 2, n // 2, n - 3) holds."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": dims.hidden,
        "intermediate_size": dims.ffn,
        "num_hidden_layers": 1,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "head_dim": dims.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": dims.eps,
        "rope_theta": dims.theta,
        "rope_scaling": None,
        "max_position_embeddings": dims.max_position,
        "vocab_size": dims.vocab,
        "draft_vocab_size": dims.draft_vocab,
        "target_hidden_size": dims.hidden,
        "tie_word_embeddings": False,
        "bos_token_id": dims.bos,
        "eos_token_id": dims.eos,
        "torch_dtype": "bfloat16",
        "eagle_config": {"use_aux_hidden_state": True},
    }


def dims_of(config: dict) -> Dims:
    """Sizes of a head's target; the number of target layers is not in a head's config."""
    return Dims(
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        ffn=config["intermediate_size"],
        vocab=config["vocab_size"],
        draft_vocab=config["draft_vocab_size"],
        eps=config["rms_norm_eps"],
        theta=config["rope_theta"],
    )


def tensors(head: DraftHead, draft_ids: Tensor) -> dict[str, Tensor]:
    """bfloat16 weights, `d2t` (target id minus draft id) and `t2d` (is the id in the draft vocabulary)."""
    out = {name: value.detach().to(torch.bfloat16).cpu().contiguous() for name, value in head.named().items()}
    ids = draft_ids.cpu()
    out["d2t"] = ids - torch.arange(len(ids))
    out["t2d"] = torch.zeros(head.dims.vocab, dtype=torch.bool)
    out["t2d"][ids] = True
    return out


def save_head(head: DraftHead, draft_ids: Tensor, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "model.safetensors.part"
    save_file(tensors(head, draft_ids), str(part), metadata={"format": "pt"})
    part.replace(folder / "model.safetensors")  # a reader never sees half a file
    (folder / "config.json").write_text(json.dumps(head_config(head.dims), indent=1) + "\n")


def load_head(folder: Path, device: str) -> tuple[DraftHead, Tensor]:
    """The head in float32 and its draft vocabulary as target ids [draft_vocab]."""
    head = DraftHead(dims_of(json.loads((folder / "config.json").read_text())))
    loaded = load_file(str(folder / "model.safetensors"))
    with torch.no_grad():
        for name, parameter in head.named().items():
            parameter.copy_(loaded[name].float())
    draft_ids = loaded["d2t"] + torch.arange(head.dims.draft_vocab)
    return head.to(device), draft_ids.to(device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    save_head(*load_head(args.head, "cpu"), args.out)


if __name__ == "__main__":
    main()
