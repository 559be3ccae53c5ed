"""Runs whose results are on record, bit for bit: a net under changes that must not change behaviour.

    python tests/recorded_runs.py                  compare everything with the record
    python tests/recorded_runs.py --write all      record it all
    python tests/recorded_runs.py --write NAME...  record these runs anew (only where behaviour is meant to change)

Processors round differently, so there is a record for each way of rounding met so far, tests/recorded/DIGEST.json;
the digest is that of one network call. On a processor that rounds in another way, a run is compared where all records
agree: most give the same tokens everywhere. A run that is recorded anew is removed from the other records.

Each run is a function without arguments that gives plain JSON values: a sha256 of the tokens, costs without times, the
numbers of measurements. All run on a CPU in float32 with one thread. Nothing is taken from the other tests' helpers, so
that these may change freely.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relaylm import (
    Architecture,
    Family,
    FromLogits,
    RowState,
    Samples,
    Schedule,
    SwitchByMaskFraction,
    Timetable,
    Transformer,
    all_placements,
    compare,
    denoise,
    hand_made,
    make_plan,
    parse_rule,
    sample,
    sample_reference,
    search,
)
from relaylm.core.cost import mean_price
from relaylm.core.plan import Alpha
from relaylm.measure.importance import importance, path_kl
from relaylm.measure.judge import load_judge, score

# What is not public.
from relaylm.measure.likelihood import bound, causal_bound, held_out, spread_rows
from relaylm.measure.metrics import mean_interval
from relaylm.measure.prices import prices
from relaylm.measure.schedule_likelihood import measure_table, schedule_bound, step_costs
from relaylm.models.tokenizer import Text8Tokenizer
from relaylm.sampling.confidence import decode
from relaylm.sampling.law import Law
from relaylm.sampling.rules import RULES
from relaylm.search.tree import grow
from relaylm.train.checkpoint import load as load_checkpoint
from relaylm.train.corpus import prepare
from relaylm.train.family import train_family
from relaylm.train.recipe import Preset, Recipe
from relaylm.train.run import CHECKPOINT

RECORDS = Path(__file__).with_name("recorded")
TIMES = {"seconds", "milliseconds", "joules", "device"}  # what a machine adds to a result
PROSE = {"verdict", "what", "basis", "name", "rival", "source"}  # sentences, which may be reworded
Run = Callable[[], Any]

# ------------------------------------------------------------------------------------------------ what is kept


def digest(*arrays: Any) -> str:
    """sha256 of arrays, whole numbers as int64 and others as float64."""
    found = hashlib.sha256()
    for array in arrays:
        array = np.asarray(array)
        kind = np.float64 if array.dtype.kind == "f" else np.int64
        found.update(np.ascontiguousarray(array, dtype=kind).tobytes())
    return found.hexdigest()


def text_digest(value: Any) -> str:
    """sha256 of plain JSON values; floats keep all of their bits in it."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def timeless(value: Any) -> Any:
    """Plain JSON values without what depends on the machine."""
    if isinstance(value, Mapping):
        return {key: timeless(item) for key, item in value.items() if key not in TIMES}
    return [timeless(item) for item in value] if isinstance(value, (list, tuple)) else value


def steady(value: Any) -> Any:
    """Results of a measurement without machine and sentences, statistics to ten digits."""
    if isinstance(value, Mapping):
        return {key: steady(item) for key, item in value.items() if key not in TIMES | PROSE}
    if isinstance(value, (list, tuple)):
        return [steady(item) for item in value]
    return float(f"{value:.10g}") if isinstance(value, float) else value


def tokens_of(tokens_nL: np.ndarray) -> dict[str, Any]:
    head = tokens_nL.reshape(-1, tokens_nL.shape[-1])[0, :12]
    return {"sha256": digest(tokens_nL), "shape": list(tokens_nL.shape), "begins": head.tolist()}


def kept(samples: Samples) -> dict[str, Any]:
    trace = samples.trace
    return {
        "tokens": tokens_of(samples.tokens),
        "trace": digest(trace.step_nL, trace.model_nL, trace.u_nL),
        "models": list(trace.models),
        "cost": timeless(samples.cost.to_json()),
        "schedule": samples.schedule,
        "steps": "inf" if math.isinf(samples.steps) else int(samples.steps),
        "seed": samples.seed,
        "changes_law": list(samples.changes_law),
        "texts": text_digest(samples.texts),
    }


# ------------------------------------------------------------------------------------------------ who runs


@functools.cache
def wiki() -> Family:
    return Family.load("wiki-char", device="cpu")


@functools.cache
def arithmetic() -> str:
    """A digest of one network call in one thread: another one means that this machine or PyTorch rounds otherwise."""
    tokens = torch.arange(64).remainder(28).view(2, 32)
    call = alone(lambda: digest(wiki()["12b"].logits_at(tokens, torch.ones(2), torch.arange(32).expand(2, -1)).numpy()))
    return str(call())


