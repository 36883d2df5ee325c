"""The page at `/`: what lies in the folder page/, and nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
}


def page_routes() -> list[BaseRoute]:
    """`/` for the page itself, `/page/NAME` for what it is made of: a route for each file that was there at start."""
    files = sorted(file for file in FOLDER.glob("*") if file.is_file())
    return [Route("/" if file.name == INDEX else f"/page/{file.name}", _serving(file)) for file in files]


def _serving(file: Path) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        return FileResponse(file, headers=HEADERS)

    return serve
