"""A tied embedding: one tensor with two uses. Whatever is done with it equals an untied network with two copies."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from relaylm.convert import mdlm
from relaylm.models.denoiser import Architecture, Transformer, build, expected_shapes
from relaylm.models.family import Family
from relaylm.models.folder import save_family
from relaylm.sampling.sample import sample
from relaylm.train.corpus import prepare
from relaylm.train.family import train_family
from relaylm.train.objective import Batches, Objective
from relaylm.train.recipe import load_preset
from relaylm.train.step import Trainer, World

HEAD, EMBEDDING = "output_layer.linear.weight", "vocab_embed.embedding"
TIED = Architecture(vocab_size=23, length=12, width=24, depth=2, heads=3, tied=True)


def tied(a: Architecture = TIED, seed: int = 0, dtype: torch.dtype = torch.float32) -> Transformer:
    rng = torch.Generator().manual_seed(seed)
    state = {k: torch.randn(s, generator=rng) * 0.3 + ("norm" in k) for k, s in expected_shapes(a).items()}
    return build(a, {name: value.to(dtype) for name, value in state.items()})


def untied(model: Transformer) -> Transformer:
    """The same function from two tensors."""
    state = {name: value.detach().clone() for name, value in model.named_parameters()}
    return build(replace(model.architecture, tied=False), {**state, HEAD: state[EMBEDDING].clone()})


def test_the_embedding_is_listed_once() -> None:
    plain, names = expected_shapes(replace(TIED, tied=False)), expected_shapes(TIED)
    assert set(plain) - set(names) == {HEAD} and list(names) == [name for name in plain if name != HEAD]
    model = tied()
    assert set(model.state_dict()) == set(names) and model.output_layer.linear.weight is model.vocab_embed.embedding
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in untied(model).parameters()) - 23 * 24
    for other in (copy.deepcopy(model), model.to(torch.float64)):
        assert other.output_layer.linear.weight is other.vocab_embed.embedding
    assert model.vocab_embed.embedding.dtype == torch.float64
    assert TIED.to_json()["tied"] and "tied" not in replace(TIED, tied=False).to_json()
    assert model.flops(12, 3) == untied(model).flops(12, 3)


@pytest.mark.parametrize("change", [{}, {"causal": True}, {"adaln": True, "cond_dim": 10}])
def test_the_same_function_as_two_copies(change: dict[str, bool]) -> None:
    model = tied(replace(TIED, **change))  # type: ignore[arg-type]
    other = untied(model)
    tokens, t = torch.randint(0, 23, (4, 12), generator=torch.Generator().manual_seed(1)), torch.rand(4)
    positions = torch.tensor([[0, 5]]).expand(4, -1)
    assert torch.equal(model.logits(tokens, t), other.logits(tokens, t))
    assert torch.equal(model.logits_at(tokens, t, positions), other.logits_at(tokens, t, positions))
    assert torch.allclose(model.fold().logits(tokens, t), model.logits(tokens, t), atol=1e-5)


def test_samples_are_those_of_two_copies(tmp_path: Path) -> None:
    """Bit for bit, through a folder in float32 and in bfloat16."""
    models = {"d1": tied(replace(TIED, depth=1)), "d2": tied(seed=1)}
    for dtype in ("float32", "bfloat16"):
        folders = {}
        for name, made in (("one", models), ("two", {key: untied(model) for key, model in models.items()})):
            folders[name] = save_family(tmp_path / name / dtype, made, None, length=12, dtype=dtype)
        for where in ("float32", "bfloat16"):
            one, two = (
                sample(Family.load(f, dtype=where), "sandwich:50%", 5, steps=8, seed=3) for f in folders.values()
            )
            assert np.array_equal(one.tokens, two.tokens) and one.cost.flops == two.cost.flops, (dtype, where)


def test_stored_once_and_read_back(tmp_path: Path) -> None:
    model = tied()
    folder = save_family(tmp_path / "f", {"d2": model}, None, length=12, judge=tied(replace(TIED, causal=True)))
    for file in folder.rglob("*.safetensors"):
        names = safetensors.torch.load_file(file)
        assert EMBEDDING in names and HEAD not in names
    family = Family.load(folder)
    back = family.models["d2"]
    assert isinstance(back, Transformer) and back.architecture == model.architecture
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), model.parameters(), strict=True))
    assert family.judge is not None and family.judge.architecture.tied
    entry = json.loads((folder / "family.json").read_text())["models"]["d2"]
    assert entry["architecture"]["tied"] is True and entry["parameters"] == sum(p.numel() for p in model.parameters())


def test_an_export_has_both(tmp_path: Path) -> None:
    family = Family({"d2": tied()}, mask_id=TIED.mask_id, vocab_size=TIED.vocab_size, length=TIED.length)
    mdlm.export(family, tmp_path / "out")
    tensors = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["backbone." + HEAD], tensors["backbone." + EMBEDDING])


@pytest.mark.parametrize("causal", [False, True])
def test_its_gradient_is_the_sum_of_both(causal: bool) -> None:
    model = tied(replace(TIED, vocab_size=600, causal=causal))
    other = untied(model)
    share = (torch.arange(6) + 0.5) / 6
    batch = {
        "tokens": torch.randint(0, 599, (6, 12), generator=torch.Generator().manual_seed(2)),
        "sample": torch.arange(6),
        "threshold": (share * 2**32).long(),
        "weight": 1 / share,
        "t": share,
    }
    recipe, losses = load_preset("wiki-bpe").recipe, []
    for network in (model, other):
        network.requires_grad_(True).train()
        loss, _ = Objective(network, recipe, 0, False, 6)(**batch)
        loss.backward()
        losses.append(float(loss.detach()))
    assert losses[0] == losses[1]
    two = other.vocab_embed.embedding.grad + other.output_layer.linear.weight.grad
    one = model.vocab_embed.embedding.grad
    assert torch.allclose(one, two, atol=1e-5 * float(two.abs().max()))
    for (name, a), b in zip(model.blocks.named_parameters(), other.blocks.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def test_a_tied_family_is_trained(tmp_path: Path) -> None:
    """Fresh weights that are the same in both places after every step, and a family with the preset's names."""
    (tmp_path / "a.txt").write_text("\n\n".join("the quick brown fox jumps over the lazy dog " * 3 for _ in range(60)))
    rule = {"tokenizer": "bpe:270", "packing": "wrap", "length": 16, "holdout": 0.1, "progress": False}
    corpus = prepare(tmp_path / "a.txt", tmp_path / "c", **rule)  # type: ignore[arg-type]
    sizes = {"length": 16, "width": 16, "heads": 2, "depths": [1], "judge": 1, "steps": 3, "batch": 8, "eval_rows": 4}
    preset = load_preset("wiki-bpe", **sizes)
    trainer = Trainer(
        preset.architecture(1, corpus.vocab_size, corpus.mask_id), preset.recipe, 0, World(torch.device("cpu"))
    )
    assert trainer.model.vocab_embed.embedding.std() > 0 and HEAD not in trainer.params and HEAD not in trainer.ema
    before = trainer.model.vocab_embed.embedding.detach().clone()
    trainer.step(Batches(corpus, preset.recipe, 16, 0, False).at(0))
    assert trainer.model.output_layer.linear.weight is trainer.params[EMBEDDING]
    assert not torch.equal(before, trainer.params[EMBEDDING])
    family = Family.load(train_family(tmp_path / "c", tmp_path / "out", preset, device="cpu", progress=False))
    assert family.names == ("d1",) and family.models["d1"].architecture.tied  # type: ignore[attr-defined]
