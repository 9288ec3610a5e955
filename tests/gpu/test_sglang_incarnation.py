"""Real SGLang on the CPU answers no request that is meant for another engine: its port may have been another's."""

from __future__ import annotations

from dataclasses import replace

import aiohttp
import pytest

from belayer.errors import EngineFailedError
from belayer.gpu.http_engine import HttpEngine
from belayer.gpu.incarnation import meant
from belayer.gpu.protocol import Sampling
from tests.gpu.sglang_cell import MARKS, PROMPTS, Cell
from tests.waiting import DEADLINE_S

pytestmark = MARKS


async def test_a_request_for_another_incarnation_is_refused(cell: Cell) -> None:
    here = cell.main
    client = HttpEngine(replace(here, incarnation="gone"))
    with pytest.raises(EngineFailedError, match=f"answered 409: this is {here.incarnation}, not gone"):
        async for _ in client.generate("i1", PROMPTS[0], Sampling(max_new_tokens=4)):
            raise AssertionError("it answered for another")
    await client.close()
    async with aiohttp.ClientSession() as session:
        for headers, status in (({}, 200), (meant(here.incarnation), 200), (meant("gone"), 409)):
            async with session.get(f"{here.address}/v1/loads", headers=headers) as response:
                assert response.status == status, headers
    assert not await cell.host.until_idle(replace(here, incarnation="gone"), 1.0), "another's load is not its load"
    assert await cell.host.until_idle(here, DEADLINE_S)
