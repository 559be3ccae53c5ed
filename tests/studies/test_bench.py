"""The benchmark at toy size: its keys, their consistency, its table; and the left-to-right rival."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import numpy as np
import pytest
import torch

from relaylm.console import Bar, progress_bar
from relaylm.core.plan import make_plan
from relaylm.core.schedule import Schedule
from relaylm.errors import UserError
from relaylm.models.denoiser import Architecture
from relaylm.sampling import reference
from relaylm.sampling.denoise import denoise
from relaylm.sampling.law import Law
from relaylm.studies.bench import engine_parts, reference_parts
from relaylm.studies.bench.autoregressive import Decoder
from relaylm.studies.bench.bench import bench, render
from relaylm.studies.bench.engine_parts import Counting, below_zero, executed_flops, fit, kl_to_fp32
from relaylm.studies.bench.published import Side, Window, best_batch, compiled_step, kernels_of, random_network

KEYS = set(
    """device reference_ms_per_row_step reference_cache_ms_per_row_step reference_compiled_ms_per_row_step
engine_ms_per_row_step speedup speedup_light peak_memory_reference peak_memory_engine matmul_tflops fraction_of_limit
kl_to_fp32 breakdown ar_tokens_per_s shares slope bound_1_over_alpha paper_slip_1_over_1_minus_alpha growth
trajectory_check spaced latency rules machine versions seed command commit settings errors seconds_total""".split()  # noqa: SIM905
)
TOY: dict[str, Any] = {
    "device": "cpu",
    "depth": (3, 1),
    "width": 16,
    "heads": 2,
    "vocab_size": 130,
    "length": 16,
    "steps": 12,
    "batch_size": 4,
    "progress": False,
    "quick": True,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:  # a compiler takes too long for a quick test
        patch.setattr(
            reference_parts, "compiled_step", lambda side: (_ for _ in ()).throw(RuntimeError("no compiler\nat all"))
        )
        return bench(**TOY)


def test_keys_and_json(result: dict[str, Any]) -> None:
    assert set(result) >= KEYS
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert set(result["breakdown"]) >= {"blocks", "head", "drawing", "host"}
    assert set(result["ar_tokens_per_s"]) >= {"batch_1", "best", "best_batch"}
    assert set(result["machine"]) >= {"platform", "cpu", "gpu"} and set(result["versions"]) == {
        "python",
        "torch",
        "relaylm",
    }


def test_a_part_that_fails_leaves_null_and_a_reason(result: dict[str, Any]) -> None:
    assert result["reference_compiled_ms_per_row_step"] is None and result["peak_memory_engine"] is None
    assert result["errors"]["compiled reference"] == "RuntimeError: no compiler"
    assert set(result["errors"]) == {"compiled reference", "memory"}


@pytest.mark.parametrize("parts", [(), ("kl", "growth")])
def test_progress_counts_the_parts_that_are_measured(parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The time left is that of the parts asked for."""
    bars = []
    module = sys.modules[bench.__module__]

    def recorded(*words: Any) -> Bar:
        bars.append(progress_bar(*words))
        return bars[-1]

    monkeypatch.setattr(module, "progress_bar", recorded)
    bench(**TOY, parts=parts)
    assert [(bar.n, bar.total) for bar in bars] == [(4 + len(parts), 4 + len(parts))]


def test_a_cache_too_large_for_memory_is_measured_in_half_a_batch(
    result: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    best = result["reference_batch"]["heavy"]["best"]
    assert result["reference_cache_batch"] == best and result["reference_compiled_batch"] is None
    run = Window.ddpm_cache

    def too_large(window: Window) -> None:
        if window.batch > 1:
            raise torch.OutOfMemoryError
        run(window)

    monkeypatch.setattr(Window, "ddpm_cache", too_large)
    monkeypatch.setattr("relaylm.studies.bench.bench.best_batch", lambda *_: {"best": 4, "ms_per_row_step": {"4": 1.0}})
    halved = bench(**TOY, parts=("cache",))
    assert halved["reference_cache_batch"] == 1 and halved["reference_cache_ms_per_row_step"] > 0


def test_what_was_measured_before_ctrl_c_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_parts, "kl_to_fp32", interrupted)
    result = bench(**TOY, parts=("breakdown", "kl", "growth"))
    assert result["speedup"] > 0 and result["breakdown"] is not None
    assert result["kl_to_fp32"] is None and result["growth"] is None
    assert result["errors"]["stopped"] == "during KL, so nothing that comes after it was measured"
    assert "not measured: stopped: during KL" in render(result)


