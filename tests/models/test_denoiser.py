"""The network against a straight transcription of its description, pruned against full, folded against modulated."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from relaylm.errors import UserError
from relaylm.models.denoiser import Architecture, Denoiser, FromLogits, Transformer, build, expected_shapes
from relaylm.models.layers import block_mask

PLAIN = Architecture(vocab_size=23, length=12, width=24, depth=3, heads=3)
ADALN = replace(PLAIN, adaln=True, cond_dim=10)
TIMED = replace(ADALN, time_conditioning=True)
CAUSAL = replace(PLAIN, causal=True)
BIASED = replace(PLAIN, qkv_bias=True, mlp_ratio=2)
KINDS = {"plain": PLAIN, "adaln": ADALN, "time-conditioned": TIMED, "causal": CAUSAL, "biased": BIASED}


def network(a: Architecture, seed: int = 0, dtype: torch.dtype = torch.float64) -> Transformer:
    """Random weights throughout: no zeros, no ones, so that nothing is tested away."""
    rng = torch.Generator().manual_seed(seed)
    state = {
        name: torch.randn(shape, generator=rng, dtype=torch.float64) * (0.3 if len(shape) > 1 else 0.5)
        + ("norm" in name)
        for name, shape in expected_shapes(a).items()
    }
    return build(a, {name: value.to(dtype) for name, value in state.items()})


def batch(a: Architecture, length: int, rows: int = 4, seed: int = 1) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    tokens_BL = torch.randint(0, a.vocab_size, (rows, length), generator=rng)
    return tokens_BL, torch.rand(rows, generator=rng, dtype=torch.float64)


def transcription(model: Transformer, tokens_L: list[int], t: float) -> np.ndarray:
    """checkpoints.md 3.1 for one row, position by position and head by head, by numpy: logits (L, V)."""
    a = model.architecture
    w = {name: value.numpy() for name, value in model.state_dict().items()}
    d, heads, size = a.width, a.heads, a.width // a.heads

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        centred = x - x.mean()
        return centred / np.sqrt((centred**2).mean() + 1e-5) * weight

    def silu(x: np.ndarray) -> np.ndarray:
        return x / (1 + np.exp(-x))

    def rotated(x: np.ndarray, position: int) -> np.ndarray:
        out = np.empty(size)
        for k in range(size // 2):
            angle = position * 10_000 ** (-2 * k / size)
            out[k] = x[k] * math.cos(angle) - x[k + size // 2] * math.sin(angle)
            out[k + size // 2] = x[k + size // 2] * math.cos(angle) + x[k] * math.sin(angle)
        return out

    modulation = [np.zeros(6 * d) for _ in range(a.depth)]
    final = np.zeros(2 * d)
    if a.adaln:
        sigma = -math.log(1 - 0.999 * t) if a.time_conditioning else 0.0
        angles = [sigma * math.exp(-math.log(1e4) * k / 128) for k in range(128)]
        features = np.array([math.cos(x) for x in angles] + [math.sin(x) for x in angles])
        hidden = silu(w["sigma_map.mlp.0.weight"] @ features + w["sigma_map.mlp.0.bias"])
        c = silu(w["sigma_map.mlp.2.weight"] @ hidden + w["sigma_map.mlp.2.bias"])
        modulation = [
            w[f"blocks.{i}.adaLN_modulation.weight"] @ c + w[f"blocks.{i}.adaLN_modulation.bias"]
            for i in range(a.depth)
        ]
        final = w["output_layer.adaLN_modulation.weight"] @ c + w["output_layer.adaLN_modulation.bias"]

    x = [w["vocab_embed.embedding"][token] for token in tokens_L]
    for i in range(a.depth):
        p = f"blocks.{i}."
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = np.split(modulation[i], 6)
        if not a.adaln:
            gate_a = gate_m = np.ones(d)
        qkv = []
        for row in x:
            h = norm(row, w[p + "norm1.weight"]) * (1 + scale_a) + shift_a
            qkv.append(w[p + "attn_qkv.weight"] @ h + w.get(p + "attn_qkv.bias", 0.0))
        attended = [np.zeros(d) for _ in x]
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            q = [rotated(row[:d][part], j) for j, row in enumerate(qkv)]
            k = [rotated(row[d : 2 * d][part], j) for j, row in enumerate(qkv)]
            v = [row[2 * d :][part] for row in qkv]
            for j in range(len(x)):
                seen = range(j + 1) if a.causal else range(len(x))
                weight = np.exp([q[j] @ k[m] / math.sqrt(size) for m in seen])
                attended[j][part] = sum(weight[m] * v[m] for m in seen) / weight.sum()
        for j in range(len(x)):
            row = x[j] + gate_a * (w[p + "attn_out.weight"] @ attended[j])
            h = norm(row, w[p + "norm2.weight"]) * (1 + scale_m) + shift_m
            up = w[p + "mlp.0.weight"] @ h + w[p + "mlp.0.bias"]
            up = 0.5 * up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
            x[j] = row + gate_m * (w[p + "mlp.2.weight"] @ up + w[p + "mlp.2.bias"])
    shift, scale = np.split(final, 2)
    out = [norm(row, w["output_layer.norm_final.weight"]) * (1 + scale) + shift for row in x]
    return np.stack([w["output_layer.linear.weight"] @ h + w["output_layer.linear.bias"] for h in out])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [12, 5, 1])
def test_network_is_what_its_description_says(kind: str, length: int) -> None:
    model = network(KINDS[kind])
    tokens_BL, t_B = batch(model.architecture, length)
    logits_BLV = model.logits(tokens_BL, t_B)
    for tokens_L, t, logits_LV in zip(tokens_BL.tolist(), t_B.tolist(), logits_BLV, strict=True):
        expected = transcription(model, tokens_L, t)
        assert np.abs(logits_LV.numpy() - expected).max() < 1e-11 * np.abs(expected).max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [12, 7])
def test_logits_at_positions_are_the_full_logits_there(kind: str, length: int) -> None:
    model = network(KINDS[kind])
    tokens_BL, t_B = batch(model.architecture, length)
    positions_BK = torch.stack([torch.randperm(length)[:5] for _ in range(4)])
    positions_BK[0] = 3  # the same one again and again is allowed
    full = model.logits(tokens_BL, t_B)
    at = model.logits_at(tokens_BL, t_B, positions_BK)
    expected = torch.stack([full[b, positions_BK[b]] for b in range(4)])
    assert at.shape == (4, 5, 23)
    assert (at - expected).abs().max() < 1e-12 * full.abs().max()


@pytest.mark.parametrize("kind", ["plain", "time-conditioned"])
def test_head_on_a_flat_list_of_rows(kind: str) -> None:
    """The sampler runs the head on due positions of many rows side by side, each with its own row's time."""
    model = network(KINDS[kind])
    tokens_BL, t_B = batch(model.architecture, 9)
    full = model.logits(tokens_BL, t_B)
    hidden_BKD = model.hidden_at(tokens_BL, t_B, torch.tensor([[0, 8], [1, 1], [4, 2], [3, 5]]))
    kept = torch.tensor([6, 0, 3, 5])
    flat = model.head(hidden_BKD.flatten(0, 1)[kept], t_B[kept // 2])
    expected = torch.stack([full[3, 3], full[0, 0], full[1, 1], full[2, 2]])
    assert (flat - expected).abs().max() < 1e-12 * full.abs().max()


def test_time_matters_only_with_time_conditioning() -> None:
    for kind, moves in (("plain", False), ("adaln", False), ("time-conditioned", True)):
        model = network(KINDS[kind])
        tokens_BL, t_B = batch(model.architecture, 6)
        assert torch.equal(model.logits(tokens_BL, t_B), model.logits(tokens_BL, t_B / 2)) != moves


@pytest.mark.parametrize("bias", [False, True])
def test_folding_changes_nothing(bias: bool) -> None:
    model = network(replace(ADALN, qkv_bias=bias))
    folded = model.fold()
    assert not folded.architecture.adaln and not any("adaLN" in name or "sigma" in name for name in folded.state_dict())
    tokens_BL, t_B = batch(ADALN, 12)
    before, after = model.logits(tokens_BL, t_B), folded.logits(tokens_BL, t_B)
    assert (before - after).abs().max() < 1e-12 * before.abs().max()
    positions_BK = torch.tensor([[1], [5], [11], [0]])
    at = folded.logits_at(tokens_BL, t_B, positions_BK)[:, 0]
    assert (at - before[torch.arange(4), positions_BK[:, 0]]).abs().max() < 1e-12 * before.abs().max()
    assert folded.fold() is folded
    with pytest.raises(UserError, match="cannot be folded"):
        network(TIMED).fold()


def test_folding_is_done_in_float64() -> None:
    """A float32 network folds with one rounding of each weight, not with an accumulation of them."""
    exact, single = network(ADALN).fold(), network(ADALN, dtype=torch.float32).fold()
    for name, value in exact.state_dict().items():
        assert single.state_dict()[name].dtype == torch.float32
        assert torch.allclose(single.state_dict()[name].double(), value, rtol=1e-6, atol=1e-6), name


@pytest.mark.parametrize("kind", ["plain", "time-conditioned"])
def test_bfloat16_is_close_and_keeps_the_residual_stream(kind: str) -> None:
    model = network(KINDS[kind], dtype=torch.float32)
    tokens_BL, t_B = batch(model.architecture, 12)
    before = model.logits(tokens_BL, t_B)
    half = model.cast(torch.bfloat16)
    assert half.blocks[0].attn_qkv.weight.dtype == torch.bfloat16
    assert half.vocab_embed.embedding.dtype == half.output_layer.linear.weight.dtype == torch.float32
    after = half.logits(tokens_BL, t_B)
    assert half.hidden_at(tokens_BL, t_B, None).dtype == after.dtype == torch.float32
    change = float((after - before).std() / before.std())
    assert 1e-5 < change < 0.05


def test_sampling_then_training() -> None:
    """What was cached in inference mode must not break a backward pass, with modulation or without."""
    for a in (PLAIN, TIMED):
        model = Transformer(a).initialise(torch.Generator().manual_seed(0))
        tokens_BL, t_B = batch(a, 8)
        with torch.inference_mode():
            model.logits(tokens_BL, t_B)
        model.logits(tokens_BL, t_B).logsumexp(-1).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


def test_fresh_networks_are_uniform_and_reproducible() -> None:
    model = Transformer(TIMED).initialise(torch.Generator().manual_seed(5))
    again = Transformer(TIMED).initialise(torch.Generator().manual_seed(5))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert (model.logits(*batch(TIMED, 12)) == 0).all()
    embedding = model.vocab_embed.embedding
    assert 0.015 < float(embedding.detach().std()) < 0.025


@pytest.mark.parametrize(("depth", "count"), [(12, 169_627_218), (4, 108_205_650), (10, 154_271_826)])
def test_parameter_counts_of_the_public_checkpoint(depth: int, count: int) -> None:
    a = Architecture(50258, 1024, 768, depth, 12, adaln=True, cond_dim=128)
    assert sum(math.prod(shape) for shape in expected_shapes(a).values()) == count
    assert a.mask_id == 50257


def test_tensor_names_and_order_of_the_public_checkpoint() -> None:
    names = list(expected_shapes(replace(ADALN, depth=1)))
    block = "norm1.weight attn_qkv.weight attn_out.weight norm2.weight mlp.0.weight mlp.0.bias mlp.2.weight mlp.2.bias"
    assert names == [
        "vocab_embed.embedding",
        *(f"sigma_map.mlp.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")),
        *(f"blocks.0.{name}" for name in block.split()),
        *(f"blocks.0.adaLN_modulation.{kind}" for kind in ("weight", "bias")),
        *(f"output_layer.{name}" for name in ("norm_final.weight", "linear.weight", "linear.bias")),
        *(f"output_layer.adaLN_modulation.{kind}" for kind in ("weight", "bias")),
    ]


def test_build_refuses_what_does_not_fit() -> None:
    state = network(PLAIN).state_dict()
    name = "blocks.1.mlp.0.weight"
    with pytest.raises(UserError, match=rf"{name} is missing"):
        build(PLAIN, {key: value for key, value in state.items() if key != name})
    with pytest.raises(UserError, match=r"more\.weight does not belong"):
        build(PLAIN, {**state, "more.weight": torch.zeros(3)})
    with pytest.raises(UserError, match=rf"{name} has shape \(24, 96\), expected \(96, 24\)"):
        build(PLAIN, {**state, name: state[name].T})
    with pytest.raises(UserError, match="missing"):
        build(ADALN, state)
    assert not any(p.requires_grad for p in build(PLAIN, state).parameters())


@pytest.mark.parametrize(
    "change",
    [{"width": 25}, {"heads": 5}, {"depth": 0}, {"vocab_size": 0}, {"time_conditioning": True}, {"mask_id": 23}],
)
def test_impossible_architectures(change: dict[str, int]) -> None:
    with pytest.raises(UserError):
        replace(PLAIN, **change)


@pytest.mark.parametrize("kind", ["plain", "biased"])
@pytest.mark.parametrize("positions", [None, 1, 5])
def test_flops_are_those_that_are_done(kind: str, positions: int | None) -> None:
    model = network(KINDS[kind])
    tokens_BL, t_B = batch(model.architecture, 11, rows=2)
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        if positions is None:
            model.logits(tokens_BL, t_B)
        else:
            model.logits_at(tokens_BL, t_B, torch.zeros(2, positions, dtype=torch.long))
    assert counter.get_total_flops() == 2 * model.flops(11, positions)


def test_what_a_position_of_a_block_sees() -> None:
    """Positions 3, 4 and 5 in blocks of four, after three finished ones."""
    sees_LY = block_mask(3, 3, 4, torch.device("cpu"))
    assert sees_LY is not None and sees_LY.int().tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6, [1] * 6]
    assert block_mask(2, 3, 4, torch.device("cpu")).int().tolist() == [[1, 1, 1, 1, 0], [1] * 5]  # type: ignore[union-attr]
    assert block_mask(4, 8, 4, torch.device("cpu")) is None  # one block sees itself and all before it


