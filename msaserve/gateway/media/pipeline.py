"""Content parts to MediaItems: fetch, prepare, expand the prompt, normalise. What the gateway calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from msaserve.errors import InvalidRequestError, MsaserveError
from msaserve.gateway.media.budget import ByteBudget, Lease
from msaserve.gateway.media.fetch import Fetcher
from msaserve.gateway.media.limits import MediaLimits
from msaserve.gateway.media.pool import MediaPool
from msaserve.gateway.media.prompt import expand
from msaserve.gateway.media.spec import Hints, Prepared, SpecSource, normalize
from msaserve.gateway.media.stages import Stages
from msaserve.tokenizer import Tokenizer
from msaserve.types import MediaItem, Modality

PART_TYPES: dict[str, Modality] = {"image_url": "image", "video_url": "video"}
_HINTS = ("fps", "max_long_side_pixel")

T = TypeVar("T")


class MediaPart(NamedTuple):
    modality: Modality
    url: str
    hints: Hints
    where: str
    """The part in the request, for errors."""


class MediaPipeline:
    """Everything media of one gateway. Made inside a running event loop."""

    def __init__(
        self,
        source: SpecSource,
        limits: MediaLimits | None = None,
        *,
        allowed_hosts: Iterable[str] | None = None,
        allows_private: bool = False,
        num_processes: int | None = None,
    ) -> None:
        """See Fetcher for allowed_hosts and allows_private, MediaPool for num_processes."""
        self.limits = limits or MediaLimits()
        self.spec = source.load()
        self._budget = ByteBudget(self.limits.max_inflight_bytes, max_wait_s=self.limits.max_wait_s)
        self._fetcher = Fetcher(self.limits, allowed_hosts=allowed_hosts, allows_private=allows_private)
        self.stages = Stages()
        self._pool = MediaPool(source, self.limits, num_processes=num_processes, stages=self.stages)

    async def warm(self) -> None:
        """Make the first request as fast as the next."""
        await self._pool.warm()

    async def close(self) -> None:
        await self._fetcher.close()
        await self._pool.close()

    @property
    def bytes_in_flight(self) -> int:
        return self._budget.used

    @property
    def cache_bytes(self) -> int:
        return self._pool.cache_bytes

    @property
    def num_processes(self) -> int:
        return self._pool.num_running

    def lease(self) -> Lease:
        """What one request holds of the bytes in flight; to be kept for as long as its items are."""
        return Lease(self._budget)

    def check(self, parts: Sequence[MediaPart]) -> None:
        """What is known before anything is fetched. Raises InvalidRequestError."""
        for modality, limit in self.spec.max_items.items():
            count = sum(part.modality == modality for part in parts)
            if count > limit:
                raise InvalidRequestError(
                    f"the request has {count} {modality} parts; at most {limit} are taken",
                    param="messages",
                    code="media_too_many_items",
                )
        for part in parts:
            with _Located(part):
                self.spec.check_hints(part.modality, part.hints)

    async def resolve(
        self,
        parts: Sequence[MediaPart],
        token_ids: Sequence[int],
        tokenizer: Tokenizer,
        lease: Lease,
        *,
        as_pixels: bool = False,
    ) -> tuple[list[int], tuple[MediaItem, ...]]:
        """`prepare` and `place`: a prompt with one placeholder per part, and the parts, to what the engine takes."""
        items = await self.prepare(parts, lease)
        return await self.place(items, token_ids, tokenizer, lease, as_pixels=as_pixels)

    async def prepare(self, parts: Sequence[MediaPart], lease: Lease) -> list[Prepared]:
        """All items, in order.

        Raises:
            InvalidRequestError, TooLargeError, BusyError, EngineError: the first that fails; the others are given up.
        """
        self.check(parts)
        places = asyncio.Semaphore(self.limits.max_request_downloads)
        return await _all(self._prepare(part, lease, places) for part in parts)

    async def place(
        self,
        items: Sequence[Prepared],
        token_ids: Sequence[int],
        tokenizer: Tokenizer,
        lease: Lease,
        *,
        as_pixels: bool = False,
    ) -> tuple[list[int], tuple[MediaItem, ...]]:
        """The prompt with the items' tokens in place of their placeholders, and the items as the engine takes them.

        as_pixels: leave the patches uint8, for an engine that normalises them itself.

        Raises:
            InvalidRequestError: the prompt's placeholders are not the items'.
            TooLargeError, BusyError: no room for their patches.
        """
        if not as_pixels:
            await lease.add(sum(4 * item.patches.nbytes for item in items))
        # In a thread: a clip's time stamps and markers are over a thousand texts to tokenise.
        return await asyncio.to_thread(self._place, items, token_ids, tokenizer, as_pixels)

    def _place(
        self, items: Sequence[Prepared], token_ids: Sequence[int], tokenizer: Tokenizer, as_pixels: bool
    ) -> tuple[list[int], tuple[MediaItem, ...]]:
        expanded = expand(token_ids, items, self.spec, tokenizer)
        placed = tuple(
            MediaItem(
                modality=item.modality,
                patches=item.patches if as_pixels else normalize(item.patches, self.spec),
                grid_thw=self.spec.grid_rows(item.grid_thw),
                offset=offset,
                length=length,
                content_hash=item.content_hash,
            )
            for item, (offset, length) in zip(items, expanded.spans, strict=True)
        )
        return expanded.token_ids, placed

    async def _prepare(self, part: MediaPart, lease: Lease, places: asyncio.Semaphore) -> Prepared:
        with _Located(part):
            try:
                async with places:
                    with self.stages.stage(part.modality, "fetch"):
                        data = await self._fetcher.fetch(part.url, part.modality, lease)
                item = await self._pool.prepare(part.modality, data, part.hints)
                await lease.add(item.patches.nbytes)
                return item
            except MsaserveError:
                self.stages.count(part.modality, "refused")
                raise


def parse_part(part: dict[str, Any], where: str) -> MediaPart:
    """An `image_url` or `video_url` part: {"type": "image_url", "image_url": {"url": …, …hints}}, or the URL alone.

    Raises:
        InvalidRequestError: it has another form.
    """
    kind = part["type"]
    body = part.get(kind)
    if isinstance(body, str):
        body = {"url": body}
    if not isinstance(body, dict) or not isinstance(body.get("url"), str) or not body["url"]:
        raise InvalidRequestError(f'{where} must be {{"type": "{kind}", "{kind}": {{"url": …}}}}', param=where)
    values = {name: body.get(name) for name in _HINTS}
    fps, side = values["fps"], values["max_long_side_pixel"]
    if fps is not None and type(fps) not in (int, float):
        raise InvalidRequestError(f"{where}: fps must be a number, not {fps!r}", param=where, code="media_hint")
    if side is not None and type(side) is not int:
        raise InvalidRequestError(
            f"{where}: max_long_side_pixel must be a whole number, not {side!r}", param=where, code="media_hint"
        )
    hints = Hints(None if fps is None else float(fps), side)
    return MediaPart(PART_TYPES[kind], body["url"].strip(), hints, where)


class _Located:
    """Names the part in errors that come out of the block. An error may be another request's too: it is copied."""

    def __init__(self, part: MediaPart) -> None:
        self._where = part.where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, InvalidRequestError) and error.param is None:
            raise type(error)(f"{self._where}: {error}", param=self._where, code=error.code) from error


async def _all(work: Iterable[Awaitable[T]]) -> list[T]:
    """Results in order; when one fails the others are cancelled and have ended before its error is raised."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
