"""Whatever a container answers, it is an answer or a SandboxFailedError."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable
from pathlib import Path

import msgspec
import pytest

from belayer.errors import RestoreFailedError, SandboxFailedError
from belayer.processes import host_name, start_ticks
from belayer.sandbox import control
from belayer.sandbox.answers import HEAD_LIMIT_BYTES, Last, Ran, answer, saved
from belayer.sandbox.docker_sandbox import LEAST_OUTPUT_BYTES, DockerSandbox
from belayer.sandbox.home import Home
from belayer.sandbox.manifest import RUNNER_STATE
from belayer.sandbox.protocol import Action, Incarnation
from tests.sandbox.conftest import Bench, change_note
from tests.waiting import until, within

RAN = {"exit_status": 3, "duration_s": 0.5, "timed_out": False, "dropped_bytes": 7}
DEEP = b"[" * 50_000
HOSTILE = {
    "nothing": b"",
    "a list": b'["x"]',
    "a number": b"7",
    "not JSON": b"{exit_status",
    "not UTF-8": b'{"error": "\xff"}',
    "half a surrogate": b'{"error": "\\ud800"}',
    "deep": DEEP,
    "deep, in a field that nobody knows": b'{"x": ' + DEEP,
    "a long line": b'{"x": "' + b"x" * HEAD_LIMIT_BYTES + b'"}',
    "another answer": b'{"last": 1}',
    "a huge status": json.dumps(RAN | {"exit_status": 2**70}).encode(),
    "a status that none can have": json.dumps(RAN | {"exit_status": 256}).encode(),
    "a negative status": json.dumps(RAN | {"exit_status": -1}).encode(),
    "a status of another kind": json.dumps(RAN | {"exit_status": "0"}).encode(),
    "a flag as a number": json.dumps(RAN | {"timed_out": 1}).encode(),
    "no time at all": json.dumps(RAN | {"duration_s": float("nan")}).encode(),
    "endless": json.dumps(RAN | {"duration_s": 1e300}).encode(),
    "less than nothing dropped": json.dumps(RAN | {"dropped_bytes": -1}).encode(),
    "too many dropped": json.dumps(RAN | {"dropped_bytes": 2**63}).encode(),
    "a refusal of another kind": b'{"error": {"a": 1}}',
    "a refusal without end": b'{"error": "' + b"x" * 60_000 + b'"}',
}
STATES = {
    "a list": b'["x"]',
    "a word": b'"x"',
    "deep": DEEP,
    "without results": b'{"last": 1}',
    "a negative action": b'{"last": -1, "results": []}',
    "a result that is none": b'{"last": 1, "results": [[1, {"exit_status": 0}, ""]]}',
    "an output that is not base64": json.dumps({"last": 1, "results": [[1, RAN, "%%"]]}).encode(),
    "results without end": json.dumps({"last": 1, "results": [[1, RAN, ""]] * 65}).encode(),
}


@pytest.fixture
def played(tmp_path: Path) -> Home:
    """With the folder of a container "x", in which the test plays the runner."""
    made = Home(tmp_path)
    made.run_folder("x").mkdir(parents=True)
    control.make_folder(made.control_folder("x"))
    return made


async def told(home: Home, asked: Awaitable[object], reply: bytes) -> SandboxFailedError:
    """What a client's question comes to when this is the answer."""
    folder = home.control_folder("x")
    waiting = asyncio.ensure_future(asked)
    request = await until(lambda: next(folder.glob("request-*"), None))
    (folder / "new").write_bytes(reply)
    (folder / "new").rename(request.with_name(request.name.replace("request", "reply")))
    with pytest.raises(SandboxFailedError) as failure:
        await within(waiting)
    assert len(failure.value.evidence) < 1000
    msgspec.msgpack.encode(failure.value.evidence)
    return failure.value


async def sandbox(home: Home) -> DockerSandbox:
    return DockerSandbox(home, Incarnation("x", "", "", host_name(), os.getpid(), start_ticks(os.getpid())))


@pytest.mark.parametrize("head", HOSTILE.values(), ids=HOSTILE)
async def test_what_is_no_answer_is_a_failure(played: Home, head: bytes) -> None:
    async with await sandbox(played) as hostile:
        await told(played, hostile.run(Action(1, "true")), head + b"\noutput")


async def test_more_output_than_was_asked_for_is_a_failure(played: Home) -> None:
    async with await sandbox(played) as hostile:
        reply = json.dumps(RAN).encode() + b"\n" + bytes(LEAST_OUTPUT_BYTES + 1)
        failure = await told(played, hostile.run(Action(1, "true", output_limit_bytes=7)), reply)
    assert "4,097 bytes of output" in failure.evidence


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
async def test_what_no_runner_could_go_on_from_is_never_captured(played: Home, state: bytes) -> None:
    async with await sandbox(played) as hostile:
        failure = await told(played, hostile.state(), b'{"last": 1}\n' + state)
    assert "no saved" in failure.evidence


def test_answers_are_taken() -> None:
    ran = answer("x", json.dumps(RAN | {"added": "later"}).encode(), Ran)
    assert (ran.exit_status, ran.duration_s, ran.timed_out, ran.dropped_bytes) == (3, 0.5, False, 7)
    assert answer("x", b'{"last": 5, "busy": false}', Last).last == 5
    with pytest.raises(SandboxFailedError, match="still running"):
        answer("x", b'{"error": "action 3 is still running"}', Ran)
    assert saved("x", json.dumps({"last": 1, "results": [[1, RAN, "aGk="]]}).encode()).results[0][2] == b"hi"


@pytest.mark.sandbox
async def test_a_state_that_is_none_is_no_checkpoint(bench: Bench) -> None:
    live = await bench.create()
    await live.sh("echo kept > file")
    name = await live.checkpoint()
    change_note(bench.host.checkpoint_path(name) / RUNNER_STATE, b'["x"]')
    with pytest.raises(RestoreFailedError, match="no saved"):
        await bench.restore(name, live.number)
    assert await bench.host.incarnations(bench.run) == [live.incarnation.name]
