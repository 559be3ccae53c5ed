r"""Token files in, a family of denoisers out.

The loss and the batches are in `objective`, every setting in `recipe`. Weights are updated by AdamW with a linear
warm-up and gradient clipping; what is evaluated and shipped is their exponential moving average.

**Randomness.** Everything a step draws is keyed (see `objective`), so the loss does not depend on the number of
processes, and a resumed run repeats an uninterrupted one. The one exception is dropout, which PyTorch draws: it is
seeded by (seed, step, process, micro-batch), so a resumed run repeats it exactly, but another number of processes
means another draw.

**MFU** (model FLOPs utilisation) counts what the objective needs and no more: for one row of length L

    3 * [ depth * (24 L d^2 + 4 L^2 d) + 2 k d V ],        k = L/2 masked positions (causal: k = L, and 2 L^2 d),

(forward once, backward twice; MLP ratio 4; elementwise work, optimizer and recomputation not counted), times rows/s,
over the device's peak in bf16 without sparsity.

**Crashes.** A run is a folder with one checkpoint, replaced atomically (`checkpoint`). Run the same command again and
it goes on; on a CPU the final weights are those of an uninterrupted run, bit for bit (with the same number of
threads).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import queue
import re
import signal
import statistics
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from relaylm import checkpoint
from relaylm.bound import Bound, bound, causal_bound, spread_rows
from relaylm.corpus import TokenFile
from relaylm.denoiser import Architecture, Transformer, build
from relaylm.errors import UserError
from relaylm.objective import Batches, Objective, mix
from relaylm.recipe import OPERATIONAL, Preset, Recipe, ema_decay, load_preset, lr_at, override
from relaylm.recipe import presets as presets

CHECKPOINT, METRICS, SUMMARY, SAMPLES = "checkpoint.safetensors", "metrics.jsonl", "summary.json", "samples.jsonl"

_BLOCK = 20  # steps whose mean loss is looked at for divergence

# Dense bf16 TFLOP/s by the vendors' data sheets, for MFU.
PEAK_TFLOPS = {
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H800": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "V100": 125.0,
}
MFU_FORMULA = (
    "rows/s * 3 * (depth * (24 L d^2 + 4 L^2 d) + 2 k d V) / peak, k = L/2 masked positions (causal: k = L, 2 L^2 d)"
)


# ------------------------------------------------------------------------------------------------- processes, devices


@dataclass(frozen=True)
class World:
    """The processes that train together, and this one's place among them."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def main(self) -> bool:
        return self.rank == 0


@contextlib.contextmanager
def world(device: str | torch.device = "auto") -> Iterator[World]:
    """One process, or all that torchrun started (it sets RANK, WORLD_SIZE and LOCAL_RANK)."""
    from relaylm.family import pick_device

    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    chosen = pick_device(device)
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) if size > 1 else chosen.index or 0)
        torch.cuda.set_device(chosen)
    if size == 1:
        yield World(chosen)
        return
    began = not dist.is_initialized()
    if began:
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield World(chosen, rank, size)
    finally:
        if began:
            dist.destroy_process_group()


def training_flops(a: Architecture, length: int) -> float:
    """Operations that one row of training needs: see MFU in the module's text."""
    attention = (2 if a.causal else 4) * length**2 * a.width
    blocks = a.depth * (2 * length * (4 + 2 * a.mlp_ratio) * a.width**2 + attention)
    positions = length if a.causal else length / 2
    return 3.0 * (blocks + 2 * positions * a.width * a.vocab_size)


