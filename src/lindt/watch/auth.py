"""Who may see the page: a server on loopback answers to its own names only, any other asks for a token.

And what every answer says to the browser: run nothing but the page's own script, ask nobody else for anything.
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
GUESSING = 1.0  # seconds before a wrong token is told so
ASKING = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>lindt</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,"></head>
<body><h1>lindt</h1><p>This page asks for a token. The terminal in which <code>lindt watch</code> runs shows it.</p>
<form method="post" action="enter"><label>Token <input name="token" type="password" autocomplete="current-password"
required autofocus></label> <button>Enter</button></form></body></html>
"""


def host_of(header: str) -> str | None:
    """The name in a Host header, without its port; None where it is none."""
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
    """The token to ask for: the one given, none on loopback, a new one elsewhere."""
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise UserError(f"--token: a token of {len(token)} characters is soon guessed; take at least {SHORTEST_TOKEN}")
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
    """Stands before the app and sees every request first."""

    def __init__(self, app: ASGIApp, host: str, port: int, token: str | None, policy: str) -> None:
        self.app, self.policy, self.token = app, policy, token
        # A page of another site may point its own name at 127.0.0.1 and then read what a browser lets it read.
        self.names = {"localhost", "127.0.0.1", "::1", host} if is_loopback(host) else None
        self.cookie = f"lindt-{port}"  # browsers keep cookies by host alone, whatever the port

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
            return PlainTextResponse("too long", 431)
        if self.names is not None and host_of(request.headers.get("host", "")) not in self.names:
            return PlainTextResponse("this server answers to its own name only", 421)
        if self.token is None:
            return None
        path = str(request.scope["path"]).rstrip("/")  # not request.url, which stumbles over some Host headers
        if request.method == "POST" and path.endswith("/enter"):
            return await self._enter(request)
        if "token" in request.query_params and path == "":
            return await self._admit(request.query_params["token"])
        carried = request.headers.get("authorization", "").removeprefix("Bearer ")
        if _same(request.cookies.get(self.cookie, ""), self._badge()) or _same(carried, self.token):
            return None
        return HTMLResponse(ASKING, 401) if path == "" else PlainTextResponse("a token is asked for here", 401)

    async def _enter(self, request: Request) -> Response:
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > LONGEST_FORM:
                return PlainTextResponse("too long", 413)
        fields = parse_qs(body.decode("utf-8", "replace"))
        return await self._admit(fields.get("token", [""])[0])

    async def _admit(self, token: str) -> Response:
        assert self.token is not None
        if not _same(token, self.token):
            await asyncio.sleep(GUESSING)
            return HTMLResponse(ASKING, 401)
        answer = RedirectResponse("/", 303)  # the token leaves the address, and so the history and the logs
        answer.set_cookie(self.cookie, self._badge(), httponly=True, samesite="strict")
        return answer

    def _badge(self) -> str:
        """What the cookie holds: it opens this server, but is not the token."""
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
