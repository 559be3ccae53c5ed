r"""LLaDA and Dream: LLaMA's and Qwen2's networks without the causal mask, by `transformers`' own classes.

- **LLaDA** (mask 126336) names its tensors as OLMo does; they are renamed on loading.
- **Dream** (mask 151666) was made from a left-to-right model and answers one position early: the distribution of
  position i is read at position i - 1 (position 0 at 0).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relaylm.convert.tensors import Shapes, number
from relaylm.errors import UserError

LLADA_MASK, DREAM_MASK = 126_336, 151_666
# LLaMA's names and LLaDA's, outside and inside the blocks.
OUTER = {"model.embed_tokens": "wte", "model.norm": "ln_f", "lm_head": "ff_out"}
INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "post_attention_layernorm": "ff_norm",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}
# LLaDA's tensors as transformers is to rename them.
RENAMED = {rf"^model\.transformer\.{theirs}\.": f"{llama}." for llama, theirs in OUTER.items()} | {
    rf"^model\.transformer\.blocks\.(\d+)\.{theirs}\.": rf"model.layers.\1.{llama}." for llama, theirs in INNER.items()
}
# What the published LLaDA uses, or does without.
PUBLISHED: dict[str, Any] = {"block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu", "rope": True}
PUBLISHED |= dict.fromkeys(
    ("alibi", "attention_layer_norm", "include_bias", "include_qkv_bias", "scale_logits", "input_emb_norm",
     "bias_for_layer_norm"), False
)  # fmt: skip


def llada_config(config: dict[str, Any], where: Path) -> dict[str, Any]:
    """LLaMA's configuration for LLaDA's; whatever the published models do not use is refused."""
    for key, value in PUBLISHED.items():
        if config.get(key, value) not in (value, None):
            raise UserError(f"{where}: {key} is {config[key]!r}, but the LLaDA that relaylm knows has {value!r}")
    width, heads = number(config, "d_model", where), number(config, "n_heads", where)
    if config.get("mlp_hidden_size"):
        hidden = number(config, "mlp_hidden_size", where)
    else:
        hidden = number(config, "mlp_ratio", where) * width
    return {
        "vocab_size": number(config, "embedding_size" if config.get("embedding_size") else "vocab_size", where),
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": number(config, "n_layers", where),
        "num_attention_heads": heads,
        "num_key_value_heads": number(config, "n_kv_heads", where) if config.get("n_kv_heads") else heads,
        "max_position_embeddings": number(config, "max_sequence_length", where, 4096),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-5)),
        "rope_theta": float(config.get("rope_theta", 10_000.0)),
        "tie_word_embeddings": bool(config.get("weight_tying", False)),
    }


def dream_config(config: dict[str, Any], where: Path) -> dict[str, Any]:
    """Qwen2's configuration for Dream's, which has the same keys."""
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "max_position_embeddings")  # fmt: skip
    ours: dict[str, Any] = {key: number(config, key, where) for key in keys}
    ours["num_key_value_heads"] = number(config, "num_key_value_heads", where, ours["num_attention_heads"])
    if config.get("use_sliding_window") or config.get("rope_scaling"):
        raise UserError(
            f"{where}: sliding windows and scaled rotary positions are not part of the Dream that relaylm knows"
        )
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta", 10_000.0)
    return ours | {
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope_theta": float(theta),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def dream_layout(config: dict[str, Any]) -> Shapes:
    """Dream's tensors, which are Qwen2's: LLaMA's, with biases on queries, keys and values."""
    return _layout(config, biases=True)


def llada_layout(config: dict[str, Any]) -> Shapes:
    """LLaDA's tensors by their published names, from LLaMA's configuration."""
    shapes: Shapes = {}
    for name, shape in _layout(config, biases=False).items():
        stem = name.removesuffix(".weight")
        _, _, block, inner = stem.split(".", 3) if stem.startswith("model.layers.") else ("", "", "", "")
        published = f"blocks.{block}.{INNER[inner]}" if inner else OUTER[stem]
        shapes[f"model.transformer.{published}.weight"] = shape
    return shapes


def _layout(config: dict[str, Any], biases: bool) -> Shapes:
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = d // config["num_attention_heads"] * config["num_key_value_heads"]
    inside = (d,), (d, d), (kv, d), (kv, d), (d, d), (d,), (f, d), (f, d), (d, f)
    inner: Shapes = dict(zip(INNER, inside, strict=True))
    shapes: Shapes = {"model.embed_tokens.weight": (v, d)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{key}.weight": shape for key, shape in inner.items()}
        if biases:
            shapes |= {f"model.layers.{i}.{key}.bias": inner[key][:1] for key in list(INNER)[1:4]}
    shapes["model.norm.weight"] = (d,)
    return shapes if config["tie_word_embeddings"] else shapes | {"lm_head.weight": (v, d)}
