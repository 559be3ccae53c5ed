"""The same answers on CUDA: the kernels against their plain twins, the law, and rows that do not feel their neighbours.

Skipped where there is no CUDA. `python tests/kernels/test_cuda.py FILE [WORD]` runs all of it, or the tests with
a word in their name, without pytest and records the result.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import os
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "sampling"))
sys.path.insert(0, str(Path(__file__).parents[1]))
try:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
except ModuleNotFoundError:  # run as a script on a machine without test tools: decorators that do nothing
    from unittest.mock import MagicMock

    pytest = MagicMock()
    pytest.mark.parametrize = lambda *_, **__: lambda function: function
    sys.modules["pytest"] = pytest

from helpers import TableDenoiser, p_value

from relaylm.core import noise as plain
from relaylm.core.noise import uniforms
from relaylm.core.plan import Plan, make_plan
from relaylm.core.schedule import Schedule
from relaylm.kernels import attention, rotate
from relaylm.kernels import gemm as products
from relaylm.kernels.draw import philox, race
from relaylm.measure import timing
from relaylm.measure.prices import cost_table
from relaylm.models.denoiser import Architecture, Transformer
from relaylm.models.family import Family
from relaylm.sampling import graphs as cuda_graphs
from relaylm.sampling.confidence import decode, forced
from relaylm.sampling.denoise import denoise
from relaylm.sampling.engine import Engine, settings
from relaylm.sampling.law import Law
from relaylm.sampling.policy import resolve
from relaylm.sampling.rules import parse_rule
from relaylm.sampling.sample import sample
from relaylm.train.objective import mask_words

DRAWS = 250_000


def network(vocab_size: int = 60, length: int = 64, width: int = 128, depth: int = 3, seed: int = 0) -> Transformer:
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(Architecture(vocab_size, length, width, depth, heads=4)).initialise(generator)
    for parameter in model.output_layer.linear.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    return model.eval().requires_grad_(False)


def test_race_kernel_draws_the_same_tokens_as_the_cpu() -> dict[str, int]:
    """All seeds, 1 and those above 2^32 among them; scores that differ in the last bits may differ in a token."""
    generator = torch.Generator().manual_seed(0)
    different = drawn = 0
    for vocab_size in (1, 2, 27, 63, 64, 65, 5000, 50258):
        for seed in (0, 1, 2**32, 2**32 + 1, 2**64 - 1):
            n = 200 if vocab_size < 5000 else 40  # the CPU's side of it takes its time
            logits = torch.randn(n, vocab_size, generator=generator) * 3
            logits[::4] += 1e8  # beside which noise would be rounded
            row, position, draw = torch.arange(n) + 7, torch.arange(n) % 11, torch.arange(n) % 3
            here = plain.race(logits, seed, row, position, draw)
            spoilt = torch.zeros(1, dtype=torch.int32, device="cuda")
            there = race(logits.cuda(), seed, row.cuda(), position.cuda(), draw.cuda(), spoilt)[0].cpu()
            different, drawn = different + int((here != there).sum()), drawn + n
    assert different <= drawn * 1e-4
    return {"drawn": drawn, "different": different}


def test_philox_kernel_against_plain_arithmetic() -> None:
    generator = torch.Generator().manual_seed(0)
    counter = [torch.randint(0, 2**32, (37, 11), generator=generator) for _ in range(4)]
    counter[1] = counter[1][:1]  # is spread over the rows
    for key in ((0, 0), (1, 0), (2**32 - 1, 5), (123456789, 2**32 - 1)):
        here = plain.philox(counter, key)
        there = philox([word.cuda() for word in counter], key)
        assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))


def test_mask_words_are_the_same_words() -> None:
    samples = torch.tensor([0, 1, 2**32 - 1, 2**32, 2**40 + 3])
    for seed in (0, 1, 2**33):
        assert torch.equal(mask_words(seed, samples, 30), mask_words(seed, samples.cuda(), 30).cpu())


def test_trunk_and_head_kernels_against_the_plain_network() -> dict[str, float]:
    """bfloat16 blocks with kernels against float32 without: a small KL, and no more error than plain bfloat16 has."""
    exact, fast, plain = network(), network().cuda().cast(torch.bfloat16), network().cuda().cast(torch.bfloat16)
    tokens, t = torch.randint(0, 60, (16, 64), generator=torch.Generator().manual_seed(1)), torch.ones(16)
    positions = torch.randint(0, 64, (16, 5), generator=torch.Generator().manual_seed(2))
    with settings("cuda"):
        want = exact.logits_at(tokens, t, positions).double().log_softmax(-1)
        hidden = fast.hidden_at(tokens.cuda(), t.cuda(), positions.cuda()).flatten(0, 1)
        got = fast.head(hidden).cpu().double().view_as(want).log_softmax(-1)
        everywhere = plain.logits(tokens.cuda(), t.cuda()).cpu().double()  # without positions no kernel is used
        index = positions[..., None].expand(-1, -1, 60)
        without = everywhere.gather(1, index).log_softmax(-1)
    kl = float((want.exp() * (want - got)).sum(-1).mean())
    kl_without = float((want.exp() * (want - without)).sum(-1).mean())
    assert kl < 1e-3 and kl < 2 * kl_without + 1e-6
    return {"kl_kernels": kl, "kl_plain_bf16": kl_without}


def test_trunk_kernels_in_every_way_they_go() -> dict[str, float]:
    """No more error than plain bfloat16 has: with the rotation in the product and beside it (heads too wide, too few),
    own attention and PyTorch's, last blocks with and without values and (few rows) whole, one block, a bias, a narrow
    stream."""
    worst = {}
    for length, width, heads, depth, places, bias, narrow in (
        (128, 256, 4, 3, 3, True, False),
        (100, 256, 4, 3, 16, False, True),
        (64, 256, 2, 2, 17, True, False),
        (320, 256, 16, 2, 5, False, False),
        (10, 256, 32, 2, 4, True, False),
        (64, 224, 7, 1, 1, False, False),
    ):
        generator = torch.Generator().manual_seed(5)
        model = Transformer(Architecture(60, length, width, depth, heads, qkv_bias=bias)).initialise(generator).eval()
        for parameter in model.requires_grad_(False).parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        tokens = torch.randint(0, 60, (length, 6), generator=generator).T  # not in the order of memory
        positions, t = torch.randint(0, length, (places, 6), generator=generator).T, torch.ones(6)
        with settings("cuda"):
            want = model.hidden_at(tokens, t, positions)
        model.cuda().cast(torch.bfloat16).narrow = narrow
        with settings("cuda"):
            got = model.hidden_at(tokens.cuda(), t.cuda(), positions.cuda()).float().cpu()
            with unittest.mock.patch.object(attention, "FEW_PROGRAMS", 0):
                pruned = model.hidden_at(tokens.cuda(), t.cuda(), positions.cuda()).float().cpu()
            everywhere = model.hidden_at(tokens.cuda(), t.cuda(), None).float().cpu()  # without positions: no kernel
        plain = everywhere.gather(1, positions[..., None].expand(-1, -1, width))
        off, off_pruned, off_plain = (float((x - want).norm() / want.norm()) for x in (got, pruned, plain))
        assert max(off, off_pruned) < 1.5 * off_plain + 1e-3, (length, width, heads, depth, places, off, off_plain)
        worst[f"{depth} x {width}, {heads} heads, L={length}, k={places}"] = off
    return worst


def test_gelu_kernel_against_float64() -> dict[str, float]:
    """The MLP's first product on tiles of its own, at a number of rows that is no multiple of them."""
    generator = torch.Generator().manual_seed(3)
    h, weight = torch.randn(1000, 192, generator=generator), torch.randn(768, 192, generator=generator) / 14
    bias = torch.randn(768, generator=generator)
    h, weight, bias = h.bfloat16(), weight.bfloat16(), bias.bfloat16()
    want = torch.nn.functional.gelu(h.double() @ weight.double().T + bias.double(), approximate="tanh")
    got = products.twice_gelu(h.cuda(), weight.cuda(), bias.cuda()).cpu().double() / 2
    worst = float(((got - want).abs() / (want.abs() + 0.05)).max())
    assert worst < 2**-7  # bfloat16 keeps 8 bits
    return {"worst_relative_error": worst}


