from __future__ import annotations

import io
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image
from samples import clip, encode, grey, noise, picture, turned

from msaserve.errors import InvalidRequestError
from msaserve.gateway.media.limits import MediaLimits
from msaserve.gateway.media.prepare import prepare
from msaserve.gateway.media.spec import Hints
from msaserve.gateway.media.specs.minimax_m3 import MiniMaxM3Spec
from msaserve.gateway.media.video import Frame, _Watchdog, sample_video

LIMITS = MediaLimits()
SPEC = MiniMaxM3Spec()


def sample(data: bytes, fps: float = 1.0) -> list[Frame]:
    return list(sample_video(data, lambda times: SPEC.sample(times, Hints(fps=fps)), LIMITS).frames)


def brightness(frame: Frame) -> float:
    return float(frame.pixels[:, 32:, 32:].mean())


@pytest.mark.parametrize(
    ("codec", "container"),
    [
        ("libx264", "mp4"),
        ("libx264", "mov"),
        ("libx264", "matroska"),
        ("libx264", "mpegts"),
        ("libvpx-vp9", "webm"),
        ("mpeg4", "avi"),
        ("gif", "gif"),
    ],
)
def test_containers_and_codecs(codec: str, container: str) -> None:
    frames = sample(clip(24, codec=codec, container=container))
    # 2.4 s at 10 frames a second: 0, 1 and 2 s, and the last.
    assert [round(frame.time, 2) for frame in frames] == [0.0, 1.0, 2.0, 2.3]
    for frame, i in zip(frames, (0, 10, 20, 23), strict=True):
        assert frame.pixels.shape == (3, 64, 96)
        assert abs(brightness(frame) - grey(i, 24)) < (20 if codec == "gif" else 6)


@pytest.mark.parametrize("fps", [0.2, 0.5, 1.0, 3.0, 5.0])
def test_frames_are_those_of_a_whole_decode(fps: float) -> None:
    """Skipping what is not sampled changes no pixel, with B-frames and references between them."""
    data = clip(50, options={"bf": "3", "b-pyramid": "normal", "g": "25"})
    frames = sample(data, fps)
    with av.open(io.BytesIO(data)) as container:
        whole = {round(float(f.time), 3): f.to_ndarray(format="rgb24") for f in container.decode(video=0)}
    assert len(frames) >= 2
    for frame in frames:
        np.testing.assert_array_equal(frame.pixels.transpose(1, 2, 0), whole[round(frame.time, 3)])


def test_variable_frame_rate_goes_by_time() -> None:
    ticks = [0, 50, 100, 150, 900, 1100, 1150, 3000, 3050, 3400]
    frames = sample(clip(10, container="matroska", ticks=ticks))
    assert [round(f.time * 1000) for f in frames] == [0, 1100, 3000, 3400]
    for frame, i in zip(frames, (0, 5, 7, 9), strict=True):
        assert abs(brightness(frame) - grey(i, 10)) < 6


def test_times_count_from_the_first_frame() -> None:
    frames = sample(clip(12, container="matroska", ticks=[5000 + 100 * i for i in range(12)]))
    assert [round(f.time, 2) for f in frames] == [0.0, 1.0, 1.1]


def test_one_frame() -> None:
    item = prepare("video", clip(1), Hints(), SPEC, LIMITS)
    assert item.frame_times == (0.0,)
    assert item.grid_thw[0] == 1
    patches = item.patches.reshape(len(item.patches), 3, 2, 196)
    np.testing.assert_array_equal(patches[:, :, 0], patches[:, :, 1])


def test_rotation() -> None:
    plain, rotated = sample(clip(2)), sample(turned(clip(2)))
    assert rotated[0].pixels.shape == (3, 96, 64)
    # Clockwise: the corner with noise moves from the top left to the top right.
    expected = np.rot90(plain[0].pixels, -1, axes=(1, 2))
    np.testing.assert_array_equal(rotated[0].pixels, expected)


def test_animated_gif_with_transparency_is_put_on_white() -> None:
    frames = [Image.new("RGBA", (32, 32), (0, 0, 0, 0)) for _ in range(2)]
    for i, frame in enumerate(frames):
        frame.paste((255, 0, 0, 255), (0, 0, 8 + i, 8))
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=100, disposal=2)
    first = sample(data)[0].pixels
    assert (first[:, 20:, 20:] == 255).all()
    assert (first[:, 2, 2] == (255, 0, 0)).all()


