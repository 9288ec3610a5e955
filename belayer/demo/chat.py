"""Between a recording's words and tokens: prompts, turns and observations, and back from tokens to the turn's commands.

The layout of a context is that of `belayer.gpu.recorded_prefix`. Commands are read from the tokens that came from the
engine, never from the recording: a generation that was resumed wrongly would show as a wrong command.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from belayer.demo.left_out import masked
from belayer.demo.recording import Recording, Turn, commands_of
from belayer.demo.tokens import Tokenizer
from belayer.gpu.protocol import Sampling
from belayer.gpu.recorded_prefix import ASSISTANT, CALL, END, SUFFIX, SYSTEM, TOOL, USER, TokenRecording

SHOWN_CHARACTERS = 10_000
"""Of a longer output the model sees the first and last half of this; mini-swe-agent's observation template does so."""
SUBMITTED = ("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", "MINI_SWE_AGENT_FINAL_OUTPUT")
"""First line of an output with which the agent hands in its work."""

_TOO_LONG = """<warning>
The output of your last command was too long.
Please try a different command that produces less output.
If you're looking at a file you can try use head, tail or sed to view a smaller number of lines selectively.
If you're using grep or find and it produced too much output, you can use a more selective search pattern.
If you really need to see something from the full command's output, you can redirect output to a file and then search \
in that file.
</warning>"""
_SHOWN_OUTPUT = (b"<output>\n", b"<output_head>\n")
_NO_COMMAND = "Please always provide exactly one command in a ```bash block."


class Chat:
    """A recording's tokenizer and its messages as tokens. Its model is the recorded one: what it says is read."""

    logprob_tolerance = 0.0
    """How far logprobs of the same tokens may lie apart."""
    finish_reason = "stop"
    """With which its generations end."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.tokenizer = Tokenizer.from_texts(text for turn in recording.turns for text in (turn.text, *turn.calls))

    def prompt(self) -> list[int]:
        """The messages before the first turn, and the request for that turn."""
        token_ids: list[int] = []
        for message in self.recording.prompt:
            role = SYSTEM if message.role == "system" else USER
            token_ids += [role, *self._encode(message.text), END]
        return [*token_ids, ASSISTANT]

    def turn(self, turn: Turn) -> list[int]:
        """What the model says: its text, the calls, `END`."""
        token_ids = self._encode(turn.text)
        for command in turn.calls:
            token_ids += [CALL, *self._encode(command)]
        return [*token_ids, END]

    def sampling(self, number: int, offset: int) -> Sampling:
        """How the rest of generation `number` (from 1) is asked for after `offset` tokens."""
        return Sampling(max_new_tokens=1 << 16, stop_token_ids=(END,))

    def is_whole(self, number: int, generated: Sequence[int]) -> bool:
        """Whether the generation has nothing more to come."""
        return generated[-1:] == [END]

    def commands(self, number: int, generated: Sequence[int]) -> list[str] | None:
        """The commands that generation `number` asks for; None when it is empty, which is how a recording ends.

        Tokens that are no UTF-8 text give replacement characters, as a model server's detokenizer has it.
        """
        text, *calls = _split(generated, CALL)
        if not calls and not [token for token in text if token != END]:
            return None
        return commands_of(Turn(self._decode(text), tuple(self._decode(call) for call in calls)))

    def observation(
        self, exit_status: int, output: bytes, *, timed_out: bool, dropped_bytes: int, last: bool
    ) -> list[int]:
        """What the model sees of an action, as mini-swe-agent renders it; `last` of its turn asks for the next turn."""
        text = render(exit_status, output, timed_out=timed_out, dropped_bytes=dropped_bytes)
        return [TOOL, *self.tokenizer.encode(text), END, *([ASSISTANT] if last else [])]

    def no_command(self) -> list[int]:
        """What the model sees of a turn without a usable command."""
        return [USER, *self._encode(_NO_COMMAND), END, ASSISTANT]

    def hands_in(self, observation: Sequence[int]) -> bool:
        """Whether an observation, as tokens, is that of the command with which the agent hands in its work."""
        shown = self.tokenizer.decode(observation)
        starts = [shown.index(mark) + len(mark) for mark in _SHOWN_OUTPUT if mark in shown]
        return bool(starts) and is_submission(shown[min(starts) :])

    def token_recording(self) -> TokenRecording:
        """What the recorded engine needs."""
        recording = self.recording
        return TokenRecording(recording.name, self.prompt(), [self.turn(turn) for turn in recording.turns])

    def write_token_recording(self, folder: Path) -> Path:
        """Put it where engines find it."""
        path = folder / f"{self.recording.name}{SUFFIX}"
        path.write_bytes(msgspec.json.encode(self.token_recording()))
        return path

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text.encode("utf-8", "surrogatepass"))

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids).decode("utf-8", "replace")


class ForeignChat(Chat):
    """The same agent with a model that is not the recorded one, whose words mean nothing.

    It says as many tokens as the recorded model said in that turn, at most TURN_TOKENS, and the recorded commands are
    run. Every token is the engine's own. Of the prompt and of observations it sees both ends alone: SGLang's attention
    on the CPU costs the square of the context for each prefill, however short. And it sees them without what differs
    between any two runs (`left_out.masked`: times, durations), which would change every token after it.
    """

    TURN_TOKENS = 64
    OBSERVATION_TOKENS = 48
    PROMPT_TOKENS = 256
    logprob_tolerance = 1e-3
    """The engine batches requests as they come, and sums in another order then."""
    finish_reason = "length"

    def prompt(self) -> list[int]:
        return _both_ends(super().prompt(), self.PROMPT_TOKENS)

    def sampling(self, number: int, offset: int) -> Sampling:
        return Sampling(max_new_tokens=self._length(number) - offset)

    def is_whole(self, number: int, generated: Sequence[int]) -> bool:
        return len(generated) == self._length(number)

    def commands(self, number: int, generated: Sequence[int]) -> list[str] | None:
        turns = self.recording.turns
        return commands_of(turns[number - 1]) if number <= len(turns) else None

    def observation(
        self, exit_status: int, output: bytes, *, timed_out: bool, dropped_bytes: int, last: bool
    ) -> list[int]:
        output = masked(output)
        seen = super().observation(exit_status, output, timed_out=timed_out, dropped_bytes=dropped_bytes, last=last)
        return _both_ends(seen, self.OBSERVATION_TOKENS)

    def hands_in(self, observation: Sequence[int]) -> bool:
        """Never: it goes on to the recording's end."""
        return False

    def _length(self, number: int) -> int:
        turns = self.recording.turns
        return min(self.TURN_TOKENS, len(self.turn(turns[number - 1]))) if number <= len(turns) else 1


