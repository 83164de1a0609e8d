"""Text to token ids and back, over `tokenizers`. Byte-level tokenizers only: what M3 and its kin use."""

from __future__ import annotations

import codecs
import json
import random
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from msaserve.errors import CheckpointError, InvalidRequestError, UnsupportedError
from msaserve.fields import read_json

_CHUNK_CHARS = 65_536
_CHUNK_SLACK = 16
"""Cutting a text between two chunks can add a few tokens, no more than this."""
_GUARDS = range(0x100000, 0x10FFFE)
"""Unicode's second plane of private use."""


class Tokenizer:
    """A checkpoint's tokenizer. Safe to use from several threads."""

    def __init__(self, definition: str, config: dict[str, Any]) -> None:
        """definition: the text of tokenizer.json. config: tokenizer_config.json, or {}.

        Raises:
            CheckpointError: it is not a tokenizer.
            UnsupportedError: it does not decode byte by byte.
        """
        try:
            data = json.loads(definition)
            self._tokenizer = tokenizers.Tokenizer.from_str(definition)
            # Without added tokens, text that spells one is plain text.
            plain = {**data, "added_tokens": []}
            self._plain = tokenizers.Tokenizer.from_str(json.dumps(plain))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"tokenizer.json cannot be read: {error}") from error
        decoder = data.get("decoder") or {}
        if "ByteLevel" not in {decoder.get("type"), *(d.get("type") for d in decoder.get("decoders", ()))}:
            raise UnsupportedError(f"tokenizer.json has a {decoder.get('type')} decoder; only ByteLevel is supported")
        # Truncation or padding stored in the file would silently change prompts.
        for tokenizer in (self._tokenizer, self._plain):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self.config = config
        added = self._tokenizer.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._bytes = _token_bytes(self._tokenizer.get_vocab(with_added_tokens=True), added)
        self._spellings = _Spellings(token.content for token in added.values())
        self._special_spellings = _Spellings(token.content for token in added.values() if token.special)

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """Raises CheckpointError when tokenizer.json is missing or broken."""
        path = Path(directory) / "tokenizer.json"
        try:
            definition = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        return cls(definition, read_json(Path(directory) / "tokenizer_config.json"))

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return len(self._bytes)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; text that spells an added token becomes that token.

        Raises:
            InvalidRequestError: it has a lone surrogate.
        """
        return _ids(self._tokenizer, text, add_special_tokens)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of `text`, all of it plain text: no added token comes out."""
        return _ids(self._plain, text, False)

    def encode_guarded(self, text: str, guard: str) -> list[int]:
        """Token ids of `text` without its guards; what a guard interrupts does not become an added token.

        A text without a guard gives exactly encode(text).

        Raises:
            InvalidRequestError: it has a lone surrogate.
        """
        if guard not in text:
            return self.encode(text)
        try:
            # The batch call leaves the interpreter to other threads.
            encode: Any = self._tokenizer.encode_batch
            (encoding,) = encode([text], add_special_tokens=False)
        except TypeError as error:
            raise _half_a_character() from error
        ids: list[int] = []
        end = 0
        for number, token_id in enumerate(encoding.ids):
            if token_id in self._added_ids:
                start, stop = encoding.token_to_chars(number)  # the list of all offsets takes long to make
                ids += self.encode_plain(text[end:start].replace(guard, ""))
                ids.append(token_id)
                end = stop
        return ids + self.encode_plain(text[end:].replace(guard, ""))

    def guard(self, text: str, guard: str, *, special_only: bool = False) -> str:
        """`text` with a guard inside every spelling of an added token, also of one that its neighbours could complete.

        special_only: leave the spellings of added tokens that are not special (`<mm:think>` and the like).
        """
        return (self._special_spellings if special_only else self._spellings).guard(text, guard)

    def count_beyond(self, text: str, limit: int) -> int | None:
        """A count of tokens above `limit` that `text` surely has, or None if it may be within it.

        Looks at one chunk after another and stops early: a huge text costs neither its memory nor its time.
        """
        count = 0
        for number, start in enumerate(range(0, len(text), _CHUNK_CHARS)):
            count += len(self.encode_plain(text[start : start + _CHUNK_CHARS]))
            if count - _CHUNK_SLACK * (number + 1) > limit:
                return count
        return None

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for; empty for an id that has no token."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def token_text(self, token_id: int) -> str:
        r"""A token as text; one that is not whole characters as `bytes:\xe2\x82`, as OpenAI writes it."""
        data = self.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    @property
    def added_tokens(self) -> list[tuple[str, int]]:
        """Spelling and id of the added tokens, special or not: no plain text becomes one of them."""
        return [(self._bytes[i].decode(), i) for i in sorted(self._added_ids)]

    def special_ids(self, *, kept: Collection[str] = ()) -> frozenset[int]:
        """Ids of the special tokens but the `kept` ones."""
        return self._special_ids - {self._tokenizer.token_to_id(token) for token in kept}

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Bytes that are no UTF-8 become U+FFFD."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in token_ids if i not in skipped).decode("utf-8", "replace")


