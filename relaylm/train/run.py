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
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from relaylm.console import Bar, progress_bar
from relaylm.core.plan import make_plan
from relaylm.core.schedule import Schedule
from relaylm.errors import UserError
from relaylm.files import atomic_write, plain, read_json, write_json
from relaylm.measure.estimate import say
from relaylm.measure.likelihood import Bound, bound, causal_bound, spread_rows
from relaylm.measure.timing import wait
from relaylm.models.denoiser import Architecture, Transformer
from relaylm.sampling.denoise import denoise
from relaylm.train import checkpoint
from relaylm.train.corpus import TokenFile
from relaylm.train.objective import Batches
from relaylm.train.recipe import OPERATIONAL, Recipe, lr_at
from relaylm.train.step import AVERAGE, MFU_FORMULA, Trainer, World, peak_tflops, prefetched, training_flops

CHECKPOINT, METRICS, SUMMARY, SAMPLES = "checkpoint.safetensors", "metrics.jsonl", "summary.json", "samples.jsonl"

TIMED = 2.0  # seconds from which the time of all steps is estimated
_BLOCK = 20  # steps whose mean loss is looked at for divergence
_DIVERGED = 3.0  # times its running median over up to 400 steps, or the loss of the uniform distribution: too much


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
    start: Transformer | None = None,
    teacher: Transformer | None = None,
    about: dict[str, Any] | None = None,
    ahead: float = 0.0,
) -> dict[str, Any]:
    """Train one network, or go on where a run stopped, and return its summary. `force` lets a changed recipe or corpus
    pass (the result is then not that of any one recipe). `start` has the first weights, if they are not fresh, and
    `teacher` is what to imitate; `about` says in the run's identity which networks these are. After a few steps it
    says how long the rest takes, other runs included that need `ahead` operations."""
    where, folder = where or World(torch.device("cpu")), Path(folder)
    seed = recipe.seed if seed is None else seed
    batches, identity = check_run(corpus, folder, architecture, recipe, seed, where, force, about)
    found = checkpoint.load(folder / CHECKPOINT)
    state: dict[str, Any] = {"step": 0, "seconds": 0.0, "other_seconds": 0.0, "losses": [], "masked": 0}
    if found is not None:
        state = {key: value for key, value in found[1].items() if key != "identity"}
        summary = read_json(folder / SUMMARY)
        if state["step"] >= recipe.steps and summary is not None and summary["steps"] == state["step"]:
            return summary
    _check_agreement(folder, state["step"], where)
    trainer = Trainer(architecture, recipe, seed, where, start=start, teacher=teacher)
    if found is not None:
        try:
            trainer.restore(found[0], state["step"])
        except (KeyError, RuntimeError) as error:
            raise UserError(f"the checkpoint {folder / CHECKPOINT} does not fit this network: {error}") from None
        del found
    shown, steps = progress and where.main, range(state["step"], recipe.steps)
    with (
        progress_bar(label or "train", recipe.steps, "step", shown, initial=state["step"]) as bar,
        _signals() as signals,
        _threads(batches.micro * architecture.length * architecture.width, where),
        contextlib.closing(prefetched(batches.at, steps, where.device.type == "cuda")) as made,
    ):
        run = _Run(trainer, corpus, folder, state, identity, label, bar)
        work = recipe.batch * training_flops(architecture, architecture.length)  # of a step
        began: float | None = None
        for parts in made:
            run.rows.append(trainer.step(parts))
            step = trainer.step_count
            bar.update(1)
            if shown and step == steps.start + 1:  # the first step is slow
                wait(where.device)
                began = time.perf_counter()
            elif began is not None and time.perf_counter() > began + TIMED:
                wait(where.device)
                each, began = (time.perf_counter() - began) / (step - steps.start - 1), None
                say("training", (recipe.steps - step + ahead / work) * each, "Ctrl-C saves, to go on later")
            last = step == recipe.steps
            save = last or step % recipe.checkpoint_every == 0 or step in recipe.stages
            look = save or step % recipe.log_every == 0
            stopped = _stopped(signals, look, where)
            if look or stopped:
                run.look()  # before anything is saved: a checkpoint must never hold a broken network
            if not last and recipe.eval_every and step % recipe.eval_every == 0:
                run.evaluate()
            if recipe.sample_every and step % recipe.sample_every == 0 and not architecture.causal:
                run.sample()
            if save or stopped:
                run.save()
            if stopped:
                if where.main:
                    print(f"stopped at step {step}: saved, and the same command goes on from there", file=sys.stderr)
                raise KeyboardInterrupt if stopped == signal.SIGINT else SystemExit(128 + stopped)
    return run.finish()


