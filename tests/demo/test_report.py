from belayer.demo.compare import Difference
from belayer.demo.failures import Kind, Planned
from belayer.demo.measures import Cost, Recovery, cost_of, recovery_of
from belayer.demo.report import DemoReport, RunReport
from belayer.demo.strikes import Struck
from belayer.ids import StreamId, sandbox, trajectory, worker
from belayer.journal.codec import Recorded
from belayer.journal.events import (
    ActionStarted,
    AnyEvent,
    CheckpointDiscarded,
    CheckpointPublished,
    EpochStarted,
    FailureDetected,
    GenerationResumed,
    RecoveryStarted,
    SandboxRestored,
    TokensAppended,
    TrajectoryResumed,
    WorkerReady,
)
from belayer.projections.trajectory import EMPTY

PLANNED = Planned(Kind.IDLE, 3, 1, 0.0)
KILL_NS = 1_000_000_000


def _at(stream: StreamId, *events: tuple[float, AnyEvent]) -> list[Recorded]:
    """Events by seconds after the kill."""
    return [
        Recorded(stream, 1, sequence, b"", KILL_NS + int(after_s * 1e9), b"", b"", event)
        for sequence, (after_s, event) in enumerate(events, 1)
    ]


def _tokens(count: int) -> TokensAppended:
    return TokensAppended(1, 0, count, b"", b"", b"", 0)


def test_phases_of_a_sandbox_recovery_are_read_from_the_journal() -> None:
    restored = SandboxRestored("c", 2, 9, "box-2", "", "", "", 1, 1, 0.3)
    hit = Struck(PLANNED, KILL_NS, "box-1", "in generation 3")
    found = recovery_of(
        hit,
        _at(
            trajectory("t"),
            (-1.0, _tokens(1)),
            (0.2, _tokens(2)),
            (0.6, TrajectoryResumed(2, 9, "box-2")),
            (0.75, _tokens(3)),
        ),
        _at(
            sandbox("t"),
            (-5.0, FailureDetected("box-0", "died", "", "")),
            (0.25, FailureDetected("box-1", "died", "", "")),
            (0.3, RecoveryStarted("box-1", "", "")),
            (0.5, restored),
        ),
        [],
    )
    assert found == Recovery(Kind.IDLE, "in generation 3", 0.25, 0.5, 0.75)


def test_phases_of_a_handover_and_of_a_restart_are_read_from_the_journal() -> None:
    said = _at(trajectory("t"), (0.1, GenerationResumed(1, 5, "w", "w-2")), (0.5, _tokens(3)))
    engines = _at(worker("w"), (0.125, FailureDetected("w-1", "died", "", "")), (0.25, WorkerReady("w-2", 0)))
    hit = Struck(PLANNED._replace(kind=Kind.ENGINE), KILL_NS, "w-1", "")
    assert recovery_of(hit, said, [], engines)[2:] == (0.125, 0.25, 0.5)
    restart = Struck(PLANNED._replace(kind=Kind.REDIS), KILL_NS, "redis", "", KILL_NS + 250_000_000)
    assert recovery_of(restart, said, [], [])[2:] == (None, 0.25, 0.5)
    assert recovery_of(hit, said, [], [])[2:] == (None, None, None)


def test_of_a_killed_checkpointer_only_the_takeover_is_waited_for() -> None:
    hit = Struck(PLANNED._replace(kind=Kind.PUBLISH), KILL_NS, "actors/h-1-a", "in checkpoint c-1")
    events = _at(
        sandbox("t"),
        (-0.1, EpochStarted(2, "actors/h-1-a", "")),
        (0.01, EpochStarted(3, "actors/h-2-b", "")),
        (0.01, CheckpointDiscarded("c-1", "its checkpointer died")),
        (9.5, CheckpointPublished("c-2", "box-1", 3, 9, 1, 0.1, 0.2)),
    )
    assert recovery_of(hit, [], events, [])[2:] == (0.01, 9.5, 0.01)


def test_the_cost_is_what_the_live_branch_does_not_have() -> None:
    events = _at(trajectory("t"), (0.0, _tokens(7)), (0.1, ActionStarted(1, "ls", 1.0, "box-1")), (0.2, _tokens(5)))
    assert cost_of(events, EMPTY) == Cost(12, 1)


def _report(*runs: RunReport, findings: tuple[str, ...] = ()) -> DemoReport:
    return DemoReport(seed=7, runs=runs, findings=findings, events=10, wall_s=1.0, trajectories=["t"])


RECOVERIES = [Recovery(Kind.IDLE, "", 0.1, 0.2, resumed_s) for resumed_s in (0.5, 4.0, 1.0)]


def test_a_good_demo_says_so_in_json() -> None:
    run = RunReport("t", "failures 1", 9.0, 5, RECOVERIES, cost=Cost(11, 2))
    report = _report(RunReport("t", "undisturbed", 3.0, 5), run)
    assert report.good
    said = report.as_json()
    assert (said["trajectories"], said["failures"], said["equal"], said["findings"]) == (1, 3, True, 0)
    assert (said["recovery_p50_s"], said["recovery_worst_s"]) == (1.0, 4.0)
    phases = {"count": 3, "detected_s": 0.1, "recovered_s": 0.2, "resumed_s": 1.0, "worst_s": 4.0}
    assert said["recovery_by_kind"] == {"container-idle": phases}
    assert (said["tokens_again"], said["actions_again"], said["details"]) == (11, 2, [])


def test_whatever_is_wrong_makes_it_not_good_and_is_in_the_details() -> None:
    good = RunReport("t", "failures 1", 9.0, 5, RECOVERIES)
    differs = RunReport("t", "failures 1", 9.0, 5, differences=[Difference("file /a", "x", "y")])
    failed = RunReport("t", "failures 1", 9.0, 5, problem="it hung")
    for report, detail in (
        (_report(good, differs), "file /a: expected x, found y"),
        (_report(failed), "it hung"),
        (_report(good, findings=("trajectory/t at 3: hole",)), "trajectory/t at 3"),
    ):
        assert not report.good
        assert any(detail in text for text in report.as_json()["details"])
    assert not _report(differs).as_json()["equal"]
    assert _report().as_json()["recovery_p50_s"] is None


def test_a_failure_that_missed_is_said_but_is_not_wrong() -> None:
    report = _report(RunReport("t", "failures 1", 9.0, 5, missed=[PLANNED]))
    said = report.as_json()
    assert report.good and said["equal"] and said["missed"] == 1
    assert said["details"] == ["t failures 1: container-idle found no instant to strike"]
