"""Media addresses to bytes: `data:`, `https:` and `http:`.

The server fetches what strangers name, so an address is only followed to a host on the public internet: every name is
resolved here, every resolved address is checked, and the connection is made to the very address that was checked, for
the first request as for each redirect.
"""

from __future__ import annotations

import asyncio
import base64
import io
import ipaddress
import socket
import ssl
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote_to_bytes, urljoin, urlsplit

import httpcore

from msaserve.errors import InvalidRequestError
from msaserve.gateway.media.budget import Lease
from msaserve.gateway.media.deadline import Deadline
from msaserve.gateway.media.limits import MIB, MediaLimits
from msaserve.types import Modality

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_REDIRECTS = (301, 302, 303, 307, 308)
_NAT64 = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48"))
_RESERVED = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20")))
"""Of protocols, 6to4 relays and documentation: some versions of Python take them for public."""
_METADATA = frozenset(map(ipaddress.ip_address, ("168.63.129.16", "100.100.100.200", "192.0.0.192", "fd00:ec2::254")))
"""Where clouds tell their machines secrets, besides the link-local ones."""
_PRIVATE_KINDS = ("loopback", "private")
_TYPES: Mapping[Modality, tuple[str, ...]] = {
    "image": ("image/",),
    "video": ("video/", "image/gif", "image/apng", "image/png", "application/mp4", "application/ogg"),
}
_UNTYPED = ("", "application/octet-stream", "binary/octet-stream", "application/x-binary")
_HEADERS = [
    (b"Accept", b"image/*, video/*, */*;q=0.1"),
    # A compressed body would make the size limit meaningless, and media files do not get smaller.
    (b"Accept-Encoding", b"identity"),
    (b"User-Agent", b"msaserve"),
]
_MAX_URL_CHARS = 8192
_SMALL_BYTES = 2**18
_BASE64_CHARS = 2**18
"""Decoded at a time, in half a millisecond; a multiple of four."""
_SAFE_PATH = "/%:=&?~#+!$,;'@()*[]"