def render(exit_status: int, output: bytes, *, timed_out: bool, dropped_bytes: int) -> bytes:
    """mini-swe-agent's observation template, on bytes: decoding is the model's affair."""
    parts = [b"<exception>timed out</exception>\n"] if timed_out else []
    parts.append(b"<returncode>%d</returncode>\n" % exit_status)
    if len(output) + dropped_bytes < SHOWN_CHARACTERS:
        parts.append(b"<output>\n%s</output>" % output)
    else:
        half = SHOWN_CHARACTERS // 2
        elided = len(output) + dropped_bytes - SHOWN_CHARACTERS
        parts.append(_TOO_LONG.encode())
        parts.append(b"\n<output_head>\n%s\n</output_head>\n" % output[:half])
        parts.append(b"<elided_chars>\n%d characters elided\n</elided_chars>\n" % elided)
        parts.append(b"<output_tail>\n%s\n</output_tail>" % output[-half:])
    return b"".join(parts)


def is_submission(output: bytes) -> bool:
    """Whether an output hands in the agent's work."""
    first_line = output.lstrip().split(b"\n", 1)[0].strip()
    return first_line.decode("utf-8", "replace") in SUBMITTED


def _both_ends(token_ids: list[int], most: int) -> list[int]:
    half = most // 2
    return token_ids if len(token_ids) <= most else token_ids[:half] + token_ids[-half:]


def _split(token_ids: Sequence[int], separator: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token_id in token_ids:
        if token_id == separator:
            parts.append([])
        else:
            parts[-1].append(token_id)
    return parts