def record_file() -> Path:
    """The record for the way this machine and PyTorch round; it may not exist."""
    return RECORDS / f"{arithmetic()[:8]}.json"


def read_record(file: Path) -> dict[str, Any]:
    """The recorded runs by name; empty where there is no record."""
    return dict(json.loads(file.read_text())["runs"]) if file.is_file() else {}


def expected(name: str) -> Any:
    """What a run gave when it was recorded: where this machine's rounding is not on record, what it gave on all others;
    None if that was not the same."""
    if name in (own := read_record(record_file())):
        return own[name]
    found = [record[name] for record in map(read_record, sorted(RECORDS.glob("*.json"))) if name in record]
    return found[0] if len(found) > 1 and all(value == found[0] for value in found) else None


def write_record(file: Path, record: Mapping[str, Any]) -> None:
    """Write recorded runs, a line each."""
    made = {"torch": torch.__version__, "numpy": np.__version__}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in record.items())
    file.write_text(f'{{\n"made_with": {json.dumps(made)},\n"runs": {{\n{lines}\n}}\n}}\n')


def network(depth: int, seed: int, causal: bool = False, **changes: Any) -> Transformer:
    """A small network with random weights, far from flat in what it predicts."""
    model = Transformer(Architecture(28, 16, width=16, depth=depth, heads=2, causal=causal, **changes))
    model.initialise(torch.Generator().manual_seed(seed)).eval().requires_grad_(False)
    model.output_layer.linear.weight.data.normal_(0, 0.5, generator=torch.Generator().manual_seed(seed + 100))
    return model


@functools.cache
def tiny() -> Family:
    """Three networks, a twin of the largest and a judge; length 16, the symbols of text8."""
    family = Family({f"{d}b": network(d, d) for d in (1, 2, 3)}, 27, 28, 16, Text8Tokenizer(), "tiny")
    family.twins = {"3b": network(3, 7)}
    family.judge = network(2, 50, causal=True)
    return family


def pair() -> Family:
    """The same with two models."""
    family = Family({name: tiny().models[name] for name in ("1b", "3b")}, 27, 28, 16, Text8Tokenizer(), "pair")
    family.judge = tiny().judge
    return family


def some_text(n: int = 2000) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 27, n)


def toy(seed: int, symbols: int = 6, length: int = 10) -> FromLogits:
    """Logits that depend on all tokens, the position and the time: float64, in a fixed order. The mask is the last."""
    rng = np.random.default_rng(seed)
    own, rate = (torch.from_numpy(rng.normal(size=(length, symbols))) for _ in range(2))
    mix = torch.from_numpy(rng.normal(size=(length, symbols, symbols)))

    def logits(tokens_BL: Tensor, t_B: Tensor) -> Tensor:
        total_BV = torch.zeros(len(tokens_BL), symbols, dtype=torch.float64)
        for j in range(tokens_BL.shape[1]):
            total_BV = total_BV + mix[j][tokens_BL[:, j]]
        wide = tokens_BL.shape[1]
        return 0.3 * total_BV[:, None] * rate[:wide] + own[:wide] * t_B.double()[:, None, None]

    return FromLogits(logits)


TOYS = {"a": toy(1), "b": toy(2), "c": toy(3)}
MASK = 5


class Unsure:
    """A dynamic policy that wants logits: heavy while the masked positions' distributions are flat."""

    wants_logits = True
    __name__ = "unsure"

    def __init__(self, light: str, heavy: str, limit: float) -> None:
        self.light, self.heavy, self.limit = light, heavy, limit

    def __call__(self, state: RowState) -> str:
        if state.masked_logits is None or not len(state.masked_logits):
            return self.heavy
        p_MV = state.masked_logits.double().softmax(dim=-1)
        return self.heavy if float(torch.special.entr(p_MV).sum(dim=-1).mean()) > self.limit else self.light


def by_luck(state: RowState) -> str:
    """A dynamic policy that looks at what the last call said of its tokens."""
    return "12b" if state.mean_logprob is None or state.mean_logprob < -1.0 or state.calls % 5 == 4 else "4b"


# ------------------------------------------------------------------------------------------------ sampling


def wiki_run(schedule: Any = "heavy", n: int = 2, **options: Any) -> Run:
    if not {"given", "infill", "stride", "length", "max_new_tokens"} & set(options):
        options["length"] = 32
    return lambda: kept(sample(wiki(), schedule, n, **options))


def tiny_run(schedule: Any, n: int = 4, **options: Any) -> Run:
    return lambda: kept(sample(tiny(), schedule, n, **options))


def toy_run(policy: Any, n: int = 5, rule: str | None = None, **options: Any) -> Run:
    def run() -> dict[str, Any]:
        others = dict(options)
        plan = make_plan(n, 10, 3, others.pop("given", None), others.pop("first_row", 0))
        law = Law(*others.pop("law", ()))
        asked = Schedule.parse(policy) if isinstance(policy, str) else policy
        if rule is None:
            return kept(denoise(TOYS, asked, plan, mask_id=MASK, law=law, **others))
        return kept(decode(TOYS, asked, plan, parse_rule(rule), mask_id=MASK, law=law, **others))

    return run


