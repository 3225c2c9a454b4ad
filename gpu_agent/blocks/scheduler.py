"""Serve an engine's scheduler: hits for waiting requests, orders for the ranks.

    ask ... matched, matched, ... -> allocated -> step (load order) -> report -> step (save orders)
    ... finished

For engines that schedule requests with block tables and hash their blocks themselves (vLLM).
Nothing here waits or touches KV: `ranks.py` moves it on every rank, by the orders made here.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from gpu_agent.blocks.cost_model import PROMPT_TOKENS_MIN, HitPolicy, LoadCostModel
from gpu_agent.blocks.groups import (
    NEVER,
    NULL_BLOCK,
    BlockGroup,
    EngineRequest,
    Tables,
    TrackedRequest,
    by_end,
    loaded_blocks,
    longest_prefix,
    tokens_by_tier,
)
from gpu_agent.blocks.handover import HandoverCounts, Handovers, Next, Ticket
from gpu_agent.blocks.lookups import Answer, Lookups, presence
from gpu_agent.blocks.save_plan import GroupBlocks, LoadOrder, Report, SavePlan, StepOrders
from kvstore.keys import Namespace
from kvstore.results import Tier

log = logging.getLogger(__name__)

# An engine without other work waits so long for an answer, once: less than its next step takes.
IDLE_WAIT_S = 0.005
ALONE_MAX = 16  # running requests: with so many, one of them is being computed
REFRESH_S = 2.0  # how long an answer is valid while a request waits
QUIET_MAX = 1 << 20  # most steps without looking for due blocks
COUNTS_WAIT_S = 0.25  # between the last block read and the outcome of its save
DEFERRED_BLOCKS = 256  # of a request that ended, remembered together
DROP_LOG_PAUSE_S = 10.0  # between two log lines with the same reason


@dataclass
class MatchCounts(HandoverCounts):
    """Count requested and loaded tokens, hits, declined hits and dropped pages.

    Loaded tokens count in all and by the tiers where lookups found them. A declined hit would have
    been slower than computing; a dropped page left the engine's cache before it could be saved.
    `prefill_seconds_saved`: time to compute loaded tokens; 0 until some prompts were computed.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    hit_tokens_ram: int = 0
    hit_tokens_disk: int = 0
    hit_tokens_peer: int = 0
    prefill_seconds_saved: float = 0.0
    hits: int = 0
    hits_declined: int = 0
    pages_dropped: int = 0


class StateOffer(NamedTuple):
    """An engine's offer of a recurrent state, valid in one step.

    After the step, `block` of the group holds the state of the first `end_tokens` tokens of the
    request.
    """

    group: int
    block: int
    end_tokens: int


