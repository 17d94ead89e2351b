"""What a newcomer sees first: a few prompts answered with and without n-gram drafts, on a small model, in minutes."""

from __future__ import annotations

from collections.abc import Callable

import jax

from specjax import bench
from specjax.api import load_drafter, stream
from specjax.models.load import LM
from specjax.prompts import PromptRow

DATES = """The bridge was opened on 12 May 1932, closed for repairs on 3 June 1967 and opened again on 21 September 1969. \
It was painted on 30 April 1988 and became a monument on 15 August 2004."""
TYPOS = """The cat sat on the window and lookd at the birds in the garden. It wanted to go outsid, but the door was closd. \
After a while the cat fell asleep in the warm sun, and the birds ate all the seeds in the garden."""
STORY = """The old lighthouse on the northern cliff was built in 1851 to guide fishing boats into the harbour. For a hundred \
years a keeper climbed its two hundred steps every evening to light the lamp. In 1951 the lamp became electric and the keeper \
left. Today the lighthouse is a small museum about fishing boats and the harbour."""

PROMPTS = (
    PromptRow("sky", "chat", ("Why is the sky blue?",)),
    PromptRow("sleep", "chat", ("Give three tips for sleeping well.",)),
    PromptRow("fox", "chat", ("Tell me a very short story about a fox.",)),
    PromptRow("extract", "copy", (f"Extract every date from this text, one per line: {DATES}",)),
    PromptRow("correct", "copy", (f"Correct the spelling of this text and repeat it: {TYPOS}",)),
    PromptRow("summarise", "copy", (f"Summarise this text: {STORY}",)),
)
"""Answers to "copy" repeat much of their prompt, which is what n-gram drafts live on.  All fit one shape, compiled once."""


def demo(
    lm: LM, *, num_draft: int = 4, max_new_tokens: int = 64, write: Callable[[str], object], progress: bench.Progress
) -> list[bench.Result]:
    """Stream the answers to PROMPTS through `write`, then measure plain decoding and n-gram drafts on them, greedily.

    Results are plain's and ngram's; their samples have one entry a prompt.  Raises what `generate` raises.
    """
    drafter = load_drafter("ngram", lm, num_draft=num_draft)
    key = jax.random.key(0)  # greedy: no coin is thrown
    chats = [chat(row.turns[0]) for row in PROMPTS]
    for row, prompt in zip(PROMPTS, chats, strict=True):
        write(f"\n> {row.turns[0]}\n\n")
        for piece in stream(lm, drafter, prompt, key=key, max_new_tokens=max_new_tokens):
            write(piece.text)
        write("\n")
    contender = bench.Contender("ngram", drafter, "rejection")
    return bench.compare(lm, [contender], bench.Work(chats, key, max_new_tokens), progress=progress)


def chat(text: str) -> list[dict[str, str]]:
    """A conversation of one user message."""
    return [{"role": "user", "content": text}]