def test_rotated_product_against_float64() -> dict[str, float]:
    """Queries, keys and values with the rotation in the product, all of them and a last block's keys alone; rows that
    are no multiple of the tile."""
    generator = torch.Generator().manual_seed(4)
    length, heads, dim, width = 250, 4, 64, 256
    h = torch.randn(4 * length, width, generator=generator).bfloat16()
    weight = (torch.randn(3 * width, width, generator=generator) / 16).bfloat16()
    bias, angle = torch.randn(3 * width, generator=generator).bfloat16(), torch.randn(length, 32, generator=generator)
    want = (h.double() @ weight.double().T + bias.double()).view(4, length, 3 * heads, dim).transpose(1, 2)
    want[:, : 2 * heads] = rotate(want[:, : 2 * heads], angle.cos().double(), angle.sin().double())
    want = want.transpose(1, 2).reshape(len(h), -1)
    mine, mine_bias = (products.grouped(value, dim).cuda() for value in (weight, bias))
    worst = {}
    for name, part, rotated in (("all", slice(None), 2 * heads), ("keys", slice(width, 2 * width), heads)):
        got = products.rotated(h.cuda(), mine[part], mine_bias[part], angle.cos().cuda(), angle.sin().cuda(), rotated)
        worst[name] = float(((got.cpu().double() - want[:, part]).abs() / (want[:, part].abs() + 0.05)).max())
        assert worst[name] < 2**-7
    return worst


