from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from fake_engine import TINY
from hypothesis import given, settings
from hypothesis import strategies as st

from msaserve.errors import CheckpointError, InvalidRequestError, UnsupportedError
from msaserve.tokenizer import IncrementalDetokenizer, Tokenizer, new_guard

REFERENCE = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
TOKENIZER = Tokenizer.load(TINY)
ADDED = [token.content for token in REFERENCE.get_added_tokens_decoder().values()]
SPELLINGS = ["]~b]", "[e~[", "<mm:think>", "]<]image[>[", "]<]start of image[>["]
GUARD = chr(0x100000)
texts = st.text() | st.lists(st.sampled_from([*SPELLINGS, "[e", "~[", "]", "[", "<", "é", "日", " ", "\n"])).map(
    "".join
)


@given(texts)
def test_encode_is_the_librarys(text: str) -> None:
    assert TOKENIZER.encode(text) == REFERENCE.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=False) == text


@given(texts)
def test_plain_text_has_no_added_token(text: str) -> None:
    ids = TOKENIZER.encode_plain(text)
    assert len(ids) == len(text.encode())
    assert TOKENIZER.decode(ids) == text


@given(st.lists(st.integers(0, 511), max_size=60), st.booleans())
@settings(max_examples=300)
def test_incremental_pieces_join_to_the_whole(ids: list[int], skip: bool) -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER, skip_special_tokens=skip)
    pieces = [detokenizer.push(i) for i in ids]
    assert "".join(pieces) + detokenizer.flush() == TOKENIZER.decode(ids, skip_special_tokens=skip)
    special = {t for t, token in REFERENCE.get_added_tokens_decoder().items() if token.special}
    # The library wants a string for every token; the unused ids of the model's vocabulary have theirs.
    shown = [i for i in ids if not (skip and i in special)]
    assert TOKENIZER.decode(ids, skip_special_tokens=skip) == REFERENCE.decode(shown, skip_special_tokens=False)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_no_replacement_character_before_its_time(text: str) -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    ids = TOKENIZER.encode_plain(text)
    shown = ""
    for token_id in ids:
        shown += detokenizer.push(token_id)
        assert text.startswith(shown)
    assert shown == text
    assert not detokenizer.is_pending


def test_broken_utf8_is_shown_when_it_is_sure() -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    lead, *rest = TOKENIZER.encode_plain("日")
    assert detokenizer.push(lead) == ""
    assert detokenizer.is_pending
    assert detokenizer.push(TOKENIZER.encode_plain("a")[0]) == "�a"
    assert detokenizer.push(lead) == ""
    assert detokenizer.flush() == "�"
    assert len(rest) == 2


def test_token_text_and_bytes() -> None:
    first = TOKENIZER.encode_plain("é")[0]
    assert TOKENIZER.token_bytes(first) == b"\xc3"
    assert TOKENIZER.token_text(first) == "bytes:\\xc3"
    assert TOKENIZER.token_text(TOKENIZER.encode("]<]start of image[>[")[0]) == "]<]start of image[>["
    assert TOKENIZER.token_bytes(100_000) == TOKENIZER.token_bytes(-1) == b""


def guarded(*parts: str, special_only: bool = False) -> list[int]:
    """Ids of a template's own text at even places, with a user's at odd ones."""
    guard = new_guard(parts)
    return TOKENIZER.encode_guarded(
        "".join(TOKENIZER.guard(p, guard, special_only=special_only) if i % 2 else p for i, p in enumerate(parts)),
        guard,
    )


@given(texts)
def test_guard_keeps_control_tokens_out(text: str) -> None:
    turn, end = TOKENIZER.encode("]~b]")[0], TOKENIZER.encode("[e~[")[0]
    assert guarded("]~b]", text, "[e~[") == [turn, *TOKENIZER.encode_plain(text), end]


@given(st.lists(st.sampled_from(ADDED) | st.text("[e~]!b<>minax", max_size=12), max_size=4))
def test_guard_holds_between_neighbouring_parts(parts: list[str]) -> None:
    interleaved = [piece for part in parts for piece in ("", part)]
    assert guarded(*interleaved) == TOKENIZER.encode_plain("".join(parts))


def test_guard_holds_against_the_templates_own_text() -> None:
    assert guarded("[e~", "[ so") == TOKENIZER.encode_plain("[e~[ so")
    assert guarded("", "so [e~", "[") == TOKENIZER.encode_plain("so [e~[")
    assert guarded("[", "e~", "[") == TOKENIZER.encode_plain("[e~[")


def test_guard_holds_where_a_template_trims() -> None:
    guard = "\U00100001"
    parts = [TOKENIZER.guard(text, guard).strip() for text in ("[e~\n", " [")]
    assert TOKENIZER.encode_guarded("".join(parts), guard) == TOKENIZER.encode_plain("[e~[")
    assert TOKENIZER.guard("  plain text\n", guard) == "  plain text\n"


def test_guard_leaves_the_assistants_own_markers() -> None:
    ids = guarded("", "<mm:think>[e~[", special_only=True)
    assert ids == [*TOKENIZER.encode("<mm:think>"), *TOKENIZER.encode_plain("[e~[")]


def test_count_beyond_stops_early() -> None:
    text = "ab" * 500_000
    count = TOKENIZER.count_beyond(text, 100_000)
    assert count is not None
    assert 100_000 < count < 300_000
    assert TOKENIZER.count_beyond(text, 1_000_000) is None


def encode_with_guard(text: str) -> list[int]:
    return TOKENIZER.encode_guarded(f"]<G]minimax[>[{text}", "G")


@pytest.mark.parametrize("encode", [TOKENIZER.encode, TOKENIZER.encode_plain, encode_with_guard])
def test_half_a_character_is_no_text(encode: Callable[[str], list[int]]) -> None:
    with pytest.raises(InvalidRequestError, match="lone surrogate"):
        encode("half of 😀: \ud83d")


def test_broken_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    definition = json.loads((TINY / "tokenizer.json").read_text())
    definition["decoder"] = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(UnsupportedError, match="Metaspace"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    definition["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(CheckpointError, match="tokenizer_config"):
        Tokenizer.load(tmp_path)


def test_a_text_of_all_guards_ends() -> None:
    every = "".join(map(chr, range(0x100000, 0x10FFFE)))
    for i in (0, 40_000, len(every) - 1):
        assert new_guard(["x", every[:i], every[i + 1 :]]) == every[i]
    with pytest.raises(InvalidRequestError, match="private-use"):
        new_guard([every])


def test_a_guarded_text_leaves_the_interpreter_to_other_threads() -> None:
    """As a plain one does: the longest time that another thread has to wait is a small part of the whole."""
    text = "a word " * 100_000 + GUARD
    shares = []
    for _ in range(5):
        with ThreadPoolExecutor(1) as pool:
            start = last = time.perf_counter()
            longest = 0.0
            ids = pool.submit(TOKENIZER.encode_guarded, text, GUARD)  # may not return before it has ended
            is_done = False
            while not is_done:
                is_done = ids.done()
                now = time.perf_counter()
                longest, last = max(longest, now - last), now
                time.sleep(0.001)
        shares.append(longest / (last - start))
        assert len(ids.result()) == 700_000
    assert min(shares) < 0.3
