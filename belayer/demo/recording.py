"""Reads recorded trajectories: mini-swe-agent's `.traj.json`, whichever of its formats.

- format 2 (`trajectory_format` mini-swe-agent-1.1): the actions are in `extra.actions` of the assistant's messages;
- format 1, and a bare list of messages: the action is the one ```bash block in the assistant's text.

Whatever cannot be read is an InputError that names the file, the place in it and what was expected.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from belayer.errors import InputError

SUFFIX = ".traj.json"
_BLOCK = re.compile(r"```(?:bash|mswea_bash_command)\s*\n(.*?)\n?```", re.DOTALL)
_DEFAULT_TIMEOUT_S = 60.0
_DEFAULT_WORKDIR = "/testbed"


@dataclass(frozen=True, slots=True)
class Message:
    """Something that the model was told before its first turn."""

    role: str
    """system or user."""
    text: str


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model said: its text and, in format 2, the commands that it called for beside the text."""

    text: str
    calls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Recording:
    """One recorded trajectory."""

    name: str
    prompt: tuple[Message, ...]
    turns: tuple[Turn, ...]
    workdir: str = _DEFAULT_WORKDIR
    environment: dict[str, str] = field(default_factory=dict)
    timeout_s: float = _DEFAULT_TIMEOUT_S

    @property
    def actions(self) -> int:
        """How many commands the recorded agent ran."""
        return sum(len(commands_of(turn)) for turn in self.turns)


def blocks_in(text: str) -> list[str]:
    """The commands of the ```bash blocks in a message of format 1."""
    return _BLOCK.findall(text)


def commands_of(turn: Turn) -> list[str]:
    """The commands that the turn asks for. Its agent took a message of format 1 with several blocks for one without."""
    if turn.calls:
        return list(turn.calls)
    blocks = blocks_in(turn.text)
    return blocks if len(blocks) == 1 else []


def find(folder: Path) -> list[Path]:
    """The trajectory files of a folder, by name, or the one that was named itself. InputError when there is none."""
    if folder.is_file() and folder.name.endswith(SUFFIX):
        return [folder]
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; give one that holds *{SUFFIX} files, or one such file")
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise InputError(f"{folder}: no file *{SUFFIX} is here; give a folder of recorded mini-swe-agent trajectories")
    return paths


def read(path: Path) -> Recording:
    """The recording in a file. InputError when it is not one."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); expected a *{SUFFIX} file") from None
    try:
        document = msgspec.json.decode(content)
    except msgspec.DecodeError as error:
        raise InputError(f"{path}: not JSON, perhaps truncated ({error}; the file has {len(content)} bytes)") from None
    name = path.name.removesuffix(SUFFIX)
    if isinstance(document, list):
        return _recording(path, name, document, {})
    if isinstance(document, dict):
        return _recording(path, name, document.get("messages"), document.get("info"))
    raise InputError(f"{path}: expected an object with `messages`, or a list of messages; found {_kind(document)}")


def _recording(path: Path, name: str, messages: Any, info: Any) -> Recording:
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{path}: expected `messages` to be a list of at least one message; found {_kind(messages)}")
    prompt: list[Message] = []
    turns: list[Turn] = []
    for index, message in enumerate(messages):
        where = f"{path}: messages[{index}]"
        if not isinstance(message, dict):
            raise InputError(f"{where}: expected an object with role and content; found {_kind(message)}")
        role, text = message.get("role"), _text(where, message.get("content"))
        if role == "assistant":
            turns.append(Turn(text, _calls(where, message.get("extra"))))
        elif role in ("system", "user", "tool", "exit"):
            if not turns:
                prompt.append(Message(role, text))
        else:
            raise InputError(f"{where}.role: expected system, user, assistant, tool or exit; found {role!r}")
    if not prompt or not turns:
        missing = "prompt before the first assistant message" if not prompt else "assistant message"
        raise InputError(f"{path}: the trajectory has no {missing}; nothing can be replayed")
    return Recording(name, tuple(prompt), tuple(turns), **_environment(path, info))


def _text(where: str, content: Any) -> str:
    """A message's text: a string, a list of text parts, or nothing when the message only calls tools."""
    match content:
        case None:
            return ""
        case str():
            return content
        case list() if all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            return "".join(part["text"] for part in content)
        case _:
            raise InputError(f"{where}.content: expected text; found {_kind(content)}")


def _calls(where: str, extra: Any) -> tuple[str, ...]:
    actions = extra.get("actions") if isinstance(extra, dict) else None
    if actions is None:
        return ()
    if not isinstance(actions, list):
        raise InputError(f"{where}.extra.actions: expected a list; found {_kind(actions)}")
    commands: list[str] = []
    for number, action in enumerate(actions):
        command = action.get("command") if isinstance(action, dict) else None
        if not isinstance(command, str):
            raise InputError(f"{where}.extra.actions[{number}].command: expected a command; found {_kind(command)}")
        commands.append(command)
    return tuple(commands)


def _environment(path: Path, info: Any) -> dict[str, Any]:
    """What info.config.environment says of the container, where it says something usable."""
    found: Any = info
    for key in ("config", "environment"):
        found = found.get(key) if isinstance(found, dict) else None
    if not isinstance(found, dict):
        return {}
    workdir, variables, timeout_s = found.get("cwd"), found.get("env") or {}, found.get("timeout")
    where = f"{path}: info.config.environment"
    if not isinstance(variables, dict) or not all(isinstance(value, str) for value in variables.values()):
        raise InputError(f"{where}.env: expected names and texts; found {_kind(variables)}")
    settings: dict[str, Any] = {"environment": {str(name): value for name, value in variables.items()}}
    if isinstance(workdir, str) and workdir.startswith("/"):
        settings["workdir"] = workdir
    if isinstance(timeout_s, int | float) and timeout_s > 0:
        settings["timeout_s"] = float(timeout_s)
    return settings


def _kind(value: Any) -> str:
    match value:
        case None:
            return "nothing"
        case dict():
            return "an object"
        case list():
            return f"a list of {len(value)}"
        case _:
            return repr(value)[:60]