def test_law() -> dict[str, float]:
    """Every case of test_law, on CUDA."""
    import test_law as law

    found = {}
    for name, case in law.CASES.items():
        models = {key: model.to("cuda") for key, model in case.models.items()}
        plan = make_plan(DRAWS, 3, 0, np.array(case.given))
        tokens = denoise(
            models, case.policy, plan, mask_id=law.MASK, steps=case.steps, alpha=case.alpha, batch_size=1 << 17,
            device="cuda",
        ).tokens  # fmt: skip
        found[name] = p_value(tokens, case.law, law.SYMBOLS)
        assert found[name] > law.ALPHA, name
    return found


def test_rows_do_not_feel_their_neighbours() -> dict[str, Any]:
    """1,000 rows at one call shape, in another order and among strangers: not one token differs."""
    models = {
        "a": network(seed=1).cuda().cast(torch.bfloat16),
        "b": network(depth=5, seed=2).cuda().cast(torch.bfloat16),
    }
    schedule = Schedule.parse("a:8 b:16 a:8")

    def tokens(rows: np.ndarray, batch: int) -> np.ndarray:
        given = np.full((len(rows), 64), -1)
        plan = Plan(3, rows, given, uniforms(3, rows, 64))
        return denoise(models, schedule, plan, mask_id=59, batch_size=batch, device="cuda").tokens

    rows = np.arange(1000)
    base = tokens(rows, 64)
    order = np.random.default_rng(0).permutation(1000)
    strangers = np.concatenate([np.arange(5000, 5500), rows[::2]])
    shuffled, among = tokens(order, 64), tokens(strangers, 64)[500:]
    mismatches = int((shuffled != base[order]).sum()) + int((among != base[::2]).sum())
    assert mismatches == 0
    across = {batch: float((tokens(rows, batch) != base).mean()) for batch in (16, 100, 256)}
    return {"mismatches_at_one_shape": mismatches, "mismatch_rate_across_batch_sizes": across}


