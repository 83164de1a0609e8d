"""Structural tags as grammars: free text with parts of a given form, in vLLM's older words or as xgrammar's formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from msaserve.errors import InvalidRequestError
from msaserve.lark import Literals, json_value, quoted, regex_terminal

_MAX_LEVELS = 64
_TEXT = r"/(.|\n)*/"


def to_lark(value: Any, literal: Literals) -> str:
    """{"triggers", "structures"} or {"format"}. Raises InvalidRequestError, which names the place."""
    if isinstance(value, dict) and "format" in value:
        return _Writer(literal).grammar(value["format"])
    if not isinstance(value, dict) or not isinstance(value.get("structures"), list):
        raise InvalidRequestError(
            'it must be {"triggers": [text], "structures": [{"begin", "schema", "end"}]} or {"format": …}'
        )
    tags = []
    for i, structure in enumerate(value["structures"]):
        if not isinstance(structure, dict):
            raise InvalidRequestError(f"structures[{i}] must have a begin and an end")
        content = {"type": "json_schema", "json_schema": structure.get("schema", True)}
        tags.append({**structure, "type": "tag", "content": content})
    form = {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}
    return _Writer(literal, tags="structures").grammar(form)


class _Writer:
    """`where` names a place in the format, `ends` are the texts of which one stands behind it.

    Free text takes all that it can, and would take the beginning of its end too: so the two are one terminal, which
    stops at the first end.
    """

    def __init__(self, literal: Literals, *, tags: str = "tags") -> None:
        self._literal = literal
        self._tags_name = tags
        self._rules: list[str] = []
        self._forms: dict[str, Callable[[dict[str, Any], str, int], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "optional": lambda *form: f"({self._content(*form)})?",
            "plus": lambda *form: f"({self._content(*form)})+",
            "star": lambda *form: f"({self._content(*form)})*",
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def grammar(self, form: Any) -> str:
        start = self._form(form, "format" if self._tags_name == "tags" else "", 0)
        return "\n".join([f"start: {start}", *self._rules])

    def _form(self, form: Any, where: str, level: int) -> str:
        kind = form.get("type") if isinstance(form, dict) else None
        write = self._forms.get(kind) if isinstance(kind, str) else None
        if write is None:
            raise InvalidRequestError(f"{where}.type must be one of {', '.join(self._forms)}, not {str(kind)[:40]!r}")
        if level > _MAX_LEVELS:
            raise InvalidRequestError(f"{where} is nested too deep")
        return self._rule(write(form, where, level + 1))

    def _closed(self, form: Any, where: str, level: int, ends: Sequence[str]) -> str:
        """A form and one of its ends."""
        kind = form.get("type") if isinstance(form, dict) else None
        if kind == "any_text":
            return self._text_up_to(_excludes(form, where), ends)
        if kind == "sequence":
            *first, last = _list(form, "elements", where)
            begun = [self._limited(element, f"{where}.elements[{i}]", level + 1) for i, element in enumerate(first)]
            return self._rule(
                " ".join([*begun, self._closed(last, f"{where}.elements[{len(first)}]", level + 1, ends)])
            )
        if kind == "or":
            elements = enumerate(_list(form, "elements", where))
            return self._rule(
                " | ".join(self._closed(one, f"{where}.elements[{i}]", level + 1, ends) for i, one in elements)
            )
        if kind == "triggered_tags":
            return self._rule(self._triggered_tags(form, where, level + 1, ends))
        return f"{self._form(form, where, level)} ({' | '.join(map(self._literal, ends))})"

    def _limited(self, form: Any, where: str, level: int) -> str:
        """A form behind which more stands."""
        if isinstance(form, dict) and form.get("type") in ("any_text", "triggered_tags"):
            raise InvalidRequestError(
                f"{where}: {form['type']} must be the last, or in a tag, which says where it ends"
            )
        return self._form(form, where, level)

    def _const_string(self, form: dict[str, Any], where: str, level: int) -> str:
        return self._literal(_text(form, "value", where))

    def _json_schema(self, form: dict[str, Any], where: str, level: int) -> str:
        schema = form.get("json_schema")
        if not isinstance(schema, (dict, bool)):
            raise InvalidRequestError(f"{where}.json_schema: a JSON schema is an object")
        if form.get("style", "json") != "json":
            raise InvalidRequestError(f"{where}.style: only json is supported")
        return json_value(schema)

    def _regex(self, form: dict[str, Any], where: str, level: int) -> str:
        return self._terminal(regex_terminal(_text(form, "pattern", where)), _excludes(form, where))

    def _grammar(self, form: dict[str, Any], where: str, level: int) -> str:
        text = _text(form, "grammar", where)
        try:
            lark = any_to_lark("\n".join(line for line in text.split("\n") if line.strip()))
        except Exception as error:  # the converter of EBNF raises its own, and others
            raise InvalidRequestError(f"{where}.grammar: {error}") from None
        return f"%lark {{\n{lark}\n}}"

    def _any_text(self, form: dict[str, Any], where: str, level: int) -> str:
        return self._terminal(_TEXT, _excludes(form, where))

    def _sequence(self, form: dict[str, Any], where: str, level: int) -> str:
        *first, last = _list(form, "elements", where)
        begun = [self._limited(element, f"{where}.elements[{i}]", level) for i, element in enumerate(first)]
        return " ".join([*begun, self._form(last, f"{where}.elements[{len(first)}]", level)])

    def _or(self, form: dict[str, Any], where: str, level: int) -> str:
        elements = enumerate(_list(form, "elements", where))
        return " | ".join(self._form(element, f"{where}.elements[{i}]", level) for i, element in elements)

    def _content(self, form: dict[str, Any], where: str, level: int) -> str:
        return self._limited(form.get("content"), f"{where}.content", level)

    def _tag(self, form: dict[str, Any], where: str, level: int) -> str:
        return f"{self._literal(_text(form, 'begin', where))} {self._behind_begin(form, where, level)}"

    def _behind_begin(self, tag: dict[str, Any], where: str, level: int) -> str:
        end = tag.get("end")
        ends = [one for one in (end if isinstance(end, list) else [end]) if isinstance(one, str)]
        if not ends or len(ends) != (len(end) if isinstance(end, list) else 1):
            raise InvalidRequestError(f"{where} must have a begin and an end")
        return self._closed(tag.get("content"), f"{where}.content", level, ends)

    def _triggered_tags(self, form: dict[str, Any], where: str, level: int, ends: Sequence[str] = ("",)) -> str:
        triggers = form.get("triggers")
        if not isinstance(triggers, list) or not all(isinstance(t, str) and t for t in triggers) or not triggers:
            raise InvalidRequestError("triggers must be a list of texts")
        excluded = _excludes(form, where)
        text = self._terminal(_TEXT, [*excluded, *(one for one in ends if one)])
        rest = self._text_up_to([*excluded, *triggers], ends)
        tags = []
        for tag, place in self._tags(form, where):
            begin = _text(tag, "begin", place)
            trigger = max((t for t in triggers if begin.startswith(t)), key=len, default=None)
            if trigger is None:
                raise InvalidRequestError(f"{place}.begin starts with none of the triggers")
            behind = self._behind_begin(tag, place, level)
            if self._is_token(trigger):
                tags.append(self._rule(f"{text} {self._literal(begin)} {behind}"))
            else:
                found = self._lazy(text, [trigger])
                tags.append(self._rule(f"{found} {self._literal(begin[len(trigger) :])} {behind}"))
        one = f"({' | '.join(tags)})"
        if form.get("stop_after_first"):
            one = f"{one} ({' | '.join(map(self._literal, ends))})"
            return one if form.get("at_least_one") else f"{one} | {rest}"
        return f"{one}{'+' if form.get('at_least_one') else '*'} {rest}"

    def _tags_with_separator(self, form: dict[str, Any], where: str, level: int) -> str:
        one = f"({' | '.join(self._form(tag, place, level) for tag, place in self._tags(form, where))})"
        more = "" if form.get("stop_after_first") else f"({self._literal(_text(form, 'separator', where))} {one})*"
        return f"{one} {more}" if form.get("at_least_one") else f"({one} {more})?"

    def _tags(self, form: dict[str, Any], where: str) -> list[tuple[dict[str, Any], str]]:
        prefix = f"{where}." if where else ""
        tags = _list(form, "tags", where, name=self._tags_name)
        for i, tag in enumerate(tags):
            if not isinstance(tag, dict) or tag.get("type", "tag") != "tag":
                raise InvalidRequestError(f"{prefix}{self._tags_name}[{i}] must be a tag")
        return [({"type": "tag", **tag}, f"{prefix}{self._tags_name}[{i}]") for i, tag in enumerate(tags)]

    def _text_up_to(self, excluded: Sequence[str], ends: Sequence[str]) -> str:
        """Free text and one of its ends; an empty end is none."""
        text = self._terminal(_TEXT, [*excluded, *(one for one in ends if one and self._is_token(one))])
        forms = [text] if "" in ends else []
        forms += [f"{text} {self._literal(one)}" for one in ends if one and self._is_token(one)]
        texts = [one for one in ends if one and not self._is_token(one)]
        if texts:
            forms.append(self._lazy(text, texts))
        return self._rule(" | ".join(forms))

    def _lazy(self, text: str, ends: Sequence[str]) -> str:
        name = f"upto_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: {text} ({' | '.join(map(quoted, ends))})")
        return name

    def _is_token(self, text: str) -> bool:
        """Whether it begins with what spells an added token, which free text never runs over."""
        return self._literal(text).startswith("<[")

    def _rule(self, body: str) -> str:
        self._rules.append(f"part_{len(self._rules)}: {body}")
        return f"part_{len(self._rules) - 1}"

    def _terminal(self, body: str, excluded: Sequence[str]) -> str:
        texts = [one for one in dict.fromkeys(excluded) if not self._is_token(one)]
        self._rules.append(f"TEXT_{len(self._rules)}: {' & '.join([body, *map(_without, texts)])}")
        return f"TEXT_{len(self._rules) - 1}"


def _without(text: str) -> str:
    return f"~({_TEXT} {quoted(text)} {_TEXT})"


def _text(form: dict[str, Any], name: str, where: str) -> str:
    value = form.get(name)
    if not isinstance(value, str):
        if name == "begin":
            raise InvalidRequestError(f"{where} must have a begin and an end")
        raise InvalidRequestError(f"{where}.{name} must be text")
    return value


def _excludes(form: dict[str, Any], where: str) -> list[str]:
    value = form.get("excludes", [])
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise InvalidRequestError(f"{where}.excludes must be a list of texts")
    return value


def _list(form: dict[str, Any], key: str, where: str, *, name: str | None = None) -> list[Any]:
    value = form.get(key)
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(f"{where}{'.' if where else ''}{name or key} must not be empty")
    return value
