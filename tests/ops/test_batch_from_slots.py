"""batch_from_slots: a table of slots as SGLang keeps one, against plain PyTorch, in the interpreter or on a card."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from msaserve import ops
from msaserve.ops import tape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 128
IMPLS = pytest.mark.parametrize("impl", ["reference", "triton"])
LENS = [2300, 1, 0, 128, 129, 70_000]
MAX_TOKENS = 70_100
"""No whole number of blocks; more than a program's."""


def table_of(seq_lens: list[int], page_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots [R, MAX_TOKENS], rows [B]): shuffled pages, −1 where no token is."""
    generator = torch.Generator().manual_seed(0)
    num_rows = len(seq_lens) + 3
    slots = torch.full((num_rows, MAX_TOKENS), -1, dtype=dtype)
    free = iter((torch.randperm(sum(-(-n // page_size) for n in seq_lens), generator=generator) + 1).tolist())
    row_ids = torch.randperm(num_rows, generator=generator)[: len(seq_lens)]
    for row, length in zip(row_ids.tolist(), seq_lens, strict=True):
        for start in range(0, length, page_size):
            count = min(page_size, length - start)
            slots[row, start : start + count] = next(free) * page_size + torch.arange(count, dtype=dtype)
    return slots.to(DEVICE), row_ids.to(DEVICE)


def plain(
    slots: torch.Tensor, row_ids: torch.Tensor, seq_lens: list[int], max_blocks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pages = slots[:, ::BLOCK][:, :max_blocks].index_select(0, row_ids).div(BLOCK, rounding_mode="floor").int()
    for request, length in enumerate(seq_lens):
        pages[request, -(-length // BLOCK) :] = 0
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    return pages, lens, torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=DEVICE)


def check(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == torch.int32
        assert torch.equal(got, want)


@IMPLS
@pytest.mark.parametrize("dtypes", ["iii", "ill", "lil", "lll"])
@pytest.mark.parametrize("page_size", [128, 256, 1024])
def test_batch(impl: str, page_size: int, dtypes: str) -> None:
    kinds = [torch.int64 if kind == "l" else torch.int32 for kind in dtypes]
    slots, row_ids = table_of(LENS, page_size, kinds[0])
    seq_lens = torch.tensor(LENS, dtype=kinds[2], device=DEVICE)
    for max_blocks in (548, 547, 300, 1):
        found = ops.batch_from_slots(
            slots, row_ids.to(kinds[1]), seq_lens, block_size=BLOCK, max_blocks=max_blocks, impl=impl
        )
        check(found, plain(slots, row_ids, LENS, max_blocks))


@IMPLS
@pytest.mark.parametrize("row", [0, -1, 1 << 40])
def test_a_request_without_tokens_has_no_row(impl: str, row: int) -> None:
    slots, row_ids = table_of(LENS, BLOCK, torch.int32)
    expected = plain(slots, row_ids, LENS, 20)
    row_ids[2] = row
    found = ops.batch_from_slots(
        slots, row_ids, torch.tensor(LENS, device=DEVICE), block_size=BLOCK, max_blocks=20, impl=impl
    )
    check(found, expected)


@IMPLS
def test_requests_that_pad_a_graph(impl: str) -> None:
    """Many of one token in row 0, as SGLang's captured graphs have them."""
    lens = [300, *[1] * 7]
    slots, row_ids = table_of([300], BLOCK, torch.int32)
    slots[0, 0] = 3
    row_ids = torch.cat([row_ids, row_ids.new_zeros(7)])
    found = ops.batch_from_slots(
        slots, row_ids, torch.tensor(lens, device=DEVICE), block_size=BLOCK, max_blocks=4, impl=impl
    )
    check(found, plain(slots, row_ids, lens, 4))
    assert (found[0][1:] == 0).all()


