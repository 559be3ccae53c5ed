"""SMDM against its mathematics written out again in numpy (float64, loops over heads)."""

from __future__ import annotations

import collections
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from relaylm import convert
from relaylm.convert import smdm
from relaylm.convert.pickles import Lazy
from relaylm.convert.tensors import Options, count
from relaylm.errors import UserError

V, E, F, HEADS, BLOCKS = 12, 16, 40, 2, 3  # symbols without the mask
TOKENS = torch.tensor([[3, 12, 0, 12, 12, 7, 12, 1], [12] * 8])
T = torch.tensor([0.3, 0.9], dtype=torch.float64)
POSITIONS = torch.tensor([[1, 3, 6], [7, 0, 2]])


def published(blocks: int = BLOCKS, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int, scale: float = 0.3) -> torch.Tensor:
        return torch.randn(shape, generator=g) * scale

    state = {"lm_head.weight": rand(V, E), "transformer.wte.weight": rand(V + 1, E, scale=1.0)}
    for i in range(blocks):
        p = f"transformer.h.{i}."
        state |= {p + "norm_1.weight": 1 + rand(E), p + "norm_2.weight": 1 + rand(E)}
        state |= {p + "attn.attn.weight": rand(3 * E, E), p + "attn.proj.weight": rand(E, E)}
        state |= {p + "mlp.swiglu.w1.weight": rand(F, E), p + "mlp.swiglu.w2.weight": rand(F, E)}
        state |= {p + "mlp.swiglu.w3.weight": rand(E, F)}
    return state | {"transformer.ln_f.weight": 1 + rand(E)}