def given_rows() -> np.ndarray:
    """Four rows of 24 symbols, some given, one wholly so."""
    rng = np.random.default_rng(4)
    rows = np.where(rng.random((4, 24)) < 0.4, rng.integers(0, 27, (4, 24)), -1)
    rows[2] = rng.integers(0, 27, 24)
    return rows


def windows_of_wiki() -> Run:
    return lambda: kept(sample(wiki(), "L50% H50%", 2, steps=4, length=300, stride=60, prompt="the city of ", seed=8))


def infilled() -> Run:
    text = "the city of ________ was founded in ____ by the"
    return lambda: kept(sample(wiki(), "sandwich:50%", 3, infill=text, steps=12, seed=2, stop="by"))


def sampling() -> dict[str, Run]:
    third = np.full(20, -1)
    third[5:9] = [19, 7, 4, 26]
    timetable = Timetable(("4b", "12b", "8b", "12b", "4b"), (1.0, 0.8, 0.55, 0.3, 0.1, 0.0))
    runs: dict[str, Run] = {
        "wiki-4b": wiki_run("4b", steps=32),
        "wiki-8b": wiki_run("8b", seed=1, steps=32),
        "wiki-12b": wiki_run("12b", steps=32),
        "wiki-light": wiki_run("light", 3, steps=16),
        "wiki-heavy": wiki_run("heavy", 3, steps=16),
        "wiki-roles": wiki_run("L8 H8", light="8b", heavy="12b"),
        "wiki-counts": wiki_run("L8 H16 L8"),
        "wiki-shares": wiki_run("L12.5% H75% L1/8", 3, steps=16),
        "wiki-names": wiki_run("4b:6 8b:4 12b:6", 3),
        "wiki-arrows": wiki_run("12b:6 -> 4b:6", 2, seed=9),
        "wiki-sandwich": wiki_run("sandwich:25%", 4, steps=12),
        "wiki-quarter": wiki_run("quarter:2", 2, steps=16),
        "wiki-small-first": wiki_run("small-first:50%", 2, steps=16),
        "wiki-interleaved": wiki_run("interleaved:25%", 3, steps=16),
        "wiki-interleaved-names": wiki_run("interleaved(4b:25% 8b:75%)", 2, steps=16),
        "wiki-random": wiki_run("random:7:25%", 3, steps=16),
        "wiki-cells": wiki_run("cells(4b 8b 12b 12b)", 3, steps=18),
        "wiki-bits": wiki_run("1000000111", 2, steps=26),
        "wiki-grid": wiki_run("L4@25% H14@65% L4@10%", 3),
        "wiki-infinity": wiki_run("sandwich:50%", 2, steps=math.inf, length=20),
        "wiki-infinity-grid": wiki_run("L1@30% H1@70%", 2, steps=math.inf, seed=5, length=20),
        "wiki-timetable": wiki_run(timetable, 3, seed=6),
        "wiki-few-steps": wiki_run("L2 H2", 4),
        "wiki-one-step": wiki_run("H1", 4),
        "wiki-prompt": wiki_run("sandwich:50%", 3, prompt="the history of ", steps=12),
        "wiki-new-tokens": wiki_run("sandwich:50%", 2, prompt="the history of ", max_new_tokens=14, steps=10),
        "wiki-suffix": wiki_run("L50% H50%", 2, prompt="in the ", suffix=" of the war", steps=12),
        "wiki-infill": infilled(),
        "wiki-given": lambda: kept(sample(wiki(), "L6 H6", 4, given=given_rows(), seed=3, batch_size=2)),
        "wiki-given-one-row": lambda: kept(sample(wiki(), "H50% L50%", 3, given=third, steps=9)),
        "wiki-first-row": wiki_run("L8 H8", 2, first_row=1000, seed=7),
        "wiki-batch-1": wiki_run("L8 H8", 3, batch_size=1),
        "wiki-batch-3": wiki_run("interleaved:50%", 4, steps=12, batch_size=3),
        "wiki-law": wiki_run("L8 H8", 2, temperature=0.7, top_k=9, top_p=0.9),
        "wiki-temperature": wiki_run("L8 H8", 2, temperature=1.3),
        "wiki-cosine": wiki_run("L8 H8", 2, alpha=Alpha("cosine")),
        "wiki-switch": wiki_run(SwitchByMaskFraction("4b", "12b", 0.3, 0.7), 3, steps=16),
        "wiki-unsure": wiki_run(Unsure("4b", "12b", 2.0), 2, steps=10),
        "wiki-by-luck": wiki_run(by_luck, 2, steps=16, batch_size=2),
        "wiki-windows": windows_of_wiki(),
        "tiny-windows": tiny_run("L50% H50%", length=40, stride=7, seed=2),
        "tiny-windows-rule": tiny_run("heavy", length=30, stride=5, rule="low-confidence", steps=5, prompt="ab"),
        "tiny-many-rows": tiny_run("sandwich:50%", 40, batch_size=8, steps=11, seed=11),
        "tiny-default-batch": tiny_run("interleaved(1b:25% 2b:75%)", 70, steps=8),
        "tiny-large-seed": tiny_run("1b:5 2b:5 3b:5", 6, seed=2**63 + 5, first_row=2**31 - 3),
        "tiny-infinity": tiny_run("cells(1b 2b 3b 1b)", 9, steps=math.inf, batch_size=4),
        "toy-counts": toy_run("a:3 b:4 c:3"),
        "toy-cosine": toy_run("a:3 b:4 c:3", alpha=Alpha("cosine"), batch_size=2),
        "toy-polynomial": toy_run("a:50% c:50%", alpha=Alpha("polynomial", 2.0), steps=7),
        "toy-polynomial-infinity": toy_run("a:50% c:50%", alpha=Alpha("polynomial", 0.5), steps=math.inf),
        "toy-grid": toy_run("a:2@20% b:3@50% c:1@30%", n=7, batch_size=3, heavy="b"),
        "toy-law": toy_run("b:6 a:6", law=(0.8, 4, 0.95)),
        "toy-switch": toy_run(SwitchByMaskFraction("a", "c", 0.2, 0.6), steps=8, batch_size=2),
        "toy-switch-infinity": toy_run(SwitchByMaskFraction("a", "c", 0.2, 0.6), steps=math.inf),
        "toy-unsure": toy_run(Unsure("a", "b", 1.3), steps=12),
        "toy-given": toy_run("a:4 b:4", given=np.array([0, -1, -1, 3, -1, -1, -1, 2, -1, -1]), first_row=17),
    }
    return runs


