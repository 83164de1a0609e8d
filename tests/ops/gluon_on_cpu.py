"""Runs Gluon kernels on a CPU, for their logic: barriers' phases, buffers that come and go, indices, masks.

A kernel's functions are executed as plain Python. Its warp-specialised partitions are threads; copies by TMA arrive
late, with NaN in their buffer until then, and a product reads its operands when it is waited for, so that a buffer
handed on too early is seen. Layouts, proxies and what hardware rounds are not modelled.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from threading import Condition, Thread
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

TORCH = {
    gl.float32: torch.float32,
    gl.float16: torch.float16,
    gl.bfloat16: torch.bfloat16,
    gl.float8e4nv: torch.float8_e4m3fn,
    gl.int32: torch.int32,
    gl.int64: torch.int64,
}
GLUON = {dtype: name for name, dtype in TORCH.items()}
SECONDS = 20.0
"""Until a wait that does not end is an error."""


def pause() -> None:
    """Now for nothing, now for long, so that each partition is sometimes the slow one."""
    time.sleep(random.choice((0, 0, 2e-3)))


class Tensor:
    """Values in registers. Numbers stay Python's."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:
        return Tensor(self.values.view(TORCH[dtype]) if bitcast else self.values.to(TORCH[dtype]))

    def __getitem__(self, at: Any) -> Tensor:
        return Tensor(self.values[at])


def _bare(x: Any) -> Any:
    return x.values if isinstance(x, Tensor) else x


class Number(int):
    """An int32 or int64 of a kernel."""

    def to(self, dtype: Any) -> Number:
        return self


def _add_operators() -> None:
    def of_tensor(name: str) -> Callable[..., Tensor]:
        return lambda x, y: Tensor(getattr(x.values, name)(_bare(y)))

    def of_number(name: str) -> Callable[..., Any]:
        def compute(x: Number, y: Any) -> Any:
            found = getattr(int, name)(x, y)
            return found if found is NotImplemented else Number(found)

        return compute

    names = ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "and", "or", "rshift", "lshift")
    for name in (f"__{name}__" for name in names):
        setattr(Tensor, name, of_tensor(name))
        setattr(Number, name, of_number(name))
    for name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__"):
        setattr(Tensor, name, of_tensor(name))


_add_operators()


class Pointer:
    def __init__(self, tensor: torch.Tensor, offset: Any = 0) -> None:
        size = tensor.untyped_storage().nbytes() // tensor.itemsize
        self.memory = tensor.as_strided((size - tensor.storage_offset(),), (1,))
        self.tensor, self.offset = tensor, offset
        self.dtype = SimpleNamespace(element_ty=GLUON[tensor.dtype])

    def __add__(self, step: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + step)


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.dtype = values, GLUON[values.dtype]

    def index(self, i: int) -> Shared:
        return Shared(self.values[i])

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.values.view(shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.values.permute(order))

    def slice(self, start: int, length: int, dim: int) -> Shared:
        return Shared(self.values.narrow(dim, start, length))

    def load(self, layout: object) -> Tensor:
        return Tensor(self.values.clone())

    def store(self, x: Tensor) -> None:
        assert x.values.dtype == self.values.dtype
        self.values.copy_(x.values)


class Barrier:
    def __init__(self) -> None:
        self.changed, self.count, self.pending, self.bytes, self.phase = Condition(), 0, 0, 0, 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, arrivals: int, byte_count: int) -> None:
        with self.changed:
            self.pending -= arrivals
            self.bytes += byte_count
            assert self.pending >= 0, "a barrier with more arrivals than it waits for"
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase & 1 != parity, SECONDS), "a wait that does not end"


class Descriptor:
    def __init__(self, tensor: torch.Tensor, box: tuple[int, ...]) -> None:
        self.tensor, self.box, self.layout, self.dtype = tensor, box, None, GLUON[tensor.dtype]


def _tma_load(source: Descriptor, at: list[int], barrier: Barrier, to: Shared) -> None:
    to.values.copy_(torch.full_like(to.values, torch.nan, dtype=torch.float32))
    box = source.tensor[tuple(slice(i, i + n) for i, n in zip(at, source.box, strict=True))]

    def arrive() -> None:
        pause()
        to.values.copy_(box)
        barrier.arrive(0, -box.numel() * box.itemsize)

    Thread(target=arrive, daemon=True).start()


def _load(pointer: Pointer, mask: Tensor | None = None, other: float = 0.0) -> Any:
    if not isinstance(pointer.offset, Tensor):
        return Number(pointer.memory[pointer.offset])
    offset = pointer.offset.values
    if mask is None:
        return Tensor(pointer.memory[offset])
    seen = mask.values.expand(offset.shape)
    values = pointer.memory[offset.masked_fill(~seen, 0)]
    return Tensor(torch.where(seen, values.float(), other).to(values.dtype))


