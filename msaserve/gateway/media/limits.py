"""How much one item, one request and the whole gateway may ask for."""

from __future__ import annotations

import msgspec

MIB = 2**20


class MediaLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Checked as early as each can be known: counts before fetching, sizes while fetching, pixels and duration from
    headers before decoding."""

    max_image_bytes: int = 64 * MIB
    max_video_bytes: int = 256 * MIB
    max_image_pixels: int = 100_000_000
    max_frame_pixels: int = 40_000_000
    """Of one frame as it is stored; 8K is 33 million."""
    max_duration_s: float = 3600.0
    max_clip_frames: int = 250_000
    """Frames a clip may hold, sampled or not."""
    max_item_bytes: int = 2048 * MIB
    """uint8 patches of one item."""
    max_inflight_bytes: int = 8192 * MIB
    """Encoded files and patches of all requests, until they are answered. One request above it is refused."""
    max_wait_s: float = 30.0
    """How long a request waits for room (in bytes or for a process) before it is told to come back."""
    max_cache_bytes: int = 256 * MIB
    """uint8 patches kept for items that come again."""
    max_process_bytes: int = 8192 * MIB
    """Address space of a media process."""
    connect_timeout_s: float = 5.0
    fetch_timeout_s: float = 30.0
    image_timeout_s: float = 20.0
    video_timeout_s: float = 120.0
    max_redirects: int = 5
    max_downloads: int = 512
    """Downloads at a time; further ones wait."""
    max_request_downloads: int = 16
    """Downloads at a time of one request: slow ones of its own hold up itself alone."""

    def shared(self, count: int) -> MediaLimits:
        """Of one of several gateway processes, which together hold no more than one would."""
        return msgspec.structs.replace(
            self,
            max_inflight_bytes=self.max_inflight_bytes // count,
            max_cache_bytes=self.max_cache_bytes // count,
            max_downloads=max(self.max_downloads // count, 1),
        )
