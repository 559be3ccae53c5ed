r"""A network in training: its optimizer, its moving average, and the processes and batches around a step.

Weights are updated by AdamW (or `muon`) with a linear warm-up and gradient clipping; what is evaluated and shipped is
their exponential moving average. The loss and the batches are in `objective`, every setting in `recipe`; a whole run,
with its checkpoints and evaluations, is in `run`.

**Randomness.** Everything a step draws is keyed (see `objective`), so the loss does not depend on the number of
processes, and a resumed run repeats an uninterrupted one. The one exception is dropout, which PyTorch draws: it is
seeded by (seed, step, process, micro-batch), so a resumed run repeats it exactly, but another number of processes
means another draw.

**MFU** (model FLOPs utilisation) counts what the objective needs and no more: for one row of length L

    3 * [ depth * (24 L d^2 + 4 L^2 d) - 18 (L - k) d^2 + 2 k d V ],

    k = L/2 masked positions (causal: k = L, and 2 L^2 d): after the last block's attention nothing needs the others,
    neither that block's output projection and MLP (18 d^2) nor the head

(forward once, backward twice; MLP ratio 4; elementwise work, optimizer and recomputation not counted), times rows/s,
over the device's peak in bf16 without sparsity. The first block's queries, keys and values count as products over all
tokens, 6 L d^2 of the sum, though with a small vocabulary `fused` looks them up in a table (1.8% at 12 blocks of 256).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from relaylm.errors import UserError
from relaylm.kernels import triton, update
from relaylm.models.denoiser import Architecture, Transformer
from relaylm.models.family import pick_device
from relaylm.train.muon import Muon
from relaylm.train.objective import Objective, mix
from relaylm.train.recipe import Recipe, ema_decay, lr_at

Parts = list[dict[str, Tensor]]  # the micro-batches of a step

# Dense bf16 TFLOP/s by the vendors' data sheets, for MFU.
PEAK_TFLOPS = {"H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "H800": 989.0, "B200": 2250.0, "A100": 312.0}
PEAK_TFLOPS |= {"A800": 312.0, "L40S": 362.0, "L4": 121.0, "RTX 4090": 165.2, "RTX 3090": 71.0, "V100": 125.0}
AVERAGE = "average/"  # what names of averaged weights begin with, in a checkpoint
MFU_FORMULA = (
    "rows/s * 3 * (depth * (24 L d^2 + 4 L^2 d) - 18 (L - k) d^2 + 2 k d V) / peak, "
    "k = L/2 masked positions (causal: k = L, 2 L^2 d)"
)


@dataclass(frozen=True)
class World:
    """The processes that train together, and this one's place among them."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def main(self) -> bool:
        """True for the process that writes files."""
        return self.rank == 0


@contextlib.contextmanager
def world(device: str | torch.device = "auto") -> Iterator[World]:
    """One process, or all that torchrun started (it sets RANK, WORLD_SIZE and LOCAL_RANK)."""
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    chosen = pick_device(device)
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) if size > 1 else chosen.index or 0)
        torch.cuda.set_device(chosen)
    began = size > 1 and not dist.is_initialized()
    if began:
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield World(chosen, rank, size) if size > 1 else World(chosen)
    finally:
        if began:
            dist.destroy_process_group()


def training_flops(a: Architecture, length: int) -> float:
    """Operations that one row of training needs: see MFU in the module's text."""
    attention = (2 if a.causal else 4) * length**2 * a.width
    blocks = a.depth * (2 * length * (4 + 2 * a.mlp_ratio) * a.width**2 + attention)
    positions = length if a.causal else length / 2
    unscored = 2 * (length - positions) * (1 + 2 * a.mlp_ratio) * a.width**2
    return 3.0 * (blocks - unscored + 2 * positions * a.width * a.vocab_size)


