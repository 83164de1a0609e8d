"""Launches that are noted and repeated, with kernels that compute on the CPU through the addresses they are given."""

from __future__ import annotations

import ctypes
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from msaserve import ops
from msaserve.ops import tape
from msaserve.ops.tape import complete, new, scratch, taped

N = 4


@pytest.fixture(autouse=True)
def tapes_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tape, "_place", lambda tensor: 0)
    monkeypatch.setattr(tape, "_stream", lambda: 7)
    tape.clear()
    yield
    tape.clear()


def floats(at: Any) -> torch.Tensor:
    """N floats at an address, or of a tensor or a descriptor of one."""
    at = getattr(at, "base", at)
    if isinstance(at, torch.Tensor):
        return at.view(-1)[:N]
    return torch.frombuffer((ctypes.c_float * N).from_address(at), dtype=torch.float32)


@dataclass
class Kernel:
    """As much of Triton's JIT function as a tape uses."""

    compute: Callable[..., None]
    returns_compiled: bool = True
    pre_run_hooks: list[Any] = field(default_factory=list)
    plain: int = 0
    replayed: list[tuple[tuple[int, ...], int]] = field(default_factory=list)

    @property
    def arg_names(self) -> list[str]:
        return list(inspect.signature(self.compute).parameters)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, num_warps: int = 4, **options: Any) -> Any:
            self.plain += 1
            self.compute(*args, **options)
            return _Compiled(self) if self.returns_compiled else None

        return launch


@dataclass
class _Compiled:
    kernel: Kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def run(*args: Any, stream: int) -> None:
            self.kernel.replayed.append((grid, stream))
            self.kernel.compute(*args)

        return run


def _add(x: Any, y: Any, to: Any, gain: float, constant: int) -> None:
    floats(to).copy_(floats(x) + gain * floats(y) + constant)


def _count(to: Any, x: Any) -> None:
    floats(to).add_(floats(x))


def operator(
    x: torch.Tensor, y: torch.Tensor, out: torch.Tensor | None, *kernels: Kernel, gain: float = 2.0, inner: Any = None
) -> torch.Tensor:
    """out = x + gain * y + 1 + x, by way of scratch memory, one piece of it counted up from 0."""
    tensors = (x, y, out)
    key = tape.key("add", tensors, gain)
    replayed = tape.replay(key, tensors)
    if replayed is not None:
        return replayed[0]
    with tape.recording(key, tensors) as recorder:
        add, count = kernels
        if out is None:
            out = new(tuple(x.shape), x.dtype, x.device)
        counted, between = scratch(x.device, ((N,), torch.float32), zeros=[((N,), torch.float32)])
        taped(add)[(3,)](x, y, between, gain, constant=1, num_warps=2)
        taped(count)[(1, 2)](counted, x)
        taped(add)[(1, 1, 1)](between, counted, out, 1.0, constant=0)
        if inner is not None:
            inner()
        complete()
        if recorder is not None:
            recorder.returns(out)
    return out


def expected(x: torch.Tensor, y: torch.Tensor, gain: float = 2.0) -> torch.Tensor:
    return x + gain * y + 1 + x


def kernels() -> tuple[Kernel, Kernel]:
    return Kernel(_add), Kernel(_count)


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(N), torch.randn(N)


def test_a_second_call_is_replayed_on_its_own_tensors() -> None:
    add, count = kernels()
    first = operator(*pair(), None, add, count)
    kept = first.clone()
    for _ in range(3):
        x, y = pair()
        torch.testing.assert_close(operator(x, y, None, add, count), expected(x, y))
    assert (add.plain, count.plain) == (2, 1)
    assert add.replayed == [((3, 1, 1), 7), ((1, 1, 1), 7)] * 3
    assert count.replayed == [((1, 2, 1), 7)] * 3
    assert torch.equal(first, kept), "a replay must not write to what an earlier call returned"


def test_out_is_written_and_returned() -> None:
    add, count = kernels()
    operator(*pair(), torch.empty(N), add, count)
    x, y = pair()
    out = torch.empty(N)
    assert operator(x, y, out, add, count) is out
    assert add.plain == 2
    torch.testing.assert_close(out, expected(x, y))


def test_what_a_launch_follows_from_is_in_the_key() -> None:
    x, y = pair()
    keys = [
        tape.key("add", (x, y, None), 2.0),
        tape.key("sub", (x, y, None), 2.0),
        tape.key("add", (x, y, None), 3.0),
        tape.key("add", (x, y, y), 2.0),
        tape.key("add", (x, torch.randn(N + 1), None), 2.0),
        tape.key("add", (x, torch.randn(2 * N)[::2], None), 2.0),
        tape.key("add", (x, y.int(), None), 2.0),
        tape.key("add", (x, torch.randn(N + 1)[1:], None), 2.0),
    ]
    assert len(set(keys)) == len(keys)
    assert tape.key("add", (x + 1, y + 1, None), 2.0) == keys[0]


