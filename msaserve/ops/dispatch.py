"""Choosing an implementation. Each operator lists its own, best first; nothing is registered at run time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Impl:
    """One implementation of an operator.

    name: what `impl=` takes.
    target: "module:function", imported when first chosen, so that no backend is loaded before it is needed.
    why_not: called with the operator's own arguments; None if the implementation can serve them, else the reason.
    pays: called likewise, before `why_not`; whether `impl=None` should take it. A name takes it all the same.
    """

    name: str
    target: str
    why_not: Callable[..., str | None]
    pays: Callable[..., bool] = lambda *args, **kwargs: True

    def load(self) -> Callable[..., Any]:
        module, _, function = self.target.partition(":")
        loaded: Callable[..., Any] = getattr(import_module(module), function)
        return loaded


def always(*args: Any, **kwargs: Any) -> None:
    """`why_not` of an implementation that serves everything the operator's contract allows."""
    return None


def choose(op: str, impls: Sequence[Impl], impl: str | None, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """The implementation named `impl`, or for None the first one that works and pays for these arguments.

    Raises:
        ValueError: no implementation has that name, or the one named cannot serve these arguments.
    """
    if impl is None:
        for candidate in impls:
            # `pays` first: it is cheaper, and what does not pay need not be imported to be asked
            if candidate.pays(*args, **kwargs) and candidate.why_not(*args, **kwargs) is None:
                return candidate.load()
        reasons = "; ".join(f"{c.name}: {c.why_not(*args, **kwargs)}" for c in impls)
        raise ValueError(f"{op}: no implementation serves these arguments ({reasons})")
    for candidate in impls:
        if candidate.name == impl:
            reason = candidate.why_not(*args, **kwargs)
            if reason is not None:
                raise ValueError(f"{op}: impl={impl!r} cannot serve these arguments: {reason}")
            return candidate.load()
    raise ValueError(f"{op}: impl={impl!r} is unknown; there are {', '.join(c.name for c in impls)}")