def transcription(state: dict[str, torch.Tensor], tokens: np.ndarray) -> np.ndarray:
    w = {name: value.double().numpy() for name, value in state.items()}
    head = E // HEADS
    # The published cache of angles: float32, rounded to bfloat16.
    theta = 1.0 / (10_000 ** (torch.arange(0, head, 2).float() / head))
    angle = torch.arange(len(tokens)).float()[:, None] * theta
    cos, sin = angle.cos().bfloat16().double().numpy(), angle.sin().bfloat16().double().numpy()

    def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight

    def rotary(x: np.ndarray) -> np.ndarray:
        a, b = x[:, : head // 2], x[:, head // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)

    x = w["transformer.wte.weight"][tokens]
    for i in range(sum(name.endswith("norm_1.weight") for name in w)):
        p = f"transformer.h.{i}."
        qkv = rms(x, w[p + "norm_1.weight"]) @ w[p + "attn.attn.weight"].T
        mixed = []
        for h in range(HEADS):  # the rows of one head lie together: its q, its k, its v
            q, k, v = (qkv[:, (3 * h + j) * head : (3 * h + j + 1) * head] for j in range(3))
            scores = rotary(q) @ rotary(k).T / math.sqrt(head)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            mixed.append(weights / weights.sum(1, keepdims=True) @ v)
        x = x + np.concatenate(mixed, 1) @ w[p + "attn.proj.weight"].T
        y = rms(x, w[p + "norm_2.weight"])
        gate = y @ w[p + "mlp.swiglu.w1.weight"].T
        up = y @ w[p + "mlp.swiglu.w2.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[p + "mlp.swiglu.w3.weight"].T
    return rms(x, w["transformer.ln_f.weight"]) @ w["lm_head.weight"].T


def store(path: Path, state: dict[str, torch.Tensor]) -> Path:
    safetensors.torch.save_file(state, path)
    return path


def test_logits_are_those_of_the_mathematics(tmp_path: Path) -> None:
    state = published()
    path = store(tmp_path / "mdm-test.safetensors", state)
    assert convert.recognise(path) == "smdm"
    family = convert.load(path, dtype="float64", heads=HEADS)
    model: Any = family["mdm-test"]
    assert (family.vocab_size, family.mask_id, family.length) == (V + 1, V, 2048)
    assert "TinyLlama" in family.meta["missing"][0]
    expected = torch.from_numpy(np.stack([transcription(state, row.numpy()) for row in TOKENS]))
    full = model.logits(TOKENS, T)
    torch.testing.assert_close(full[..., :V], expected, rtol=1e-9, atol=1e-9)
    assert (full[..., V] == -torch.inf).all()  # the mask has no logit
    at = model.logits_at(TOKENS, T, POSITIONS)
    torch.testing.assert_close(at, full.gather(1, POSITIONS[..., None].expand(-1, -1, V + 1)))
    half: Any = convert.load(path, dtype="bfloat16", heads=HEADS)["mdm-test"]
    assert half.h[0].qkv.dtype == torch.bfloat16 and half.lm_head.dtype == torch.float32
    torch.testing.assert_close(half.logits(TOKENS, T)[..., :V], expected.float(), rtol=0.1, atol=0.15)


def test_pth_twin_is_read_too(tmp_path: Path) -> None:
    state = published()
    path = store(tmp_path / "a.safetensors", state)
    torch.save({"model": collections.OrderedDict(state), "iter_num": 5}, tmp_path / "a.pth")
    assert convert.recognise(tmp_path / "a.pth") == "smdm"
    one, two = (convert.load(p, heads=HEADS)["a"].logits(TOKENS, T) for p in (path, tmp_path / "a.pth"))
    assert torch.equal(one, two)


def safetensors_size(shapes: dict[str, tuple[int, ...]]) -> tuple[int, int]:
    """Bytes of the header and of the tensors of a float32 safetensors file: 8 for the header's length, the header as
    compact JSON padded with spaces to a multiple of 8, then the tensors, sorted by name."""
    offset, header = 0, {}
    for name in sorted(shapes):
        end = offset + 4 * math.prod(shapes[name])
        header[name] = {"dtype": "F32", "shape": list(shapes[name]), "data_offsets": [offset, end]}
        offset = end
    return 8 + math.ceil(len(json.dumps(header, separators=(",", ":"))) / 8) * 8, offset


def test_published_numbers() -> None:
    """The size of a published mdm-170M file, header and all."""
    shapes = smdm.layout(smdm.Size(*smdm.SIZES[170]))
    header, tensors = safetensors_size(shapes)
    assert (header, tensors, header + tensors) == (13_728, 876_201_984, 876_215_712)
    assert 4.565e9 < 4 * count(smdm.layout(smdm.Size(*smdm.SIZES[1028]))) < 4.575e9  # listed as 4.57 GB
    assert len(smdm.SIZES) == 30 == len(smdm._HEADS)
    for millions, (blocks, heads, width, hidden) in smdm.SIZES.items():  # named by what they have apart from embeddings
        assert (4 * width + 3 * hidden) * width * blocks / 1e6 == pytest.approx(millions, rel=0.02, abs=0.6)
        assert width / heads in (64, 80, 128)
    assert set(smdm.layout(smdm.Size(BLOCKS, HEADS, E, F, V + 1))) == set(published())


def test_header_size_is_that_of_real_files(tmp_path: Path) -> None:
    path = store(tmp_path / "a.safetensors", published())
    shapes = {name: tuple(value.shape) for name, value in published().items()}
    assert sum(safetensors_size(shapes)) == path.stat().st_size


def test_heads_come_from_the_table(tmp_path: Path) -> None:
    with torch.device("meta"):
        names = {name: torch.empty(shape) for name, shape in smdm.layout(smdm.Size(*smdm.SIZES[170])).items()}
    lazies = {name: Lazy(tuple(value.shape), value.dtype, value.clone) for name, value in names.items()}
    assert smdm.infer(lazies, Options(), tmp_path) == smdm.Size(*smdm.SIZES[170])
    with pytest.raises(UserError, match="not a published size"):
        convert.load(store(tmp_path / "a.safetensors", published()))


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "transformer.h.1.mlp.swiglu.w3.weight",
        "transformer.h.0.attn.attn.weight",
        "transformer.ln_f.weight",
    ],
)
def test_broken_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    state = published()
    without = {key: value for key, value in state.items() if key != name}
    broken = [without, without | {name + "_old": state[name]}]
    if state[name].dim() == 2:
        broken.append(state | {name: state[name].T.contiguous()})
    for wrong in broken:
        with pytest.raises(UserError, match="tensor " + name.replace(".", r"\.")):
            convert.load(store(tmp_path / "a.safetensors", wrong), heads=HEADS)


def test_flops_count_the_matrices() -> None:
    model = smdm.Smdm(smdm.Size(BLOCKS, HEADS, E, F, V + 1), published())
    length = 8
    block = 2 * length * (4 * E * E + 3 * E * F) + 4 * length**2 * E
    assert model.flops(length) == BLOCKS * block + 2 * length * E * V
    assert model.flops(length, length) == model.flops(length)  # asking for every position is no saving
    assert model.flops(length, 1) < model.flops(length, 2) < model.flops(length)
