"""The memory server against real processes: who is lent what, and what happens when they die, hang or trespass."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from belayer.gpu import wire
from belayer.gpu.errors import ArenaError, ArenaRefusedError, LeaseHeldError, TornWeightsError
from belayer.gpu.memory_client import MemoryClient
from tests.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]


class Child:
    """A tests.gpu.lessee process."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.gpu.lessee"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)

    def tell(self, *command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        """The answer to the oldest command that is not answered; an error is raised as AssertionError."""
        assert self.process.stdout is not None
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise AssertionError(f"{answer['error']}: {answer['message']}")
        return answer["ok"]

    def do(self, *command: object) -> Any:
        self.tell(*command)
        return self.hear()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def close(self) -> None:
        self.kill()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Child]]:
    children: list[Child] = []

    def one() -> Child:
        children.append(Child())
        return children[-1]

    yield one
    for child in children:
        child.close()


@contextmanager
def serving(tmp_path: Path, hang_s: float, update_s: float) -> Iterator[Path]:
    """A memory server for the CPU, as a process of its own; gives its socket."""
    socket_path = tmp_path / "memory.sock"
    ready, ready_write = os.pipe()
    command = [sys.executable, "-m", "belayer.gpu.memory_main", "--device", "cpu", "--socket", str(socket_path)]
    command += ["--owner-pid", str(os.getpid()), "--ready-fd", str(ready_write)]
    command += ["--hang-s", str(hang_s), "--update-s", str(update_s)]
    process = subprocess.Popen(command, pass_fds=[ready_write], cwd=ROOT)
    os.close(ready_write)
    with os.fdopen(ready, "rb") as line:
        assert line.readline() == b"ready\n"
    yield socket_path
    process.terminate()
    assert process.wait(DEADLINE_S) == 0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Path]:
    """One that takes nobody for hung: the lessees make no steps."""
    with serving(tmp_path, hang_s=1000, update_s=1000) as socket_path:
        yield socket_path


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[Path]:
    with serving(tmp_path, hang_s=0.5, update_s=1.5) as socket_path:
        yield socket_path


def ask(server: Path, request: wire.Request) -> wire.Facts:
    with MemoryClient.connect(server, "host", "control")[0] as client:
        return client.ask(request, wire.Facts)[0]


def status(server: Path) -> wire.Status:
    with MemoryClient.connect(server, "host", "control")[0] as client:
        return client.ask(wire.AskStatus(), wire.Status)[0]


def promote(server: Path, incarnation: str, *, kill_old: bool = False, early: bool = False) -> wire.Facts:
    return ask(server, wire.Promote(incarnation, kill_old, True, early, DEADLINE_S))


def a_main(server: Path, start: Callable[[], Child], name: str = "a") -> Child:
    """An engine that has loaded the weights and serves."""
    child = start()
    child.do("connect", str(server), name, "main")
    if child.do("open_weights"):
        child.do("write_weights", "v0")
        child.do("commit", 0)
    child.do("serve", child.do("open_arena"))
    return child


def a_shadow(server: Path, start: Callable[[], Child], name: str = "b") -> Child:
    """An armed standby."""
    child = start()
    child.do("connect", str(server), name, "shadow")
    assert child.do("open_weights") is False
    assert child.do("open_arena") == 0
    with MemoryClient.connect(server, "host", "control")[0] as client:
        client.tell(wire.Arm(name))
        assert child.do("order") == {"order": "ArmNow"}
        child.do("armed")
        client.receive(DEADLINE_S)
    assert child.do("order") == {"order": "Follow"}
    return child


def test_the_socket_is_its_owners_alone(server: Path) -> None:
    assert server.stat().st_mode & 0o777 == 0o600


def test_weights_are_written_once_and_read_only_by_all_others(server: Path, start: Callable[[], Child]) -> None:
    a_main(server, start)
    reader = a_shadow(server, start)
    assert reader.do("read_weights", 2) == "v0"
    with pytest.raises(AssertionError, match="PermissionError"):
        reader.do("write_weights", "xx")
    assert reader.do("read_weights", 2) == "v0"


