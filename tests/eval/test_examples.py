"""Examples: seeded, right by their own scorers, and what they claim to be."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable

import numpy as np
import pytest

from msaserve.eval import mixed, needle, picture, tool, video
from msaserve.eval.conversation import assistant, messages, parse
from msaserve.eval.example import Call, Clip, Example, Picture, Reply
from msaserve.eval.filler import paragraphs
from msaserve.eval.media import encode, prepare
from msaserve.gateway.chat import ChatTemplate
from msaserve.gateway.media.limits import MediaLimits
from msaserve.gateway.media.prepare import prepare as prepare_file
from msaserve.gateway.media.spec import Hints
from msaserve.gateway.media.specs.minimax_m3 import MiniMaxM3Spec
from msaserve.tokenizer import Tokenizer

Generate = Callable[[random.Random], Example]


def count(text: str) -> int:
    """Words and line breaks."""
    return len(re.findall(r"[^\s]+|\n", text))


GENERATORS: dict[str, Generate] = {
    "needle": lambda rng: needle.generate(rng, context=300, count=count, num_questions=2),
    "picture": lambda rng: picture.generate(rng, num_questions=2),
    "video": lambda rng: video.generate(rng, num_questions=2),
    "tool": tool.generate,
    "mixed": lambda rng: mixed.generate(rng, context=200, count=count, num_questions=3),
}


def shown(example: Example) -> str:
    """All that an example is, for comparison."""
    media = [m.pixels if isinstance(m, Picture) else m.frames for m in example.media()]
    texts = [(tuple(p for p in t.parts if isinstance(p, str)), t.reply) for t in example.turns]
    return f"{[m.tobytes() for m in media]} {texts} {example.tools} {example.thinking}"


@pytest.mark.parametrize("skill", GENERATORS)
def test_seeded(skill: str) -> None:
    generate = GENERATORS[skill]
    assert shown(generate(random.Random(5))) == shown(generate(random.Random(5)))
    assert shown(generate(random.Random(5))) != shown(generate(random.Random(6)))


@pytest.mark.parametrize("skill", GENERATORS)
def test_right_replies_score_and_others_do_not(skill: str) -> None:
    rng = random.Random(1)
    examples = [GENERATORS[skill](rng) for _ in range(12)]
    turns = [turn for example in examples for turn in example.turns]
    assert all(turn.scorer(turn.reply) for turn in turns)
    assert not any(turn.scorer(Reply()) for turn in turns)
    for turn in turns:
        for other in turns:
            assert turn.scorer(other.reply) == (turn.scorer == other.scorer)


def test_scorers_are_strict() -> None:
    assert needle.SaysCode("01234")(Reply("It is 01234."))
    for content in ("1234", "01234 or 99999", "012345", "code 01234 of 5"):
        assert not needle.SaysCode("01234")(Reply(content))
    assert picture.NamesObject("red", "circle")(Reply("A red circle!"))
    for content in ("red", "a red circle, a blue square", "a red or blue circle", "a reddish circle"):
        assert not picture.NamesObject("red", "circle")(Reply(content))
    assert video.NamesColour("blue")(Reply("Blue."))
    assert not video.NamesColour("blue")(Reply("First blue, then red"))
    assert video.GivesSecond(5)(Reply("at 5.5 seconds"))
    for content in ("at 5.6", "at 4", "5 or 6", "later"):
        assert not video.GivesSecond(5)(Reply(content))
    call = Call("f", {"x": 1})
    assert tool.Calls(call, thinks=True)(Reply(reasoning="so", calls=(call,)))
    for reply in (
        Reply(calls=(call,)),
        Reply("here", "so", (call,)),
        Reply(reasoning="so", calls=(call, call)),
        Reply(reasoning="so", calls=(Call("f", {"x": "1"}),)),
        Reply(reasoning="so", calls=(Call("g", {"x": 1}),)),
    ):
        assert not tool.Calls(call, thinks=True)(reply)


def test_filler_is_long_and_varied_and_says_no_code() -> None:
    sentences = paragraphs(random.Random(0), 20_000, count)
    assert 20_000 <= count("".join(sentences)) < 20_050
    assert len(set(sentences)) > 0.98 * len(sentences)
    assert not re.search(r"code", "".join(sentences))
    assert sum(s.endswith("\n") for s in sentences) > 300


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_needle_stands_at_its_depth(depth: float) -> None:
    example = needle.generate(random.Random(2), context=3000, count=count, num_facts=10, depth=depth)
    text, question = (str(p) for p in example.turns[0].parts)
    assert example.turns[0].reply.content in text
    assert len(re.findall(r"The code of \w+ is \d{5}\.", text)) == 10
    assert question.split()[-1].rstrip("?") in example.turns[0].reply.content
    place = text.index(example.turns[0].reply.content) / len(text)
    assert place == pytest.approx(depth, abs=0.02)
    assert count(text) == pytest.approx(3000, abs=40)


def test_questions_of_a_needle_text_differ() -> None:
    example = needle.generate(random.Random(2), context=500, count=count, num_facts=9, num_questions=9)
    assert len({turn.reply.content for turn in example.turns}) == 9


def test_scenes_are_as_described() -> None:
    rng = random.Random(4)
    shapes, aspects, lefts = set(), [], 0
    for _ in range(150):
        scene = picture.scene(rng)
        _, height, width = scene.picture.pixels.shape
        aspects.append(max(height, width) / min(height, width))
        first, second = sorted((o.side for o in scene.objects), reverse=True)[:2]
        assert first >= picture.MIN_RATIO * second * (1 - 1e-6)
        assert len({o.colour for o in scene.objects}) == len(scene.objects) in (2, 3)
        for item in scene.objects:
            assert item.half <= item.x <= width - item.half
            assert item.half <= item.y <= height - item.half
            middle = scene.picture.pixels[:, int(item.y), int(item.x)].astype(int)
            assert np.abs(middle - picture.RGB[item.colour]).max() <= 12
            shapes.add((item.colour, item.shape))
        if scene.left is not None:
            lefts += 1
            assert scene.left.x == min(o.x for o in scene.objects)
    assert len(shapes) == 32
    assert max(aspects) > 10
    assert lefts > 40


@pytest.mark.parametrize("shape", picture.SHAPES)
def test_shapes_have_the_area_of_their_side(shape: str) -> None:
    canvas = np.zeros((3, 120, 120), np.uint8)
    picture.draw(canvas, picture.Drawn("red", shape, 50.0, 60.0, 60.0), (200, 0, 0))
    assert canvas[0].sum() / 200 == pytest.approx(2500, rel=0.02)


def test_clip_changes_at_its_second() -> None:
    rng = random.Random(0)
    for _ in range(5):
        example = video.generate(rng, num_questions=2)
        (clip,) = example.media()
        assert isinstance(clip, Clip)
        second = next(int(s.second) for t in example.turns if isinstance(s := t.scorer, video.GivesSecond))
        # The share of pixels of one colour jumps once, between two frames.
        colours = [frame.reshape(3, -1).astype(int) for frame in clip.frames]
        strongest = [tuple(c[:, np.abs(c - c[:, :1]).sum(0).argmax()]) for c in colours]
        changes = [i for i in range(1, len(strongest)) if np.abs(np.subtract(strongest[i], strongest[i - 1])).max() > 9]
        assert changes == [second * clip.fps]


def test_calls_and_thoughts_survive_the_template(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    rng = random.Random(3)
    for _ in range(30):
        example = tool.generate(rng)
        reply = example.turns[0].reply
        kwargs = {"tools": list(example.tools), "thinking_mode": example.thinking}
        asked = template.render(messages(example), kwargs=kwargs)
        whole = template.render([*messages(example), assistant(reply)], add_generation_prompt=False, kwargs=kwargs)
        assert whole.startswith(asked)
        said = whole.removeprefix(asked).removesuffix("[e~[\n")
        assert ("<mm:think>" in said) == (example.thinking == "adaptive")
        assert parse(said, tools=example.tool_schemas, thinking=example.thinking) == reply
        assert tokenizer.decode(tokenizer.encode(said), skip_special_tokens=False) == said


def test_half_a_call_is_no_call() -> None:
    schema = {"f": {"type": "object", "properties": {"x": {"type": "string"}}}}
    text = ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">]<]minimax[>[<x>a'
    reply = parse(text, tools=schema, thinking="disabled")
    assert Call("f", {"x": "a"}) not in reply.calls


def test_prepared_as_the_gateway_prepares_the_file() -> None:
    spec, rng = MiniMaxM3Spec(), random.Random(6)
    for _ in range(4):
        shown = picture.scene(rng, max_side=400).picture
        file = prepare_file("image", encode(shown), Hints(), spec, MediaLimits())
        own = prepare(shown, spec)
        assert own.grid_thw == file.grid_thw
        assert own.content_hash == file.content_hash
        assert np.array_equal(own.patches, file.patches)


def test_clip_files_keep_times_and_colours() -> None:
    spec = MiniMaxM3Spec()
    (clip,) = video.generate(random.Random(8)).media()
    file, own = prepare_file("video", encode(clip), Hints(), spec, MediaLimits()), prepare(clip, spec)
    assert own.grid_thw == file.grid_thw
    assert own.frame_times == pytest.approx(file.frame_times)
    difference = np.abs(own.patches.astype(int) - file.patches)
    assert difference.mean() < 4


def test_examples_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        tool.generate(random.Random(0)).skill = "needle"  # type: ignore[misc]


@pytest.mark.parametrize("seed", [481_216, 590_592])
def test_pictures_without_room_for_two_objects_are_passed_over(seed: int) -> None:
    """These seeds' first size is a strip of 28 by 153 pixels, in which two triangles have no room."""
    rng = random.Random(seed)
    height, width = picture._size(rng, 1000)
    assert sorted((height, width)) == [28, 153]
    shown = picture.scene(random.Random(seed))
    assert len(shown.objects) >= 2
    assert picture._place(random.Random(0), 28, 153, 2, 30.0) is None
