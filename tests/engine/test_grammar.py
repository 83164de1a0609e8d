"""Constrained decoding on a model of random weights: whatever it wants to say, it can only say what is allowed."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from array import array
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driver import check_empty, greedy_prompt, make_engine, random_prompt, request, run
from masks import EOS, TINY, TOKENIZER, allowed

from msaserve.engine import grammar
from msaserve.engine.async_engine import AsyncEngine
from msaserve.engine.engine import Engine
from msaserve.engine.grammar import Grammars, Matcher
from msaserve.engine.plan import PlanRow
from msaserve.engine.sampler import sample
from msaserve.errors import InvalidRequestError
from msaserve.types import Constraint, SamplingParams

ADDED = {token for _, token in TOKENIZER.added_tokens}
THINK, END_THINK = TOKENIZER.encode("<mm:think></mm:think>")
# Bounded everywhere, without whitespace: random weights never end a text of their own will.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "minItems": 1, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": ""},
}


def fits_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "tags", "ok"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and 1 <= len(value["tags"]) <= 3
        and set(value["tags"]) <= {"a", "bb", "ccc"}
        and type(value["ok"]) is bool
    )


CONSTRAINTS = {
    "schema": (Constraint(kind="json_schema", text=json.dumps(SCHEMA)), fits_schema),
    "regex": (Constraint(kind="regex", text=r"[a-f]{2,5}/\d{3}é?"), lambda t: re.fullmatch(r"[a-f]{2,5}/\d{3}é?", t)),
    "lark": (Constraint(kind="grammar", text='start: ("x"|"y")~2..4 "."'), lambda t: re.fullmatch(r"[xy]{2,4}\.", t)),
    "ebnf": (Constraint(kind="grammar", text='root ::= "n=" [0-9] [0-9]?'), lambda t: re.fullmatch("n=[0-9][0-9]?", t)),
    "choice": (
        Constraint(kind="choice", choices=("ja", 'n"e\\in\n', "пока", "ja, gern")),
        lambda t: t in ("ja", 'n"e\\in\n', "пока", "ja, gern"),
    ),
}  # fmt: skip


def constrained(name: str, request_id: str, prompt: list[int], **sampling: Any) -> Any:
    fields = {"temperature": 1.0, "seed": 1, "max_tokens": 200, "ignore_eos": False, **sampling}
    return request(request_id, prompt, constraint=CONSTRAINTS[name][0], **fields)


def text_of(token_ids: list[int]) -> str:
    return b"".join(TOKENIZER.token_bytes(i) for i in token_ids).decode()


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_output_is_what_the_constraint_says(name: str, temperature: float) -> None:
    prompt = greedy_prompt("tiny")
    requests = [constrained(name, str(seed), prompt, seed=seed, temperature=temperature) for seed in range(3)]
    for output in run(make_engine(), requests):
        assert output.error is None
        assert output.finish_reason == "stop"
        assert output.token_ids[-1] == EOS
        assert CONSTRAINTS[name][1](text_of(output.token_ids[:-1])), text_of(output.token_ids)


def test_json_object_is_a_prefix_of_one_when_it_is_cut_off() -> None:
    constraint = Constraint(kind="json_object")
    (output,) = run(
        make_engine(),
        [request("a", greedy_prompt("tiny"), constraint=constraint, ignore_eos=False, temperature=2.0, max_tokens=9)],
    )
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 9
    text = b"".join(TOKENIZER.token_bytes(i) for i in output.token_ids)
    assert text.startswith(b"{")
    assert not set(output.token_ids) & ADDED


def mixed_requests() -> list[Any]:
    """With a constraint and without, turn by turn."""
    rng = random.Random(5)
    requests: list[Any] = []
    for i, name in enumerate(CONSTRAINTS):
        prompt = random_prompt(rng, 20 + 7 * i)
        requests.append(constrained(name, f"c{i}", prompt, seed=i, logprobs=2, max_tokens=100))
        requests.append(request(f"u{i}", prompt, max_tokens=30, temperature=[0.0, 1.0][i % 2], seed=i, logprobs=2))
    return requests


@lru_cache(maxsize=1)
def tokens_alone() -> list[list[int]]:
    """Each of `mixed_requests` in an engine of its own."""
    return [run(make_engine(), [one])[0].token_ids for one in mixed_requests()]


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"num_pages": 12, "max_num_seqs": 8, "enable_prefix_cache": False},
        {"max_num_seqs": 1},
    ],
    ids=["together", "chunked", "preempted", "one by one"],
)
def test_batch_chunks_and_preemption_change_nothing(limits: dict[str, Any]) -> None:
    requests = mixed_requests()
    engine = make_engine(**limits)
    together = run(engine, requests)
    assert [o.token_ids for o in together] == tokens_alone()
    assert all(o.error is None for o in together)
    if "num_pages" in limits:
        assert engine.load().num_preemptions > 0


def test_outputs_of_one_request_are_followed_each_by_itself() -> None:
    engine = make_engine()
    sequences = engine.add(constrained("schema", "n", greedy_prompt("tiny"), n=3, seed=7))
    while engine.has_work():
        engine.step()
    check_empty(engine)
    texts = [text_of(s.output_token_ids[:-1]) for s in sequences]
    assert all(map(fits_schema, texts))
    assert len(set(texts)) == 3
    for i, sequence in enumerate(sequences[1:], 1):
        (alone,) = run(make_engine(), [constrained("schema", "a", greedy_prompt("tiny"), seed=7 + i)])
        assert alone.token_ids == sequence.output_token_ids


async def test_the_engines_thread_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even when so many other constraints came in between that it was forgotten."""
    built: list[str] = []
    original = grammar._grammar
    monkeypatch.setattr(grammar, "_grammar", lambda c, v: (built.append(c.text), original(c, v))[1])
    monkeypatch.setattr(grammar, "MAX_COMPILED", 1)
    threaded = AsyncEngine(make_engine())
    submit = threaded._submit

    def compile_another_first(command: Any) -> bool:
        threaded._engine.grammars.compile(Constraint(kind="regex", text="b"))
        return submit(command)

    monkeypatch.setattr(threaded, "_submit", compile_another_first)
    asked = request("r", [9], n=2, constraint=Constraint(kind="regex", text="a"), ignore_eos=False, max_tokens=4)
    events = [event async for event in threaded.generate(asked)]
    assert [event.finish_reason for event in events if event.finish_reason] == ["stop", "stop"]
    assert built == ["a", "b"]
    await threaded.close()


