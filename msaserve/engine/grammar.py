"""Constrained decoding: what may come next, by llguidance. One bit per token, no torch.

A constraint is compiled once; each output gets a matcher of its own, which follows the output's tokens. What a matcher
allows depends on those tokens alone: not on the batch, on how the prompt was cut into chunks, nor on preemption.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from msaserve.engine import structural_tag
from msaserve.errors import CheckpointError, InvalidRequestError
from msaserve.lark import JSON_WHITESPACE, Literals, quoted
from msaserve.tokenizer import Tokenizer
from msaserve.types import MAX_PATTERN_CHARS, Constraint

MAX_COMPILED = 64
MAX_TERMINALS = 4096
"""Of a grammar: twice as many that name each other take minutes to compile."""
THINK_OPENER = "<mm:think>"
THINK_CLOSER = "</mm:think>"
_JSON_OPTIONS: Any = {"whitespace_pattern": JSON_WHITESPACE}
_MAX_MESSAGE_CHARS = 500
_STACK_BYTES = 2**30
"""Of a thread that compiles. The library calls itself for each rule of a chain, and without room for that the process
ends: 4 KiB a rule, 65,000 rules at most. Only what is used takes memory."""
_TERMINAL = re.compile(r"^[A-Z_][A-Z_0-9]*(?:\.-?[0-9]+)?[ \t]*:", re.MULTILINE)
_INTERSECTION = re.compile(r"^[A-Z_][A-Z_0-9]*: (.* & .*)$", re.MULTILINE)
"""A terminal of a Lark grammar that is one."""

Mask = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


class Matcher:
    """Where one output stands in its constraint. Not thread-safe.

    The constraint starts at the first token, or, if it waits for reasoning, behind the token that ends it.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        *,
        opener: int | None,
        closer: int | None,
        is_thinking: bool,
        on_failure: Callable[[], None],
    ) -> None:
        """opener: the token by which the output may open reasoning as its first; closer: that ends reasoning."""
        self._matcher = matcher
        self._on_failure = on_failure
        self._opener = opener
        self._closer = closer
        self._num_seen = 0
        self._is_thinking = is_thinking
        self.error: str | None = None
        """Why nothing more can be said of this output: a limit of the library was reached."""

    def fill(self, output_token_ids: Sequence[int], mask: Mask) -> bool:
        """Write which tokens may follow these.

        Args:
            output_token_ids: all of them; those that an earlier call had come first.
            mask: [ceil(vocab_size / 32)] int32, contiguous: bit i % 32 of word i // 32 stands for token i.

        Returns:
            False, and nothing is written, if every token may follow, or `error` says why none can.
        """
        for token in output_token_ids[self._num_seen :]:
            self._take(token)
        self._num_seen = len(output_token_ids)
        if self._is_thinking or self.error is not None:
            return False
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        if self._opener is not None and self._num_seen == 0:
            mask[self._opener // 32] |= np.uint32(1 << self._opener % 32).astype(np.int32)
        return self.error is None

    def _take(self, token: int) -> None:
        is_first, self._num_seen = self._num_seen == 0, self._num_seen + 1
        if self._is_thinking:
            self._is_thinking = token != self._closer
        elif is_first and token == self._opener:
            self._is_thinking = True
        elif self.error is None:
            self._matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            self.error = f"the constraint failed: {_short(self._matcher.get_error())}"
            self._on_failure()


class Grammars:
    """A checkpoint's constraints, compiled when they are first asked for. Thread-safe.

    Args:
        directory: of the checkpoint; its tokenizer.json is read with the first constraint.
        vocab_size: of the logits.
        eos_token_ids: allowed exactly where an output may end.
    """

    def __init__(self, directory: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._directory = directory
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._start_lock = threading.Lock()
        """Held while a thread with a large stack is started: that size is the whole process's."""
        self._vocabulary: _Vocabulary | None = None
        self._compiled: OrderedDict[Constraint, Future[LLMatcher]] = OrderedDict()

    def compile(self, constraint: Constraint) -> LLMatcher:
        """What `matcher` begins with. May take seconds, and leaves the interpreter to other threads meanwhile.

        Raises:
            InvalidRequestError: it is not a valid schema, expression or grammar, or the checkpoint has no tokenizer;
                names the field.
        """
        return self._get(constraint)

    def matcher(
        self, constraint: Constraint, prompt_token_ids: Sequence[int], compiled: LLMatcher | None = None
    ) -> Matcher:
        """For one output. Raises what `compile` raises.

        compiled: what `compile` returned for it; who holds it need not fear that it was forgotten since.
        """
        compiled = compiled or self._get(constraint)
        with self._lock:
            copy = compiled.deep_copy()
        assert self._vocabulary is not None
        opener, closer = self._vocabulary.opener, self._vocabulary.closer
        last = prompt_token_ids[-1] if prompt_token_ids else None
        waits = constraint.after_reasoning and closer is not None
        return Matcher(
            copy,
            opener=opener if waits and last not in (opener, closer) else None,
            closer=closer,
            is_thinking=waits and last == opener,
            on_failure=lambda: self._forget(constraint),
        )

    def _forget(self, constraint: Constraint) -> None:
        """What failed once may be broken for all: a panic inside the library spoils what copies share."""
        with self._lock:
            self._compiled.pop(_key(constraint), None)

    def _get(self, constraint: Constraint) -> LLMatcher:
        key = _key(constraint)
        with self._lock:
            future = self._compiled.get(key)
            is_new = future is None
            if future is None:
                future = self._compiled[key] = Future()
                while len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(key)
        if is_new:
            try:
                future.set_result(self._compile(key))
            except BaseException as error:
                with self._lock:
                    self._compiled.pop(key, None)
                future.set_exception(error)
        try:
            return future.result()
        except InvalidRequestError as error:
            field = constraint.param or constraint.kind
            raise InvalidRequestError(f"{field}: {error}", param=field, code="invalid_constraint") from None

    def _compile(self, constraint: Constraint) -> LLMatcher:
        compiled: Future[LLMatcher] = Future()

        def compile_one() -> None:
            try:
                compiled.set_result(self._compile_here(constraint))
            except BaseException as error:
                compiled.set_exception(error)

        thread = threading.Thread(target=compile_one, name="compile-constraint", daemon=True)
        with self._start_lock:
            threading.stack_size(_STACK_BYTES)
            try:
                thread.start()
            finally:
                threading.stack_size(0)
        return compiled.result()

    def _compile_here(self, constraint: Constraint) -> LLMatcher:
        vocabulary = self._load()
        try:
            grammar = _grammar(constraint, vocabulary)
            matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        except UnicodeEncodeError:
            raise InvalidRequestError("it is not valid Unicode") from None
        except RecursionError:
            raise InvalidRequestError("it is nested too deep") from None
        except ValueError as error:  # of llguidance's reader
            raise InvalidRequestError(_short(str(error))) from None
        if matcher.is_error():
            raise InvalidRequestError(_short(matcher.get_error()))
        if constraint.kind == "grammar":
            self._refuse_empty_terminals(constraint.text)
        return matcher

    def _refuse_empty_terminals(self, grammar: str) -> None:
        """An intersection that no text is in would be found out when an output comes to it."""
        vocabulary = self._load()
        mask = np.zeros(-(-self._vocab_size // 32), np.int32)
        for body in _INTERSECTION.findall(grammar):
            alone = LLMatcher(vocabulary.tokenizer, f"start: T\nT: {body}", log_level=0)
            if alone.is_error():
                continue  # it names other terminals
            alone.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if alone.is_error():
                raise InvalidRequestError(f"no text is in all of {_short(body)}")

    def _load(self) -> _Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                if not self._eos_token_ids:
                    raise InvalidRequestError("the checkpoint has no end-of-sequence token")
                try:
                    tokenizer = Tokenizer.load(self._directory)
                except CheckpointError as error:
                    raise InvalidRequestError(f"this checkpoint takes no constraints: {error}") from None
                self._vocabulary = _Vocabulary(tokenizer, self._vocab_size, self._eos_token_ids)
            return self._vocabulary


def _key(constraint: Constraint) -> Constraint:
    return Constraint(kind=constraint.kind, text=constraint.text, choices=constraint.choices)


class _Vocabulary:
    """The tokenizer as llguidance takes it. Added tokens are never text: only a grammar that names one gets it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> None:
        self.literal = Literals((text, i) for text, i in tokenizer.added_tokens if i < vocab_size)
        self.opener = self.literal.ids.get(THINK_OPENER)
        self.closer = self.literal.ids.get(THINK_CLOSER)
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        # Ids of the logits beyond the tokenizer's have no bytes, and are never allowed.
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        self.special_token_ids = sorted(self.literal.ids.values())
        self._encode = tokenizer.encode_plain
        self.tokenizer = LLTokenizer(TokenizerWrapper(self), eos_token=eos_token_ids)

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # the wrapper asks whether bytes will do
            raise TypeError("text only")
        return self._encode(text)


def _grammar(constraint: Constraint, vocabulary: _Vocabulary) -> str:
    """In llguidance's own form. Raises InvalidRequestError."""
    kind, text = constraint.kind, constraint.text
    if kind == "json_object":
        return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=_JSON_OPTIONS)
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(_schema_text(_json(text)), defaults=_JSON_OPTIONS)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        return "start: " + " | ".join(map(quoted, constraint.choices))
    if kind == "structural_tag":
        return structural_tag.to_lark(_json(text), vocabulary.literal)
    assert kind == "grammar"
    try:
        # Without empty lines: the converter's search for Lark is quadratic in them.
        lark = any_to_lark("\n".join(line for line in text.split("\n") if line.strip()))
    except Exception as error:  # the converter of EBNF raises its own, and others
        raise InvalidRequestError(_short(str(error))) from None
    num_terminals = len(_TERMINAL.findall(lark))
    if num_terminals > MAX_TERMINALS:
        raise InvalidRequestError(f"it has {num_terminals} terminals; at most {MAX_TERMINALS} are taken")
    return lark


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidRequestError(f"it is not JSON: {error}") from None


def _schema_text(schema: Any) -> str:
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequestError("a JSON schema is an object")
    waiting: list[Any] = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            by_name = one.get("patternProperties")
            patterns = [one.get("pattern"), *(by_name if isinstance(by_name, dict) else ())]
            longest = max((len(pattern) for pattern in patterns if isinstance(pattern, str)), default=0)
            if longest > MAX_PATTERN_CHARS:
                raise InvalidRequestError(f"a pattern has {longest} characters; at most {MAX_PATTERN_CHARS} are taken")
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    return json.dumps(schema)


def _short(message: str) -> str:
    message = message.partition("<backtrace>")[0].partition("<non-verbose/>")[0].strip()
    return message if len(message) <= _MAX_MESSAGE_CHARS else message[:_MAX_MESSAGE_CHARS] + "…"
