r"""Models that run through `transformers`: LLaDA, Dream, SDAR and relatives (`llama`), and masked LMs such as BERT.

Masked LMs keep their own vocabulary and mask ([MASK], <mask>). Weights are read from safetensors only, straight to the
device and type that the user asks for (`device_map` needs the package `accelerate`); no second copy is made.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from relaylm.convert import llama
from relaylm.convert.adapter import Adapter, Shape
from relaylm.convert.tensors import Found, Options, number
from relaylm.convert.weights import open_safetensors, weight_files
from relaylm.errors import UserError, reason
from relaylm.files import read_object
from relaylm.models.denoiser import check_tensors

# Stored beside a masked LM's weights and of no use to it: parts for other tasks, and buffers of older versions.
SPARE = re.compile(r"pooler\.|seq_relationship|position_ids|inv_freq|nsp|classifier|sop_classifier")
# A masked LM's configuration without what points at code or at where it came from.
DROPPED = ("auto_map", "architectures", "_name_or_path", "transformers_version", "torch_dtype", "dtype")
TIED = ("lm_head.weight", "model.transformer.ff_out.weight")  # stored by some writers though it is the embedding
FORMATS = (*dict.fromkeys(kind.format for kind in llama.KINDS.values()), "masked-lm")
TURN_ENDS = ("<|eot_id|>", "<|im_end|>")
OFFSET = ("roberta", "xlm-roberta", "camembert", "longformer", "esm")  # positions start after the padding token's


def kind_of(config: dict[str, Any]) -> str | None:
    """The format of a config.json: one of `llama.KINDS`, or masked-lm."""
    model_type = str(config.get("model_type", "")).lower()
    if model_type in llama.KINDS:
        return llama.KINDS[model_type].format
    names = config.get("architectures")
    masked = isinstance(names, list) and any(str(name).endswith("ForMaskedLM") for name in names)
    return "masked-lm" if masked and model_type else None


def open_folder(folder: Path, name: str, options: Options, tokenizer_mask: int | None = None) -> Found:
    """A Hugging Face folder: config.json and safetensors."""
    path = folder / "config.json"
    stored = read_object(path)
    kind = llama.KINDS.get(str(stored.get("model_type", "")).lower())
    files = weight_files(folder)
    if not files:
        raise UserError(f"{folder} has no safetensors: weights that run through transformers are read from those alone")
    tensors = open_safetensors(files)
    mask_id, block = tokenizer_mask, 0
    missing: list[str] = []
    if kind is None:
        config = {key: value for key, value in stored.items() if key not in DROPPED}
    else:
        config = llama.config_of(kind, stored, path)
        mask_id = kind.mask if config["vocab_size"] in kind.vocabularies else tokenizer_mask
        block, missing = llama.block_length(kind, stored, name, options)
        tied = TIED if config["tie_word_embeddings"] else ()
        expected = llama.layout(kind, config)
        check_tensors({key: lazy for key, lazy in tensors.items() if key not in tied}, expected, folder)
    mask_id = stored.get("mask_token_id", mask_id) if options.mask_id is None else options.mask_id
    if not isinstance(mask_id, int):
        raise UserError(f"{folder} does not say which token is the mask: give mask_id, or a tokenizer that has one")
    length = options.length
    if not length:
        length = number(config, "max_position_embeddings", path)
        length -= 1 + int(config.get("pad_token_id", 1)) if config.get("model_type") in OFFSET else 0
    if block and (length := length - length % block) == 0:
        raise UserError(f"{folder} writes blocks of {block} positions: the length must be at least one of them")

    shape = Shape(
        number(config, "vocab_size", path),
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


def _either(config: dict[str, Any], key: str, other: str, where: Path) -> int:
    """A number that some masked LMs (DistilBERT) keep under another name."""
    return number(config, other if key not in config and other in config else key, where)


def _eos_ids(folder: Path, config: dict[str, Any]) -> list[int]:
    """The tokens that end a text: those of the configurations, and the end of a turn of chat."""
    found: list[int] = []
    generation, tokenizer, more = (
        folder / name for name in ("generation_config.json", "tokenizer.json", "added_tokens.json")
    )
    for source in (config, read_object(generation) if generation.is_file() else {}):
        value = source.get("eos_token_id")
        found += [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)]
    added = read_object(tokenizer).get("added_tokens", []) if tokenizer.is_file() else []
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and token.get("content") in TURN_ENDS:
            found.append(int(token["id"]))
    named = read_object(more) if more.is_file() else {}  # of tokenizers without a tokenizer.json (Dream)
    found += [named[token] for token in TURN_ENDS if isinstance(named.get(token), int)]
    return sorted(set(found))


def _load(
    folder: Path,
    kind: llama.Kind | None,
    config: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype | None,
    device_map: Any,
) -> Any:
    """The model, by transformers' own loader; a tensor it would have to make up is refused by name."""
    transformers = _transformers()
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
            options |= {"key_mapping": llama.RENAMED} if kind.format == "llada" else {}
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


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UserError("models of this format run through transformers: `pip install transformers`") from None
    return transformers
