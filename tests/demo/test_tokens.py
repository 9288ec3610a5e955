from hypothesis import given
from hypothesis import strategies as st

from belayer.demo.tokens import Tokenizer
from belayer.gpu.recorded_prefix import ASSISTANT, END, FIRST_TEXT

WORDS = Tokenizer.from_texts(
    ["I'll look at the code.\n\n  cat -n ./models.py | head -60", "then cat the code again: Ünïcode"]
)
KNOWN = st.sampled_from([b" cat", b" the", b"code", b"\n\n", b"  ", b"\xc3", b"-n", b"./", b"zzz", b"\x00\xff"])


@given(st.binary())
def test_any_bytes_come_back(text: bytes) -> None:
    assert WORDS.decode(WORDS.encode(text)) == text


@given(st.lists(KNOWN).map(b"".join))
def test_known_words_come_back(text: bytes) -> None:
    token_ids = WORDS.encode(text)
    assert WORDS.decode(token_ids) == text
    assert all(token < 256 or FIRST_TEXT <= token < WORDS.size for token in token_ids)


@given(st.lists(st.text()), st.text())
def test_its_own_text_needs_fewer_tokens_than_bytes(texts: list[str], text: str) -> None:
    tokenizer = Tokenizer.from_texts([*texts, text])
    encoded = text.encode("utf-8", "surrogatepass")
    assert len(tokenizer.encode(encoded)) <= len(encoded)
    assert tokenizer.decode(tokenizer.encode(encoded)) == encoded


def test_the_same_text_gives_the_same_ids() -> None:
    again = Tokenizer.from_texts(
        ["I'll look at the code.\n\n  cat -n ./models.py | head -60", "then cat the code again: Ünïcode"]
    )
    assert again.encode(b"then cat the code") == WORDS.encode(b"then cat the code")
    assert len(WORDS.encode(b" cat the code")) == 3


def test_roles_are_not_text() -> None:
    assert WORDS.decode([ASSISTANT, *WORDS.encode(b"x code"), END]) == b"x code"
