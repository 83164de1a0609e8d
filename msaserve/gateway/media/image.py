"""A picture file to RGB pixels, with Pillow. Runs in a media process."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

import numpy as np
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    ExifTags,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from msaserve.errors import InvalidRequestError
from msaserve.gateway.media.limits import MediaLimits

# Importing a plugin registers it: what is not named here is never tried.
_PLUGINS = (
    AvifImagePlugin, BmpImagePlugin, GifImagePlugin, JpegImagePlugin, PngImagePlugin,
    TiffImagePlugin, WebPImagePlugin,
)  # fmt: skip
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""By EXIF's orientation."""
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "AVIF")
_NAMES = "JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF"


def decode_image(data: bytes, limits: MediaLimits, check: Callable[[int, int], None] | None = None) -> np.ndarray:
    """uint8 [3, height, width]: the first frame, upright (EXIF), transparent pixels on white.

    check: called with height and width as the header has them, before anything is decoded; raises to refuse.
    16-bit grey is cut off at 255 as Pillow does it, which is what transformers sees.

    Raises:
        InvalidRequestError: not a picture, of a format that is not served, damaged, or with too many pixels.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = _open(data, limits)
        if check is not None:
            check(image.height, image.width)
        try:
            image.load()
            turn = _turn(image)
            image = _rgb(image)
            if turn is not None:
                image = image.transpose(turn)
        except MemoryError:
            raise
        except Exception as error:  # a hostile file can make a decoder fail in any way
            raise InvalidRequestError(
                f"the picture is damaged or cut short: {error}", code="media_decode_failed"
            ) from error
    # Pillow hands out single channels faster than numpy separates interleaved ones.
    planes = [np.frombuffer(image.tobytes("raw", channel), np.uint8) for channel in "RGB"]
    return np.stack(planes).reshape(3, image.height, image.width)


def _open(data: bytes, limits: MediaLimits) -> Image.Image:
    Image.MAX_IMAGE_PIXELS = None  # checked below, on the header
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except UnidentifiedImageError as error:
        raise InvalidRequestError(f"the data is no picture in {_NAMES}", code="media_wrong_type") from error
    except MemoryError:
        raise
    except Exception as error:  # as below
        raise InvalidRequestError(
            f"the picture's header is damaged or cut short: {error}", code="media_decode_failed"
        ) from error
    width, height = image.size
    if width * height > limits.max_image_pixels:
        raise InvalidRequestError(
            f"the picture has {width}×{height} pixels; at most {limits.max_image_pixels} are taken",
            code="media_too_many_pixels",
        )
    if width < 1 or height < 1:
        raise InvalidRequestError("the picture has no pixels", code="media_decode_failed")
    return image


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def _turn(image: Image.Image) -> Image.Transpose | None:
    """What puts it upright. EXIF data that cannot be read say nothing."""
    try:
        return _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except MemoryError:
        raise
    except Exception:  # as above
        return None
