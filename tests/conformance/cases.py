"""The cases. Each writes prompts by one engine, restores them and compares all answers.

A case is a function of a session. It raises `Skip` where it does not apply. Its docstring is its
description in `--list`.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comparison import WRONG, equal
from engine_control import SOUND, answers
from session import MANY, Session, Skip

Case = Callable[[Session], None]
CASES: dict[str, Case] = {}
# Ways to tamper with cached blocks. A model in which one of them does not show proves nothing.
# Blocks that change places do not show, because keys carry their positions.
TAMPERINGS = ("repeat a block", "swap layers", "zero a block", "swap states", "zero a state")
# Cases that check the suite itself on the engine without a connector.
CONTROLS = ("control", "sensitivity")


def case(name: str) -> Callable[[Case], Case]:
    def register(function: Case) -> Case:
        CASES[name] = function
        return function

    return register


# ---- the engine alone ------------------------------------------------------------------------


@case("control")
def control(session: Session) -> None:
    """without a connector: poisoned free blocks and the engine's own hits change nothing"""
    block = session.block
    for length in (block - 1, 3 * block + 4, session.chunk + block + 3):
        prompt = session.prompt(length)
        expected = session.reference.computed(prompt)
        session.plain.fresh()
        poisoned = session.plain.generate(prompt)[0]
        if not equal(poisoned, expected):
            session.checks.wrong.append("the engine itself reads free blocks")
        session.check("poisoned", prompt, poisoned)
        session.check("local hit", prompt, session.plain.generate(prompt)[0])


@case("sensitivity")
def sensitivity(session: Session) -> None:
    """without a connector: wrong blocks, layers and states do change answers"""
    shown = 0
    for how in TAMPERINGS:
        prompt = session.prompt(4 * session.block + 9)
        session.reference.computed(prompt)
        session.plain.ask("reset")
        session.plain.generate(prompt)
        if not session.plain.ask("tamper", how=how, prompt=prompt)["tampered"]:
            continue
        found = session.plain.generate(prompt)[0]
        if not found.cached:
            raise Skip("the engine takes nothing from its own cache")
        if session.reference.verdict(prompt, found).name == WRONG:
            shown += 1
        else:
            session.checks.wrong.append(f"{how} does not show")
    session.plain.ask("reset")
    if not shown and not session.checks.wrong:
        raise Skip("the engine has cached nothing that could be changed")
    session.checks.exact += shown
    session.checks.notes.append(f"{shown} ways show")


# ---- one engine with the connector -----------------------------------------------------------


@case("full hit")
def full_hit(session: Session) -> None:
    """the same prompt again, after the engine's own cache is cleared"""
    prompts = [session.prompt(3 * session.block + 4), session.prompt(4 * session.block + 1)]
    session.write("full", *prompts)
    session.restore("full", *prompts)


