"""Access to the live page: a server on loopback answers only to its own host names, any other asks for a token.

Every response carries headers that let the browser run only the page's own script and connect only to this server.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import re
import secrets
from typing import final
from urllib.parse import parse_qs

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lindt.errors import UserError

SHORTEST_TOKEN = 16
LONGEST_HEAD = 16_384  # address and headers together
LONGEST_FORM = 4096
GUESSING = 1.0  # seconds before a wrong token is answered
ASKING = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>lindt</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,"></head>
<body><h1>lindt</h1><p>This page asks for a token. The terminal in which <code>lindt watch</code> runs shows it.</p>
<form method="post" action="enter"><label>Token <input name="token" type="password" autocomplete="current-password"
required autofocus></label> <button>Enter</button></form></body></html>
"""


def host_of(header: str) -> str | None:
    """The name in a Host header, without its port; None where the header is malformed."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9._-]{1,255}))(?::[0-9]{1,5})?", header)
    return (found[1] or found[2]).lower() if found else None


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def token_for(host: str, token: str | None) -> str | None:
    """The token to ask visitors for: `token` where given, else None on loopback and a random one elsewhere."""
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise UserError(f"--token: {len(token)} characters are easy to guess; use at least {SHORTEST_TOKEN}")
    return token or (None if is_loopback(host) else secrets.token_urlsafe(24))


def policy(script: str, style: str) -> str:
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {script}",
            f"style-src {style}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'self'",
            "frame-ancestors 'none'",
        ]
    )


@final
class AuthMiddleware:
    """Checks every request before the app, and adds the headers to every response."""

    def __init__(self, app: ASGIApp, host: str, port: int, token: str | None, policy: str) -> None:
        self.app, self.policy, self.token = app, policy, token
        # DNS rebinding: another site may point its own host name at 127.0.0.1, and its page could then read this one.
        self.names = {"localhost", "127.0.0.1", "::1", host} if is_loopback(host) else None
        self.cookie = f"lindt-{port}"  # browsers share cookies between the ports of a host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        refused = await self._refused(request)
        await (refused or self.app)(scope, receive, self._with_headers(send))

    async def _refused(self, request: Request) -> Response | None:
        asked = [request.scope["query_string"], *(part for header in request.headers.raw for part in header)]
        if len(request.scope["path"]) + sum(map(len, asked)) > LONGEST_HEAD:
            return PlainTextResponse("the request's address and headers are too long", 431)
        if self.names is not None and host_of(request.headers.get("host", "")) not in self.names:
            return PlainTextResponse("this server answers only to its own host name", 421)
        if self.token is None:
            return None
        path = str(request.scope["path"]).rstrip("/")  # not request.url, which fails for some Host headers
        if request.method == "POST" and path.endswith("/enter"):
            return await self._enter(request)
        if "token" in request.query_params and path == "":
            return await self._admit(request.query_params["token"])
        carried = request.headers.get("authorization", "").removeprefix("Bearer ")
        if _same(request.cookies.get(self.cookie, ""), self._badge()) or _same(carried, self.token):
            return None
        return HTMLResponse(ASKING, 401) if path == "" else PlainTextResponse("this server asks for a token", 401)

    async def _enter(self, request: Request) -> Response:
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > LONGEST_FORM:
                return PlainTextResponse("the form is too long", 413)
        fields = parse_qs(body.decode("utf-8", "replace"))
        return await self._admit(fields.get("token", [""])[0])

    async def _admit(self, token: str) -> Response:
        assert self.token is not None
        if not _same(token, self.token):
            await asyncio.sleep(GUESSING)
            return HTMLResponse(ASKING, 401)
        answer = RedirectResponse("/", 303)  # without the token in the address, so that no history or log keeps it
        answer.set_cookie(self.cookie, self._badge(), httponly=True, samesite="strict")
        return answer

    def _badge(self) -> str:
        """The cookie's value: a hash that gives access to this server, and not the token itself."""
        return hashlib.sha256(f"lindt watch {self.token}".encode()).hexdigest()

    def _with_headers(self, send: Send) -> Send:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = self.policy
                headers["X-Content-Type-Options"] = "nosniff"
                headers["X-Frame-Options"] = "DENY"
                headers["Referrer-Policy"] = "no-referrer"
                headers["Cross-Origin-Resource-Policy"] = "same-origin"
                headers["Cross-Origin-Opener-Policy"] = "same-origin"
                headers["Cache-Control"] = "no-store"
            await send(message)

        return sending


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())