# ------------------------------------------------------------------------------------------------ decoding rules


def rules() -> dict[str, Run]:
    blocks = {"random": "random:8", "low-confidence": "low-confidence:8"}
    blocks |= {"threshold": "threshold:0.6:8", "factor": "factor:1.5:16"}
    looser = {"threshold": "threshold:0.5", "factor": "factor:2", "remdm-cap": "remdm-cap:0.3"}
    looser |= {"remdm-rescale": "remdm-rescale:0.5", "remdm-loop": "remdm-loop:0.05:0.6:0.2:0.8"}
    runs: dict[str, Run] = {}
    for name in (rule.name for rule in RULES if not rule.own_order):  # those were not there when this was recorded
        adaptive = parse_rule(name).adaptive
        steps = {} if adaptive else {"steps": 8}
        runs[f"rule-{name}"] = wiki_run("4b", 2, rule=name, seed=1, length=24, **steps)
        two = "L50% H50%" if adaptive else "L4 H4"
        runs[f"rule-{name}-two"] = wiki_run(two, 3, rule=looser.get(name, name), prompt="the ", batch_size=2, length=24)
        runs[f"rule-{name}-greedy"] = wiki_run("L50% H50%", 1, rule=name, temperature=0, length=24, **steps)
        runs[f"rule-{name}-toys"] = toy_run(
            "a:30% b:40% c:30%",
            6,
            looser.get(name, name),
            batch_size=4,
            law=(0.9,),
            **({} if adaptive else {"steps": 7}),
        )
    for name, text in blocks.items():
        steps = {} if parse_rule(name).adaptive else {"steps": 8}
        runs[f"rule-{name}-blocks"] = wiki_run("L50% H50%", 2, rule=text, **steps)
    runs["rule-block-length"] = wiki_run("heavy", 2, rule="low-confidence", block_length=16, steps=8)
    runs["rule-law"] = wiki_run("L4 H4", 2, rule="dream-entropy", temperature=0.8, top_p=0.9)
    runs["rule-switch"] = wiki_run(SwitchByMaskFraction("4b", "12b", 0.3, 0.7), 2, rule="low-confidence", steps=8)
    runs["rule-switch-adaptive"] = wiki_run(SwitchByMaskFraction("4b", "12b", 0.3, 0.7), 2, rule="threshold:0.5")
    runs["rule-by-luck-remdm"] = wiki_run(by_luck, 2, rule="remdm-cap:0.2", steps=10)
    runs["rule-grid-remdm"] = wiki_run("L3@40% H5@60%", 2, rule="remdm-rescale:0.2")
    runs["rule-interleaved"] = wiki_run("interleaved:50%", 2, rule="dream-margin", steps=8)
    runs["rule-names"] = lambda: [
        [str(rule), rule.exact, rule.planned, rule.adaptive, rule.takes_block, rule.source] for rule in RULES
    ]
    return runs


# ------------------------------------------------------------------------------------------------ MDLM's sampler


