"""Numbers of several processes as one's: what a scrape of one of them has to say for all."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

_HIGHEST = frozenset({"smg_worker_cb_state", "smg_worker_cb_consecutive_failures", "smg_kv_index_blocks"})
"""Families in which processes say different things of the same: the highest is shown. All others are added up."""

Key = tuple[str, tuple[tuple[str, str], ...]]


class Family(msgspec.Struct, array_like=True):
    """The samples of one metric in one process."""

    name: str
    text: str
    kind: str
    """As Prometheus names it: counter, gauge, histogram."""
    samples: list[tuple[str, dict[str, str], float]]
    """(name, labels, value)"""


def merged(own: Iterable[Family], others: Iterable[Iterable[Family]]) -> list[Family]:
    """One process's numbers and those of others, in the order of the first that has them."""
    families: dict[str, tuple[Family, dict[Key, float]]] = {}
    for process in (own, *others):
        for family in process:
            _, values = families.setdefault(family.name, (family, {}))
            for name, labels, value in family.samples:
                key = name, tuple(labels.items())
                values[key] = _both(family.name, name, values[key], value) if key in values else value
    return [
        Family(family.name, family.text, family.kind, [(name, dict(labels), v) for (name, labels), v in values.items()])
        for family, values in families.values()
    ]


def lasting(families: Iterable[Family]) -> list[Family]:
    """What remains true of a process that has ended: what it counted, not what it held."""
    return [family for family in families if family.kind in ("counter", "histogram")]


def _both(family: str, sample: str, a: float, b: float) -> float:
    if sample.endswith("_created"):
        return min(a, b)
    return max(a, b) if family in _HIGHEST else a + b
