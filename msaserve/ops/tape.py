"""Launches noted once and repeated: what an operator launches follows from its arguments' shapes alone, so another call
of the same shapes needs no checks, no choice of an implementation and little of Triton's work for a launch.

An operator asks `replay` first, and does what it does inside `recording`. An implementation takes part by allocating
with `new` and `scratch`, launching with `taped(kernel)[grid](…)`, computing with nothing else, and saying `complete()`.
Of Triton only `kernel[grid](…)`, what it returns (a compiled kernel, which is launched the same way) and the names of
its arguments are used. Where that returns nothing, as in the interpreter, nothing is noted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

MAX_TAPES = 512
"""Kept at once; the oldest go first."""
ALIGN = 256
"""Bytes: where pieces of scratch memory begin."""

Shape = tuple[int, ...]


class _Launch(NamedTuple):
    run: Callable[..., object]
    """Takes all arguments by place, and `stream`."""
    args: tuple[Any, ...]
    pointers: tuple[tuple[int, int, int], ...]
    """(place, source, offset): arguments that lie at other addresses in each call."""
    descriptors: tuple[tuple[int, int, type, dict[str, Any]], ...]
    """(place, source, type, fields but for the tensor): TMA descriptors of inputs."""


class _Step(NamedTuple):
    """An allocation, which is the next source, and the launches that follow."""

    shape: Shape
    dtype: torch.dtype
    zeros: int
    """Leading bytes to set to 0."""
    launches: list[_Launch]


class _Tape(NamedTuple):
    steps: tuple[tuple[_Step, tuple[int, ...]], ...]
    """Each with the allocations that nothing needs from there on."""
    returns: tuple[int, ...]


_tapes: dict[Hashable, _Tape] = {}
_lock = threading.Lock()
_local = threading.local()


def _place(tensor: torch.Tensor) -> int | None:
    """The current CUDA device, None for tensors elsewhere. Kernels are loaded and launched on the current device."""
    return torch.cuda.current_device() if tensor.is_cuda else None


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def clear() -> None:
    """Forget all tapes: for whoever changes a constant that kernels are launched with."""
    with _lock:
        _tapes.clear()


def key(op: str, tensors: Sequence[torch.Tensor | None], *options: Hashable) -> Hashable | None:
    """What `op` launches for these arguments follows from this; None where nothing is taped."""
    first = tensors[0]
    if first is None or _outer() is not None:
        return None
    place = _place(first)
    if place is None:
        return None
    return (
        op,
        place,
        options,
        *[None if x is None else (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15) for x in tensors],
    )


def replay(key: Hashable | None, tensors: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...] | None:
    """Launch what a call of this key launched, for these tensors, and return what it returned; None if none did."""
    tape = _tapes.get(key) if key is not None else None
    if tape is None:
        return None
    sources = list(tensors)
    pointers = [0 if x is None else x.data_ptr() for x in tensors]
    first = tensors[0]
    assert first is not None
    device, stream = first.device, _stream()
    for (shape, dtype, zeros, launches), dead in tape.steps:
        for source in dead:
            sources[source] = None
        made = torch.empty(shape, dtype=dtype, device=device)
        if zeros:
            made[:zeros].zero_()
        sources.append(made)
        pointers.append(made.data_ptr())
        for run, template, patches, descriptors in launches:
            args = list(template)
            for at, source, offset in patches:
                args[at] = pointers[source] + offset
            for at, source, kind, fields in descriptors:
                described: Any = object.__new__(kind)  # its checks were passed by the one that was noted
                described.__dict__.update(fields)
                described.base = sources[source]
                args[at] = described
            run(*args, stream=stream)
    return tuple(sources[source] for source in tape.returns)  # type: ignore[misc]


class _Recorder:
    """Notes the launches of one call."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self.is_complete = False
        self.is_spoiled = False
        self._num_inputs = len(tensors)
        # held until the end: nothing else may come to lie where they do
        self._sources: list[torch.Tensor | None] = list(tensors)
        self._inputs: dict[int, int] = {}
        for source, tensor in enumerate(tensors):
            if tensor is not None:
                address = tensor.data_ptr()
                # of two that begin at one address an argument that does could be either
                self._inputs[address] = -1 if address in self._inputs else source
        self._steps: list[_Step] = []
        self._last_step: dict[int, int] = {}
        self._returns: tuple[int, ...] = ()

    def allocate(self, made: torch.Tensor, zeros: int) -> None:
        self._steps.append(_Step(tuple(made.shape), made.dtype, zeros, []))
        self._sources.append(made)

    def note(self, kernel: Any, grid: Shape, compiled: Any, args: Sequence[Any], options: dict[str, Any]) -> None:
        rest = kernel.arg_names[len(args) :]
        if compiled is None or not self._steps or kernel.pre_run_hooks or not options.keys() >= set(rest):
            self.is_spoiled = True
            return
        template = [*args, *(options[name] for name in rest)]
        pointers, descriptors = [], []
        for at, arg in enumerate(template):
            if isinstance(arg, torch.Tensor):
                pointers.append((at, *self._source(arg)))
                template[at] = None
            elif hasattr(arg, "block_shape"):
                source, offset = self._source(arg.base)
                self.is_spoiled |= offset != 0 or source >= self._num_inputs
                descriptors.append((at, source, type(arg), {**vars(arg), "base": None}))
                template[at] = None
        run = compiled[(*grid, 1, 1)[:3]]
        self._steps[-1].launches.append(_Launch(run, tuple(template), tuple(pointers), tuple(descriptors)))

    def _source(self, tensor: torch.Tensor) -> tuple[int, int]:
        """(source, offset) of a tensor that is an input, or lies in what was allocated."""
        address = tensor.data_ptr()
        found, offset = self._inputs.get(address, -1), 0
        for source in range(self._num_inputs, len(self._sources)):
            made = self._sources[source]
            assert made is not None
            if made.data_ptr() <= address < made.data_ptr() + made.numel() * made.itemsize:
                found, offset = source, address - made.data_ptr()
        self.is_spoiled |= found < 0
        self._last_step[found] = len(self._steps) - 1
        return found, offset

    def returns(self, *results: torch.Tensor) -> None:
        """What the call returns: inputs, or what it made with `new`."""
        found = [next((s for s, x in enumerate(self._sources) if x is result), -1) for result in results]
        self._returns = tuple(found)
        self.is_spoiled |= min(found) < 0

    def tape(self) -> _Tape | None:
        if self.is_spoiled or not self.is_complete or not any(step.launches for step in self._steps):
            return None
        dead: list[list[int]] = [[] for _ in self._steps]
        for number in range(len(self._steps)):
            source = self._num_inputs + number
            end = self._last_step.get(source, number) + 1
            if source not in self._returns and end < len(self._steps):
                dead[end].append(source)
        return _Tape(tuple(zip(self._steps, map(tuple, dead), strict=True)), self._returns)


