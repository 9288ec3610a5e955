"""A small reversible tokenizer, made from a recording's own text. Nothing is ever an unknown token.

Ids 0 to 255 are bytes, from `FIRST_TEXT` on come the words that the recorded model used, most frequent first;
whatever is not such a word is spelled in bytes. So `decode(encode(text)) == text` for any bytes, and the same
recording always gives the same ids. Ids between (roles, `END`) are never text: `encode` does not give them and
`decode` leaves them out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from belayer.gpu.recorded_prefix import FIRST_TEXT

_PIECE = re.compile(rb" ?[A-Za-z_]+|[0-9]+|[ \t]+|\s+|[^A-Za-z_0-9\s]+")
_MAX_PIECES = 1 << 16


class Tokenizer:
    """The mapping between bytes and token ids."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = list(pieces)
        self._ids = {piece: FIRST_TEXT + index for index, piece in enumerate(self._pieces)}

    def __len__(self) -> int:
        """How many words it has."""
        return len(self._pieces)

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> Tokenizer:
        """The tokenizer whose words are those of the texts that are longer than one byte."""
        counts: Counter[bytes] = Counter()
        for text in texts:
            counts.update(piece for piece in _PIECE.findall(text.encode("utf-8", "surrogatepass")) if len(piece) > 1)
        ordered = sorted(counts, key=lambda piece: (-counts[piece], piece))
        return cls(ordered[:_MAX_PIECES])

    @property
    def size(self) -> int:
        """All ids are below this."""
        return FIRST_TEXT + len(self._pieces)

    def encode(self, text: bytes) -> list[int]:
        """Bytes to token ids."""
        token_ids: list[int] = []
        for piece in _PIECE.findall(text):
            word = self._ids.get(piece)
            if word is None:
                token_ids += piece
            else:
                token_ids.append(word)
        return token_ids

    def decode(self, token_ids: Iterable[int]) -> bytes:
        """Token ids to bytes; ids that are not text give nothing."""
        parts: list[bytes] = []
        for token_id in token_ids:
            if token_id < 256:
                parts.append(bytes((token_id,)))
            elif token_id >= FIRST_TEXT:
                parts.append(self._pieces[token_id - FIRST_TEXT])
        return b"".join(parts)
