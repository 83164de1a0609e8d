"""Downloads from servers that misbehave, and addresses that must not be followed."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing

import msgspec
import pytest
from samples import data_url, picture
from waits import SECONDS, until_true

from msaserve.errors import BusyError, InvalidRequestError, TooLargeError
from msaserve.gateway.media.budget import ByteBudget, Lease
from msaserve.gateway.media.deadline import Deadline
from msaserve.gateway.media.fetch import Fetcher, special_kind
from msaserve.gateway.media.limits import MediaLimits
from msaserve.types import Modality

LIMITS = MediaLimits(
    max_image_bytes=5000, max_video_bytes=9000, fetch_timeout_s=SECONDS, connect_timeout_s=SECONDS, max_redirects=3
)
PNG = picture(30, 30)[:4000]

Reply = Callable[[asyncio.StreamWriter], Awaitable[None]]


def answer(body: bytes = PNG, kind: str = "image/png", status: str = "200 OK", extra: str = "") -> Reply:
    async def reply(writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nContent-Type: {kind}\r\n{extra}\r\n"
        writer.write(head.encode() + body)
        await writer.drain()

    return reply


def redirect(target: str) -> Reply:
    return answer(b"", "text/html", "302 Found", f"Location: {target}\r\n")


async def drip(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n")
    while True:
        writer.write(b".")
        await writer.drain()
        await asyncio.sleep(0.05)


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n")
    while True:
        writer.write(bytes(1000))
        await writer.drain()


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 900\r\n\r\nabc")
    await writer.drain()


async def nonsense(writer: asyncio.StreamWriter) -> None:
    writer.write(b"this is not HTTP\r\n\r\n")
    await writer.drain()


class Server:
    """Paths to replies, on loopback."""

    def __init__(self) -> None:
        self.replies: dict[str, Reply] = {}
        self.requests: list[bytes] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(head)
            await self.replies[head.split()[1].decode()](writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    running = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}"
    yield server
    running.close()


async def fetch(
    url: str,
    modality: Modality = "image",
    *,
    limits: MediaLimits = LIMITS,
    allows_private: bool = True,
    allowed_hosts: list[str] | None = None,
    budget: ByteBudget | None = None,
) -> bytes:
    fetcher = Fetcher(limits, allows_private=allows_private, allowed_hosts=allowed_hosts)
    try:
        with closing(Lease(budget or ByteBudget(10**8, max_wait_s=0.2))) as lease:
            return await fetcher.fetch(url, modality, lease)
    finally:
        await fetcher.close()


async def refused(url: str, code: str, words: str | None = None, **options: object) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        await fetch(url, **options)  # type: ignore[arg-type]
    assert caught.value.code == code


async def test_download(server: Server) -> None:
    server.replies = {"/a.png": answer(), "/b%20c?d=%C3%A9": answer(b"x", "application/octet-stream")}
    assert await fetch(f"{server.url}/a.png") == PNG
    assert await fetch(f"{server.url}/b c?d=é".replace(" ", "%20")) == b"x"
    head = server.requests[0].lower()
    assert b"accept-encoding: identity" in head
    assert b"host: 127.0.0.1:" in head
    assert b"cookie" not in head


async def test_redirects(server: Server) -> None:
    server.replies = {
        "/1": redirect("/2"),
        "/2": redirect(f"{server.url}/3"),
        "/3": answer(),
        "/loop": redirect("/loop2"),
        "/loop2": redirect("/loop"),
        "/file": redirect("file:///etc/passwd"),
        "/far": redirect("http://10.0.0.1/x"),
        **{f"/n{i}": redirect(f"/n{i + 1}") for i in range(9)},
    }
    assert await fetch(f"{server.url}/1") == PNG
    await refused(f"{server.url}/loop", "media_redirect", "loop")
    await refused(f"{server.url}/n0", "media_redirect", "more than 3")
    await refused(f"{server.url}/file", "media_url", "redirect leads to")
    await refused(f"{server.url}/far", "media_host", "redirect leads to", allowed_hosts=["127.0.0.1"])


@pytest.mark.parametrize(
    ("reply", "code", "words"),
    [
        (answer(b"<html>", "text/html; charset=utf-8"), "media_wrong_type", "text/html"),
        (answer(b"{}", "application/json"), "media_wrong_type", "application/json"),
        (answer(b"x", "video/mp4"), "media_wrong_type", "not an image"),
        (answer(PNG, extra="Content-Encoding: gzip\r\n"), "media_wrong_type", "gzip"),
        (answer(b""), "media_empty", "empty"),
        (answer(bytes(5001)), "media_too_large", "5001"),
        (answer(b"", status="404 Not Found"), "media_fetch_failed", "404"),
        (answer(b"", status="500 Oh"), "media_fetch_failed", "500"),
        (answer(b"", status="302 Found"), "media_fetch_failed", "302"),
        (endless, "media_too_large", "5000"),
        (drip, "media_fetch_failed", "longer than 1 s"),
        (hang_up, "media_fetch_failed", "reached"),
        (nonsense, "media_fetch_failed", "reached"),
    ],
)
async def test_bad_answers(server: Server, reply: Reply, code: str, words: str) -> None:
    server.replies = {"/": reply}
    limits = msgspec.structs.replace(LIMITS, fetch_timeout_s=1.0) if reply is drip else LIMITS
    await refused(f"{server.url}/", code, words, limits=limits)


async def test_unreachable() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    await refused(f"http://127.0.0.1:{port}/", "media_fetch_failed", "cannot be reached")
    await refused("http://no-such-host.invalid/x.png", "media_fetch_failed", "cannot be reached")


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://example.com/x.png",
        "x.png",
        "http://",
        "http:///x.png",
        "http://example.com:99999/",
        "http://[::1/",
        "http://exam ple.com/",
        "http://example.com/\r\nX: y",
        "http://user:pass@example.com/",
        "//example.com/x.png",
        "http://" + "a" * 70 + ".com/",
        "http://example.com/" + "a" * 50_000_000,
        "http://" + "é." * 1_000_000 + "com/",
    ],
)
async def test_malformed_addresses(url: str) -> None:
    await refused(url, "media_url")


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "198.18.0.1", "192.0.2.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "2130706433", "0x7f000001",
        "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:10.0.0.1]", "[fe80::1]", "[fc00::1]", "[ff02::1]",
        "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[2001:db8::1]", "[2001:0:7f00:1::]", "localhost", "192.0.0.8",
        "192.88.99.1", "[3fff::1]", "[::127.0.0.1]", "[64:ff9b:1::1]", "0",
    ],
)  # fmt: skip
async def test_special_addresses(host: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await fetch(f"http://{host}/x.png", allows_private=False)
    # Spellings that this system's resolver does not take are out of reach instead.
    assert caught.value.code in ("media_host", "media_fetch_failed")
    if host[0].isdigit() and host.count(".") == 3:
        assert caught.value.code == "media_host"


@pytest.mark.parametrize(
    ("host", "kind"),
    [
        ("169.254.169.254", "link-local"), ("[fe80::1]", "link-local"), ("168.63.129.16", "metadata"),
        ("100.100.100.200", "metadata"), ("[fd00:ec2::254]", "metadata"), ("[::ffff:169.254.169.254]", "link-local"),
        ("0.0.0.0", "unspecified"), ("224.0.0.1", "multicast"), ("[64:ff9b::7f00:1]", "translated"),
    ],
)  # fmt: skip
async def test_a_closed_network_opens_no_other_special_addresses(host: str, kind: str) -> None:
    await refused(f"http://{host}/x.png", "media_host", f"{kind} address; only public and private", allows_private=True)


def test_public_addresses_are_not_special() -> None:
    for address in ("1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:1.1.1.1"):
        assert special_kind(ipaddress.ip_address(address)) is None


async def test_a_name_that_resolves_to_loopback_is_not_followed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.replies = {"/": answer()}
    port = int(server.url.rpartition(":")[2])
    lookups: list[str] = []

    def lookup(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        lookups.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    await refused(f"http://cdn.example.com:{port}/", "media_host", "loopback", allows_private=False)
    assert lookups == ["cdn.example.com"]
    assert server.requests == []
    # The address that was checked is the one that is connected to: the name is looked up once and no more.
    lookups.clear()
    assert await fetch(f"http://cdn.example.com:{port}/") == PNG
    assert lookups == ["cdn.example.com"]
    assert b"Host: cdn.example.com" in server.requests[0]


async def test_redirect_to_a_special_address(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first hop is public (here: made to look so), the second is not."""
    server.replies = {"/": redirect("http://169.254.169.254/latest/meta-data")}
    monkeypatch.setattr(
        "msaserve.gateway.media.fetch.special_kind",
        lambda a: None if str(a) == "127.0.0.1" else special_kind(a),
    )
    await refused(f"{server.url}/", "media_host", "link-local", allows_private=False)