@IMPLS
def test_rows_past_2_31_elements(impl: str) -> None:
    """A step between rows that 32 bits hold, and a row that lies further."""
    step = 1 << 30
    slots = torch.empty(2 * step + 2 * BLOCK, dtype=torch.int32, device=DEVICE).as_strided((3, 2 * BLOCK), (step, 1))
    slots[2, 0], slots[2, BLOCK] = 5 * BLOCK, 9 * BLOCK
    row_ids, lens = (torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in (2, 2 * BLOCK))
    found = ops.batch_from_slots(slots, row_ids, lens, block_size=BLOCK, max_blocks=2, impl=impl)
    assert found[0].tolist() == [[5, 9]]


def test_what_is_handed_back_is_no_argument() -> None:
    """The engine may write its lengths anew while the layers still read these."""
    slots, row_ids = table_of([300], BLOCK, torch.int32)
    lens = torch.tensor([300], dtype=torch.int32, device=DEVICE)
    for impl in ("reference", "triton"):
        found = ops.batch_from_slots(slots, row_ids, lens, block_size=BLOCK, max_blocks=3, impl=impl)
        assert found[1].data_ptr() != lens.data_ptr()


def test_no_request_and_no_column() -> None:
    slots, row_ids = table_of([300], BLOCK, torch.int32)
    lens = torch.tensor([300], device=DEVICE)
    table, _, starts = ops.batch_from_slots(slots, row_ids[:0], lens[:0], block_size=BLOCK, max_blocks=3)
    assert (table.shape, starts.tolist()) == ((0, 3), [0])
    table, found, starts = ops.batch_from_slots(slots, row_ids, lens, block_size=BLOCK, max_blocks=0)
    assert (table.shape, found.tolist(), starts.tolist()) == ((1, 0), [300], [0, 1])
    with pytest.raises(ValueError, match="nothing to describe"):
        ops.batch_from_slots(slots, row_ids, lens, block_size=BLOCK, max_blocks=0, impl="triton")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_slots": torch.zeros(5)}, r"token_slots has shape \[5\]"),
        ({"row_ids": torch.zeros(3, dtype=torch.int32)}, r"seq_lens has shape \[2\], .* with B = 3"),
        ({"seq_lens": torch.ones(2)}, "seq_lens is torch.float32, expected torch.int32 or torch.int64"),
        ({"max_blocks": 4}, r"max_blocks = 4 does not fit token_slots \[5, 300\] in blocks of 128"),
        ({"max_blocks": -1}, "max_blocks = -1 does not fit"),
        ({"block_size": 0}, "in blocks of 0"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "token_slots": torch.zeros((5, 300), dtype=torch.int32),
        "row_ids": torch.zeros(2, dtype=torch.int32),
        "seq_lens": torch.ones(2, dtype=torch.int32),
        "block_size": BLOCK,
        "max_blocks": 3,
    }
    ops.batch_from_slots(**given)
    with pytest.raises(ValueError, match=f"^batch_from_slots: .*{message}"):
        ops.batch_from_slots(**{**given, **changes})


@pytest.mark.skipif(DEVICE == "cuda", reason="stands in for a card")
def test_another_layer_is_launched_from_the_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    """57 layers of a step call with the same shapes; the addresses are each call's own."""
    from msaserve.ops.batch_from_slots import triton as module

    names = module.batch_kernel.arg_names
    replayed: list[tuple[Any, ...]] = []

    class Kernel:
        arg_names = names
        pre_run_hooks: tuple[Any, ...] = ()

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: {(*grid, 1): lambda *given, stream: replayed.append(given)}

    monkeypatch.setattr(module, "batch_kernel", Kernel())
    monkeypatch.setattr(tape, "_place", lambda tensor: 0)
    monkeypatch.setattr(tape, "_stream", lambda: 7)
    for _ in range(3):
        slots, row_ids = table_of(LENS, BLOCK, torch.int32)
        lens = torch.tensor(LENS)
        found = ops.batch_from_slots(slots, row_ids, lens, block_size=BLOCK, max_blocks=548, impl="triton")
    assert len(replayed) == 2
    given = dict(zip(names, replayed[-1], strict=True))
    addresses = [x.data_ptr() for x in (slots, row_ids, lens, *found)]
    assert [given.pop(name) for name in names[:6]] == addresses
    assert given == {"max_blocks": 548, "stride_r": MAX_TOKENS, "BLOCK": BLOCK, "COLUMNS": 256, "PDL": False}
