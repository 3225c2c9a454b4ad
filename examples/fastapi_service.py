"""Serve KV pages over HTTP with FastAPI and the asyncio client.

kvstore-node --ram-bytes 1GiB &
pip install fastapi uvicorn
KVSTORE_ADDRESS=localhost:7440 uvicorn --factory examples.fastapi_service:app

    curl -X POST localhost:8000/found -H 'content-type: application/json' -d '[1, 2, 3, 4]'
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from kvstore import Namespace, opaque_layout, prefix_hashes
from kvstore.aio import Client

PAGE_TOKENS, PAGE_NBYTES = 4, 64
TIMEOUT_S = 1.0


class PageService:
    """The handlers of the service; they need no web framework."""

    def __init__(self, client: Client) -> None:
        self.client = client
        layout = opaque_layout(PAGE_NBYTES)
        self.namespace = Namespace("fastapi-example", layout, tenant=client.tenant)

    async def found(self, tokens: Sequence[int]) -> int:
        """Return how many leading tokens of a prompt have stored pages."""
        hashes = prefix_hashes(tokens, PAGE_TOKENS)
        result = await self.client.lookup(self.namespace, hashes, timeout_s=TIMEOUT_S)
        return result.prefix_pages * PAGE_TOKENS

    async def save(self, tokens: Sequence[int], data: bytes) -> int:
        """Store the pages of a prompt; return how many the store keeps."""
        hashes = prefix_hashes(tokens, PAGE_TOKENS)
        pages = [data[i * PAGE_NBYTES :][:PAGE_NBYTES] for i in range(len(hashes))]
        outcomes = await self.client.put(self.namespace, hashes, pages, timeout_s=TIMEOUT_S)
        return sum(outcome.kept for outcome in outcomes)

    async def load(self, tokens: Sequence[int]) -> bytes:
        """Return the leading stored pages of a prompt. A caller that hangs up cancels this."""
        hashes = prefix_hashes(tokens, PAGE_TOKENS)
        buffers = [bytearray(PAGE_NBYTES) for _ in hashes]
        hits = await self.client.get(
            self.namespace, hashes, buffers, prefix=True, timeout_s=TIMEOUT_S
        )
        return b"".join(buffers[: sum(hits)])


def app(config: Any = None) -> Any:
    """Return the FastAPI application; one client serves all requests."""
    from fastapi import Body, FastAPI, Request, Response

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with Client(config) as client:
            app.state.service = PageService(client)
            yield

    api = FastAPI(lifespan=lifespan)

    async def found(request: Request, tokens: list[int] = Body()) -> int:  # noqa: B008
        return await request.app.state.service.found(tokens)

    async def load(request: Request, tokens: list[int] = Body()) -> Response:  # noqa: B008
        return Response(await request.app.state.service.load(tokens))

    api.post("/found")(found)
    api.post("/load")(load)
    return api


async def main(address: str) -> tuple[int, int, bool]:
    """Store and load a prompt's pages without a web server; return what was found."""
    tokens, data = list(range(18)), bytes(range(256))  # four pages of 4 tokens and 64 bytes
    async with Client(address) as client:
        service = PageService(client)
        kept = await service.save(tokens, data)
        counts, loaded = await asyncio.gather(service.found(tokens), service.load(tokens))
    print(f"kept {kept} pages, found {counts} tokens, equal {loaded == data}")
    return kept, counts, loaded == data


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "localhost:7440"))