def test_the_current_device_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = pair()
    on_first = tape.key("add", (x, y))
    monkeypatch.setattr(tape, "_place", lambda tensor: 1)
    assert tape.key("add", (x, y)) != on_first
    monkeypatch.setattr(tape, "_place", lambda tensor: None)
    assert tape.key("add", (x, y)) is None


def check_never_replayed(run: Callable[[], object], kernel: Kernel) -> None:
    run()
    plain = kernel.plain
    run()
    assert kernel.plain == 2 * plain
    assert not kernel.replayed


def test_a_call_that_does_not_say_that_it_is_complete_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "complete", lambda: None)
    add, count = kernels()
    check_never_replayed(lambda: operator(*pair(), None, add, count), add)


def test_a_kernel_that_returns_nothing_is_not_replayed() -> None:
    add, count = Kernel(_add, returns_compiled=False), Kernel(_count)
    check_never_replayed(lambda: operator(*pair(), None, add, count), add)


def test_a_kernel_with_hooks_of_its_own_is_not_replayed() -> None:
    add, count = Kernel(_add), Kernel(_count, pre_run_hooks=[print])
    check_never_replayed(lambda: operator(*pair(), None, add, count), add)


def test_a_tensor_from_elsewhere_is_not_replayed() -> None:
    add, count = kernels()
    other = torch.ones(N)
    check_never_replayed(
        lambda: operator(*pair(), None, add, count, inner=lambda: taped(count)[(1,)](other, other)), add
    )


def test_inputs_at_one_address_are_not_replayed() -> None:
    add, count = kernels()
    x = torch.randn(N)
    check_never_replayed(lambda: operator(x, x, None, add, count), add)


def test_a_call_that_fails_leaves_nothing() -> None:
    add, count = kernels()

    def fail() -> None:
        raise RuntimeError("no")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            operator(*pair(), None, add, count, inner=fail)
    operator(*pair(), None, add, count)
    operator(*pair(), None, add, count)
    assert add.plain == 6
    assert len(add.replayed) == 2