def test_abort_in_the_middle_leaves_the_others_as_they_are() -> None:
    engine = make_engine()
    (first,) = engine.add(constrained("schema", "a", greedy_prompt("tiny")))
    (second,) = engine.add(constrained("schema", "b", greedy_prompt("tiny"), seed=3))
    for _ in range(4):
        engine.step()
    engine.abort(first)
    while engine.has_work():
        engine.step()
    check_empty(engine)
    assert fits_schema(text_of(second.output_token_ids[:-1]))


def test_logprobs_are_those_of_the_model_without_the_constraint() -> None:
    (output,) = run(make_engine(), [constrained("choice", "a", greedy_prompt("tiny"), logprobs=1, temperature=0.0)])
    (free,) = run(make_engine(), [request("b", greedy_prompt("tiny"), max_tokens=1, logprobs=1)])
    assert output.logprobs[0].top == free.logprobs[0].top
    assert output.logprobs[0].logprob < free.logprobs[0].logprob


def test_eos_is_allowed_exactly_where_the_grammar_ends(grammars: Grammars) -> None:
    matcher = grammars.matcher(Constraint(kind="regex", text="ab*"), [5])
    a, b = TOKENIZER.encode("ab")
    assert allowed(matcher, []) == {a}
    assert allowed(matcher, [a]) == {b, EOS}
    assert allowed(matcher, [a, b, b]) == {b, EOS}


def test_asked_twice_it_says_the_same(grammars: Grammars) -> None:
    """A request that was preempted asks again, for as many tokens as before."""
    matcher = grammars.matcher(Constraint(kind="regex", text="[ab]c"), [5])
    tokens = TOKENIZER.encode("ac")
    assert allowed(matcher, tokens[:1]) == allowed(matcher, tokens[:1]) == {tokens[1]}
    fresh = grammars.matcher(Constraint(kind="regex", text="[ab]c"), [5])
    assert allowed(fresh, tokens) == allowed(matcher, tokens) == {EOS}


