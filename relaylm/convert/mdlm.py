r"""MDLM's layout and its relatives: mdlm-owt, BD3-LM, and Lightning checkpoints of MDLM, ReMDM and Duo's repository.

relaylm's own network is MDLM's, so its tensors need no change, only a check: with prefix `backbone.`

    vocab_embed.embedding (V, d)    sigma_map.mlp.{0,2}    blocks.{i}.{norm1, attn_qkv, attn_out, norm2, mlp.{0,2},
    adaLN_modulation}    output_layer.{norm_final, linear, adaLN_modulation}    rotary_emb.inv_freq (a buffer)

Without time conditioning the published code calls the network with sigma = 0 at every step, so adaLN is a constant
and is folded into the weights on loading (`Transformer.fold`).

A Lightning checkpoint holds the raw weights by name and their moving average, which is what the authors sample from,
by position: the n-th of `ema.shadow_params` belongs to the n-th parameter in the order above. It is read without
unpickling (`pickles`). Its configuration is a pickled object; what it says of length and time conditioning is looked
up in the inert data that the object would have been made from.

BD3-LM is the same network in blocks of positions, each of which sees itself and what precedes it
(`Architecture.block_length`). With one block as long as the sequence ("1024-pretrain") it is MDLM exactly.

`export` is the way back: a family's networks in this layout, so that MDLM's own code computes the same function.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from relaylm.convert import pickles
from relaylm.convert.pickles import Lazy
from relaylm.convert.tensors import Found, Options, blocks_of, count, number, open_weights, shape_of
from relaylm.errors import UserError
from relaylm.files import expand, read_object, write_folder, write_json
from relaylm.models.denoiser import Architecture, Transformer, build, check_tensors, expected_shapes
from relaylm.models.family import Family, pick_dtype
from relaylm.models.folder import front_matter, place
from relaylm.models.tokenizer import portable_json

PREFIXES = ("backbone._orig_mod.", "backbone.", "_orig_mod.", "")  # of the wrapper, and of torch.compile
INV_FREQ = "rotary_emb.inv_freq"
EXTRA = ("sampling_eps_min", "sampling_eps_max")  # BD3-LM's record of the noise levels it was trained on
# The mask by the size of the vocabulary: GPT-2's tokenizer has none and gets one at its end; bert-base-uncased (MDLM's
# LM1B models) and the tokenizer that MDLM's repository has for text8 have their own.
MASKS = {50_258: 50_257, 30_522: 103, 35: 4}


def open_folder(folder: Path, name: str, options: Options) -> Found:
    """mdlm-owt and BD3-LM as they lie on the hub: config.json and safetensors."""
    path = folder / "config.json"
    config = read_object(path)
    kind = str(config.get("model_type"))
    length = options.length or number(config, "model_length", path, 1024)
    meta: dict[str, Any] = {}
    block = 0
    if kind == "bd3lm":
        if config.get("cross_attn", True):  # without it the published code attends everywhere
            block = number(config, "block_size", path, 1)
        if config.get("causal"):
            raise UserError(f"{folder} is a left-to-right model (causal): it is not a denoiser")
        meta = {key: config[key] for key in EXTRA if isinstance(config.get(key), int | float)}
    block = block if options.block_length is None else options.block_length
    length, block = (length, 0) if block >= length or not block else (length - length % block, block)
    adaln = bool(config.get("adaln", True))
    timed = config.get("time_conditioning") if options.time_conditioning is None else options.time_conditioning
    architecture = Architecture(
        vocab_size=number(config, "vocab_size", path),
        length=length,
        width=number(config, "hidden_dim", path),
        depth=number(config, "n_blocks", path),
        heads=options.heads or number(config, "n_heads", path),
        mask_id=_mask_id(config.get("vocab_size"), config.get("mask_token_id"), options),
        adaln=adaln,
        time_conditioning=bool(timed) and adaln,
        cond_dim=number(config, "cond_dim", path, 128) if adaln else 128,
        block_length=block,
    )
    tensors, files = open_weights(folder)
    return found(kind, name, architecture, *_strip(tensors, folder), folder, files, meta)


def open_file(path: Path, name: str, options: Options) -> Found:
    """MDLM's tensors in one file without a configuration."""
    tensors, prefix = _strip(open_weights(path)[0], path)
    if not prefix and options.time_conditioning is None:
        raise UserError(
            f"{path} names its tensors as SEDD does but has no config.json beside it: give the folder with both, or "
            f"say time_conditioning"
        )
    architecture, missing = _from_shapes(tensors, None, options, path)
    return found("mdlm", name, architecture, tensors, prefix, path, [path], {}, missing)