def _ids(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    try:
        # The batch call computes no offsets and leaves the interpreter to other threads.
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except TypeError as error:
        raise _half_a_character() from error
    ids: list[int] = encoding.ids
    return ids


def _half_a_character() -> InvalidRequestError:
    return InvalidRequestError("the text has a half of a character (a lone surrogate), which is no text")


class IncrementalDetokenizer:
    """Tokens of one output in, text out as soon as its characters are whole. Its pieces join to Tokenizer.decode."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, kept_tokens: Collection[str] = ()
    ) -> None:
        """kept_tokens: shown even if they are special."""
        self._tokenizer = tokenizer
        self._skipped_ids = tokenizer.special_ids(kept=kept_tokens) if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped_ids:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    @property
    def is_pending(self) -> bool:
        """Whether the bytes so far end inside a character."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """The rest, when no token follows."""
        return self._decoder.decode(b"", final=True)


class _Spellings:
    """Finds where a text spells, or could help to spell, one of some tokens."""

    def __init__(self, contents: Iterable[str]) -> None:
        tokens = sorted({c for c in contents if c}, key=len, reverse=True)
        self._pattern = re.compile("|".join(re.escape(t) for t in tokens)) if tokens else None
        # Plain searches, for their first characters and then a few short heads, are much faster than the pattern.
        self._heads = sorted({t[:2] for t in tokens})
        self._prefixes = {t[:i] for t in tokens for i in range(1, len(t))}
        self._suffixes = {t[i:] for t in tokens for i in range(1, len(t))}
        self._infixes = {t[i:j] for t in tokens for i in range(1, len(t)) for j in range(i + 1, len(t))}
        self._sizes = range(1, max((len(t) for t in tokens), default=0))
        self._first_chars = {t[0] for t in tokens}
        self._last_chars = {t[-1] for t in tokens}

    def guard(self, text: str, guard: str) -> str:
        if self._pattern is None or not text:
            return text
        # Guards stay inside whitespace at the ends: templates that trim still trim.
        body = text.strip()
        start = text.index(body) if body else 0
        head, tail = text[:start], text[start + len(body) :]
        if not body:
            return text
        is_inside = text in self._infixes or body in self._infixes
        leads = is_inside or any(self._begins_with_an_end(t) for t in (text, body))
        trails = is_inside or any(self._ends_with_a_beginning(t) for t in (text, body))
        if any(c in body for c in self._first_chars) and any(h in body for h in self._heads):
            # Overlapping spellings: each first character gets its own guard.
            body = self._break_spellings(body, guard)
        return f"{head}{guard if leads else ''}{body}{guard if trails else ''}{tail}"

    def _begins_with_an_end(self, text: str) -> bool:
        # A short look first: most texts have none of these characters there.
        head = text[: self._sizes.stop]
        return any(c in head for c in self._last_chars) and any(head[:k] in self._suffixes for k in self._sizes)

    def _ends_with_a_beginning(self, text: str) -> bool:
        tail = text[-self._sizes.stop :]
        return any(c in tail for c in self._first_chars) and any(tail[-k:] in self._prefixes for k in self._sizes)

    def _break_spellings(self, text: str, guard: str) -> str:
        assert self._pattern is not None
        pieces: list[str] = []
        end = position = 0
        while match := self._pattern.search(text, position):
            position = match.start() + 1
            pieces += (text[end:position], guard)
            end = position
        return "".join(pieces) + text[end:]


def new_guard(texts: Sequence[str]) -> str:
    """One private-use character that none of `texts` contains. Raises InvalidRequestError if they contain all."""
    for _ in range(8):
        guard = chr(random.choice(_GUARDS))
        if not any(guard in text for text in texts):
            return guard
    unused = set(map(chr, _GUARDS)).difference(*texts)
    if not unused:
        raise InvalidRequestError("the text contains every private-use character from U+100000 on")
    return unused.pop()


def _token_bytes(vocab: dict[str, int], added: dict[int, Any]) -> list[bytes]:
    byte_of = _byte_level_alphabet()
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        if token_id in added:
            continue
        try:
            table[token_id] = bytes(byte_of[char] for char in token)
        except KeyError:
            table[token_id] = token.encode("utf-8")
    for token_id, token in added.items():
        table[token_id] = token.content.encode("utf-8")
    return table


def _byte_level_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE: printable Latin-1 stands for itself, the other bytes follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
