"""The page at `/`: index.html, page.css, page.js and icon.svg beside this file, sent as they are.

    app.include_router(page_router())

Nothing is built and nothing comes from another host; the Content-Security-Policy has browsers hold to that. A
browser keeps the files and asks each time whether they have changed (ETag).
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter, Request, Response

PAGE_FILES = {  # by path: the file and its type
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page_router() -> APIRouter:
    """Its routes; the files are read once, now."""
    router = APIRouter(include_in_schema=False)
    for path, (name, kind) in PAGE_FILES.items():
        content = Path(__file__).with_name(name).read_bytes()
        router.add_api_route(path, _file_route(content, kind), methods=["GET", "HEAD"])
    return router


def _file_route(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
        "etag": etag,
    }

    async def send(http: Request) -> Response:
        if etag in http.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=kind)

    return send
