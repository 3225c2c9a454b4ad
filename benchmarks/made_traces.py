"""Requests that nobody recorded, each a chain of page numbers, head first: what a policy of eviction may meet.

Chats come back after a minute or two, or never; agents grow by a few pages within seconds; documents are shared,
popular ones more; scans and floods are never seen again. Then all of these by turns, for as long as a policy needs to
believe in one of them: what is hardest for one that learns.
"""

import heapq
import itertools
import random
from collections.abc import Sequence

Chain = tuple[int, ...]
CHAT_RETURNS = (0.31, 0.42, 0.51, 0.58, 0.6, 0.68, 0.75)  # after so many requests; as on the public trace


class Making:
    """`pages` of each trace are asked for, or a few more."""

    def __init__(self, seed: int, pages: int) -> None:
        self.chance = random.Random(seed)
        self.pages = pages
        self._fresh = itertools.count()

    def new(self, count: int) -> Chain:
        return tuple(itertools.islice(self._fresh, count))

    def chats(
        self, gap_s: float = 123.0, returns: Sequence[float] = CHAT_RETURNS, prompt: int = 1, share: float = 1.0
    ) -> list[Chain]:
        """Conversations; each request has all but the last page of the one before."""
        chance, events, total, start_s = self.chance, [], 0, 0.0
        system = self.new(prompt)
        while total < self.pages * share:
            start_s += chance.expovariate(2.0)
            chain = system + self.new(1 + int(14 * chance.lognormvariate(0, 1)))
            at_s, turn = start_s, 0
            while True:
                events.append((at_s, len(events), chain))
                total += len(chain)
                if chance.random() > returns[min(turn, len(returns) - 1)]:
                    break
                turn += 1
                at_s += 12 + gap_s * chance.lognormvariate(0, 0.9)
                chain = chain[:-1] + self.new(2 + int(6 * chance.lognormvariate(0, 0.8)))
        return [chain for _, _, chain in sorted(events)]

    def agents(
        self, count: int = 30, prompt: int = 24, turns: int = 40, gap_s: float = 10.0, share: float = 1.0
    ) -> list[Chain]:
        """So many at a time, which begin with one of four prompts and call tools; some have helpers beside them."""
        chance = self.chance
        prompts = [self.new(prompt) for _ in range(4)]

        def begun(at_s: float) -> tuple[float, int, Chain, int]:
            task = chance.choice(prompts) + self.new(chance.randint(2, 20))
            return at_s, next(numbers), task, 1 + int(chance.expovariate(1 / turns))

        numbers, events, total = itertools.count(), [], 0
        due = [begun(chance.random() * 600) for _ in range(count)]
        heapq.heapify(due)
        while total < self.pages * share:
            at_s, number, chain, left = heapq.heappop(due)
            events.append((at_s, number, chain))
            total += len(chain)
            if chance.random() < 0.05:
                helper = chain[: max(prompt, len(chain) // 2)] + self.new(5)
                events.append((at_s + gap_s * chance.random(), next(numbers), helper))
            if left and len(chain) < 400:
                pause_s = chance.expovariate(1 / gap_s) + (chance.random() < 0.05) * chance.expovariate(1 / 30 / gap_s)
                longer = chain + self.new(chance.randint(1, 7))
                heapq.heappush(due, (at_s + pause_s, next(numbers), longer, left - 1))
            else:
                heapq.heappush(due, begun(at_s + 3 * chance.expovariate(1 / gap_s)))
        return [chain for _, _, chain in sorted(events)]

    def documents(self, count: int = 600, skew: float = 0.9, share: float = 1.0) -> list[Chain]:
        """A prompt, one of so many documents and a question; some are asked once more."""
        chance, prompt = self.chance, self.new(4)
        texts = [self.new(chance.randint(8, 40)) for _ in range(count)]
        weights = [1 / (rank + 1) ** skew for rank in range(count)]
        found: list[Chain] = []
        recent: list[Chain] = []
        total = 0
        while total < self.pages * share:
            if recent and chance.random() < 0.3:
                chain = recent.pop(chance.randrange(len(recent))) + self.new(2)
            else:
                chain = prompt + chance.choices(texts, weights)[0] + self.new(chance.randint(1, 3))
            found.append(chain)
            recent = [*recent[-49:], chain]
            total += len(chain)
        return found

    def popular(self, count: int = 3000, skew: float = 1.0, share: float = 1.0) -> list[Chain]:
        """The same prompts again and again, some more than others."""
        chance, total = self.chance, 0
        texts = [self.new(chance.randint(4, 60)) for _ in range(count)]
        sums = list(itertools.accumulate(1 / (rank + 1) ** skew for rank in range(count)))
        found = []
        while total < self.pages * share:
            found.append(chance.choices(texts, cum_weights=sums)[0])
            total += len(found[-1])
        return found

    def scan(self, share: float = 1.0) -> list[Chain]:
        """Nothing is asked for twice."""
        found: list[Chain] = []
        total = 0
        while total < self.pages * share:
            found.append(self.new(self.chance.randint(5, 60)))
            total += len(found[-1])
        return found

    def loop(self, count: int = 200, share: float = 1.0) -> list[Chain]:
        """So many prompts of 20 pages in turn."""
        texts = [self.new(20) for _ in range(count)]
        return list(itertools.islice(itertools.cycle(texts), int(self.pages * share) // 20))

    def bursts(self, share: float = 1.0) -> list[Chain]:
        """Jobs of many short questions behind one long prompt; some prompts come again."""
        chance, total = self.chance, 0
        prompts: list[Chain] = []
        found = []
        while total < self.pages * share:
            again = bool(prompts) and chance.random() < 0.3
            prompt = chance.choice(prompts) if again else self.new(chance.randint(20, 60))
            prompts = [*prompts[-19:], prompt]
            for _ in range(chance.randint(30, 200)):
                found.append(prompt + self.new(chance.randint(1, 4)))
                total += len(found[-1])
        return found

    def mixed(self, *traces: Sequence[Chain]) -> list[Chain]:
        """All at the same time."""
        left = [list(reversed(trace)) for trace in traces]
        found = []
        while any(left):
            found.append(self.chance.choices(left, [len(trace) for trace in left])[0].pop())
        return found


def by_turns(pages: int, *traces: Sequence[Chain]) -> list[Chain]:
    """So many pages of each, one after the other."""
    left = [iter(trace) for trace in traces]
    found: list[Chain] = []
    while left:
        for trace in list(left):
            total = 0
            while total < pages and (chain := next(trace, None)) is not None:
                found.append(chain)
                total += len(chain)
            if total < pages:
                left.remove(trace)
    return found


def made_traces(seed: int, pages: int) -> dict[str, list[Chain]]:
    """By name; numbers of pages mean another page in each trace."""
    make = Making(seed, pages)
    slow = {"count": 120, "turns": 25, "gap_s": 60.0}
    once, never = (0.9, 0.0), (0.15, 0.9, 0.95, 0.95, 0.95, 0.95, 0.95, 0.0)
    found = {
        "chats": make.chats(),
        "chats, 30 s": make.chats(gap_s=30.0),
        "chats, prompt of 16": make.chats(prompt=16, returns=(0.5,)),
        "agents": make.agents(),
        "agents, slow": make.agents(**slow),
        "agents, prompt of 100": make.agents(count=60, prompt=100, turns=10),
        "documents": make.documents(),
        "documents, all alike": make.documents(count=300, skew=0.3),
        "popular": make.popular(),
        "popular, less skew": make.popular(count=1000, skew=0.7),
        "scan": make.scan(share=0.5),
        "scan and agents": make.mixed(make.scan(), make.agents()),
        "loop of 4,000": make.loop(),
        "bursts": make.bursts(),
        "all tenants": make.mixed(make.chats(), make.agents(), make.documents(), make.scan(), make.bursts()),
        "chats, agents, chats, documents": [*make.chats(), *make.agents(), *make.chats(), *make.documents()],
        "agents, flood, agents": [*make.agents(), *make.scan(), *make.agents(), *make.scan(), *make.agents()],
    }
    for turn in (5_000, 10_000, 30_000, 60_000):
        by = {
            "chats/agents": (make.chats(), make.agents()),
            "chats/slow agents": (make.chats(), make.agents(**slow)),
            "once more/never less": (make.chats(60, once), make.chats(60, never)),
            "once more/never less/agents": (make.chats(30, once), make.chats(30, never), make.agents()),
            "short/long gaps": (make.chats(10, (0.6,)), make.chats(300, (0.6,))),
            "popular/chats/documents": (
                make.popular(),
                make.chats(prompt=16, returns=(0.5,)),
                make.documents(300, 0.3),
            ),
            "documents/popular/loop": (make.documents(), make.popular(count=500), make.loop(300)),
        }
        found |= {f"{name} by {turn:,}": by_turns(turn, *traces) for name, traces in by.items()}
    return found