def peak_tflops(device: torch.device) -> float | None:
    """The device's dense bf16 peak by its data sheet, None if it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_TFLOPS.items() if re.search(rf"\b{re.escape(key)}\b", name)), None)


def prefetched(make: Callable[[int], Parts], steps: range, pin: bool, ahead: int = 4) -> Generator[Parts, None, None]:
    """Batches made by a thread, a few steps ahead, in pinned memory if they go to a GPU."""

    def made(step: int) -> Parts:
        return [{k: v.pin_memory() if pin else v for k, v in part.items()} for part in make(step)]

    waiting: deque[Future[Parts]] = deque()
    with ThreadPoolExecutor(1) as thread:
        try:
            for step in steps:
                waiting.append(thread.submit(made, step))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for batch in waiting:
                batch.cancel()


class Trainer:
    """A network, its optimizer and its moving average: everything that changes from step to step."""

    def __init__(
        self,
        architecture: Architecture,
        recipe: Recipe,
        seed: int,
        where: World,
        gather: bool | None = None,
        start: Transformer | None = None,
        teacher: Transformer | None = None,
    ) -> None:
        """Fresh weights of a seed, or those of `start`. A `teacher` is what the network is to imitate."""
        self.recipe, self.seed, self.world = recipe, seed, where
        device = where.device
        on_cuda = device.type == "cuda"
        self.precision = ("bf16" if on_cuda else "fp32") if recipe.precision == "auto" else recipe.precision
        self.step_count = 0
        self.model = _fresh(architecture, recipe, seed) if start is None else _copied(start, recipe)
        self.model.to(device)
        self.model.train()
        self.model.angles(architecture.length)  # made here once, outside of what is compiled or run without gradients
        share = recipe.batch // where.size
        rows = min(recipe.micro_batch or share, share)
        self.objective = Objective(self.model, recipe, seed, self.precision == "bf16", rows, gather, teacher)
        if on_cuda and recipe.attention != "auto":
            torch.backends.cuda.enable_flash_sdp(recipe.attention == "flash")
            torch.backends.cuda.enable_cudnn_sdp(recipe.attention == "cudnn")
        self.sharded = recipe.shard and where.size > 1
        compiled = recipe.compile == "on" or (recipe.compile == "auto" and on_cuda and triton is not None)
        if self.sharded:
            _shard(self.objective, compiled)
        self.params = dict(self.model.named_parameters())
        self.ema = {name: value.detach().clone() for name, value in self.params.items()}
        self._whole: tuple[Tensor, Tensor] | None = None
        if not self.sharded and update.applies([value.detach() for value in self.params.values()]):
            # All weights in one piece of memory, and all averages, so that one pass takes these towards those.
            self._whole = _in_one_piece(self.params.values()), _in_one_piece(self.ema.values())
        # The same storage, as plain lists for the fused operations of every step.
        self._now = [_local(value.detach()) for value in self.params.values()]
        self._average = [_local(value) for value in self.ema.values()]
        # What changes from step to step is on the device, so that a captured step can read it there.
        self.lr = torch.tensor(recipe.lr, device=device)
        self.ema_rate = torch.tensor(0.0, device=device)
        self.optimizers = self._optimizers(on_cuda)
        self.run: Callable[..., tuple[Tensor, Tensor]] = self.objective
        if compiled and not self.sharded:
            self.objective.compile_parts()
        # One CUDA graph for a whole step, where nothing in it is drawn by PyTorch or exchanged with other processes.
        self.capture = on_cuda and where.size == 1 and not recipe.dropout and recipe.compile != "off"
        self._graph: _StepGraph | None = None
        if where.size > 1 and not self.sharded:
            ids = [device.index] if on_cuda else None
            self.run = nn.parallel.DistributedDataParallel(self.run, device_ids=ids, gradient_as_bucket_view=True)

    def _optimizers(self, fused: bool) -> list[torch.optim.Optimizer]:
        """AdamW for everything, or for all but the blocks' matrices, which Muon then has."""
        recipe = self.recipe
        by_muon = {
            name
            for name, value in self.params.items()
            if recipe.optimizer == "muon" and value.dim() == 2 and name.startswith("blocks.") and "adaLN" not in name
        }
        if by_muon and self.sharded:
            raise UserError("muon needs whole matrices: it does not go with shard")
        adam = torch.optim.AdamW(
            [value for name, value in self.params.items() if name not in by_muon],
            lr=self.lr if fused else recipe.lr,
            betas=(recipe.beta1, recipe.beta2),
            eps=recipe.eps,
            weight_decay=recipe.weight_decay,
            fused=fused or None,
            capturable=fused,
        )
        muon = [value for name, value in self.params.items() if name in by_muon]
        return [adam, Muon(muon, self.lr if fused else recipe.lr)] if muon else [adam]

    def step(self, parts: Parts) -> Tensor:
        """One update. Returns, on the device, (loss of this process's share, norm of the gradient, positions scored,
        positions without a place): nothing here waits for the device."""
        lr = lr_at(self.recipe, self.step_count)
        self.lr.fill_(lr)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if not isinstance(group["lr"], Tensor):
                    group["lr"] = lr
        self.step_count += 1
        self.ema_rate.fill_(1 - ema_decay(self.recipe, self.step_count))
        if not self.capture:
            return self._update(parts)
        if self._graph is None:
            self._graph = _StepGraph(self, parts)
        return self._graph(parts)

    def _update(self, parts: Parts) -> Tensor:
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
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if self._whole is not None:
            now, average = self._whole
            update.lerp_(average, now, self.ema_rate)
        elif device.type == "cuda":
            apart = torch._foreach_sub(self._now, self._average)
            torch._foreach_mul_(apart, self.ema_rate)
            torch._foreach_add_(self._average, apart)
        else:
            torch._foreach_lerp_(self._average, self._now, 1 - ema_decay(recipe, self.step_count))
        return torch.stack([loss / self.world.size, _full(norm), counts[0].float(), counts[1].float()])

    def _dropout_seed(self, turn: int) -> int:
        words = np.array([self.seed, self.step_count - 1, self.world.rank, turn], dtype=np.uint64)
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
            with torch.compiler.set_stance("force_eager"):  # not worth compiling for a few calls of other shapes
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
            optimizer = self._owner(value)
            moments = optimizer.state.get(value, {})
            made[f"weights/{name}"] = _host(value)
            made[AVERAGE + name] = _host(self.ema[name])
            for key in _moments(optimizer):
                made[f"{key}/{name}"] = _host(moments[key]) if moments else torch.zeros(value.shape)
        return made

    def _owner(self, value: Tensor) -> torch.optim.Optimizer:
        return next(o for o in self.optimizers if any(p is value for group in o.param_groups for p in group["params"]))

    def restore(self, tensors: dict[str, Tensor], step: int) -> None:
        """Go back to what `tensors` gave after so many steps."""
        for name, value in self.params.items():
            _assign(value, tensors[f"weights/{name}"])
            _assign(self.ema[name], tensors[AVERAGE + name])
            if not step:
                continue
            optimizer = self._owner(value)
            state = optimizer.state[value]
            if not isinstance(optimizer, Muon):
                on_device = optimizer.param_groups[0]["fused"]
                state["step"] = torch.tensor(float(step), device=self.world.device if on_device else "cpu")
            for key in _moments(optimizer):
                state[key] = torch.zeros_like(value, memory_format=torch.preserve_format)
                _assign(state[key], tensors[f"{key}/{name}"])
        self.step_count = step


