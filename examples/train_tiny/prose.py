"""English prose that every Python has: the language reference, as `help()` shows it."""

from __future__ import annotations

import pydoc_data.topics


def paragraphs() -> list[str]:
    """Paragraphs of prose, each with a line break at its end; tables, grammar and program text left out."""
    found = []
    for _, text in sorted(pydoc_data.topics.topics.items()):
        for paragraph in str(text).split("\n\n"):
            plain = " ".join(paragraph.split())
            if len(plain) > 120 and not paragraph.startswith((" ", "+", "|")) and "::=" not in plain:
                found.append(plain + "\n")
    return found