class Fetcher:
    """Downloads, at most `limits.max_downloads` at a time.

    Args:
        allowed_hosts: if given, only these hosts and the hosts below them (`example.com` allows `cdn.example.com`).
        allows_private: follow private and loopback addresses too (for closed deployments and tests); other special ones
            never.
    """

    def __init__(
        self, limits: MediaLimits, *, allowed_hosts: Iterable[str] | None = None, allows_private: bool = False
    ) -> None:
        self._limits = limits
        self._allowed_hosts = None if allowed_hosts is None else tuple(h.lower().strip(".") for h in allowed_hosts)
        self._backend = _CheckedBackend(allows_private, limits.max_downloads)
        self._places = asyncio.Semaphore(limits.max_downloads)
        self._pool = httpcore.AsyncConnectionPool(
            max_connections=limits.max_downloads,
            max_keepalive_connections=16,
            keepalive_expiry=5.0,
            network_backend=self._backend,
        )

    async def close(self) -> None:
        await self._pool.aclose()
        self._backend.close()

    async def fetch(self, url: str, modality: Modality, lease: Lease) -> bytes:
        """The file at `url`; its bytes are added to the lease as they arrive.

        Raises:
            InvalidRequestError: the address is malformed, not allowed or out of reach, or what it holds is too large,
                empty or no media.
            TooLargeError, BusyError: from the lease.
        """
        max_bytes = self._limits.max_image_bytes if modality == "image" else self._limits.max_video_bytes
        if url[:5].lower() == "data:":
            data = await _decode_data_url(url, max_bytes, lease)
        else:
            try:
                with Deadline(self._limits.fetch_timeout_s):
                    data = await self._download(url, modality, max_bytes, lease)
            except TimeoutError as error:
                raise _failed(f"took longer than {self._limits.fetch_timeout_s:g} s", url) from error
        if not data:
            raise InvalidRequestError("the file is empty", code="media_empty")
        return data

    async def _download(self, url: str, modality: Modality, max_bytes: int, lease: Lease) -> bytes:
        seen: set[str] = set()
        async with self._places:
            while True:
                self._check_url(url, is_redirect=bool(seen))
                seen.add(url)
                answer = await self._get(url, modality, max_bytes, lease)
                if isinstance(answer, bytes):
                    return answer
                target = urljoin(url, answer.location)
                if target in seen:
                    raise _failed("redirects in a loop", url, code="media_redirect")
                if len(seen) > self._limits.max_redirects:
                    raise _failed(f"redirects more than {self._limits.max_redirects} times", url, code="media_redirect")
                if urlsplit(url).scheme == "https" and urlsplit(target).scheme == "http":
                    raise _failed("redirects from https to http", url, code="media_redirect")
                url = target

    def _check_url(self, url: str, *, is_redirect: bool) -> None:
        where = "a redirect leads to " if is_redirect else ""
        if len(url) > _MAX_URL_CHARS:
            raise InvalidRequestError(
                f"{where}a URL of {len(url)} characters; at most {_MAX_URL_CHARS} are taken: {_shorten(url)}",
                code="media_url",
            )
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise InvalidRequestError(f"{where}a malformed URL: {_shorten(url)}", code="media_url") from error
        if parts.scheme not in ("http", "https"):
            raise InvalidRequestError(
                f"{where}{_shorten(url)}: only https:, http: and data: URLs are taken", code="media_url"
            )
        if not host or any(ord(c) <= 0x20 or ord(c) == 0x7F for c in url):
            raise InvalidRequestError(f"{where}a malformed URL: {_shorten(url)}", code="media_url")
        if parts.username is not None or parts.password is not None:
            raise InvalidRequestError("a media URL may not hold a user name or password", code="media_url")
        if self._allowed_hosts is not None and not any(
            host == allowed or host.endswith("." + allowed) for allowed in self._allowed_hosts
        ):
            raise InvalidRequestError(f"{where}{host}, which is not among the allowed hosts", code="media_host")

    async def _get(self, url: str, modality: Modality, max_bytes: int, lease: Lease) -> bytes | _Redirect:
        timeout = dict.fromkeys(("connect", "read", "write"), self._limits.connect_timeout_s)
        try:
            async with self._pool.stream(
                "GET", _ascii_url(url), headers=_HEADERS, extensions={"timeout": timeout}
            ) as response:
                headers = {k.lower(): v.decode("latin-1") for k, v in response.headers}
                if response.status in _REDIRECTS and b"location" in headers:
                    return _Redirect(headers[b"location"])
                if response.status != 200:
                    raise _failed(f"answered with status {response.status}", url)
                _check_type(headers, modality, url)
                return await _read(response, headers, max_bytes, lease)
        except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError,
                httpcore.UnsupportedProtocol, OSError, ssl.SSLError) as error:  # fmt: skip
            raise _failed(f"cannot be reached: {_reason(error)}", url) from error


@dataclass(frozen=True)
class _Redirect:
    location: str


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects to public addresses only."""

    def __init__(self, allows_private: bool, num_resolvers: int) -> None:
        self._allowed_kinds = (None, *_PRIVATE_KINDS) if allows_private else (None,)
        self._inner = httpcore.AnyIOBackend()
        # Threads of its own, one for each download: a slow name server holds up nobody else.
        self._resolvers = ThreadPoolExecutor(num_resolvers, thread_name_prefix="media-dns")

    def close(self) -> None:
        self._resolvers.shutdown(wait=False, cancel_futures=True)

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        loop = asyncio.get_running_loop()
        lookup = loop.run_in_executor(self._resolvers, _resolve, host.strip("[]"), port)
        try:
            with Deadline(timeout):
                addresses = await lookup
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(f"the name {host} was not resolved in time") from error
        except OSError as error:
            raise httpcore.ConnectError(f"the name {host} cannot be resolved") from error
        allowed = [a for a in addresses if special_kind(a) in self._allowed_kinds]
        if not allowed:
            kind = special_kind(addresses[0]) if addresses else "no"
            public = "public" if len(self._allowed_kinds) == 1 else "public and private"
            raise InvalidRequestError(
                f"the media host {host} resolves to {_article(kind or 'special')} address; only {public} ones are "
                "followed",
                code="media_host",
            )
        failure: Exception | None = None
        for address in allowed[:4]:
            try:
                return await self._inner.connect_tcp(str(address), port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        assert failure is not None
        raise failure

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        raise httpcore.ConnectError("sockets in the file system are not followed")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def special_kind(address: Address) -> str | None:
    """What makes an address special, or None for one on the public internet. IPv4 inside IPv6 counts as what it is."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return special_kind(address.ipv4_mapped)
        if any(address in network for network in _NAT64) or address.sixtofour or address.teredo:
            return "translated"
        if address.is_site_local:
            return "private"
    if address in _METADATA:
        return "metadata"
    for kind in ("unspecified", "loopback", "link_local", "multicast"):
        if getattr(address, f"is_{kind}"):
            return kind.replace("_", "-")
    if address.is_reserved or any(address in network for network in _RESERVED):
        return "reserved"
    # Private use, shared (carrier) space, documentation, benchmarking.
    return None if address.is_global else "private"