@pytest.mark.parametrize("how", ["both", "the second alone"])
def test_operators_inside_another_are_part_of_it_or_on_their_own(how: str) -> None:
    add, count = kernels()
    other = torch.ones(N)

    def spoil() -> None:
        if how != "both":
            taped(count)[(1,)](other, other)

    def twice(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors = (x, y)
        key = tape.key("twice", tensors)
        replayed = tape.replay(key, tensors)
        if replayed is not None:
            return replayed
        with tape.recording(key, tensors) as recorder:
            between = operator(x, y, None, add, count, inner=spoil)
            out = operator(between, y, None, add, count, gain=3.0)
            complete()
            assert recorder is not None
            recorder.returns(out, between)
        return out, between

    twice(*pair())
    assert add.plain == 4
    x, y = pair()
    out, between = twice(x, y)
    torch.testing.assert_close(between, expected(x, y))
    torch.testing.assert_close(out, expected(between, y, 3.0))
    assert add.plain == (4 if how == "both" else 6)


def test_an_operator_inside_that_is_not_complete_spoils_the_outer(monkeypatch: pytest.MonkeyPatch) -> None:
    add, count = kernels()

    def outer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        tensors = (x, y)
        key = tape.key("outer", tensors)
        assert tape.replay(key, tensors) is None
        with tape.recording(key, tensors) as recorder:
            with monkeypatch.context() as patch:
                patch.setitem(globals(), "complete", lambda: None)
                out = operator(x, y, None, add, count)
            complete()
            assert recorder is not None
            recorder.returns(out)
        return out

    outer(*pair())
    outer(*pair())
    assert not tape._tapes


def test_another_thread_is_not_recorded() -> None:
    add, count = kernels()
    other = kernels()
    x, y = pair()

    def beside() -> None:
        thread = threading.Thread(target=lambda: operator(x, y, None, *other, gain=5.0))
        thread.start()
        thread.join()

    operator(*pair(), None, add, count, inner=beside)
    x, y = pair()
    torch.testing.assert_close(operator(x, y, None, add, count), expected(x, y))
    torch.testing.assert_close(operator(x, y, None, *other, gain=5.0), expected(x, y, 5.0))
    assert (add.plain, other[0].plain) == (2, 2)


@dataclass
class Descriptor:
    base: Any
    block_shape: list[int]
    layout: str


@pytest.mark.parametrize("of_input", [True, False])
def test_a_descriptor_is_made_anew_of_the_input(of_input: bool) -> None:
    seen: list[Any] = []

    def _read(described: Any, to: Any) -> None:
        seen.append(described)
        floats(to).copy_(floats(described))

    kernel = Kernel(_read)

    def copy(x: torch.Tensor) -> torch.Tensor:
        tensors = (x,)
        key = tape.key("copy", tensors)
        replayed = tape.replay(key, tensors)
        if replayed is not None:
            return replayed[0]
        with tape.recording(key, tensors) as recorder:
            out = new((N,), torch.float32, x.device)
            between = scratch(x.device, ((N,), torch.float32))[0].copy_(x)
            taped(kernel)[(1,)](Descriptor(x if of_input else between, [N], "layout"), out)
            complete()
            assert recorder is not None
            recorder.returns(out)
        return out

    first = copy(torch.randn(N))
    x = torch.randn(N)
    torch.testing.assert_close(copy(x), x)
    assert kernel.plain == (1 if of_input else 2)
    assert not torch.equal(first, x)
    assert seen[-1] is not seen[0]
    assert (seen[-1].block_shape, seen[-1].layout) == ([N], "layout")


def test_scratch_memory_is_free_after_the_last_launch_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    add, count = kernels()
    made: list[weakref.ref[torch.Tensor]] = []
    empty = torch.empty

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        x = empty(*args, **options)
        made.append(weakref.ref(x))
        return x

    alive: list[int] = []

    def _look(x: Any) -> None:
        alive.append(sum(ref() is not None for ref in made))

    look = Kernel(_look)

    def then() -> None:
        taped(look)[(1,)](scratch(torch.device("cpu"), ((N,), torch.float32))[0])

    operator(*pair(), None, add, count, inner=then)
    monkeypatch.setattr(torch, "empty", noted)
    operator(*pair(), None, add, count, inner=then)
    assert look.plain == 1
    assert len(made) == 3
    assert alive[-1] == 2, "the result and the last scratch memory; the first is gone"


def test_pieces_of_scratch_memory() -> None:
    wanted = [((3,), torch.float32), ((2, 5), torch.int64), ((), torch.int8)]
    zeros = [((7,), torch.int32), ((1,), torch.int32)]
    pieces = scratch(torch.device("cpu"), *wanted, zeros=zeros)
    assert [(tuple(x.shape), x.dtype) for x in pieces] == [*zeros, *wanted]
    assert all(x.is_contiguous() and not x.storage_offset() * x.itemsize % 256 for x in pieces)
    assert all((x == 0).all() for x in pieces[:2])
    for i, x in enumerate(pieces):
        x.fill_(i + 1)
    assert all((x == i + 1).all() for i, x in enumerate(pieces)), "they do not overlap"


def test_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "MAX_TAPES", 2)
    add, count = kernels()
    for gain in (1.0, 2.0, 3.0, 3.0, 2.0, 1.0):
        operator(*pair(), None, add, count, gain=gain)
    assert len(add.replayed) == 4
    assert len(tape._tapes) == 2


def test_triton_launches_a_compiled_kernel_as_tapes_do() -> None:
    """What `kernel[grid](…)` returns takes all arguments by place, and the stream by name; kernels name theirs."""
    compiler = pytest.importorskip("triton.compiler")
    launched: list[tuple[Any, ...]] = []
    compiled = SimpleNamespace(
        _init_handles=lambda: None,
        launch_metadata=lambda grid, stream, *args: None,
        run=lambda *args: launched.append(args),
        function="function",
        packed_metadata="packed",
    )
    compiler.CompiledKernel.__getitem__(compiled, (1, 2, 3))("x", 5, stream=7)
    assert launched[0][:5] == (1, 2, 3, 7, "function")
    assert launched[0][-2:] == ("x", 5)
    from msaserve.ops.combine.triton import _combine_kernel

    kernel = getattr(_combine_kernel, "fn", _combine_kernel)
    names = list(inspect.signature(getattr(kernel, "fn", kernel)).parameters)
    assert names[:3] == ["partial_out", "partial_lse", "part_counts"]
    if hasattr(_combine_kernel, "pre_run_hooks"):
        assert _combine_kernel.arg_names == names


def test_tensors_on_a_cpu_are_not_taped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x = torch.randn(3, 2, 4)
    cache = torch.randn(2, 4, 1, 4)
    ids, table = torch.zeros(1, 3, 1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    lens, cu = torch.tensor([3], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    assert tape.key("sparse_attend", (x,)) is None
    ops.sparse_attend(x, cache, cache, ids, table, lens, cu, max_query_len=3)
    assert not tape._tapes
