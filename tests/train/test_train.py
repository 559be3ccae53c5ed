"""The trainer: known answers for its parts, and toy runs of the whole."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from relaylm.cli import main as cli
from relaylm.core.pairs import PairTable, default_spacing
from relaylm.core.schedule import Timetable
from relaylm.errors import UserError
from relaylm.measure.likelihood import bound, causal_bound, held_out, spread_rows
from relaylm.models.denoiser import Architecture, FromLogits
from relaylm.models.family import Family
from relaylm.models.text import wrapped_rows
from relaylm.studies.record.throughput import throughput
from relaylm.train import checkpoint
from relaylm.train import family as train
from relaylm.train import run as loop
from relaylm.train.corpus import TokenFile, prepare
from relaylm.train.family import train_family
from relaylm.train.objective import Batches, _places_of, mask_words, places, shuffled
from relaylm.train.recipe import Preset, Recipe, ema_decay, load_preset, lr_at, override, presets
from relaylm.train.report import _verdict, measured_pairs, report
from relaylm.train.run import train_model
from relaylm.train.step import Trainer, World, training_flops

CPU = World(torch.device("cpu"))
TEXT = " ".join(f"{a} {b} {c}" for a, b, c in itertools.product(("red", "old", "two"), ("cat", "dog"), ("ran", "sat")))
TOY = Recipe(steps=12, batch=8, warmup=3, lr=1e-2, ema=0.9, log_every=3, eval_every=0, eval_rows=4, checkpoint_every=5)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.txt").write_text((TEXT + " ") * 20)
    return prepare(folder / "a.txt", folder / "c", tokenizer="text8", holdout=0.1, progress=False)


def shape(corpus: TokenFile, **changes: int | bool) -> Architecture:
    numbers = {"length": 16, "width": 16, "depth": 2, "heads": 2, **changes}
    return Architecture(corpus.vocab_size, mask_id=corpus.mask_id, **numbers)  # type: ignore[arg-type]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found = checkpoint.load(folder / loop.CHECKPOINT)
    assert found is not None
    return found[0]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ------------------------------------------------------------------------------------------------- recipe


def test_defaults_are_the_papers() -> None:
    r = Recipe()
    assert (r.lr, r.beta1, r.beta2, r.eps, r.weight_decay, r.clip) == (3e-4, 0.9, 0.999, 1e-8, 0.0, 1.0)
    assert (r.warmup, r.decay, r.ema, r.dropout) == (2500, "constant", 0.9999, 0.1)
    assert (r.batch, r.steps, r.floor) == (512, 10**6, 1e-3)


def test_learning_rate() -> None:
    r = Recipe(lr=1.0, warmup=4, steps=12)
    assert [lr_at(r, step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    linear = Recipe(lr=1.0, warmup=4, steps=12, decay="linear", final_lr=0.2)
    assert [lr_at(linear, step) for step in (3, 7, 11)] == pytest.approx([1.0, 0.6, 0.2])
    cosine = Recipe(lr=2.0, warmup=0, steps=8, decay="cosine")
    assert lr_at(cosine, 3) == pytest.approx(1.0) and lr_at(cosine, 7) == pytest.approx(0.0)


def test_moving_average_ramp() -> None:
    r = Recipe(ema=0.9999)
    assert [ema_decay(r, n) for n in (1, 2, 10)] == [2 / 11, 3 / 12, 11 / 20]
    assert ema_decay(r, 10**6) == 0.9999


def test_moving_average_follows_the_weights(corpus: TokenFile) -> None:
    trainer = Trainer(shape(corpus), TOY, 0, CPU)
    batches = Batches(corpus, TOY, 16, 0, False)
    name = "blocks.0.mlp.0.weight"
    expected = trainer.params[name].detach().clone()
    for step in range(4):
        trainer.step(batches.at(step))
        decay = (2 + step) / (11 + step)
        expected = min(0.9, decay) * expected + (1 - min(0.9, decay)) * trainer.params[name].detach()
    torch.testing.assert_close(trainer.ema[name], expected)


def test_presets_load_and_say_what_the_paper_says() -> None:
    assert {"tiny-cpu", "laptop", "wiki-char", "books-char", "wiki-bpe", "owt", "lm1b"} <= set(presets())
    owt = load_preset("owt")
    assert (owt.width, owt.heads, owt.length, owt.packing, max(owt.depths)) == (768, 12, 1024, "wrap", 12)
    assert (owt.recipe.batch, owt.recipe.steps, owt.recipe.lr) == (512, 1_000_000, 3e-4)
    assert (load_preset("lm1b").length, load_preset("lm1b").packing) == (128, "pad")
    for name in presets():
        loaded = load_preset(name)
        loaded.architecture(max(loaded.depths), 100, 99)
        assert json.loads(json.dumps(loaded.to_json()))["name"] == name and loaded.description


def test_overrides_and_bad_settings(tmp_path: Path) -> None:
    preset = load_preset("wiki-char", steps=7, depths=[2, 12], lr=1, seed=None)
    assert preset.recipe.steps == 7 and preset.depths == (2, 12) and preset.recipe.lr == 1.0
    assert override(preset, lr=0.5, width=64, heads=4).recipe.lr == 0.5
    without = load_preset("wiki-char", depths=[2], twin=0, judge=0)
    assert without.twin is None and without.judge is None
    for bad, message in (
        ({"speed": 3}, "no setting 'speed'"),
        ({"lr": "fast"}, "lr must be a number, not 'fast'"),
        ({"steps": 1.5}, "steps must be a whole number, not 1.5"),
        ({"steps": 0}, "at least 1"),
        ({"depths": "4,6"}, "list of whole numbers"),
        ({"depths": [4, 4]}, "different numbers"),
        ({"twin": 5}, "one of"),
        ({"judge": -1}, "at least 1 block"),
        ({"decay": "fast"}, "constant, cosine, linear"),
        ({"dropout": 1.0}, "below 1"),
        ({"lr": math.inf}, "lr must be a finite number"),
        ({"clip": math.nan}, "clip must be a finite number"),
        ({"weight_decay": math.nan}, "weight_decay must be a finite number"),
        ({"seed": 2**64 - 1}, "seed must be at most 18446744073709551614"),
        ({"length": 1}, "at least 2, not 1"),
    ):
        with pytest.raises(UserError, match=message):
            load_preset("wiki-char", **bad)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="there is no preset"):
        load_preset("huge")
    contents = ("[train]\nspeed = 3", "train.speed"), ("[other]", "'other'"), ("x = ", "not valid TOML")
    for content, message in (*contents, ("train = 3", "'train' that is not a table")):
        (tmp_path / "p.toml").write_text(content)
        with pytest.raises(UserError, match=message):
            load_preset(tmp_path / "p.toml")
    (tmp_path / "p.toml").write_text("[model]\nwidth = 32\nheads = 2\n[train]\nlr = 1")
    assert load_preset(tmp_path / "p.toml").width == 32


# -------------------------------------------------------------------------------------------- batches, noise


@pytest.mark.parametrize("size", [1, 2, 3, 17, 64, 1000])
def test_every_pass_is_a_new_permutation(size: int) -> None:
    passes = shuffled(np.arange(4 * size), size, seed=3).reshape(4, size)
    assert all(sorted(row) == list(range(size)) for row in passes.tolist())
    if size > 16:
        assert len({tuple(row) for row in passes.tolist()}) == 4
        assert shuffled(np.arange(size), size, seed=4).tolist() != passes[0].tolist()


def test_times_are_antithetic_and_their_shift_uniform(corpus: TokenFile) -> None:
    batches = Batches(corpus, TOY, 16, 0, False)
    shifts = []
    for step in range(200):
        (part,) = batches.at(step)
        t = np.sort(part["t"].numpy().astype(np.float64))
        assert t[0] > 1e-3 and t[-1] <= 1
        np.testing.assert_allclose(np.diff(t), 0.999 / 8, atol=1e-6)
        shifts.append((t[0] - 1e-3) / 0.999 * 8)
    assert abs(np.mean(shifts) - 0.5) < 0.08 and np.std(shifts) == pytest.approx(math.sqrt(1 / 12), abs=0.04)


def test_batches_do_not_depend_on_processes_or_micro_batches(corpus: TokenFile) -> None:
    def samples(size: int, micro: int) -> dict[int, list[torch.Tensor]]:
        found = {}
        recipe = Recipe(batch=8, micro_batch=micro)
        for rank in range(size):
            for part in Batches(corpus, recipe, 16, 5, False, rank, size).at(3):
                words = mask_words(5, part["sample"], 16)
                for i, sample in enumerate(part["sample"].tolist()):
                    found[sample] = [part["tokens"][i], part["t"][i], part["weight"][i] / size, words[i]]
        return found

    whole = samples(1, 0)
    assert sorted(whole) == list(range(24, 32))
    for size, micro in ((2, 0), (4, 1), (1, 2), (2, 2)):
        split = samples(size, micro)
        assert split.keys() == whole.keys()
        assert all(torch.equal(a, b) for key in whole for a, b in zip(whole[key], split[key]))
    with pytest.raises(UserError, match="multiple of the 3 processes"):
        Batches(corpus, Recipe(batch=8), 16, 0, False, 0, 3)
    with pytest.raises(UserError, match="micro-batch"):
        Batches(corpus, Recipe(batch=8, micro_batch=3), 16, 0, False)


def test_one_pass_reads_every_window_once(corpus: TokenFile) -> None:
    windows = corpus.windows(16)
    recipe = Recipe(batch=1)
    rows = [Batches(corpus, recipe, 16, 0, False).at(step)[0]["tokens"][0].numpy().tobytes() for step in range(windows)]
    text = np.asarray(corpus.train)
    phase = next(p for p in range(16) if text[p : p + 16].tobytes() in rows and text[p + 16 : p + 32].tobytes() in rows)
    assert sorted(rows) == sorted(text[phase + 16 * i : phase + 16 * (i + 1)].tobytes() for i in range(windows))


def test_mask_words_are_uniform_and_differ_by_seed_and_sample() -> None:
    words = mask_words(1, torch.arange(400), 33)
    assert words.shape == (400, 33) and int(words.min()) >= 0 and int(words.max()) < 2**32
    u = words.double() / 2**32
    assert abs(float(u.mean()) - 0.5) < 0.01 and abs(float((u < 0.1).double().mean()) - 0.1) < 0.01
    assert not torch.equal(words, mask_words(2, torch.arange(400), 33))
    assert torch.equal(words[7:9], mask_words(1, torch.tensor([7, 8]), 33))
    large = mask_words(1, torch.tensor([2**32 + 7]), 33)  # the high word of a sample's number counts
    assert not torch.equal(large[0], words[7])


def test_there_is_room_for_all_masked_positions() -> None:
    rng = np.random.default_rng(0)
    for rows, length in ((1, 16), (3, 64), (8, 128), (64, 64)):
        for shift in (0.0, 0.5, 0.999999):
            t = 1e-3 + 0.999 * (1 - (np.arange(rows) / rows + shift) % 1)
            most = max(int((rng.random((rows, length)) < t[:, None]).sum()) for _ in range(200))
            assert most <= places(rows, length)
    assert places(64, 1024) / (64 * 1024) < 0.54


# ------------------------------------------------------------------------------------------------- loss


def straight(trainer: Trainer, part: dict[str, torch.Tensor], floor: float = 1e-3) -> float:
    """The objective written out: every row, every position, float64."""
    model, tokens = trainer.model, part["tokens"].long()
    total = 0.0
    words = mask_words(trainer.seed, part["sample"], tokens.shape[1])
    for b in range(len(tokens)):
        t = float(part["t"][b])
        masked = words[b].double() < t * 2.0**32
        noisy = torch.where(masked, model.mask_id, tokens[b])
        logits = model.logits(noisy[None], torch.tensor([t], dtype=torch.float64))[0]
        logits[:, model.mask_id] = -math.inf
        log_p = logits.log_softmax(-1)
        for l in range(tokens.shape[1]):
            if masked[l] and ("real" not in part or l < int(part["real"][b])):
                total -= float(log_p[l, tokens[b, l]]) / t
    symbols = int(part["real"].sum()) if "real" in part else tokens.numel()
    return total / symbols


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("timed", [True, False])
def test_loss_is_the_formula(corpus: TokenFile, gather: bool, timed: bool) -> None:
    recipe = Recipe(batch=8, dropout=0.0)
    trainer = Trainer(shape(corpus, adaln=timed, time_conditioning=timed), recipe, 1, CPU, gather)
    trainer.model.double()
    trainer.model._rotary.clear()
    with torch.no_grad():  # the output layer starts at zero, which would hide mistakes
        for parameter in trainer.model.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64) * 0.1)
        assert (trainer.objective.places is not None) == gather
        for step in range(3):
            (part,) = Batches(corpus, recipe, 16, 1, False).at(step)
            loss, counts = trainer.objective(**part)
            assert float(loss) == pytest.approx(straight(trainer, part), rel=1e-6)
            assert counts[1] == 0


def test_gathering_gives_the_same_gradient(corpus: TokenFile) -> None:
    recipe = Recipe(batch=8, dropout=0.0)
    grads = []
    for gather in (True, False):
        trainer = Trainer(shape(corpus), recipe, 1, CPU, gather)
        with torch.no_grad():
            trainer.model.output_layer.linear.weight.normal_(generator=torch.Generator().manual_seed(0))
        loss, _ = trainer.objective(**Batches(corpus, recipe, 16, 1, False).at(0)[0])
        loss.backward()
        grads.append({name: value.grad for name, value in trainer.params.items()})
    for name in grads[0]:
        torch.testing.assert_close(grads[0][name], grads[1][name], rtol=1e-4, atol=1e-6)
    assert not grads[0]["output_layer.linear.bias"][27]  # the mask is never predicted


def test_places_hold_the_first_masked_positions() -> None:
    flags = torch.tensor([True, False, True, True, False, True])
    roomy, tight = _places_of(flags, 5), _places_of(flags, 3)
    assert roomy.index_M.tolist() == [0, 2, 3, 5, 4] and roomy.kept_M.tolist() == [True] * 4 + [False]
    assert roomy.place_N.tolist() == [0, 5, 1, 2, 5, 3] and int(roomy.lost) == 0
    assert tight.index_M.tolist() == [0, 2, 3] and tight.kept_M.all() and int(tight.lost) == 1
    assert tight.place_N.tolist() == [0, 3, 1, 2, 3, 3]
    nothing = _places_of(torch.zeros(4, dtype=torch.bool), 2)
    assert not nothing.kept_M.any() and int(nothing.lost) == 0


def test_too_many_masked_positions_are_noticed(
    corpus: TokenFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relaylm.train.objective.places", lambda *_: 8)
    monkeypatch.setattr("relaylm.train.objective.GATHER_FROM", 2)
    with pytest.raises(RuntimeError, match="more positions were masked"):
        train_model(corpus, tmp_path / "m", shape(corpus), TOY, progress=False)


def test_padding_is_not_scored(tmp_path: Path) -> None:
    from test_corpus import words

    (tmp_path / "a.txt").write_text("g h a b c d e f g h\n" * 4 + "a b c d\n" * 9 + "e f\n" * 9)
    corpus = prepare(
        tmp_path / "a.txt", tmp_path / "c", tokenizer=words(), packing="pad", length=8, holdout=0.3, progress=False
    )
    recipe = Recipe(batch=8, dropout=0.0)
    trainer = Trainer(shape(corpus, length=8), recipe, 0, CPU)
    trainer.model.double()
    trainer.model._rotary.clear()
    with torch.no_grad():
        trainer.model.output_layer.linear.weight.normal_()
        (part,) = Batches(corpus, recipe, 8, 0, False).at(0)
        assert float(trainer.objective(**part)[0]) == pytest.approx(straight(trainer, part), rel=1e-6)
    summary = train_model(corpus, tmp_path / "m", shape(corpus, length=8), TOY, progress=False)
    assert summary["heldout"]["symbols"] < 8 * summary["heldout"]["rows"]
    per_token = corpus.characters_per_token()
    assert per_token < 0.9 and summary["bits_per_character"] == pytest.approx(summary["heldout"]["bits"] / per_token)


def test_the_judge_predicts_the_next_token(corpus: TokenFile) -> None:
    recipe = Recipe(batch=8, dropout=0.0)
    trainer = Trainer(shape(corpus, causal=True), recipe, 0, CPU)
    with torch.no_grad():
        trainer.model.output_layer.linear.weight.normal_()
        (part,) = Batches(corpus, recipe, 16, 0, True).at(0)
        tokens = part["tokens"].long()
        logits = trainer.model.logits(tokens, torch.ones(8))
        expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss, counts = trainer.objective(**part)
        torch.testing.assert_close(loss, expected)
        assert counts[0] == 8 * 15
        found = causal_bound(trainer.model, tokens.numpy())
        assert found.bits == pytest.approx(float(expected) / math.log(2), rel=1e-5)


def test_the_judge_is_scored_on_real_tokens_after_the_first(tmp_path: Path) -> None:
    from test_corpus import words

    (tmp_path / "a.txt").write_text("g h a b c d e f g h\n" * 4 + "a b c d\n" * 9 + "e f\n" * 9)
    rule = {"tokenizer": words(), "packing": "pad", "length": 8, "holdout": 0.3}
    corpus = prepare(tmp_path / "a.txt", tmp_path / "c", progress=False, **rule)  # type: ignore[arg-type]
    trainer = Trainer(shape(corpus, length=8, causal=True), Recipe(batch=8, dropout=0.0), 0, CPU)
    trainer.model.double()
    trainer.model._rotary.clear()
    with torch.no_grad():
        trainer.model.output_layer.linear.weight.normal_(generator=torch.Generator().manual_seed(0))
        (part,) = Batches(corpus, trainer.recipe, 8, 0, True).at(0)
        log_p = trainer.model.logits(part["tokens"].long(), torch.ones(8)).log_softmax(-1)
        pairs = [(b, l) for b in range(8) for l in range(1, int(part["real"][b]))]
        expected = -sum(float(log_p[b, l - 1, int(part["tokens"][b, l])]) for b, l in pairs) / len(pairs)
        loss, counts = trainer.objective(**part)
    assert float(loss) == pytest.approx(expected, rel=1e-6) and int(counts[0]) == len(pairs) < 8 * 7


def test_an_update_is_adamws_on_the_clipped_gradient(corpus: TokenFile) -> None:
    """By its formula: two steps of a warm-up, in two micro-batches each."""
    numbers = {"lr": 0.05, "beta1": 0.8, "beta2": 0.7, "eps": 0.01, "weight_decay": 0.3, "clip": 0.1, "warmup": 4}
    recipe = Recipe(batch=8, micro_batch=4, dropout=0.0, **numbers)  # type: ignore[arg-type]
    trainer, twin = (Trainer(shape(corpus), recipe, 1, CPU) for _ in range(2))
    names = [*twin.params]
    mean, square = ({name: torch.zeros_like(twin.params[name]) for name in names} for _ in range(2))
    for step in range(2):
        parts = Batches(corpus, recipe, 16, 1, False).at(step)
        norm = float(trainer.step(parts)[1])
        grads = torch.autograd.grad(sum(twin.objective(**part)[0] for part in parts), [*twin.params.values()])
        whole = float(torch.stack([grad.square().sum() for grad in grads]).sum().sqrt())
        assert norm == pytest.approx(whole, rel=1e-5) and whole > 0.1  # what is reported is before clipping
        for name, grad in zip(names, grads):
            weight, grad, rate = twin.params[name].data, grad * 0.1 / (whole + 1e-6), 0.05 * (step + 1) / 4
            mean[name] = 0.8 * mean[name] + 0.2 * grad
            square[name] = 0.7 * square[name] + 0.3 * grad**2
            first, second = mean[name] / (1 - 0.8 ** (step + 1)), square[name] / (1 - 0.7 ** (step + 1))
            weight.copy_(weight - rate * (0.3 * weight + first / (second.sqrt() + 0.01)))
            torch.testing.assert_close(trainer.params[name].detach(), weight, rtol=1e-4, atol=1e-6)


def test_fresh_matrices_have_the_width_that_is_asked_for(corpus: TokenFile) -> None:
    for init, expected in ((0.0, 1 / math.sqrt(3 * 64)), (0.05, 0.05)):
        recipe = override(Preset(recipe=TOY), init=init).recipe
        trainer = Trainer(shape(corpus, width=64), recipe, 0, CPU)
        assert float(trainer.params["blocks.0.attn_qkv.weight"].detach().std()) == pytest.approx(expected, rel=0.05)
        assert not trainer.params["output_layer.linear.weight"].any() and trainer.params["blocks.0.norm1.weight"].all()


def test_dropout_is_drawn_anew_for_every_step_process_and_micro_batch(corpus: TokenFile) -> None:
    seeds = set()
    for seed, rank in itertools.product((0, 1), (0, 1)):
        trainer = Trainer(shape(corpus), TOY, seed, World(torch.device("cpu"), rank))
        for step, turn in itertools.product((1, 2), (0, 1)):
            trainer.step_count = step
            seeds.add(trainer._dropout_seed(turn))
    assert len(seeds) == 16
    losses = []
    for number in (1, 2, 1):  # the same weights and batch: what differs is dropout, and it is repeated exactly
        trainer = Trainer(shape(corpus), override(Preset(recipe=TOY), dropout=0.5).recipe, 0, CPU)
        trainer.model.output_layer.linear.weight.data.normal_(generator=torch.Generator().manual_seed(0))
        torch.manual_seed(number)  # must not matter
        trainer.step_count = 3 + number // 2
        losses.append(float(trainer.step(Batches(corpus, TOY, 16, 0, False).at(0))[0]))
    assert losses[0] == losses[2] != losses[1]


def test_the_average_takes_the_weights_place_for_a_while(corpus: TokenFile) -> None:
    trainer = Trainer(shape(corpus), TOY, 0, CPU)
    for step in range(3):
        trainer.step(Batches(corpus, TOY, 16, 0, False).at(step))
    before = {name: value.detach().clone() for name, value in trainer.params.items()}
    with pytest.raises(ZeroDivisionError), trainer.averaged() as model:  # also where an evaluation fails
        assert not model.training and same(dict(model.named_parameters()), trainer.ema)
        raise ZeroDivisionError
    assert trainer.model.training and same(dict(trainer.params), before) and not same(before, trainer.ema)


# ------------------------------------------------------------------------------------------------- bound


def test_bound_of_uniform_and_of_independent_tokens() -> None:
    tokens = np.random.default_rng(0).integers(0, 5, (60, 12))
    uniform = bound(FromLogits(lambda x, t: torch.zeros(*x.shape, 6, dtype=torch.float64)), tokens, mask_id=5)
    assert uniform.bits == pytest.approx(math.log2(5)) and uniform.high - uniform.low < 1e-9
    assert uniform.to_json()["perplexity"] == pytest.approx(5)
    p = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.1, 0.7], dtype=torch.float64)
    known = bound(FromLogits(lambda x, t: p.log().expand(*x.shape, 6)), tokens, mask_id=5, draws=32)
    exact = float(-np.log2(p.numpy()[tokens]).mean())
    assert known.low < exact < known.high and known.high - known.low < 0.2


def test_the_interval_of_a_bound_is_that_of_a_ratio() -> None:
    """Rows of one symbol throughout have 1 and 3 bits a symbol. By hand: of 4 and 4 symbols the mean is 2 and its
    standard error half the difference; of 4 and 2 it is 10/6, the totals' residuals are 4 - 40/6 and 6 - 20/6, and
    the error is sqrt(2 (8/3)^2 * 2 / 1) / 6. Two rows leave one degree of freedom, whose quantile is tan(0.475 pi)."""
    p = torch.tensor([0.5, 0.125, 0.375, 0.7], dtype=torch.float64)
    model, tokens = FromLogits(lambda x, t: p.log().expand(*x.shape, 4)), np.array([[0] * 4, [1] * 4])
    wide = math.tan(0.475 * math.pi)
    even = bound(model, tokens, mask_id=3)
    assert (even.bits, even.low, even.high) == pytest.approx((2, 2 - wide, 2 + wide))
    causal = FromLogits(lambda x, t: p[:3].log().expand(*x.shape, 3))
    uneven = causal_bound(causal, np.array([[0] * 5, [1] * 5]), real_N=np.array([5, 3]))
    assert (uneven.bits, uneven.high - uneven.bits) == pytest.approx((10 / 6, wide * 16 / 3 / 6), rel=1e-6)


def test_bound_is_the_continuous_time_integral() -> None:
    """A table of logits for every masked sequence, and the bound added up over all of them:
    sum over sets S of int t^(|S|-1) (1-t)^(L-|S|) dt = (|S|-1)! (L-|S|)! / L!, times the loss at S."""
    length, vocab = 3, 4
    table = torch.randn(vocab**length, length, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    place = torch.tensor([vocab**i for i in range(length)])
    model = FromLogits(lambda x, t: table[(x * place).sum(-1)])
    x = np.array([2, 0, 1])
    exact = 0.0
    for size in range(1, length + 1):
        for chosen in itertools.combinations(range(length), size):
            z = torch.tensor([vocab - 1 if l in chosen else int(x[l]) for l in range(length)])
            log_p = table[(z * place).sum()][:, : vocab - 1].log_softmax(-1)
            weight = math.factorial(size - 1) * math.factorial(length - size) / math.factorial(length)
            exact -= weight * sum(float(log_p[l, x[l]]) for l in chosen)
    found = bound(model, np.tile(x, (3000, 1)), mask_id=vocab - 1, draws=6)
    assert found.bits == pytest.approx(exact / length / math.log(2), abs=2.5 * (found.high - found.bits))
    assert found.high - found.low < 0.03


def test_bound_of_a_schedule_is_that_of_its_steps() -> None:
    """Two tables that take turns over T = 2 steps, added up over all masked sets: sum_i (1/i) E sum over the masked."""
    length, vocab = 3, 4
    generator = torch.Generator().manual_seed(1)
    tables = {n: torch.randn(vocab**length, length, vocab, dtype=torch.float64, generator=generator) for n in "ab"}
    place = torch.tensor([vocab**i for i in range(length)])
    models = {n: FromLogits(lambda x, t, table=table: table[(x * place).sum(-1)]) for n, table in tables.items()}  # type: ignore[misc]
    x = np.array([2, 0, 1])
    exact = 0.0
    for i, name in ((2, "a"), (1, "b")):
        for size in range(1, length + 1):
            for chosen in itertools.combinations(range(length), size):
                z = torch.tensor([vocab - 1 if l in chosen else int(x[l]) for l in range(length)])
                log_p = tables[name][(z * place).sum()][:, : vocab - 1].log_softmax(-1)
                chance = (i / 2) ** size * (1 - i / 2) ** (length - size)
                exact -= chance / i * sum(float(log_p[l, x[l]]) for l in chosen)
    timetable = Timetable(("a", "b"), (1.0, 0.5, 0.0))
    found = bound(models, np.tile(x, (4000, 1)), mask_id=vocab - 1, draws=6, timetable=timetable)
    assert found.bits == pytest.approx(exact / length / math.log(2), abs=2.5 * (found.high - found.bits))
    assert found.high - found.low < 0.03
    with pytest.raises(UserError, match="no model 'a'"):
        bound({"b": models["b"]}, np.tile(x, (2, 1)), mask_id=3, timetable=timetable)


def test_bound_counts_real_tokens_only() -> None:
    tokens = np.random.default_rng(0).integers(0, 5, (40, 12))
    real = np.random.default_rng(1).integers(3, 13, 40)
    flat = FromLogits(lambda x, t: torch.zeros(*x.shape, 6))
    found = bound(flat, tokens, mask_id=5, real_N=real, draws=64)
    assert found.symbols == real.sum() and found.low < math.log2(5) < found.high
    assert spread_rows(np.arange(100), 10, 4)[:, 0].tolist() == [0, 20, 50, 70]
    with pytest.raises(UserError, match="less than one row"):
        spread_rows(np.arange(5), 10)


@given(
    length=st.integers(3, 9), rows=st.integers(2, 12), cut=st.integers(0, 8), broken=st.sets(st.integers(0, 11)),
    one_mark=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_rows_between_marks_are_found_again(
    length: int, rows: int, cut: int, broken: set[int], one_mark: bool, seed: int
) -> None:
    """In a text that begins within a row, and in which some rows have become longer."""
    rng = np.random.default_rng(seed)
    first, last = (0, 0) if one_mark else (1, 0)
    packed = [[first, *rng.integers(2, 9, length - 2).tolist(), last] for _ in range(rows)]
    whole = [row for k, row in enumerate(packed) if k not in broken and (k > 0 or cut == 0)]
    beside = any(k not in broken and k + 1 not in broken for k in range(0 if cut == 0 else 1, rows - 1))
    text = [[*row[:-1], 5, last] if k in broken else row for k, row in enumerate(packed)]
    found = wrapped_rows(np.array([*text[0][min(cut, length) :], *itertools.chain(*text[1:])]), length, first, last)
    assert (found is not None) == beside and (found is None or found.tolist() == whole)


def test_held_out_text_of_packed_rows_is_cut_where_they_were(tmp_path: Path) -> None:
    words = "".join(f"word{k} and more of it.{' ' if k % 50 else chr(10) * 2}" for k in range(4000))
    (tmp_path / "plain.txt").write_text(words)
    corpus = prepare(
        tmp_path / "plain.txt", tmp_path / "corpus", tokenizer="bpe:300", packing="wrap", length=32, holdout=0.1
    )
    (tmp_path / "heldout.txt").write_text(train.heldout_text(corpus, 3000))
    tokenizer = corpus.tokenizer
    size = tokenizer.size + 1
    silent = FromLogits(lambda x, t: torch.zeros(*x.shape, size))
    family = Family({"a": silent}, mask_id=size - 1, vocab_size=size, length=32, tokenizer=tokenizer)
    tokens = held_out(family, tmp_path / "heldout.txt")
    assert tokens is not None and len(tokens) >= 32 * 10
    known = {tuple(row) for row in corpus.heldout.reshape(-1, 32).tolist()}
    assert {tuple(row) for row in spread_rows(tokens, 32).tolist()} <= known
    plain = held_out(family, tmp_path / "plain.txt")  # no marks: all of it
    assert plain is not None and plain.tolist() == tokenizer.encode(words)


# ------------------------------------------------------------------------------------------------- runs


def test_training_learns(corpus: TokenFile, tmp_path: Path) -> None:
    changes = {"steps": 150, "lr": 5e-3, "dropout": 0.0, "log_every": 10, "eval_every": 75, "sample_every": 75}
    recipe = override(Preset(recipe=TOY), **changes).recipe
    summary = train_model(corpus, tmp_path, shape(corpus, width=32), recipe, progress=False)
    rows = [json.loads(line) for line in (tmp_path / loop.METRICS).read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0] - 0.8
    assert rows[0]["bits"] == pytest.approx(rows[0]["loss"] / math.log(2))
    assert summary["heldout"]["bits"] < 3.4  # 27 symbols are 4.75 bits, single letters of this text 3.6
    assert any("heldout_bits" in row for row in rows)
    assert rows[-1]["tokens"] == 150 * 8 * 16 and {"tokens_per_s", "masked_per_s", "mfu", "lr"} <= rows[0].keys()
    drawn = json.loads((tmp_path / loop.SAMPLES).read_text().splitlines()[0])
    assert drawn["step"] == 75 and len(drawn["texts"]) == 4 and len(drawn["texts"][0]) == 16


def test_interrupted_and_resumed_is_uninterrupted(
    corpus: TokenFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    falling = override(Preset(recipe=TOY), decay="linear").recipe
    train_model(corpus, tmp_path / "whole", shape(corpus), falling, progress=False)
    original = Trainer.step

    def interrupted(self: Trainer, parts: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        result = original(self, parts)
        if self.step_count == 7:
            signal.raise_signal(signal.SIGINT)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_model(corpus, tmp_path / "parts", shape(corpus), falling, progress=False)
    found = checkpoint.load(tmp_path / "parts" / loop.CHECKPOINT)
    assert found is not None and found[1]["step"] == 7
    summary = train_model(corpus, tmp_path / "parts", shape(corpus), falling, progress=False)
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    parts = [part for step in range(12) for part in Batches(corpus, falling, 16, 0, False).at(step)]
    masked = [mask_words(0, part["sample"], 16) < part["threshold"][:, None] for part in parts]
    assert summary["masked"] == sum(int(each.sum()) for each in masked)

    def lines(name: str) -> list[tuple[int, float]]:
        return [(row["step"], row["tokens"]) for row in map(json.loads, open(tmp_path / name / loop.METRICS))]

    assert sorted(lines("parts")) == sorted([*lines("whole"), (7, 7 * 128)])
    rows = [json.loads(line) for line in (tmp_path / "parts" / loop.METRICS).read_text().splitlines()]
    assert [row["lr"] for row in rows if row["step"] == 7] == [lr_at(falling, 6)] != [lr_at(falling, 7)]
    # A finished run is not trained again.
    before = (tmp_path / "parts" / loop.CHECKPOINT).stat().st_mtime_ns
    train_model(corpus, tmp_path / "parts", shape(corpus), falling, progress=False)
    assert (tmp_path / "parts" / loop.CHECKPOINT).stat().st_mtime_ns == before


def test_a_changed_recipe_or_corpus_is_named(corpus: TokenFile, tmp_path: Path) -> None:
    train_model(corpus, tmp_path / "m", shape(corpus), TOY, progress=False)
    changed = override(Preset(recipe=TOY), lr=0.5).recipe
    with pytest.raises(UserError, match=r"lr was 0.01, is 0.5"):
        train_model(corpus, tmp_path / "m", shape(corpus), changed, progress=False)
    with pytest.raises(UserError, match=r"model.depth was 2, is 3"):
        train_model(corpus, tmp_path / "m", shape(corpus, depth=3), TOY, progress=False)
    (tmp_path / "b.txt").write_text("other words here " * 90)
    other = prepare(tmp_path / "b.txt", tmp_path / "c", tokenizer="text8", progress=False)
    with pytest.raises(UserError, match=r"corpus.train.bin was"):
        train_model(other, tmp_path / "m", shape(corpus), TOY, progress=False)
    longer = override(Preset(recipe=TOY), steps=14, log_every=2).recipe
    with pytest.raises(UserError, match=r"steps was 12, is 14"):
        train_model(corpus, tmp_path / "m", shape(corpus), longer, progress=False)
    assert train_model(corpus, tmp_path / "m", shape(corpus), longer, progress=False, force=True)["steps"] == 14


def test_what_leaves_the_weights_alone_may_change(corpus: TokenFile, tmp_path: Path) -> None:
    summary = train_model(corpus, tmp_path / "m", shape(corpus), TOY, progress=False)
    changed = {"micro_batch": 4, "compile": "off", "attention": "flash", "shard": True, "stages": (3,), "log_every": 7}
    changed |= {"eval_every": 5, "eval_rows": 2, "sample_every": 9, "checkpoint_every": 2}
    recipe = override(Preset(recipe=TOY), **changed).recipe
    assert train_model(corpus, tmp_path / "m", shape(corpus), recipe, progress=False) == summary


def test_a_longer_run_that_was_killed_at_its_end_is_summed_up_anew(corpus: TokenFile, tmp_path: Path) -> None:
    train_model(corpus, tmp_path / "m", shape(corpus), TOY, progress=False)
    old = (tmp_path / "m" / loop.SUMMARY).read_bytes()
    longer = override(Preset(recipe=TOY), steps=14).recipe
    made = train_model(corpus, tmp_path / "m", shape(corpus), longer, progress=False, force=True)
    (tmp_path / "m" / loop.SUMMARY).write_bytes(old)  # a kill between the last checkpoint and the summary
    again = train_model(corpus, tmp_path / "m", shape(corpus), longer, progress=False)
    assert (again["steps"], again["tokens"], again["heldout"]) == (14, 14 * 8 * 16, made["heldout"])
    shorter = train_model(corpus, tmp_path / "m", shape(corpus), TOY, progress=False, force=True)
    assert shorter["steps"] == 14  # what the network is


def test_what_is_held_out_must_hold_a_row(tmp_path: Path) -> None:
    """Said before training, not after it."""
    (tmp_path / "a.txt").write_text(TEXT * 3)
    corpus = prepare(tmp_path / "a.txt", tmp_path / "c", tokenizer="text8", holdout=0.02, progress=False)
    assert 0 < corpus.heldout.size < 16
    with pytest.raises(UserError, match="less than one row of 16"):
        train_model(corpus, tmp_path / "m", shape(corpus), TOY, progress=False)
    assert not (tmp_path / "m").exists()
    nothing = prepare(tmp_path / "a.txt", tmp_path / "n", tokenizer="text8", holdout=0, progress=False)
    assert train_model(nothing, tmp_path / "m", shape(nothing), TOY, progress=False)["heldout"] is None


def test_one_held_out_row_has_no_interval(tmp_path: Path) -> None:
    """A family from it is written all the same, and written again, and its log is JSON."""
    (tmp_path / "a.txt").write_text(TEXT * 6)
    corpus = prepare(tmp_path / "a.txt", tmp_path / "c", tokenizer="text8", holdout=0.02, progress=False)
    assert 16 <= corpus.heldout.size < 32
    preset = Preset("toy", "text8", "running", 16, 16, 2, (1,), judge=1, recipe=replace(TOY, eval_every=6))
    for _ in range(2):
        folder = train_family(corpus.folder, tmp_path / "out", preset, device="cpu", progress=False)
        held = Family.load(folder).meta["training"]["1b"]["heldout"]
        assert (held["rows"], held["low"], held["high"]) == (1, "-inf", "inf") and f"{held['bits']:.4f}" in card(folder)
        folder.rename(tmp_path / f"moved-{_}")
    for line in (tmp_path / "out" / "models" / "1b" / loop.METRICS).read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def card(folder: Path) -> str:
    return (folder / "README.md").read_text()


def test_what_is_refused_leaves_the_settings_of_the_run_alone(corpus: TokenFile, tmp_path: Path) -> None:
    """And it is refused before another model of the family is trained."""
    preset = Preset("toy", "text8", "running", 16, 16, 2, (2,), recipe=TOY)
    train_family(corpus.folder, tmp_path / "out", preset, device="cpu", progress=False)
    before = (tmp_path / "out" / "config.json").read_bytes()
    for changes, message in (
        ({"lr": 0.5, "depths": (1, 2)}, "2b holds a run that began differently"),
        ({"micro_batch": 3}, "micro-batch"),
        ({"names": "a/{}"}, "'a/2' cannot name a model"),
        ({"names": "{}-twin"}, "must not end with -twin"),
        ({"length": 5000}, "less than one row of 5000"),
    ):
        with pytest.raises(UserError, match=message):
            train_family(corpus.folder, tmp_path / "out", override(preset, **changes), device="cpu", progress=False)
    assert (tmp_path / "out" / "config.json").read_bytes() == before
    assert [path.name for path in (tmp_path / "out" / "models").iterdir()] == ["2b"]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e6])
def test_a_broken_loss_stops_and_keeps_the_last_good_checkpoint(
    value: float, corpus: TokenFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = override(Preset(recipe=TOY), steps=200, log_every=2, checkpoint_every=10).recipe
    original = Trainer.step

    def broken(self: Trainer, parts: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        result = original(self, parts)
        if self.step_count >= 145:
            result[0] = value
            if value != 1e6:
                self.params["blocks.0.norm1.weight"].data.fill_(math.nan)
        return result

    monkeypatch.setattr(Trainer, "step", broken)
    with pytest.raises(UserError, match="diverges" if value == 1e6 else "not a number any more at step 145"):
        train_model(corpus, tmp_path / "m", shape(corpus), recipe, progress=False)
    found = checkpoint.load(tmp_path / "m" / loop.CHECKPOINT)
    assert found is not None and found[1]["step"] == 140
    assert all(bool(torch.isfinite(tensor).all()) for tensor in found[0].values())


@pytest.mark.parametrize(("late", "stops"), [(0.2, False), (0.8, True)])
def test_divergence_is_against_the_usual_loss_after_the_warm_up(
    late: float, stops: bool, corpus: TokenFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual loss is 0.1 here, far below log V; losses of a thousand during the warm-up do not count."""
    recipe = override(Preset(recipe=TOY), steps=220, warmup=40, log_every=20, checkpoint_every=200).recipe
    original = Trainer.step

    def step(self: Trainer, parts: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        result = original(self, parts)
        result[0] = 1000.0 if self.step_count <= 40 else 0.1 if self.step_count <= 200 else late
        return result

    monkeypatch.setattr(Trainer, "step", step)
    if stops:
        with pytest.raises(UserError, match="diverges at step 220"):
            train_model(corpus, tmp_path / "m", shape(corpus, depth=1, width=8, heads=1), recipe, progress=False)
    else:
        summary = train_model(corpus, tmp_path / "m", shape(corpus, depth=1, width=8, heads=1), recipe, progress=False)
        assert summary["train_loss"] == pytest.approx((160 * 0.1 + 20 * late) / 180)


def test_a_real_divergence_stops(corpus: TokenFile, tmp_path: Path) -> None:
    recipe = override(Preset(recipe=TOY), steps=60, lr=3.0, clip=0.0, checkpoint_every=50).recipe
    with pytest.raises(UserError, match="lower the learning rate"):
        train_model(corpus, tmp_path / "m", shape(corpus), recipe, progress=False)


def test_a_family_from_text(corpus: TokenFile, tmp_path: Path) -> None:
    preset = Preset("toy", "text8", "running", 16, 16, 2, (1, 2), twin=2, judge=1, recipe=TOY)
    folder = train_family(corpus.folder, tmp_path / "out", preset, device="cpu", progress=False, command="make toy")
    family = Family.load(folder)
    assert family.names == ("1b", "2b") and list(family.twins) == ["2b"] and family.judge is not None
    assert family.judge.architecture.causal and family.length == 16 and family.name == "toy"
    (folder / "notes.txt").write_text("mine")
    (folder / "README.md").write_text((folder / "README.md").read_text() + "edited\n")
    train_family(corpus.folder, tmp_path / "out", preset, device="cpu", progress=False, command="make toy")
    card = (folder / "README.md").read_text()
    assert (folder / "notes.txt").exists() and card.endswith("edited\n")  # a finished family is left alone
    assert "make toy" in card and "not stated" in card and "| 2b-twin |" in card
    average = weights(tmp_path / "out" / "models" / "1b")["average/blocks.0.attn_qkv.weight"]
    loaded = family.models["1b"].blocks[0].attn_qkv.weight  # type: ignore[attr-defined]
    torch.testing.assert_close(loaded, average.bfloat16().float())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["preset"]["recipe"]["lr"] == 0.01 and config["command"] == "make toy"
    first, twin = weights(tmp_path / "out" / "models" / "2b"), weights(tmp_path / "out" / "models" / "2b-twin")
    assert not torch.equal(first["weights/vocab_embed.embedding"], twin["weights/vocab_embed.embedding"])
    held = corpus.tokenizer.decode(corpus.heldout)
    assert family.heldout is not None and held and family.heldout.read_text() == held
    assert train.heldout_text(corpus, 20) == held[-20:]
    # Again: nothing is retrained, and another depth is added to what is there.
    grown = override(preset, depths=(1, 2, 3))
    stamp = (tmp_path / "out" / "models" / "2b" / loop.CHECKPOINT).stat().st_mtime_ns
    with pytest.raises(UserError, match=r"README\.md in it is not as relaylm wrote it"):
        train_family(corpus.folder, tmp_path / "out", grown, device="cpu", progress=False)
    folder.rename(tmp_path / "moved")
    folder = train_family(corpus.folder, tmp_path / "out", grown, device="cpu", progress=False)
    assert Family.load(folder).names == ("1b", "2b", "3b")
    assert (tmp_path / "out" / "models" / "2b" / loop.CHECKPOINT).stat().st_mtime_ns == stamp


def test_stages_are_what_a_shorter_run_would_have_been(
    corpus: TokenFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights that are kept on the way are those of the run stopped there, and they do not change the run."""
    preset = Preset("toy", "text8", "running", 16, 16, 2, (1, 2), twin=2, judge=1, recipe=TOY)
    kept = override(preset, stages=(4, 7))
    train_family(corpus.folder, tmp_path / "kept", kept, device="cpu", progress=False)
    train_family(corpus.folder, tmp_path / "plain", preset, device="cpu", progress=False)
    train_family(corpus.folder, tmp_path / "short", override(preset, steps=7), device="cpu", progress=False)
    runs = {name: tmp_path / name / "models" / "2b" for name in ("kept", "plain", "short")}
    assert same(weights(runs["kept"]), weights(runs["plain"]))
    stage = checkpoint.load(loop.stage_file(runs["kept"], 7))
    assert stage is not None
    short = weights(runs["short"])
    assert same(stage[0], {name: value for name, value in short.items() if name.startswith("average/")})
    family = Family.load(tmp_path / "kept" / "stages" / "4", dtype="float32")
    assert family.names == ("1b", "2b") and list(family.twins) == ["2b"] and family.judge is None
    assert family.meta["training"]["2b"]["tokens"] == 4 * TOY.batch * 16
    with pytest.raises(UserError, match="1 to 11"):
        override(preset, stages=(12,))
    # Asked for too late: said, and no half of a family is written.
    train_family(corpus.folder, tmp_path / "plain", override(preset, stages=(3,)), device="cpu", progress=False)
    assert "no stage 3: 1b, 2b, 2b-twin" in capsys.readouterr().err and not (tmp_path / "plain" / "stages").exists()


@pytest.mark.parametrize("name", ["owt", "lm1b", "wiki-char", "books-char", "wiki-bpe", "laptop"])
def test_presets_at_toy_size(name: str, tmp_path: Path) -> None:
    """Every preset's own way of packing, with its own recipe but for the sizes."""
    from test_corpus import words

    rng = np.random.default_rng(0)
    documents = [" ".join(rng.choice(list("abcdefgh"), size=rng.integers(3, 30))) for _ in range(150)]
    preset = load_preset(name)
    (tmp_path / "a.txt").write_text(("\n" if preset.packing == "pad" else "\n\n").join(documents))
    tokenizer = {"wiki-bpe": "bpe:270", "laptop": "bpe:270", "lm1b": words("[MASK]"), "owt": words()}.get(name, "text8")
    rule = {"tokenizer": tokenizer, "packing": preset.packing, "length": 16, "holdout": 0.1}
    prepare(tmp_path / "a.txt", tmp_path / "c", progress=False, **rule)  # type: ignore[arg-type]
    sizes = {"length": 16, "width": 16, "heads": 2, "depths": [1, 2], "twin": 2, "judge": 1}
    sizes |= {"steps": 4, "batch": 8, "micro_batch": 4, "eval_rows": 4, "sample_every": 4}
    folder = train_family(tmp_path / "c", tmp_path / "out", name, device="cpu", progress=False, **sizes)  # type: ignore[arg-type]
    family = Family.load(folder)
    assert family.names == (preset.model_name(1), preset.model_name(2)) and family.tokenizer is not None
    if preset.packing == "pad":
        assert family.heldout is None
    elif name != "owt":  # (the toy tokenizer there cannot read its own marks of documents' ends)
        assert family.heldout is not None  # as text and back: the same tokens, ends of documents among them
        again = family.tokenizer.encode(family.heldout.read_text())
        assert list(again) == TokenFile.load(tmp_path / "c").heldout.reshape(-1).tolist()


def test_throughput_says_what_it_measured() -> None:
    toy = load_preset("wiki-char", length=32, width=32, heads=2, batch=8, micro_batch=4)
    found = throughput(toy, depth=2, vocab_size=600, steps=2, warm=1, device="cpu", peak=1.0)
    a = Architecture(600, 32, 32, 2, 2)
    by_hand = 3 * (2 * (24 * 32 * 32**2 + 4 * 32**2 * 32) - 18 * 16 * 32**2 + 2 * 16 * 32 * 600)
    assert found["flops_per_row"] == training_flops(a, 32) == by_hand
    assert found["chars_per_s"] == pytest.approx(2 * 8 * 32 / found["seconds"])
    assert found["mfu"] == pytest.approx(found["tflops_per_s"]) and found["precision"] == "fp32"
    assert found["masked_per_s"] < 0.8 * found["chars_per_s"]
    json.dumps(found)


def test_bf16_and_fp32_agree(corpus: TokenFile) -> None:
    losses = []
    for precision in ("fp32", "bf16"):
        recipe = override(Preset(recipe=TOY), dropout=0.0, precision=precision).recipe
        trainer = Trainer(shape(corpus), recipe, 0, CPU)
        batches = Batches(corpus, recipe, 16, 0, False)
        losses.append([float(trainer.step(batches.at(step))[0]) for step in range(6)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=0.02)


def test_the_command(corpus: TokenFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["length=16", "width=16", "heads=2", "depths=[1]", "steps=4", "batch=4", "eval_rows=2", "judge=1"]
    flags = [part for size in sizes for part in ("--set", size)]
    words = ["train", str(corpus.folder), str(tmp_path / "o"), "--preset", "tiny-cpu", "--device", "cpu", *flags]
    assert cli.main(words) == 0
    family = Family.load(tmp_path / "o" / "family")
    table = PairTable.from_json(json.loads((tmp_path / "o" / "family" / "pairs.json").read_text()))
    assert family.names == ("1b",) and family.meta["spacing"] == str(default_spacing(table, 16)) and table.model == "1b"
    said = capsys.readouterr().out
    assert "needs more" in said and f"relaylm sample --family {tmp_path / 'o' / 'family'}" in said
    assert cli.main([*words, "--no-pairs"]) == 0 and "spacing" not in Family.load(tmp_path / "o" / "family").meta
    assert cli.main([*words, "--set", "lr=0.5"]) == 2
    assert "lr was" in capsys.readouterr().err
    assert cli.main([*words, "--set", "lr"]) == 2 and "KEY=VALUE" in capsys.readouterr().err
    for name in ("name", "pairs", "device", "preset"):  # arguments, but no settings
        assert cli.main([*words, "--set", f"{name}=cpu"]) == 2 and f"no setting '{name}'" in capsys.readouterr().err


def test_the_report_is_of_the_heavy_models_numbers(corpus: TokenFile, tmp_path: Path) -> None:
    preset = Preset("toy", "text8", "running", 16, 16, 2, (1, 2), recipe=TOY)
    folder = train_family(corpus.folder, tmp_path / "out", preset, device="cpu", progress=False)
    found, summary = report(folder, corpus, "cpu"), json.loads((tmp_path / "out/models/2b" / loop.SUMMARY).read_text())
    assert found["passes"] == pytest.approx(12 * 8 * 16 / corpus.train.size)
    assert found["train_bits"] == pytest.approx(summary["train_loss"] / math.log(2))
    assert found["heldout_bits"] == summary["heldout"]["bits"]
    assert summary["bits_per_character"] == pytest.approx(
        found["heldout_bits"] * len(corpus.heldout) / characters(corpus)
    )
    assert (summary["heldout"]["rows"], summary["heldout"]["draws"]) == (4 * TOY.eval_rows, 4)
    cut = [text.split()[1:-1] for text in found["samples"]]
    known = sum(word in TEXT.split() for words in cut for word in words)
    assert found["words"] == known / max(1, sum(map(len, cut)))


def characters(corpus: TokenFile) -> int:
    return int(corpus.manifest["splits"]["heldout"]["characters"])


@pytest.mark.parametrize(
    ("held", "trained", "words", "said"),
    [(3.0, 2.0, 0.5, "needs more text"), (3.0, 2.9, 0.5, "needs more training"), (3.0, 2.9, 0.95, "writes words")],
)
def test_the_verdict_follows_the_numbers(held: float, trained: float, words: float, said: str) -> None:
    numbers = {"heldout_bits": held, "train_bits": trained, "words": words, "passes": 12.0}
    assert _verdict(numbers).startswith(said)
    assert "--holdout" in _verdict({"words": 1.0, "passes": 1.0})


def test_the_table_of_pairs_is_that_of_the_model(corpus: TokenFile, tmp_path: Path) -> None:
    """Kept for a run that is as it was, measured anew after another."""
    model = Trainer(shape(corpus), TOY, 0, CPU).model.eval().requires_grad_(False)
    for summary, anew in (({"label": "a"}, True), ({"label": "a"}, False), ({"label": "a", "steps": 2}, True)):
        measured_pairs(tmp_path, model, corpus, summary, CPU.device, False)
        found = json.loads((tmp_path / "pairs.json").read_text())
        assert found["summary"] == summary and ("mine" not in found) == anew
        (tmp_path / "pairs.json").write_text(json.dumps({**found, "mine": 1}))


def test_bits_on_the_training_text_are_not_known_in_the_warm_up(corpus: TokenFile, tmp_path: Path) -> None:
    preset = Preset("toy", "text8", "running", 16, 16, 2, (1,), recipe=replace(TOY, warmup=12))
    found = report(train_family(corpus.folder, tmp_path / "o", preset, device="cpu", progress=False), corpus, "cpu")
    assert found["train_bits"] is None and found["heldout_bits"] > 3 and found["verdict"].startswith("needs more")


# ------------------------------------------------------------------------------------------- many processes

WORKER = """
import sys, torch
torch.set_num_threads(1)
from relaylm.train.corpus import TokenFile
from relaylm.models.denoiser import Architecture
from relaylm.train.recipe import Recipe
from relaylm.train.run import train_model
from relaylm.train.step import world
folder, out, shard, optimizer = sys.argv[1:]
corpus = TokenFile.load(folder)
recipe = Recipe(batch=8, steps=100, warmup=10, lr=1e-3, dropout=0.0, ema=0.9, log_every=1, eval_every=40, eval_rows=4,
                checkpoint_every=100, shard=shard == "1", micro_batch=2, optimizer=optimizer)
with world("cpu") as where:
    train_model(corpus, out, Architecture(28, 16, 16, 2, 2), recipe, where=where, progress=False)
"""


def losses_of(folder: Path) -> list[float]:
    return [row["loss"] for row in map(json.loads, open(folder / loop.METRICS)) if "loss" in row]


@pytest.mark.parametrize(
    ("shard", "optimizer"), [("0", "adamw"), ("0", "muon"), pytest.param("1", "adamw", marks=pytest.mark.slow)]
)
def test_two_processes_give_the_loss_of_one(corpus: TokenFile, tmp_path: Path, shard: str, optimizer: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", WORKER, str(corpus.folder)]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command += [str(tmp_path / "two"), shard, optimizer]
    runs = [subprocess.Popen(command, env={**common, "RANK": str(rank), "WORLD_SIZE": "2"}) for rank in range(2)]
    often = {"log_every": 1, "eval_every": 40, "eval_rows": 4}
    recipe = Recipe(batch=8, steps=100, warmup=10, lr=1e-3, dropout=0.0, ema=0.9, optimizer=optimizer, **often)
    train_model(corpus, tmp_path / "one", Architecture(28, 16, 16, 2, 2), recipe, progress=False)
    assert [run.wait(timeout=120) for run in runs] == [0, 0]
    one, two = losses_of(tmp_path / "one"), losses_of(tmp_path / "two")
    assert len(one) == len(two) == 100
    assert max(abs(a - b) for a, b in zip(one, two)) < 1e-5
    a, b = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert all(torch.allclose(a[name], b[name], atol=1e-4) for name in a)


@pytest.mark.slow
def test_tiny_cpu_in_its_minute(tmp_path: Path) -> None:
    text = "\n\n".join(path.read_text() for path in sorted(Path(train.__file__).parent.glob("*.py")))
    (tmp_path / "a.txt").write_text(text[:200_000])
    prepare(tmp_path / "a.txt", tmp_path / "c", tokenizer="text8", holdout=0.05, progress=False)
    folder = train_family(tmp_path / "c", tmp_path / "out", "tiny-cpu", device="cpu", progress=False)
    training = Family.load(folder).meta["training"]
    assert sum(s["seconds"] for s in training.values()) < 120  # a minute on two cores that are free
    assert all(s["heldout"]["bits"] < 4.5 for s in training.values())
