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

BD3-LM with blocks as long as the sequence ("1024-pretrain") is MDLM exactly: its mask lets a block see itself and
what precedes it, and there is one block. With smaller blocks a position must not see later blocks; that is a
different network, which relaylm does not have, so those are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from relaylm.convert import pickles
from relaylm.convert.tensors import (
    Found,
    Lazy,
    Options,
    Shapes,
    check,
    count,
    dtype_name,
    from_safetensors,
    read_json,
    weight_files,
    whole,
)
from relaylm.denoiser import Architecture, Transformer, build, expected_shapes
from relaylm.errors import UserError

PREFIXES = ("backbone._orig_mod.", "backbone.", "_orig_mod.", "")
INV_FREQ = "rotary_emb.inv_freq"
EXTRA = ("sampling_eps_min", "sampling_eps_max")  # BD3-LM's record of the noise levels it was trained on
BERT_VOCABULARY, BERT_MASK = 30_522, 103  # MDLM's LM1B models use bert-base-uncased, which has a mask of its own


def layout(architecture: Architecture, prefix: str = "backbone.") -> Shapes:
    """Names and shapes of the published file: the parameters in their order, and the rotary buffer."""
    shapes = {prefix + name: shape for name, shape in expected_shapes(architecture).items()}
    return shapes | {prefix + INV_FREQ: (architecture.width // architecture.heads // 2,)}


def open_folder(folder: Path, name: str, options: Options) -> Found:
    """mdlm-owt and BD3-LM as they lie on the hub: config.json and safetensors."""
    path = folder / "config.json"
    config = read_json(path)
    kind = str(config.get("model_type"))
    length = options.length or whole(config.get("model_length", 1024), "model_length", path)
    meta: dict[str, Any] = {}
    if kind == "bd3lm":
        block = whole(config.get("block_size", 1), "block_size", path)
        if block < length and config.get("cross_attn", True):  # without it the published code attends everywhere
            raise UserError(
                f"{folder} is a BD3-LM with blocks of {block}: it needs block-causal attention, which relaylm does not "
                f"have; only blocks as long as the sequence (bd3lm-owt-block_size1024-pretrain) can be used"
            )
        if config.get("causal"):
            raise UserError(f"{folder} is a left-to-right model (causal): it is not a denoiser")
        meta = {key: config[key] for key in EXTRA if isinstance(config.get(key), int | float)}
    files = weight_files(folder)
    tensors, prefix = _strip(from_safetensors(files) if files else _flat(folder / "pytorch_model.bin"), folder)
    adaln = bool(config.get("adaln", True))
    timed = (
        bool(config.get("time_conditioning", False)) if options.time_conditioning is None else options.time_conditioning
    )
    architecture = Architecture(
        vocab_size=whole(config.get("vocab_size"), "vocab_size", path),
        length=length,
        width=whole(config.get("hidden_dim"), "hidden_dim", path),
        depth=whole(config.get("n_blocks"), "n_blocks", path),
        heads=options.heads or whole(config.get("n_heads"), "n_heads", path),
        mask_id=_mask_id(config.get("vocab_size"), config.get("mask_token_id"), options),
        adaln=adaln,
        time_conditioning=timed and adaln,
        cond_dim=whole(config.get("cond_dim", 128), "cond_dim", path) if adaln else 128,
    )
    check_frequencies(tensors, architecture, folder)
    return found(kind, name, architecture, tensors, prefix, folder, files, meta)


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
    inside = {key: value for key, value in data["state_dict"].items() if str(key).startswith("backbone.")}
    noise = [str(key) for key in data["state_dict"] if str(key).startswith("noise.")]
    tensors, prefix = _strip(inside, path)
    architecture, missing = _from_shapes(tensors, config, options, path)
    check_frequencies(tensors, architecture, path)
    expected = expected_shapes(architecture)
    check({key: value for key, value in tensors.items() if key not in (INV_FREQ, *EXTRA)}, expected, path)
    meta = {"weights": "raw"}
    shadow = _dig(data.get("ema"), "shadow_params")
    if options.ema and shadow is None:
        missing.append("averaged weights (ema): the raw ones are used")
    elif options.ema:
        names = [*expected, *noise]
        if not isinstance(shadow, list) or len(shadow) != len(names):
            size = len(shadow) if isinstance(shadow, list) else 0
            raise UserError(f"{path}: ema.shadow_params has {size} tensors, expected {len(names)}, one per parameter")
        averaged = dict(zip(names, shadow, strict=True))
        check({key: averaged[key] for key in expected}, expected, f"{path}, ema.shadow_params")
        tensors, meta = averaged, {"weights": "ema"}
    return found("lightning", name, architecture, tensors, prefix, path, [path], meta, missing)


def open_file(path: Path, name: str, options: Options) -> Found:
    """MDLM's tensors in one file without a configuration."""
    tensors, prefix = _strip(from_safetensors([path]) if path.suffix == ".safetensors" else _flat(path), path)
    if not prefix and options.time_conditioning is None:
        raise UserError(
            f"{path} names its tensors as SEDD does but has no config.json beside it: give the folder with both, or "
            f"say time_conditioning"
        )
    architecture, missing = _from_shapes(tensors, None, options, path)
    check_frequencies(tensors, architecture, path)
    return found("mdlm", name, architecture, tensors, prefix, path, [path], {}, missing)


def found(
    kind: str,
    name: str,
    architecture: Architecture,
    tensors: Mapping[str, Any],
    prefix: str,
    where: Path,
    files: list[Path],
    meta: dict[str, Any],
    missing: list[str] | None = None,
) -> Found:
    """Check the tensors (names without prefix; errors give them with it) and promise the network."""
    expected = expected_shapes(architecture)
    needed = {prefix + key: value for key, value in tensors.items() if key != INV_FREQ and key not in EXTRA}
    needed = {key: value for key, value in needed.items() if not key.removeprefix(prefix).startswith("noise.")}
    check(needed, {prefix + key: shape for key, shape in expected.items()}, where)

    def make(device: torch.device, dtype: torch.dtype | None, fold: bool) -> Transformer:
        return network(architecture, {key: tensors[key] for key in expected}, device, dtype, fold)

    return Found(
        format=kind,
        name=name,
        vocab_size=architecture.vocab_size,
        mask_id=architecture.mask_id,
        length=architecture.length,
        depth=architecture.depth,
        width=architecture.width,
        heads=architecture.heads,
        parameters=count(expected),
        bytes=sum(tensors[key].bytes for key in expected),
        dtype=dtype_name(tensors[key] for key in expected),
        time_conditioning=architecture.time_conditioning,
        storable=True,
        files=files,
        build=make,
        missing=missing or [],
        meta=meta,
    )


def network(
    architecture: Architecture, tensors: Mapping[str, Lazy], device: torch.device, dtype: torch.dtype | None, fold: bool
) -> Transformer:
    from relaylm.members import pick_dtype, place

    chosen = pick_dtype(dtype, device)
    wide = torch.float64 if chosen == torch.float64 else torch.float32
    model = build(architecture, {key: lazy.read().to(wide) for key, lazy in tensors.items()})
    if fold and architecture.adaln and not architecture.time_conditioning:
        model = model.fold()
    return place(model, device, chosen)


def check_frequencies(tensors: Mapping[str, Any], architecture: Architecture, where: Path) -> None:
    """The rotary buffer, where it is stored, must be the one that the network computes."""
    lazy = tensors.get(INV_FREQ)
    if lazy is None:
        return
    half = architecture.width // architecture.heads // 2
    if not isinstance(lazy, Lazy) or lazy.shape != (half,):
        shape = getattr(lazy, "shape", None)
        raise UserError(
            f"{where}: tensor {INV_FREQ} has shape {shape}, expected {(half,)} for {architecture.heads} heads"
        )
    expected = 10_000 ** (-torch.arange(half, dtype=torch.float64) / half)
    if not torch.allclose(lazy.read().double(), expected, rtol=1e-2):
        raise UserError(f"{where}: tensor {INV_FREQ} does not hold the frequencies 10000^(-2k/{2 * half})")


def _strip(tensors: Mapping[str, Any], where: Path) -> tuple[dict[str, Any], str]:
    """Names without the prefix that the wrapper (and torch.compile) put before them."""
    for prefix in PREFIXES:
        if any(str(key).startswith(prefix + "vocab_embed.") for key in tensors):
            own = {str(key).removeprefix(prefix): value for key, value in tensors.items()}
            return own, prefix
    raise UserError(f"{where}: tensor backbone.vocab_embed.embedding is missing: this is not MDLM's layout")


def _flat(path: Path) -> dict[str, Any]:
    """A plain state dict out of a PyTorch file."""
    if not path.is_file():
        raise UserError(f"{path.parent} has no weights: neither safetensors nor {path.name}")
    data = pickles.read(path)
    for key in ("state_dict", "model"):
        if isinstance(data, dict) and isinstance(data.get(key), dict):
            data = data[key]
    if not isinstance(data, dict):
        raise UserError(f"{path} does not hold a state dict but {data!r}"[:300])
    return data


def _from_shapes(
    tensors: Mapping[str, Any], config: Any, options: Options, where: Path
) -> tuple[Architecture, list[str]]:
    """The architecture that the shapes tell, and what had to be assumed."""

    def shape(key: str, dims: int) -> tuple[int, ...]:
        value = tensors.get(key)
        if not isinstance(value, Lazy) or len(value.shape) != dims:
            raise UserError(f"{where}: tensor {key} is missing or has not {dims} dimension{'s' * (dims > 1)}")
        return value.shape

    missing = []
    vocab_size, width = shape("vocab_embed.embedding", 2)
    numbers = {int(match.group(1)) for key in tensors if (match := re.match(r"blocks\.(\d+)\.", key))}
    heads = options.heads or _dig(config, "model", "n_heads")
    if INV_FREQ in tensors and not heads:
        heads = width // (2 * max(1, shape(INV_FREQ, 1)[0]))
    if not heads:
        raise UserError(f"{where} does not say how many heads it has: give heads")
    length = options.length or _dig(config, "model", "length")
    if not isinstance(length, int):
        length = 1024
        missing.append("the length it was trained for: 1024 is assumed, give length if not")
    timed = options.time_conditioning
    if timed is None:
        timed = _dig(config, "time_conditioning")
    if not isinstance(timed, bool):
        timed = False
        missing.append("whether it is conditioned on time: assumed not, as in MDLM's defaults")
    adaln = "sigma_map.mlp.0.weight" in tensors
    up = shape("blocks.0.mlp.0.weight", 2)[0]
    if not numbers or up % width:
        raise UserError(
            f"{where}: tensor blocks.0.mlp.0.weight has {up} rows, expected a multiple of the width {width}"
        )
    architecture = Architecture(
        vocab_size=vocab_size,
        length=length,
        width=width,
        depth=max(numbers) + 1,
        heads=int(heads),
        mask_id=_mask_id(vocab_size, None, options),
        mlp_ratio=up // width,
        adaln=adaln,
        time_conditioning=timed and adaln,
        cond_dim=shape("sigma_map.mlp.0.weight", 2)[0] if adaln else 128,
    )
    return architecture, missing


def _mask_id(vocab_size: Any, stored: Any, options: Options) -> int:
    if options.mask_id is not None:
        return options.mask_id
    if isinstance(stored, int):
        return stored
    return BERT_MASK if vocab_size == BERT_VOCABULARY else -1


def _dig(data: Any, *path: str) -> Any:
    """A value deep inside a configuration: dicts, or what an omegaconf object would have been made from (a container
    keeps its nodes in `_content`, a leaf its value in `_val`)."""
    for key in (*path, None):
        if isinstance(data, pickles.Opaque):
            state = data.state if isinstance(data.state, dict) else dict(_pairs(data.items))
            data = state.get("_content", state.get("_val", state))
        if key is None:
            return data
        if not isinstance(data, dict):
            return None
        data = data.get(key)
    return data


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    return [item for item in items if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)]


# ------------------------------------------------------------------------------------------------------ the way back


def export(model: Transformer, folder: Path) -> None:
    """Write a network as MDLM's code reads it: config.json and model.safetensors with the published names.

    MDLM's network always has adaLN, y = norm(x) (1 + scale) + shift and x + gate * branch. A network without it gets
    the identity: zero matrices, so that sigma does not matter, and biases with shift 0, scale 0, gate 1. A folded
    network has a bias b on q, k and v, which MDLM has not; it came from a shift s by b = W s, and s is found again by
    least squares."""
    a = model.architecture
    if a.causal:
        raise UserError("a left-to-right model is not a denoiser: MDLM's layout has no place for it")
    state = {name: value.detach().to("cpu", torch.float64) for name, value in model.named_parameters()}
    if not a.adaln:
        shifts = [_shift(state, i) if a.qkv_bias else None for i in range(a.depth)]
        state |= _identity(a, shifts)
        for i in range(a.depth):
            state.pop(f"blocks.{i}.attn_qkv.bias", None)
    full = Architecture(**{**a.to_json(), "adaln": True, "qkv_bias": False})
    half = a.width // a.heads // 2
    state[INV_FREQ] = 10_000 ** (-torch.arange(half, dtype=torch.float64) / half)
    tensors = {"backbone." + key: state[key].float().contiguous() for key in (*expected_shapes(full), INV_FREQ)}
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
    if a.mlp_ratio != 4:
        raise UserError(f"MDLM's layout has an MLP of ratio 4, this network has {a.mlp_ratio}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _identity(a: Architecture, shifts: list[Tensor | None]) -> dict[str, Tensor]:
    """adaLN that changes nothing, but for given shifts before q, k and v."""
    d, c = a.width, a.cond_dim

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    state = {
        "sigma_map.mlp.0.weight": zeros(c, 256),
        "sigma_map.mlp.0.bias": zeros(c),
        "sigma_map.mlp.2.weight": zeros(c, c),
        "sigma_map.mlp.2.bias": zeros(c),
        "output_layer.adaLN_modulation.weight": zeros(2 * d, c),
        "output_layer.adaLN_modulation.bias": zeros(2 * d),
    }
    for i, shift in enumerate(shifts):
        bias = zeros(6, d)
        bias[2] = bias[5] = 1  # shift, scale, gate of attention; shift, scale, gate of the MLP
        if shift is not None:
            bias[0] = shift
        state[f"blocks.{i}.adaLN_modulation.weight"] = zeros(6 * d, c)
        state[f"blocks.{i}.adaLN_modulation.bias"] = bias.flatten()
    return state


def _shift(state: Mapping[str, Tensor], i: int) -> Tensor:
    weight, bias = state[f"blocks.{i}.attn_qkv.weight"], state[f"blocks.{i}.attn_qkv.bias"]
    shift = torch.linalg.lstsq(weight, bias[:, None]).solution[:, 0]
    if not torch.allclose(weight @ shift, bias, rtol=1e-3, atol=1e-5 * float(bias.abs().max().clamp(min=1e-6))):
        raise UserError(
            f"blocks.{i}.attn_qkv.bias is not a shift seen through the matrix: MDLM's layout cannot hold it"
        )
    return shift
