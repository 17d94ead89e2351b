"""What tests of block drafters share: the backbone in NumPy, row by row, and drafts after some prompts."""

import functools

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import references as ref

from specjax.drafters.recipe import Batch, with_output
from specjax.types import Sequences

K, T = 3, 11
IDS = (0, 2, 3, 5, 7, 8, 9, 11, 12, 13, 16)
"""A draft vocabulary."""


def features_of(config, output):
    """Of an output that has the features of layers 0 and 1: [B, T, M, D]."""
    return output.features[:, :, list(config.taps)]


def told(config, batch):
    return batch._replace(output=batch.output._replace(features=features_of(config, batch.output)))


# In NumPy: one block after `anchor` tokens of a document, whose features are those before it.


def convolved(p, u):
    """The two kernels [R, J, D] that u [R, D] makes."""
    added = (u @ p["dynamic"]["kernel"]).reshape(len(u), 2, 2, -1)
    return np.moveaxis(p["base"][None] + np.repeat(added, u.shape[1] // added.shape[-1], -1), 1, 0)


def mixed(kernel, x):
    return np.stack([sum(kernel[t, j] * x[t - j] for j in range(kernel.shape[1]) if t >= j) for t in range(len(x))])


def attended(p, c, u, context, first, window, causal):
    """u [R, D] at positions first.., context [first, D]."""
    normed = lambda x, name: ref.rms(x, p[name]) if name in p else x

    def entry(x, position):
        two = (x @ p["kv"]["kernel"]).reshape(2, 2, 8)
        return [ref.rotate(normed(two[g, 0], "k_norm"), position) for g in range(2)], two[:, 1]

    past, own = [entry(x, t) for t, x in enumerate(context)], [entry(x, first + t) for t, x in enumerate(u)]
    y = np.zeros((len(u), 4, 8))
    for t, x in enumerate(u):
        seen = [e for i, e in enumerate(past) if window is None or first + t - i < window]
        seen += [e for i, e in enumerate(own) if (i <= t or not causal) and (window is None or abs(t - i) < window)]
        q = (x @ p["q"]["kernel"]).reshape(2, 2, 8)
        for g, r in np.ndindex(2, 2):
            score = [ref.rotate(normed(q[g, r], "q_norm"), first + t) @ k[g] / 8**0.5 for k, _ in seen]
            y[t, 2 * g + r] = ref.softmax(np.asarray(score)) @ np.asarray([v[g] for _, v in seen])
    return y.reshape(len(u), -1) @ p["out"]["kernel"]


def fed(p, u):
    gate, up = np.split(u @ p["gate_up"]["kernel"], 2, -1)
    return (ref.silu(gate) * up) @ p["down"]["kernel"]


def block_by_hand(p, c, token, features):
    """[K, D] of a block that begins with `token`; features [n, M, D] of the n before it."""
    embedding = np.asarray(h.target_params()["embedding"], np.float64) * c.embedding_scale
    context = [ref.rms(x.reshape(-1) @ p["fc"]["kernel"], p["context_norm"]) for x in features]
    rows = K + (not c.anchor_first)
    x = embedding[[token] + [c.mask_token] * (rows - 1)]
    for i in range(c.layers):
        own, slides = p[f"layer_{i}"], bool(c.sliding) and c.sliding[i]
        how = (c.window if slides else None), (slides if c.causal is None else c.causal)
        inner = {
            "attention": lambda u, own=own, how=how: attended(own["attention"], c, u, context, len(context), *how),
            "mlp": lambda u, own=own: fed(own["mlp"], u),
        }
        for name, sublayer in inner.items():
            u = np.stack([ref.rms(row, own[f"{name}_norm"]) for row in x])
            before, after = convolved(own[f"{name}_conv"], u) if c.conv_taps else 2 * [np.ones((rows, 1, 1))]
            x = x + mixed(after, sublayer(mixed(before, u)))
    return np.stack([ref.rms(row, p["norm"]) for row in x])[-K:]


def logits_by_hand(c, hidden, columns=slice(None)):
    x = hidden @ np.asarray(h.target_params()["head"], np.float64)[:, columns] * c.output_multiplier
    return x if c.softcap is None else np.tanh(x / c.softcap) * c.softcap


def loss_by_hand(c, p, nats, decay, read=None):
    """sum decay^k nats(logits, row, goal) over labels of all blocks with context / sum decay^k / labels of a place."""
    read = (lambda hidden, tokens: logits_by_hand(c, hidden)) if read is None else read
    features, total, count = ref.double(features_of(c, ref.batch().output)), 0.0, 0
    for b, part in ref.DOCUMENTS:
        for anchor in range(part.start + 1, part.stop):
            hidden = block_by_hand(p, c, ref.TOKENS[b, anchor], features[b, part.start : anchor])
            logits = read(hidden, ref.TOKENS[b, anchor : anchor + K])
            for k in range(min(K, part.stop - 1 - anchor)):
                if ref.MASK[b, anchor + 1 + k]:
                    total += decay**k * nats(logits[k], b, anchor + 1 + k)
                    count += 1
    return total / (count / K) / sum(decay**k for k in range(K))


class Branches:
    """What a loss decides, in order: `of(make)` gives what was made on the first pass, on every later one too.

    A derivative is that of the branch on which the parameters lie: differences must not cross to another.
    """

    def __init__(self):
        self.made, self.known = [], None

    def again(self):
        self.known = iter(list(self.made)) if self.made else None

    def of(self, make):
        if self.known is not None:
            return next(self.known)
        self.made.append(make())
        return self.made[-1]


# Drafts.


def text(rows=2, length=T):
    tokens = np.random.default_rng(6).integers(0, h.V, (rows, length)).astype(np.int32)
    given = Batch(jnp.asarray(tokens), jnp.ones(tokens.shape, bool), jnp.zeros(tokens.shape, jnp.int32))
    return with_output(given, h.TARGET, h.target_params(), (0, 1))


def state_after(drafter, params, prompts, heat=1.0, rounds=0, rule="coupled"):
    """(drafter's state, Sequences) after `prompts` and some rounds."""
    state = h.generate(drafter, rule, prompts, params=params, rounds=rounds, temperature=heat).state
    return state.drafter, Sequences(state.tokens, state.length, state.cache, state.sampling)


def proposal(drafter, params, state, sequences):
    noise = functools.partial(h.gumbel, len(sequences.length))
    return jax.jit(lambda p, d, s: drafter.propose(noise, p, d, s))(params, state, sequences)
