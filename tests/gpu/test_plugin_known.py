"""An engine whose KV cache others write to is refused, and the error names the option."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from belayer.gpu.errors import UnsupportedEngineError
from belayer.gpu.plugin.known import refuse_unknown


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("disaggregation_mode", "decode"),
        ("enable_hierarchical_cache", True),
        ("speculative_algorithm", "EAGLE"),
        ("enable_pdmux", True),
    ],
)
def test_what_lets_others_write_is_refused(option: str, value: object) -> None:
    with pytest.raises(UnsupportedEngineError, match=f"{option} is {value}"):
        refuse_unknown(SimpleNamespace(**{option: value}))


def test_what_sglang_does_by_default_is_known() -> None:
    refuse_unknown(SimpleNamespace(disaggregation_mode="null", pp_size=1, speculative_algorithm=None))