def test_shared_first_calls_and_kept_engines() -> dict[str, int]:
    """Not one token differs, whether rows that begin alike share their first call or not, and whether an engine has
    served before or is fresh."""
    models = {
        "a": network(seed=1).cuda().cast(torch.bfloat16),
        "b": network(depth=5, seed=2).cuda().cast(torch.bfloat16),
    }
    schedule, found = Schedule.parse("a:25% b:75%"), {}
    for steps in (4, 32):
        plan, other = make_plan(600, 64, 3), make_plan(600, 64, 3, first_row=600)
        options: dict[str, Any] = {"mask_id": 59, "steps": steps, "batch_size": 64, "device": "cuda"}
        shared = denoise(models, schedule, plan, **options)
        with unittest.mock.patch("relaylm.sampling.first_calls.alike", lambda *_: []):
            alone = denoise(models, schedule, plan, **options)
        engine = Engine(list(models.values()), plan, 59, Law(), "cuda")
        denoise(models, schedule, other, engine=engine, **options)
        again = denoise(models, schedule, plan, engine=engine, **options)
        assert shared.cost.shared_calls > 0
        assert (shared.tokens == alone.tokens).all() and (shared.tokens == again.tokens).all()
        found[f"T = {steps}, shared calls"] = shared.cost.shared_calls
    return found


def test_the_table_of_timings_foretells_a_run() -> dict[str, Any]:
    """Queue, graphs and all: what samples take and draw is what the table says. Measured in a table of its own."""
    device = torch.device("cuda")
    models = {}
    for depth in (4, 12):
        model = network(28, 256, 256, depth, seed=depth)
        models[f"{depth}b"] = model.to(device).cast(torch.bfloat16)
    family = Family(models, 27, 28, 256, device=device)
    batch = family.batch_size(1 << 20, 256)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache, unittest.mock.patch.dict(os.environ, XDG_CACHE_HOME=cache):
        found["call"] = cost_table(family)["call"]
        counter, found["no_joules"] = timing.energy_counter(device)
        for schedule in ("heavy", "light", "sandwich:25%"):
            sample(family, schedule, 2 * batch, steps=256, batch_size=batch)  # everything is warm after this
            before = counter() if counter is not None else 0.0
            samples = sample(family, schedule, 8 * batch, steps=256, batch_size=batch)
            drawn = counter() - before if counter is not None else None
            cost = timing.with_measured(samples, family)
            assert cost.milliseconds is not None
            found[schedule] = {"seconds": cost.seconds, "foretold": cost.milliseconds / 1000}
            found[schedule] |= {"joules": drawn, "joules_foretold": cost.joules}
    for schedule in ("heavy", "light", "sandwich:25%"):
        assert 0.75 < found[schedule]["foretold"] / found[schedule]["seconds"] < 1.25, found
    return found


DECODING = ("low-confidence:16", "dream-entropy", "threshold:0.4", "factor:1", "remdm-cap:0.05", "remdm-conf", "random")


def test_decoding_rules_draw_what_they_draw_on_the_cpu() -> dict[str, float]:
    """From tables in float64 the tokens are those of the CPU, but for scores that differ in the last bits."""
    found = {}
    for text in (*DECODING, "low-confidence:2"):
        rule = parse_rule(text if ":16" not in text else "low-confidence")
        tables = {name: TableDenoiser(k, 4, 3) for k, name in enumerate("ab")}
        steps, schedule = None if rule.adaptive else 8, Schedule.parse("a:25% b:75%")
        plan = make_plan(20_000, 4, 5)
        here = decode(tables, schedule, plan, rule, mask_id=3, steps=steps, batch_size=4096).tokens
        there = decode(
            {name: table.to("cuda") for name, table in tables.items()}, schedule, plan, rule, mask_id=3, steps=steps,
            batch_size=4096, device="cuda",
        ).tokens  # fmt: skip
        found[str(rule)] = float((here != there).mean())
        assert found[str(rule)] < 1e-3, text
    return found


