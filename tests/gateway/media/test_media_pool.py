"""Media processes: what one job can do to the others, and what is done once."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import hostile_spec
import msgspec
import numpy as np
import pytest
from samples import clip, picture
from waits import SECONDS, until_true

from msaserve.errors import BusyError, EngineError, InvalidRequestError
from msaserve.gateway.media.limits import MediaLimits
from msaserve.gateway.media.pool import MediaPool
from msaserve.gateway.media.prepare import prepare
from msaserve.gateway.media.spec import Hints, SpecSource
from msaserve.gateway.media.specs.minimax_m3 import MiniMaxM3Spec

LIMITS = MediaLimits(image_timeout_s=SECONDS, max_wait_s=SECONDS, max_cache_bytes=400_000)
SOURCE = SpecSource("hostile_spec:from_checkpoint", {})

Make = Callable[..., MediaPool]


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slow pictures are done once this file exists. Processes of the pool start with its first job."""
    monkeypatch.setenv("SLOW_UNTIL", str(tmp_path / "gate"))
    return tmp_path / "gate"


@pytest.fixture
async def pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MediaPool]:
    monkeypatch.setenv("PYTHONPATH", str(Path(hostile_spec.__file__).parent))
    pool = MediaPool(SOURCE, LIMITS, num_processes=2)
    yield pool
    processes = [*pool._idle, *pool._busy]
    await pool.close()
    assert all(p._popen is None or p._popen.poll() is not None for p in processes)


async def test_same_as_in_this_process(pool: MediaPool) -> None:
    image, video = await asyncio.gather(
        pool.prepare("image", picture(), Hints()), pool.prepare("video", clip(12), Hints())
    )
    for item, expected in (
        (image, prepare("image", picture(), Hints(), MiniMaxM3Spec(), LIMITS)),
        (video, prepare("video", clip(12), Hints(), MiniMaxM3Spec(), LIMITS)),
    ):
        np.testing.assert_array_equal(item.patches, expected.patches)
        assert item.grid_thw == expected.grid_thw
        assert item.frame_times == expected.frame_times
        assert item.content_hash == expected.content_hash


async def test_a_crash_costs_one_job(pool: MediaPool) -> None:
    await pool.prepare("image", picture(seed=1), Hints())
    results = await asyncio.gather(
        pool.prepare("image", picture(width=hostile_spec.CRASH), Hints()),
        *(pool.prepare("image", picture(seed=i), Hints()) for i in range(2, 6)),
        return_exceptions=True,
    )
    assert isinstance(results[0], InvalidRequestError)
    assert results[0].code == "media_decoder_crashed"
    assert not any(isinstance(r, BaseException) for r in results[1:])


async def test_a_process_killed_from_outside_is_replaced(pool: MediaPool) -> None:
    await pool.prepare("image", picture(seed=1), Hints())
    (process,) = pool._idle
    assert process._popen is not None
    os.kill(process._popen.pid, 9)
    process._popen.wait()
    assert (await pool.prepare("image", picture(seed=2), Hints())).grid_thw == (1, 4, 6)


@pytest.mark.parametrize(
    ("width", "error", "code"),
    [
        (hostile_spec.HANG, InvalidRequestError, "media_timeout"),
        (hostile_spec.FAULT, EngineError, None),
        (hostile_spec.HOG, InvalidRequestError, "media_too_large"),
    ],
)
async def test_a_bad_job_and_the_next(pool: MediaPool, width: int, error: type[Exception], code: str | None) -> None:
    if width == hostile_spec.HANG:
        pool._limits = msgspec.structs.replace(LIMITS, image_timeout_s=2.0)
    with pytest.raises(error) as caught:
        await pool.prepare("image", picture(width=width), Hints())
    assert getattr(caught.value, "code", None) == code
    pool._limits = LIMITS
    await pool.prepare("image", picture(), Hints())


