"""MDLM's layout and its relatives, against the mathematics written out again in numpy (float64, row by row)."""

from __future__ import annotations

import collections
import itertools
import json
import math
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from relaylm import convert, sample
from relaylm.convert import mdlm, sedd
from relaylm.convert.tensors import count
from relaylm.errors import UserError
from relaylm.models.denoiser import Architecture, Transformer, expected_shapes
from relaylm.models.family import Family
from relaylm.models.tokenizer import load_tokenizer, vocabulary

V, D, C, HEADS, BLOCKS, LENGTH = 11, 16, 6, 2, 3, 8
TOKENS = torch.tensor([[3, 10, 0, 10, 10, 7, 10, 1], [10] * 8])
T = torch.tensor([0.3, 0.9], dtype=torch.float64)
POSITIONS = torch.tensor([[1, 3, 6], [7, 0, 2]])


def published(
    blocks: int = BLOCKS, prefix: str = "backbone.", adaln: bool = True, seed: int = 0
) -> dict[str, torch.Tensor]:
    """A checkpoint with the published names and shapes, written out by hand, not asked of the code under test."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int, scale: float = 0.3) -> torch.Tensor:
        return torch.randn(shape, generator=g) * scale

    state = {"vocab_embed.embedding": rand(V, D, scale=1.0)}
    if adaln:
        state |= {"sigma_map.mlp.0.weight": rand(C, 256), "sigma_map.mlp.0.bias": rand(C)}
        state |= {"sigma_map.mlp.2.weight": rand(C, C), "sigma_map.mlp.2.bias": rand(C)}
    state["rotary_emb.inv_freq"] = 1.0 / (10_000 ** (torch.arange(0, D // HEADS, 2).float() / (D // HEADS)))
    for i in range(blocks):
        p = f"blocks.{i}."
        state |= {
            p + "norm1.weight": 1 + rand(D),
            p + "attn_qkv.weight": rand(3 * D, D),
            p + "attn_out.weight": rand(D, D),
        }
        state |= {p + "norm2.weight": 1 + rand(D), p + "mlp.0.weight": rand(4 * D, D), p + "mlp.0.bias": rand(4 * D)}
        state |= {p + "mlp.2.weight": rand(D, 4 * D), p + "mlp.2.bias": rand(D)}
        if adaln:
            state |= {p + "adaLN_modulation.weight": rand(6 * D, C), p + "adaLN_modulation.bias": rand(6 * D)}
    o = "output_layer."
    state |= {o + "norm_final.weight": 1 + rand(D), o + "linear.weight": rand(V, D), o + "linear.bias": rand(V)}
    if adaln:
        state |= {o + "adaLN_modulation.weight": rand(2 * D, C), o + "adaLN_modulation.bias": rand(2 * D)}
    return {prefix + name: value for name, value in state.items()}


CONFIG: dict[str, Any] = {
    "architectures": ["MDLM"], "model_type": "mdlm", "cond_dim": C, "dropout": 0.1, "hidden_dim": D,
    "model_length": LENGTH, "n_blocks": BLOCKS, "n_heads": HEADS, "return_dict": False, "time_conditioning": False,
    "torch_dtype": "float32", "vocab_size": V, "auto_map": {"AutoModelForMaskedLM": "modeling_mdlm.MDLM"},
}  # fmt: skip


def write(folder: Path, state: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(state, folder / "model.safetensors")
    return folder


def transcription(
    state: dict[str, torch.Tensor], tokens: np.ndarray, sigma: float, prefix: str = "backbone.", block: int = 0
) -> np.ndarray:
    """MDLM's forward pass for one row, as its paper and code have it: loops over heads, float64. With a block,
    BD3-LM's: a position sees its own block and the blocks before it."""
    w = {name.removeprefix(prefix): value.double().numpy() for name, value in state.items()}
    adaln = "sigma_map.mlp.0.weight" in w
    silu = lambda x: x / (1 + np.exp(-x))  # noqa: E731

    def layer_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / np.sqrt(variance + 1e-5) * weight

    def rotary(x: np.ndarray) -> np.ndarray:
        half = x.shape[1] // 2
        out = np.empty_like(x)
        for position in range(len(x)):
            for k in range(half):
                angle = position * 10_000 ** (-2 * k / x.shape[1])
                a, b = x[position, k], x[position, k + half]
                out[position, k] = a * math.cos(angle) - b * math.sin(angle)
                out[position, k + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    if adaln:
        angles = sigma * np.exp(-math.log(10_000) * np.arange(128) / 128)
        features = np.concatenate([np.cos(angles), np.sin(angles)])
        hidden = silu(w["sigma_map.mlp.0.weight"] @ features + w["sigma_map.mlp.0.bias"])
        c = silu(w["sigma_map.mlp.2.weight"] @ hidden + w["sigma_map.mlp.2.bias"])
    x = w["vocab_embed.embedding"][tokens]
    for i in range(sum(name.endswith("norm1.weight") for name in w)):
        p = f"blocks.{i}."
        modulation = (
            np.zeros(6 * D) if not adaln else w[p + "adaLN_modulation.weight"] @ c + w[p + "adaLN_modulation.bias"]
        )
        shift1, scale1, gate1, shift2, scale2, gate2 = np.split(modulation, 6)
        gate1, gate2 = (gate1, gate2) if adaln else (1.0, 1.0)
        h = layer_norm(x, w[p + "norm1.weight"]) * (1 + scale1) + shift1
        q, k, v = np.split(h @ w[p + "attn_qkv.weight"].T, 3, axis=1)
        mixed = []
        for head in range(HEADS):
            part = slice(head * D // HEADS, (head + 1) * D // HEADS)
            scores = rotary(q[:, part]) @ rotary(k[:, part]).T / math.sqrt(D // HEADS)
            for i, j in itertools.product(range(len(x)), repeat=2) if block else ():
                scores[i, j] = -math.inf if j // block > i // block else scores[i, j]
            weights = np.exp(scores - scores.max(1, keepdims=True))
            mixed.append(weights / weights.sum(1, keepdims=True) @ v[:, part])
        x = x + gate1 * (np.concatenate(mixed, 1) @ w[p + "attn_out.weight"].T)
        h = layer_norm(x, w[p + "norm2.weight"]) * (1 + scale2) + shift2
        h = h @ w[p + "mlp.0.weight"].T + w[p + "mlp.0.bias"]
        h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + gate2 * (h @ w[p + "mlp.2.weight"].T + w[p + "mlp.2.bias"])
    h = layer_norm(x, w["output_layer.norm_final.weight"])
    if adaln:
        shift, scale = np.split(
            w["output_layer.adaLN_modulation.weight"] @ c + w["output_layer.adaLN_modulation.bias"], 2
        )
        h = h * (1 + scale) + shift
    return h @ w["output_layer.linear.weight"].T + w["output_layer.linear.bias"]


def expected(
    state: dict[str, torch.Tensor], sigmas: tuple[float, float] = (0.0, 0.0), prefix: str = "backbone."
) -> torch.Tensor:
    rows = [transcription(state, row.numpy(), sigma, prefix) for row, sigma in zip(TOKENS, sigmas, strict=True)]
    return torch.from_numpy(np.stack(rows))


def agree(model: Any, logits_BLV: torch.Tensor, tolerance: float = 1e-9) -> None:
    full = model.logits(TOKENS, T)
    torch.testing.assert_close(full, logits_BLV.to(full.dtype), rtol=tolerance, atol=tolerance)
    at = model.logits_at(TOKENS, T, POSITIONS)
    torch.testing.assert_close(at, full.gather(1, POSITIONS[..., None].expand(-1, -1, full.shape[-1])))


def sigma_of(t: float) -> float:
    return -math.log1p(-(1 - 1e-3) * t)


# --------------------------------------------------------------------------------------------------- mdlm and bd3lm


def test_mdlm_folder_computes_what_its_mathematics_says(tmp_path: Path) -> None:
    state = published()
    folder = write(tmp_path / "mdlm-owt", state, CONFIG)
    assert convert.recognise(folder) == "mdlm" == convert.recognise(folder / "model.safetensors")
    family = convert.load(folder, dtype="float64")
    assert (family.mask_id, family.vocab_size, family.length, family.names) == (V - 1, V, LENGTH, ("mdlm-owt",))
    assert not family["mdlm-owt"].architecture.adaln  # folded
    agree(family["mdlm-owt"], expected(state))
    agree(convert.load(folder, dtype="float64", fold=False)["mdlm-owt"], expected(state))
    agree(convert.load(folder)["mdlm-owt"], expected(state), tolerance=1e-4)
    missing = family.meta["missing"][0]
    assert family.tokenizer is None and f"{V} tokens" in missing and "GPT-2" not in missing


def test_mdlm_time_conditioning_is_by_sigma(tmp_path: Path) -> None:
    state = published()
    folder = write(tmp_path / "timed", state, CONFIG | {"time_conditioning": True})
    sigmas = sigma_of(0.3), sigma_of(0.9)
    agree(convert.load(folder, dtype="float64")["timed"], expected(state, sigmas))


def test_published_numbers() -> None:
    architecture = Architecture(vocab_size=50_258, length=1024, width=768, depth=12, heads=12, adaln=True, cond_dim=128)
    shapes = expected_shapes(architecture)
    assert count(shapes) == 169_627_218
    assert 4 * (count(shapes) + len(mdlm.frequencies(architecture))) == 678_509_000  # the buffer is not a parameter
    for depth, parameters in ((4, 108_205_650), (6, 123_561_042), (8, 138_916_434), (10, 154_271_826)):
        small = Architecture(vocab_size=50_258, length=1024, depth=depth, adaln=True)
        assert count(expected_shapes(small)) == parameters


@pytest.mark.parametrize(
    "name", ["backbone.vocab_embed.embedding", "backbone.blocks.1.mlp.2.weight", "backbone.output_layer.linear.bias",
             "backbone.sigma_map.mlp.2.bias", "backbone.blocks.0.adaLN_modulation.weight"]
)  # fmt: skip
def test_a_renamed_or_missing_tensor_is_refused_by_name(tmp_path: Path, name: str) -> None:
    state = published()
    without = {key: value for key, value in state.items() if key != name}
    for broken in (without, without | {name + "_old": state[name]}):
        with pytest.raises(UserError, match=name.replace(".", r"\.")):
            convert.load(write(tmp_path / "m", broken, CONFIG))


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", published(), CONFIG)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    agree(convert.load(folder, dtype="float64")["m"], expected(published()))
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    with pytest.raises(UserError, match=r"b\.safetensors: tensor .* is there a second time"):
        convert.load(folder)


@pytest.mark.parametrize("name", ["backbone.blocks.2.attn_qkv.weight", "backbone.output_layer.linear.weight"])
def test_a_transposed_tensor_is_refused_by_name(tmp_path: Path, name: str) -> None:
    state = published()
    with pytest.raises(UserError, match=name.replace(".", r"\.") + ".*transposed"):
        convert.load(write(tmp_path / "m", state | {name: state[name].T.contiguous()}, CONFIG))


def test_extra_tensors_and_other_frequencies_are_refused(tmp_path: Path) -> None:
    state = published()
    with pytest.raises(UserError, match=r"backbone\.blocks\.0\.extra does not belong"):
        convert.load(write(tmp_path / "m", state | {"backbone.blocks.0.extra": torch.zeros(2)}, CONFIG))
    with pytest.raises(UserError, match="frequencies"):
        convert.load(
            write(tmp_path / "m", state | {"backbone.rotary_emb.inv_freq": torch.ones(D // HEADS // 2)}, CONFIG)
        )


BD3LM = CONFIG | {
    "model_type": "bd3lm", "block_size": LENGTH, "cross_attn": True, "adaln": True, "attn_backend": "sdpa",
    "causal": False, "var_min": True, "sampling_eps_min": 0.001, "sampling_eps_max": 1.0,
}  # fmt: skip


def test_bd3lm_with_one_block_is_mdlm(tmp_path: Path) -> None:
    extra = {"sampling_eps_min": torch.tensor(1e-3), "sampling_eps_max": torch.tensor(1.0)}
    state = published()
    folder = write(tmp_path / "pretrain", state | extra, BD3LM)
    assert convert.recognise(folder) == "bd3lm"
    agree(convert.load(folder, dtype="float64")["pretrain"], expected(state))
    plain = published(adaln=False)
    folder = write(tmp_path / "plain", plain | extra, BD3LM | {"adaln": False})
    agree(convert.load(folder, dtype="float64")["plain"], expected(plain))
    folder = write(tmp_path / "noeos", state, BD3LM | {"block_size": 1, "cross_attn": False})  # attends everywhere
    agree(convert.load(folder, dtype="float64")["noeos"], expected(state))


@pytest.mark.parametrize("block", [1, 2, 4])
def test_bd3lm_in_small_blocks(tmp_path: Path, block: int) -> None:
    state = published()
    folder = write(tmp_path / "small", state, BD3LM | {"block_size": block})
    rows = torch.from_numpy(np.stack([transcription(state, row.numpy(), 0.0, block=block) for row in TOKENS]))
    family = convert.load(folder, dtype="float64")
    assert family.block_length == block and family.length == LENGTH
    agree(family["small"], rows)
    agree(convert.load(folder, dtype="float64", fold=False)["small"], rows)
    agree(convert.load(folder)["small"], rows, tolerance=1e-4)
    default = {key: value for key, value in BD3LM.items() if key != "cross_attn"}
    about = convert.describe(write(tmp_path / "d", state, default | {"block_size": block}))
    assert about["models"]["d"]["block_length"] == block
    silent = write(tmp_path / "silent", state, CONFIG)
    agree(convert.load(silent, dtype="float64", block_length=block)["silent"], rows)  # what the user says counts
    assert convert.load(folder, block_length=0).block_length == convert.load(folder, block_length=99).block_length == 0
    convert.convert(folder, tmp_path / "family")
    agree(Family.load(tmp_path / "family", dtype="float64")["small"], rows)  # the length of blocks is stored
    samples = sample(family, "heavy", n=3, steps=2, batch_size=2)
    assert samples.tokens.shape == (3, LENGTH) and samples.tokens.max() < V - 1
    with pytest.raises(UserError, match="MDLM's code does not"):
        convert.export(family, tmp_path / "back")
    with pytest.raises(UserError, match="neither causal nor conditioned on time"):
        convert.load(write(tmp_path / "timed", state, BD3LM | {"block_size": block, "time_conditioning": True}))


# ------------------------------------------------------------------------------------------------ Lightning and EMA


def stub_config(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Objects pickled the way omegaconf's are: containers with `_content`, leaves with `_val`."""
    module = types.ModuleType("omegaconf")
    for name in ("DictConfig", "AnyNode"):
        kind = type(name, (), {"__module__": "omegaconf", "__qualname__": name})
        setattr(module, name, kind)
    monkeypatch.setitem(sys.modules, "omegaconf", module)

    def wrap(value: Any) -> Any:
        if isinstance(value, dict):
            made = module.DictConfig()
            made.__dict__.update(_metadata=None, _parent=None, _content={k: wrap(v) for k, v in value.items()})
        else:
            made = module.AnyNode()
            made.__dict__.update(_metadata=None, _parent=None, _val=value)
        return made

    return wrap(values)


def checkpoint(
    path: Path, raw: dict[str, torch.Tensor], averaged: dict[str, torch.Tensor], hyper: Any, prefix: str
) -> Path:
    state = collections.OrderedDict((prefix + k.removeprefix("backbone."), v) for k, v in raw.items())
    order = [key for key in averaged if "inv_freq" not in key]
    data = {
        "epoch": 3, "state_dict": state, "hyper_parameters": hyper, "optimizer_states": [{0: torch.zeros(3)}],
        "ema": {"decay": 0.9999, "num_updates": 7, "shadow_params": [averaged[key] for key in order]},
    }  # fmt: skip
    torch.save(data, path)
    return path


@pytest.mark.parametrize("prefix", ["backbone.", "backbone._orig_mod."])
def test_lightning_checkpoint_gives_the_averaged_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    raw, averaged = published(seed=1), published(seed=2)
    config = {"time_conditioning": True, "parameterization": "subs", "model": {"length": LENGTH, "n_heads": HEADS}}
    hyper = {"config": stub_config(config, monkeypatch)}
    path = checkpoint(tmp_path / "best.ckpt", raw, averaged, hyper, prefix)
    monkeypatch.delitem(sys.modules, "omegaconf")
    assert convert.recognise(path) == "lightning"
    sigmas = sigma_of(0.3), sigma_of(0.9)
    family = convert.load(path, dtype="float64")
    agree(family["best"], expected(averaged, sigmas))
    assert family.length == LENGTH and family.meta["details"] == {"best": {"weights": "ema"}}
    agree(convert.load(path, dtype="float64", ema=False)["best"], expected(raw, sigmas))
    agree(convert.load(path, dtype="float64", time_conditioning=False)["best"], expected(averaged))


@pytest.mark.parametrize(("stored", "block"), [(4, 4), (LENGTH, 0), ("${model.length}", 0)])
def test_lightning_checkpoint_of_bd3lm_has_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: Any, block: int
) -> None:
    state = published()
    config = {
        "block_size": stored,
        "algo": {"name": "bd3lm", "cross_attn": True, "time_conditioning": False},
        "model": {"length": LENGTH, "n_heads": HEADS},
    }
    path = checkpoint(tmp_path / "best.ckpt", state, state, {"config": stub_config(config, monkeypatch)}, "backbone.")
    monkeypatch.delitem(sys.modules, "omegaconf")
    family = convert.load(path, dtype="float64")
    rows = np.stack([transcription(state, row.numpy(), 0.0, block=block) for row in TOKENS])
    agree(family["best"], torch.from_numpy(rows))
    assert family.block_length == block and not any("conditioned" in note for note in family.meta["missing"])


def test_lightning_checkpoint_without_a_readable_config_says_what_it_assumes(tmp_path: Path) -> None:
    raw = published(seed=1)
    path = checkpoint(tmp_path / "a.ckpt", raw, raw, {}, "backbone.")
    family = convert.load(path, dtype="float64", length=LENGTH)
    agree(family["a"], expected(raw))
    assert any("conditioned on time" in note for note in family.meta["missing"])
    assert any("1024 is assumed" in note for note in convert.describe(path)["missing"])
    odd = {"config": {"model": {"n_heads": "${heads}", "length": "${length}"}}}
    path = checkpoint(tmp_path / "o.ckpt", raw, raw, odd, "backbone.")
    agree(convert.load(path, dtype="float64")["o"], expected(raw))
    bare = {key: value for key, value in raw.items() if "inv_freq" not in key}
    for heads in (1, HEADS):  # which then stand in the configuration alone
        path = checkpoint(tmp_path / "b.ckpt", bare, raw, {"config": {"model": {"n_heads": heads}}}, "backbone.")
        assert convert.load(path, ema=False)["b"].architecture.heads == heads  # type: ignore[attr-defined]
    torn = {key: value for key, value in raw.items() if ".blocks.1." not in key}
    with pytest.raises(UserError, match=r"blocks\.1\.norm1\.weight is missing"):  # there is a block 2, so there was a 1
        convert.load(checkpoint(tmp_path / "torn.ckpt", torn, torn, {}, "backbone."), ema=False)


@pytest.mark.parametrize(("vocab_size", "mask"), [(35, 4), (30_522, 103), (50_258, 50_257), (11, 10)])
def test_the_mask_of_the_published_vocabularies(tmp_path: Path, vocab_size: int, mask: int) -> None:
    """text8 in MDLM's repository: seven special tokens of which the mask is the fifth, then letters and a space."""
    state = published(blocks=1)
    for name in ("vocab_embed.embedding", "output_layer.linear.weight", "output_layer.linear.bias"):
        state["backbone." + name] = torch.zeros(vocab_size, *state["backbone." + name].shape[1:])
    folder = write(tmp_path / "m", state, CONFIG | {"vocab_size": vocab_size, "n_blocks": 1})
    alone = shutil.copy(folder / "model.safetensors", tmp_path / "alone.safetensors")
    assert convert.describe(folder)["mask_id"] == convert.describe(alone)["mask_id"] == mask
    assert any("last one is assumed" in note for note in convert.describe(alone)["missing"]) == (vocab_size == 11)
    assert convert.describe(alone, mask_id=7)["mask_id"] == 7


def test_lightning_checkpoint_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, path = published(seed=1), tmp_path / "a.ckpt"
    name = "backbone.blocks.1.norm2.weight"
    checkpoint(path, {k: v for k, v in raw.items() if k != name}, raw, {}, "backbone.")
    with pytest.raises(UserError, match=r"blocks\.1\.norm2\.weight"):
        convert.load(path)
    checkpoint(
        path, raw, raw | {"backbone.blocks.0.mlp.2.weight": raw["backbone.blocks.0.mlp.0.weight"]}, {}, "backbone."
    )
    with pytest.raises(UserError, match=r"ema.*blocks\.0\.mlp\.2\.weight.*transposed"):
        convert.load(path)
    checkpoint(path, raw, {k: v for k, v in raw.items() if k != name}, {}, "backbone.")
    with pytest.raises(UserError, match="shadow_params has"):
        convert.load(path)
    hyper = {"config": stub_config({"algo": {"name": "duo"}}, monkeypatch)}
    with pytest.raises(UserError, match="uniform-state"):
        convert.load(checkpoint(path, raw, raw, hyper, "backbone."))
    for left in ({"parameterization": "ar"}, {"algo": {"name": "ar"}}):
        with pytest.raises(UserError, match="a left-to-right model"):
            convert.load(checkpoint(path, raw, raw, {"config": left}, "backbone."))


def test_lightning_checkpoint_without_an_average_says_so(tmp_path: Path) -> None:
    raw = published()
    torch.save({"state_dict": raw, "ema": None}, tmp_path / "a.ckpt")
    family = convert.load(tmp_path / "a.ckpt", dtype="float64", length=LENGTH)
    agree(family["a"], expected(raw))
    assert family.meta["details"] == {"a": {"weights": "raw"}}
    assert any("averaged weights" in note for note in family.meta["missing"])
    quiet = convert.load(tmp_path / "a.ckpt", ema=False).meta["missing"]
    assert not any("averaged weights" in note for note in quiet)


# --------------------------------------------------------------------------------------------------------------- sedd


SEDD = {
    "tokens": V - 1, "ngpus": 8, "graph": {"type": "absorb", "file": "data"}, "noise": {"type": "loglinear"},
    "model": {"name": "small", "hidden_size": D, "cond_dim": C, "length": LENGTH, "n_blocks": BLOCKS, "n_heads": HEADS,
              "scale_by_sigma": True, "dropout": 0.1},
}  # fmt: skip


def test_sedd_score_becomes_the_denoising_distribution(tmp_path: Path) -> None:
    """From the published forward pass to scores, from scores to p(x0 | x) by the ratio of marginals, written out."""
    state = published(prefix="")
    folder = write(tmp_path / "sedd-small", state, SEDD)
    assert convert.recognise(folder) == "sedd"
    family = convert.load(folder, dtype="float64")
    model = family["sedd-small"]
    sigmas = sigma_of(0.3), sigma_of(0.9)
    out = expected(state, sigmas, prefix="")
    agree(model, out)
    for row, sigma in enumerate(sigmas):
        log_score = out[row] - math.log(math.expm1(sigma)) - math.log(V - 1)
        score = torch.exp(log_score)[:, : V - 1]
        unnormalised = score * math.expm1(sigma)  # p(x0 = v | x) = s_v (e^sigma - 1)
        own = model.logits(TOKENS, T)[row].clone()
        own[:, V - 1] = -torch.inf
        torch.testing.assert_close(own.softmax(-1)[:, : V - 1], unnormalised / unnormalised.sum(-1, keepdim=True))
        everywhere = torch.arange(LENGTH)[None].expand(2, -1)
        log_z = sedd.normaliser(model, TOKENS, T, everywhere)[row]
        torch.testing.assert_close(log_z, unnormalised.sum(-1).log())
        unscaled = sedd.normaliser(model, TOKENS, T, everywhere, scale_by_sigma=False)[row]
        torch.testing.assert_close(unscaled, (out[row][:, : V - 1].exp() * math.expm1(sigma)).sum(-1).log())
    assert set(family.meta["normaliser"]["sedd-small"]) == {"mean_log_z", "max_abs_log_z"}


def test_sedd_bin_and_refusals(tmp_path: Path) -> None:
    state = published(prefix="")
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SEDD))
    torch.save(collections.OrderedDict(state), folder / "pytorch_model.bin")
    agree(convert.load(folder, dtype="float64")["bin"], expected(state, (sigma_of(0.3), sigma_of(0.9)), prefix=""))
    with pytest.raises(UserError, match=r"tensor blocks\.0\.norm1\.weight is missing"):
        convert.load(write(tmp_path / "s", {k: v for k, v in state.items() if k != "blocks.0.norm1.weight"}, SEDD))
    with pytest.raises(UserError, match="uniform"):
        convert.load(write(tmp_path / "u", state, SEDD | {"graph": {"type": "uniform"}}))
    for noise in ("geometric", {"type": "geometric"}, ["geometric"]):
        with pytest.raises(UserError, match=r"with noise .*geometric"):
            convert.load(write(tmp_path / "g", state, SEDD | {"noise": noise}))
    safetensors.torch.save_file(state, tmp_path / "alone.safetensors")
    with pytest.raises(UserError, match="time_conditioning"):
        convert.load(tmp_path / "alone.safetensors")


# ------------------------------------------------------------------------------------- converting and the way back


def test_convert_keeps_every_number_and_export_gives_the_file_back(tmp_path: Path) -> None:
    state = published()
    source = write(tmp_path / "mdlm-owt", state, CONFIG)
    folder = convert.convert(source, tmp_path / "family", license="apache-2.0")
    family = Family.load(folder, dtype="float64")
    agree(family["mdlm-owt"], expected(state))
    assert family.meta["format"] == "mdlm" and 'license: "apache-2.0"' in (folder / "README.md").read_text()
    unfolded = convert.load(source, fold=False)
    out = convert.export(unfolded, tmp_path / "back")
    again = safetensors.torch.load_file(out / "model.safetensors")
    assert set(again) == set(state)
    for name, value in state.items():
        torch.testing.assert_close(again[name], value, rtol=1e-6 if "inv_freq" in name else 0, atol=0)


def test_plain_and_folded_networks_become_mdlm_networks(tmp_path: Path) -> None:
    plain = Transformer(Architecture(V, LENGTH, D, BLOCKS, HEADS, cond_dim=C))
    plain.initialise(torch.Generator().manual_seed(3))
    with torch.no_grad():
        plain.output_layer.linear.weight.normal_(generator=torch.Generator().manual_seed(4))
    folded = convert.load(write(tmp_path / "src", published(), CONFIG), dtype="float64")["src"]
    family = Family({"a": plain.double().eval().requires_grad_(False), "b": folded}, V - 1, V, LENGTH)
    out = convert.export(family, tmp_path / "out")
    assert sorted(path.name for path in out.iterdir()) == [".relaylm.json", "README.md", "a", "b"]
    for name, model in family.models.items():
        stored = safetensors.torch.load_file(out / name / "model.safetensors")
        agree(model, expected(stored), tolerance=2e-5)  # what MDLM's own code computes from the file; stored in float32
        config = json.loads((out / name / "config.json").read_text())
        assert config["n_blocks"] == BLOCKS and config["mask_token_id"] == V - 1
    assert convert.recognise(out) == "mdlm"
    agree(convert.load(out, dtype="float64")["b"], family["b"].logits(TOKENS, T), tolerance=2e-5)
    with pytest.raises(UserError, match="not empty"):
        convert.export(family, out)


@pytest.mark.parametrize(
    ("kind", "text"), [("text8", "the history of  rivers "), ("bytes", "Ünï \x00\x7f\xad\n  code 日本 🙂 don't")]
)
def test_an_export_carries_the_tokenizer(tmp_path: Path, kind: str, text: str) -> None:
    """Those that are no file of their own, too: the same ids and the same text back, with MDLM's layout as the way."""
    reader = load_tokenizer(kind)
    size, mask_id = vocabulary(reader)
    models = {}
    for depth in (1, 2):
        network = Transformer(Architecture(size, LENGTH, D, depth, HEADS))
        models[f"{depth}b"] = network.initialise(torch.Generator().manual_seed(depth)).eval().requires_grad_(False)
    out = convert.export(Family(models, mask_id, size, LENGTH, reader), tmp_path / "out")
    for source in (out, out / "1b"):
        back = convert.load(source)
        assert back.mask_id == mask_id and not back.meta["missing"] and back.tokenizer is not None
        assert back.tokenizer.encode(text) == reader.encode(text)
        assert back.tokenizer.decode(reader.encode(text)) == text
        assert back.tokenizer.decode([mask_id]) == reader.decode([mask_id])


@pytest.mark.parametrize("size", [28, 8193, 50256, 50257, 50258, 50259])
def test_gpt2s_tokenizer_is_suggested_where_it_fits(tmp_path: Path, size: int) -> None:
    network = Transformer(Architecture(size, LENGTH, 4, 1, 1)).initialise(torch.Generator().manual_seed(0))
    out = convert.export(Family({"a": network.eval()}, size - 1, size, LENGTH), tmp_path / "out")
    (missing,) = convert.describe(out)["missing"]
    assert ("GPT-2" in missing) == (size in (50257, 50258)) and (f"{size} tokens" in missing) != ("GPT-2" in missing)
