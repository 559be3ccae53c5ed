"""The same answers on CUDA: the kernels against their plain twins, the law, and rows that do not feel their neighbours.

Skipped where there is no CUDA. `python tests/test_cuda.py FILE` runs all of it without pytest and records the result.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
try:
    import pytest

    pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
except ModuleNotFoundError:  # run as a script on a machine without test tools: decorators that do nothing
    from unittest.mock import MagicMock

    pytest = MagicMock()
    pytest.mark.parametrize = lambda *_, **__: lambda function: function
    sys.modules["pytest"] = pytest

from helpers import p_value

from relaylm import kernels
from relaylm.denoiser import Architecture, Transformer
from relaylm.engine import settings
from relaylm.objective import mask_words
from relaylm.plan import Plan, make_plan, race, uniforms
from relaylm.sampler import denoise
from relaylm.schedule import Schedule

DRAWS = 1_000_000


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
            n = 200
            logits = torch.randn(n, vocab_size, generator=generator) * 3
            row, position, draw = torch.arange(n) + 7, torch.arange(n) % 11, torch.arange(n) % 3
            here = race(logits, seed, row, position, draw)
            there = kernels.race(logits.cuda(), seed, row.cuda(), position.cuda(), draw.cuda()).cpu()
            different, drawn = different + int((here != there).sum()), drawn + n
    assert different <= drawn * 1e-4
    return {"drawn": drawn, "different": different}


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


if __name__ == "__main__":
    results: dict[str, Any] = {}
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            began = time.perf_counter()
            results[name] = {"result": test(), "seconds": round(time.perf_counter() - began, 2)}
            print(name, results[name], flush=True)
    machine = {"gpu": torch.cuda.get_device_name(), "python": platform.python_version(), "torch": torch.__version__}
    Path(sys.argv[1]).write_text(json.dumps({"draws": DRAWS, "tests": results, "machine": machine}, indent=1) + "\n")