def test_last_frame_of_a_damaged_tail_is_the_last_there_is() -> None:
    """The last packets cannot be decoded: the clip ends with what can, and no frame is there twice."""
    data = clip(30, container="mpegts", options={"g": "10", "bf": "0"})
    item = prepare("video", data[: len(data) * 9 // 10], Hints(), SPEC, LIMITS)
    assert list(item.frame_times) == sorted(set(item.frame_times))
    assert item.frame_times[-1] < 3.0


def test_clip_that_starts_between_keyframes() -> None:
    data = clip(30, container="mpegts", options={"g": "10", "bf": "0"})
    times = prepare("video", data[188 * 6 :], Hints(fps=5), SPEC, LIMITS).frame_times
    assert times[0] == 0.0
    assert times[-1] <= 2.9


def test_a_clip_on_which_frame_threads_wait_for_ever() -> None:
    """Damage that makes FFmpeg's threads for HEVC wait for each other; without them it decodes."""
    data = (Path(__file__).parent / "damaged_hevc.mp4").read_bytes()
    assert prepare("video", data, Hints(), SPEC, LIMITS).grid_thw == (1, 4, 4)


def test_a_decoder_that_stands_still_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr("msaserve.gateway.media.video.os._exit", lambda code: ended.set())
    monkeypatch.setattr("msaserve.gateway.media.video._STALL_SECONDS", 0.5)
    with _Watchdog() as watchdog:
        with watchdog.watched():
            pass
        assert not ended.wait(1.2)
        with watchdog.watched():
            assert ended.wait(5)


def test_only_one_decoded_frame_is_held() -> None:
    drawn = sample_video(clip(40), lambda times: list(range(len(times))), LIMITS).frames
    assert next(drawn).time == 0.0
    assert next(drawn).time == pytest.approx(0.1)


def audio_only() -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        stream = output.add_stream("aac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
        frame.rate = 8000
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return buffer.getvalue()


def header_only() -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as output:
        stream = output.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        output.start_encoding()
    return buffer.getvalue()


def index_first() -> bytes:
    """With the index in front, what is missing at the end shows only when it is read."""
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        with av.open(file.name, "w", options={"movflags": "faststart"}) as output:
            stream = output.add_stream("mpeg4", rate=10)
            stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
            for i in range(40):
                output.mux(stream.encode(av.VideoFrame.from_ndarray(noise(64, 64, i), format="rgb24")))
            output.mux(stream.encode(None))
        return Path(file.name).read_bytes()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "media_empty"),
        (b"nothing of the kind", "media_wrong_type"),
        (b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n", "media_wrong_type"),
        (b"ffconcat version 1.0\nfile '/etc/passwd'\n", "media_wrong_type"),
        (picture(kind="JPEG"), "media_wrong_type"),
        (audio_only(), "media_no_frames"),
        (header_only(), "media_"),
        (clip(30)[:-200], "media_"),
        (clip(30)[:300], "media_"),
        (index_first()[:-3000], "media_decode_failed"),
        (clip(10, codec="ffv1", container="matroska"), "media_wrong_type"),  # of FFmpeg's decoders listed ones only
    ],
)
def test_refused(data: bytes, code: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        prepare("video", data, Hints(), SPEC, LIMITS)
    assert caught.value.code is not None
    assert caught.value.code.startswith(code)


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"max_duration_s": 1.5}, "media_too_long"),
        ({"max_clip_frames": 19}, "media_too_many_frames"),
        ({"max_frame_pixels": 64 * 96 - 1}, "media_too_many_pixels"),
        ({"max_item_bytes": 1000}, "media_too_large"),
    ],
)
def test_limits(limits: dict[str, int], code: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        prepare("video", clip(20), Hints(), SPEC, MediaLimits(**limits))
    assert caught.value.code == code


def test_too_many_sampled_frames_are_refused_before_decoding() -> None:
    def never(times: Sequence[float]) -> list[int]:
        return SPEC.sample([t * 1000 for t in times], Hints(fps=5))

    with pytest.raises(InvalidRequestError, match="lower fps"):
        sample_video(clip(800, height=16, width=16, options={"preset": "ultrafast"}), never, LIMITS)


@pytest.mark.parametrize("container", ["mp4", "matroska", "mpegts"])
def test_damaged_files_are_refused_or_decoded(container: str) -> None:
    data = clip(12, container=container, height=32, width=32)
    rng = np.random.default_rng(7)
    num_decoded = 0
    for _ in range(25):
        damaged = bytearray(data[: rng.integers(1, len(data) + 1)])
        for _ in range(rng.integers(0, 20)):
            damaged[rng.integers(len(damaged))] = rng.integers(256)
        with suppress(InvalidRequestError):
            prepare("video", bytes(damaged), Hints(), SPEC, LIMITS)
            num_decoded += 1
    assert num_decoded < 25
