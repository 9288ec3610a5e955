"""Settings of all verbs: a file, then the environment, then the command line, each overruling the one before.

The file is TOML with flat keys, `belayer.toml` in the working folder or what --config names. What it says becomes the
default of the verbs' options; environment and flags then overrule it, as typer has it. A file that cannot be read, an
unknown key or a value of the wrong type is an InputError that names file, key, what was expected and what was found.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from belayer.errors import InputError

FILE = "belayer.toml"
HOME_VARIABLE = "BELAYER_HOME"


@dataclass(frozen=True)
class Setting:
    """One key of the file: the verbs' option that it is the default of, and what it means."""

    option: str
    variable: str
    meaning: str


SETTINGS: Mapping[str, Setting] = {
    "journal_url": Setting("url", "BELAYER_JOURNAL_URL", "where the journal is: redis://, rediss:// or unix://"),
    "namespace": Setting("namespace", "BELAYER_NAMESPACE", "whose keys on the server"),
    "archive_url": Setting("archive", "BELAYER_ARCHIVE_URL", "where finished trajectories are archived"),
    "durability": Setting("durability", "BELAYER_DURABILITY", "memory, everysec, fsync or replicated"),
    "engine": Setting("engine", "BELAYER_ENGINE", "recorded or sglang"),
    "sglang_python": Setting("sglang_python", "BELAYER_SGLANG_PYTHON", "the interpreter that has SGLang"),
    "sglang_arguments": Setting("sglang_arguments", "BELAYER_SGLANG_ARGUMENTS", "SGLang's own arguments"),
    "policy": Setting("policy", "BELAYER_POLICY", "which boundaries are captured: every-boundary or adaptive"),
    "fallback": Setting("fallback", "BELAYER_FALLBACK", "when a process cannot be captured: none or files"),
    "device": Setting("device", "BELAYER_DEVICE", "the engines' device: cpu or cuda:N"),
    "memory_socket": Setting("memory_socket", "BELAYER_MEMORY_SOCKET", "the device's memory server: its Unix socket"),
    "handover": Setting("handover", "BELAYER_HANDOVER", "when a shadow may take over: late or early"),
    "update_s": Setting("update_s", "BELAYER_UPDATE_S", "seconds after which a weight update is given up"),
    "adoption": Setting("adoption", "BELAYER_ADOPTION", "whether a shadow adopts the KV cache: on or off"),
    "home": Setting("home", HOME_VARIABLE, "Belayer's own folder on this machine"),
}
"""All values are text."""


def read_settings(config: Path | None) -> dict[str, str]:
    """The file's settings; empty when there is none and none was asked for."""
    path = config or Path(FILE)
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except FileNotFoundError:
        if config is None:
            return {}
        raise InputError(f"{path}: there is no such file; --config names a TOML file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not TOML: {error}") from None
    return {key: _checked(path, key, value) for key, value in found.items()}


def _checked(path: Path, key: str, value: object) -> str:
    if key not in SETTINGS:
        raise InputError(f"{path}: unknown key {key!r}; expected one of {', '.join(SETTINGS)}")
    if not isinstance(value, str) or not value:
        found = "an empty text" if value == "" else f"{type(value).__name__} {value!r}"
        raise InputError(f"{path}: {key}: expected a text ({SETTINGS[key].meaning}), found {found}")
    return value


def defaults(settings: Mapping[str, str], verbs: Iterable[str]) -> dict[str, dict[str, str]]:
    """The settings as typer takes them: each verb's options by name; one that a verb does not have is passed over."""
    options = {SETTINGS[key].option: value for key, value in settings.items()}
    return {verb: dict(options) for verb in verbs}


def set_home(settings: Mapping[str, str]) -> None:
    """Let everything that asks for Belayer's folder, processes that we start included, find the file's setting."""
    if "home" in settings:
        os.environ.setdefault(HOME_VARIABLE, settings["home"])
