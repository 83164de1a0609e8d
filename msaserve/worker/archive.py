"""The small files of a checkpoint as one ZIP: what a gateway needs to tokenise, render and prepare for it."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

_NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def pack(directory: Path) -> bytes:
    """The ZIP of those files that are there. Equal files give equal bytes."""
    paths = [directory / name for name in _NAMES] + sorted(directory.glob("*.jinja"))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in paths:
            if path.is_file():
                entry = zipfile.ZipInfo(path.name)  # dated 1980
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, path.read_bytes())
    return buffer.getvalue()
