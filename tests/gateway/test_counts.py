"""Counters and histograms say what prometheus-client's own say."""

from __future__ import annotations

import random
import re

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from msaserve.observe.counts import Counts

BOUNDS = (0.001, 0.25, 1, 2.5, 10_000)


def lines(registry: CollectorRegistry) -> list[str]:
    """The text, without the times at which series began."""
    return re.sub(r"(_created.*) \S+", r"\1 0", generate_latest(registry).decode()).splitlines()


def test_the_same_text() -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    their_counter = Counter("a:b", 'What "it" is\n.', ["x", "y"], registry=theirs)
    their_histogram = Histogram("a:c_seconds", "Seconds.", ["x"], buckets=BOUNDS, registry=theirs)
    counts = Counts(ours)
    counter = counts.counter("a:b", 'What "it" is\n.', ["x", "y"])
    histogram = counts.histogram("a:c_seconds", "Seconds.", ["x"], BOUNDS)
    assert lines(ours) == lines(theirs)  # without a series
    their_histogram.labels("none yet")
    histogram.labels("none yet")
    draw = random.Random(0)
    for _ in range(500):
        labels = draw.choice(["/v1/x", 'a "quoted" \\ one', "größer"]), draw.choice(["200", "499"])
        their_counter.labels(*labels).inc()
        counter.labels(*labels).value += 1
        value = draw.choice([*BOUNDS, 0, draw.expovariate(1), draw.expovariate(1e-4)])
        times = draw.choice([1, 1, 3])
        for _ in range(times):
            their_histogram.labels(labels[0]).observe(value)
        histogram.labels(labels[0]).observe(value, times)
    for one, other in zip(lines(ours), lines(theirs), strict=True):
        (name, value), (other_name, other_value) = one.rsplit(" ", 1), other.rsplit(" ", 1)
        if "_sum" in name:
            assert (name, float(value)) == (other_name, pytest.approx(float(other_value)))
        else:
            assert one == other
