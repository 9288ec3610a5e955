"""Every kind of damage, done to a journal on purpose: the audit finds exactly that, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from belayer.journal.events import (
    WorkerReady,
)
from replay.audit import Report, audit
from replay.findings import PER_STREAM, Check
from tests.replay import mistakes_elsewhere as elsewhere
from tests.replay import mistakes_in_trajectories as trajectories
from tests.replay.journals import (
    BOX,
    ENGINE,
    RUN,
    Story,
    T,
    end,
    eventful,
    underway,
)


def found(report: Report) -> list[tuple[str, Check]]:
    return [(finding.stream, finding.check) for finding in report.findings]


def test_a_clean_journal_has_no_finding() -> None:
    report = audit(eventful().entries())
    assert report.findings == []
    assert report.streams == {"run": 1, "sandbox": 1, "trajectory": 1, "worker": 1}
    assert report.unpaired == []
    assert report.events == sum(len(eventful().flat(stream)) for stream in (T, BOX, ENGINE, RUN))


def test_a_journal_still_under_way_has_no_finding() -> None:
    assert audit(underway().entries()).findings == []


CASES: list[tuple[Callable[[Story], None], str, Check]] = [
    (trajectories.overlapping_chunk, str(T), Check.GENERATION),
    (trajectories.hole_between_chunks, str(T), Check.GENERATION),
    (trajectories.one_wrong_offset, str(T), Check.GENERATION),
    (trajectories.short_logprobs, str(T), Check.GENERATION),
    (trajectories.empty_chunk, str(T), Check.GENERATION),
    (trajectories.miscounted_generation, str(T), Check.GENERATION),
    (trajectories.resumed_at_the_wrong_token, str(T), Check.GENERATION),
    (trajectories.skipped_generation, str(T), Check.GENERATION),
    (trajectories.repeated_generation, str(T), Check.GENERATION),
    (trajectories.tokens_without_generation, str(T), Check.GENERATION),
    (trajectories.stray_chunk, str(T), Check.GENERATION),
    (trajectories.generation_during_an_action, str(T), Check.BOUNDARY),
    (trajectories.action_before_its_generation_finished, str(T), Check.BOUNDARY),
    (trajectories.finished_in_mid_generation, str(T), Check.BOUNDARY),
    (trajectories.action_twice, str(T), Check.ACTION),
    (trajectories.action_skipped, str(T), Check.ACTION),
    (trajectories.outcome_twice, str(T), Check.ACTION),
    (trajectories.observation_of_half_a_token, str(T), Check.ACTION),
    (trajectories.rewound_to_a_superseded_boundary, str(T), Check.REWIND),
    (trajectories.rewound_to_no_boundary, str(T), Check.REWIND),
    (trajectories.tokens_of_a_superseded_generation, str(T), Check.SUPERSEDED),
    (trajectories.superseded_generation_resumed, str(T), Check.SUPERSEDED),
    (trajectories.outcome_of_a_superseded_action, str(T), Check.SUPERSEDED),
    (trajectories.next_action_of_a_superseded_branch, str(T), Check.SUPERSEDED),
    (trajectories.resumed_without_a_recovery, str(T), Check.RECOVERY),
    (trajectories.resumed_at_another_boundary, str(T), Check.RECOVERY),
    (trajectories.written_during_a_recovery, str(T), Check.RECOVERY),
    (trajectories.started_twice, str(T), Check.LIFECYCLE),
    (trajectories.finished_twice, str(T), Check.LIFECYCLE),
    (trajectories.aborted_and_finished, str(T), Check.LIFECYCLE),
    (trajectories.foreign_event_in_a_trajectory, str(T), Check.FOREIGN),
    (elsewhere.foreign_event_in_a_sandbox, str(BOX), Check.FOREIGN),
    (elsewhere.foreign_event_in_a_worker, str(ENGINE), Check.FOREIGN),
    (elsewhere.foreign_event_in_a_run, str(RUN), Check.FOREIGN),
    (elsewhere.run_started_twice, str(RUN), Check.LIFECYCLE),
    (elsewhere.epoch_skipped, str(T), Check.EPOCH),
    (elsewhere.action_in_another_sandbox, str(T), Check.ENVIRONMENT),
    (elsewhere.action_after_a_rewind_without_a_restore, str(T), Check.ENVIRONMENT),
    (elsewhere.action_where_one_was_left_in_flight, str(T), Check.ENVIRONMENT),
    (elsewhere.resumed_elsewhere_than_restored, str(T), Check.ENVIRONMENT),
    (elsewhere.resumed_in_a_sandbox_that_never_was, str(T), Check.ENVIRONMENT),
    (elsewhere.captured_no_boundary, str(BOX), Check.CHECKPOINT),
    (elsewhere.captured_in_the_wrong_sandbox, str(BOX), Check.CHECKPOINT),
    (elsewhere.captured_a_dead_sandbox, str(BOX), Check.CHECKPOINT),
    (elsewhere.two_captures_at_once, str(BOX), Check.CHECKPOINT),
    (elsewhere.published_without_intent, str(BOX), Check.CHECKPOINT),
    (elsewhere.published_as_another_boundary, str(BOX), Check.CHECKPOINT),
    (elsewhere.extended_without_intent, str(BOX), Check.CHECKPOINT),
    (elsewhere.extended_to_another_boundary, str(BOX), Check.CHECKPOINT),
    (elsewhere.extended_what_was_discarded, str(BOX), Check.CHECKPOINT),
    (elsewhere.extended_another_containers, str(BOX), Check.CHECKPOINT),
    (elsewhere.restored_without_saying_what_is_left_out, str(BOX), Check.RESTORE),
    (elsewhere.resumed_without_saying_what_is_left_out, str(T), Check.ENVIRONMENT),
    (elsewhere.restored_from_nowhere, str(BOX), Check.RESTORE),
    (elsewhere.restored_a_discarded_checkpoint, str(BOX), Check.RESTORE),
    (elsewhere.restored_as_another_boundary, str(BOX), Check.RESTORE),
    (elsewhere.restored_a_superseded_boundary, str(BOX), Check.RESTORE),
    (elsewhere.restored_without_a_recovery, str(BOX), Check.RECOVERY),
    (elsewhere.sandbox_created_twice, str(BOX), Check.LIFECYCLE),
    (elsewhere.checkpoint_after_the_removal, str(BOX), Check.LIFECYCLE),
    (elsewhere.sandbox_recovery_left_open, "sandbox/other", Check.RECOVERY),
    (elsewhere.trajectory_recovery_left_open, "trajectory/other", Check.RECOVERY),
    (elsewhere.worker_recovery_left_open, "worker/other", Check.RECOVERY),
    (elsewhere.engine_that_nobody_registered, str(T), Check.ENGINE),
    (elsewhere.ready_without_registration, str(ENGINE), Check.ENGINE),
    (elsewhere.registered_twice, str(ENGINE), Check.ENGINE),
    (elsewhere.handover_to_the_dead, str(ENGINE), Check.ENGINE),
    (elsewhere.handover_from_another, str(ENGINE), Check.ENGINE),
]


@pytest.mark.parametrize(("mistake", "stream", "check"), CASES, ids=[case[0].__name__ for case in CASES])
def test_writers(mistake: Callable[[Story], None], stream: str, check: Check) -> None:
    story = underway()
    mistake(story)
    end(story)
    report = audit(story.entries())
    assert found(report) == [(stream, check)], "\n".join(map(str, report.findings))


def test_every_kind_of_damage_has_its_test() -> None:
    by_storage = {Check.SEQUENCE, Check.DIGEST, Check.EPOCH, Check.ENCODING}
    by_key = {Check.SEALED}
    assert by_storage | by_key | {check for _, _, check in CASES} == set(Check)


def test_a_recovery_under_way_is_no_finding_while_its_run_goes_on() -> None:
    story = underway()
    elsewhere.trajectory_recovery_left_open(story)
    assert audit(story.entries()).findings == []


def test_a_stream_that_is_wrong_everywhere_says_so_without_end() -> None:
    story = underway()
    for _ in range(3 * PER_STREAM):
        story.write(T, WorkerReady("w-2", 1))
    report = audit(story.entries())
    assert len(report.findings) == PER_STREAM + 1
    assert "more findings" in report.findings[-1].message
