"""Whatever is wrong with a request has its own status, code, place and words, and the engine never hears of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import msgspec
import pytest
from fake_engine import FakeClient, serve
from samples import TINY, clip, data_url, picture
from test_image import png_header
from test_video import audio_only, header_only, index_first

from msaserve.gateway.media.pipeline import MediaPipeline
from msaserve.gateway.media.spec import find_spec

PLACE = "messages[0].content[1]"
OBJECT = {"type": "json_object"}


class Host(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        kind, body = ("text/html", b"<html>") if self.path == "/page" else ("image/png", b"")
        self.send_response(302 if self.path == "/loop" else 200)
        self.send_header("location", "/loop")
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Host) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def served_media() -> Iterator[tuple[FakeClient, httpx.Client]]:
    source = find_spec(TINY)
    assert source is not None
    engine = FakeClient()
    engine.info = msgspec.structs.replace(engine.info, supports_vision=True, image_token_id=510, video_token_id=511)
    media = MediaPipeline(source, allows_private=True, num_processes=1)
    with (
        serve(engine, media=media, max_body_bytes=2**24) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=200) as client,
    ):
        yield engine, client


def image(url: str, **hints: Any) -> dict[str, Any]:
    return {"part": {"type": "image_url", "image_url": {"url": url, **hints}}}


def png(data: bytes) -> dict[str, Any]:
    return image(data_url(data, "image/png"))


def video(data: bytes, **hints: Any) -> dict[str, Any]:
    return {"part": {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4"), **hints}}}


def tool(parameters: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}


CASES: dict[str, tuple[dict[str, Any], str, str | None, str]] = {
    "closed port": (image("http://127.0.0.1:1/x.png"), PLACE, "media_fetch_failed", "cannot be reached"),
    "no such name": (image("http://no-such.invalid/"), PLACE, "media_fetch_failed", "cannot be resolved"),
    "redirect loop": (image("HOST/loop"), PLACE, "media_redirect", "redirects in a loop"),
    "content type": (image("HOST/page"), PLACE, "media_wrong_type", "holds text/html, not an image"),
    "empty download": (image("HOST/empty"), PLACE, "media_empty", "the file is empty"),
    "empty data": (png(b""), PLACE, "media_empty", "the file is empty"),
    "truncated JPEG": (png(picture(kind="JPEG")[:-700]), PLACE, "media_decode_failed", "damaged or cut short"),
    "truncated MP4": (video(clip(25)[:500]), PLACE, "media_wrong_type", "its header is damaged"),
    "truncated MP4, index first": (video(index_first()[:-3000]), PLACE, "media_decode_failed", "cut short or damaged"),
    "bomb": (png(png_header(30_000, 30_000)), PLACE, "media_too_many_pixels", "30000×30000 pixels; at most"),
    "aspect ratio": (png(png_header(2010, 10)), PLACE, "media_aspect_ratio", "2010×10"),
    "no video stream": (video(audio_only()), PLACE, "media_no_frames", "no video stream"),
    "no frames": (video(header_only()), PLACE, "media_wrong_type", "End of file"),
    "fps 0": (video(clip(2), fps=0), PLACE, "media_hint", "fps must be between 0.2 and 5.0, not 0.0"),
    "fps 99": (video(clip(2), fps=99), PLACE, "media_hint", "fps must be between 0.2 and 5.0, not 99.0"),
    "base64": (image("data:image/png;base64,@@@"), PLACE, "media_data_url", "not valid base64"),
    "base64 of nothing": (image("data:image/png;base64,AAAA"), PLACE, "media_wrong_type", "no picture"),
    "tool schema: text": (tool("x"), "tools[0].function.parameters", None, "must be a JSON schema"),
    "tool schema: type": (
        tool({"properties": {"a": {"type": "int"}}}),
        "tools[0].function.parameters.properties.a",
        None,
        "'int' is no type of JSON schema",
    ),
    "two forms": ({"response_format": OBJECT, "guided_regex": "a"}, "guided_regex", None, "contradict each other"),
    "form and call": (
        {"response_format": OBJECT, "tool_choice": "required", **tool({})},
        "response_format",
        None,
        "contradict each other",
    ),
    "thinking and call": (
        {"thinking": {"type": "enabled"}, "tool_choice": "required", **tool({})},
        "tool_choice",
        None,
        "with thinking enabled no tool call can be asked for",
    ),
}


def body(asked: dict[str, Any], host: str) -> dict[str, Any]:
    fields = dict(asked)
    part = fields.pop("part", None)
    content: list[dict[str, Any]] = [{"type": "text", "text": "see"}]
    if part is not None:
        ((kind, inner),) = ((k, v) for k, v in part.items() if k != "type")
        content.append({"type": kind, kind: {**inner, "url": inner["url"].replace("HOST", host)}})
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], **fields}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_table(served_media: tuple[FakeClient, httpx.Client], host: str, name: str, stream: bool) -> None:
    engine, client = served_media
    asked, param, code, words = CASES[name]
    engine.requests.clear()
    response = client.post("/v1/chat/completions", json={**body(asked, host), "stream": stream})
    problem = response.json()["error"]
    assert (response.status_code, problem["param"], problem["code"]) == (400, param, code)
    assert words in problem["message"]
    assert not engine.requests
    assert client.get("/health").status_code == 200


def test_pictures_for_a_text_only_model(served_media: tuple[FakeClient, httpx.Client], host: str) -> None:
    with serve(FakeClient()) as url:
        response = httpx.post(
            f"{url}/v1/chat/completions", json=body(png(picture()), host), trust_env=False, timeout=60
        )
    problem = response.json()["error"]
    assert (response.status_code, problem["param"], problem["code"]) == (400, PLACE, "unsupported_content")
    assert "text only" in problem["message"]