def references() -> dict[str, Run]:
    def run(models: Callable[[], Mapping[str, Any]], text: str, mask_id: int, **options: Any) -> Run:
        def made() -> dict[str, Any]:
            heard: list[Any] = []
            found = sample_reference(
                models(),
                Schedule.parse(text),
                3,
                options.get("length", 10),
                mask_id=mask_id,
                on_step=lambda i, x_BL: heard.append([i, x_BL.tolist()]),
                **{name: value for name, value in options.items() if name != "length"},
            )
            return {"tokens": tokens_of(found.tokens), "calls": found.calls, "steps": text_digest(heard)}

        return made

    given = np.array([0, -1, -1, 3, -1, -1, -1, 2, -1, -1])
    wikis = lambda: wiki().models  # noqa: E731
    toys = lambda: TOYS  # noqa: E731
    return {
        "reference-ddpm-fp32": run(wikis, "4b:4 12b:4", 27, length=24),
        "reference-ddpm-fp64": run(wikis, "4b:4 12b:4", 27, length=24, precision="fp64", seed=2),
        "reference-cache-fp32": run(wikis, "4b:20 8b:20", 27, length=4, sampler="ddpm_cache"),
        "reference-cache-fp64": run(wikis, "4b:20 8b:20", 27, length=4, sampler="ddpm_cache", precision="fp64"),
        "reference-toys": run(toys, "a:5 b:5 c:5", MASK),
        "reference-toys-cache": run(toys, "a:5 b:5", MASK, sampler="ddpm_cache", precision="fp64"),
        "reference-no-removal": run(toys, "a:5 b:5", MASK, eps=0.0, noise_removal=False, precision="fp64"),
        "reference-given": run(toys, "a:50% b:50%", MASK, steps=6, given=given, eps=1e-3),
        "reference-grid": run(toys, "a:2@20% b:3@80%", MASK, seed=9, precision="fp64"),
    }


# ------------------------------------------------------------------------------------------------ schedules and plans


TEXTS = (
    "L125 H750 L125",
    "L12.5% H75% L1/8",
    "4b:125 12b:750 4b:125",
    "L8@25% H200@65% L8@10%",
    "heavy",
    "light",
    "12b",
    "sandwich",
    "sandwich:25%",
    "quarter:2",
    "small-first:25%",
    "interleaved:25%",
    "interleaved(4b:25% 12b:75%)",
    "random:7:25%",
    "random:7(4b:25% 12b:75%)",
    "1000000111",
    "cells(4b 8b 12b 12b)",
    "L25% H50% L25%",
)


def timetables() -> dict[str, Any]:
    found = {}
    for text in TEXTS:
        schedule = Schedule.parse(text)
        table = schedule.bind("4b", "12b").timetable(schedule.steps or 37)
        found[text] = [str(schedule), table.steps, text_digest([list(table.models), list(table.times)])]
    return found


def lists_of_schedules() -> dict[str, Any]:
    return {
        "hand_made": {name: str(schedule) for name, schedule in hand_made().items()},
        "all_placements": text_digest([str(schedule) for schedule in all_placements(10, 4)]),
    }


def plans() -> dict[str, Any]:
    plain, given = make_plan(5, 33, 12), make_plan(4, 24, 2**64 - 1, given_rows(), first_row=9)
    return {
        name: digest(plan.u_nL, plan.given_nL, plan.rows_n) for name, plan in {"plain": plain, "given": given}.items()
    }


def mean_prices() -> list[float]:
    units = {unit: prices(tiny(), unit, 16) for unit in ("flops", "blocks")}
    free = np.array([16, 12])
    texts = ("1b:4 3b:4", "1b:2@50% 2b:5@50%", "interleaved(1b:4 2b:4)")
    return [float(mean_price(price, Schedule.parse(text), None, free)) for price in units.values() for text in texts]


# ------------------------------------------------------------------------------------------------ what callbacks hear


def heard(family: Callable[[], Family], schedule: Any, n: int, **options: Any) -> Run:
    def run() -> dict[str, Any]:
        events: list[Any] = []
        calls: list[Any] = []
        samples = sample(
            family(),
            schedule,
            n,
            callback=lambda e: events.append([e.row, e.step, e.t, e.model, e.positions, e.tokens]),
            on_calls=lambda done, total: calls.append([done, total]),
            **options,
        )
        told = {"events": text_digest(events), "number": len(events), "first": events[0][:4]}
        return {**told, "calls": text_digest(calls), "last": calls[-1], **kept(samples)}

    return run