def test_decoding_rules_leave_rows_to_themselves() -> dict[str, int]:
    """bfloat16 networks with kernels, 200 rows at one call shape among strangers: not one token differs."""
    models = {
        "a": network(seed=1).cuda().cast(torch.bfloat16),
        "b": network(depth=5, seed=2).cuda().cast(torch.bfloat16),
    }
    found = {}
    for text in DECODING:
        rule = parse_rule(text)

        def tokens(rows: np.ndarray, rule: Any = rule) -> np.ndarray:
            plan = Plan(3, rows, np.full((len(rows), 64), -1), uniforms(3, rows, 64))
            steps, schedule = None if rule.adaptive else 32, Schedule.parse("a:25% b:75%")
            return decode(models, schedule, plan, rule, mask_id=59, steps=steps, batch_size=64, device="cuda").tokens

        rows = np.arange(200)
        base, among = tokens(rows), tokens(np.concatenate([np.arange(900, 950), rows[::2]]))[50:]
        found[text] = int((among != base[::2]).sum())
        assert found[text] == 0, text
    return found


CAPTURED = (
    "low-confidence", "low-confidence:16", "dream-maskgit", "dream-entropy", "dream-margin", "threshold:0.4",
    "threshold:0.4:16", "factor:1", "eb:1", "surest:8", "surest:8:2", "remdm-cap:0.05", "remdm-rescale:0.1",
    "remdm-conf", "remdm-loop:0.02:0.55:0.2:0.9",
)  # fmt: skip


@contextlib.contextmanager
def graphs(captured: bool) -> Iterator[list[Any]]:
    """With or without CUDA graphs, kernels in both; the list gets an entry for each graph."""
    made: list[Any] = []

    class Graph(cuda_graphs._Graph):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(args[1].shape)  # not the graph, which would outlive its run

    own = cuda_graphs.Graphs.captures
    with (
        unittest.mock.patch.object(cuda_graphs, "_Graph", Graph),
        unittest.mock.patch.object(cuda_graphs.Graphs, "captures", lambda self, model: captured and own(self, model)),
    ):
        yield made


def test_captured_rules_write_what_eager_ones_write() -> dict[str, Any]:
    """bfloat16 networks with kernels, three batches of rows: not one token differs, nor a cost. float32 networks
    against RELAYLM_EAGER=1, where only the draw has a kernel: rows that differ are a few at most."""
    found: dict[str, Any] = {}
    for text in CAPTURED:
        rule, schedule = parse_rule(text), Schedule.parse("a:25% b:75%")
        models = {name: network(depth=depth, seed=depth).cuda() for name, depth in (("a", 2), ("b", 3))}

        def run(rule: Any = rule, schedule: Any = schedule, models: Any = models, **options: Any) -> Any:
            steps = None if rule.adaptive else 32
            plan = make_plan(200, 64, 3)
            return decode(
                models, schedule, plan, rule, mask_id=59, steps=steps, batch_size=64, device="cuda", **options
            )

        with graphs(True) as made:
            plain = run()
        with unittest.mock.patch.dict(os.environ, RELAYLM_EAGER="1"), graphs(True) as none:
            eager = run()
        assert made and not none, text
        for model in models.values():
            model.cast(torch.bfloat16)
        with graphs(True):
            captured = run()
        with graphs(False):
            same = run()
        heard: list[Any] = []
        with graphs(True):  # a callback looks at each call at once
            reported = run(callback=heard.append)
        off = float((plain.tokens != eager.tokens).any(axis=1).mean())
        found[text] = {"graphs": len(made), "tokens": int((captured.tokens != same.tokens).sum()), "rows_off": off}
        assert found[text]["tokens"] == 0 and (reported.tokens == same.tokens).all() and heard, (text, found[text])
        assert captured.cost.calls == same.cost.calls and captured.cost.flops == same.cost.flops, text
        assert off < 0.05, (text, found[text])
    return found


