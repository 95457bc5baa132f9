"""Goldens: what the reference implementation answers to fixed prompts, greedily and in float32. `scripts/make_goldens.py` makes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple


class Golden(NamedTuple):
    """`text` is the whole prompt of a text prompt, `messages` a chat; exactly one of the two is set.

    `output_ids` ends with the end-of-sequence token where the answer ends before 24 tokens. `first_top5` holds (token, log
    probability) of the five best first tokens, best first; the best one is `output_ids[0]`.
    """

    name: str
    messages: list[dict[str, str]] | None
    text: str | None
    prompt_ids: list[int]
    output_ids: list[int]
    first_top5: list[tuple[int, float]]


def load_goldens() -> list[Golden]:
    """Every golden of the embedded model, in the order of the file."""
    data = json.loads((Path(__file__).parent / "smollm2.json").read_text(encoding="utf-8"))

    def text_of(entry: dict) -> str | None:
        if "lines" not in entry:
            return entry.get("text")
        first, last = entry["lines"]
        numbers, colours = range(first, last + 1), data["colours"]
        return "".join(data["line"].format(i=i, product=7 * i, colour=colours[i % len(colours)]) for i in numbers) + entry["tail"]

    return [
        Golden(
            name=entry["name"],
            messages=entry.get("messages"),
            text=text_of(entry),
            prompt_ids=entry["prompt_ids"],
            output_ids=entry["output_ids"],
            first_top5=[(token, logprob) for token, logprob in entry["first_top5"]],
        )
        for entry in data["prompts"]
    ]