def test_numbers_agree_with_each_other(result: dict[str, Any]) -> None:
    assert result["speedup"] == result["reference_ms_per_row_step"] / result["engine_ms_per_row_step"]
    light = result["reference_light_ms_per_row_step"] / result["engine_light_ms_per_row_step"]
    assert result["speedup_light"] == light
    assert 0 < result["fraction_of_limit"] <= 1 and result["matmul_tflops"] > 0
    assert 0 <= result["kl_to_fp32"] < 1e-9  # float32 against the same network, folded
    assert math.isclose(sum(result["breakdown"][k] for k in ("blocks", "head", "drawing", "host")), 1)
    assert math.isclose(result["bound_1_over_alpha"], 1 / result["alpha"])
    assert result["ar_tokens_per_s"]["best"] >= result["ar_tokens_per_s"]["batch_1"]
    run = result["engine_runs"]["heavy"]
    assert run["calls_per_row"] <= 12 and run["rows"] == 4
    assert math.isclose(np.mean(run["seconds"]) * 1e3 / (4 * 12), result["engine_ms_per_row_step"])


def test_kernels_of_a_call() -> None:
    """On a CPU PyTorch's operations: a large product is there, as often as it was made, and takes the longest."""
    x, small = torch.randn(600, 600), torch.randn(2, 2)
    found = kernels_of(lambda: [x @ x, x @ x, small.add_(1)], torch.device("cpu"))
    times = [kernel["microseconds"] for kernel in found]
    assert times == sorted(times, reverse=True) and found[0]["name"] == "aten::mm" and found[0]["times"] == 2


def test_shares(result: dict[str, Any]) -> None:
    shares = result["shares"]
    assert [e["light_share"] for e in shares] == [k / 10 for k in range(11)]
    for key in ("flops_saved", "blocks_saved", "light_share_of_calls"):
        values = [e[key] for e in shares]
        assert values == sorted(values) and values[0] == 0
    assert math.isclose(shares[-1]["blocks_saved"], 2 / 3)
    assert abs(shares[0]["wall_saved"]) < 1e-12
    low, high = result["slope"]["ci"]
    assert low <= result["slope"]["value"] <= high


def test_growth(result: dict[str, Any]) -> None:
    growth = result["growth"]
    assert growth["calls_within_bound"] and [e["rows"] for e in growth["over_rows"]] == [4, 8, 12]
    assert [e["depth"] for e in growth["over_depth"]] == [1, 2, 3]
    assert all(e["calls"] <= e["rows"] * e["at_most"] for e in growth["over_rows"] + growth["over_depth"])


def test_render(result: dict[str, Any]) -> None:
    text = render(result)
    for words in ("3 against 1 blocks", "times faster", "slope of time saved", "1/alpha", "KV cache", "no compiler"):
        assert words in text
    assert "1/alpha" not in render({**result, "alpha": None}) and "nats" not in render({**result, "kl_to_fp32": None})
    empty = dict.fromkeys(KEYS) | {k: result[k] for k in ("settings", "machine", "errors")}
    assert "MDLM" in render({**empty, "alpha": None, "breakdown_light": None, "engine_tokens_per_s": None})


def test_fit_finds_a_line() -> None:
    line = fit([0, 0.5, 1.0, 0.25], [0.1, 0.45, 0.8, 0.275])
    assert math.isclose(line["value"], 0.7) and math.isclose(line["intercept"], 0.1)
    assert line["ci"] == pytest.approx([0.7, 0.7])


def test_decoding_with_a_cache_is_the_causal_network() -> None:
    architecture = Architecture(vocab_size=23, length=9, width=24, depth=3, heads=3, causal=True)
    network = random_network(architecture, 1).double()
    tokens_BL = torch.randint(0, 23, (4, 9), generator=torch.Generator().manual_seed(2))
    full_BLV = network.logits(tokens_BL, torch.ones(4))
    decoder = Decoder(network, 4, 9)
    for position in range(9):
        decoder.token_B.copy_(tokens_BL[:, position])
        decoder.at.fill_(position)
        upto = min(9, position + 1 + position % 3)  # buffers beyond the present must not matter
        assert (decoder.logits(upto) - full_BLV[:, position]).abs().max() < 1e-10
    assert decoder.generate(1) > 0
    with pytest.raises(UserError, match="causal"):
        Decoder(random_network(Architecture(vocab_size=23, length=9, width=24, depth=1, heads=3), 1), 4, 9)


def _side(adaln: bool = True) -> Side:
    architecture = Architecture(vocab_size=40, length=8, width=16, depth=2, heads=2, adaln=adaln)
    network = random_network(architecture, 3)
    return Side(network, network.fold(), torch.device("cpu"))


