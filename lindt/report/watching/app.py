"""The server of `lindt watch` (Starlette on uvicorn): the page, the list of runs, a run, and what is new in it.

/             the page
/api/runs     every run in a row
/api/run      one run whole: ?id=demo/recovered
/api/events   server-sent events: `runs` when the list changes; for each ?id=...&have=N `more` with the rounds after
              the first N, or `anew` when the run was cut back and has to be taken whole again
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import FrameType
from typing import Any, final

import uvicorn
from anyio import to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from lindt.errors import UserError
from lindt.report.document import empty_page, script_hashes
from lindt.report.payload import progress, whole_run
from lindt.report.watching.admission import Admission, policy
from lindt.report.watching.shelf import Shelf

LOOK_EVERY = 0.5  # seconds
LIST_EVERY = 4  # looks
MOST_FOLLOWED = 24  # runs in one stream


@final
class Site:
    """What the routes share."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf, self.page = shelf, empty_page()
        self.closing = False

    async def show_page(self, _: Request) -> Response:
        return HTMLResponse(self.page)

    async def list_runs(self, _: Request) -> Response:
        return JSONResponse(await to_thread.run_sync(self.shelf.briefs))

    async def show_run(self, request: Request) -> Response:
        id = request.query_params.get("id", "")
        try:
            return JSONResponse(await to_thread.run_sync(self._whole, id))
        except UserError as error:
            return PlainTextResponse(str(error).replace(f"{self.shelf.root}/", ""), 404)

    def _whole(self, id: str) -> dict[str, Any]:
        run = self.shelf.run(id)
        return {**whole_run(run, id, self.shelf.spent(id, run)), "command": self._repeat(id, run.about)}

    def _repeat(self, id: str, about: dict[str, Any]) -> str:
        from lindt.report.kept_plan import repeat_command

        return repeat_command(str(self.shelf.folder(id) / "plan.toml"), about.get("task"))

    async def stream(self, request: Request) -> Response:
        ids, have = request.query_params.getlist("id"), request.query_params.getlist("have")
        if len(ids) != len(have) or len(ids) > MOST_FOLLOWED or not all(n.isdecimal() and len(n) < 9 for n in have):
            return PlainTextResponse(f"give id and have in pairs, at most {MOST_FOLLOWED}", 400)
        try:
            followed = [Followed(self.shelf, id, int(n)) for id, n in zip(ids, have, strict=True)]
        except UserError as error:
            return PlainTextResponse(str(error), 404)
        return StreamingResponse(self._events(followed), media_type="text/event-stream")

    async def _events(self, followed: list[Followed]) -> AsyncIterator[str]:
        listed: list[dict[str, Any]] | None = None
        looks = 0
        while not self.closing:
            if not followed and looks % LIST_EVERY == 0:
                rows = await to_thread.run_sync(self.shelf.briefs)
                if rows != listed:
                    yield _event("runs", rows)
                listed = rows
            for one in followed:
                for name, value in await to_thread.run_sync(one.news):
                    yield _event(name, value)
            if looks % 20 == 0:
                yield ": still here\n\n"  # an answer at once, and no idle line for a proxy to cut
            looks += 1
            await asyncio.sleep(LOOK_EVERY)


@final
class Followed:
    """A run that one page follows, and how much of it the page has."""

    def __init__(self, shelf: Shelf, id: str, have: int) -> None:
        self.shelf, self.id, self.have = shelf, id, have
        self.anew = shelf.run(id).anew
        self.told: dict[str, Any] | None = None

    def news(self) -> list[tuple[str, Any]]:
        try:
            run = self.shelf.run(self.id)
        except UserError:  # taken away while it was followed; it may come back
            return []
        if run.anew != self.anew or len(run.rounds) < self.have:
            self.anew, self.have, self.told = run.anew, len(run.rounds), None
            return [("anew", {"id": self.id})]
        found = progress(run, self.id, self.shelf.spent(self.id, run), self.have)
        rest = {name: value for name, value in found.items() if name != "rounds"}
        if not found["rounds"] and rest == self.told:
            return []
        self.have, self.told = len(run.rounds), rest
        return [("more", found)]


def _event(name: str, value: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n"  # JSON has no line breaks of its own


def build_app(site: Site, host: str, port: int, token: str | None) -> ASGIApp:
    routes = [
        Route("/", site.show_page),
        Route("/api/runs", site.list_runs),
        Route("/api/run", site.show_run),
        Route("/api/events", site.stream),
    ]
    return Admission(Starlette(routes=routes), host, port, token, policy(*script_hashes(site.page)))


def configuration(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        # Not whatever else is installed: uvicorn would take websockets, which nothing here speaks, and uvloop.
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=200,
        timeout_graceful_shutdown=2,
    )


@final
class _Server(uvicorn.Server):
    """Streams end when the server is told to stop; otherwise it would wait for every open page."""

    site: Site

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.site.closing = True
        super().handle_exit(sig, frame)


def serve(root: Path, host: str, port: int, token: str | None, ready: Callable[[str], None]) -> None:
    """Serve until interrupted. `ready` is called with the address once the port is taken."""
    site = Site(Shelf(root))
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        door = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{host}:{port} cannot be served: {reason}; name another --host or --port") from None
    with door:
        port = door.getsockname()[1]
        server = _Server(configuration(build_app(site, host, port, token)))
        server.site = site
        ready(f"http://{f'[{host}]' if ':' in host else host}:{port}/{f'?token={token}' if token else ''}")
        server.run(sockets=[door])
