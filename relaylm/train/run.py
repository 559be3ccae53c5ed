r"""One network from its first step to its last: the loop, its log, its checkpoints, its evaluations.

A run is a folder with one checkpoint, replaced atomically (`checkpoint`), and beside it `metrics.jsonl`, samples and a
summary, which marks the run as done. Run the same command again and it goes on; on a CPU the final weights are those
of an uninterrupted run, bit for bit (with the same number of threads). Ctrl-C and SIGTERM save first. A loss that is
not a number or diverges ends the run before anything broken is saved.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from relaylm.errors import UserError
from relaylm.files import atomic_write, read_json, write_json
from relaylm.measure.likelihood import Bound, bound, causal_bound, spread_rows
from relaylm.models.denoiser import Architecture
from relaylm.progress import progress_bar
from relaylm.train import checkpoint
from relaylm.train.corpus import TokenFile
from relaylm.train.objective import Batches
from relaylm.train.recipe import OPERATIONAL, Recipe, lr_at
from relaylm.train.step import AVERAGE, MFU_FORMULA, Prefetch, Trainer, World, peak_tflops, training_flops

CHECKPOINT, METRICS, SUMMARY, SAMPLES = "checkpoint.safetensors", "metrics.jsonl", "summary.json", "samples.jsonl"

_BLOCK = 20  # steps whose mean loss is looked at for divergence


class _Signals:
    """Ctrl-C and SIGTERM are noted, and acted on between two steps; a second Ctrl-C is not waited for."""

    def __init__(self) -> None:
        self.got: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.got = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()


@contextlib.contextmanager
def _threads(cells: int, where: World) -> Iterator[None]:
    """On a CPU, one thread where a step is too small to share (`cells` activations in a layer): more gain little, and
    lose a lot when the machine has anything else to do, as they wait for each other by spinning."""
    before = torch.get_num_threads()
    if where.device.type == "cpu" and cells < 1 << 18:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def evaluate(trainer: Trainer, corpus: TokenFile, length: int, rows: int, draws: int) -> Bound | None:
    """The bound of the averaged weights on held-out rows, None if nothing is held out."""
    if not len(corpus.heldout):
        return None
    real = None
    if corpus.heldout.ndim == 2:
        chosen = np.linspace(0, len(corpus.heldout) - 1, min(rows, len(corpus.heldout))).astype(np.int64)
        tokens = np.asarray(corpus.heldout[chosen]).astype(np.int64)
        real = None if corpus.heldout_real is None else np.asarray(corpus.heldout_real[chosen])
    else:
        tokens = spread_rows(corpus.heldout, length, rows)
    device, precision = trainer.world.device, trainer.precision
    with trainer.averaged() as model:
        network: Any = trainer.objective if trainer.sharded else model
        if model.architecture.causal:
            return causal_bound(network, tokens, real_N=real, device=device, precision=precision)
        return bound(
            network, tokens, mask_id=model.mask_id, real_N=real, draws=draws, device=device, precision=precision
        )


def train_model(
    corpus: TokenFile,
    folder: str | Path,
    architecture: Architecture,
    recipe: Recipe,
    *,
    seed: int | None = None,
    where: World | None = None,
    label: str = "",
    progress: bool = True,
    force: bool = False,
) -> dict[str, Any]:
    """Train one network, or go on where a run stopped, and return its summary. `force` lets a changed recipe or corpus
    pass (the result is then not that of any one recipe)."""
    where = where or World(torch.device("cpu"))
    folder = Path(folder)
    seed = recipe.seed if seed is None else seed
    batches = Batches(corpus, recipe, architecture.length, seed, architecture.causal, where.rank, where.size)
    corpus.windows(architecture.length)  # is there enough text?
    identity = _identity(corpus, architecture, recipe, seed)
    found = checkpoint.load(folder / CHECKPOINT)
    state: dict[str, Any] = {"step": 0, "seconds": 0.0, "other_seconds": 0.0, "losses": [], "masked": 0}
    if found is not None:
        state = {**found[1]}
        _check_identity(folder, state.pop("identity"), identity, force)
        summary = read_json(folder / SUMMARY)
        if state["step"] >= recipe.steps and summary is not None:
            return summary
    _check_agreement(folder, state["step"], where)
    trainer = Trainer(architecture, recipe, seed, where)
    if found is not None:
        try:
            trainer.restore(found[0], state["step"])
        except (KeyError, RuntimeError) as error:
            raise UserError(f"the checkpoint {folder / CHECKPOINT} does not fit this network: {error}") from None
        del found
    log = _Log(folder, state["step"], where.main)
    loop = _Loop(trainer, corpus, folder, log, state, identity, label)
    if state["step"] < recipe.steps:
        pin = where.device.type == "cuda"
        steps = range(state["step"], recipe.steps)
        bar = loop.bar(progress and where.main)
        with (
            _Signals() as signals,
            _threads(batches.micro * architecture.length * architecture.width, where),
            Prefetch(batches.at, steps, pin) as ahead,
            bar,
        ):
            loop.go(ahead, signals)
    return loop.finish()


def _check_agreement(folder: Path, step: int, where: World) -> None:
    """Every process reads the checkpoint for itself, so all must see the same one."""
    if where.size > 1:
        steps = torch.tensor([step, -step], device=where.device)
        dist.all_reduce(steps, dist.ReduceOp.MAX)
        if int(steps[0]) != -int(steps[1]):
            raise UserError(f"the processes do not see the same checkpoint: {folder} must be shared by all hosts")


def _identity(corpus: TokenFile, architecture: Architecture, recipe: Recipe, seed: int) -> dict[str, Any]:
    """What a checkpoint belongs to."""
    kept = {key: value for key, value in asdict(recipe).items() if key not in OPERATIONAL}
    shape = {f"model.{key}": value for key, value in architecture.to_json().items()}
    return {**kept, **shape, "seed": seed, **{f"corpus.{key}": value for key, value in corpus.identity.items()}}


def _check_identity(folder: Path, before: dict[str, Any], now: dict[str, Any], force: bool) -> None:
    changed = [key for key in now if before.get(key) != now[key]]
    if changed and not force:
        listed = "; ".join(f"{key} was {before.get(key)}, is {now[key]}" for key in changed[:4])
        raise UserError(
            f"{folder} holds a run that began differently ({listed}): "
            f"use the same settings, another folder, or --force (force=True)"
        )


class _Log:
    """metrics.jsonl, and TensorBoard where it is installed. Lines after the checkpoint are cut off on resuming."""

    def __init__(self, folder: Path, step: int, main: bool) -> None:
        self.path, self.main, self.board = folder / METRICS, main, None
        if not main:
            return
        for path in (self.path, folder / SAMPLES):
            if path.exists():
                _cut_after(path, step)
        if not self.path.exists():
            atomic_write(self.path, "")
        with contextlib.suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def add(self, row: dict[str, Any]) -> None:
        if not self.main:
            return
        _append(self.path, row)
        if self.board is not None:
            for key, value in row.items():
                if isinstance(value, int | float) and key != "step":
                    self.board.add_scalar(key, value, row["step"])


def _cut_after(path: Path, step: int) -> None:
    """Keep the lines of a JSONL file up to a step, and no half-written one."""
    lines = []
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= step:
                lines.append(line)
    atomic_write(path, "".join(line + "\n" for line in lines))


def _append(path: Path, row: dict[str, Any]) -> None:
    try:
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def stage_file(folder: Path, step: int) -> Path:
    return folder / f"stage-{step}.safetensors"


class _Loop:
    """The steps of one run: train, and every so often look at the numbers, evaluate, sample, save."""

    def __init__(
        self,
        trainer: Trainer,
        corpus: TokenFile,
        folder: Path,
        log: _Log,
        state: dict[str, Any],
        identity: dict[str, Any],
        label: str,
    ) -> None:
        self.trainer, self.corpus, self.folder, self.log = trainer, corpus, folder, log
        self.state, self.identity, self.label = state, identity, label
        self.recipe, self.world = trainer.recipe, trainer.world
        self.architecture = trainer.model.architecture
        self.length = self.architecture.length
        self.peak = peak_tflops(self.world.device)
        self.rows: list[Tensor] = []  # what steps returned since the numbers were last looked at; still on the device
        self.clock = time.perf_counter()
        self.last_bound: Bound | None = None
        self.progress: Any = None  # the bar, once there is one

    @contextlib.contextmanager
    def bar(self, shown: bool) -> Iterator[None]:
        with progress_bar(
            self.label or "train", self.recipe.steps, "step", shown, initial=self.state["step"]
        ) as self.progress:
            yield

    def go(self, ahead: Prefetch, signals: _Signals) -> None:
        recipe = self.recipe
        self.clock = time.perf_counter()
        while self.trainer.step_count < recipe.steps:
            self.rows.append(self.trainer.step(ahead.next()))
            step = self.trainer.step_count
            if self.progress is not None:
                self.progress.update(1)
            last = step == recipe.steps
            save = last or step % recipe.checkpoint_every == 0 or step in recipe.stages
            look = save or step % recipe.log_every == 0
            stopped = self._stopped(signals, look)
            if look or stopped:
                self._look()  # before anything is saved: a checkpoint must never hold a broken network
            if not last and recipe.eval_every and step % recipe.eval_every == 0:
                self._evaluate()
            if recipe.sample_every and step % recipe.sample_every == 0 and not self.architecture.causal:
                self._sample()
            if save or stopped:
                self._save()
            if stopped:
                if self.world.main:
                    print(f"stopped at step {step}: saved, and the same command goes on from there", file=sys.stderr)
                raise KeyboardInterrupt if stopped == signal.SIGINT else SystemExit(128 + stopped)

    def _stopped(self, signals: _Signals, look: bool) -> int:
        """The signal that all processes agree to stop for, 0 for none. Several agree only when they look at the
        numbers."""
        if self.world.size == 1:
            return signals.got or 0
        if not look:
            return 0
        flag = torch.tensor(signals.got or 0, device=self.world.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return int(flag)

    def _look(self) -> None:
        """Fetch the losses since the last time, check them, write them down."""
        if not self.rows:
            return
        values = torch.stack(self.rows)
        if self.world.size > 1:
            mine = values[:, [0, 2, 3]].contiguous()
            dist.all_reduce(mine)
            values[:, [0, 2, 3]] = mine
        table = values.cpu().double().numpy()
        steps, step = len(self.rows), self.trainer.step_count
        self.rows = []
        seconds = time.perf_counter() - self.clock
        self.clock = time.perf_counter()
        self.state["seconds"] += seconds
        self.state["masked"] += int(table[:, 2].sum())
        loss, norm = float(table[:, 0].mean()), float(table[:, 1].mean())
        self._check(table, step)
        rows_per_s = steps * self.recipe.batch / seconds
        row = {
            "step": step,
            "loss": loss,
            "bits": loss / math.log(2),
            "lr": lr_at(self.recipe, step - 1),
            "grad_norm": norm,
            "tokens": step * self.recipe.batch * self.length,
            "tokens_per_s": rows_per_s * self.length,
            "masked_per_s": float(table[:, 2].sum()) / seconds,
            "mfu": self._mfu(rows_per_s),
            "seconds": self.state["seconds"],
        }
        self.log.add(row)
        if self.progress is not None:
            mfu = "" if row["mfu"] is None else f" mfu {row['mfu']:.1%}"
            held = "" if self.last_bound is None else f" held-out {self.last_bound.bits:.3f}"
            scored = _short(float(table[:, 2].sum()) / seconds)
            speed = f"{_short(rows_per_s * self.length)} tok/s ({scored} scored)"
            self.progress.more = f"bits {row['bits']:.3f}{held} {speed}{mfu}"

    def _check(self, table: np.ndarray, step: int) -> None:
        kept = f"the last good checkpoint is in {self.folder}"
        if table[:, 3].any():
            raise RuntimeError(f"more positions were masked than there is room for before step {step}; {kept}")
        broken = ~np.isfinite(table[:, :2]).all(axis=1)
        if broken.any():
            at = step - len(table) + int(broken.argmax()) + 1
            raise UserError(f"the loss is not a number any more at step {at}: lower the learning rate; {kept}")
        after = max(0, self.recipe.warmup - (step - len(table)))  # the warm-up's losses do not count
        losses = self.state["losses"] = [*self.state["losses"], *table[after:, 0].tolist()][-20 * _BLOCK :]
        means = [statistics.fmean(losses[end - _BLOCK : end]) for end in range(len(losses), _BLOCK - 1, -_BLOCK)]
        usual = math.log(self.architecture.vocab_size)  # what knowing nothing costs
        if len(means) > 5:
            usual = min(usual, statistics.median(means[1:]))
        if means and means[0] > self.recipe.diverged * usual:
            raise UserError(
                f"the loss diverges at step {step}: {means[0]:.3f} over the last {_BLOCK} steps, more than "
                f"{self.recipe.diverged:g} times the usual {usual:.3f}; lower the learning rate; {kept}"
            )

    def _mfu(self, rows_per_s: float) -> float | None:
        if self.peak is None:
            return None
        return rows_per_s * training_flops(self.architecture, self.length) / (self.peak * 1e12 * self.world.size)

    def _evaluate(self) -> None:
        began = time.perf_counter()
        found = evaluate(self.trainer, self.corpus, self.length, self.recipe.eval_rows, self.recipe.eval_draws)
        if found is not None:
            self.last_bound = found
            made = {f"heldout_{key}": value for key, value in found.to_json().items()}
            self.log.add({"step": self.trainer.step_count, **made})
        self._not_training(began)

    def _sample(self) -> None:
        """Four samples from the averaged weights, for the eye. Left out with sharded weights."""
        if self.trainer.sharded:
            return
        from relaylm.core.plan import make_plan
        from relaylm.core.schedule import Schedule
        from relaylm.sampling.denoise import denoise

        began = time.perf_counter()
        with (
            self.trainer.averaged() as model,
            torch.autocast(self.world.device.type, dtype=torch.bfloat16, enabled=self.trainer.precision == "bf16"),
        ):
            plan = make_plan(4, self.length, seed=self.recipe.seed)
            steps = min(self.length, 64)
            drawn = denoise(
                {"model": model},
                Schedule.parse("model"),
                plan,
                mask_id=model.mask_id,
                steps=steps,
                device=self.world.device,
            )
        if self.world.main:
            tokenizer = self.corpus.tokenizer
            texts = [tokenizer.decode(row) for row in drawn.tokens.tolist()]
            _append(self.folder / SAMPLES, {"step": self.trainer.step_count, "steps": steps, "texts": texts})
        self._not_training(began)

    def _save(self) -> None:
        began = time.perf_counter()
        tensors = self.trainer.tensors()
        self.state["step"] = self.trainer.step_count
        if self.world.main:
            if self.trainer.step_count in self.recipe.stages and not self.architecture.causal:
                kept = {name: value for name, value in tensors.items() if name.startswith(AVERAGE)}
                checkpoint.save(stage_file(self.folder, self.trainer.step_count), kept, {})
            checkpoint.save(self.folder / CHECKPOINT, tensors, {**self.state, "identity": self.identity})
        self._not_training(began)

    def _not_training(self, began: float) -> None:
        """What went by since then is wall time, but not training time."""
        seconds = time.perf_counter() - began
        self.clock += seconds
        self.state["other_seconds"] += seconds

    def finish(self) -> dict[str, Any]:
        """The last evaluation, on four times the rows, and the summary that marks the run as done."""
        found = evaluate(self.trainer, self.corpus, self.length, 4 * self.recipe.eval_rows, self.recipe.eval_draws)
        a = self.architecture
        tokens = self.recipe.steps * self.recipe.batch * self.length
        summary = {
            "label": self.label,
            "steps": self.recipe.steps,
            "tokens": tokens,
            "masked": self.state["masked"],
            "seconds": self.state["seconds"],
            "wall_seconds": self.state["seconds"] + self.state["other_seconds"],
            "tokens_per_s": tokens / max(1e-9, self.state["seconds"]),
            "mfu": self._mfu(self.recipe.steps * self.recipe.batch / max(1e-9, self.state["seconds"])),
            "mfu_formula": MFU_FORMULA,
            "peak_tflops": self.peak,
            "parameters": sum(value.numel() for value in self.trainer.params.values()),
            "train_loss": statistics.fmean(self.state["losses"]) if self.state["losses"] else None,
            "heldout": None if found is None else found.to_json(),
            "bits_per_character": None if found is None else found.bits / self.corpus.characters_per_token(),
            "architecture": a.to_json(),
            "seed": self.trainer.seed,
            "processes": self.world.size,
            "device": torch.cuda.get_device_name(self.world.device) if self.world.device.type == "cuda" else "cpu",
        }
        if self.world.main:
            write_json(self.folder / SUMMARY, summary)
        return summary


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.0f}"