class TestReasoning:
    CONSTRAINT = Constraint(kind="regex", text="ab", after_reasoning=True)
    A, B = TOKENIZER.encode("ab")

    def test_nothing_is_masked_inside_thinking(self, grammars: Grammars) -> None:
        matcher = grammars.matcher(self.CONSTRAINT, [9, THINK])
        assert allowed(matcher, []) is None
        assert allowed(matcher, [50, THINK, 60]) is None
        assert allowed(matcher, [50, THINK, 60, END_THINK]) == {self.A}
        assert allowed(matcher, [50, THINK, 60, END_THINK, self.A]) == {self.B}

    def test_all_in_one_go(self, grammars: Grammars) -> None:
        matcher = grammars.matcher(self.CONSTRAINT, [9, THINK])
        assert allowed(matcher, [50, END_THINK, self.A]) == {self.B}

    def test_after_a_closer_in_the_prompt_it_starts_at_once(self, grammars: Grammars) -> None:
        assert allowed(grammars.matcher(self.CONSTRAINT, [9, END_THINK]), []) == {self.A}

    def test_an_output_may_open_reasoning_by_its_first_token_only(self, grammars: Grammars) -> None:
        matcher = grammars.matcher(self.CONSTRAINT, [9])
        assert allowed(matcher, []) == {self.A, THINK}
        assert allowed(matcher, [self.A]) == {self.B}
        thinks = grammars.matcher(self.CONSTRAINT, [9])
        assert allowed(thinks, [THINK]) is None
        assert allowed(thinks, [THINK, 40, END_THINK]) == {self.A}

    def test_without_it_the_constraint_starts_at_once(self, grammars: Grammars) -> None:
        at_once = Constraint(kind="regex", text="ab")
        for last in (9, THINK, END_THINK):
            assert allowed(grammars.matcher(at_once, [last]), []) == {self.A}

    def test_end_to_end(self) -> None:
        bias = {THINK: 60.0}
        (output,) = run(
            make_engine(),
            [
                request("a", [9, 10, THINK], constraint=self.CONSTRAINT, ignore_eos=False, temperature=1.0, seed=4,
                        max_tokens=300, logit_bias={END_THINK: 3.0, EOS: -60.0}),
            ],
        )  # fmt: skip
        at = output.token_ids.index(END_THINK)
        assert at > 0
        assert output.token_ids[at + 1 : at + 3] == [self.A, self.B]
        (opened,) = run(
            make_engine(),
            [request("a", [9], constraint=self.CONSTRAINT, ignore_eos=False, logit_bias=bias, max_tokens=3)],
        )
        assert opened.token_ids[0] == THINK


def test_what_failed_is_compiled_anew(grammars: Grammars) -> None:
    """A panic inside llguidance spoils what all copies of a compiled constraint share."""
    constraint = Constraint(kind="regex", text="ab")
    failing, mask = grammars.matcher(constraint, [9]), np.zeros(16, np.int32)
    compiled = grammars._compiled[constraint]
    assert not failing.fill(TOKENIZER.encode("x"), mask)
    assert failing.error is not None
    assert failing.error.startswith("the constraint failed: ")
    assert "backtrace" not in failing.error
    assert allowed(grammars.matcher(constraint, [9]), []) == set(TOKENIZER.encode("a"))
    assert grammars._compiled[constraint] is not compiled


def test_added_tokens_are_never_text(grammars: Grammars) -> None:
    matcher = grammars.matcher(Constraint(kind="regex", text="(.|\n)*"), [9])
    assert (allowed(matcher, []) or set()) & ADDED == {EOS}


