"""Answers in the target's own words: prompts -> documents whose answers the target has just sampled, with their mask.

A drafter is accepted for agreeing with its target, so it learns from what the target says, not from what a data set holds.
Every answer has a key of its own (seed, conversation, turn) and depends on nothing else, so a run that was killed goes on
to the same corpus, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, keys, sampling
from specjax.drafters.base import LoadedDrafter
from specjax.drafters.plain import load as plain
from specjax.models.load import LM
from specjax.sampling import SamplingParams
from specjax.train import corpus, digests
from specjax.train.chat import Conversation
from specjax.train.corpus import Document, Item, Skipped
from specjax.types import ERROR, LENGTH, Params
from specjax.verify import RULES


class Answers(NamedTuple):
    """How answers are sampled."""

    temperatures: tuple[float, ...] = (0.0, 0.7)  # conversation i uses number i modulo their count
    new_tokens: int = 256  # the longest answer
    prompt_tokens: int = 512  # longer prompts are skipped
    turns: int = 1  # of a conversation, at most
    batch: int = 16  # conversations decoded together, and lost by a kill
    seed: int = 0


def regenerate(
    directory: str | Path,
    conversations: Sequence[Conversation],
    lm: LM,
    how: Answers,
    *,
    drafter: LoadedDrafter | None = None,
    forbidden: Collection[str] = (),
    provenance: dict[str, Any] | None = None,
    progress: corpus.Progress = lambda done, total: None,
    show: Callable[[Document], None] = lambda document: None,
) -> corpus.Corpus:
    """A corpus of `conversations` with the target's own answers; call it again to go on.

    Args:
      directory: of the corpus.
      conversations: their user turns are kept, their answers are not; of ids with a mask, what stands before the mask.
      lm: the target with its tokenizer.
      how: numbers of sampling.
      drafter: makes it faster and changes nothing in law; None is plain decoding.
      forbidden: user texts that must not be learnt from (evaluation prompts); such conversations are skipped and counted.
      provenance: what to note beside `how`: the model's name, the prompts' source.
      progress: (conversations done, conversations).
      show: gets the first document of this call, to be looked at.

    Raises:
      ValueError: what `corpus.build` refuses: the directory was begun with another target, tokenizer or `how`, with other
        conversations, or with other ones forbidden.
    """
    loaded = plain(lm) if drafter is None else drafter
    answer = answerer(lm, loaded, how)
    barred, shown = {_plain(text) for text in forbidden}, []
    refused = [not ask(begun(item, barred), lm, how)[1] for item in conversations]
    order = np.argsort(refused, kind="stable").tolist()  # those that can be asked first: their batches are full

    def make(places: range) -> list[Item]:
        numbers = [order[i] for i in places]
        found = converse(lm, [conversations[i] for i in numbers], numbers, answer, how, barred)
        kept = [item for item in found if isinstance(item, Document)]
        if kept and not shown:
            shown.append(show(kept[0]))
        return found

    asked = digests.of_json([[item.messages, item.tokens, item.mask] for item in conversations])
    facts = {"answers": how._asdict(), "drafter": loaded.card.method, "conversations": asked}
    facts |= {"forbidden": digests.of_json(sorted(barred)), "vocabulary": digests.vocabulary(lm.tokenizer)}
    facts |= {"target": digests.fingerprint(lm.params, lm.config), **(provenance or {})}
    return corpus.build(directory, len(conversations), make, provenance=facts, shard=how.batch, progress=progress)


def answerer(lm: LM, loaded: LoadedDrafter, how: Answers) -> Callable:
    """(prompts, ids, temperatures) -> (new tokens, status) of each; one compilation, whatever the prompts."""
    static: dict[str, Any] = {"target": lm.model, "drafter": loaded.drafter}
    longest = min((how.prompt_tokens + how.new_tokens) * how.turns, lm.model.max_length)
    capacity = decode.capacity_for(longest, loaded.drafter)
    params, eos = Params(lm.params, loaded.params), jnp.asarray([(*lm.tokenizer.eos_ids, -1)] * how.batch, jnp.int32)
    rule = RULES[loaded.rule]
    decode.check(lm.model, loaded.drafter, rule)

    @jax.jit
    def go(params, tokens, lengths, ends, key, law):
        state = decode.start(params, tokens, lengths, ends, eos, key, law, **static)
        state = decode.prefill(params, state, chunk=64, **static)
        state, _ = decode.run(params, state, jnp.asarray(how.new_tokens), rule=rule, max_rounds=1, **static)
        return state.tokens, state.length, state.status

    def answer(prompts: Sequence[Sequence[int]], ids: Sequence[int], temperatures: Sequence[float]):
        tokens, lengths = np.zeros((how.batch, capacity), np.int32), np.ones(how.batch, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        ends = np.where(np.arange(how.batch) < len(prompts), np.minimum(lengths + how.new_tokens, longest), 1)
        pad = how.batch - len(prompts)  # rows that are over before they begin
        law = [SamplingParams(temperature=t) for t in [*temperatures, *[0.0] * pad]]
        key = keys.request_keys(jax.random.key(how.seed), jnp.asarray([*ids, *[0] * pad], jnp.uint32))
        arrays = (jnp.asarray(x, jnp.int32) for x in (tokens, lengths, ends))
        tokens, length, status = map(np.asarray, go(params, *arrays, key, sampling.stack(law, lm.model.vocab_size)))
        return [(tokens[r, lengths[r] : length[r]].tolist(), int(status[r])) for r in range(len(prompts))]

    return answer


class Talk(NamedTuple):
    """A conversation under way."""

    questions: tuple[tuple[dict, ...], ...]  # what is still to be asked: the messages before each answer
    history: tuple[dict, ...] = ()  # messages so far, with the new answers
    ids: tuple[int, ...] = ()  # a prompt that has no messages
    tokens: tuple[int, ...] = ()
    mask: tuple[bool, ...] = ()
    over: str = ""  # why nothing more is asked
    error: bool = False


def converse(
    lm: LM, items: Sequence[Conversation], numbers: Sequence[int], answer: Callable, how: Answers, barred: set
) -> list[Item]:  # fmt: skip
    """Every conversation with new answers, turn by turn, the turns of all together."""
    talks = [begun(item, barred) for item in items]
    for turn in range(how.turns):
        asked = {}
        for i, talk in enumerate(talks):
            talks[i], prompt = ask(talk, lm, how)
            if prompt:
                asked[i] = prompt
        if asked:
            heat = [how.temperatures[numbers[i] % len(how.temperatures)] for i in asked]
            said = answer(list(asked.values()), [numbers[i] * how.turns + turn for i in asked], heat)
            for (i, prompt), (new, status) in zip(asked.items(), said, strict=True):
                talks[i] = heard(talks[i], prompt, new, status, lm)
    return [Document(t.tokens, t.mask) if t.tokens else Skipped(t.over or "no question", t.error) for t in talks]


def begun(item: Conversation, barred: set[str]) -> Talk:
    """The questions of a conversation; answers given before the first question, or in place of ours, are left out."""
    if item.tokens:
        first = item.mask.index(True) if True in item.mask else len(item.mask)
        return Talk((), ids=item.tokens[:first])
    questions, current = [], []
    for one in item.messages:
        if one["role"] != "assistant":
            current.append(one)
        elif any(m["role"] == "user" for m in current):
            questions.append(tuple(current))
            current = []
    if any(m["role"] == "user" for m in current):
        questions.append(tuple(current))
    asked = [_plain(m["content"]) for q in questions for m in q if m["role"] == "user" and isinstance(m["content"], str)]
    return Talk(tuple(questions), over="an evaluation prompt" if barred & set(asked) else "")


def ask(talk: Talk, lm: LM, how: Answers) -> tuple[Talk, list[int]]:
    """The talk and the ids of its next prompt; none when it is over."""
    if talk.over or not (talk.questions or talk.ids):
        return talk, []
    if talk.ids:
        prompt, talk = list(talk.ids), talk._replace(ids=())
    else:
        history = (*talk.history, *talk.questions[0])
        try:
            prompt = lm.tokenizer.chat(history)
        except ValueError:
            return talk._replace(over="the template refuses it", error=True), []
        talk = talk._replace(history=history, questions=talk.questions[1:])
    room = min(how.prompt_tokens * how.turns + how.new_tokens * (how.turns - 1), lm.model.max_length - how.new_tokens)
    if len(prompt) - len(talk.tokens) > min(how.prompt_tokens, room) or len(prompt) > room:
        return talk._replace(over="too long"), []
    if tuple(prompt[: len(talk.tokens)]) != talk.tokens:
        return talk._replace(over="the template rewrites its history"), []
    return talk, prompt


def heard(talk: Talk, prompt: list[int], new: list[int], status: int, lm: LM) -> Talk:
    """The talk with an answer; a broken one is not taken, and one that was cut is the last."""
    if status == ERROR:
        return talk._replace(over="logits held NaN or inf", error=True)
    mask = talk.mask + (False,) * (len(prompt) - len(talk.tokens)) + (True,) * len(new)
    answer = {"role": "assistant", "content": lm.tokenizer.decode(new)}
    over = "cut" if status == LENGTH else ""
    return talk._replace(tokens=(*prompt, *new), mask=mask, history=(*talk.history, answer), over=over)


def _plain(text: str) -> str:
    """Text by which two prompts are the same."""
    return " ".join(text.lower().split())
