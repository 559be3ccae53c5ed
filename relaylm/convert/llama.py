r"""Networks of LLaMA's kind without the causal mask, by `transformers`' own classes: LLaDA, Dream, SDAR and relatives.

- **LLaDA** (1.0, 1.5, iLLaDA) is LLaMA and names its tensors as OLMo does; they are renamed on loading.
- **Dream** (Dream-Coder, DiffuCoder) is Qwen2, made from a left-to-right model, and answers one position early: the
  distribution of position i is read at position i - 1 (position 0 at 0).
- **SDAR** (TraDo) is Qwen3 in blocks of positions: block diffusion, each block seeing itself and those before it.
- **Fast-dLLM v2** is Qwen2 in blocks and answers one position early: the first position of a block is read at the last
  of the block before, which is finished then.
- **A2D** (dllm's Tiny-A2D) is Qwen2 or Qwen3, whole rows or blocks; which, the configuration does not say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relaylm.convert.tensors import Options, Shapes, number
from relaylm.errors import UserError


@dataclass(frozen=True)
class Kind:
    """A published kind of network: its format, the classes of `transformers` that compute it, and what its
    configuration leaves open. The mask is known for the published vocabularies alone."""

    format: str
    network: str  # Llama, Qwen2 or Qwen3
    mask: int = -1
    vocabularies: tuple[int, ...] = ()
    shifted: bool = False
    block_key: str = ""
    block: int = 0  # positions of a block, where the configuration does not say; 0: whole rows


# By the `model_type` of config.json, in lower case.
KINDS = {
    "llada": Kind("llada", "Llama", 126_336, (126_464,)),
    "dream": Kind("dream", "Qwen2", 151_666, (152_064,), shifted=True),
    "sdar": Kind("sdar", "Qwen3", 151_669, (151_936,), block_key="block_size", block=4),
    "fast_dllm_qwen": Kind("fast-dllm", "Qwen2", 151_665, (151_936, 152_064), True, "bd_size", 32),
    "a2d-qwen2": Kind("a2d", "Qwen2"),
    "a2d-qwen3": Kind("a2d", "Qwen3"),
}
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


def config_of(kind: Kind, config: dict[str, Any], where: Path) -> dict[str, Any]:
    """The configuration for transformers' class; whatever the published models do not use is refused."""
    return _llada_config(config, where) if kind.format == "llada" else _qwen_config(kind, config, where)


def _llada_config(config: dict[str, Any], where: Path) -> dict[str, Any]:
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


def _qwen_config(kind: Kind, config: dict[str, Any], where: Path) -> dict[str, Any]:
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "max_position_embeddings")  # fmt: skip
    ours: dict[str, Any] = {key: number(config, key, where) for key in keys}
    ours["num_key_value_heads"] = number(config, "num_key_value_heads", where, ours["num_attention_heads"])
    rope = config.get("rope_parameters") or {}
    scaled = config.get("rope_scaling") or rope.get("rope_type", "default") != "default"
    for key, found in (("use_sliding_window", config.get("use_sliding_window")), ("scaled rotary positions", scaled)):
        if found:
            raise UserError(f"{where}: {key} is not part of the {kind.format} that relaylm knows")
    if kind.network == "Qwen3":
        ours["head_dim"] = number(config, "head_dim", where, ours["hidden_size"] // ours["num_attention_heads"])
        if config.get("attention_bias"):
            raise UserError(f"{where}: attention_bias is not part of the {kind.format} that relaylm knows")
    return ours | {
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope_theta": float(config.get("rope_theta") or rope.get("rope_theta", 10_000.0)),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def block_length(kind: Kind, config: dict[str, Any], name: str, options: Options) -> tuple[int, list[str]]:
    """Positions of a block, 0 for whole rows, and what had to be assumed: what the user says, else the configuration,
    else the end of the name (SDAR-1.7B-Chat-b32), else what is published."""
    if options.block_length is not None:
        return options.block_length, []
    if kind.format == "a2d" and "bd3lm" in name.lower():
        raise UserError(f"{name} does not say how long its blocks of positions are: give block_length (published: 32)")
    if isinstance(stored := config.get(kind.block_key), int) and stored > 0:
        return stored, []
    if kind.block and (found := re.search(r"-b(\d+)(?![\w.])", name)) and int(found[1]):
        return int(found[1]), []
    missing = [f"the length of its blocks: {kind.block} is assumed, as published; give block_length if not"]
    return kind.block, missing if kind.block else []


def layout(kind: Kind, config: dict[str, Any]) -> Shapes:
    """Names and shapes of the tensors as published, from the configuration for transformers."""
    shapes = _layout(kind.network, config)
    if kind.format != "llada":
        return shapes
    published: Shapes = {}
    for name, shape in shapes.items():
        stem = name.removesuffix(".weight")
        _, _, block, inner = stem.split(".", 3) if stem.startswith("model.layers.") else ("", "", "", "")
        theirs = f"blocks.{block}.{INNER[inner]}" if inner else OUTER[stem]
        published[f"model.transformer.{theirs}.weight"] = shape
    return published


def _layout(network: str, config: dict[str, Any]) -> Shapes:
    """LLaMA's tensors; Qwen2 has biases on queries, keys and values, Qwen3 norms of queries and keys."""
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = config.get("head_dim") or d // config["num_attention_heads"]
    q, kv = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    inside = (d,), (q, d), (kv, d), (kv, d), (d, q), (d,), (f, d), (f, d), (d, f)
    inner: Shapes = {f"{key}.weight": shape for key, shape in zip(INNER, inside, strict=True)}
    if network == "Qwen2":
        inner |= {f"{key}.bias": inner[f"{key}.weight"][:1] for key in list(INNER)[1:4]}
    if network == "Qwen3":
        inner |= {f"self_attn.{key}_norm.weight": (head,) for key in "qk"}
    shapes: Shapes = {"model.embed_tokens.weight": (v, d)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{key}": shape for key, shape in inner.items()}
    shapes["model.norm.weight"] = (d,)
    return shapes if config["tie_word_embeddings"] else shapes | {"lm_head.weight": (v, d)}
