"""Text in, text out: tokenizer, shapes and stop strings around `decode`.

The compiled entry points of the library are the three below; their shapes depend on the batch and a capacity rounded up,
so another seed, temperature, prompt or set of drafter weights compiles nothing new.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax import decode, keys, sampling, sharding, zoo
from specjax.drafters import METHODS
from specjax.drafters.base import LoadedDrafter, kept_in, options
from specjax.drafters.precision import dtype_of
from specjax.metrics import Statistics, cut, statistics
from specjax.models.load import LM, load
from specjax.names import unknown
from specjax.sampling import SamplingParams
from specjax.text import Prompt, TextStream, token_ids
from specjax.types import ERROR, FINISH_REASONS, RUNNING, STOP, Array, Params, RoundInfo, Rule, State
from specjax.verify import RULES

start = jax.jit(decode.start, static_argnames=("target", "drafter"))
prefill = jax.jit(decode.prefill, static_argnames=("target", "drafter", "chunk"), donate_argnames="state")
run = jax.jit(decode.run, static_argnames=("target", "drafter", "rule", "max_rounds", "limit"), donate_argnames="state")

CAPACITIES = tuple(sorted(size << i for i in range(16) for size in (256, 384)))
"""Slots a cache may have: lengths up to the same one share a compilation; past 256 at most a third of a cache is idle."""

STOP_STRIDE = 8
"""Rounds between two looks of the host, where stop strings ask for looks."""


class Completion(NamedTuple):
    """What one prompt became.  A token that ends the text (EOS) is in `tokens` and not in `text`."""

    text: str
    tokens: list[int]
    finish_reason: str  # "eos", "stop", "length" or "error" (the target's logits held NaN or inf)
    prompt_tokens: list[int]
    stats: Statistics


class Piece(NamedTuple):
    """A piece of streamed text, and the whole at its end."""

    text: str  # new text, valid UTF-8; never the beginning of a stop string
    completion: Completion | None = None  # with the last piece


def load_drafter(method: str, lm: LM, *, num_draft: int = 4, **settings) -> LoadedDrafter:
    """A drafter by the name of its method, its matrices in the target's numbers, float32 or bfloat16, whatever its file has.

    Args:
      method: a key of METHODS.
      lm: the target.
      num_draft: K, the tokens drafted along one path; bound here, for it is a static shape.
      **settings: options of the method's own `load`, such as `layers` of early_exit; `model` of small, and each of `models` of
        specinfer, is an LM, which stays as it is, or what `load` takes; `weights` and `model` may be left out where the
        package has them for `lm`.

    Raises:
      ValueError: an unknown method or option (naming the nearest), num_draft below 1, a drafter that does not fit.
    """
    if method not in METHODS:
        raise ValueError(unknown("method", method, METHODS))
    if num_draft < 1:
        raise ValueError(f"num_draft={num_draft}: draft at least 1 token, or use the method 'plain'")
    known = options(METHODS[method].load)
    wrong = [name for name in settings if name not in known]
    if wrong:
        raise ValueError(unknown(f"option of {method}", wrong[0], known))
    given = [name for name in ("model", "weights") if settings.get(name) is not None]
    packaged = None if given else zoo.drafter(lm.name, method)
    if packaged is not None:
        settings[zoo.argument(packaged)] = str(packaged)
    numbers = dtype_of(lm.params)
    for name in {"model", "models"} & set(known):
        if settings.get(name):
            settings[name] = _loaded(settings[name], numbers.name)
        elif not settings.get("weights"):
            raise ValueError(f"method {method!r} needs `{name}`: path or name of a language model of the target's vocabulary")
    loaded = METHODS[method].load(lm, num_draft=num_draft, **settings)
    if settings.get("weights"):
        loaded = kept_in(loaded, numbers)
    return sharding.loaded_over(loaded, sharding.mesh_of(lm.params), lm.params)


def _loaded(model: str | LM | Sequence[str | LM], dtype: str) -> LM | tuple[LM, ...]:
    """A model, or each of several, loaded where only its name was given."""
    if isinstance(model, str):
        return load(model, weights_dtype=dtype)
    return model if isinstance(model, LM) else tuple(cast(LM, _loaded(one, dtype)) for one in model)


def find_rule(name: str) -> Rule:
    """A rule by name; ValueError names the nearest."""
    if name not in RULES:
        raise ValueError(unknown("rule", name, RULES))
    return RULES[name]


def generate(
    lm: LM,
    drafter: LoadedDrafter | None,
    prompts: Sequence[Prompt],
    *,
    key: Array,
    max_new_tokens: int = 128,
    rule: str | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    stop: Sequence[str] = (),
    mesh: str | Mesh | None = None,
) -> list[Completion]:
    """Generate for every prompt, speculatively, with the target's exact law.

    Args:
      lm: what `load` returned.
      drafter: what `load_drafter` returned; None is plain decoding.
      prompts: strings (continued as they stand), chats (lists of {"role", "content"}) or lists of token ids.
      key: a typed key, `jax.random.key(seed)`: each prompt's own is folded from it by its index.  Or one key a prompt.
      max_new_tokens: the most tokens a prompt may add, from 1.
      rule: a key of RULES; None is the usual one of the drafter's method.
      sampling: parameters for all prompts, or a list with those of each.
      stop: strings that end a text; the text ends before the first of them.
      mesh: spread the model over it first, as `load` does; one that `load` has spread stays where it lies.

    Returns:
      Completions in the order of the prompts; each depends on its own prompt, parameters and key alone.

    Raises:
      ValueError: bad input, in one line.
    """
    lm = sharding.lm_over(lm, mesh)
    session = begin(lm, drafter, prompts, key=key, max_new_tokens=max_new_tokens, rule=rule, params=sampling, stop=stop)
    for _ in advance(session, STOP_STRIDE if stop else session.capacity):
        pass
    return [complete(session, row) for row in range(len(prompts))]


def stream(
    lm: LM,
    drafter: LoadedDrafter | None,
    prompt: Prompt,
    *,
    key: Array,
    max_new_tokens: int = 128,
    rule: str | None = None,
    sampling: SamplingParams = SamplingParams(),
    stop: Sequence[str] = (),
    stride: int = 1,
) -> Iterator[Piece]:
    """Yield pieces of text as rounds end; same tokens, arguments and errors as `generate` of one prompt.

    `stride` is the number of rounds between two pieces; the last Piece carries the Completion.
    """
    if stride < 1:
        raise ValueError(f"stride={stride}: show text every round (1) or more rarely")
    session = begin(lm, drafter, [prompt], key=key, max_new_tokens=max_new_tokens, rule=rule, params=sampling, stop=stop)
    shown = 0
    for _ in advance(session, stride):
        text = "".join(session.text[0])
        if len(text) > shown:
            yield Piece(text[shown:])
            shown = len(text)
    done = complete(session, 0)
    yield Piece(done.text[shown:], done)


class Session(NamedTuple):
    """One call of generate or stream; lists are filled as it runs."""

    lm: LM
    loaded: LoadedDrafter
    rule: Rule
    params: Params
    state: list[State]  # one entry, the newest: `run` takes its buffers over
    capacity: int
    prompts: list[list[int]]
    logs: list[RoundInfo]  # [B, rounds] of each stretch
    streams: list[TextStream]
    text: list[list[str]]
    kept: list[int]  # tokens a row keeps, where a stop string was found; -1 before


def begin(lm: LM, drafter, prompts, *, key, max_new_tokens, rule, params, stop) -> Session:
    """Check everything that can be checked, pad, and prefill."""
    loaded, mesh = METHODS["plain"].load(lm) if drafter is None else drafter, sharding.mesh_of(lm.params)
    loaded = sharding.loaded_over(loaded, mesh, lm.params)
    law = find_rule(loaded.rule if rule is None else rule)
    decode.check(lm.model, loaded.drafter, law)
    ids = check_request(lm, prompts, key, max_new_tokens, params, stop)
    streams = [] if lm.tokenizer is None else [lm.tokenizer.stream(stop=stop) for _ in ids]
    each = [params] * len(ids) if isinstance(params, SamplingParams) else list(params)
    lengths = np.asarray([len(x) for x in ids], np.int32)
    ends = np.minimum(lengths + max_new_tokens, lm.model.max_length)
    needed = decode.capacity_for(int(ends.max()), loaded.drafter)
    capacity = next(size for size in CAPACITIES if size >= needed)
    tokens = np.zeros((len(ids), capacity), np.int32)
    for row, prompt in enumerate(ids):
        tokens[row, : len(prompt)] = prompt
    eos_ids = () if lm.tokenizer is None else lm.tokenizer.eos_ids
    eos = np.asarray([(*eos_ids, -1)] * len(ids), np.int32)  # never empty: no token is -1
    request = keys.request_keys(key, jnp.arange(len(ids))) if jnp.ndim(key) == 0 else key
    both, static = Params(lm.params, loaded.params), dict(target=lm.model, drafter=loaded.drafter)
    arrays = [jnp.asarray(x) for x in (tokens, lengths, ends, eos)]
    state = start(both, *arrays, request, sampling.stack(each, lm.model.vocab_size), **static)
    state = prefill(both, sharding.settled(state, mesh), chunk=64 if jax.default_backend() == "cpu" else 256, **static)
    state = sharding.settled(state, mesh)
    return Session(lm, loaded, law, both, [state], capacity, ids, [], streams, [[] for _ in ids], [-1] * len(ids))


def check_request(lm: LM, prompts, key, max_new_tokens: int, params, stop) -> list[list[int]]:
    """Token ids of every prompt, once everything that was asked makes sense; ValueError in one line if not."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: ask for at least 1")
    if isinstance(prompts, str):
        raise ValueError(f"prompts is one string, {prompts[:20]!r}: give a list of prompts")
    ids = [encode(lm, prompt, index) for index, prompt in enumerate(prompts)]
    if not ids:
        raise ValueError("no prompts: give at least one")
    if not isinstance(params, SamplingParams) and len(params) != len(ids):
        raise ValueError(f"{len(params)} sets of sampling parameters for {len(ids)} prompts: give one, or one each")
    if not hasattr(key, "dtype") or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise ValueError(f"key is of type {type(key).__name__}: give jax.random.key(seed)")
    if jnp.ndim(key) and key.shape != (len(ids),):
        raise ValueError(f"{key.shape[0]} keys for {len(ids)} prompts: give one, or one each")
    if stop and lm.tokenizer is None:
        raise ValueError("stop strings need a tokenizer, and this model was loaded without one")
    return ids