def open_checkpoint(path: Path, name: str, options: Options) -> Found:
    """A Lightning .ckpt: raw weights by name, their moving average by position."""
    data = pickles.read(path)
    if not isinstance(data, dict) or not isinstance(data.get("state_dict"), dict):
        raise UserError(f"{path} is not a Lightning checkpoint: it has no state_dict")
    config = _dig(data.get("hyper_parameters"), "config")
    algorithm = _dig(config, "algo", "name") or _dig(config, "parameterization")
    if algorithm in ("ar", "duo", "duo_base", "udlm", "distillation"):
        words = "a left-to-right model" if algorithm == "ar" else "uniform-state diffusion, which has no mask"
        raise UserError(f"{path} holds {words} ({algorithm}): relaylm schedules masked diffusion models")
    stored = {str(key): value for key, value in data["state_dict"].items()}
    tensors, prefix = _strip({key: value for key, value in stored.items() if key.startswith("backbone.")}, path)
    architecture, missing = _from_shapes(tensors, config, options, path)
    raw = found("lightning", name, architecture, tensors, prefix, path, [path], {"weights": "raw"}, missing)
    if not options.ema:
        return raw
    shadow = _dig(data.get("ema"), "shadow_params")
    if shadow is None:
        raw.missing.append("averaged weights (ema): the raw ones are used")
        return raw
    names = [*expected_shapes(architecture), *(key for key in stored if key.startswith("noise."))]
    if not isinstance(shadow, list) or len(shadow) != len(names):
        size = len(shadow) if isinstance(shadow, list) else 0
        raise UserError(f"{path}: ema.shadow_params has {size} tensors, expected {len(names)}, one per parameter")
    averaged = {key: value for key, value in zip(names, shadow, strict=True) if not key.startswith("noise.")}
    where = f"{path}, ema.shadow_params"
    return found("lightning", name, architecture, averaged, "", where, [path], {"weights": "ema"}, missing)


def found(
    kind: str,
    name: str,
    architecture: Architecture,
    tensors: Mapping[str, Any],
    prefix: str,
    where: object,
    files: list[Path],
    meta: dict[str, Any],
    missing: list[str] | None = None,
) -> Found:
    """Check the tensors (names without prefix; errors give them with it). `build` makes the network."""
    _check_frequencies(tensors, architecture, where)
    expected = expected_shapes(architecture)
    needed = {prefix + key: value for key, value in tensors.items() if key not in (INV_FREQ, *EXTRA)}
    check_tensors(needed, {prefix + key: shape for key, shape in expected.items()}, where)
    own: dict[str, Lazy] = {key: tensors[key] for key in expected}

    def make(device: torch.device, dtype: torch.dtype | None, fold: bool) -> Transformer:
        chosen = pick_dtype(dtype, device)
        wide = torch.float64 if chosen == torch.float64 else torch.float32
        model = build(architecture, {key: lazy.read().to(wide) for key, lazy in own.items()})
        if fold and architecture.adaln and not architecture.time_conditioning:
            model = model.fold()
        return place(model, device, chosen)

    return Found(
        format=kind,
        name=name,
        shape=architecture,
        parameters=count(expected),
        tensors=own,
        build=make,
        storable=True,
        files=files,
        missing=missing or [],
        meta=meta,
    )


def frequencies(architecture: Architecture) -> torch.Tensor:
    """The rotary frequencies that published files store as a buffer, float64."""
    half = architecture.width // architecture.heads // 2
    return 10_000 ** (-torch.arange(half, dtype=torch.float64) / half)


