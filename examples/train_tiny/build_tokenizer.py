"""`python -m examples.train_tiny.build_tokenizer` writes tokenizer.json beside this file. Needed again only when the
examples' words change."""

from __future__ import annotations

from pathlib import Path

from examples.train_tiny.tokenizer import build
from msaserve.gateway.chat import ChatTemplate

HERE = Path(__file__).parent

if __name__ == "__main__":
    template = ChatTemplate((HERE / "chat_template.jinja").read_text(encoding="utf-8"))
    build(template).save(str(HERE / "tokenizer.json"))