def encode(lm: LM, prompt: Prompt, index: int = 0) -> list[int]:
    """Token ids of a prompt for a model; what `text.token_ids` raises begins with "prompt `index`"."""
    size, longest = lm.model.vocab_size, lm.model.max_length
    return token_ids(prompt, lm.tokenizer, vocab_size=size, longest=longest, name=f"prompt {index}")


def advance(session: Session, stride: int) -> Iterator[None]:
    """Run to the end, `stride` rounds at a time, feeding the text streams and ending rows that met a stop string."""
    static = dict(target=session.lm.model, drafter=session.loaded.drafter, rule=session.rule, max_rounds=session.capacity)
    mesh, fetch = sharding.mesh_of(session.params), sharding.fetch
    done = [0] * len(session.prompts)  # tokens already fed
    while True:
        state, log = run(session.params, session.state[0], jnp.asarray(stride), **static)
        session.state[0] = state = sharding.settled(state, mesh)
        session.logs.append(jax.tree.map(lambda x: fetch(x)[:, :stride], log))
        status, length, tokens = np.array(fetch(state.status)), fetch(state.length), fetch(state.tokens)
        for row, text in enumerate(session.streams):
            new = tokens[row, len(session.prompts[row]) + done[row] : length[row]]
            done[row] += len(new)
            step = text.push(new)
            session.text[row].append(step.text)
            if step.stop is not None and session.kept[row] < 0:
                session.kept[row], status[row] = step.num_tokens, STOP
        session.state[0] = state._replace(status=jax.device_put(status, state.status.sharding))
        yield
        if not (status == RUNNING).any():
            return


