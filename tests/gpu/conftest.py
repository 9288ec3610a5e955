"""The SGLang engines that the tests of this folder share: starting one takes half a minute."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.gpu import sglang_cell


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def cell(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[sglang_cell.Cell]:
    """Each test takes the engine that the one before left serving; it may start more shadows."""
    async for made in sglang_cell.cell(tmp_path_factory.mktemp("cell")):
        yield made