async def test_allowed_hosts(server: Server) -> None:
    server.replies = {"/": answer()}
    assert await fetch(f"{server.url}/", allowed_hosts=["127.0.0.1"]) == PNG
    await refused(f"{server.url}/", "media_host", "allowed hosts", allowed_hosts=["example.com"])
    await refused("http://badexample.com/", "media_host", "allowed hosts", allowed_hosts=["example.com"])


async def test_a_slow_download_blocks_no_other(server: Server) -> None:
    server.replies = {"/slow": drip, "/": answer()}
    slow = [asyncio.ensure_future(fetch(f"{server.url}/slow")) for _ in range(20)]
    await until_true(lambda: len(server.requests) == 20)
    assert await fetch(f"{server.url}/") == PNG
    assert not any(task.done() for task in slow)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_who_leaves_twice_leaves_nothing_running(server: Server) -> None:
    server.replies = {"/slow": drip}
    budget = ByteBudget(10**8, max_wait_s=0.2)
    for pause in (0.0, 0.001, 0.01, 0.1, 0.3):
        task = asyncio.ensure_future(fetch(f"{server.url}/slow", budget=budget))
        await asyncio.sleep(pause)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        running = [str(one.get_coro()) for one in asyncio.all_tasks()]
        assert not [name for name in running if "Fetcher" in name]
        assert budget.used == 0