async def test_same_file_at_the_same_time_is_prepared_once(pool: MediaPool, gate: Path) -> None:
    data = picture(width=hostile_spec.SLOW)
    asked = asyncio.gather(*(pool.prepare("image", data, Hints()) for _ in range(5)))
    await until_true(lambda: pool._busy)
    gate.touch()
    items = await asked
    assert all(item is items[0] for item in items)
    assert len(pool._idle) == 1


async def test_recent_items_are_kept_within_bounds(pool: MediaPool) -> None:
    first = await pool.prepare("image", picture(), Hints())
    assert await pool.prepare("image", picture(), Hints()) is first
    other = await pool.prepare("image", picture(), Hints(max_long_side_pixel=28))
    assert other is not first
    for seed in range(1, 16):
        await pool.prepare("image", picture(seed=seed), Hints())
        assert pool.cache_bytes <= LIMITS.max_cache_bytes
        assert await pool.prepare("image", picture(seed=seed), Hints()) is not first
    assert await pool.prepare("image", picture(), Hints()) is not first


async def test_one_waiter_gone_leaves_the_others(pool: MediaPool, gate: Path) -> None:
    data = picture(width=hostile_spec.SLOW)
    first, second = (asyncio.ensure_future(pool.prepare("image", data, Hints())) for _ in range(2))
    await until_true(lambda: pool._busy)
    first.cancel()
    gate.touch()
    assert (await second).grid_thw[0] == 1
    assert first.cancelled()


async def keep_busy(pool: MediaPool) -> list[asyncio.Future[Any]]:
    running = [
        asyncio.ensure_future(pool.prepare("image", picture(40 + i, hostile_spec.SLOW), Hints())) for i in range(2)
    ]
    await until_true(lambda: len(pool._busy) == 2)
    return running


async def test_nobody_waiting_frees_a_place_in_the_queue(pool: MediaPool, gate: Path) -> None:
    running = await keep_busy(pool)
    queued = asyncio.ensure_future(pool.prepare("image", picture(50), Hints()))
    await until_true(lambda: len(pool._flights) == 3)
    queued.cancel()
    await until_true(lambda: len(pool._flights) == 2)
    gate.touch()
    await asyncio.gather(*running)


async def test_who_asks_while_the_only_other_goes_is_served(pool: MediaPool, gate: Path) -> None:
    running = await keep_busy(pool)
    first = asyncio.ensure_future(pool.prepare("image", picture(50), Hints()))
    await until_true(lambda: len(pool._flights) == 3)
    first.cancel()
    others = []
    for _ in range(5):  # its preparation takes some turns of the event loop to be given up
        others.append(asyncio.ensure_future(pool.prepare("image", picture(50), Hints())))
        await asyncio.sleep(0)
    gate.touch()
    assert [item.grid_thw for item in await asyncio.gather(*others)] == [(1, 4, 6)] * 5
    assert first.cancelled()
    await asyncio.gather(*running)
    assert not pool._flights


async def test_what_fails_when_all_have_gone_is_not_logged(pool: MediaPool, caplog: pytest.LogCaptureFixture) -> None:
    asked = asyncio.ensure_future(pool.prepare("image", b"no picture", Hints()))
    while not pool._busy:
        await asyncio.sleep(0.001)
    asked.cancel()
    while pool._flights:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.01)
    gc.collect()
    assert asked.cancelled()
    assert not caplog.records


async def test_a_full_pool_sends_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(hostile_spec.__file__).parent))
    pool = MediaPool(SOURCE, MediaLimits(max_wait_s=0.05, image_timeout_s=SECONDS), num_processes=1)
    running = asyncio.ensure_future(pool.prepare("image", picture(width=hostile_spec.HANG), Hints()))
    await until_true(lambda: pool._busy)
    with pytest.raises(BusyError):
        await pool.prepare("image", picture(), Hints())
    await pool.close()
    await asyncio.gather(running, return_exceptions=True)


async def test_close_ends_jobs_under_way(pool: MediaPool) -> None:
    running = asyncio.ensure_future(pool.prepare("image", picture(width=hostile_spec.HANG), Hints()))
    await until_true(lambda: pool._busy)
    await pool.close()
    with pytest.raises((asyncio.CancelledError, InvalidRequestError)):
        await running
