r"""Models that run through `transformers`: LLaDA, Dream, and masked language models such as BERT and ModernBERT.

One adapter makes them denoisers: the trunk runs once on the whole row, the output head on the positions that are
asked for and nowhere else. None of their authors' code is used: LLaDA is LLaMA's network and Dream is Qwen2's, both
without the causal mask, so `transformers`' own classes serve, and `trust_remote_code` is never set.

- **LLaDA** (mask 126336, end of text 126081) names its tensors as OLMo does; they are renamed on loading.
- **Dream** (mask 151666) was made from a left-to-right model and kept its habit: the distribution of position i is
  read at position i - 1 (position 0 at 0). Asking for position i therefore takes the hidden state at max(i - 1, 0).
- **Masked LMs** keep their own vocabulary and mask ([MASK], <mask>).

Weights are read from safetensors only, straight to the device and type that the user asks for (`device_map` needs the
package `accelerate`); no second copy is made.

Shapes: B rows, L positions, K positions asked for, D width, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relaylm.convert.tensors import (
    Found,
    Options,
    Shapes,
    _first_line,
    check,
    dtype_name,
    from_safetensors,
    read_json,
    weight_files,
    whole,
)
from relaylm.errors import UserError

LLADA_MASK, LLADA_EOS, DREAM_MASK = 126_336, 126_081, 151_666
# LLaDA's names inside a block, and LLaMA's.
LLADA_NAMES = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
# Stored beside a masked LM's weights and of no use to it: parts for other tasks, and buffers of older versions.
SPARE = re.compile(r"pooler\.|seq_relationship|position_ids|inv_freq|nsp|classifier|sop_classifier")


@dataclass(frozen=True)
class Shape:
    """What the family and the cost ask of a model; `matrices` counts the trunk's weights that meet every position."""

    vocab_size: int
    length: int
    width: int
    depth: int
    heads: int
    matrices: int


