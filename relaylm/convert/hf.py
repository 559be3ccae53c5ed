r"""Models that run through `transformers`' own classes: LLaDA, Dream, SDAR and relatives, and masked LMs such as BERT.

- **LLaDA** (1.0, 1.5, iLLaDA) is LLaMA and names its tensors as OLMo does; they are renamed on loading.
- **Dream** (Dream-Coder, DiffuCoder) is Qwen2, made from a left-to-right model, and answers one position early: the
  distribution of position i is read at position i - 1 (position 0 at 0).
- **SDAR** (TraDo) is Qwen3 in blocks of positions: block diffusion, each block seeing itself and those before it.
- **Fast-dLLM v2** is Qwen2 in blocks and answers one position early: the first position of a block is read at the last
  of the block before, which is finished then.
- **A2D** (dllm's Tiny-A2D) is Qwen2 or Qwen3, whole rows or blocks; which, the configuration does not say.
- **Masked LMs** keep their own vocabulary and mask ([MASK], <mask>).

Weights are read from safetensors only, straight to the device and type that the user asks for (`device_map` needs the
package `accelerate`); no second copy is made.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from relaylm.convert.adapter import Adapter, Shape
from relaylm.convert.tensors import Found, Options, Shapes, number, open_safetensors, real, weight_files
from relaylm.errors import UserError, reason
from relaylm.files import read_object
from relaylm.models.denoiser import check_floats, check_tensors


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
FORMATS = (*dict.fromkeys(kind.format for kind in KINDS.values()), "masked-lm")
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
PUBLISHED["clip_qkv"] = None

# Stored beside a masked LM's weights and of no use to it: parts for other tasks, and buffers of older versions.
SPARE = re.compile(r"pooler\.|seq_relationship|position_ids|inv_freq|nsp|classifier|sop_classifier")
# A masked LM's configuration without what points at code or at where it came from.
DROPPED = ("auto_map", "architectures", "_name_or_path", "transformers_version", "torch_dtype", "dtype")
TIED = ("lm_head.weight", "model.transformer.ff_out.weight")  # stored by some writers though it is the embedding
TURN_ENDS = ("<|eot_id|>", "<|im_end|>")
# Positions of these start after the padding token's.
OFFSET = ("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod", "camembert", "data2vec-text",
          "ibert", "longformer", "luke", "mpnet", "esm")  # fmt: skip


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
        "rms_norm_eps": real(config, "rms_norm_eps", where, 1e-5),
        "rope_theta": real(config, "rope_theta", where, 10_000.0),
        "tie_word_embeddings": bool(config.get("weight_tying", False)),
    }


def _qwen_config(kind: Kind, config: dict[str, Any], where: Path) -> dict[str, Any]:
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "max_position_embeddings")  # fmt: skip
    ours: dict[str, Any] = {key: number(config, key, where) for key in keys}
    ours["num_key_value_heads"] = number(config, "num_key_value_heads", where, ours["num_attention_heads"])
    rope = config["rope_parameters"] if isinstance(config.get("rope_parameters"), dict) else {}
    scaled = _scaled(config.get("rope_scaling")) or _scaled(rope)
    other = config.get("hidden_act", "silu") != "silu"
    unknown = {"use_sliding_window": config.get("use_sliding_window"), "scaled rotary positions": scaled}
    for key, there in (unknown | {"another hidden_act than silu": other}).items():
        if there:
            raise UserError(f"{where}: {key} is not part of the {kind.format} that relaylm knows")
    if kind.network == "Qwen3":
        ours["head_dim"] = number(config, "head_dim", where, ours["hidden_size"] // ours["num_attention_heads"])
        if config.get("attention_bias"):
            raise UserError(f"{where}: attention_bias is not part of the {kind.format} that relaylm knows")
    return ours | {
        "rms_norm_eps": real(config, "rms_norm_eps", where, 1e-6),
        "rope_theta": real(config if config.get("rope_theta") else rope, "rope_theta", where, 10_000.0),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def _scaled(rope: Any) -> bool:
    """Does a description of rotary positions ask for more than the plain ones?"""
    if not isinstance(rope, dict):
        return bool(rope)
    return "factor" in rope or rope.get("rope_type", rope.get("type", "default")) != "default"


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


def kind_of(config: dict[str, Any]) -> str | None:
    """The format of a config.json: one of `KINDS`, or masked-lm."""
    model_type = str(config.get("model_type", "")).lower()
    if model_type in KINDS:
        return KINDS[model_type].format
    names = config.get("architectures")
    masked = isinstance(names, list) and any(str(name).endswith("ForMaskedLM") for name in names)
    return "masked-lm" if masked and model_type else None


def open_folder(folder: Path, name: str, options: Options, tokenizer_mask: int | None = None) -> Found:
    """A Hugging Face folder: config.json and safetensors."""
    path = folder / "config.json"
    stored = read_object(path)
    kind = KINDS.get(str(stored.get("model_type", "")).lower())
    files = weight_files(folder)
    if not files:
        raise UserError(f"{folder} has no safetensors: weights that run through transformers are read from those alone")
    tensors = open_safetensors(files)
    mask_id, block = tokenizer_mask, 0
    missing: list[str] = []
    if kind is None:
        config = {key: value for key, value in stored.items() if key not in DROPPED}
        check_floats({key: lazy for key, lazy in tensors.items() if not SPARE.search(key)}, folder)
    else:
        config = _llada_config(stored, path) if kind.format == "llada" else _qwen_config(kind, stored, path)
        mask_id = kind.mask if config["vocab_size"] in kind.vocabularies else tokenizer_mask
        block, missing = block_length(kind, stored, name, options)
        tied = TIED if config["tie_word_embeddings"] else ()
        expected = layout(kind, config)
        check_tensors({key: lazy for key, lazy in tensors.items() if key not in tied}, expected, folder)
    for said in (stored.get("mask_token_id"), options.mask_id):
        mask_id = mask_id if said is None else said
    if not isinstance(mask_id, int):
        how = "give mask_id (relaylm convert --mask-id), or a tokenizer that has one"
        raise UserError(f"{folder} does not say which token is the mask: {how}")
    vocab_size = number(config, "vocab_size", path)
    if not 0 <= mask_id < vocab_size:
        raise UserError(f"{folder}: mask_id must lie in 0..{vocab_size - 1}, not {mask_id}")
    length = options.length or _longest(config, path)
    if kind is None and length > _longest(config, path):
        raise UserError(f"{folder} has positions for a length of {_longest(config, path)}, not of {length}")
    if block and (length := length - length % block) == 0:
        raise UserError(f"{folder} writes blocks of {block} positions: the length must be at least one of them")

    shape = Shape(
        vocab_size,
        mask_id,
        length,
        _either(config, "hidden_size", "dim", path),
        _either(config, "num_hidden_layers", "n_layers", path),
        _either(config, "num_attention_heads", "n_heads", path),
        block,
    )

    def make(device: torch.device, dtype: torch.dtype | None, fold: bool) -> Adapter:
        model = _load(folder, kind, config, device, dtype, options.device_map)
        if kind is not None:
            return Adapter(model, shape, shifted=kind.shifted, bidirectional=True)
        adapter = Adapter(model, shape)
        adapter.check_head(folder)
        return adapter

    return Found(
        format="masked-lm" if kind is None else kind.format,
        name=name,
        shape=shape,
        parameters=sum(lazy.elements for key, lazy in tensors.items() if not SPARE.search(key)),
        tensors=tensors,
        build=make,
        files=[*files, *sorted(p for p in folder.iterdir() if p.suffix in (".json", ".jinja", ".txt") and p.is_file())],
        missing=missing,
        meta={"eos_ids": _eos_ids(folder, stored)},
    )


def _longest(config: dict[str, Any], where: Path) -> int:
    """How long a row may be: as many positions as there are, less those that stand for padding."""
    positions = number(config, "max_position_embeddings", where)
    padding = config.get("pad_token_id", 1)
    return positions - (1 + padding if config.get("model_type") in OFFSET and isinstance(padding, int) else 0)


def _either(config: dict[str, Any], key: str, other: str, where: Path) -> int:
    """A number that some masked LMs (DistilBERT) keep under another name."""
    return number(config, other if key not in config and other in config else key, where)


def _eos_ids(folder: Path, config: dict[str, Any]) -> list[int]:
    """The tokens that end a text: those of the configurations, and the end of a turn of chat."""

    def stored(name: str) -> dict[str, Any]:
        return read_object(folder / name) if (folder / name).is_file() else {}

    found: list[int] = []
    for source in (config, stored("generation_config.json")):
        value = source.get("eos_token_id")
        found += [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)]
    added = stored("tokenizer.json").get("added_tokens", [])
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and token.get("content") in TURN_ENDS:
            found.append(int(token["id"]))
    named = stored("added_tokens.json")  # of tokenizers without a tokenizer.json (Dream)
    found += [named[token] for token in TURN_ENDS if isinstance(named.get(token), int)]
    return sorted(set(found))


def _load(
    folder: Path,
    kind: Kind | None,
    config: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype | None,
    device_map: Any,
) -> Any:
    """The model, by transformers' own loader; a tensor it would have to make up is refused by name."""
    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        raise UserError("models of this format run through transformers: `pip install transformers`") from None
    recent = int(transformers.__version__.split(".")[0]) >= 5
    options: dict[str, Any] = {"dtype" if recent else "torch_dtype": dtype if dtype is not None else "auto"}
    if device_map is not None:
        options["device_map"] = device_map
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        if kind is None:
            made, loader = transformers.AutoConfig.for_model(**config), transformers.AutoModelForMaskedLM
        else:
            made = getattr(transformers, f"{kind.network}Config")(**config)
            loader = getattr(transformers, f"{kind.network}ForCausalLM")
            options["generation_config"] = transformers.GenerationConfig()
            options |= {"key_mapping": RENAMED} if kind.format == "llada" else {}
        model, report = loader.from_pretrained(
            str(folder),
            config=made,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, and refused below with the tensor's name
            **options,
        )
    except Exception as error:  # transformers, safetensors and accelerate each have their own
        raise UserError(
            f"{folder} cannot be loaded by transformers ({type(error).__name__}: {reason(error)})"
        ) from None
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()
    for key in sorted(map(str, report["missing_keys"])):
        raise UserError(f"{folder}: tensor {key} is missing")
    for key in sorted(map(str, report["mismatched_keys"])):
        raise UserError(f"{folder}: tensor {key} has another shape than the configuration asks for")
    unexpected = sorted(str(key) for key in report["unexpected_keys"] if not SPARE.search(str(key)))
    if unexpected:
        raise UserError(f"{folder}: tensor {unexpected[0]} does not belong to this model ({len(unexpected)} such)")
    return model if device_map is not None else model.to(device)