def _check_frequencies(tensors: Mapping[str, Any], architecture: Architecture, where: object) -> None:
    """The rotary buffer, where it is stored, must be the one that the network computes."""
    lazy, expected = tensors.get(INV_FREQ), frequencies(architecture)
    if lazy is None:
        return
    if not isinstance(lazy, Lazy) or lazy.shape != expected.shape:
        shape, wanted = getattr(lazy, "shape", None), tuple(expected.shape)
        raise UserError(f"{where}: tensor {INV_FREQ} has shape {shape}, expected {wanted} for its heads")
    if not torch.allclose(lazy.read().double(), expected, rtol=1e-2):
        raise UserError(f"{where}: tensor {INV_FREQ} does not hold the frequencies 10000^(-2k/{2 * len(expected)})")


def _strip(tensors: Mapping[str, Any], where: Path) -> tuple[dict[str, Any], str]:
    """The tensors by names without their prefix, and the prefix."""
    for prefix in PREFIXES:
        if any(str(key).startswith(prefix + "vocab_embed.") for key in tensors):
            return {str(key).removeprefix(prefix): value for key, value in tensors.items()}, prefix
    raise UserError(f"{where}: tensor backbone.vocab_embed.embedding is missing: this is not MDLM's layout")


def _from_shapes(
    tensors: Mapping[str, Any], config: Any, options: Options, where: Path
) -> tuple[Architecture, list[str]]:
    """The architecture that the shapes imply, and what had to be assumed."""
    missing = []
    vocab_size, width = shape_of(tensors, "vocab_embed.embedding", 2, where)
    heads = options.heads or _dig(config, "model", "n_heads")
    if INV_FREQ in tensors and not isinstance(heads, int):
        heads = width // (2 * max(1, shape_of(tensors, INV_FREQ, 1, where)[0]))
    if not isinstance(heads, int):
        raise UserError(f"{where} does not say how many heads it has: give heads")
    length = options.length or _dig(config, "model", "length")
    if not isinstance(length, int):
        length = 1024
        missing.append("the length it was trained for: 1024 is assumed, give length if not")
    timed = _dig(config, "time_conditioning") if options.time_conditioning is None else options.time_conditioning
    timed = _dig(config, "algo", "time_conditioning") if timed is None else timed  # where BD3-LM's has it
    block = _dig(config, "block_size") if _dig(config, "algo", "cross_attn") is True else 0
    block = block if options.block_length is None else options.block_length
    if not isinstance(block, int) or not 0 < block < length:  # the default refers to the length
        block = 0
    if not isinstance(timed, bool):
        timed = False
        missing.append("whether it is conditioned on time: assumed not, as in MDLM's defaults")
    if options.mask_id is None and vocab_size not in MASKS:
        missing.append("which token is the mask: the last one is assumed, give mask_id if not")
    adaln = "sigma_map.mlp.0.weight" in tensors
    up = shape_of(tensors, "blocks.0.mlp.0.weight", 2, where)[0]
    if up % width:
        raise UserError(
            f"{where}: tensor blocks.0.mlp.0.weight has {up} rows, expected a multiple of the width {width}"
        )
    architecture = Architecture(
        vocab_size=vocab_size,
        length=length - length % (block or 1),
        width=width,
        depth=blocks_of(tensors, "blocks."),
        heads=heads,
        mask_id=_mask_id(vocab_size, None, options),
        mlp_ratio=up // width,
        adaln=adaln,
        time_conditioning=timed and adaln,
        cond_dim=shape_of(tensors, "sigma_map.mlp.0.weight", 2, where)[0] if adaln else 128,
        block_length=block,
    )
    return architecture, missing


def _mask_id(vocab_size: Any, stored: Any, options: Options) -> int:
    if options.mask_id is not None:
        return options.mask_id
    if isinstance(stored, int):
        return stored
    return MASKS.get(vocab_size, -1)


def _dig(data: Any, *path: str) -> Any:
    """A value deep inside a configuration: dicts, or what an omegaconf object would have been made from (a container
    keeps its nodes in `_content`, a leaf its value in `_val`)."""
    for key in (*path, None):
        if isinstance(data, pickles.Opaque):
            pairs = (item for item in data.items if isinstance(item, tuple) and len(item) == 2)
            state = data.state if isinstance(data.state, dict) else {k: v for k, v in pairs if isinstance(k, str)}
            data = state.get("_content", state.get("_val", state))
        if key is None:
            return data
        if not isinstance(data, dict):
            return None
        data = data.get(key)


