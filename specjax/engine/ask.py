"""What a request asks for, checked on the host before anything of it reaches the queue or the device.

Every request has the same columns there, whether or not it uses them: what one asks for compiles nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.decode import capacity_for
from specjax.engine.slots import Ask, Build
from specjax.sampling import Bias, SamplingParams
from specjax.text import Prompt, Tokenizer, is_whole, token_ids
from specjax.types import Array


def ask(
    prompt: Prompt, *, max_new_tokens: int, params: SamplingParams, eos_ids: Sequence[int], key: Array, build: Build,
    tokenizer: Tokenizer | None,
) -> Ask:  # fmt: skip
    """A request for the device.

    Raises:
      ValueError: anything that makes no sense or does not fit, in one line.
    """
    context, room = build.target.max_length, build.capacity - capacity_for(0, build.drafter)
    ids = token_ids(prompt, tokenizer, vocab_size=build.target.vocab_size, longest=context)
    if not is_whole(max_new_tokens) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens!r}: ask for a whole number from 1")
    end = min(len(ids) + max_new_tokens, context)
    if end > room:
        raise ValueError(
            f"{len(ids)} prompt tokens and max_new_tokens={max_new_tokens} do not fit into a slot of {room} tokens: "
            f"ask for less, or build the engine with capacity={capacity_for(end, build.drafter)}"
        )
    if not hasattr(key, "dtype") or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.shape != ():
        raise ValueError(f"key is {type(key).__name__} of shape {getattr(key, 'shape', None)}: give one jax.random.key(seed)")
    return Ask(
        tokens=padded(ids, build.capacity, 0),
        length=np.int32(len(ids)),
        max_length=np.int32(end),
        eos=padded(end_ids(eos_ids, build.max_eos), build.max_eos, -1),
        key=key,
        sampling=full_columns(params, build.target.vocab_size, build.max_bias),
    )


def end_ids(ids: Sequence[int], max_eos: int) -> list[int]:
    """Token ids that end a request; ValueError for too many, or for none that could be one."""
    if len(ids) > max_eos:
        raise ValueError(f"{len(ids)} end tokens, this engine holds {max_eos} a request: build it with max_eos={len(ids)}")
    bad = [x for x in ids if not is_whole(x) or not 0 <= x < 1 << 31]
    if bad:
        raise ValueError(f"end token {bad[0]!r} is no token id: ids are whole numbers from 0")
    return [int(x) for x in ids]


def full_columns(params: SamplingParams, vocab_size: int, max_bias: int) -> SamplingParams:
    """One request's parameters as numbers of NumPy, with what changes nothing where it leaves a field out.

    Raises:
      ValueError: a value out of range, or a bias of too many tokens.
    """
    if not isinstance(params, SamplingParams):
        raise ValueError(f"sampling is a {type(params).__name__}: give SamplingParams")
    sampling.check(params, vocab_size)
    bias = params.logit_bias or {}
    if len(bias) > max_bias:
        raise ValueError(f"logit_bias of {len(bias)} tokens, this engine holds {max_bias}: build it with max_bias={len(bias)}")
    own = {f: getattr(params, f) for f in neutral()}
    most = np.iinfo(np.int32).max  # a top_k past it is no limit either
    one = {f: x if own[f] is None else x.dtype.type(min(own[f], most)) for f, x in neutral().items()}
    values = padded(list(bias.values()), max_bias, 0.0, np.float32)
    return SamplingParams(**one, logit_bias=Bias(padded(list(bias), max_bias, vocab_size), values))  # pyright: ignore


@functools.cache
def neutral() -> dict[str, np.generic]:
    """What every field but the bias is where a request leaves it out while another of its batch does not."""
    every = SamplingParams(0.0, 1, 1.0, 0.0, {0: 0.0}, 1.0, 0.0, 0.0)
    columns = sampling.stack([SamplingParams(), every], 1)._asdict()
    return {field: np.asarray(column)[0] for field, column in columns.items() if field != "logit_bias"}


def padded(values: Sequence, size: int, fill, dtype: type = np.int32) -> np.ndarray:
    """[size], `values` first."""
    row = np.full(size, fill, dtype)
    row[: len(values)] = values
    return row
