"""Real text for the text models: sentences from the data set descriptions that scikit-learn bundles (BSD-3-Clause)."""

from __future__ import annotations

import functools
import re
from importlib import resources

import msgspec

QUESTIONS = (
    "Who wrote Hamlet?",
    "What do bees make?",
    "Name three primary colours.",
    "What is the opposite of hot?",
    "How many days are in a week?",
    "What is the chemical symbol of water?",
    "Write one short sentence about the sea.",
    "What does a thermometer measure?",
)


class Sentence(msgspec.Struct, frozen=True):
    document: str
    """Which description it comes from."""
    text: str


@functools.cache
def sentences() -> tuple[Sentence, ...]:
    """Plain sentences of 40 to 300 characters, in the order of the documents."""
    found: list[Sentence] = []
    folder = resources.files("sklearn.datasets.descr")
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if not file.name.endswith(".rst"):
            continue
        for paragraph in re.split(r"\n\s*\n", file.read_text(encoding="utf-8")):
            plain = " ".join(paragraph.split())
            if re.search(r"[|`=*_>\[\]{}]|::|\.\. ", plain):
                continue
            found += [
                Sentence(file.name.removesuffix(".rst"), text)
                for text in re.split(r"(?<=[.?!])\s+(?=[A-Z])", plain)
                if 40 <= len(text) <= 300 and text[0].isupper() and text[-1] in ".?!"
            ]
    return tuple(found)


def chats(count: int) -> list[list[dict[str, str]]]:
    """`count` one-message conversations: general questions, then tasks about the sentences."""
    asked = list(QUESTIONS)
    asked += [f"Summarise in a few words: {sentence.text}" for sentence in sentences()]
    return [[{"role": "user", "content": text}] for text in asked[:count]]