class Adapter:
    """A `transformers` model as a denoiser. `shifted` is Dream's habit of answering one position early."""

    time_conditioning = False

    def __init__(
        self, model: Any, mask_id: int, length: int, *, shifted: bool = False, bidirectional: bool = False
    ) -> None:
        config = model.config
        self.model, self.mask_id, self.shifted = model.eval().requires_grad_(False), mask_id, shifted
        self.trunk = model.base_model
        self._head = _head_of(model)
        embedding = model.get_input_embeddings().weight
        matrices = sum(
            value.numel()
            for name, value in self.trunk.named_parameters()
            if value.dim() == 2 and "embed" not in name and "pooler" not in name
        )
        heads = int(config.num_attention_heads)
        self.architecture = Shape(
            int(embedding.shape[0]), length, int(config.hidden_size), int(config.num_hidden_layers), heads, matrices
        )
        self._explicit_mask = False
        if bidirectional:
            self._make_bidirectional()

    @property
    def vocab_size(self) -> int:
        return self.architecture.vocab_size

    @property
    def depth(self) -> int:
        return self.architecture.depth

    @property
    def device(self) -> torch.device:
        """Where tokens go in and logits come out."""
        return self.model.get_input_embeddings().weight.device

    def parameters(self) -> Any:
        return self.model.parameters()

    def to(self, device: torch.device | str) -> Adapter:
        if getattr(self.model, "hf_device_map", None) is None:
            self.model.to(device)
        return self

    def flops(self, length: int, positions: int | None = None) -> float:
        a, k = self.architecture, length if positions is None else positions
        trunk = 2 * length * a.matrices + 4 * length**2 * a.width * a.depth
        return float(trunk + 2 * k * a.width * a.vocab_size)

    def logits(self, tokens_BL: Tensor, t_B: Tensor) -> Tensor:
        return self.head(self.hidden_at(tokens_BL, t_B, None))

    def logits_at(self, tokens_BL: Tensor, t_B: Tensor, positions_BK: Tensor) -> Tensor:
        return self.head(self.hidden_at(tokens_BL, t_B, positions_BK))

    def hidden_at(self, tokens_BL: Tensor, t_B: Tensor, positions_BK: Tensor | None) -> Tensor:
        """The trunk's output (B, K, D) from which the asked positions are answered."""
        x_BLD = self._run(tokens_BL)
        if positions_BK is None:
            if not self.shifted:
                return x_BLD
            positions_BK = torch.arange(tokens_BL.shape[1], device=x_BLD.device).expand(len(tokens_BL), -1)
        index = (positions_BK - 1).clamp(min=0) if self.shifted else positions_BK
        return x_BLD.gather(1, index.to(x_BLD.device)[..., None].expand(-1, -1, x_BLD.shape[-1]))

    def head(self, x_KD: Tensor, t_B: Tensor | None = None) -> Tensor:
        """Logits of any rows of the trunk's output, in float32 or wider; the matrix keeps its own type."""
        logits = self._head(x_KD).to(self.device)
        return logits if logits.dtype == torch.float64 else logits.float()

    def _run(self, tokens_BL: Tensor) -> Tensor:
        options: dict[str, Any] = {}
        if self._explicit_mask:
            length = tokens_BL.shape[1]
            options["attention_mask"] = torch.zeros(
                len(tokens_BL), 1, length, length, dtype=self.model.dtype, device=tokens_BL.device
            )
        if self.architecture.matrices and hasattr(self.model.config, "use_cache"):
            options["use_cache"] = False
        return self.trunk(input_ids=tokens_BL, **options)[0].to(tokens_BL.device)

    def _make_bidirectional(self) -> None:
        """Take the causal mask away: by the switch that this version of transformers has, else by a mask of zeros. That
        the first position sees the last token is checked, not assumed."""
        self.model.config.is_causal = self.trunk.config.is_causal = False
        for module in self.trunk.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = False
        if not self._sees_ahead():
            self._explicit_mask = True
            if not self._sees_ahead():
                raise UserError("this version of transformers cannot run the network without a causal mask")

    @torch.no_grad()
    def _sees_ahead(self) -> bool:
        tokens_BL = torch.tensor([[0, 1, 2], [0, 1, 3]], device=self.device)
        first_BD = self._run(tokens_BL)[:, 0]
        return not torch.equal(first_BD[0], first_BD[1])


def _head_of(model: Any) -> Callable[[Tensor], Tensor]:
    """What comes after the trunk. Each masked LM of transformers has one of these."""

    def on_its_device(*parts: Any) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            weights = next(iter(parts[-1].parameters()))
            x = x.to(weights.device)
            for part in parts:
                x = part(x)
            return x

        return run

    if hasattr(model, "lm_head"):  # LLaMA, Qwen2, RoBERTa, XLM-R
        return on_its_device(model.lm_head)
    if hasattr(model, "cls"):  # BERT, DeBERTa
        return on_its_device(model.cls)
    if hasattr(model, "head") and hasattr(model, "decoder"):  # ModernBERT
        return on_its_device(model.head, model.decoder)
    if hasattr(model, "vocab_projector"):  # DistilBERT
        return on_its_device(model.vocab_transform, model.activation, model.vocab_layer_norm, model.vocab_projector)
    raise UserError(f"relaylm does not know the output head of {type(model).__name__}")


# ------------------------------------------------------------------------------------------------------- recognising


def kind_of(config: dict[str, Any]) -> str | None:
    """llada, dream or masked-lm, from config.json."""
    model_type = str(config.get("model_type", "")).lower()
    if model_type in ("llada", "dream"):
        return model_type
    names = config.get("architectures")
    masked = isinstance(names, list) and any(str(name).endswith("ForMaskedLM") for name in names)
    return "masked-lm" if masked and model_type else None


