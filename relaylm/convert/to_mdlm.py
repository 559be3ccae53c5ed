"""The way back: a family's networks in MDLM's published layout, so that MDLM's own code computes the same function."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from relaylm.convert.mdlm import INV_FREQ, frequencies
from relaylm.errors import UserError
from relaylm.files import expand, write_folder, write_json
from relaylm.models.denoiser import Architecture, Transformer, expected_shapes
from relaylm.models.family import Family
from relaylm.models.folder import front_matter
from relaylm.models.tokenizer import portable_json


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
    networks: dict[str, Transformer] = {}
    for name in own.names:
        if not isinstance(model := own[name], Transformer):
            raise UserError(f"{name} is not a network of MDLM's kind, so it has no place in MDLM's layout")
        if model.block_length:
            raise UserError(f"{name} writes one block of positions after another, which MDLM's code does not")
        networks[name] = model
    target = expand(folder)
    reader = None if own.tokenizer is None else portable_json(own.tokenizer)

    def fill(new: Path) -> None:
        for name, network in networks.items():
            place = new if len(networks) == 1 else new / name
            _write(network, place)
            if reader is not None:
                (place / "tokenizer.json").write_bytes(reader)
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