class Streamer:
    """A streamer in the manner of transformers."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.heard.append(["put", value.tolist()])

    def put_draft(self, value: Tensor) -> None:
        self.heard.append(["draft", value.tolist()])

    def end(self) -> None:
        self.heard.append(["end"])


def streamed() -> dict[str, Any]:
    streamer = Streamer()
    samples = sample(wiki(), "L5 H5", 2, length=24, prompt="a ", callback=streamer)
    return {"heard": text_digest(streamer.heard), "number": len(streamer.heard), **kept(samples)}


def callbacks() -> dict[str, Run]:
    return {
        "events-static": heard(wiki, "L8 H8", 3, length=24, batch_size=2),
        "events-infinity": heard(tiny, "L50% H50%", 4, steps=math.inf),
        "events-dynamic": heard(tiny, SwitchByMaskFraction("1b", "3b", 0.3, 0.7), 4, steps=9, batch_size=3),
        "events-confidence": heard(tiny, "L4 H4", 4, rule="low-confidence"),
        "events-adaptive": heard(tiny, "L50% H50%", 4, rule="threshold:0.4"),
        "events-remasking": heard(tiny, "L8 H8", 4, rule="remdm-cap:0.4", batch_size=3),
        "events-planned": heard(tiny, "L4 H4", 4, rule="random:8"),
        "events-streamer": streamed,
    }


# ------------------------------------------------------------------------------------------------ trees and searches


def grown(
    family: Callable[[], Family],
    schedules: Sequence[Any],
    n: int,
    steps: int,
    roles: Sequence[str] = (),
    **options: Any,
) -> Run:
    def run() -> dict[str, Any]:
        own = family()
        bound = [own.bind(schedule, *own.roles(*roles)) for schedule in schedules]
        counted = [schedule if schedule.steps else schedule.resample(steps) for schedule in bound]
        found = grow(own, counted, n, **options)
        alone = [sample(own, schedule, n, **options).cost for schedule in counted]
        return {
            "models": list(found.models),
            "tokens": tokens_of(found.tokens_SnL),
            "distinct": len(found.final_UL),
            "calls": [[cost.calls.get(name, 0) for name in found.models] for cost in alone],
            "tree": found.calls_tree_K.tolist(),
            "made": found.calls_made_K.tolist(),
            "flops": None if found.flops_made is None else [cost.flops for cost in alone],
            "flops_made": found.flops_made,
            "merged": found.merged,
            "network_calls": found.network_calls,
            "padded_calls": found.padded_calls,
            "batch_size": found.batch_size,
        }

    return run


def searched(method: str, family: Callable[[], Family] = pair, **options: Any) -> Run:
    def run() -> dict[str, Any]:
        found = steady(search(family(), method, progress=False, batch_size=8, **options))
        named = ("method", "schedule", "recommendation", "calls", "stopped", "schedules_tried", "steps")
        return {**{name: found[name] for name in named if name in found}, "all": text_digest(found)}

    return run


def searches() -> dict[str, Run]:
    mixed = ["1b:4 3b:4", "1b:4 2b:4", "3b:8", "2b:2@25% 3b:3@75%", "interleaved(1b:25% 3b:75%)"]
    given = np.full((4, 12), -1)
    given[:, 2], given[3] = 5, 7
    return {
        "tree-wiki": grown(
            wiki, ["heavy", "light", "L4 H4", "H4 L4", "1100", "1001"], 2, 8, given=np.full((2, 24), -1)
        ),
        "tree-placements": grown(tiny, all_placements(6, 3), 5, 12, ("1b", "3b"), batch_size=4),
        "tree-mixed": grown(tiny, mixed, 4, 8, seed=3, first_row=20, given=given, batch_size=3),
        "search-exhaustive": searched("exhaustive", segments=4, light_segments=2, n=4, confirm=4),
        "search-exhaustive-budget": searched("exhaustive", tiny, segments=3, budget="25%", n=3, confirm=3),
        "search-tune": searched("tune", budget="25%", segments=3, rows=100, densities=["1", "1/2"]),
        "search-tune-quick": searched("tune", tiny, quick=True, segments=3),
        "search-tune-loss": searched("tune", max_loss="30%", segments=3, rows=100, densities=["1", "1/2"]),
        "search-evolve": searched("evolve", budget="25%", segments=3, n=4, confirm=4),
    }


# ------------------------------------------------------------------------------------------------ measurements


def rows_of_text() -> np.ndarray:
    return spread_rows(some_text(), 16, 12)


def bound_text(denoiser: Any, text: str, length: int, rows: int) -> dict[str, Any]:
    """The bound on rows spread over a text, with bits per character of the text."""
    ids = np.asarray(Text8Tokenizer().encode(text, strict=False), dtype=np.int64)
    found = bound(denoiser, spread_rows(ids, length, rows))
    return {**found.to_json(), "bits_per_character": found.bits * len(ids) / len(text), "tokens": len(ids)}


def bounds() -> dict[str, Any]:
    rows, models = rows_of_text(), tiny().models
    table = Schedule.parse("1b:3 2b:4 3b:2").timetable()
    real = np.arange(5, 17)
    return {
        "one": bound(models["2b"], rows, draws=3, seed=4).to_json(),
        "padded": bound(models["3b"], rows, real_N=real, batch_size=5).to_json(),
        "timetable": bound(models, rows, timetable=table, mask_id=27).to_json(),
        "causal": causal_bound(tiny().judge, rows).to_json(),
        "text": bound_text(models["1b"], "the quick brown fox jumps over it " * 9, length=16, rows=7),
    }


def bounds_of_wiki() -> dict[str, Any]:
    tokens = held_out(wiki())
    assert tokens is not None
    rows = spread_rows(tokens, 64, 6)
    return {
        "tokens": [len(tokens), digest(tokens)],
        **{name: bound(model, rows, draws=2).to_json() for name, model in wiki().models.items()},
        "judge": causal_bound(wiki().judge, rows).to_json(),
    }


def bounds_of_schedules() -> dict[str, Any]:
    found: dict[str, Any] = {}
    tables = {
        "drawn": measure_table(tiny().models, rows_of_text(), 27, draws=6, seed=2),
        "enumerated": measure_table(TOYS, np.random.default_rng(1).integers(0, MASK, (4, 6)), MASK, draws=None),
    }
    for name, table in tables.items():
        a, b, c = table.models
        # Sums in float64, whose last bits differ between processors that otherwise round alike.
        curve = text_digest(steady(table.curve().tolist()))
        found[name] = {"table": digest(table.m_ND, table.weight_ND, table.c_KND), "curve": curve}
        asked = [(f"{a}:3", None), (f"{a}:2 {b}:3", None), (f"{a}:40% {c}:60%", 8), (f"{a}:40% {c}:60%", math.inf)]
        asked.append((f"{a}:1@20% {b}:2@50% {c}:1@30%", None))
        for text, steps in asked:
            for kind in ("linear", "cosine"):
                got = schedule_bound(table, Schedule.parse(text), steps, Alpha(kind))
                found[name][f"{text} {steps} {kind}"] = steady([got.bits, got.low, got.high, got.rows])
        found[name]["steps"] = steady(step_costs(table, (1.0, 0.7, 0.3, 0.0)).tolist())
    return found


def curves(**options: Any) -> Run:
    def run() -> dict[str, Any]:
        found = steady(importance(tiny(), some_text(), sequences=20, progress=False, **options))
        first = found["pairs"][0]
        table = Schedule.parse(f"{first['light']}:3 {first['heavy']}:5").timetable()
        return {
            "pairs": [
                {name: each[name] for name in ("light", "heavy", "t", "kl", "loss_light", "loss_heavy", "peak_t")}
                for each in found["pairs"]
            ],
            "path_kl": path_kl(first, table),
            "all": text_digest(found),
        }

    return run


def compared(schedules: Sequence[str], **options: Any) -> Run:
    def run() -> dict[str, Any]:
        found = steady(compare(tiny(), schedules, progress=False, **options))
        del found["parameters"]  # how large the models are is no result; the records are older
        named = "schedule kind gen_ppl gen_ppl_ci corpus_ppl entropy bound gap_paid blocks_saved flops_saved calls rank"
        return {
            "rows": [{name: row.get(name) for name in named.split()} for row in found["rows"]],
            "paired": found["paired"],
            "all": text_digest(found),
        }

    return run


def judged() -> dict[str, Any]:
    found, tokens = {}, rows_of_text()
    given = np.full_like(tokens, -1)
    given[:, :4] = tokens[:, :4]
    for family in (tiny(), wiki()):
        got = score(load_judge(None, family), tokens, given_nL=given)
        found[str(family.name)] = [got.nll_n.tolist(), got.written_nll_n.tolist(), got.written_count_n.tolist()]
    found["interval"] = [float(x) for x in mean_interval(tokens.mean(axis=1))]
    return found


def measurements() -> dict[str, Run]:
    return {
        "bounds": bounds,
        "bounds-wiki": bounds_of_wiki,
        "bounds-schedules": bounds_of_schedules,
        "importance": curves(timesteps=[0.02, 0.3, 1.0]),
        "importance-all-pairs": curves(timesteps=3, pairs="all", seed=3, alpha=Alpha("cosine")),
        "importance-trajectory": curves(timesteps=3, states="trajectory", steps=8, pairs=[("1b", "3b")]),
        "compare": compared(["sandwich", "heavy", "L4 H12"], n=8),
        "compare-bound": compared(
            ["L4 H4", "2b:8"], n=6, rivals=False, bound=True, text=rows_of_text(), seed=4, batch_size=4
        ),
        "compare-prompts": compared(["sandwich:50%"], n=4, prompts=["the ", "of "], steps=8, rivals=False),
    }


# ------------------------------------------------------------------------------------------------ corpora, training


def write_texts(folder: Path) -> Path:
    words = [f"{a} {b} {c}" for a in ("red", "old", "two") for b in ("cat", "dog") for c in ("ran", "sat", "slept")]
    path = folder / "a.txt"
    path.write_text("".join(" ".join(words[k % 7 :: 1 + k % 3]) + "\n\n" for k in range(40)))
    return path


def prepared() -> dict[str, Any]:
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = write_texts(folder)
        asked: dict[str, dict[str, Any]] = {
            "text8": {"tokenizer": "text8", "holdout": 0.1},
            "bytes": {"tokenizer": "bytes"},
            "bpe": {"tokenizer": "bpe:300", "packing": "wrap", "length": 16, "holdout": 0.2},
            "pad": {"tokenizer": "bpe:300", "packing": "pad", "length": 24, "holdout": 0.2},
        }
        for kind, options in asked.items():
            made = prepare(source, folder / kind, progress=False, **options)
            files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted((folder / kind).glob("*.bin"))}
            found[kind] = {
                "files": files,
                "tokens": [digest(made.train), digest(made.heldout)],
                "vocabulary": [made.vocab_size, made.mask_id],
                "splits": made.manifest["splits"],
            }
    return found


def trained(shape: Mapping[str, Any], **changes: Any) -> Run:
    """Two models of 30 steps each: their weights, and what the family that is made of them writes."""

    def run() -> dict[str, Any]:
        recipe: dict[str, Any] = {"steps": 30, "batch": 8, "warmup": 3, "lr": 1e-2, "ema": 0.9, "log_every": 10}
        recipe |= {"eval_every": 15, "eval_rows": 4, "checkpoint_every": 20}
        preset = Preset("toy", "text8", "running", 16, 16, 2, (1, 2), **shape, recipe=Recipe(**{**recipe, **changes}))
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            prepare(write_texts(folder), folder / "c", tokenizer="text8", holdout=0.1, progress=False)
            out = train_family(folder / "c", folder / "out", preset, device="cpu", progress=False)
            found: dict[str, Any] = {}
            for model in sorted(path.parent for path in (folder / "out" / "models").glob(f"*/{CHECKPOINT}")):
                loaded = load_checkpoint(model / CHECKPOINT)
                assert loaded is not None
                tensors = loaded[0]
                found[model.name] = {
                    "tensors": len(tensors),
                    "weights": digest(*(tensors[key].double().numpy() for key in sorted(tensors))),
                    "step": loaded[1]["step"],
                }
            family = Family.load(out, device="cpu")
            found["sample"] = kept(sample(family, "L4 H4", 3, seed=1))
        return found

    return run


def training() -> dict[str, Run]:
    return {
        "prepare": prepared,
        "train": trained({"twin": 2, "judge": 1}),
        "train-cosine": trained({}, decay="cosine", dropout=0.0, micro_batch=4, init=0.05, seed=3),
        "train-timed": trained({"time_conditioning": True}),
    }


# ------------------------------------------------------------------------------------------------ all of them


def alone(run: Run) -> Run:
    """With one thread, and as plain JSON values that have been through JSON."""

    def wrapped() -> Any:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return json.loads(json.dumps(run()))
        finally:
            torch.set_num_threads(threads)

    return wrapped


def runs() -> dict[str, Run]:
    """Every run by its name."""
    every: dict[str, Run] = {
        **sampling(),
        **rules(),
        **references(),
        "schedules-timetables": timetables,
        "schedules-lists": lists_of_schedules,
        "plans": plans,
        "prices": mean_prices,
        **callbacks(),
        **searches(),
        "judge": judged,
        **measurements(),
        **training(),
    }
    return {name: alone(run) for name, run in every.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Run everything, and compare with the record or write it.")
    parser.add_argument("--write", nargs="+", default=[], metavar="NAME", help="record these runs, or all")
    parser.add_argument("--times", action="store_true", help="show how long each run took")
    parser.add_argument("--reverse", action="store_true", help="last run first")
    options = parser.parse_args()
    found, every, broken = {}, runs(), 0
    for name in reversed(every) if options.reverse else every:
        began = time.perf_counter()
        try:
            found[name] = every[name]()
        except Exception as error:
            broken += 1
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        if options.times:
            print(f"{time.perf_counter() - began:6.2f} s  {name}")
    record = read_record(record_file())
    if options.write and not broken:
        names = list(every) if options.write == ["all"] else options.write
        record |= {name: found[name] for name in names}
        write_record(record_file(), {name: record[name] for name in every if name in record})
        for other in RECORDS.glob("*.json"):
            if options.write != ["all"] and other != record_file():
                write_record(other, {name: run for name, run in read_record(other).items() if name not in names})
        print(f"{len(names)} runs recorded in {record_file()}")
        return 0
    wanted = {name: value for name in {**record, **found} if (value := expected(name)) is not None}
    changed = [name for name, value in wanted.items() if value != found.get(name)]
    print(f"{len(wanted)} runs compared, {len(changed)} not as recorded{': ' if changed else ''}{', '.join(changed)}")
    return int(bool(changed or broken))


if __name__ == "__main__":
    sys.exit(main())
