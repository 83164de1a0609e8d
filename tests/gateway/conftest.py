from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
from fake_engine import TINY, FakeClient, serve

from msaserve.gateway.chat import ChatTemplate
from msaserve.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY)


@pytest.fixture(scope="module")
def template() -> ChatTemplate | None:
    """Of the server that a module shares; None: the checkpoint's."""
    return None


@pytest.fixture(scope="module")
def served(template: ChatTemplate | None) -> Iterator[tuple[FakeClient, str]]:
    client = FakeClient()
    with serve(client, template=template) as url:
        yield client, url


@pytest.fixture
def engine(served: tuple[FakeClient, str]) -> FakeClient:
    """The fake engine behind the server, as new."""
    client, _ = served
    client.__init__()  # type: ignore[misc]
    return client


@pytest.fixture
def say(engine: FakeClient, tokenizer: Tokenizer) -> Callable[[str], None]:
    """Have the engine answer with a text."""

    def script(text: str) -> None:
        engine.script = tokenizer.encode(text)

    return script


@pytest.fixture
def prompt(engine: FakeClient, tokenizer: Tokenizer) -> Callable[[], str]:
    """The last prompt that the engine got, as text."""
    return lambda: tokenizer.decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


@pytest.fixture
def http(served: tuple[FakeClient, str], engine: FakeClient) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served[1], timeout=200, trust_env=False) as client:
        yield client


@pytest.fixture
def openai_client(served: tuple[FakeClient, str], engine: FakeClient) -> Iterator[openai.OpenAI]:
    transport = httpx.Client(trust_env=False, timeout=200)
    with openai.OpenAI(base_url=f"{served[1]}/v1", api_key="none", max_retries=0, http_client=transport) as client:
        yield client