def _moments(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """What an optimizer remembers of each parameter."""
    return ("exp_avg",) if isinstance(optimizer, Muon) else ("exp_avg", "exp_avg_sq")


class _StepGraph:
    """A whole step as one CUDA graph: the host copies the batch and replays it. Hundreds of small kernels then follow
    each other without waiting for the host to launch them."""

    WARM = 3  # steps that run as they are, so that everything is compiled and allocated before the capture

    def __init__(self, trainer: Trainer, parts: Parts) -> None:
        self.trainer, self.eager = trainer, self.WARM
        device = trainer.world.device
        self.parts = [{key: value.to(device) for key, value in part.items()} for part in parts]
        self.stream = torch.cuda.Stream()
        self.graph = torch.cuda.CUDAGraph()
        self.out: Tensor | None = None

    def __call__(self, parts: Parts) -> Tensor:
        for mine, part in zip(self.parts, parts, strict=True):
            for key, value in part.items():
                mine[key].copy_(value, non_blocking=True)
        if self.eager:
            self.eager -= 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                made = self.trainer._update(self.parts)
            torch.cuda.current_stream().wait_stream(self.stream)
            return made
        if self.out is None:
            # What the thread that fetches batches does meanwhile (it pins memory) is not to spoil the capture.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.out = self.trainer._update(self.parts)
        self.graph.replay()
        return self.out.clone()


def _fresh(architecture: Architecture, recipe: Recipe, seed: int) -> Transformer:
    """A network with the weights of a seed: `Transformer.initialise`, its matrices (0.02) rescaled."""
    model = Transformer(architecture, recipe.dropout).initialise(torch.Generator().manual_seed(seed))
    scale = (recipe.init or 1 / math.sqrt(3 * architecture.width)) / 0.02
    for parameter in model.parameters():
        if parameter.dim() == 2:  # those that start at zero stay there
            parameter.data.mul_(scale)
    return model


def _copied(start: Transformer, recipe: Recipe) -> Transformer:
    """A network with the weights of another, in float32."""
    model = Transformer(start.architecture, recipe.dropout)
    model.load_state_dict({name: value.float() for name, value in start.state_dict().items()})
    return model


def _in_one_piece(tensors: Iterable[Tensor]) -> Tensor:
    """Moves the tensors' values to one piece of memory, which is returned; each begins at a multiple of 64 numbers."""
    tensors = list(tensors)
    sizes = [-(-x.numel() // 64) * 64 for x in tensors]
    whole = tensors[0].new_zeros(sum(sizes))
    for x, part in zip(tensors, whole.split(sizes), strict=True):
        place = part[: x.numel()].view(x.shape)
        place.copy_(x.detach())
        x.data = place
    return whole


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
