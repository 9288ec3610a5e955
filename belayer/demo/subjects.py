"""What the demo runs: recorded trajectories with their tokens, packages and container specs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from belayer import ids
from belayer.demo import packages, recording
from belayer.demo.chat import Chat
from belayer.demo.testbed import build_testbed
from belayer.demo.witness import SETUP
from belayer.errors import InputError
from belayer.journal.events import SandboxSpec


@dataclass(frozen=True, slots=True)
class Subject:
    """A trajectory to run."""

    chat: Chat
    package: packages.Package
    spec: SandboxSpec

    @property
    def name(self) -> str:
        return self.chat.recording.name

    def unwatched(self) -> Subject:
        """The same without a witness: its containers then hold nothing but files most of the time."""
        return replace(self, spec=msgspec.structs.replace(self.spec, setup=()))


def read_subjects(folder: Path, failures: int, chat_of: type[Chat] = Chat) -> list[Subject]:
    """The trajectories, longest first, without their images. InputError for whatever cannot be run."""
    subjects: list[Subject] = []
    prompts: dict[tuple[int, ...], str] = {}
    for path in recording.find(folder):
        chat, package = chat_of(recording.read(path)), packages.package_of(path)
        name = ids.checked_name(chat.recording.name)
        prompt = tuple(chat.prompt())
        if prompt in prompts:
            raise InputError(f"{path} has the same prompt as {prompts[prompt]}; the engine could not tell them apart")
        prompts[prompt] = name
        if len(chat.recording.turns) <= failures:
            raise InputError(
                f"{path} has {len(chat.recording.turns)} turns, too few for {failures} failures a run; "
                "choose fewer with --failures"
            )
        environment = {**chat.recording.environment, "PYTHONHASHSEED": "0"}
        subjects.append(Subject(chat, package, SandboxSpec("", chat.recording.workdir, environment, SETUP)))
    return sorted(subjects, key=lambda subject: -sum(map(len, subject.chat.token_recording().turns)))


async def with_image(subject: Subject, say: Callable[[str], None]) -> Subject:
    """The subject with its sandbox's image, built unless Docker has it."""
    package, version = subject.package
    say(f"testbed of {package} {version}")
    image = await asyncio.to_thread(build_testbed, package, version, say=say)
    return replace(subject, spec=msgspec.structs.replace(subject.spec, image=image))
