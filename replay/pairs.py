"""Checks between two streams: a sandbox and its trajectory, a trajectory and the workers that served it.

The streams are read one after another, so one of them may end earlier than the other refers to. Nothing is called
missing unless it must have been there: a boundary whose sequence the trajectory has passed, an incarnation that was
followed by a later one we know, or a stream that cannot grow any more. Clocks are never compared.
"""

from __future__ import annotations

from collections.abc import Iterator

from replay.boundaries import NEVER
from replay.facts import Capture, Container, SandboxFacts, TrajectoryFacts, WorkerFacts, names
from replay.findings import Check, Findings


def check_captures(sandbox: SandboxFacts, trajectory: TrajectoryFacts, findings: Findings) -> None:
    """Checkpoints are of committed boundaries, taken in the incarnation that stood there. The sandbox's findings."""
    began_at = {container.incarnation: container.boundary for container in sandbox.containers}
    for capture in sandbox.captures:
        again = began_at.get(capture.incarnation) == capture.boundary
        if problem := _capture_problem(capture, again, trajectory):
            findings.add(capture.sequence, Check.CHECKPOINT, f"checkpoint {capture.checkpoint} captures {problem}")


def _capture_problem(capture: Capture, again: bool, trajectory: TrajectoryFacts) -> str | None:
    boundary = trajectory.boundaries.find(*capture.boundary)
    if boundary is None:
        must_be_there = capture.boundary.sequence <= trajectory.sequence or trajectory.ended
        return f"{tuple(capture.boundary)}, which was never committed" if must_be_there else None
    if boundary.incarnation in ("", capture.incarnation) or again:
        return None
    return f"{tuple(capture.boundary)} in {capture.incarnation}, but {boundary.incarnation} had committed it"


def check_restores(sandbox: SandboxFacts, trajectory: TrajectoryFacts, findings: Findings) -> None:
    """Sandboxes are restored to boundaries that were live at that time. The sandbox's findings.

    A restore falls between two places of the trajectory: where it went on in an earlier incarnation, and where it went
    on in this one or a later one. The boundary must have been live somewhere between.
    """
    for container, since, until in _placed(sandbox, trajectory):
        if container.unproven and (problem := _restore_problem(container, since, until, trajectory)):
            what = f"restored to {tuple(container.boundary)}, which {problem}"
            findings.add(container.sequence, Check.RESTORE, what)


def _restore_problem(container: Container, since: int, until: int, trajectory: TrajectoryFacts) -> str | None:
    boundary = trajectory.boundaries.find(*container.boundary)
    if boundary is None:
        must_be_there = container.boundary.sequence <= trajectory.sequence or trajectory.ended
        return "was never committed" if must_be_there else None
    if boundary.superseded_at <= since:
        return f"the trajectory had superseded at sequence {boundary.superseded_at}"
    if boundary.sequence > until:
        return f"the trajectory committed only after it had gone on at sequence {until}"
    return None


def _placed(sandbox: SandboxFacts, trajectory: TrajectoryFacts) -> Iterator[tuple[Container, int, int]]:
    """Each container with the trajectory's sequences between which it was made."""
    used = {resumption.incarnation: resumption.sequence for resumption in reversed(trajectory.resumptions)}
    pins = [used.get(container.incarnation, 0) for container in sandbox.containers]
    until = [NEVER] * (len(pins) + 1)
    for position in range(len(pins) - 1, -1, -1):
        until[position] = pins[position] or until[position + 1]
    since = 0
    for position, container in enumerate(sandbox.containers):
        yield container, since, until[position]
        since = pins[position] or since


def check_resumptions(trajectory: TrajectoryFacts, sandbox: SandboxFacts, findings: Findings) -> None:
    """Where the trajectory went on, its sandbox really stood at that boundary. The trajectory's findings."""
    known = {container.incarnation: container for container in sandbox.containers}
    must_be_there = sandbox.removed
    problems: list[tuple[int, str]] = []
    for sequence, boundary, incarnation, left_out in reversed(trajectory.resumptions):
        container = known.get(incarnation)
        began = None if container is None else container.boundary
        if began is None and must_be_there:
            problems.append((sequence, f"goes on in {incarnation}, which its sandbox never was"))
        elif began is not None and began != boundary:
            what = f"goes on in {incarnation} at boundary {tuple(boundary)}"
            problems.append((sequence, f"{what}, but that sandbox began at {tuple(began)}"))
        elif container is not None and container.left_out != left_out:
            what = f"goes on in {incarnation}, which lacks {names(container.left_out)}"
            problems.append((sequence, f"{what}, but says that it lacks {names(left_out)}"))
        must_be_there |= began is not None
    for sequence, problem in reversed(problems):
        findings.add(sequence, Check.ENVIRONMENT, problem)


def check_engines(trajectory: TrajectoryFacts, worker: str, facts: WorkerFacts, findings: Findings) -> None:
    """The engines that served the trajectory are ones that the worker, now over, had. The trajectory's findings."""
    for (name, incarnation), sequence in trajectory.engines.items():
        if name == worker and incarnation not in facts.incarnations:
            findings.add(sequence, Check.ENGINE, f"generates on {incarnation}, which worker {worker} never registered")
