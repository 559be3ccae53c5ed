r"""Network calls captured as CUDA graphs, and their results fetched while other calls run.

The host sends a few kilobytes of indices, replays a graph of fixed shape, and goes on to the next call without waiting.
Calls of other networks run eagerly (`engine.Eager`), by the same function.
"""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from relaylm.kernels import available
from relaylm.models.denoiser import Transformer

CALLS_AHEAD = 8  # calls that the host may be ahead of the device
ResultT = TypeVar("ResultT")


class Graphs:
    """Calls on CUDA: those of the shipped network are captured, by their shape; `eagerly` makes the others."""

    def __init__(self, device: torch.device, eagerly: Callable[..., Any]) -> None:
        self.device, self._eagerly = device, eagerly
        self._graphs: dict[Hashable, _Graph] = {}
        self._seen: set[Hashable] = set()
        self._under_way: deque[Any] = deque()

    def captures(self, model: Any) -> bool:
        """Are calls of this model captured? Without Triton the race asks the device how many blocks to open, which a
        graph cannot hold."""
        return available() and isinstance(model, Transformer)

    def run(
        self,
        key: Hashable,
        model: Any,
        make: Callable[[Tensor, Tensor], ResultT],
        index: np.ndarray,
        t_B: np.ndarray,
        blank: Iterable[tuple[int, int]],
    ) -> ResultT:
        """`make(index, t_B)` on the device. The first call of a key runs eagerly (it also warms everything up); the
        second is captured, on an index of as many numbers of each value as `blank` says, which must write nothing real.
        What is returned may be overwritten by the next call."""
        if self.captures(model):
            if key in self._seen and key not in self._graphs:
                # Graphs share their memory, since only one of them runs at a time.
                pool = next((other.graph.pool() for other in self._graphs.values()), None)
                parts = torch.cat([torch.full((size,), value) for size, value in blank])
                self._graphs[key] = _Graph(make, parts, len(t_B), self.device, pool)
            self._seen.add(key)
            if key in self._graphs:
                result: ResultT = self._graphs[key].replay(index, t_B)
                self._keep_pace()
                return result
        return cast(ResultT, self._eagerly(key, model, make, index, t_B, blank))

    def _keep_pace(self) -> None:
        """Let the host run a few calls ahead of the device and no further: the device never waits, and progress and
        interruption still mean something."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._under_way.append(event)
        if len(self._under_way) > CALLS_AHEAD:
            wait_for(self._under_way.popleft())

    def close(self) -> None:
        """Drop the graphs now, not at some later garbage collection."""
        self._graphs.clear()
        self._seen.clear()

    def release(self) -> None:
        """Give back what the graphs hold."""
        self.close()
        torch.cuda.empty_cache()


class _Graph:
    """A captured call: fixed shape, fixed buffers."""

    def __init__(self, make: Callable[[Tensor, Tensor], Any], index: Tensor, b: int, device: Any, pool: Any) -> None:
        # Indices and, as the same number of bytes, times: one transfer carries both.
        self.sent = torch.cat([index, torch.ones(b, dtype=torch.float64).view(torch.int64)]).to(device)
        own = self.sent[:-b], self.sent[-b:].view(torch.float64)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            make(*own)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        # Two things must not spoil the capture: what other threads do on the device, and the garbage collection of an
        # older graph.
        with _uncollected(), torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.result = make(*own)

    def replay(self, index: np.ndarray, t_B: np.ndarray) -> Any:
        """Run the captured call on another batch of its shape."""
        # From pageable memory these few kilobytes are staged by the driver, so the host does not wait for the device.
        self.sent.copy_(torch.from_numpy(np.concatenate([index, t_B.view(np.int64)])), non_blocking=True)
        self.graph.replay()
        return self.result


@dataclass(eq=False)
class Copy:
    """What a call gave, on the host once the event is over."""

    result: Tensor
    memory: Tensor | None = None  # pinned, of which the result is a part
    ready: Any = None

    def read(self) -> np.ndarray:
        """The numbers, which are overwritten once the memory is used again."""
        wait_for(self.ready)
        return np.asarray(self.result.numpy())


class Copies:
    """Results of calls, fetched while other calls run. Pinned memory (powers of two) and events are made once and used
    again, since each operation on a device gives other threads the interpreter."""

    def __init__(self) -> None:
        self._spare: dict[int, list[Copy]] = {}

    def of(self, result: Tensor) -> Copy:
        """Begin to fetch a result, which the next call may overwrite."""
        if result.device.type != "cuda":
            return Copy(result.cpu())
        size = 1 << (result.nbytes - 1).bit_length()
        spare = self._spare.setdefault(size, [])
        if not spare:
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            spare.append(Copy(result, memory, torch.cuda.Event()))  # type: ignore[no-untyped-call]
        copy = spare.pop()
        assert copy.memory is not None
        copy.result = copy.memory[: result.nbytes].view(result.dtype).view(result.shape)
        copy.result.copy_(result, non_blocking=True)
        copy.ready.record()
        return copy

    def keep(self, copy: Copy) -> None:
        """Use the memory again: nobody reads the copy any more."""
        if copy.memory is not None:
            self._spare[len(copy.memory)].append(copy)


def wait_for(event: Any) -> None:
    """Wait for an event of the device, if there is one. If it is over already, no other thread gets a turn."""
    if event is not None and not event.query():
        event.synchronize()


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection meanwhile."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