@case("partial hit")
def partial_hit(session: Session) -> None:
    """a shared beginning, at and off a block's end, and an extended prompt"""
    block = session.block
    whole = session.prompt(4 * block + 5)
    session.write("whole", whole)
    for shared in (2 * block, 2 * block + block // 2, len(whole)):
        prompt = whole[:shared] + session.prompt(block + 7)
        # Recurrent states exist at some boundaries only, so nothing is wanted here.
        session.restore(f"{shared} shared", prompt, least=min(shared, 4 * block))
    # What was computed behind a restored prefix is itself restored.
    session.restore("extended", prompt)
    # Blocks that were stored, but behind other beginnings.
    other = session.prompt(3 * block + 5)
    session.write("other", other)
    mixed = whole[:block] + other[block : 2 * block] + whole[2 * block :]
    session.restore("mixed", mixed, least=block)


@case("boundaries")
def boundaries(session: Session) -> None:
    """lengths at multiples of block and chunk, one less and one more, then longer prompts"""
    block, chunk = session.block, session.chunk
    lengths = {multiple * block + more for multiple in (1, 2, 3) for more in (-1, 0, 1)}
    lengths |= {multiple * chunk + more for multiple in (1, 2) for more in (-1, 0, 1)}
    lengths |= {chunk + block - 1, chunk + block, chunk + 2 * block + 1}
    for length in sorted(lengths):
        prompt = session.prompt(length)
        session.write(f"{length}", prompt)
        session.restore(f"{length}", prompt)
        session.restore(f"{length} and more", prompt + session.prompt(block + 3), least=length)


@case("chunked prefill")
def chunked_prefill(session: Session) -> None:
    """prompts of several chunks, computed together and restored together"""
    block, chunk = session.block, session.chunk
    prompts = [session.prompt(length) for length in (2 * chunk + block + 3, chunk + 7, block + 1)]
    session.writer.fresh()
    for prompt, answer in zip(prompts, session.writer.generate(*prompts), strict=True):
        session.check("together, computed", prompt, answer, prompts)
    session.restore("alone", *prompts, after=prompts)
    session.writer.fresh()
    for prompt, answer in zip(prompts, session.writer.generate(*prompts), strict=True):
        session.check("together, restored", prompt, answer, prompts)
    session.written += prompts


@case("continued answer")
def continued_answer(session: Session) -> None:
    """a prompt that continues an answer, whose KV was saved while it was generated"""
    prompt = session.prompt(session.block + 5)
    arguments = {"max_tokens": 2 * session.block}
    answer = session.write("first turn", prompt, **arguments)[0]
    longer = prompt + list(answer.tokens) + session.prompt(6)
    session.restore("second turn", longer, least=session.block)


@case("preemption")
def preemption(session: Session) -> None:
    """too few blocks for all requests, whose KV is restored after they were preempted"""
    block = session.block
    arguments: dict[str, Any] = {"max_tokens": 2 * block}
    prompts = [session.prompt(2 * block + 5 + number) for number in range(3)]
    session.write("before", *prompts)
    groups = len(session.writer.facts["groups"])
    for free in (11 * groups, 9 * groups, 7 * groups):
        session.writer.fresh()
        session.writer.ask("squeeze", free=free)
        try:
            found = session.writer.generate(*prompts, **arguments)
            count = session.writer.ask("preemptions")["preemptions"]
        finally:
            session.writer.ask("squeeze", free=0)
        for prompt, answer in zip(prompts, found, strict=True):
            session.check(f"{free} blocks", prompt, answer, prompts, **arguments)
            session.checks.restored += min(answer.cached, 2 * block)
        session.checks.wanted += 2 * block * len(prompts)
        if count:
            session.checks.notes.append(f"{count} preemptions")
            session.restore("after", *prompts)
            return
    raise Skip("no request was preempted")


@case("aborted load")
def aborted_load(session: Session) -> None:
    """a request aborted while it loads; its blocks go to other requests at once"""
    block = session.block
    prompts = [session.prompt(4 * block + 3), session.prompt(session.chunk + block + 3)]
    session.write("before", *prompts)
    running = 0
    for prompt in prompts:
        for steps in (1, 2, 3):
            session.writer.fresh()
            running += session.writer.ask("abort", prompt=prompt, steps=steps)["running"]
            others = [session.prompt(2 * block + 3) for _ in range(2)]
            for other, answer in zip(others, session.writer.generate(*others), strict=True):
                session.check(f"after {steps} steps", other, answer, others)
    session.checks.notes.append(f"{running} aborted")
    session.restore("after", *prompts)


# ---- other processes -------------------------------------------------------------------------


@case("another process")
def another_process(session: Session) -> None:
    """prompts of one engine restored by another, while both run"""
    known = session.written[:4]
    prompts = [session.prompt(3 * session.block + 2), session.prompt(session.chunk + 11)]
    session.write("new", *prompts)
    session.restore("known", *known, by="reader")
    session.restore("new", *prompts, by="reader")
    longer = prompts[0] + session.prompt(session.block)
    session.restore("extended", longer, by="reader", least=3 * session.block)


@case("half evicted")
def half_evicted(session: Session) -> None:
    """some pages of each prompt removed from the store"""
    if not session.store.configuration.evict:
        raise Skip("the configuration has no evict command")
    prompts = [session.prompt(length * session.block + 3) for length in (3, 4, 5)]
    session.write("before", *prompts)
    session.restore("before", *prompts, by="reader")
    kept = session.checks.restored
    session.store.evict()
    for prompt in prompts:
        session.restore("evicted", prompt, by="reader", least=0)
    session.checks.notes.append(f"{session.checks.restored - kept} of {kept} tokens left")
    session.restore("again", *prompts, by="reader", least=0)


@case("store killed")
def store_killed(session: Session) -> None:
    """the store's program killed during loads and saves, away, and back"""
    if not session.store.has_program:
        raise Skip("the configuration has no program that serves the store")
    prompts = [session.prompt(4 * session.block + number) for number in (3, 4, 5)]
    session.write("before", *prompts)
    session.restore("before", *prompts, by="reader")
    reader = session.reader
    for delay_s in (0.0, 0.01):
        reader.fresh()
        reader.send("generate", prompts=prompts)
        time.sleep(delay_s)
        session.store.kill()
        for prompt, answer in zip(prompts, answers(reader.receive()), strict=True):
            session.check("killed", prompt, answer)
        session.store.start()
    session.store.kill()
    session.restore("away", *prompts, by="reader", least=0)
    session.write("away", session.prompt(2 * session.block + 3))
    session.store.start()
    session.restore("back", *prompts, by="reader", least=0)


@case("restart")
def restart(session: Session) -> None:
    """the engine killed while it computes and saves, and a new one in its place"""
    known = session.written[:3]
    prompt = session.prompt(2 * session.chunk + 5)
    session.writer.fresh()
    session.writer.send("generate", prompts=[prompt], max_tokens=session.block)
    time.sleep(0.05)
    session.drop("writer", kill=True)
    session.restore("killed", prompt, least=0)
    session.restore("known", *known)


# ---- what else decides a page's bytes --------------------------------------------------------


@case("adapters")
def adapters(session: Session) -> None:
    """prompts with a LoRA, with another one, and without"""
    for prompt in (session.prompt(3 * session.block + 3), session.prompt(session.chunk + 9)):
        for adapter in (*session.adapters, ""):
            arguments: dict[str, Any] = {"adapter": adapter} if adapter else {}
            label = f"with {Path(adapter).name}" if adapter else "without"
            session.restore(f"first {label}", prompt, least=0, **arguments)
            session.restore(f"again {label}", prompt, **arguments)


@case("media")
def media(session: Session) -> None:
    """the same tokens with one sound, with another one, and without"""
    block = session.block
    prompt = session.prompt(4 * block + 5)
    prompt[block + 3] = SOUND
    for sound in (1, 2, 0):
        label = f"with sound {sound}" if sound else "without"
        # At most the block before the sound is shared.
        session.restore(f"first {label}", prompt, least=0, sound=sound)
        session.restore(f"again {label}", prompt, sound=sound)
        session.restore(f"{label}, there", prompt, by="reader", sound=sound)


@case("other rank count")
def other_rank_count(session: Session) -> None:
    """prompts of an engine with one rank read by one with several, and the reverse"""
    one, many = ([session.prompt(3 * session.block + more) for more in (2, 5)] for _ in range(2))
    session.write("one rank", *one)
    session.restore("one rank by many", *one, by=MANY, least=0)
    session.restore("first many by many", *many, by=MANY, least=0)
    session.restore("again many by many", *many, by=MANY)
    session.restore("many ranks by one", *many, least=0)


def run(name: str, session: Session) -> None:
    """Run a case. Raises Skip, EngineDied, EngineRefused and StoreFailed."""
    if name not in CONTROLS and not session.plain.facts["prefix_caching"]:
        raise Skip("the engine has turned its prefix caching off for this model")
    CASES[name](session)
