"""A stand-in for `relaylm.cluster.Cluster` without Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from relaylm.models.family import Family
from relaylm.search.tree import Stopped


class Local:
    """Tasks one after the other, in this process."""

    number = 1

    def __init__(self, family: Family) -> None:
        self.family = family

    def map(
        self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], stop: Callable[[], bool] | None = None
    ) -> Iterator[tuple[int, Any]]:
        """(index, function(family, *task)) for each task."""
        for index, task in enumerate(tasks):
            if stop is not None and stop():
                raise Stopped
            yield index, function(self.family, *task)