def open_folder(folder: Path, name: str, options: Options, tokenizer_mask: int | None = None) -> Found:
    path = folder / "config.json"
    config = read_json(path)
    kind = kind_of(config)
    files = weight_files(folder)
    if not files:
        raise UserError(f"{folder} has no safetensors: weights that run through transformers are read from those alone")
    tensors = from_safetensors(files)
    if kind == "llada":
        ours, renamed = _llada_config(config, options, path)
        check(_without_tied(tensors, config.get("weight_tying")), llada_layout(ours), folder)
        stored = config.get("mask_token_id", LLADA_MASK)
    elif kind == "dream":
        ours, renamed = _dream_config(config, path), {}
        check(_without_tied(tensors, ours["tie_word_embeddings"]), dream_layout(ours), folder)
        stored = config.get("mask_token_id", DREAM_MASK)
    else:
        ours, renamed = _plain_config(config), {}
        stored = config.get("mask_token_id", tokenizer_mask)
    mask_id = stored if options.mask_id is None else options.mask_id
    if not isinstance(mask_id, int):
        raise UserError(f"{folder} does not say which token is the mask: give mask_id, or a tokenizer that has one")
    length = options.length or _length(ours, path)

    def make(device: torch.device, dtype: torch.dtype | None, fold: bool) -> Adapter:
        model = _load(folder, kind, ours, renamed, device, dtype, options.device_map)
        decoder = kind in ("llada", "dream")
        adapter = Adapter(model, int(mask_id), length, shifted=kind == "dream", bidirectional=decoder)
        if not decoder:
            _check_head(adapter, folder)
        return adapter

    return Found(
        format=kind or "masked-lm",
        name=name,
        vocab_size=whole(ours.get("vocab_size"), "vocab_size", path),
        mask_id=mask_id,
        length=length,
        depth=whole(ours.get("num_hidden_layers", ours.get("n_layers")), "num_hidden_layers", path),
        width=whole(ours.get("hidden_size", ours.get("dim")), "hidden_size", path),
        heads=whole(ours.get("num_attention_heads", ours.get("n_heads")), "num_attention_heads", path),
        parameters=sum(lazy.elements for key, lazy in tensors.items() if not SPARE.search(key)),
        bytes=sum(lazy.bytes for lazy in tensors.values()),
        dtype=dtype_name(tensors.values()),
        time_conditioning=False,
        storable=False,
        files=[*files, *sorted(p for p in folder.iterdir() if p.suffix in (".json", ".jinja", ".txt") and p.is_file())],
        build=make,
        meta={"eos_ids": eos_ids(folder, config)},
    )


def eos_ids(folder: Path, config: dict[str, Any]) -> list[int]:
    """The tokens that end a text: what the configurations say, and the end of a turn of chat."""
    found: list[int] = []
    generation = folder / "generation_config.json"
    for source in (config, read_json(generation) if generation.is_file() else {}):
        value = source.get("eos_token_id")
        found += [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)]
    path = folder / "tokenizer.json"
    added = read_json(path).get("added_tokens", []) if path.is_file() else []
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and token.get("content") in ("<|eot_id|>", "<|im_end|>"):
            found.append(int(token["id"]))
    return sorted(set(found))


def _length(config: dict[str, Any], where: Path) -> int:
    """RoBERTa's positions start after the padding token's, so two are lost."""
    most = whole(config.get("max_position_embeddings"), "max_position_embeddings", where)
    offset = ("roberta", "xlm-roberta", "camembert", "longformer", "esm")
    return most - 1 - int(config.get("pad_token_id", 1)) if config.get("model_type") in offset else most