def _store(pointer: Pointer, x: Tensor) -> None:
    pointer.memory[pointer.offset.values] = x.values


def _where(condition: Any, x: Any, y: Any) -> Any:
    if not isinstance(condition, Tensor):
        return x if condition else y
    return Tensor(torch.where(condition.values, _bare(x), _bare(y)))


def _choose(numbers: Callable[..., Any], tensors: Callable[..., torch.Tensor]) -> Callable[[Any, Any], Any]:
    def chosen(x: Any, y: Any) -> Any:
        if not isinstance(x, Tensor) and not isinstance(y, Tensor):
            return numbers(x, y)
        return Tensor(tensors(*(torch.as_tensor(_bare(one)) for one in (x, y))))

    return chosen


def _expand(x: Tensor, shape: list[int]) -> torch.Tensor:
    return x.values.expand(shape)


class Product:
    """Asynchronous: its operands are read when it is waited for."""

    def __init__(self, q: Tensor, k: Shared) -> None:
        self.compute = lambda: Tensor(q.values.float() @ k.values.float())


def _wait(count: int, deps: tuple[Product]) -> Tensor:
    pause()
    return deps[0].compute()


class Kernel:
    """kernel[grid](...) of one of a module's Gluon kernels; the module's other functions are called as plain ones."""

    def __init__(self, module: ModuleType, name: str) -> None:
        self._globals = {**vars(module), **self._language()}
        for other, function in vars(module).items():
            if isinstance(function, gl.constexpr):
                self._globals[other] = function.value
            elif isinstance(function, JITFunction):
                code = function.fn
                self._globals[other] = FunctionType(code.__code__, self._globals, other, code.__defaults__)
        self._run = self._globals[name]

    def _language(self) -> dict[str, Any]:
        program = self._program = [0, 0]
        real = vars(gl)
        language = SimpleNamespace(**{name: real[name] for name in real if not name.startswith("__")})
        language.program_id = lambda axis: Number(program[axis])
        language.load, language.store = _load, _store
        language.static_range = range
        language.where = _where
        language.minimum = _choose(lambda x, y: Number(min(x, y)), torch.minimum)
        language.maximum = _choose(lambda x, y: Number(max(x, y)), torch.fmax)
        language.cdiv = lambda x, y: -(-x // y)
        language.abs = lambda x: Tensor(x.values.abs())
        # As on a card, of a NaN and a number the number.
        language.max = lambda x, axis: Tensor(x.values.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(axis))
        language.arange = lambda start, end, layout: Tensor(torch.arange(start, end, dtype=torch.int32))
        language.full = lambda shape, x, dtype, layout: Tensor(torch.full(shape, x, dtype=TORCH[dtype]))
        language.zeros = lambda shape, dtype, layout: Tensor(torch.zeros(shape, dtype=TORCH[dtype]))
        language.convert_layout = lambda x, layout: x
        language.allocate_shared_memory = self._allocate
        language.warp_specialize = self._specialize
        return {
            "gl": language,
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: None,
                init=lambda barrier, count: barrier.init(count),
                expect=lambda barrier, byte_count: barrier.arrive(1, byte_count),
                arrive=lambda barrier, count: barrier.arrive(count, 0),
                wait=lambda barrier, parity: barrier.wait(parity),
            ),
            "tma_load": _tma_load,
            "fence_async_shared": lambda: None,
            "warpgroup_mma": lambda q, k, acc, use_acc, is_async: Product(q, k),
            "warpgroup_mma_wait": _wait,
        }

    def _allocate(self, dtype: Any, shape: list[int], layout: object) -> Any:
        if dtype == gl.int64:
            barriers = [Barrier() for _ in range(shape[0])]
            return SimpleNamespace(index=lambda i: barriers[i])
        return Shared(torch.full(shape, torch.nan).to(TORCH[dtype]))

    def _specialize(self, parts: list[tuple[Callable[..., None], tuple[Any, ...]]], *_: object) -> None:
        failures: list[Exception] = []

        def run(function: Callable[..., None], args: tuple[Any, ...]) -> None:
            try:
                function(*args)
            except Exception as failure:
                failures.append(failure)

        threads = [Thread(target=run, args=part, daemon=True) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * SECONDS)
        if failures:
            raise failures[0]
        assert not any(thread.is_alive() for thread in threads)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            given = [Pointer(x) if isinstance(x, torch.Tensor) else Number(x) if type(x) is int else x for x in args]
            for x in range(grid[0]):
                for y in range(grid[1] if len(grid) > 1 else 1):
                    self._program[:] = x, y
                    self._run(*given, **constants)

        return launch
