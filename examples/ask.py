"""Asks a server of `checkpoints/tiny` about a long document, a picture and a clip.

`msaserve serve checkpoints/tiny`, then `python examples/ask.py`. Needs openai.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from openai import OpenAI

from msaserve.eval import picture, video
from msaserve.eval.media import data_url

DOCUMENT = Path(__file__).parents[1] / "docs" / "wire.md"


def main(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id

    def ask(*parts: dict[str, Any] | str) -> None:
        content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
        messages: Any = [{"role": "user", "content": content}]
        answer = client.chat.completions.create(model=model, messages=messages, temperature=0)
        assert answer.usage is not None
        print(f"{parts[-1]}  ({answer.usage.prompt_tokens:,} tokens)\n    {answer.choices[0].message.content}")

    lines = DOCUMENT.read_text(encoding="utf-8").splitlines(keepends=True)
    lines.insert(len(lines) // 3, "The code of Winston is 48213.\n")
    ask("".join(lines) + "\n", "What is the code of Winston?")

    shown = picture.scene(random.Random(7)).picture
    ask({"type": "image_url", "image_url": {"url": data_url(shown)}}, "What is the largest object?")

    (clip,) = video.generate(random.Random(7)).media()
    ask({"type": "video_url", "video_url": {"url": data_url(clip)}}, "Which colour came first?")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    main(parser.parse_args().url)