def test_the_committed_writer_cannot_write_any_more(server: Path, start: Callable[[], Child]) -> None:
    main = a_main(server, start)
    with pytest.raises(AssertionError, match="PermissionError"):
        main.do("write_weights", "xx")


def test_a_main_loads_whole_weights_anew_only_when_nobody_holds_the_memory(
    server: Path, start: Callable[[], Child]
) -> None:
    main = a_main(server, start)
    second = start()
    second.do("connect", str(server), "c", "main")
    with pytest.raises(AssertionError, match=f"LeaseHeldError.*pid {main.process.pid}"):
        second.do("open_weights", "a", True)
    assert second.do("open_weights") is False
    with MemoryClient.connect(server, "host", "control")[0] as client:
        client.ask(wire.Watch(), wire.Facts)
        main.kill()
        assert [client.receive(DEADLINE_S)[0].kind for _ in range(2)] == ["dying", "dead"]
    assert second.do("open_weights", "a", True)
    assert status(server).weights == wire.Weights("writing", 0, "c")
    assert second.do("commit", 4) is False
    assert status(server).weights == wire.Weights("ready", 4)


def test_another_geometry_is_refused_with_both_values(server: Path, start: Callable[[], Child]) -> None:
    a_main(server, start)
    other = start()
    other.do("connect", str(server), "b", "shadow")
    with pytest.raises(AssertionError, match=r"GeometryMismatchError: KV arena: .*tokens=128.*tokens=256"):
        other.do("open_arena", 256)
    with pytest.raises(AssertionError, match=r"GeometryMismatchError: weights: .*layout=a.*layout=b"):
        other.do("open_weights", "b")


def test_a_second_main_is_refused_while_the_first_lives(server: Path, start: Callable[[], Child]) -> None:
    main = a_main(server, start)
    second = start()
    second.do("connect", str(server), "c", "main")
    with pytest.raises(AssertionError, match=f"LeaseHeldError.*pid {main.process.pid}"):
        second.do("open_arena")
    with MemoryClient.connect(server, "host", "control")[0] as client:
        client.ask(wire.Watch(), wire.Facts)
        main.kill()
        assert [client.receive(DEADLINE_S)[0].kind for _ in range(2)] == ["dying", "dead"]
    assert second.do("open_arena") == 2


def test_a_handover_waits_for_the_death_and_shows_what_was_proven(server: Path, start: Callable[[], Child]) -> None:
    main, shadow = a_main(server, start), a_shadow(server, start)
    main.do("write_kv", "kv of a")
    main.do("ledger_write", 1, [5, 6, 7, 8])
    with pytest.raises(LeaseHeldError):
        promote(server, "b")
    with MemoryClient.connect(server, "host", "control")[0] as client:
        main.kill()
        client.tell(wire.Promote("b", True, True, False, DEADLINE_S))  # the server may not have seen the death yet
        granted = shadow.do("order")
        assert granted["order"] == "Granted" and not granted["quarantined"] and not granted["follow"]
        assert granted["epoch"] == 2 and granted["last_epoch"] == 1 and granted["adopt"]
        assert shadow.do("read_kv", 7) == "kv of a"
        assert shadow.do("last_proven", 1) == {"1": [5, 6, 7]}
        if not granted["writable"]:  # the bell was faster than the process's end
            with pytest.raises(AssertionError, match="PermissionError"):
                shadow.do("write_kv", "kv of b")
            assert shadow.do("order") == {"order": "Released", "writable": True}
        shadow.do("write_kv", "kv of b")
        shadow.do("serve", 2)
        answer, _ = client.receive(DEADLINE_S)
    assert isinstance(answer, wire.Facts) and answer.facts["rows"] == 4
    assert status(server).holder == "b"


def test_a_stopped_main_is_killed_before_anyone_else_may_write(server: Path, start: Callable[[], Child]) -> None:
    main, shadow = a_main(server, start), a_shadow(server, start)
    main.process.send_signal(signal.SIGSTOP)
    with pytest.raises(LeaseHeldError):
        promote(server, "b")
    with MemoryClient.connect(server, "host", "control")[0] as client:
        client.tell(wire.Promote("b", True, True, False, DEADLINE_S))
        granted = shadow.do("order")
        assert granted["epoch"] == 2
        if not granted["writable"]:
            shadow.do("order")
        assert main.process.wait(DEADLINE_S) == -signal.SIGKILL
        shadow.do("serve", 2)
        client.receive(DEADLINE_S)