def peak_tflops(device: torch.device) -> float | None:
    """The device's dense bf16 peak by its data sheet, None if it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_TFLOPS.items() if re.search(rf"\b{re.escape(key)}\b", name)), None)


class _Prefetch:
    """Batches made by a thread, a few steps ahead, in pinned memory if they go to a GPU."""

    def __init__(self, make: Callable[[int], list[dict[str, Tensor]]], steps: range, pin: bool, ahead: int = 4) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=ahead)
        self._stop = threading.Event()
        self._make, self._steps, self._pin = make, steps, pin
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            for step in self._steps:
                made = self._make(step)
                if self._pin:
                    made = [{key: value.pin_memory() for key, value in part.items()} for part in made]
                if not self._put(made):
                    return
        except BaseException as error:  # handed to the training loop
            self._put(error)

    def _put(self, item: Any) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def next(self) -> list[dict[str, Tensor]]:
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def __enter__(self) -> _Prefetch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()


# ----------------------------------------------------------------------------------------------------------- trainer


class Trainer:
    """A network, its optimizer and its moving average: everything that changes from step to step."""

    def __init__(
        self, architecture: Architecture, recipe: Recipe, seed: int, where: World, gather: bool | None = None
    ) -> None:
        self.recipe, self.seed, self.world = recipe, seed, where
        device = where.device
        on_cuda = device.type == "cuda"
        self.precision = ("bf16" if on_cuda else "fp32") if recipe.precision == "auto" else recipe.precision
        self.step_count = 0
        self.model = _fresh(architecture, recipe, seed).to(device)
        self.model.train()
        self.model.angles(architecture.length)  # made here once, outside of what is compiled or run without gradients
        share = recipe.batch // where.size
        rows = min(recipe.micro_batch or share, share)
        self.objective = Objective(self.model, recipe, seed, self.precision == "bf16", rows, gather)
        if on_cuda and recipe.attention != "auto":
            torch.backends.cuda.enable_flash_sdp(recipe.attention == "flash")
            torch.backends.cuda.enable_cudnn_sdp(recipe.attention == "cudnn")
        self.sharded = recipe.shard and where.size > 1
        compiled = recipe.compile == "on" or (recipe.compile == "auto" and on_cuda and _has_triton())
        if self.sharded:
            _shard(self.objective, compiled)
        self.params = dict(self.model.named_parameters())
        self.ema = {name: value.detach().clone() for name, value in self.params.items()}
        # The same storage, as plain lists for the fused operations of every step.
        self._now = [_local(value.detach()) for value in self.params.values()]
        self._average = [_local(value) for value in self.ema.values()]
        self.optimizer = torch.optim.AdamW(
            self.params.values(),
            lr=recipe.lr,
            betas=(recipe.beta1, recipe.beta2),
            eps=recipe.eps,
            weight_decay=recipe.weight_decay,
            fused=on_cuda or None,
        )
        self.run: Callable[..., tuple[Tensor, Tensor]] = self.objective
        if compiled and not self.sharded:
            self.run = torch.compile(self.objective, dynamic=False)
        if where.size > 1 and not self.sharded:
            self.run = nn.parallel.DistributedDataParallel(
                self.run,
                device_ids=[device.index] if on_cuda else None,
                gradient_as_bucket_view=True,
            )

    def step(self, parts: list[dict[str, Tensor]]) -> Tensor:
        """One update. Returns, on the device, (loss of this process's share, norm of the gradient, positions scored,
        positions without a place): nothing here waits for the device."""
        recipe, device = self.recipe, self.world.device
        loss, counts = torch.zeros((), device=device), torch.zeros(2, dtype=torch.int64, device=device)
        for turn, part in enumerate(parts):
            if recipe.dropout:
                torch.manual_seed(self._dropout_seed(turn))
            inputs = {key: value.to(device, non_blocking=True) for key, value in part.items()}
            with self._synchronised(last=turn == len(parts) - 1):
                part_loss, part_counts = self.run(**inputs)
                part_loss.backward()
            loss, counts = loss + part_loss.detach(), counts + part_counts
        norm = torch.nn.utils.clip_grad_norm_(self.params.values(), recipe.clip or math.inf)
        for group in self.optimizer.param_groups:
            group["lr"] = lr_at(recipe, self.step_count)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step_count += 1
        torch._foreach_lerp_(self._average, self._now, 1 - ema_decay(recipe, self.step_count))
        return torch.stack([loss / self.world.size, _full(norm), counts[0].float(), counts[1].float()])

    def _dropout_seed(self, turn: int) -> int:
        words = np.array([self.seed, self.step_count, self.world.rank, turn], dtype=np.uint64)
        with np.errstate(over="ignore"):
            key = mix(mix(mix(mix(words[:1]) + words[1:2]) + words[2:3]) + words[3:4])
        return int(key[0] >> np.uint64(1))

    def _synchronised(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients are exchanged once for each update, with its last micro-batch."""
        if isinstance(self.run, nn.parallel.DistributedDataParallel) and not last:
            return self.run.no_sync()
        if self.sharded:
            self.objective.set_requires_gradient_sync(last)  # type: ignore[operator]
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[Transformer]:
        """The network with its moving average for weights, ready to be evaluated; the weights come back afterwards."""
        kept = [value.clone() for value in self._now]
        torch._foreach_copy_(self._now, self._average)
        self.model.eval()
        try:
            yield self.model
        finally:
            if self.sharded:  # drop what was gathered from the average, or the next step would still compute with it
                for part in (*self.model.blocks, self.objective):
                    part.reshard()
            torch._foreach_copy_(self._now, kept)
            self.model.train()

    def tensors(self) -> dict[str, Tensor]:
        """All of it, whole and on the host, by name. With sharding every process must call this."""
        made = {}
        for name, value in self.params.items():
            moments = self.optimizer.state.get(value, {})
            made[f"weights/{name}"] = _host(value)
            made[f"average/{name}"] = _host(self.ema[name])
            for key in ("exp_avg", "exp_avg_sq"):
                made[f"{key}/{name}"] = _host(moments[key]) if moments else torch.zeros(value.shape)
        return made

    def restore(self, tensors: dict[str, Tensor], step: int) -> None:
        for name, value in self.params.items():
            _assign(value, tensors[f"weights/{name}"])
            _assign(self.ema[name], tensors[f"average/{name}"])
            if not step:
                continue
            state = self.optimizer.state[value]
            on_device = self.optimizer.param_groups[0]["fused"]
            state["step"] = torch.tensor(float(step), device=self.world.device if on_device else "cpu")
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(value, memory_format=torch.preserve_format)
                _assign(state[key], tensors[f"{key}/{name}"])
        self.step_count = step