def test_law_of_captured_rules(device: str = "cuda", draws: int = DRAWS) -> dict[str, float]:
    """Rules that look at no draw, against the probability of every row by `forced` in float64 on the CPU; ReMDM, with a
    network that sees nothing, against the product of its probabilities. The first token is given: without it all
    positions look alike."""
    found, states = {}, [(1, *rest) for rest in itertools.product(range(3), repeat=3)]
    model, blind, given = network(4, 4, 32, 2, seed=4), network(4, 4, 32, 2, seed=5), np.array([1, -1, -1, -1])
    model.vocab_embed.embedding.data.mul_(50)
    blind.vocab_embed.embedding.data.zero_()
    one, exact = Schedule.parse("a"), {"a": copy.deepcopy(model).double()}

    def tested(model: Transformer, rule: Any, steps: int | None, law: dict[Any, float]) -> float:
        plan, models = make_plan(draws, 4, 1, given), {"a": copy.deepcopy(model).to(device)}
        with graphs(True) as made:
            samples = decode(models, one, plan, rule, mask_id=3, steps=steps, batch_size=1 << 14, device=device)
        assert made or device == "cpu"
        return p_value(samples.tokens, law, 3)

    for text in ("surest:2", "eb:1", "dream-entropy"):
        rule, plan = parse_rule(text), make_plan(len(states), 4, 0, given)
        steps = None if rule.adaptive else 2
        followed, times = resolve(one, steps, rule)
        nats, _ = forced(exact, followed, plan, rule, times, np.array(states), mask_id=3)
        found[text] = tested(model, rule, steps, dict(zip(states, np.exp(-nats).tolist(), strict=True)))
    with settings("cpu"):
        p_V = blind.logits(torch.full((1, 4), 3), torch.ones(1))[0, 0, :3].double().softmax(-1).tolist()
    law = {state: math.prod(p_V[token] for token in state[1:]) for state in states}
    found["remdm-cap:0.3"] = tested(blind, parse_rule("remdm-cap:0.3"), 6, law)
    assert min(found.values()) > 1e-4, found
    return found


def test_decoding_rules_keep_the_device_busy() -> dict[str, Any]:
    """Milliseconds of a batch of 256 rows through 12 blocks, captured and not: choosing what to write costs little
    beside the network."""
    model = network(28, 256, 256, 12).cuda().cast(torch.bfloat16)
    plan, found = make_plan(1024, 256, 0), {}
    for text in ("ancestral", "low-confidence", "threshold:0.4", "eb:10", "surest:16", "remdm-cap"):
        rule = parse_rule(text)
        for captured in (True, False):
            with graphs(captured):
                for _ in range(2):  # the first is for warming up
                    samples = decode(
                        {"a": model}, Schedule.parse("a"), plan, rule, mask_id=27, steps=None if rule.adaptive else 64,
                        batch_size=256, device="cuda",
                    )  # fmt: skip
            cost, name = samples.cost, text if captured else f"{text}, eager"
            found[name] = {"ms": 1000 * cost.seconds / cost.network_calls, "rows_per_s": 1024 / cost.seconds}
    slowest = max(found[text]["ms"] for text in ("low-confidence", "threshold:0.4", "remdm-cap"))
    assert slowest < 3 * found["ancestral"]["ms"], found
    return found


if __name__ == "__main__":
    from relaylm.measure.provenance import how_made

    results: dict[str, Any] = {}
    for name, test in list(globals().items()):
        if name.startswith("test_") and "".join(sys.argv[2:]) in name:
            began = time.perf_counter()
            try:
                results[name] = {"passed": True, "result": test()}
            except Exception as error:  # the others are run all the same
                results[name] = {"passed": False, "error": f"{type(error).__name__}: {error}"[:2000]}
            results[name]["seconds"] = round(time.perf_counter() - began, 2)
            print(name, results[name], flush=True)
            record = {"draws": DRAWS, "seed": 0, **how_made(torch.device("cuda")), "tests": results}
            Path(sys.argv[1]).write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(not all(found["passed"] for found in results.values()))
