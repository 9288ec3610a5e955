"""`belayer restore`: bring one trajectory's sandbox back now and say what it costs. The actors do it unasked."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated, Any

import typer

from belayer.cli.options import Namespace, Url

HELP = """Restore a trajectory's sandbox from its newest usable checkpoint and let the trajectory go on.

What is lost is said first: the boundary to go back to, and the actions and tokens after it, which will be generated
again. A sandbox that is alive is left alone unless --force.

Examples:

  belayer restore django-11039 --dry-run

  belayer restore django-11039 --url redis://journal:6379 --json
"""


def restore(
    trajectory: Annotated[str, typer.Argument(help="The trajectory, as `belayer status` names it.")],
    url: Url = None,
    namespace: Namespace = "default",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also when the container is alive: it is replaced.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of sentences.")] = False,
) -> None:
    outcome = asyncio.run(_restore(trajectory, url, namespace, dry_run, force))
    if as_json:
        sys.stdout.write(json.dumps(outcome) + "\n")
    else:
        for sentence in _sentences(outcome):
            sys.stdout.write(sentence + "\n")


async def _restore(name: str, url: str | None, namespace: str, dry_run: bool, force: bool) -> dict[str, Any]:
    import msgspec

    from belayer import ids
    from belayer.actors.names import new_name
    from belayer.actors.reports import report_sandbox_failure
    from belayer.actors.sandbox_recovery import SandboxRecovery
    from belayer.actors.sandboxes import incarnation_of, look
    from belayer.actors.service import SANDBOX_PATIENCE_S
    from belayer.cli.options import unknown
    from belayer.errors import FencedError, InputError, WrongSequenceError
    from belayer.journal.connect import open_store
    from belayer.journal.events import SandboxRestored
    from belayer.journal.writer import Reader
    from belayer.processes import host_name
    from belayer.projections import trajectory
    from belayer.projections.plan import GiveUp, LeaveAlone, RestoreSandbox, SandboxFailure, plan
    from belayer.sandbox.docker_host import open_host

    if url is None:
        raise InputError("no journal is named; give --url or BELAYER_JOURNAL_URL")
    store = await open_store(url, namespace=namespace)
    try:
        before = trajectory.fold(await Reader(store, ids.trajectory(name)).catch_up())
        box = await look(store, name)
        if before.phase == "empty" or box.container is None:
            kind = "trajectory" if before.phase == "empty" else "sandbox"
            raise unknown(f"{kind}/{name}", await store.streams())
        decision = plan(before, box, SandboxFailure())
        outcome: dict[str, Any] = {"trajectory": name, "phase": before.phase, "restored": False}
        if isinstance(decision, LeaveAlone | GiveUp):
            return outcome | {"why": decision.reason}
        assert isinstance(decision, RestoreSandbox)
        outcome |= {
            "checkpoint": decision.checkpoint or "the initial state",
            "boundary": decision.boundary.number,
            "left_out": [msgspec.structs.asdict(one) for one in decision.left_out],
            "actions_again": before.boundary.number - decision.boundary.number,
            "tokens_again": _tokens_after(before, decision.boundary.sequence) if decision.rewind else 0,
        }
        if box.container.host != host_name():
            raise InputError(f"the container of {name} was on host {box.container.host}; run this command there")
        async with open_host() as host:
            alive = box.phase == "live" and await host.is_alive(incarnation_of(box.container))
            if alive and not force:
                return outcome | {"why": f"container {box.incarnation} is alive; --force replaces it"}
            if dry_run:
                return outcome | {"why": "nothing was done: --dry-run"}
            kind, seen = ("unreachable", "replaced on demand") if alive else ("died", "found dead")
            by = new_name(host_name())  # one of the actors, who wait for us, or we for them
            await report_sandbox_failure(store, name, box.incarnation, kind, seen, by)
            recovery = SandboxRecovery(store, host, host_name(), by, SANDBOX_PATIENCE_S)
            while True:
                try:
                    await recovery.recover(name)
                    break
                except (FencedError, WrongSequenceError):
                    continue
        now = await look(store, name)
        if now.phase != "live":
            after = trajectory.fold(await Reader(store, ids.trajectory(name), from_mark=True).catch_up())
            return outcome | {"phase": after.phase, "why": after.reason or f"the sandbox is {now.phase}"}
        if isinstance(now.container, SandboxRestored):  # another one than was planned when that could not be restored
            at, rewound = now.restored_from, before.action is not None or now.restored_from != before.boundary
            outcome |= {
                "checkpoint": now.container.checkpoint or "the initial state",
                "boundary": at.number,
                "left_out": [msgspec.structs.asdict(one) for one in now.container.left_out],
                "actions_again": max(0, before.boundary.number - at.number),
                "tokens_again": _tokens_after(before, at.sequence) if rewound else 0,
            }
        return outcome | {"restored": True, "incarnation": now.incarnation, "why": ""}
    finally:
        await store.close()


def _tokens_after(state: Any, sequence: int) -> int:
    """Generated tokens of the live branch that a rewind to the boundary supersedes."""
    from belayer.projections.trajectory import Generation, Step

    tokens = state.generation.count if state.generation is not None else 0
    for segment in reversed(state.segments):
        match segment:
            case Step() if segment.boundary.sequence <= sequence:
                break
            case Generation():
                tokens += segment.count
    return tokens


def _sentences(outcome: dict[str, Any]) -> list[str]:
    if "checkpoint" not in outcome:
        return [f"{outcome['trajectory']}: nothing to restore, {outcome['why']}"]
    done = "restored from" if outcome["restored"] else "would be restored from"
    lines = [
        f"{outcome['trajectory']}: {done} {outcome['checkpoint']}, boundary {outcome['boundary']}",
        f"generated again: {outcome['actions_again']} actions, {outcome['tokens_again']} tokens; lost: nothing else",
    ]
    if outcome["left_out"]:
        gone = ", ".join(one["what"] for one in outcome["left_out"])
        lines.append(f"not brought back, for the checkpoint holds files alone: {gone}")
    return [*lines, outcome["why"] or f"container {outcome['incarnation']} is up; the trajectory goes on"]