def test_folding_is_not_trivial_and_changes_nothing() -> None:
    side = _side()
    modulation = side.published.blocks[0].adaLN_modulation
    assert modulation.weight.abs().min() >= 0 and modulation.weight.std() > 0.01
    x_BL, t_B = torch.randint(0, 40, (3, 8)), torch.ones(3)
    assert (side.published.logits(x_BL, t_B) - side.engine.logits(x_BL, t_B)).abs().max() < 1e-4


def test_the_compiled_form_is_the_published_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same noise both write the same tokens (not compiled here)."""
    side = _side()
    monkeypatch.setattr(torch, "compile", lambda f: f)
    step = compiled_step(side)
    window = Window(side, 0.5, 10, 4, 64, 8, 0)
    u_BLV = torch.rand(64, 8, 40, generator=torch.Generator().manual_seed(5))
    monkeypatch.setattr(torch, "rand", lambda *_, **__: u_BLV)
    monkeypatch.setattr(torch, "rand_like", lambda *_, **__: u_BLV)
    t_B = torch.full((64,), 0.5)
    with torch.inference_mode():
        mine = step(window.x_BL, t_B, t_B - 0.1)
        theirs = reference.ddpm_step(side, window.x_BL, 0.5, 0.1, 39, window.generator)
    assert torch.equal(mine, theirs) and not torch.equal(mine, window.x_BL)


def test_executed_flops_count_padding_and_sharing() -> None:
    """Four rows of one free position in calls of three: two calls, six places, K and N as the sampler chose them. If
    the rows are alike, one call serves all."""
    network = random_network(Architecture(vocab_size=40, length=8, width=16, depth=2, heads=2), 3)
    alike = np.zeros((4, 8), dtype=np.int64)
    alike[:, 3] = -1
    given = alike.copy()
    given[:, 0] = np.arange(4)
    plan = make_plan(4, 8, 0, given)
    samples = denoise({"m": network}, Schedule.parse("m"), plan, mask_id=39, steps=80, batch_size=3)
    assert samples.cost.network_calls == 2 and samples.cost.padded_calls == 2
    head, k = 2 * 16 * 40, 4  # 8/80 expected: space for 0.1 + 5 * sqrt(0.1) + 1, rounded up
    kept = min(3 * k, math.ceil((3 * 1.05 + 4 * math.sqrt(3 * 1.05)) / 8) * 8)
    expected = 6 * (network.flops(8, k) - k * head + head * kept / 3)
    assert math.isclose(executed_flops(network, plan, samples, 3), expected)
    plan = make_plan(4, 8, 0, alike)
    samples = denoise({"m": network}, Schedule.parse("m"), plan, mask_id=39, steps=80, batch_size=3)
    assert samples.cost.network_calls == 1 and samples.cost.shared_calls == 1
    by_row = head * kept / 3
    assert math.isclose(executed_flops(network, plan, samples, 3), 3 * (expected / 6 - by_row) + 4 * by_row)


def test_kl_sees_a_rounded_network() -> None:
    side = _side()
    plan = make_plan(4, 8, 0)
    samples = denoise({"m": side.engine}, Schedule.parse("m"), plan, mask_id=39, steps=8)
    assert kl_to_fp32(side, samples, 16, 0)["mean"] < 1e-9
    rounded = Side(side.published, side.published.fold().cast(torch.bfloat16), side.device)
    assert 1e-9 < kl_to_fp32(rounded, samples, 16, 0)["mean"] < 1e-2


@pytest.mark.slow
def test_with_a_compiler() -> None:
    found = bench(**TOY)
    assert (found["reference_compiled_ms_per_row_step"] is None) == ("compiled reference" in found["errors"])


def test_less_time_saved_than_operations_must_stand_the_number_of_shares() -> None:
    """Two shares of two passes: Student's t with two degrees of freedom has a closed form."""
    low, other = [-0.03, -0.05], [0.01, -0.01]
    spread = math.sqrt((0.02**2 / 2 + 0.02**2 / 2) / 2)
    t = -0.04 / spread * math.sqrt(2)
    p = 0.5 + t / (2 * math.sqrt(2 + t * t))
    assert below_zero([low, other]) == pytest.approx([2 * p, 0.5]) and 2 * p < 0.06
    assert below_zero([[-0.01] * 2, [0.01] * 2]) == [0.0, 1.0] and below_zero([[-0.01], [0.01]]) == [1.0, 1.0]