def check_run(
    corpus: TokenFile,
    folder: Path,
    architecture: Architecture,
    recipe: Recipe,
    seed: int,
    where: World,
    force: bool = False,
    about: dict[str, Any] | None = None,
) -> tuple[Batches, dict[str, Any]]:
    """The batches of a run and its identity. Refused, before anything is written, are batches that do not fit the
    processes, a text shorter than a row, and a folder with a run that began differently."""
    batches = Batches(corpus, recipe, architecture.length, seed, architecture.causal, where.rank, where.size)
    corpus.check_length(architecture.length)
    identity = _identity(corpus, architecture, recipe, seed) | (about or {})
    state = checkpoint.load_state(folder / CHECKPOINT)
    if state is not None:
        _check_identity(folder, state["identity"], identity, force)
    return batches, identity


def stage_file(folder: Path, step: int) -> Path:
    """Where a run keeps its averaged weights after so many steps, if they are asked for."""
    return folder / f"stage-{step}.safetensors"


# -------------------------------------------------------------------------------------------------- around the loop


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


def _check_agreement(folder: Path, step: int, where: World) -> None:
    """Every process reads the checkpoint for itself, so all must see the same one."""
    if where.size > 1:
        steps = torch.tensor([step, -step], device=where.device)
        dist.all_reduce(steps, dist.ReduceOp.MAX)
        if int(steps[0]) != -int(steps[1]):
            raise UserError(f"the processes do not see the same checkpoint: {folder} must be shared by all hosts")


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM are noted, and acted on between two steps; a second one is not waited for."""
    got: list[int] = []
    before: dict[int, Any] = {}

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    def note(number: int, frame: Any) -> None:
        got.append(number)
        restore()

    if threading.current_thread() is threading.main_thread():
        before |= {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield got
    finally:
        restore()


def _stopped(signals: list[int], look: bool, where: World) -> int:
    """The signal that all processes agree to stop for, 0 for none. Several agree only when they look at the numbers."""
    got = signals[0] if signals else 0
    if where.size == 1 or not look:
        return got if where.size == 1 else 0
    flag = torch.tensor(got, device=where.device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return int(flag)


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


# -------------------------------------------------------------------------------- what happens between some steps


class _Run:
    """What is looked at, written and saved between steps."""

    def __init__(
        self,
        trainer: Trainer,
        corpus: TokenFile,
        folder: Path,
        state: dict[str, Any],
        identity: dict[str, Any],
        label: str,
        bar: Bar,
    ) -> None:
        self.trainer, self.corpus, self.folder, self.bar = trainer, corpus, folder, bar
        self.state, self.identity, self.label = state, identity, label
        self.recipe, self.world, self.architecture = trainer.recipe, trainer.world, trainer.model.architecture
        self.peak = peak_tflops(self.world.device)
        self.rows: list[Tensor] = []  # what steps returned since the numbers were last looked at; still on the device
        self.last_bound: Bound | None = None
        if self.world.main:  # what was written after the checkpoint is cut off
            for path in (folder / METRICS, folder / SAMPLES):
                _cut_after(path, state["step"])
        self.clock = time.perf_counter()

    def look(self) -> None:
        """Fetch the losses since the last time, check them, write them down."""
        values = torch.stack(self.rows)
        if self.world.size > 1:
            mine = values[:, [0, 2, 3]].contiguous()
            dist.all_reduce(mine)
            values[:, [0, 2, 3]] = mine
        table = values.cpu().double().numpy()
        step, now = self.trainer.step_count, time.perf_counter()
        seconds, self.clock, self.rows = now - self.clock, now, []
        self.state["seconds"] += seconds
        self.state["masked"] += int(table[:, 2].sum())
        self._check(table, step)
        rows_per_s = len(table) * self.recipe.batch / seconds
        loss, scored_per_s = float(table[:, 0].mean()), float(table[:, 2].sum()) / seconds
        row = {
            "step": step,
            "loss": loss,
            "bits": loss / math.log(2),
            "lr": lr_at(self.recipe, step - 1),
            "grad_norm": float(table[:, 1].mean()),
            "tokens": step * self.recipe.batch * self.architecture.length,
            "tokens_per_s": rows_per_s * self.architecture.length,
            "masked_per_s": scored_per_s,
            "mfu": self._mfu(rows_per_s),
            "seconds": self.state["seconds"],
        }
        self._log(METRICS, row)
        mfu = "" if row["mfu"] is None else f" mfu {row['mfu']:.1%}"
        held = "" if self.last_bound is None else f" held-out {self.last_bound.bits:.3f}"
        speed = f"{row['tokens_per_s']:,.0f} tokens/s ({scored_per_s:,.0f} scored)"
        self.bar.more = f"bits {row['bits']:.3f}{held} {speed}{mfu}"

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
        if means and means[0] > _DIVERGED * usual:
            raise UserError(
                f"the loss diverges at step {step}: {means[0]:.3f} over the last {_BLOCK} steps, more than "
                f"{_DIVERGED:g} times the usual {usual:.3f}; lower the learning rate; {kept}"
            )

    def _mfu(self, rows_per_s: float) -> float | None:
        if self.peak is None:
            return None
        flops = training_flops(self.architecture, self.architecture.length)
        return rows_per_s * flops / (self.peak * 1e12 * self.world.size)

    def _log(self, name: str, row: dict[str, Any]) -> None:
        if self.world.main:
            try:
                with open(self.folder / name, "a") as file:
                    file.write(json.dumps(plain(row)) + "\n")
            except OSError as error:
                raise UserError(f"cannot write {self.folder / name}: {error.strerror or error}") from error

    @contextlib.contextmanager
    def _not_training(self) -> Iterator[None]:
        """What goes by meanwhile is wall time, but not training time."""
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self.clock += seconds
        self.state["other_seconds"] += seconds

    def evaluate(self) -> None:
        """The bound on held-out text, into the log."""
        with self._not_training():
            self.last_bound = self._bound(self.recipe.eval_rows)
            if self.last_bound is not None:
                made = {f"heldout_{key}": value for key, value in self.last_bound.to_json().items()}
                self._log(METRICS, {"step": self.trainer.step_count, **made})

    def _bound(self, rows: int) -> Bound | None:
        """The bound of the averaged weights on held-out rows, None if nothing is held out."""
        corpus, trainer = self.corpus, self.trainer
        if not len(corpus.heldout):
            return None
        real = None
        if corpus.heldout.ndim == 2:
            chosen = np.linspace(0, len(corpus.heldout) - 1, min(rows, len(corpus.heldout))).astype(np.int64)
            tokens = np.asarray(corpus.heldout[chosen]).astype(np.int64)
            real = None if corpus.heldout_real is None else np.asarray(corpus.heldout_real[chosen])
        else:
            tokens = spread_rows(corpus.heldout, self.architecture.length, rows)
        same: dict[str, Any] = {"real_N": real, "device": self.world.device, "precision": trainer.precision}
        with trainer.averaged() as model:
            network: Any = trainer.objective if trainer.sharded else model
            if self.architecture.causal:
                return causal_bound(network, tokens, **same)
            return bound(network, tokens, mask_id=model.mask_id, draws=4, **same)

    def sample(self) -> None:
        """Four samples from the averaged weights, for the eye. Left out with sharded weights."""
        if self.trainer.sharded:
            return
        device, steps = self.world.device, min(self.architecture.length, 64)
        bf16 = torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.trainer.precision == "bf16")
        with self._not_training(), self.trainer.averaged() as model, bf16:
            plan, schedule = make_plan(4, self.architecture.length, seed=self.recipe.seed), Schedule.parse("model")
            drawn = denoise({"model": model}, schedule, plan, mask_id=model.mask_id, steps=steps, device=device)
            texts = [self.corpus.tokenizer.decode(row) for row in drawn.tokens.tolist()]
            self._log(SAMPLES, {"step": self.trainer.step_count, "steps": steps, "texts": texts})

    def save(self) -> None:
        """The checkpoint, and the averaged weights where a stage is asked for."""
        with self._not_training():
            tensors = self.trainer.tensors()
            step = self.state["step"] = self.trainer.step_count
            if self.world.main:
                if step in self.recipe.stages and not self.architecture.causal:
                    kept = {name: value for name, value in tensors.items() if name.startswith(AVERAGE)}
                    checkpoint.save(stage_file(self.folder, step), kept, {})
                checkpoint.save(self.folder / CHECKPOINT, tensors, {**self.state, "identity": self.identity})

    def finish(self) -> dict[str, Any]:
        """The last evaluation, on four times the rows, and the summary that marks the run as done."""
        found, state, device = self._bound(4 * self.recipe.eval_rows), self.state, self.world.device
        steps = self.trainer.step_count
        tokens = steps * self.recipe.batch * self.architecture.length
        summary: dict[str, Any] = {
            "label": self.label,
            "steps": steps,
            "tokens": tokens,
            "masked": state["masked"],
            "seconds": state["seconds"],
            "wall_seconds": state["seconds"] + state["other_seconds"],
            "tokens_per_s": tokens / max(1e-9, state["seconds"]),
            "mfu": self._mfu(steps * self.recipe.batch / max(1e-9, state["seconds"])),
            "mfu_formula": MFU_FORMULA,
            "peak_tflops": self.peak,
            "parameters": sum(value.numel() for value in self.trainer.params.values()),
            "train_loss": statistics.fmean(state["losses"]) if state["losses"] else None,
            "heldout": None if found is None else found.to_json(),
            "bits_per_character": None if found is None else found.bits / self.corpus.characters_per_token(),
            "architecture": self.architecture.to_json(),
            "seed": self.trainer.seed,
            "processes": self.world.size,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        }
        summary = plain(summary)  # as it will be read again
        if self.world.main:
            write_json(self.folder / SUMMARY, summary)
        return summary


def _cut_after(path: Path, step: int) -> None:
    """Keep the lines of a JSONL file up to a step, and no half-written one; begin the log if there is none."""
    lines = []
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if json.loads(line)["step"] <= step:
                    lines.append(line + "\n")
    if path.exists() or path.name == METRICS:
        atomic_write(path, "".join(lines))
