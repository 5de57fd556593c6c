"""What stands before every request: who may ask, how much they may send, and what the browser may do with the answer.

A page on the web must not be able to use the server that runs on the reader's own machine. So the Host header must name
this server (against DNS rebinding), a request that a browser sends from another site is refused, and what changes
anything is JSON, which a foreign page cannot send unasked. Beyond this machine a token is needed, too.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BYTES = 256 * 1024
COOKIE = "headscope_token"

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=(), usb=()",
}


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Refused(Exception):
    """A request that is not answered; the message is for the user."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Guard:
    """ASGI middleware. `hosts`: names by which the server may be called, or None for any (then `token` is needed)."""

    def __init__(self, app: ASGIApp, *, hosts: set[str] | None, token: str | None, policy: str):
        if hosts is None and not token:
            raise ValueError("a server that answers to any name needs a token")
        self.app, self.hosts, self.token = app, hosts, token
        self.headers = {**HEADERS, "Content-Security-Policy": policy}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError("headscope serves http only")
        send = self._with_headers(send, "no-cache" if scope["path"].startswith("/static/") else "no-store")
        headers = Headers(scope=scope)
        try:
            self._check_sender(scope, headers)
            if self.token is not None and await self._check_token(scope, headers, send):
                return
            receive = await self._limited(scope, headers, receive)
        except Refused as refused:
            await answer(send, refused.status, str(refused))
            return
        await self.app(scope, receive, send)

    def _check_sender(self, scope: Scope, headers: Headers) -> None:
        host = headers.get("host", "").lower()
        if self.hosts is not None and host not in self.hosts:
            raise Refused(421, "This server does not answer to that name; open the address that headscope printed.")
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
            raise Refused(403, "Requests from other sites are refused.")
        # browsers say where a request comes from; a link on another site may open the page, but not read the data
        foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
        navigates = headers.get("sec-fetch-mode") == "navigate" and scope["method"] == "GET"
        if foreign and (not navigates or scope["path"].startswith("/api/")):
            raise Refused(403, "Requests from other sites are refused.")
        if scope["method"] not in ("GET", "HEAD", "POST"):
            raise Refused(405, "This server knows GET and POST only.")
        if scope["method"] == "POST" and headers.get("content-type", "").split(";")[0].strip() != "application/json":
            raise Refused(415, "This server takes JSON only (Content-Type: application/json).")

    async def _check_token(self, scope: Scope, headers: Headers, send: Send) -> bool:
        """Whether the request was answered here: a token in the address moves to a cookie, out of history and logs."""
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        in_address = next((value for name, value in query if name == "token"), None)
        if in_address is not None and scope["method"] == "GET" and self._same(in_address):
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            # a path that begins with // would lead to another site
            place = "/" + quote(scope["path"].lstrip("/"), safe="/@>") + (f"?{rest}" if rest else "")
            cookie = f"{COOKIE}={in_address}; Path=/; HttpOnly; SameSite=Strict"
            await answer(send, 303, "", {"Location": place, "Set-Cookie": cookie})
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            try:
                morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
            except CookieError:
                morsel = None
            given = morsel.value if morsel is not None else ""
        if not self._same(given):
            raise Refused(401, "A token is needed; open the address that headscope printed, with its token.")
        return False

    def _same(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self.token or "").encode())

    async def _limited(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        """The whole body, at most MOST_BYTES of it, as one message."""
        if scope["method"] != "POST":
            return receive
        told = headers.get("content-length", "")
        if told.isdigit() and int(told) > MOST_BYTES:
            raise Refused(413, f"The request is larger than {MOST_BYTES // 1024} KiB.")
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > MOST_BYTES:
                raise Refused(413, f"The request is larger than {MOST_BYTES // 1024} KiB.")
        given = False

        async def once() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        return once

    def _with_headers(self, send: Send, cache: str) -> Send:
        async def wrapped(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self.headers.items():
                    headers[name] = value
                headers["Cache-Control"] = cache
            await send(message)

        return wrapped


async def answer(send: Send, status: int, error: str, headers: dict[str, str] | None = None) -> None:
    """A short JSON answer straight from here."""
    body = json.dumps({"error": error}).encode() if error else b""
    every: dict[str, Any] = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    pairs = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in every.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