def _llada_config(config: dict[str, Any], options: Options, where: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """LLaMA's configuration for LLaDA's; whatever the published models do not use is refused."""
    published: dict[str, Any] = {
        "block_type": "llama",
        "layer_norm_type": "rms",
        "activation_type": "silu",
        "rope": True,
    }
    off = ("alibi", "attention_layer_norm", "include_bias", "include_qkv_bias", "scale_logits", "input_emb_norm",
           "bias_for_layer_norm")  # fmt: skip
    published |= dict.fromkeys(off, False)
    for key, value in published.items():
        if config.get(key, value) not in (value, None):
            raise UserError(f"{where}: {key} is {config[key]!r}, but the LLaDA that relaylm knows has {value!r}")
    width, heads = whole(config.get("d_model"), "d_model", where), whole(config.get("n_heads"), "n_heads", where)
    hidden = config.get("mlp_hidden_size") or whole(config.get("mlp_ratio"), "mlp_ratio", where) * width
    ours = {
        "vocab_size": whole(config.get("embedding_size") or config.get("vocab_size"), "vocab_size", where),
        "hidden_size": width,
        "intermediate_size": whole(hidden, "mlp_hidden_size", where),
        "num_hidden_layers": whole(config.get("n_layers"), "n_layers", where),
        "num_attention_heads": heads,
        "num_key_value_heads": whole(config.get("n_kv_heads") or heads, "n_kv_heads", where),
        "max_position_embeddings": whole(config.get("max_sequence_length", 4096), "max_sequence_length", where),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-5)),
        "rope_theta": float(config.get("rope_theta", 10_000.0)),
        "tie_word_embeddings": bool(config.get("weight_tying", False)),
    }
    renamed = {
        r"^model\.transformer\.wte\.": "model.embed_tokens.",
        r"^model\.transformer\.ln_f\.": "model.norm.",
        r"^model\.transformer\.ff_out\.": "lm_head.",
    }
    for theirs, llama in LLADA_NAMES.items():
        renamed[rf"^model\.transformer\.blocks\.(\d+)\.{theirs}\."] = rf"model.layers.\1.{llama}."
    return ours, renamed


def llada_layout(config: dict[str, Any]) -> Shapes:
    """LLaDA's tensors by their published names, from LLaMA's configuration."""
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = d // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: Shapes = {"model.transformer.wte.weight": (v, d)}
    inside = {"attn_norm": (d,), "q_proj": (d, d), "k_proj": (kv, d), "v_proj": (kv, d), "attn_out": (d, d),
              "ff_norm": (d,), "ff_proj": (f, d), "up_proj": (f, d), "ff_out": (d, f)}  # fmt: skip
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.transformer.blocks.{i}.{key}.weight": shape for key, shape in inside.items()}
    shapes["model.transformer.ln_f.weight"] = (d,)
    return shapes if config["tie_word_embeddings"] else shapes | {"model.transformer.ff_out.weight": (v, d)}


def _dream_config(config: dict[str, Any], where: Path) -> dict[str, Any]:
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "max_position_embeddings")  # fmt: skip
    ours: dict[str, Any] = {key: whole(config.get(key), key, where) for key in keys}
    ours["num_key_value_heads"] = whole(
        config.get("num_key_value_heads", ours["num_attention_heads"]), "num_key_value_heads", where
    )
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
    """Dream's tensors, which are Qwen2's."""
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = d // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: Shapes = {"model.embed_tokens.weight": (v, d)}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        for key, rows in (("q_proj", d), ("k_proj", kv), ("v_proj", kv)):
            shapes |= {p + f"self_attn.{key}.weight": (rows, d), p + f"self_attn.{key}.bias": (rows,)}
        shapes |= {
            p + "self_attn.o_proj.weight": (d, d),
            p + "mlp.gate_proj.weight": (f, d),
            p + "mlp.up_proj.weight": (f, d),
            p + "mlp.down_proj.weight": (d, f),
            p + "input_layernorm.weight": (d,),
            p + "post_attention_layernorm.weight": (d,),
        }
    shapes["model.norm.weight"] = (d,)
    return shapes if config["tie_word_embeddings"] else shapes | {"lm_head.weight": (v, d)}


def _plain_config(config: dict[str, Any]) -> dict[str, Any]:
    """A masked LM's own configuration without what points at code or at where it came from."""
    drop = ("auto_map", "architectures", "_name_or_path", "transformers_version", "torch_dtype", "dtype")
    return {key: value for key, value in config.items() if key not in drop}