def _outer() -> _Recorder | None:
    """The recorder that what happens in this thread is noted by; a spoiled one no longer matters."""
    recorder: _Recorder | None = getattr(_local, "recorder", None)
    return None if recorder is None or recorder.is_spoiled else recorder


@contextmanager
def recording(key: Hashable | None, tensors: Sequence[torch.Tensor | None]) -> Iterator[_Recorder | None]:
    """Note what is launched inside, if it says that it is complete, for `replay`. Inside another one that one notes it.

    Gives what must be told the call's results, by `returns`; None where there is nothing to tell.
    """
    outer = _outer()
    if outer is not None:
        try:
            yield None
        finally:
            outer.is_spoiled |= not outer.is_complete
            outer.is_complete = False
        return
    if key is None:
        yield None
        return
    spoiled = getattr(_local, "recorder", None)
    recorder = _local.recorder = _Recorder(tensors)
    try:
        yield recorder
    finally:
        _local.recorder = spoiled
    tape = recorder.tape()
    if tape is not None:
        with _lock:
            while len(_tapes) >= MAX_TAPES:
                del _tapes[next(iter(_tapes))]
            _tapes[key] = tape


def complete() -> None:
    """An implementation says that it has computed with nothing but taped launches, up to here."""
    recorder: _Recorder | None = getattr(_local, "recorder", None)
    if recorder is not None:
        recorder.is_complete = True


def _allocate(shape: Shape, dtype: torch.dtype, device: torch.device, zeros: int = 0) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype, device=device)
    if zeros:
        made[:zeros].zero_()
    recorder: _Recorder | None = getattr(_local, "recorder", None)
    if recorder is not None:
        recorder.allocate(made, zeros)
    return made


def new(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor that outlives the call."""
    return _allocate(shape, dtype, device)


def scratch(
    device: torch.device, *wanted: tuple[Shape, torch.dtype], zeros: Sequence[tuple[Shape, torch.dtype]] = ()
) -> list[torch.Tensor]:
    """Tensors out of one allocation, those of `zeros` first and set to 0, the others uninitialised.

    A call that launches with a tensor of no elements, which has no address, is not taped.
    """
    places, end, zeros_end = [], 0, 0
    for shape, dtype in (*zeros, *wanted):
        size = dtype.itemsize
        for n in shape:
            size *= n
        places.append((end, size, shape, dtype))
        end += -(-size // ALIGN) * ALIGN
        if len(places) == len(zeros):
            zeros_end = end
    made = _allocate((max(end, 1),), torch.uint8, device, zeros_end)
    return [made[at : at + size].view(dtype).view(shape) for at, size, shape, dtype in places]


class taped:  # noqa: N801 - reads as a function
    """A Triton kernel whose launches are noted while an operator records."""

    __slots__ = ("kernel",)

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Shape) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            compiled = self.kernel[grid](*args, **options)
            recorder: _Recorder | None = getattr(_local, "recorder", None)
            if recorder is not None:
                recorder.note(self.kernel, grid, compiled, args, options)

        return launch
