"""Forms of the answer before a worker that applies them from the first token on: vLLM without a reasoning parser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from chat_apis import TEMPLATE
from fake_engine import FakeClient, serve

from msaserve.tokenizer import Tokenizer

CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
OBJECT: Any = {"type": "json_object"}
FORMS: list[dict[str, Any]] = [
    {"response_format": OBJECT},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
    {"structured_outputs": {"regex": "[{]}"}},
    {"guided_choice": ["{}", "no"]},
    {"response_format": OBJECT, "tools": [CLOCK]},
]
MODES: dict[str, list[dict[str, Any]]] = {
    "": [{}, {"chat_template_kwargs": {"thinking_mode": "adaptive"}}, {"reasoning_effort": "high"}],
    "</mm:think>": [{"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}],
    "<mm:think>": [{"thinking": {"type": "enabled"}}, {"chat_template_kwargs": {"thinking_mode": "enabled"}}],
}
"""Request fields by the end of the prompt that they lead to where nothing else decides."""


class Front:
    def __init__(self, client: FakeClient, http: httpx.Client, tokenizer: Tokenizer) -> None:
        self._client, self._http, self._tokenizer = client, http, tokenizer

    def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
        return self._http.post("/v1/chat/completions", json=body)

    def end(self, **fields: Any) -> str:
        """What stands behind the model's turn in the prompt that the worker gets."""
        self.chat(**fields).raise_for_status()
        prompt = self._tokenizer.decode(self._client.requests[-1].prompt_token_ids, skip_special_tokens=False)
        return prompt.rpartition("]~b]ai:")[2]


@pytest.fixture(scope="module", params=[False, True])
def at_once(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def front(at_once: bool, tokenizer: Tokenizer) -> Iterator[Front]:
    client = FakeClient()
    client.info = msgspec.structs.replace(client.info, constrains_first_token=at_once)
    client.script = tokenizer.encode("{}")
    with serve(client, template=TEMPLATE) as url, httpx.Client(base_url=url, timeout=200, trust_env=False) as http:
        yield Front(client, http, tokenizer)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("end", ["", "</mm:think>"])
def test_the_form_is_the_answer(front: Front, at_once: bool, form: dict[str, Any], end: str) -> None:
    for fields in MODES[end]:
        message = front.chat(**form, **fields).raise_for_status().json()["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (None, "{}")
        assert front.end(**form, **fields) == ("</mm:think>" if at_once else end)


@pytest.mark.parametrize("form", FORMS)
def test_thinking_that_is_asked_for(front: Front, at_once: bool, form: dict[str, Any]) -> None:
    for fields in MODES["<mm:think>"]:
        if not at_once:
            assert front.end(**form, **fields) == "<mm:think>"
            continue
        answer = front.chat(**form, **fields)
        problem = answer.json()["error"]
        assert answer.status_code == 400
        assert problem["param"].partition(".")[0] == next(iter(form))
        assert "holds from the first token on" in problem["message"]


@pytest.mark.parametrize("end", MODES)
def test_without_a_form_the_request_decides(front: Front, end: str) -> None:
    for fields in MODES[end]:
        assert front.end(**fields) == end
        assert front.end(response_format={"type": "text"}, **fields) == end
