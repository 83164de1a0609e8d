"""A clip to its sampled frames, with PyAV (FFmpeg). Runs in a media process.

The packets are read first: they hold the time of every frame, so the sample is chosen before anything is decoded.
While decoding, one frame is held at a time, and frames that are neither sampled nor needed by others are skipped.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av
import av.container
import av.error
import av.stream
import numpy as np
from av.packet import Packet
from av.video.stream import VideoStream

from msaserve.errors import InvalidRequestError
from msaserve.gateway.media.limits import MediaLimits

# Containers only: playlists and the like would have FFmpeg open other files and addresses.
_DEMUXERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,mpegts,avi,gif,apng,flv,mpeg,mpegvideo,ogg,asf"
_DECODERS = (
    "h264,hevc,vp8,vp9,libvpx,libvpx-vp9,av1,libdav1d,libaom-av1,mpeg4,mpeg1video,mpeg2video,h263,mjpeg,gif,apng,"
    "prores,theora,vc1,wmv3,msmpeg4,msmpeg4v3,flv,png,rawvideo"
)
_NAMES = "MP4, MOV, WebM, MKV, MPEG-TS, AVI or animated GIF"
_MAX_THREADS = 4
# Others decode by slices or alone: HEVC's frame threads can wait for each other for ever on a damaged file.
_FRAME_THREADED = ("h264", "vp9")
_STALL_SECONDS = 10.0


@dataclass(frozen=True)
class Frame:
    pixels: np.ndarray
    """uint8 [3, height, width], upright."""
    time: float
    """Seconds from the clip's first frame."""


@dataclass(frozen=True)
class Sampling:
    """What will be taken of a clip: known before the first frame is decoded."""

    num_frames: int
    frames: Iterator[Frame]
    """At most num_frames; fewer when the clip cannot be decoded as its packets promise."""


def sample_video(data: bytes, choose: Callable[[Sequence[float]], list[int]], limits: MediaLimits) -> Sampling:
    """choose: which frames to take, given the times of all (ascending, the first 0).

    Raises:
        InvalidRequestError: not a clip, of a kind that is not served, damaged, without frames, or beyond the limits;
            also while the frames are drawn.
    """
    try:
        container: Any = av.open(
            io.BytesIO(data),
            metadata_errors="ignore",
            options={"format_whitelist": _DEMUXERS, "codec_whitelist": _DECODERS, "protocol_whitelist": "none"},
        )
    except (av.error.FFmpegError, ValueError) as error:
        raise InvalidRequestError(
            f"the data is no clip in {_NAMES}, or its header is damaged: {_reason(error)}", code="media_wrong_type"
        ) from error
    stream = _video_stream(container)
    _check_header(container, stream, limits)
    clip = _Clip(stream, _read_packets(container, stream, limits))
    if clip.times[-1] > limits.max_duration_s:
        raise _too_long(clip.times[-1], limits)
    chosen = choose(clip.times)
    assert chosen
    return Sampling(len(chosen), clip.draw([clip.times[i] for i in chosen], limits))


def _video_stream(container: av.container.InputContainer) -> VideoStream:
    covers = av.stream.Disposition.attached_pic
    for stream in container.streams.video:
        if not stream.disposition & covers:
            return stream
    raise InvalidRequestError("the file has no video stream", code="media_no_frames")


def _check_header(container: av.container.InputContainer, stream: VideoStream, limits: MediaLimits) -> None:
    duration = 0.0 if container.duration is None else container.duration / 1_000_000
    if duration > limits.max_duration_s:
        raise _too_long(duration, limits)
    context: Any = stream.codec_context
    if context is None:
        raise InvalidRequestError("the clip's codec is not supported", code="media_wrong_type")
    # The container's own whitelist holds for what it tries out alone.
    if context.codec.name not in _DECODERS.split(","):
        raise InvalidRequestError(f"the clip's codec {context.codec.name} is not supported", code="media_wrong_type")
    _check_frame(context.width, context.height, limits)
    context.options = {"max_pixels": str(limits.max_frame_pixels)}


def _read_packets(
    container: av.container.InputContainer, stream: VideoStream, limits: MediaLimits
) -> list[Packet[VideoStream]]:
    packets: list[Packet[VideoStream]] = []
    has_key = False
    try:
        for packet in container.demux(stream):
            if packet.size == 0:
                continue
            # A stream cut out of a longer one begins with frames that nothing can decode.
            has_key = has_key or packet.is_keyframe
            if has_key:
                packets.append(packet)
            if packet.is_corrupt and "mpegts" not in container.format.name:
                raise InvalidRequestError("the clip is cut short or damaged", code="media_decode_failed")
            if len(packets) > limits.max_clip_frames:
                raise InvalidRequestError(
                    f"the clip has more than {limits.max_clip_frames} frames", code="media_too_many_frames"
                )
    except av.error.FFmpegError as error:
        raise InvalidRequestError(f"the clip is damaged: {_reason(error)}", code="media_decode_failed") from error
    if not packets:
        raise InvalidRequestError("the clip has no frames", code="media_no_frames")
    if "mp4" in container.format.name and len(packets) < stream.frames:
        raise InvalidRequestError(
            f"the clip is cut short: its header announces {stream.frames} frames, {len(packets)} are there",
            code="media_decode_failed",
        )
    return packets


