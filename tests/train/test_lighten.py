"""A light sibling: blocks chosen and taught, with known answers."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relaylm.cli import main as cli
from relaylm.convert import export
from relaylm.core.noise import uniforms
from relaylm.errors import UserError
from relaylm.models.denoiser import Architecture, FromLogits, Transformer
from relaylm.models.family import Family
from relaylm.models.folder import save_family
from relaylm.train import checkpoint
from relaylm.train.corpus import TokenFile, prepare
from relaylm.train.lighten import _teachable, choose_blocks, lighten, with_blocks
from relaylm.train.objective import Batches, Objective, mask_words
from relaylm.train.recipe import Recipe
from relaylm.train.run import CHECKPOINT, train_model
from relaylm.train.step import Trainer

SHAPE = Architecture(28, 16, width=16, depth=4, heads=2)
TOY = Recipe(steps=10, batch=8, warmup=2, lr=1e-2, ema=0.9, log_every=3, eval_rows=4, checkpoint_every=4, dropout=0.0)


def network(shape: Architecture = SHAPE, seed: int = 0, silent: tuple[int, ...] = ()) -> Transformer:
    """A network whose every weight matters, but for blocks that add nothing to the residual stream."""
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(shape)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    for i in silent:
        block: Any = model.blocks[i]
        for parameter in (*block.attn_out.parameters(), *block.mlp[2].parameters()):
            parameter.data.zero_()
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.txt").write_text("some words that come again and others that do not " * 30)
    return prepare(folder / "a.txt", folder / "c", tokenizer="text8", holdout=0.1, progress=False)


@pytest.mark.parametrize("changes", [{}, {"tied": True}, {"adaln": True, "time_conditioning": True}])
def test_with_all_its_blocks_it_is_the_heavy_model(changes: dict[str, bool]) -> None:
    model = network(Architecture(28, 16, width=16, depth=4, heads=2, **changes))  # type: ignore[arg-type]
    tokens, t = torch.randint(0, 28, (3, 16), generator=torch.Generator().manual_seed(1)), torch.tensor([0.2, 0.5, 1.0])
    assert torch.equal(with_blocks(model, range(4)).logits(tokens, t), model.logits(tokens, t))
    fewer = with_blocks(model, (3, 0))
    assert fewer.depth == 2 and torch.equal(fewer.blocks[1].attn_qkv.weight, model.blocks[3].attn_qkv.weight)  # type: ignore[union-attr]


def test_blocks_that_add_nothing_go_first() -> None:
    rows = np.random.default_rng(0).integers(0, 27, (6, 16))
    found = choose_blocks(network(silent=(0, 2)), rows, 1)
    assert {one["block"] for one in found["left_out"][:2]} == {0, 2}
    assert [one["missed"] for one in found["left_out"][:2]] == pytest.approx([0, 0], abs=1e-9)
    assert found["left_out"][2]["missed"] > 0.01 and found["kept"] in ([1], [3])
    assert choose_blocks(network(), rows, 4)["kept"] == [0, 1, 2, 3]
    for blocks in (0, 5):
        with pytest.raises(UserError, match="1 to 4 blocks"):
            choose_blocks(network(), rows, blocks)


def test_what_is_missed_is_nats_for_one_token() -> None:
    """One block left out of two, written out: t of row n is (n + 1/2) / N, and a position is masked up to it."""
    model = network(replace(SHAPE, depth=2)).double()
    rows = np.random.default_rng(0).integers(0, 27, (5, 16))
    found = choose_blocks(model, rows, 1)
    for gone in (0, 1):
        rest, total = with_blocks(model, {0, 1} - {gone}), 0.0
        for n, row in enumerate(torch.from_numpy(rows)):
            t = (n + 0.5) / 5
            masked = torch.from_numpy(uniforms(0, np.array([n]), 16)[0] <= t)
            seen, time = torch.where(masked, 27, row)[None], torch.tensor([t])
            log_p, log_q = (m.logits(seen, time)[0, masked, :27].log_softmax(-1) for m in (model, rest))
            total += float((log_p.exp() * (log_p - log_q)).sum()) / t / (5 * 16)
        if gone == found["left_out"][0]["block"]:
            assert found["left_out"][0]["missed"] == pytest.approx(total, rel=1e-6)
        else:
            assert found["left_out"][0]["missed"] < total


def test_a_family_keeps_what_it_has(corpus: TokenFile, tmp_path: Path) -> None:
    """Its judge, its twins, its held-out text; and the model that was named is the heavy one."""
    judge, models = network(replace(SHAPE, causal=True)), {"small": network(replace(SHAPE, depth=3)), "big": network()}
    twins, options = {"big": network(seed=9)}, {"length": 16, "heldout": "some words", "name": "mine"}
    save_family(tmp_path / "all", models, corpus.tokenizer, judge=judge, twins=twins, **options)  # type: ignore[arg-type]
    same: dict[str, Any] = {"rows": 2, "progress": False, "steps": 2, "batch": 4, "eval_rows": 2}
    folder = lighten(tmp_path / "all", corpus.folder, tmp_path / "out", 2, heavy="small", **same)
    family = Family.load(folder, dtype="float32")
    assert (family.names, family.light, family.heavy) == (("light2", "small", "big"), "light2", "small")
    assert family.judge is not None and family.heldout is not None and family.heldout.read_text() == "some words"
    kept: Any = family.twins["big"]
    assert family.name == "mine" and torch.equal(kept.blocks[3].attn_qkv.weight, twins["big"].blocks[3].attn_qkv.weight)  # type: ignore[union-attr]
    found = checkpoint.load(tmp_path / "out" / "models" / "light2" / CHECKPOINT)
    assert found is not None  # matrices are stored in bfloat16, as those of other families are
    light: Any = family["light2"]
    average = found[0]["average/blocks.0.attn_qkv.weight"]
    assert torch.equal(light.blocks[0].attn_qkv.weight, average.bfloat16().float()) and not torch.equal(
        average, average.bfloat16().float()
    )


def test_the_loss_is_the_divergence_and_its_gradient_the_derivative(corpus: TokenFile) -> None:
    heavy, light = network().double(), network(seed=5).double().requires_grad_(True)
    recipe = Recipe(batch=8, dropout=0.0)
    (part,) = Batches(corpus, recipe, 16, 1, False).at(0)

    def written_out() -> float:
        words, total = mask_words(1, part["sample"], 16), 0.0
        for b, row in enumerate(part["tokens"].long()):
            t = float(part["t"][b])
            masked = words[b].double() < t * 2.0**32
            seen, time = torch.where(masked, 27, row)[None], torch.tensor([t], dtype=torch.float64)
            log_p, log_q = (m.logits(seen, time)[0, masked, :27].log_softmax(-1) for m in (heavy, light))
            total += float((log_p.exp() * (log_p - log_q)).sum().detach()) / t
        return total / (8 * 16)

    for gather in (True, False):
        light.zero_grad()
        loss, counts = Objective(light, recipe, 1, False, 8, gather, heavy)(**part)
        loss.backward()
        assert float(loss.detach()) == pytest.approx(written_out(), rel=1e-6) and counts[1] == 0
        generator = torch.Generator().manual_seed(3)
        along = [torch.randn(p.shape, dtype=torch.float64, generator=generator) for p in light.parameters()]
        slope = sum(float((p.grad * way).sum()) for p, way in zip(light.parameters(), along) if p.grad is not None)
        ends = []
        with torch.no_grad():
            for step in (1e-5, -2e-5, 1e-5):
                for p, way in zip(light.parameters(), along):
                    p.add_(step * way)
                ends.append(written_out())
        assert slope == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4)
    same, _ = Objective(heavy.requires_grad_(True), recipe, 1, False, 8, None, heavy)(**part)
    same.backward()
    assert float(same.detach()) == pytest.approx(0, abs=1e-6)  # logits are float32 there
    assert all(float(p.grad.abs().max()) < 1e-5 for p in heavy.parameters() if p.grad is not None)


def test_interrupted_and_resumed_is_uninterrupted(
    corpus: TokenFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heavy = network()
    start = with_blocks(heavy, (0, 3))

    def train(folder: Path) -> dict[str, Any]:
        return train_model(corpus, folder, start.architecture, TOY, start=start, teacher=heavy, progress=False)

    train(tmp_path / "whole")
    original = Trainer.step

    def interrupted(self: Trainer, parts: Any) -> torch.Tensor:
        result = original(self, parts)
        if self.step_count == 6:
            signal.raise_signal(signal.SIGTERM)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        with pytest.raises(SystemExit):
            train(tmp_path / "parts")
    train(tmp_path / "parts")
    found = [checkpoint.load(tmp_path / name / CHECKPOINT) for name in ("whole", "parts")]
    assert found[0] is not None and found[1] is not None
    assert all(torch.equal(value, found[1][0][name]) for name, value in found[0][0].items())
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    first = [json.loads(line)["loss"] for line in lines if "loss" in line]
    assert first[-1] < first[0]  # it learned to imitate


def test_a_family_gets_a_sibling(corpus: TokenFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_family(tmp_path / "heavy", {"one": network()}, corpus.tokenizer, length=16)
    words = ["lighten", str(tmp_path / "heavy"), "--blocks", "2", "--corpus", str(corpus.folder), "--rows", "3"]
    words += ["--out", str(tmp_path / "out"), "--device", "cpu"]
    for setting in ("steps=6", "batch=4", "eval_rows=2"):
        words += ["--set", setting]
    assert cli.main(words) == 0
    family = Family.load(tmp_path / "out" / "family")
    assert family.names == ("light2", "one") and (family.light, family.heavy) == ("light2", "one")
    about = family.meta["lightened"]
    assert (
        len(about["choice"]["kept"]) == 2
        and about["of"] == "one"
        and math.isfinite(about["summary"]["heldout"]["bits"])
    )
    assert family.heldout is not None
    for name, tensor in network().state_dict().items():
        assert torch.equal(family["one"].state_dict()[name], tensor)  # type: ignore[attr-defined]
    assert cli.main(words) == 0 and cli.main([*words, "--set", "lr=0.5"]) == 2
    assert "lr was" in capsys.readouterr().err


def test_a_checkpoint_in_mdlms_layout_gets_a_sibling(corpus: TokenFile, tmp_path: Path) -> None:
    """Converted in place: adaLN without time is folded into biases, and the sibling has the same kind of blocks."""
    export(Family({"one": network()}, 27, 28, 16), tmp_path / "mdlm")
    folder = lighten(tmp_path / "mdlm", corpus.folder, tmp_path / "out", 3, rows=2, progress=False, steps=3, batch=4)
    family = Family.load(folder)
    assert family.light == "light3" and [getattr(family[name], "depth", 0) for name in family.names] == [3, 4]
    assert family["light3"].architecture.qkv_bias  # type: ignore[attr-defined]


def test_what_cannot_be_lightened_is_said(corpus: TokenFile, tmp_path: Path) -> None:
    silent = FromLogits(lambda tokens, t: torch.zeros(*tokens.shape, 28))
    with pytest.raises(UserError, match="only relaylm's own networks"):
        _teachable(Family({"a": silent}, 27, 28, 16), "a", corpus)
    blocks = replace(SHAPE, block_length=4)
    with pytest.raises(UserError, match="one block of positions after another"):
        _teachable(Family({"a": network(blocks)}, 27, 28, 16), "a", corpus)
    with pytest.raises(UserError, match="own tokenizer"):
        _teachable(Family({"a": network(Architecture(30, 16, 16, 1, 2))}, 29, 30, 16), "a", corpus)
    with pytest.raises(UserError, match="no setting 'blocks_'"):
        lighten("wiki-char", corpus.folder, tmp_path, blocks_=3)
    with pytest.raises(UserError, match="no setting 'width'"):  # of a preset, not of a recipe
        lighten("wiki-char", corpus.folder, tmp_path, width=64)


def test_what_was_chosen_for_one_model_is_not_anothers(corpus: TokenFile, tmp_path: Path) -> None:
    """Two models of one depth in a family; and what cannot succeed is said before blocks are chosen."""
    save_family(tmp_path / "two", {"a": network(), "b": network(seed=1)}, corpus.tokenizer, length=16)
    same: dict[str, Any] = {"rows": 2, "progress": False, "steps": 2, "batch": 4, "eval_rows": 2}
    out = tmp_path / "out"
    with pytest.raises(UserError, match="cannot name a model"):
        lighten(tmp_path / "two", corpus.folder, out, 2, name="a/b", **same)
    save_family(tmp_path / "long", {"a": network(replace(SHAPE, length=64))}, corpus.tokenizer, length=64)
    (tmp_path / "a.txt").write_text("some words that come again " * 20)
    short = prepare(tmp_path / "a.txt", tmp_path / "short", tokenizer="text8", progress=False)
    with pytest.raises(UserError, match="less than one row of 64"):
        lighten(tmp_path / "long", short.folder, out, 2, **same)
    assert not out.exists()
    lighten(tmp_path / "two", corpus.folder, out, 2, heavy="a", **same)
    with pytest.raises(UserError, match=r"is of another model \(a\)"):
        lighten(tmp_path / "two", corpus.folder, out, 2, heavy="b", **same)
    choice = json.loads((out / "blocks.json").read_text())
    (out / "blocks.json").write_text(
        json.dumps({k: choice[k] for k in ("depth", "kept", "left_out", "rows", "length")})
    )
    lighten(tmp_path / "two", corpus.folder, out, 2, heavy="a", **same)  # as earlier versions wrote it
