"""The server of `lindt watch` (Starlette on uvicorn): the page, the list of runs, one run, and its new rounds.

/             the page
/api/runs     one row for every run
/api/run      one whole run: ?id=demo/recovered
/api/events   server-sent events: `runs` when the list changes; for each ?id=...&have=N `more` with the rounds after
              the first N, or `anew` when earlier rounds changed and the page must load the whole run again
"""

from __future__ import annotations

import asyncio
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

from lindt.errors import UserError, in_short
from lindt.report.page import empty_page, script_hashes
from lindt.report.payload import PrivacySpent, whole_run
from lindt.report.reading import Run
from lindt.watch.auth import AuthMiddleware, policy
from lindt.watch.cache import LIST_EVERY, LOOK_EVERY, SnapshotCache, event
from lindt.watch.index import RunIndex
from lindt.watch.timeouts import TimeoutProtocol

LIST_LOOKS = round(LIST_EVERY / LOOK_EVERY)
UNHURRIED = 25  # streams that are updated every half second; with more streams, each is updated less often
MOST_FOLLOWED = 24  # runs in one stream
MOST_CONNECTIONS = 512  # and tasks; a process may open about a thousand files


@final
class Site:
    """The routes and the state that they share."""

    def __init__(self, index: RunIndex) -> None:
        self.index, self.snapshots, self.page = index, SnapshotCache(index), empty_page()
        self.closing = False
        self.streams = 0  # that are open now

    async def show_page(self, _: Request) -> Response:
        return HTMLResponse(self.page)

    async def list_runs(self, _: Request) -> Response:
        return JSONResponse(await to_thread.run_sync(self.index.run_rows))

    async def show_run(self, request: Request) -> Response:
        id = request.query_params.get("id", "")
        try:
            return JSONResponse(await to_thread.run_sync(self._whole, id))
        except UserError as error:
            return PlainTextResponse(self.index.told(error), 404)

    def _whole(self, id: str) -> dict[str, Any]:
        run = self.index.run(id)
        return {**whole_run(run, id, self.index.spent(id, run)), "command": self._repeat(id, run.about)}

    def _repeat(self, id: str, about: dict[str, Any]) -> str:
        from lindt.report.reading import repeat_command

        return repeat_command(str(self.index.folder(id) / "plan.toml"), about.get("task"))

    async def stream(self, request: Request) -> Response:
        ids, have = request.query_params.getlist("id"), request.query_params.getlist("have")
        if len(ids) != len(have) or len(ids) > MOST_FOLLOWED or not all(n.isdecimal() and len(n) < 9 for n in have):
            return PlainTextResponse(f"give id and have in pairs, at most {MOST_FOLLOWED}", 400)
        followed = []
        for id, n in zip(ids, have, strict=True):
            run = (await self.snapshots.at(id)).run
            if run is None:
                return PlainTextResponse(f"there is no run {in_short(id)} here that can be read", 404)
            followed.append(Followed(self.snapshots, id, int(n), run.anew))
        if request.method == "HEAD":  # a stream would not end
            return Response(media_type="text/event-stream")
        return StreamingResponse(self._events(followed), media_type="text/event-stream")

    async def _events(self, followed: list[Followed]) -> AsyncIterator[str]:
        listed, snapshots = "", 0
        self.streams += 1
        try:
            while not self.closing:
                if not followed and snapshots % LIST_LOOKS == 0:
                    rows = await self.snapshots.listed()
                    if rows != listed:
                        yield rows
                    listed = rows
                for one in followed:
                    if changes := await one.changes():
                        yield changes
                if snapshots % 20 == 0:
                    yield ": still here\n\n"  # an answer at once, and no idle connection that a proxy closes
                snapshots += 1
                # With more pages each is updated less often, so that all together take no more of the machine.
                await asyncio.sleep(LOOK_EVERY * max(1.0, self.streams / UNHURRIED))
        finally:
            self.streams -= 1


@final
class Followed:
    """A run that one page follows, and how much of it the page has."""

    def __init__(self, snapshots: SnapshotCache, id: str, have: int, anew: int) -> None:
        self.snapshots, self.id, self.have, self.anew = snapshots, id, have, anew
        self.run: Run | None = None  # as it was last sent, with its budget
        self.spent: PrivacySpent | None = None
        self.rest = ""

    async def changes(self) -> str:
        """An event, or nothing."""
        snapshot = await self.snapshots.at(self.id)
        run = snapshot.run
        if run is None or (run is self.run and snapshot.spent == self.spent):
            return ""  # the run is missing, perhaps for a moment, or has nothing new
        if run.anew != self.anew or len(run.rounds) < self.have:
            self.anew, self.have, self.run, self.rest = run.anew, len(run.rounds), None, ""
            return event("anew", {"id": self.id})
        more = await self.snapshots.more(self.id, snapshot, self.have)
        self.run, self.spent, old = run, snapshot.spent, self.rest
        self.have, self.rest = len(run.rounds), more.rest
        return more.event if more.has_rounds or more.rest != old else ""


def build_app(site: Site, host: str, port: int, token: str | None) -> ASGIApp:
    routes = [
        Route("/", site.show_page),
        Route("/api/runs", site.list_runs),
        Route("/api/run", site.show_run),
        Route("/api/events", site.stream),
    ]
    site_map = Starlette(routes=routes)
    site_map.router.redirect_slashes = False  # it would redirect visitors to any host that their request names
    return AuthMiddleware(site_map, host, port, token, policy(*script_hashes(site.page)))


def configuration(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        # Fixed, because by default uvicorn uses what is installed: websockets, which this server does not need, uvloop.
        http=TimeoutProtocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_level="error",  # visitors' malformed requests would fill the operator's terminal
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=2,
    )


@final
class _Server(uvicorn.Server):
    """A server that ends its streams when it is told to stop; otherwise it would wait for every open page."""

    site: Site

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.site.closing = True
        super().handle_exit(sig, frame)


def serve(root: Path, host: str, port: int, token: str | None, ready: Callable[[str], None]) -> None:
    """Serve until interrupted. `ready` is called with the address once the server listens."""
    site = Site(RunIndex(root))
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        door = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{host}:{port}: cannot listen there: {reason}; name another --host or --port") from None
    with door:
        port = door.getsockname()[1]
        server = _Server(configuration(build_app(site, host, port, token)))
        server.site = site
        ready(f"http://{f'[{host}]' if ':' in host else host}:{port}/{f'?token={token}' if token else ''}")
        server.run(sockets=[door])
