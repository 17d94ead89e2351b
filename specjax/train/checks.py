"""What a run is refused for before anything is begun: numbers, targets and data of which no drafter would come."""

from __future__ import annotations

import numpy as np

from specjax.models.load import LM
from specjax.train import recipes, settings
from specjax.train.digests import vocabulary
from specjax.train.work import Split, Work


def check(work: Work) -> None:
    """ValueError for numbers that make no run, before anything is loaded."""
    recipes.check_dtype(work.recipe, work.dtype)
    settings.check(work.settings)
    least = {"num_draft": (work.num_draft, 1), "length": (work.length, work.num_draft + 2)}  # a label for each step
    least |= {name: (getattr(work, name), 1) for name in ("batch", "prompts", "new_tokens")}
    least |= {"draft_vocabulary": (1 if work.draft_vocabulary is None else work.draft_vocabulary, 1)}
    for name, (value, lowest) in least.items():
        if value < lowest:
            raise ValueError(f"{name} {value} < {lowest}: ask for at least {lowest}")


def check_target(lm: LM, work: Work) -> None:
    """ValueError for work that is none for this target: longer than its context, or of weights that could not be written."""
    context = lm.model.max_length
    if work.length > context:
        raise ValueError(f"length {work.length} > {context}, the target's context: ask for shorter rows")
    if work.new_tokens >= context:
        raise ValueError(f"new_tokens {work.new_tokens} leave no room for a prompt in a context of {context}: ask for fewer")
    recipes.check_saving(work.recipe, lm, work.options, work.dtype)


def check_labels(work: Work, data: Split) -> None:
    """ValueError where a part of the data has no label: a model has none for the first token of a document, a head
    none for the second either.
    """
    ahead = 2 if recipes.find(work.recipe).save is recipes.save_heads else 1
    for name, part in zip(data._fields, data, strict=True):
        begin, end = int(part.starts[0]), int(part.starts[-1])
        place = np.arange(begin, end) - np.repeat(part.starts[:-1], np.diff(part.starts))
        if not ((place >= ahead) if part.mask is None else (place >= ahead) & part.mask[begin:end]).any():
            what = f"{name}: none of {end - begin} tokens is one for {work.recipe} to predict"
            raise ValueError(f"{what}: look at the mask, or use longer documents")


def check_vocabulary(lm: LM, data: Split) -> None:
    """ValueError where ids are none of the target's, or the corpus says that they are another tokenizer's."""
    said = {part.provenance["vocabulary"] for part in data if "vocabulary" in part.provenance}
    if said - {vocabulary(lm.tokenizer)}:
        raise ValueError("the corpus was made with a tokenizer whose ids are not the target's: make one for this target")
    largest = max(int(part.tokens[part.starts[0] : part.starts[-1]].max()) for part in data)
    if largest >= lm.model.vocab_size:
        raise ValueError(
            f"the corpus holds token {largest}, the target has {lm.model.vocab_size}: it was made with another tokenizer"
        )
