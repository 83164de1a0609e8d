from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from fake_engine import TINY, FakeClient, serve

from msaserve.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY)


@pytest.fixture(scope="module")
def _shared() -> Iterator[tuple[FakeClient, str]]:
    client = FakeClient()
    with serve(client) as url:
        yield client, url


@pytest.fixture
def engine(_shared: tuple[FakeClient, str]) -> FakeClient:
    """The fake engine behind `http` and `openai_client`, as new."""
    client, _ = _shared
    client.__init__()  # type: ignore[misc]
    return client


@pytest.fixture
def http(_shared: tuple[FakeClient, str], engine: FakeClient) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=_shared[1], timeout=20, trust_env=False) as client:
        yield client


@pytest.fixture
def openai_client(_shared: tuple[FakeClient, str], engine: FakeClient) -> Iterator[openai.OpenAI]:
    transport = httpx.Client(trust_env=False, timeout=20)
    with openai.OpenAI(base_url=f"{_shared[1]}/v1", api_key="none", max_retries=0, http_client=transport) as client:
        yield client