def _fresh(architecture: Architecture, recipe: Recipe, seed: int) -> Transformer:
    """A network with the weights of a seed: `Transformer.initialise`, its matrices (0.02) rescaled."""
    model = Transformer(architecture, recipe.dropout).initialise(torch.Generator().manual_seed(seed))
    scale = (recipe.init or 1 / math.sqrt(3 * architecture.width)) / 0.02
    for parameter in model.parameters():
        if parameter.dim() == 2:  # those that start at zero stay there
            parameter.data.mul_(scale)
    return model


def _has_triton() -> bool:
    import importlib.util

    return importlib.util.find_spec("triton") is not None


def _shard(objective: Objective, compiled: bool) -> None:
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    for block in objective.model.blocks:
        if compiled:  # block by block: gathering the weights in between is not compiled
            block.compile(dynamic=False)
        fully_shard(block)
    fully_shard(objective)
    register_fsdp_forward_method(objective, "logits")  # evaluation enters here instead of by `forward`


def _is_sharded(value: Tensor) -> bool:
    return hasattr(value, "to_local")


def _local(value: Tensor) -> Tensor:
    return value.to_local() if _is_sharded(value) else value  # type: ignore[attr-defined]


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if _is_sharded(value) else value  # type: ignore[attr-defined]


def _host(value: Tensor) -> Tensor:
    return _full(value.detach()).to("cpu", copy=True)


def _assign(target: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        if _is_sharded(target):
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value.to(target.device), target.device_mesh, target.placements)  # type: ignore[attr-defined]
        target.copy_(value)