def _without_tied(tensors: dict[str, Any], tied: Any) -> dict[str, Any]:
    """Some writers store a tied output matrix all the same."""
    drop = ("lm_head.weight", "model.transformer.ff_out.weight") if tied else ()
    return {key: lazy for key, lazy in tensors.items() if key not in drop}


# ----------------------------------------------------------------------------------------------------------- loading


def _load(
    folder: Path,
    kind: str | None,
    config: dict[str, Any],
    renamed: dict[str, str],
    device: torch.device,
    dtype: torch.dtype | None,
    device_map: Any,
) -> Any:
    """The model, by transformers' own loader; a tensor it would have to make up is refused by name."""
    transformers = _transformers()
    from relaylm.members import DTYPES

    if dtype is not None:
        dtype = DTYPES[str(dtype).removeprefix("torch.")]
    recent = int(transformers.__version__.split(".")[0]) >= 5
    options: dict[str, Any] = {"dtype" if recent else "torch_dtype": dtype if dtype is not None else "auto"}
    if device_map is not None:
        options["device_map"] = device_map
    if renamed:
        options["key_mapping"] = renamed
    try:
        if kind == "llada":
            made, loader = transformers.LlamaConfig(**config), transformers.LlamaForCausalLM
        elif kind == "dream":
            made, loader = transformers.Qwen2Config(**config), transformers.Qwen2ForCausalLM
        else:
            made = transformers.AutoConfig.for_model(**config)
            loader = transformers.AutoModelForMaskedLM
        if kind in ("llada", "dream"):
            options["generation_config"] = transformers.GenerationConfig()
        model, report = loader.from_pretrained(
            str(folder),
            config=made,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, and refused below with the tensor's name
            **options,
        )
    except UserError:
        raise
    except Exception as error:  # transformers, safetensors and accelerate each have their own
        raise UserError(
            f"{folder} cannot be loaded by transformers ({type(error).__name__}: {_first_line(error)})"
        ) from None
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


@torch.no_grad()
def _check_head(adapter: Adapter, folder: Path) -> None:
    """Trunk and head together must be the model: a two-token row through both ways."""
    tokens_BL = torch.tensor([[0, adapter.mask_id]], device=adapter.device)
    expected = adapter.model(input_ids=tokens_BL)
    logits_BLV = expected.logits if hasattr(expected, "logits") else expected[0]
    ours_BLV = adapter.logits(tokens_BL, torch.ones(1))
    if not torch.allclose(ours_BLV, logits_BLV.to(ours_BLV), rtol=1e-2, atol=1e-2):
        name = type(adapter.model).__name__
        raise UserError(f"{folder}: {name} does more between trunk and logits than relaylm knows")


# -------------------------------------------------------------------------------------------------------------- chat


def chat_prompt(folder: str | Path, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """A conversation as the text that an instruction-tuned model was taught to continue.

    `messages` are {"role": "user", "content": "..."} in order; the template is the one in the tokenizer's folder
    (chat_template.jinja, or "chat_template" in tokenizer_config.json), rendered in jinja's sandbox."""
    folder = Path(folder).expanduser()
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    separate = folder / "chat_template.jinja"
    template = separate.read_text(encoding="utf-8") if separate.is_file() else config.get("chat_template")
    if isinstance(template, list):  # several named ones
        by_name = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = by_name.get("default")
    if not isinstance(template, str):
        raise UserError(
            f"{folder} has no chat template: its model was not tuned for conversations, or give the text itself"
        )
    import json

    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
    environment.globals["raise_exception"] = refuse
    special = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(key)
        special[key] = value.get("content", "") if isinstance(value, dict) else value or ""
    try:
        return environment.from_string(template).render(
            messages=messages, add_generation_prompt=add_generation_prompt, tools=None, **special
        )
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise UserError(f"the chat template in {folder} cannot render these messages ({_first_line(error)})") from None
