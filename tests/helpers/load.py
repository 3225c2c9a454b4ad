"""Load on a small cluster: growing chats of two tenants, with a system prompt shared per model."""

import random
import threading
from pathlib import Path

import torch
from fleets import Start
from ports import free_ports

from kvstore import Client, ClientConfig, LayerGroup, Namespace, PageLayout, Plane, prefix_hashes

ZONES = {"n1": "rack-a", "n2": "rack-a", "n3": "rack-b"}
PAGE_TOKENS = 16
CHATS = 60


class Load:
    """Three nodes, and a client that runs chats against them.

    `near`: the member that the client talks to. `sampled`: whether the tests sample its history.
    """

    def __init__(self, start: Start, folder: Path) -> None:
        at = dict(zip(ZONES, free_ports(len(ZONES)), strict=True))
        listed = ",".join(f"{name}=127.0.0.1:{at[name]}@{zone}" for name, zone in ZONES.items())
        settings = {
            "cluster": f"static:fleet/{listed}",
            "ram_nbytes": 24 << 20,
            "disk_nbytes": 96 << 20,
        }
        nodes = [
            start(member=name, port=at[name], data_dir=str(folder / name), **settings)
            for name in ZONES
        ]
        self.near = nodes[0]
        self.sampled = True
        self.near.service.hot_prefixes._every = (
            2  # sample more often than usual, because a test lasts a minute
        )
        self._client = Client(
            ClientConfig(f"127.0.0.1:{at['n1']}", timeout_s=60.0, connect_timeout_s=30.0)
        )
        k, v = (Plane(name, "bfloat16", (4, 32)) for name in "kv")
        small = PageLayout(PAGE_TOKENS, (LayerGroup("attention", tuple(range(4)), (k, v)),))
        eight = (
            Plane("k", "float8_e4m3fn", (2, 64)),
            Plane("v", "float8_e4m3fn", (2, 64)),
            Plane("scale", "float32", (2,)),
        )
        other = PageLayout(PAGE_TOKENS, (LayerGroup("attention", tuple(range(6)), eight),))
        self.spaces = [
            Namespace("llama-3.1-8b", small, "team-a", revision="0e9e39f"),
            Namespace("qwen-2.5-7b", other, "team-b"),
        ]

    def run(self, stopped: threading.Event) -> None:
        rng = random.Random(7)
        turns = dict.fromkeys(range(CHATS), 1)
        while not stopped.wait(rng.expovariate(60.0)):
            chat = min(int(rng.expovariate(0.08)), CHATS - 1)
            space = self.spaces[chat % 3 == 0]
            turns[chat] = turns[chat] % 14 + 1
            tokens = [1000 + chat % 3] * 4 * PAGE_TOKENS + [chat] * turns[chat] * 2 * PAGE_TOKENS
            self._request(space, prefix_hashes(tokens, PAGE_TOKENS))

    def _request(self, space: Namespace, hashes: list[bytes]) -> None:
        """Do what an engine does: load the pages that are stored, compute and save the rest."""
        nbytes = space.layout.page_nbytes
        found = self._client.lookup(space, hashes).prefix_pages
        if found:
            self._client.get(space, hashes[:found], [bytearray(nbytes) for _ in range(found)])
        if found < len(hashes):
            self._client.put(space, hashes[found:], [page(space.layout)] * (len(hashes) - found))

    def close(self) -> None:
        self._client.close()


def page(layout: PageLayout) -> bytes:
    """Return a page of realistic values: each head and channel has its own mean and width."""
    parts = []
    for piece in layout.slices:
        shape = (piece.units, *piece.plane.unit_shape)
        made = torch.randn(shape) * torch.rand(shape[1:]) + torch.randn(shape[1:])
        typed = made.to(getattr(torch, piece.plane.dtype)).contiguous()
        parts.append(bytes(typed.view(torch.uint8).flatten().tolist()))
    return b"".join(parts)