# --------------------------------------------------------------------------------------------------------- one model


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
        summary = checkpoint.read_json(folder / SUMMARY)
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
            _Prefetch(batches.at, steps, pin) as ahead,
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
            f"use the same settings, another folder, or force it"
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
            checkpoint.atomic_write(self.path, [])
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
    checkpoint.atomic_write(path, ["".join(line + "\n" for line in lines).encode()])


def _append(path: Path, row: dict[str, Any]) -> None:
    try:
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


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
        self.progress: tqdm | None = None

    @contextlib.contextmanager
    def bar(self, shown: bool) -> Iterator[None]:
        with tqdm(
            total=self.recipe.steps,
            initial=self.state["step"],
            desc=self.label or "train",
            unit="step",
            file=sys.stderr,
            disable=not shown,
            dynamic_ncols=True,
        ) as self.progress:
            yield

    def go(self, ahead: _Prefetch, signals: _Signals) -> None:
        recipe = self.recipe
        self.clock = time.perf_counter()
        while self.trainer.step_count < recipe.steps:
            self.rows.append(self.trainer.step(ahead.next()))
            step = self.trainer.step_count
            if self.progress is not None:
                self.progress.update(1)
            last = step == recipe.steps
            save = last or step % recipe.checkpoint_every == 0
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
            self.progress.set_postfix_str(
                f"bits {row['bits']:.3f}{held} {_short(rows_per_s * self.length)} tok/s "
                f"({_short(float(table[:, 2].sum()) / seconds)} scored){mfu}"
            )

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
        from relaylm.plan import make_plan
        from relaylm.sampler import denoise
        from relaylm.schedule import Schedule

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
            checkpoint.write_json(self.folder / SUMMARY, summary)
        return summary


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.0f}"


# ------------------------------------------------------------------------------------------------------------ family


def train_family(
    corpus_folder: str | Path,
    out_folder: str | Path,
    preset: str | Path | Preset = "tiny-cpu",
    *,
    device: str | torch.device = "auto",
    name: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    progress: bool = True,
    force: bool = False,
    command: str | None = None,
    **overrides: Any,
) -> Path:
    """Train a family's models one after the other, and write it to OUT/family; returns that folder.

    `overrides` are fields of `Preset` and `Recipe` (depths, twin, judge, steps, lr, ...). Each model has a folder of
    its own under OUT/models with its checkpoint, metrics and summary; what is finished there is not trained again.
    The resolved settings go to OUT/config.json.
    """
    from relaylm.family import save_family

    if isinstance(preset, Preset):
        chosen = override(preset, **overrides)
    else:
        chosen = load_preset(preset, **overrides)
    corpus = TokenFile.load(corpus_folder)
    out = Path(out_folder).expanduser()
    jobs = [(f"{depth}b", depth, False, chosen.recipe.seed) for depth in sorted(chosen.depths)]
    if chosen.twin is not None:
        jobs.append((f"{chosen.twin}b-twin", chosen.twin, False, chosen.recipe.seed + 1))
    if chosen.judge is not None:
        jobs.append(("judge", chosen.judge, True, chosen.recipe.seed))
    shapes = {
        key: chosen.architecture(depth, corpus.vocab_size, corpus.mask_id, causal) for key, depth, causal, _ in jobs
    }
    command = command or f"relaylm train --preset {chosen.name}"
    with world(device) as where:
        if where.main:
            settings = {"preset": chosen.to_json(), "corpus": corpus.manifest, "command": command}
            checkpoint.write_json(out / "config.json", {**settings, "torch": torch.__version__})
        summaries = {}
        for key, _, _, seed in jobs:
            summaries[key] = train_model(
                corpus,
                out / "models" / key,
                shapes[key],
                chosen.recipe,
                seed=seed,
                where=where,
                label=key,
                progress=progress,
                force=force,
            )
            if where.size > 1:
                dist.barrier()  # the others must see the finished checkpoint
        target = out / "family"
        if where.main:
            networks = {key: averaged_network(out / "models" / key, shapes[key]) for key, *_ in jobs}
            judge = networks.pop("judge", None)
            twin = networks.pop(f"{chosen.twin}b-twin", None)
            save_family(
                target,
                networks,
                corpus.tokenizer,
                length=chosen.length,
                name=name or chosen.name,
                judge=judge,
                twins={} if twin is None else {f"{chosen.twin}b": twin},
                card=model_card(name or chosen.name, chosen, corpus, summaries, command),
                meta={"preset": chosen.to_json(), "training": summaries, "corpus": corpus.manifest["splits"]},
                dtype=dtype,
                overwrite=True,
            )
    return target