def test_tables_made_from_weights_follow_them() -> None:
    model = network(BIASED)
    table_VX = model.first_qkv()
    assert model.first_qkv() is table_VX  # made once
    with torch.no_grad():
        model.vocab_embed.embedding[5] += 1
    again_VX = model.first_qkv()
    moved_V = (again_VX != table_VX).any(dim=1)
    assert moved_V.nonzero().flatten().tolist() == [5]
    model.load_state_dict(network(BIASED, seed=1).state_dict())
    assert torch.equal(model.first_qkv(), network(BIASED, seed=1).first_qkv())


@pytest.mark.parametrize("positions", [None, 3])
def test_flops_after_finished_blocks_are_those_that_are_done(positions: int | None) -> None:
    model = network(replace(PLAIN, block_length=4))
    tokens_BL, t_B = batch(PLAIN, 12, rows=2)
    at_BK = None if positions is None else torch.tensor([[0, 1, 3], [2, 1, 0]])
    with torch.no_grad():
        past = model.extend(tokens_BL[:, :8])
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model.head(model.hidden_at(tokens_BL[:, 8:], t_B, at_BK, past))
    assert counter.get_total_flops() == 2 * model.flops(4, positions, past=8)


def test_flops_of_a_judge_at_some_positions() -> None:
    """Its last block is not pruned, so all that is saved is the head."""
    model = network(CAUSAL)
    tokens_BL, t_B = batch(CAUSAL, 11, rows=2)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model.logits_at(tokens_BL, t_B, torch.tensor([[0, 1, 3], [2, 1, 0]]))
    assert counter.get_total_flops() == 2 * model.flops(11, 3)


def test_any_function_is_a_denoiser() -> None:
    table = torch.randn(6, 9)
    wrapped = FromLogits(lambda tokens_BL, t_B: table[tokens_BL] * t_B[:, None, None])
    tokens_BL, t_B = torch.randint(0, 6, (2, 4)), torch.tensor([0.5, 1.0])
    at = wrapped.logits_at(tokens_BL, t_B, torch.tensor([[3, 0], [1, 1]]))
    assert torch.equal(at[0, 0], table[tokens_BL[0, 3]] * 0.5) and torch.equal(at[1, 1], table[tokens_BL[1, 1]])
    assert isinstance(wrapped, Denoiser) and isinstance(network(PLAIN), Denoiser)