def test_an_early_grant_is_quarantined_until_the_death_is_proved(server: Path, start: Callable[[], Child]) -> None:
    main, shadow = a_main(server, start), a_shadow(server, start)
    with MemoryClient.connect(server, "host", "control")[0] as client:
        client.tell(wire.Promote("b", True, True, True, DEADLINE_S))
        granted = shadow.do("order")
        assert granted["order"] == "Granted" and granted["epoch"] == 2 and granted["writable"]
        shadow.do("write_kv", "kv of b")
        shadow.do("serve", 2)
        client.receive(DEADLINE_S)
    if granted["quarantined"]:
        assert shadow.do("order") == {"order": "Released", "writable": False}
    assert main.process.wait(DEADLINE_S) == -signal.SIGKILL


def test_a_second_shadow_adopts_from_the_first_one(server: Path, start: Callable[[], Child]) -> None:
    main, first, second = a_main(server, start), a_shadow(server, start), a_shadow(server, start, "c")
    for dead, next_one, name, epoch in ((main, first, "b", 2), (first, second, "c", 3)):
        dead.do("ledger_write", 0, [epoch, 7, 8])
        dead.kill()
        with MemoryClient.connect(server, "host", "control")[0] as client:
            client.tell(wire.Promote(name, True, True, False, DEADLINE_S))
            while (order := next_one.do("order"))["order"] != "Granted":
                assert order == {"order": "Follow"}  # the first one's books, mapped ahead if there was time
            if not order["writable"]:
                next_one.do("order")
            assert next_one.do("last_proven", epoch - 1) == {"0": [epoch, 7]}
            next_one.do("serve", epoch)
            client.receive(DEADLINE_S)


def test_weights_whose_writer_died_are_torn_and_never_served(server: Path, start: Callable[[], Child]) -> None:
    main = a_main(server, start)
    a_shadow(server, start)
    assert main.do("begin", 7) is True
    main.do("write_weights", "half")
    main.kill()
    with pytest.raises(TornWeightsError) as error:
        promote(server, "b")
    assert error.value.version == 7
    fresh = start()
    fresh.do("connect", str(server), "c", "main")
    assert fresh.do("open_weights") is True  # it loads everything anew
    fresh.do("write_weights", "v0")
    fresh.do("commit", 0)
    assert status(server).weights == wire.Weights("ready", 0)


def test_only_the_holder_may_begin_a_version(server: Path, start: Callable[[], Child]) -> None:
    a_main(server, start)
    shadow = a_shadow(server, start)
    with pytest.raises(AssertionError, match="LeaseLostError"):
        shadow.do("begin", 1)


def test_who_watches_the_weights_hears_of_each_version_once_it_is_whole(
    server: Path, start: Callable[[], Child]
) -> None:
    main = a_main(server, start)
    shadow = a_shadow(server, start)
    with MemoryClient.connect(server, "host", "control")[0] as client:
        client.ask(wire.WatchWeights(), wire.Facts)
        assert client.receive(DEADLINE_S)[0] == wire.WeightsEvent(0)
        assert main.do("begin", 7)
        assert status(server).weights.state == "writing" and client.event() is None
        assert main.do("commit", 7) is False
        assert client.receive(DEADLINE_S)[0] == wire.WeightsEvent(7)
        assert client.event() is None
    with MemoryClient.connect(server, "host", "control")[0] as client:
        client.tell(wire.Promote("b", True, True, False, DEADLINE_S))
        assert shadow.do("order")["weights_version"] == 7
        shadow.do("serve", 2)
        answer, _ = client.receive(DEADLINE_S)
    assert isinstance(answer, wire.Facts) and answer.facts[wire.WEIGHT_VERSION] == 7
    assert promote(server, "b").facts[wire.WEIGHT_VERSION] == 7, "asked again"