def averaged_network(folder: Path, architecture: Architecture) -> Transformer:
    """The network of a run's checkpoint with the averaged weights, in float32."""
    found = checkpoint.load(folder / CHECKPOINT)
    if found is None:
        raise UserError(f"there is no checkpoint in {folder}")
    prefix = "average/"
    return build(architecture, {k.removeprefix(prefix): v for k, v in found[0].items() if k.startswith(prefix)})


def model_card(name: str, preset: Preset, corpus: TokenFile, summaries: dict[str, dict[str, Any]], command: str) -> str:
    """README.md of a family: what it is, what it was trained on and how, how good it is, what it is not for."""
    splits, kind = corpus.manifest["splits"], corpus.manifest["tokenizer"]["type"]
    sources = ", ".join(source["name"] for source in corpus.manifest["request"]["sources"])
    unit = {"text8": "character", "bytes": "byte"}.get(kind, "token")
    timed = "with" if preset.time_conditioning else "without"
    lines = [
        "---",
        "library_name: relaylm",
        "tags: [masked-diffusion, text-generation]",
        "---",
        f"# {name}",
        "",
        f"Masked diffusion denoisers of {', '.join(map(str, sorted(preset.depths)))} blocks that share everything else",
        f"(width {preset.width}, {preset.heads} heads, length {preset.length}, vocabulary {corpus.vocab_size}),",
        f"made to take turns along one denoising trajectory. Trained {timed} time conditioning.",
        "",
        f"**Data.** {sources}: {splits['train']['tokens']:,} tokens to train on, {splits['heldout']['tokens']:,} more",
        f"at the end, held out. Licence of the text: {corpus.manifest['licence'] or 'not stated'}.",
        "",
        f"**Command.** `{command}`",
        "",
        f"| model | parameters | steps | tokens | wall time | held-out bits per {unit} (95%) | per source character |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, s in summaries.items():
        held, per_character = s["heldout"], s["bits_per_character"]
        cells = [
            key,
            f"{s['parameters']:,}",
            f"{s['steps']:,}",
            f"{s['tokens']:,}",
            f"{s['wall_seconds']:.0f} s on {s['device']}",
            "-" if held is None else f"{held['bits']:.4f} ({held['low']:.4f} to {held['high']:.4f})",
            "-" if per_character is None else f"{per_character:.4f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "A denoiser's figure is an upper bound on its negative log-likelihood; the judge's is exact, with the first",
        "token of each row given.",
        "",
        "**Good for** studying model schedules, tests and demonstrations. **Not for** anything that needs true or safe",
        "text: these are small models of a small corpus, and they repeat its errors and biases.",
        "",
    ]
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------------- throughput


def throughput(
    preset: str | Path | Preset = "wiki-char",
    *,
    depth: int | None = None,
    vocab_size: int = 28,
    steps: int = 20,
    warm: int = 5,
    causal: bool = False,
    device: str | torch.device = "auto",
    peak: float | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Train on random tokens for a moment, and say how fast that was. Everything a real step does is in it: batches
    from the prefetching thread, masks, loss, backward, clipping, AdamW, moving average. `peak` in TFLOP/s overrides
    the data sheet."""
    chosen = override(preset, **overrides) if isinstance(preset, Preset) else load_preset(preset, **overrides)
    shape = chosen.architecture(depth or max(chosen.depths), vocab_size, vocab_size - 1, causal)
    recipe, length = chosen.recipe, chosen.length
    rng = np.random.default_rng(0)
    kind = np.uint8 if vocab_size <= 256 else np.uint16 if vocab_size <= 65536 else np.uint32
    text = rng.integers(0, vocab_size - 1, size=64 * recipe.batch * length // 8 + 2 * length).astype(kind)
    corpus = TokenFile(Path("."), {"vocab_size": vocab_size, "mask_id": vocab_size - 1, "length": None}, text, text[:0])
    with world(device) as where:
        trainer = Trainer(shape, recipe, recipe.seed, where)
        batches = Batches(corpus, recipe, length, recipe.seed, causal, where.rank, where.size)
        pin = where.device.type == "cuda"
        with _Prefetch(batches.at, range(warm + steps), pin) as ahead:
            began = time.perf_counter()
            for _ in range(warm):
                trainer.step(ahead.next())
            _wait(where.device)
            warm_seconds = time.perf_counter() - began
            began = time.perf_counter()
            done = [trainer.step(ahead.next()) for _ in range(steps)]
            _wait(where.device)
            seconds = time.perf_counter() - began
        table = torch.stack(done).cpu()
        rows_per_s = steps * recipe.batch / seconds
        peak = peak or peak_tflops(where.device)
        flops = training_flops(shape, length)
        on_cuda = where.device.type == "cuda"
        return {
            "preset": chosen.name,
            "architecture": shape.to_json(),
            "recipe": asdict(recipe),
            "device": torch.cuda.get_device_name(where.device) if on_cuda else "cpu",
            "processes": where.size,
            "torch": torch.__version__,
            "precision": trainer.precision,
            "steps": steps,
            "seconds": seconds,
            "seconds_per_step": seconds / steps,
            "warm_seconds": warm_seconds,
            "chars_per_s": rows_per_s * length,
            "masked_per_s": float(table[:, 2].sum()) * where.size / seconds,
            "flops_per_row": flops,
            "tflops_per_s": rows_per_s * flops / 1e12,
            "mfu": None if peak is None else rows_per_s * flops / (peak * 1e12 * where.size),
            "mfu_formula": MFU_FORMULA,
            "peak_tflops": peak,
            "peak_memory_gib": torch.cuda.max_memory_allocated(where.device) / 2**30 if on_cuda else None,
            "loss": float(table[-1, 0]) * where.size,
        }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m relaylm.train`: throughput, or a training run for torchrun; the command line proper is `relaylm
    train`."""
    parser = argparse.ArgumentParser(prog="python -m relaylm.train", description=main.__doc__)
    parser.add_argument("--bench", action="store_true", help="measure throughput on random tokens and print JSON")
    parser.add_argument("--preset", default="tiny-cpu")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--corpus", help="folder made by `relaylm prepare`")
    parser.add_argument("--out", help="folder for models and family")
    parser.add_argument("--depth", type=int, help="--bench: blocks")
    parser.add_argument("--vocab-size", type=int, default=28, help="--bench: tokens with the mask")
    parser.add_argument("--bench-steps", type=int, default=20)
    parser.add_argument("--causal", action="store_true", help="--bench: a judge")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="change a setting of the preset"
    )
    options = parser.parse_args(arguments)
    try:
        changes = dict(_setting(text) for text in options.set)
        if options.bench:
            result = throughput(
                options.preset,
                depth=options.depth,
                vocab_size=options.vocab_size,
                steps=options.bench_steps,
                causal=options.causal,
                device=options.device,
                **changes,
            )
            print(json.dumps(result, indent=1))
            return 0
        if not options.corpus or not options.out:
            raise UserError("name a corpus and a folder for the result: --corpus FOLDER --out FOLDER")
        train_family(
            options.corpus, options.out, options.preset, device=options.device, progress=not options.quiet, **changes
        )
        return 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _setting(text: str) -> tuple[str, Any]:
    """`name=value`, the value in TOML's notation; a bare word is a string."""
    key, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"write a setting as NAME=VALUE, not {text!r}")
    try:
        return key, tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        return key, value


if __name__ == "__main__":
    sys.exit(main())
