"""Numbers for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

if TYPE_CHECKING:
    from relaylm.serve.rows import Made

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class Metrics:
    """What a server has done since it started. A rate of tokens is Prometheus' `rate(relaylm_tokens_total[1m])`."""

    def __init__(self) -> None:
        disable_created_metrics()
        registry = self.registry = CollectorRegistry()
        self.in_flight = Gauge("relaylm_rows_in_flight", "Rows with a place", registry=registry)
        self.waiting = Gauge("relaylm_rows_waiting", "Rows that wait for a place", registry=registry)
        labels = ("family", "model", "shape")
        self.calls = Counter("relaylm_calls", "Network calls", labels, registry=registry)
        self.seconds = Counter("relaylm_call_seconds", "Time in network calls", labels, registry=registry)
        self.waited = Counter("relaylm_call_wait_seconds", "Of it waiting for the device", labels, registry=registry)
        self.rows = Counter("relaylm_call_rows", "Rows of network calls", labels, registry=registry)
        self.padded = Counter("relaylm_call_padded_rows", "Empty places of network calls", labels, registry=registry)
        self.tokens = Counter("relaylm_tokens", "Tokens written", ("family",), registry=registry)
        self.queued = Histogram("relaylm_queued_seconds", "Wait", buckets=SECONDS, registry=registry)
        self.computing = Histogram("relaylm_computing_seconds", "After it", buckets=SECONDS, registry=registry)
        self.requests = Counter("relaylm_requests", "Requests written to the end", registry=registry)
        self.found: dict[tuple[str, ...], list[Counter]] = {}  # by labels: looking one up takes longer than counting

    def call(self, made: Made) -> None:
        """Count a call."""
        labels = (made.family, made.model, made.shape)
        if labels not in self.found:
            each = (self.calls, self.seconds, self.waited, self.rows, self.padded)
            self.found[labels] = [counter.labels(*labels) for counter in each] + [self.tokens.labels(made.family)]
        amounts = (1, made.seconds, made.waited, made.rows, made.padded, made.tokens)
        for counter, amount in zip(self.found[labels], amounts, strict=True):
            counter.inc(amount)

    def request(self, about: dict[str, Any]) -> None:
        """Count a request that was answered."""
        self.requests.inc()
        self.queued.observe(about["seconds_queued"])
        self.computing.observe(about["seconds_computing"])

    def text(self, in_flight: int, waiting: int) -> bytes:
        """Prometheus' format."""
        self.in_flight.set(in_flight)
        self.waiting.set(waiting)
        return generate_latest(self.registry)
