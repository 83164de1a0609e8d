"""Pictures and clips of examples: to patches without a codec, and to files as a client sends them."""

from __future__ import annotations

import base64
import hashlib
import io

import numpy as np
from PIL import Image

from msaserve.eval.example import Clip, Picture
from msaserve.gateway.media.resample import Resize
from msaserve.gateway.media.spec import Hints, ModelSpec, Prepared, to_patches


def prepare(item: Picture | Clip, spec: ModelSpec) -> Prepared:
    """What the gateway makes of the item's file, if the file loses nothing."""
    hints = Hints()
    times: tuple[float, ...] = ()
    if isinstance(item, Picture):
        frames = item.pixels[None]
        height, width = spec.image_size(frames.shape[2], frames.shape[3], hints)
    else:
        kept = spec.sample([i / item.fps for i in range(len(item.frames))], hints)
        frames, times = item.frames[kept], tuple(i / item.fps for i in kept)
        height, width = spec.video_size(len(frames), frames.shape[2], frames.shape[3], hints)
    resize = Resize(frames.shape[2], frames.shape[3], new_height=height, new_width=width)
    patches, grid = to_patches(np.stack([resize(frame) for frame in frames]), spec)
    digest = hashlib.sha256(np.asarray(grid, np.int64).tobytes())
    digest.update(patches.data)
    modality = "image" if isinstance(item, Picture) else "video"
    return Prepared(modality, patches, grid, times, digest.digest())  # type: ignore[arg-type]


def encode(item: Picture | Clip) -> bytes:
    """A PNG file, or an MP4 file (H.264)."""
    file = io.BytesIO()
    if isinstance(item, Picture):
        Image.fromarray(item.pixels.transpose(1, 2, 0)).save(file, "PNG")
        return file.getvalue()
    import av

    height, width = item.frames.shape[2:]
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=item.fps, options={"crf": "12", "bf": "0"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for pixels in item.frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def data_url(item: Picture | Clip) -> str:
    kind = "image/png" if isinstance(item, Picture) else "video/mp4"
    return f"data:{kind};base64,{base64.b64encode(encode(item)).decode()}"