BAD = {
    "a schema that is none": Constraint(kind="json_schema", text='{"type": "objekt"}'),
    "a schema that is no object": Constraint(kind="json_schema", text="[1]"),
    "no JSON": Constraint(kind="json_schema", text='{"type": '),
    "a schema that nothing fits": Constraint(kind="json_schema", text='{"enum": []}'),
    "a keyword that cannot be enforced": Constraint(kind="json_schema", text='{"if": {"type": "string"}}'),
    "a reference to nowhere": Constraint(kind="json_schema", text='{"$ref": "#/$defs/x"}'),
    "nested too deep": Constraint(kind="json_schema", text='{"not":' * 100_000 + "1" + "}" * 100_000),
    "an open class": Constraint(kind="regex", text="[ab"),
    "look-ahead": Constraint(kind="regex", text="(?=a)b"),
    "an unknown rule": Constraint(kind="grammar", text="start: foo"),
    "no grammar": Constraint(kind="grammar", text="root = 1"),
    "an empty grammar": Constraint(kind="grammar", text=""),
    "no structures": Constraint(kind="structural_tag", text='{"triggers": ["<"]}'),
    "a begin without a trigger": Constraint(
        kind="structural_tag", text='{"triggers": ["<"], "structures": [{"begin": "[", "schema": {}, "end": ""}]}'
    ),
    "no choices": Constraint(kind="choice"),
    "an expression that takes the square of its length": Constraint(kind="regex", text="a?" * 2**19),
    "a pattern that does": Constraint(kind="json_schema", text=json.dumps({"items": {"pattern": "a?" * 2**18}})),
    "names that do": Constraint(kind="json_schema", text=json.dumps({"patternProperties": {"a?" * 2**18: True}})),
    "names that are none": Constraint(kind="json_schema", text='{"type": "object", "patternProperties": 3}'),
    "too many terminals": Constraint(
        kind="grammar", text="start: A0\n" + "".join(f'A{i}: A{i + 1} "a"\n' for i in range(20_000)) + 'A20000: "b"'
    ),
    "a text without end": Constraint(kind="grammar", text='start: "a"' + " " * 2**20),
    "a lone surrogate": Constraint(kind="choice", choices=("\ud800",)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_constraints_are_refused_by_name_and_nothing_is_queued(name: str) -> None:
    engine = make_engine()
    constraint = BAD[name]
    with pytest.raises(InvalidRequestError) as caught:
        engine.add(request("a", [5], constraint=constraint, ignore_eos=False))
    assert caught.value.param == constraint.kind
    assert len(str(caught.value)) < 700
    named = Constraint(kind=constraint.kind, text=constraint.text, choices=constraint.choices, param="response_format")
    with pytest.raises(InvalidRequestError, match="response_format: ") as caught:
        engine.add(request("a", [5], constraint=named, ignore_eos=False))
    assert caught.value.param == "response_format"
    check_empty(engine)


@pytest.mark.parametrize("field", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_what_contradicts_a_constraint_is_refused(field: dict[str, Any]) -> None:
    sampling = SamplingParams(constraint=Constraint(kind="json_object"), **field)
    with pytest.raises(InvalidRequestError) as caught:
        sampling.validate(vocab_size=512)
    assert caught.value.param == next(iter(field))


@pytest.mark.parametrize(
    "text", ["\n" * 500_000, " \n" * 200_000 + "root = 1", 'root ::= "' + "a" * 500_000, "(" * 500_000]
)
def test_long_nonsense_is_refused_soon(grammars: Grammars, text: str) -> None:
    structures = [{"begin": "<" + text, "schema": True, "end": text}]
    tag = json.dumps({"triggers": ["<x"], "structures": structures})
    start = time.process_time()
    for constraint in (Constraint(kind="grammar", text=text), Constraint(kind="structural_tag", text=tag)):
        with pytest.raises(InvalidRequestError):
            grammars.compile(constraint)
    assert time.process_time() - start < 10


def definitions(count: int, of: Any) -> str:
    """A schema whose definitions name the next each. of: one, by the name of its next."""
    chain = {f"d{i}": of({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**chain, f"d{count}": {"type": "string"}}})


CHAIN = range(9_000)
MEMBER = "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in CHAIN) + '\nr9000: "b"'


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(kind="grammar", text=MEMBER),
        Constraint(kind="grammar", text=MEMBER.replace("start: r0", "root ::= r0").replace(":", " ::=")),
        Constraint(kind="grammar", text="\n".join(f'r{i}: r{i + 1} "a"' for i in CHAIN) + '\nr9000: "b"\nstart: r0'),
        Constraint(kind="json_schema", text=definitions(20_000, lambda after: after)),
        Constraint(kind="json_schema", text=definitions(5_000, lambda after: {"type": "array", "items": after})),
        Constraint(kind="json_schema", text=definitions(5_000, lambda after: {"allOf": [after, after]})),
        Constraint(
            kind="json_schema",
            text=definitions(5_000, lambda after: {"type": "object", "properties": {"a": after}, "required": ["a"]}),
        ),
    ],
)
def test_a_long_chain_of_rules_does_not_end_the_process(constraint: Constraint, grammars: Grammars) -> None:
    try:
        matcher = grammars.matcher(constraint, [9])
    except InvalidRequestError:
        return
    assert allowed(matcher, []) or matcher.error


def test_a_checkpoint_without_a_tokenizer_takes_no_constraints(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"regex: this checkpoint takes no constraints.*tokenizer\.json"):
        Grammars(tmp_path, vocab_size=512, eos_token_ids=(EOS,)).compile(Constraint(kind="regex", text="a"))


def test_compiled_once_for_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    original = grammar._grammar
    monkeypatch.setattr(grammar, "_grammar", lambda c, v: (built.append(c.text), original(c, v))[1])
    grammars = Grammars(TINY, vocab_size=512, eos_token_ids=(EOS,))
    same = [Constraint(kind="regex", text="ab", param=str(i), after_reasoning=bool(i % 2)) for i in range(8)]
    threads = [threading.Thread(target=grammars.compile, args=(one,)) for one in same]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert built == ["ab"]
    for i in range(grammar.MAX_COMPILED + 1):
        grammars.compile(Constraint(kind="regex", text=f"x{i}"))
    grammars.compile(same[0])
    assert built.count("ab") == 2
    assert len(grammars._compiled) == grammar.MAX_COMPILED


def test_one_row_that_fails_harms_no_other(grammars: Grammars) -> None:
    """A token that the constraint never allowed: as if its state were lost."""
    rows = []
    for output in ([300], TOKENIZER.encode("a"), []):
        matcher = grammars.matcher(Constraint(kind="regex", text="ab"), [9])
        rows.append(_row(output, matcher))
    rows.append(_row([], None))
    results = sample(torch.randn(4, 600, generator=torch.Generator().manual_seed(0)), rows, (EOS,))
    assert results[0].error is not None
    assert "constraint" in results[0].error
    assert [r.token_id for r in results[1:3]] == [TOKENIZER.encode("b")[0], TOKENIZER.encode("a")[0]]
    assert results[3].error is None


@pytest.mark.parametrize("vocab_size", [512, 517, 600])
def test_mask_covers_the_whole_vocabulary(vocab_size: int) -> None:
    grammars = Grammars(TINY, vocab_size=vocab_size, eos_token_ids=(EOS,))
    logits = torch.zeros(3, vocab_size)
    logits[:, -1] = 100.0  # what no constraint allows
    before = logits.clone()
    matcher = grammars.matcher(Constraint(kind="regex", text="a+"), [9])
    results = sample(logits, [_row([], None), _row([], matcher), _row([], None)], (EOS,))
    assert [r.token_id for r in results] == [vocab_size - 1, TOKENIZER.encode("a")[0], vocab_size - 1]
    assert torch.equal(logits, before)


def _row(output: list[int], matcher: Matcher | None) -> PlanRow:
    return PlanRow("r", [1], 0, array("i", [1]), SamplingParams(temperature=0.0), 0, True, [9], output, (), matcher)


async def test_compiling_does_not_hold_up_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    original = Engine.add
    monkeypatch.setattr(Engine, "add", lambda self, *args: (gate.set(), original(self, *args))[1])
    compiled_in: list[str] = []
    compile_it = Grammars._compile

    def slow(self: Grammars, constraint: Constraint) -> Any:
        compiled_in.append(threading.current_thread().name)
        return compile_it(self, constraint)

    monkeypatch.setattr(Grammars, "_compile", slow)
    engine = AsyncEngine(make_engine())
    try:
        tokens: list[int] = []
        async for event in engine.generate(constrained("schema", "a", greedy_prompt("tiny"))):
            tokens += event.token_ids
        assert fits_schema(text_of(tokens[:-1]))
        with pytest.raises(InvalidRequestError):
            async for _ in engine.generate(request("b", [5], constraint=BAD["an open class"], ignore_eos=False)):
                pass
        assert len(compiled_in) == 2
        assert "msaserve-engine" not in compiled_in
    finally:
        await engine.close()
