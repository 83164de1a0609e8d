"""What a request leaves behind in the gateway's client."""

from __future__ import annotations

import gc
import weakref
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from worker_driver import request, running_worker


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_request_that_is_over_is_freed_at_once(is_streamed: bool) -> None:
    """Without the collector, whose turns took a tenth of a short request's time."""
    async with running_worker() as worker:
        asked = msgspec.structs.replace(request("f", [5, 6, 7], max_tokens=2), is_streamed=is_streamed)
        freed = weakref.WeakSet[Any]()
        await worker.client.worker()
        gc.collect()
        gc.disable()
        try:
            async with aclosing(worker.client.generate(asked)) as events:
                async for event in events:
                    freed.add(events.ag_frame.f_locals["reader"])
                    if event.finish_reason is not None:
                        break
            del events
            assert not freed
        finally:
            gc.enable()