def test_empty_places_are_counted_by_model(result: dict[str, Any]) -> None:
    for entry in result["shares"]:
        for against, saved in (("flops", "flops_saved"), ("computed", "flops_saved_with_empty_places")):
            apart = np.asarray(entry["wall_saved_all"]) - entry[saved]
            assert np.mean(entry[f"wall_minus_{against}_all"]) == pytest.approx(np.mean(apart))
            assert 0 <= entry[f"p_below_{against}"] <= 1
    a = {"vocab_size": 12, "length": 6, "width": 8, "heads": 2, "cond_dim": 8}
    models = {name: random_network(Architecture(depth=depth, **a), 0) for name, depth in (("light", 1), ("heavy", 2))}
    given = np.full((5, 6), -1)
    given[np.arange(5), np.arange(5)] = 3  # no two begin alike, so every call is one of its own
    plan = make_plan(5, 6, 0, given)
    for schedule, used in (("light", 0), ("heavy", 1), ("L50% H50%", None)):
        engine = Counting(list(models.values()), plan, 11, Law(), torch.device("cpu"))
        policy = Schedule.parse(schedule).bind("light", "heavy")
        cost = denoise(models, policy, plan, mask_id=11, steps=4, batch_size=4, device="cpu", engine=engine).cost
        assert sum(engine.empty) == cost.padded_calls > 0
        assert used is None or engine.empty[1 - used] == 0


def test_the_engine_is_measured_in_bfloat16_where_the_cpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for has in (True, False):
        monkeypatch.setattr("relaylm.studies.bench.job.cpu_has_bfloat16", lambda has=has: has)
        found = bench(**{**TOY, "dtype": None}, parts=())
        assert found["settings"]["precision"]["engine"].startswith(f"blocks {'bfloat16' if has else 'float32'}")
    with pytest.raises(UserError, match="must be a multiple of 64, not 200"):
        bench(**{**TOY, "width": 200, "heads": None})


def test_the_reference_is_measured_at_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cached one among small batches too; the plain one twice, up and down the batches, so that drift cancels."""
    ms = {1: 3.0, 2: 1.0, 4: 2.0}
    monkeypatch.setattr(reference_parts, "other_windows", lambda job, batch, compiled: (ms[batch], batch))
    assert reference_parts.cached_windows(None, 4) == (1.0, 2)  # type: ignore[arg-type]
    clock = iter([10.0, 11.0, 12.0, 9.0, 10.0, 11.0])  # a machine that slows down on the way up, and from a new start
    monkeypatch.setattr(Window, "ms", lambda window, run: next(clock))
    monkeypatch.setattr(Window, "ddpm", lambda window, count=None: None)
    side = Side(
        random_network(Architecture(vocab_size=12, length=6, width=8, depth=1, heads=2, cond_dim=8), 0),
        None,
        torch.device("cpu"),
    )  # type: ignore[arg-type]
    assert best_batch(side, (1, 2, 4), 4, 6, 1, 0)["ms_per_row_step"] == {"1": 10.5, "2": 10.5, "4": 10.5}


def test_spaced_plans_and_one_row(result: dict[str, Any]) -> None:
    assert [entry["distance"] for entry in result["spaced"]] == [2, 8]
    for entry in result["spaced"]:
        assert entry["rows_per_second"] * entry["ms_per_row"] == pytest.approx(1000)
        assert entry["speedup"] > 0 and 1 <= entry["calls_per_row"] <= 2 * entry["distance"] - 1
        assert all(k <= -(-16 // entry["distance"]) or k == 2 for _, k, _ in entry["shapes"])
    assert result["latency"]["one position at a time"]["calls"] == 16
    ahead = result["latency"]["one position at a time, 8 in parallel"]
    assert ahead["rounds"] <= 16 <= ahead["calls"]
    assert {"MDLM's sampler", "causal, with a cache", "spaced:2", "spaced:8"} <= set(result["latency"])
    text = render(result)
    assert "D = 8" in text and "one row of 16" in text


def test_rules_that_look_at_entropies(result: dict[str, Any]) -> None:
    """Fewer looks cost fewer operations, and none fewer still; a row is written in at most as many calls as it has
    positions."""
    found = result["rules"]
    assert list(found)[:-1] == ["spaced:2", "surest:2", "surest:2:2", "surest:2:4"]
    assert list(found)[-1].startswith("eb:") and all(1 <= entry["calls_per_row"] <= 16 for entry in found.values())
    head = {name: e["gflop_per_row"] / e["calls_per_row"] for name, e in found.items()}
    assert head["spaced:2"] < head["surest:2:4"] <= head["surest:2:2"] < head["surest:2"]
    assert "surest:2:4" in render(result)