async def test_a_cancellation_in_the_moment_of_the_end_arrives() -> None:
    async def wait(future: asyncio.Future[None]) -> None:
        with Deadline(5):
            await future

    future = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(wait(future))
    await asyncio.sleep(0)
    future.set_result(None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_deadline() -> None:
    with pytest.raises(TimeoutError), Deadline(5), Deadline(0.01):
        await asyncio.sleep(5)
    with pytest.raises(TimeoutError), Deadline(0.01), Deadline(5):
        await asyncio.sleep(5)
    with Deadline(0.05), Deadline(None):
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.1)
    with pytest.raises(ZeroDivisionError), Deadline(0.01):
        1 / 0  # noqa: B018


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("data:image/png,abc", "media_data_url"),
        ("data:image/png;base64", "media_data_url"),
        ("data:image/png;base64,***", "media_data_url"),
        ("data:image/png;base64,abc", "media_data_url"),
        ("data:image/png;base64,äöü=", "media_data_url"),
        ("data:;base64,", "media_empty"),
        (data_url(bytes(5010)), "media_too_large"),
    ],
)
async def test_bad_data_urls(url: str, code: str) -> None:
    await refused(url, code)


async def test_data_urls() -> None:
    assert await fetch(data_url(PNG, "image/jpeg")) == PNG
    assert await fetch("DATA:;BASE64,QUJD") == b"ABC"
    assert await fetch("data:image/png;base64,QUI%3D") == b"AB"


@pytest.mark.parametrize("size", [1, 2, 3, 2**18 - 1, 2**18, 3 * 2**16, 3 * 2**17 + 1, 2**20 + 2])
async def test_data_urls_of_any_size(size: int) -> None:
    data, limits = random.Random(size).randbytes(size), MediaLimits()
    text = base64.b64encode(data).decode()
    assert await fetch(f"data:;base64,{text}", limits=limits) == data
    assert await fetch(f"data:image/png;base64, {text}\n", limits=limits) == data
    assert await fetch(f"data:;base64,{text.replace('=', '%3D')}%20", limits=limits) == data
    for bad in ("=" + text, text + "A", "AA==" + text, text[:-1] + "é", text[:2] + "\n" + text[2:]):
        await refused(f"data:;base64,{bad}", "media_data_url", limits=limits)


async def test_a_large_data_url_does_not_hold_up_others() -> None:
    url = data_url(bytes(30 * 2**20))
    num_turns = 0
    decoding = asyncio.ensure_future(fetch(url, limits=MediaLimits()))
    while not decoding.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert len(await decoding) == 30 * 2**20
    assert num_turns > 4  # two, and one of them long, where the interpreter is held to the end


async def test_budget() -> None:
    budget = ByteBudget(1000, max_wait_s=0.1)
    with closing(Lease(budget)) as first, closing(Lease(budget)) as second:
        await first.add(700)
        with pytest.raises(TooLargeError):
            await second.add(1001)
        with pytest.raises(BusyError):
            await second.add(400)
        budget._max_wait_s = SECONDS
        waiting = asyncio.ensure_future(second.add(400))
        await asyncio.sleep(0.01)
        first.close()
        await waiting
        assert budget.used == 400
        given_up = asyncio.ensure_future(first.add(800))
        await asyncio.sleep(0.01)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        await first.add(600)
    assert budget.used == 0


async def test_a_download_holds_what_has_arrived(server: Server) -> None:
    server.replies = {"/": answer(bytes(4000))}
    with pytest.raises(TooLargeError):
        await fetch(f"{server.url}/", budget=ByteBudget(1000, max_wait_s=0.1))
