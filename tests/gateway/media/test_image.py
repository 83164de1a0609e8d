from __future__ import annotations

import zlib
from contextlib import suppress
from struct import pack

import numpy as np
import pytest
from PIL import Image
from samples import clip, encode, noise, picture

from msaserve.errors import InvalidRequestError
from msaserve.gateway.media.image import decode_image
from msaserve.gateway.media.limits import MediaLimits
from msaserve.gateway.media.prepare import prepare
from msaserve.gateway.media.spec import Hints
from msaserve.gateway.media.specs.minimax_m3 import MiniMaxM3Spec

LIMITS = MediaLimits()


def decode(data: bytes) -> np.ndarray:
    """[height, width, 3]"""
    return decode_image(data, LIMITS).transpose(1, 2, 0)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP"])
def test_lossless_formats(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    np.testing.assert_array_equal(decode(picture(kind=kind, **options)), noise(60, 90))


@pytest.mark.parametrize("kind", ["JPEG", "AVIF"])
def test_lossy_formats(kind: str) -> None:
    error = np.abs(decode(picture(kind=kind, quality=95)).astype(int) - noise(60, 90))
    assert error.mean() < 12


def test_gif_gives_the_first_frame() -> None:
    frames = [Image.new("RGB", (40, 30), color) for color in ((255, 0, 0), (0, 0, 255))]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (decode(data) == (255, 0, 0)).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation(kind: str, orientation: int) -> None:
    # Dark everywhere but in the quarter where the first row and the first column meet.
    pixels = np.zeros((32, 48, 3), np.uint8)
    pixels[:16, :24] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    out = decode(encode(Image.fromarray(pixels), kind, exif=exif.tobytes(), quality=95))
    bright = out.astype(int).mean(2) > 128
    # EXIF: where the stored picture's first row and first column belong.
    rows, columns = {
        1: ("top", "left"), 2: ("top", "right"), 3: ("bottom", "right"), 4: ("bottom", "left"),
        5: ("top", "left"), 6: ("top", "right"), 7: ("bottom", "right"), 8: ("bottom", "left"),
    }[orientation]  # fmt: skip
    height, width = (32, 48) if orientation < 5 else (48, 32)
    assert bright.shape == (height, width)
    quarter = bright[
        slice(0, height // 2) if rows == "top" else slice(height // 2, height),
        slice(0, width // 2) if columns == "left" else slice(width // 2, width),
    ]
    assert quarter.mean() > 0.9
    assert bright.mean() < 0.3


def test_exif_orientation_survives_transparency() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(Image.new("RGBA", (48, 32), (9, 9, 9, 255)), "PNG", exif=exif.tobytes())
    assert decode(data).shape == (48, 32, 3)


@pytest.mark.parametrize(
    "exif", [b"", b"garbage, and more of it", b"II*\0\xff\xff\xff\x7f", b"II*\0\x08\0\0\0\xff\xff" + bytes(9)]
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_that_cannot_be_read_says_nothing(kind: str, exif: bytes) -> None:
    assert decode(picture(kind=kind, exif=b"Exif\0\0" + exif)).shape == (60, 90, 3)


def test_alpha_is_put_on_white() -> None:
    rgba = np.zeros((20, 20, 4), np.uint8)
    rgba[:10] = (200, 0, 0, 255)
    rgba[10:, :10] = (0, 0, 0, 128)
    out = decode(encode(Image.fromarray(rgba), "PNG"))
    assert (out[:10] == (200, 0, 0)).all()
    assert np.abs(out[10:, :10].astype(int) - 127).max() <= 1
    assert (out[10:, 10:] == 255).all()
    grey_alpha = decode(encode(Image.fromarray(rgba).convert("LA"), "PNG"))
    assert (grey_alpha[10:, 10:] == 255).all()


def test_palette_with_transparency() -> None:
    image = Image.new("P", (16, 16), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.paste(0, (0, 0, 8, 16))
    out = decode(encode(image, "PNG", transparency=0))
    assert (out[:, :8] == 255).all()
    assert (out[:, 8:] == (10, 20, 30)).all()


def test_grey_and_one_bit() -> None:
    values = noise(24, 24, channels=1)[..., 0]
    out = decode(encode(Image.fromarray(values), "PNG"))
    np.testing.assert_array_equal(out, values[..., None].repeat(3, 2))
    bits = decode(encode(Image.fromarray(values > 127), "PNG"))
    assert set(np.unique(bits)) == {0, 255}


def test_sixteen_bit_grey_is_cut_off() -> None:
    values = np.array([[0, 100, 255, 256, 40_000, 65_535]], np.uint16)
    out = decode(encode(Image.fromarray(values), "PNG"))
    np.testing.assert_array_equal(out[0, :, 0], [0, 100, 255, 255, 255, 255])


def test_cmyk() -> None:
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    out = decode(encode(image, "JPEG", quality=100))
    assert np.abs(out.astype(int) - np.array([255, 0, 0])).max() <= 4


def png_header(width: int, height: int) -> bytes:
    """A PNG that announces a size and holds next to nothing."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return pack(">I", len(body)) + kind + body + pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (b"", "media_empty", "empty"),
        (b"no picture at all", "media_wrong_type", "no picture"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "media_wrong_type", "no picture"),
        (picture(kind="JPEG")[:400], "media_decode_failed", "cut short"),
        (picture(300, 300)[:900], "media_decode_failed", "cut short"),
        (picture()[:20], "media_", "picture"),
        (png_header(30_000, 30_000), "media_too_many_pixels", "30000×30000"),
        (png_header(12_000, 12_000), "media_too_many_pixels", "12000×12000"),
        (png_header(201, 1), "media_aspect_ratio", "201×1"),
        (png_header(2, 402), "media_aspect_ratio", "2×402"),
        (clip(2), "media_wrong_type", "no picture"),
    ],
)
def test_refused(data: bytes, code: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        prepare("image", data, Hints(), MiniMaxM3Spec(), LIMITS)
    assert caught.value.code is not None
    assert caught.value.code.startswith(code)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_damaged_files_are_refused_or_decoded(kind: str) -> None:
    """Seeded damage: anything but InvalidRequestError would be a fault of ours."""
    data = picture(40, 56, kind)
    rng = np.random.default_rng(5)
    num_decoded = 0
    for _ in range(60):
        damaged = bytearray(data[: rng.integers(1, len(data) + 1)])
        for _ in range(rng.integers(0, 6)):
            damaged[rng.integers(len(damaged))] = rng.integers(256)
        with suppress(InvalidRequestError):
            prepare("image", bytes(damaged), Hints(), MiniMaxM3Spec(), LIMITS)
            num_decoded += 1
    assert num_decoded < 60
