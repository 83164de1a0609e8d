"""A checkpoint's JSON files, and fields of them of a type. Each raises CheckpointError, naming the file or field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msaserve.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or {} where there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


def integer(fields: Mapping[str, Any], key: str, default: int | None = None, *, minimum: int = 1) -> int:
    value = fields.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise CheckpointError(f"config: {key} must be a whole number of at least {minimum}, not {value!r}")
    return value


def number(fields: Mapping[str, Any], key: str, default: float) -> float:
    value = fields.get(key)
    if value is None:
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < 1e300:
        raise CheckpointError(f"config: {key} must be a number, not {value!r}")
    return float(value)


def section(fields: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = fields.get(key)
    if not isinstance(value, dict):
        raise CheckpointError(f"config: {key} must be an object, not {value!r}")
    return value


def optional_section(fields: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """{} where there is none."""
    return section(fields, key) if fields.get(key) else {}