class BlockScheduler:
    """Serve an engine's scheduler. Not thread-safe.

    `shards`: for each group the namespaces of all shards, each once. `hash_tokens`: tokens of one
    of the engine's hashes. `step_tokens`: lengths of hits are multiples of it. A hit of fewer than
    `min_tokens` tokens is ignored; with a `cost_model`, so is one slower than computing, unless it
    `takes_slow` ones.
    `full_hits`: a hit may cover the last token, which the engine then computes again. It never
    does with recurrent states, because the token would be added to them twice.

    `loads`, `saves`: whether it does. `handover_wait_s`: longest wait for pages of a ticket.

    Loads run beside steps: a request computes nothing, and no other one reads its blocks, until its
    load has ended on all ranks. So no step ever computes over blocks of a load that fails.
    """

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        shards: Sequence[Sequence[Namespace]],
        hash_tokens: int,
        step_tokens: int,
        lookups: Lookups,
        plan: SavePlan,
        min_tokens: int = 1,
        cost_model: LoadCostModel | None = None,
        takes_slow: bool = False,
        full_hits: bool = True,
        loads: bool = True,
        saves: bool = True,
        handover_wait_s: float = 0.0,
    ) -> None:
        self._counts = MatchCounts()
        self._can_load, self._can_save = loads, saves
        self._groups = groups
        self._has_windows = any(group.needs_tail_only and not group.is_state for group in groups)
        self._last_tokens = int(not full_hits or any(group.is_state for group in groups))
        self._shards = shards
        units = (hash_tokens, step_tokens, self._last_tokens)
        self._handovers = Handovers(lookups, handover_wait_s, self._counts, groups, *units)
        self._hash_tokens = hash_tokens
        self._step_tokens = step_tokens
        self._lookups = lookups
        self._plan = plan
        self._min_tokens = max(1, min_tokens)
        self._hit_policy = HitPolicy(cost_model, takes_slow)
        self._has_untracked = False  # the newest step has requests without a lookup
        # A hit was reported since the newest step, so only blocks can keep its request from running
        self._hit_reported = False
        # Steps in which the same requests complete no due block, each with one token per step.
        self._quiet_steps, self._quiet_requests = 0, frozenset[str]()
        self._requests: dict[str, TrackedRequest] = {}
        self._ended: dict[str, TrackedRequest] = {}  # ended requests whose loads have not ended
        self._loads: list[LoadOrder] = []
        self._stopped = False  # saving is off, see `stop_saving`
        self._epoch: int | None = None
        self._step = 0
        self._seen_at = 0.0  # time of the ranks' last report
        self._read_at = 0.0  # time of the last report with blocks that were read
        self._uncounted = False  # saves ended or are running that no metric shows yet
        self._unlogged_drops = 0  # dropped blocks since the last log line about them
        self._next_log_at = 0.0
        lookups.open([namespace for group in shards for namespace in group])

    @property
    def busy(self) -> bool:
        """Return whether the engine must keep stepping for us.

        It must until the last block is read, and then for at most `COUNTS_WAIT_S`, so that the
        outcome of a save shows in the engine's metrics before the engine idles.
        """
        return self._plan.busy or (
            self._uncounted and time.monotonic() < self._read_at + COUNTS_WAIT_S
        )

    # ---- life of a request -----------------------------------------------------------------

    def ask(self, request: EngineRequest, ticket: Ticket | None = None) -> None:
        """Begin the lookup of a new request, which waits for what its ticket promises."""
        never_saved = self._stopped or not self._can_save
        self._requests[request.request_id] = TrackedRequest(
            request, [0] * len(self._groups), never_saved=never_saved
        )
        self._ask(request)
        if ticket and self._can_load:
            self._handovers.expect(request, ticket, self._shards)

    def matched(self, request: EngineRequest, local_tokens: int) -> int | None:
        """Return how many tokens beyond `local_tokens` can be loaded; None if not known yet.

        The engine asks this repeatedly.
        """
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.load_failed:
            self._hit_reported = True
            return 0
        if self._handovers.rests(request.request_id):
            return None
        age_s = self._lookups.age_s(request.request_id)
        if age_s is None:  # it was preempted after its first admission
            self._ask(request)
            tracked.polled, tracked.declined = False, None
        elif age_s > REFRESH_S:  # it waited so long that other pages may be stored now
            # The old answer stands until the new one is known: after a None, an engine would give
            # the blocks kept for this request to those behind it.
            self._ask(request, self._lookups.answer(request.request_id))
        answer = self._lookups.answer(request.request_id)
        if not tracked.polled:
            tracked.polled = True
            answer = self._lookups.awaited(
                request.request_id, IDLE_WAIT_S if self._alone(tracked) else 0.0
            )
        if answer is None:
            return None
        tracked.tiers, answer = answer, presence(answer)
        limit, end = request.num_tokens - self._last_tokens, local_tokens
        if answer:
            end = longest_prefix(self._groups, answer, local_tokens, limit, self._step_tokens)
        if self._waits(tracked, local_tokens, end):
            return None
        if (
            end - local_tokens < self._min_tokens
            or not self._can_load
            or self._declines(tracked, local_tokens, end)
        ):
            end = local_tokens
        tracked.present, tracked.hit = answer, (local_tokens, end)
        self._hit_reported = True
        return end - local_tokens

    def _waits(self, tracked: TrackedRequest, local_tokens: int, end: int) -> bool:
        """Return whether a request waits for its handover. `end`: of what it could have now."""
        request = tracked.request
        if not (goal := self._handovers.goal(request.request_id)):
            return False
        few = goal - local_tokens < self._min_tokens
        if few or self._declines(tracked, local_tokens, goal):
            self._handovers.drop(request.request_id)  # such a hit would not be taken
            return False
        if (found := self._handovers.next(request.request_id, end)) is Next.LOOK:
            self._ask(request)
        return found is not Next.GO

    def allocated(self, request: EngineRequest, tables: Tables, tokens: int) -> None:
        """Note that a request was admitted with blocks for `tokens` tokens of the offer."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.loading:
            return
        # Also for a request without a second lookup, because a load of it failed
        tracked.scheduled, tracked.drafted_at, self._quiet_steps = False, None, 0
        if self._lookups.age_s(request.request_id) is not None:
            self._lookups.drop(request.request_id)
            self._handovers.drop(request.request_id)
            self._plan_anew(tracked)
            self._counts.queried_tokens += request.num_tokens - tracked.hit[0]
        if not tokens:
            return
        local, end = tracked.hit[0], tracked.hit[0] + tokens
        parts, loaded = [], []
        for number, group in enumerate(self._groups):
            wanted = [
                i for i in loaded_blocks(group, local, end) if tables[number][i] != NULL_BLOCK
            ]
            keys = group.keys_of(request.block_hashes, self._hash_tokens, wanted)
            parts.append(GroupBlocks(number, keys, [tables[number][i] for i in wanted]))
            loaded.append(wanted)
        self._loads.append(LoadOrder(request.request_id, parts))
        tracked.loading, tracked.load_began_at = self._plan.ranks, time.monotonic()
        shares = tokens_by_tier(self._groups, tracked.tiers, loaded, tokens)
        self._counts.hits += 1
        self._counts.hit_tokens += tokens
        self._counts.hit_tokens_ram += shares.get(Tier.RAM, 0)
        self._counts.hit_tokens_disk += shares.get(Tier.DISK, 0)
        self._counts.hit_tokens_peer += shares.get(Tier.PEER, 0)

    def step(
        self,
        scheduled: Mapping[str, int],
        table_of: Callable[[str], Tables],
        offers: Mapping[str, Sequence[StateOffer]] = MappingProxyType({}),
        drafted: Iterable[str] = (),
    ) -> StepOrders:
        """Finish the scheduling of a step and return the ranks' orders.

        `scheduled` maps requests to their tokens in this step. Tables are requested only if there
        is something to save: most steps of most requests complete no block. `offers`: recurrent
        states, by request. `drafted`: requests with draft tokens in this step.
        """
        self._step += 1
        self._lookups.poll()
        saves = self._plan.orders()
        self._plan.begin(self._step)
        loads, self._loads = self._loads, []
        self._note_drafts(drafted)
        # First, because they are few and are not offered again
        self._stage_states(scheduled, offers)
        # Then a request may be preempted, and comes back with what is stored
        scarce = self._plan.scarce()
        prompts, short = list[tuple[int, int]](), False
        if (
            self._quiet_steps
            and not scarce
            and scheduled.keys() == self._quiet_requests
            and set(scheduled.values()) == {1}
        ):
            self._quiet_steps -= 1
        else:
            prompts, short = self._stage_step(scheduled, table_of, scarce)
        if self._plan.has_late:
            self._plan.stage_late()
        self._drop(self._plan.take_lost())
        self._hit_policy.step_begins(self._step, time.monotonic(), prompts, short)
        blocked, self._hit_reported = self._hit_reported and not (scheduled or loads), False
        return StepOrders(self._step, self._epoch, loads, saves, scarce or blocked)

    def _stage_step(
        self, scheduled: Mapping[str, int], table_of: Callable[[str], Tables], scarce: bool
    ) -> tuple[list[tuple[int, int]], bool]:
        """Stage the blocks of a step; return the arguments of `LoadCostModel.step_begins`."""
        prompts, short = list[tuple[int, int]](), False
        self._has_untracked = False
        self._quiet_steps = QUIET_MAX
        for request_id, tokens in scheduled.items():
            tracked = self._requests.get(request_id)
            if tracked is None:
                self._has_untracked = True
                continue
            tracked.scheduled = True
            computed = tracked.request.num_computed_tokens + tokens
            if tokens >= PROMPT_TOKENS_MIN:
                prompts.append((computed - tokens, tokens))
            elif tokens > 1:
                short = True
            due = not (tracked.never_saved or tracked.loading) and computed >= (
                tracked.next_tokens if scarce else tracked.due_tokens
            )
            # In most steps nothing is due, and most engines have no windows
            if (
                due
                and (not self._plan.room or self._stage(tracked, computed, table_of(request_id)))
                and self._has_windows
            ):
                found, tables = tracked.plan_tail(
                    self._groups, self._step_tokens, computed, partial(table_of, request_id)
                )
                if tables:
                    self._defer(tracked, found, tables)
            if not tracked.never_saved:
                self._quiet_steps = min(
                    self._quiet_steps, max(0, tracked.due_tokens - computed - 1)
                )
        self._quiet_requests = frozenset(scheduled)
        return prompts, short

    def ran(self, report: Report) -> None:
        """Take the ranks' report for a step whose results the engine has seen."""
        for job, ranks in report.acknowledged.items():
            self._plan.acknowledge(job, ranks)
        seen_at, self._seen_at = self._seen_at, time.monotonic()
        self._uncounted = report.uncounted > 0
        if report.acknowledged:
            self._read_at = self._seen_at
        if report.failed:
            # They failed after the previous report: perhaps right after it, beside a long step.
            self._loads_failed(report.failed, seen_at)
        self._hit_policy.step_ended(report.step, self._seen_at, report.away)
        if report.finished:
            self._loads_ended(report.finished)
        for request_id in self._plan.ran(report.step):
            if request_id in self._requests:
                self._plan_anew(self._requests[request_id])

    def finished(self, request: EngineRequest, tables: Tables) -> None:
        """End a request whose blocks are about to be freed."""
        tracked = self._requests.pop(request.request_id, None)
        self._lookups.drop(request.request_id)
        self._handovers.drop(request.request_id)
        if tracked is None:
            return
        if tracked.loading:
            self._ended[request.request_id] = tracked
            return
        # Otherwise another connector may still be loading blocks that count as computed
        computed = request.num_computed_tokens
        if tracked.scheduled and self._stage(tracked, computed, tables):
            found, _ = tracked.plan(self._groups, self._hash_tokens, computed, tables, NEVER)
            self._defer(tracked, found, tables)
        if not tracked.never_saved:
            self._lookups.touch(request.request_id, self.question(request))

    def hand_over(self, request: EngineRequest, tables: Tables) -> Ticket | None:
        """End a request like `finished`, and promise its prompt to another engine.

        None: nothing will be saved that is not stored yet.
        """
        tracked, dropped = self._requests.get(request.request_id), self._counts.pages_dropped
        self.finished(request, tables)
        lost = self._counts.pages_dropped > dropped
        if tracked is None or tracked.never_saved or tracked.loading or lost:
            return None
        self._plan.hurry(request.request_id)
        return self._handovers.promise(request, self._shards, tracked.states, tracked.gone)

    def reset(self) -> None:
        """Invalidate everything stored so far, and what current requests have computed.

        The new epoch is random, because other engines may serve other weights.
        """
        self._epoch = secrets.randbits(63)
        self._shards = [
            [replace(namespace, epoch=self._epoch) for namespace in group] for group in self._shards
        ]
        self._lookups.drop_all()
        self._handovers.drop_all()
        self.stop_saving()
        self._stopped = False

    def stop_saving(self) -> bool:
        """Save nothing until `reset`, because the engine may compute wrong values.

        Current requests are not saved after it, either. Return whether saving was on.
        """
        stopped, self._stopped = self._stopped, True
        self._plan.forget()
        for tracked in self._requests.values():
            tracked.never_saved = True
        return not stopped

    @property
    def counted(self) -> bool:
        """Return whether `take_counts` would return anything."""
        return any(vars(self._counts).values())

    def take_counts(self) -> MatchCounts:
        """Return the counts since the last call."""
        counts = self._counts
        self._counts = self._handovers.counts = MatchCounts()
        return counts

    def check(self) -> list[str]:
        """Return violated invariants; empty if all is well."""
        return self._plan.check() + self._lookups.check()

    # ---- in detail --------------------------------------------------------------------------

    def _known(self, request_ids: Iterable[str]) -> Iterator[tuple[str, TrackedRequest]]:
        """Yield current requests and those that ended before their loads."""
        for request_id in request_ids:
            tracked = self._requests.get(request_id) or self._ended.get(request_id)
            if tracked:
                yield request_id, tracked

    def _loads_failed(self, failed: set[str], at: float) -> None:
        for _, tracked in self._known(failed):
            if not tracked.load_failed:
                self._hit_policy.failed(max(0.0, at - tracked.load_began_at))
            tracked.load_failed = True
            tracked.present = ()
            self._plan_anew(tracked)  # missing or corrupt pages are saved again

    def _loads_ended(self, finished: Mapping[str, int]) -> None:
        """Handle ended loads; `finished` maps requests to the ranks that ended theirs."""
        loads: list[TrackedRequest] = []
        for request_id, tracked in self._known(finished):
            loading = tracked.loading
            tracked.loading = max(0, loading - finished[request_id])
            if loading and not tracked.loading:
                self._ended.pop(request_id, None)
                if not tracked.load_failed:
                    loads.append(tracked)
        if loads:
            tokens = sum(tracked.hit[1] - tracked.hit[0] for tracked in loads)
            saved_s = sum(self._hit_policy.computing_s(*tracked.hit) for tracked in loads)
            self._counts.prefill_seconds_saved += saved_s
            self._hit_policy.loads_ended(
                len(loads), tokens, min(tracked.load_began_at for tracked in loads), self._seen_at
            )

    def _declines(self, tracked: TrackedRequest, start: int, end: int) -> bool:
        """Return whether to decline a hit because computing is faster or no load would end.

        The decision is kept, because the engine may ask in every step.
        """
        if tracked.declined is None or tracked.decided_hit != (start, end):
            was, tracked.decided_hit = tracked.declined, (start, end)
            tracked.declined = not self._hit_policy.accepts(
                start, end, self._alone(tracked), granted=was is False
            )
            self._counts.hits_declined += tracked.declined and not was
        return tracked.declined

    def _alone(self, tracked: TrackedRequest) -> bool:
        """Return whether the engine computes no other request."""
        requests = self._requests.values()
        return (
            not self._has_untracked
            and len(requests) <= ALONE_MAX
            and all(other is tracked or other.loading for other in requests)
        )

    def question(self, request: EngineRequest) -> list[tuple[Sequence[Namespace], list[bytes]]]:
        """Return the namespaces and keys of each group of a request."""
        return [
            (shards, group.keys(request.block_hashes, self._hash_tokens))
            for group, shards in zip(self._groups, self._shards, strict=True)
        ]

    def _ask(self, request: EngineRequest, earlier: Answer | None = None) -> None:
        self._lookups.ask(request.request_id, self.question(request), earlier)

    def _stage(self, tracked: TrackedRequest, computed_tokens: int, tables: Tables) -> int:
        """Stage blocks; return how many found no room and will be tried again."""
        if tracked.never_saved or tracked.loading:
            return 0
        room = self._plan.room
        found, left = tracked.plan(self._groups, self._hash_tokens, computed_tokens, tables, room)
        self._plan.stage(tracked.request.request_id, self._parts(tracked.request, found, tables))
        return left

    def _defer(
        self, tracked: TrackedRequest, found: Sequence[Sequence[int]], tables: Tables
    ) -> None:
        """Leave blocks that the engine may free to be saved when there is room."""
        # Some at a time, so that the groups' blocks follow each other by their tokens
        for blocks in by_end(self._groups, found, DEFERRED_BLOCKS):
            parts = self._parts(tracked.request, blocks, tables)
            self._plan.defer(tracked.request.request_id, parts)
        self._drop(self._plan.take_lost())

    def _parts(
        self, request: EngineRequest, found: Sequence[Sequence[int]], tables: Tables
    ) -> list[GroupBlocks]:
        return [
            self._part(request, number, blocks, tables)
            for number, blocks in enumerate(found)
            if blocks
        ]

    def _note_drafts(self, drafted: Iterable[str]) -> None:
        for request_id in drafted:
            tracked = self._requests.get(request_id)
            if tracked and tracked.drafted_at is None:
                tracked.drafted_at = tracked.request.num_computed_tokens

    def _stage_states(
        self, scheduled: Mapping[str, int], offers: Mapping[str, Sequence[StateOffer]]
    ) -> None:
        """Stage the states that the engine offers in this step.

        A request that is not scheduled was preempted within the step, or has just loaded its state.
        """
        for request_id, states in offers.items():
            tracked = self._requests.get(request_id)
            if (
                tracked is None
                or tracked.never_saved
                or tracked.loading
                or request_id not in scheduled
            ):
                continue
            for offer in states:
                part = self._state_part(tracked, offer)
                if part is None:
                    continue
                if self._plan.room:
                    self._plan.stage(request_id, [part])
                else:  # the engine keeps it in its cache for a while
                    self._plan.defer(request_id, [part])

    def _state_part(self, tracked: TrackedRequest, offer: StateOffer) -> GroupBlocks | None:
        """Return the save of an offered state; None if it needs none or cannot be found again.

        An engine may offer a state at any token. Only those at the end of a block have a page.
        """
        group = self._groups[offer.group]
        block, rest = divmod(offer.end_tokens, group.block_tokens)
        hashed_tokens = len(tracked.request.block_hashes) * self._hash_tokens
        if not group.is_state or rest or not 0 < offer.end_tokens <= hashed_tokens:
            return None
        wanted = tracked.wants_state(offer.group, block - 1, offer.end_tokens)
        if offer.block == NULL_BLOCK or not wanted:
            return None
        tracked.states.add((offer.end_tokens, offer.group))
        keys = group.keys_of(tracked.request.block_hashes, self._hash_tokens, [block - 1])
        return GroupBlocks(offer.group, keys, [offer.block])

    def _plan_anew(self, tracked: TrackedRequest) -> None:
        tracked.plan_anew()
        self._quiet_steps = 0

    def _part(
        self, request: EngineRequest, number: int, blocks: Sequence[int], tables: Tables
    ) -> GroupBlocks:
        """Return these blocks of a group as a part of a save."""
        table = tables[number]
        keys = self._groups[number].keys_of(request.block_hashes, self._hash_tokens, blocks)
        whole = isinstance(blocks, range)
        return GroupBlocks(
            number,
            keys,
            list(table[blocks[0] : blocks[-1] + 1])
            if whole
            else [table[block] for block in blocks],
        )

    def _drop(self, blocks: int) -> None:
        """Count blocks that were dropped, unsaved."""
        if not blocks:
            return
        self._counts.pages_dropped += blocks
        self._unlogged_drops += blocks
        if time.monotonic() > self._next_log_at:
            log.warning(
                "%d blocks were not saved: as many were being saved as may be pinned, and the "
                "engine needed these before there was room",
                self._unlogged_drops,
            )
            self._unlogged_drops, self._next_log_at = 0, time.monotonic() + DROP_LOG_PAUSE_S