def _resolve(host: str, port: int) -> list[Address]:
    addresses = []
    for _, _, _, _, name in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        addresses.append(ipaddress.ip_address(str(name[0]).partition("%")[0]))
    return list(dict.fromkeys(addresses))


async def _decode_data_url(url: str, max_bytes: int, lease: Lease) -> bytes:
    start = url.find(",") + 1
    if url[max(start - 8, 0) : max(start - 1, 0)].lower() != ";base64":
        raise InvalidRequestError("a data: URL must be base64 (data:image/png;base64,…)", code="media_data_url")
    size = (len(url) - start) * 3 // 4
    if size > max_bytes + 2:
        raise _too_large(size, max_bytes)
    await lease.add(size)
    # Small ones are decoded faster than a thread is reached.
    return _decode_base64(url, start) if size < _SMALL_BYTES else await asyncio.to_thread(_decode_base64, url, start)


def _decode_base64(text: str, start: int) -> bytes:
    """What text[start:] says. Piece by piece: the interpreter is held for each, and others wait for it."""
    try:
        if text.find("%", start) >= 0:
            text, start = unquote_to_bytes(text[start:]).decode("ascii"), 0
        end = len(text)
        while end > start and text[end - 1].isspace():
            end -= 1
        while start < end and text[start].isspace():
            start += 1
        data = io.BytesIO()
        for position in range(start, end, _BASE64_CHARS):
            piece = base64.b64decode(text[position : min(position + _BASE64_CHARS, end)], validate=True)
            if len(piece) < _BASE64_CHARS // 4 * 3 and position + _BASE64_CHARS < end:
                raise ValueError("padding stands before its end")
            data.write(piece)
        return data.getvalue()
    except ValueError as error:
        raise InvalidRequestError(f"the data: URL is not valid base64: {error}", code="media_data_url") from error


def _check_type(headers: Mapping[bytes, str], modality: Modality, url: str) -> None:
    encoding = headers.get(b"content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise _failed(f"answered with content encoding {encoding}", url, code="media_wrong_type")
    kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
    if kind not in _UNTYPED and not kind.startswith(_TYPES[modality]):
        raise _failed(f"holds {kind}, not {_article(modality)}", url, code="media_wrong_type")


async def _read(response: httpcore.Response, headers: Mapping[bytes, str], max_bytes: int, lease: Lease) -> bytes:
    length = headers.get(b"content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise _too_large(int(length), max_bytes)
    # What has arrived is counted, not what is announced: an announcement must not take room from others.
    data = io.BytesIO()
    total = reserved = 0
    async for chunk in response.aiter_stream():
        total += len(chunk)
        if total > max_bytes:
            raise _too_large(total, max_bytes)
        if total > reserved:
            step = max(MIB, total - reserved)
            await lease.add(step)
            reserved += step
        data.write(chunk)
    return data.getvalue()


def _ascii_url(url: str) -> bytes:
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        name = f"[{host}]" if ":" in host else host.encode("idna").decode("ascii")
    except UnicodeError as error:
        raise InvalidRequestError(f"{host[:100]} is no host name", code="media_url") from error
    port = "" if parts.port is None else f":{parts.port}"
    path = quote(parts.path, safe=_SAFE_PATH) or "/"
    query = f"?{quote(parts.query, safe=_SAFE_PATH)}" if parts.query else ""
    return f"{parts.scheme}://{name}{port}{path}{query}".encode("ascii")


def _failed(what: str, url: str, *, code: str = "media_fetch_failed") -> InvalidRequestError:
    return InvalidRequestError(f"{_shorten(url)} {what}", code=code)


def _too_large(size: int, limit: int) -> InvalidRequestError:
    return InvalidRequestError(f"the file has {size} bytes or more; at most {limit} are taken", code="media_too_large")


def _shorten(url: str) -> str:
    return url if len(url) <= 200 else url[:200] + "…"


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}" if noun != "no" else "no"


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