def export(
    family: Family | str | Path,
    folder: str | Path,
    *,
    license: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write networks as config.json and model.safetensors: in the folder itself for one model, else in a folder for
    each, with tokenizer.json."""
    own = family if isinstance(family, Family) else Family.load(family)
    networks = {name: model for name, model in own.models.items() if isinstance(model, Transformer)}
    for name in own.names:
        if name not in networks:
            raise UserError(f"{name} is not a network of MDLM's kind, so it has no place in MDLM's layout")
        if networks[name].block_length:
            raise UserError(f"{name} writes one block of positions after another, which MDLM's code does not")
    target = expand(folder)
    reader = None if own.tokenizer is None else portable_json(own.tokenizer)

    def fill(new: Path) -> None:
        for name, network in networks.items():
            where = new if len(networks) == 1 else new / name
            _write(network, where)
            if reader is not None:
                (where / "tokenizer.json").write_bytes(reader)
        front = front_matter(license or str(own.meta.get("license", "unknown")), "mdlm")
        rows = "".join(f"- `{name}`\n" for name in networks)
        text = (
            f"{front}\n# {target.name}\n\nMasked diffusion language models in MDLM's layout, written by relaylm.\n\n"
            f"{rows}\nLength {own.length}, vocabulary {own.vocab_size} with the mask ({own.mask_id}).\n"
        )
        (new / "README.md").write_text(text, encoding="utf-8")

    return write_folder(target, fill, overwrite)


def _write(model: Transformer, folder: Path) -> None:
    """MDLM's network always has adaLN, y = norm(x) (1 + scale) + shift and x + gate * branch. A network without it gets
    the identity: zero matrices, so that sigma does not matter, and biases with shift 0, scale 0, gate 1. A folded
    network has a bias b on q, k and v, which MDLM has not; it came from a shift s by b = W s, and s is found again by
    least squares."""
    a = model.architecture
    if a.causal:
        raise UserError("a left-to-right model is not a denoiser: MDLM's layout has no place for it")
    if a.mlp_ratio != 4:
        raise UserError(f"MDLM's layout has an MLP of ratio 4, this network has {a.mlp_ratio}")
    full = Architecture(**{**a.to_json(), "adaln": True, "qkv_bias": False, "tied": False})
    own = {name: value.detach().to("cpu", torch.float64) for name, value in model.named_parameters()}
    if a.tied:  # MDLM's output layer has a matrix of its own
        own["output_layer.linear.weight"] = own["vocab_embed.embedding"]
    state = {key: own.get(key, torch.zeros(shape).double()) for key, shape in expected_shapes(full).items()}
    for i in range(0 if a.adaln else a.depth):
        bias = state[f"blocks.{i}.adaLN_modulation.bias"].view(6, -1)
        bias[2] = bias[5] = 1  # shift, scale, gate of attention; shift, scale, gate of the MLP
        if a.qkv_bias:
            bias[0] = _shift(own, i)
    state[INV_FREQ] = frequencies(a)
    tensors = {"backbone." + key: value.float().contiguous() for key, value in state.items()}
    config = {
        "architectures": ["MDLM"],
        "model_type": "mdlm",
        "cond_dim": a.cond_dim,
        "dropout": 0.1,
        "hidden_dim": a.width,
        "mask_token_id": a.mask_id,
        "model_length": a.length,
        "n_blocks": a.depth,
        "n_heads": a.heads,
        "return_dict": False,
        "time_conditioning": a.time_conditioning,
        "torch_dtype": "float32",
        "vocab_size": a.vocab_size,
    }
    write_json(folder / "config.json", config)
    (folder / "model.safetensors").write_bytes(safetensors.torch.save(tensors, {"format": "pt"}))


def _shift(state: Mapping[str, Tensor], i: int) -> Tensor:
    """The shift before q, k and v that their biases came from."""
    weight, bias = state[f"blocks.{i}.attn_qkv.weight"], state[f"blocks.{i}.attn_qkv.bias"]
    shift = torch.linalg.lstsq(weight, bias[:, None]).solution[:, 0]
    if not torch.allclose(weight @ shift, bias, rtol=1e-3, atol=1e-5 * float(bias.abs().max().clamp(min=1e-6))):
        raise UserError(
            f"blocks.{i}.attn_qkv.bias is not a shift seen through the matrix: MDLM's layout cannot hold it"
        )
    return shift