class _Clip:
    def __init__(self, stream: VideoStream, packets: list[Packet[VideoStream]]) -> None:
        self._packets = packets
        self._context: Any = stream.codec_context
        shown = [p for p in packets if not p.is_discard] or packets
        self._has_times = all(p.pts is not None for p in shown) and stream.time_base is not None
        rate = stream.average_rate or stream.guessed_rate or Fraction(25)
        if self._has_times:
            ticks = sorted({p.pts for p in shown if p.pts is not None})
            self._start = ticks[0]
            self._tick = Fraction(stream.time_base or 1)
        else:
            # Some AVI files count frames and nothing else.
            ticks = list(range(len(shown)))
            self._start, self._tick = 0, 1 / rate
        self.times = [float((t - self._start) * self._tick) for t in ticks]

    def draw(self, targets: list[float], limits: MediaLimits) -> Iterator[Frame]:
        """The frames shown at `targets`; where one is missing, the next one there is."""
        tolerance = float(self._tick) / 2
        position = 0
        last: tuple[Any, float] | None = None
        is_taken = False
        try:
            for frame, shown in self._decode(set(targets)):
                last, is_taken = (frame, shown), False
                if position < len(targets) and shown + tolerance >= targets[position]:
                    while position < len(targets) and shown + tolerance >= targets[position]:
                        position += 1
                    yield Frame(_pixels(frame, limits), shown)
                    is_taken = True
            if last is None:
                raise InvalidRequestError("the clip has no frame that can be decoded", code="media_no_frames")
            if position < len(targets) and not is_taken:
                yield Frame(_pixels(last[0], limits), last[1])
        except (av.error.FFmpegError, ValueError) as error:
            if isinstance(error, InvalidRequestError):
                raise
            raise InvalidRequestError(f"the clip is damaged: {_reason(error)}", code="media_decode_failed") from error

    def _decode(self, targets: set[float]) -> Iterator[tuple[Any, float]]:
        context = self._context
        context.thread_type = "FRAME" if context.name in _FRAME_THREADED else "SLICE"
        context.thread_count = _MAX_THREADS
        with _Watchdog() as watchdog:
            yield from self._decode_packets(targets, watchdog)

    def _decode_packets(self, targets: set[float], watchdog: _Watchdog) -> Iterator[tuple[Any, float]]:
        context = self._context
        number = 0
        for packet in [*self._packets, None]:
            if self._has_times and packet is not None:
                # Equal floats: both sides come from the same whole ticks.
                is_target = packet.pts is None or self._time(packet.pts) in targets
                context.skip_frame = "DEFAULT" if is_target else "NONREF"
            with watchdog.watched():
                frames = context.decode(packet)
            for frame in frames:
                has_time = self._has_times and frame.pts is not None
                yield frame, self._time(frame.pts) if has_time else float(number * self._tick)
                number += 1

    def _time(self, pts: int) -> float:
        return float((pts - self._start) * self._tick)


class _Watchdog:
    """Ends the process when a decoder stands still: nothing else frees a thread that waits inside the library.

    `watched` wraps each call.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._is_done = threading.Event()

    def __enter__(self) -> _Watchdog:
        threading.Thread(target=self._watch, name="media-watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def _watch(self) -> None:
        while not self._is_done.wait(1.0):
            since = self._since
            if since is not None and time.monotonic() - since > _STALL_SECONDS:
                os._exit(1)


def _pixels(frame: Any, limits: MediaLimits) -> np.ndarray:
    _check_frame(frame.width, frame.height, limits)
    if any(component.is_alpha for component in frame.format.components):
        rgba = frame.to_ndarray(format="rgba").astype(np.uint16)
        alpha = rgba[..., 3:]
        rgb = ((rgba[..., :3] * alpha + (255 - alpha) * 255 + 127) // 255).astype(np.uint8)
    else:
        rgb = frame.to_ndarray(format="rgb24")
    # The container's rotation counts anticlockwise, as rot90 does.
    turned = np.rot90(rgb, round(frame.rotation / 90))
    return np.ascontiguousarray(turned.transpose(2, 0, 1))


def _check_frame(width: int, height: int, limits: MediaLimits) -> None:
    if width * height > limits.max_frame_pixels:
        raise InvalidRequestError(
            f"the clip's frames have {width}×{height} pixels; at most {limits.max_frame_pixels} are taken",
            code="media_too_many_pixels",
        )


def _too_long(duration: float, limits: MediaLimits) -> InvalidRequestError:
    return InvalidRequestError(
        f"the clip is {duration:.1f} s long; at most {limits.max_duration_s:.0f} s are taken", code="media_too_long"
    )


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