def complete(session: Session, row: int) -> Completion:
    """What a row has become, with nothing in it or its counts that was cut."""
    state = session.state[0]
    begin, end, status = len(session.prompts[row]), *(int(sharding.fetch(x)[row]) for x in (state.length, state.status))
    if session.streams:
        rest = session.streams[row].flush()
        session.text[row].append(rest.text)
        if rest.stop is not None and session.kept[row] < 0:
            session.kept[row], status = rest.num_tokens, STOP
    kept = end - begin if session.kept[row] < 0 else session.kept[row]
    tokens = sharding.fetch(state.tokens)[row, begin : begin + kept].tolist()
    rounds = RoundInfo(*(np.concatenate([log[i][row] for log in session.logs]) for i in range(3)))
    stats = statistics(cut(rounds, kept), session.loaded.drafter.depth)
    return Completion("".join(session.text[row]), tokens, FINISH_REASONS[status], session.prompts[row], stats)


def require_sound(completions: Sequence[Completion]) -> None:
    """Raise FloatingPointError if a target gave no law (NaN or inf logits) for some prompt."""
    bad = [i for i, c in enumerate(completions) if c.finish_reason == FINISH_REASONS[ERROR]]
    if bad:
        raise FloatingPointError(f"the target's logits held NaN or inf for prompts {bad}: check its weights and dtype")