def test_an_engine_waits_for_weights_that_are_being_written(server: Path, start: Callable[[], Child]) -> None:
    writer, reader = start(), start()
    writer.do("connect", str(server), "a", "main")
    assert writer.do("open_weights") is True
    reader.do("connect", str(server), "b", "shadow")
    reader.tell("open_weights")
    writer.do("write_weights", "v0")
    writer.do("commit", 0)
    assert reader.hear() is False
    assert reader.do("read_weights", 2) == "v0"


async def test_silence_is_a_hang_once_the_engine_is_warm_and_long_work_is_none(
    impatient: Path, start: Callable[[], Child]
) -> None:
    main = a_main(impatient, start)
    main.do("begin_step", 100_000)  # a long prefill: its silence is excused for as long as its tokens may take
    client, _ = MemoryClient.connect(impatient, "host", "control")
    with client:
        client.ask(wire.Watch(), wire.Facts)
        await asyncio.to_thread(ask, impatient, wire.Arm("a"))
        with pytest.raises(ArenaError, match="silent"):
            await asyncio.to_thread(client.receive, 1.5)  # three times the hang limit, and no alarm
        main.process.send_signal(signal.SIGSTOP)  # a stopped process makes no progress, whatever it was doing
        events = [(await asyncio.to_thread(client.receive, DEADLINE_S))[0] for _ in range(3)]
    assert [event.kind for event in events] == ["hung", "dying", "dead"]


async def test_a_weight_update_that_never_ends_is_a_hang_and_leaves_torn_weights(
    impatient: Path, start: Callable[[], Child]
) -> None:
    main = a_main(impatient, start)
    with MemoryClient.connect(impatient, "host", "control")[0] as client:
        client.ask(wire.Watch(), wire.Facts)
        main.do("begin", 7)
        main.do("update_call", True)  # and its trainer dies
        await asyncio.to_thread(ask, impatient, wire.Arm("a"))
        event = (await asyncio.to_thread(client.receive, DEADLINE_S))[0]
        assert isinstance(event, wire.EngineEvent) and event.kind == "hung"
        assert "in a weight update, 1.5 s allowed" in event.evidence
        events = [(await asyncio.to_thread(client.receive, DEADLINE_S))[0] for _ in range(2)]
    assert [event.kind for event in events if isinstance(event, wire.EngineEvent)] == ["dying", "dead"]
    assert status(impatient).weights == wire.Weights("torn", 7, "a")


def test_a_trainer_that_is_gone_between_two_calls_is_noticed_and_leaves_torn_weights(
    tmp_path: Path, start: Callable[[], Child]
) -> None:
    with serving(tmp_path, hang_s=600, update_s=0.5) as server:
        main = a_main(server, start)
        a_shadow(server, start)
        with MemoryClient.connect(server, "host", "control")[0] as client:
            client.ask(wire.Watch(), wire.Facts)
            for version in (6, 7):
                main.do("update_call", True)
                main.do("begin", version)
                main.do("update_call", False)
                if version == 6:
                    main.do("commit", 6)  # an update that was ended: nobody waits for more of it
                    ask(server, wire.Arm("a"))
                    with pytest.raises(ArenaError, match="silent"):
                        client.receive(1.5)
            # and now its trainer dies
            events = [client.receive(DEADLINE_S)[0] for _ in range(3)]
        first = events[0]
        assert isinstance(first, wire.EngineEvent) and first.incarnation == "a"
        assert "the weight update to version 7 was neither continued nor ended for" in first.evidence
        assert [event.kind for event in events] == ["hung", "dying", "dead"]
        with pytest.raises(TornWeightsError, match="version 7"):
            promote(server, "b")


def test_what_is_no_message_is_refused(server: Path) -> None:
    with MemoryClient.connect(server, "host", "control")[0] as client:
        client._connection.send(b'{"type": "Nonsense"}')
        answer, _ = client.receive(DEADLINE_S)
    assert isinstance(answer, wire.Refused)
    with pytest.raises(ArenaRefusedError, match="not a message"):
        wire.raise_refused(answer)
