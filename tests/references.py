"""What tests of trained drafters share: a batch, NumPy in float64, and a target whose text is known to the last bit."""

import functools
from typing import NamedTuple

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters.recipe import Batch, with_output
from specjax.types import LanguageModel, Output

TOKENS = np.random.default_rng(1).integers(0, h.V, (2, 11)).astype(np.int32)
SEGMENTS = np.int32([[0] * 6 + [1] * 5, [0] * 8 + [-1] * 3])
MASK = (np.random.default_rng(2).random((2, 11)) < 0.8) & (SEGMENTS >= 0)


def double(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


@functools.cache
def batch():
    """Two documents in one row, one and padding in the other; some tokens are no labels."""
    return with_output(Batch(*map(jnp.asarray, (TOKENS, MASK, SEGMENTS))), h.TARGET, h.target_params(), (0, 1))


@functools.cache
def hidden():
    return double(jax.tree.map(np.asarray, batch().output.hidden))


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def pooled(row, shares, nats, first=2):
    """sum of shares[i] x nats(logits, label) over head i's labels / labels of a head; row(b, t, i) -> logits of head i.

    Head i predicts the token `first` + i after t.
    """
    total, count = 0.0, 0
    for b, t in np.ndindex(TOKENS.shape):
        for i, share in enumerate(shares):
            goal = t + first + i
            if goal < TOKENS.shape[1] and MASK[b, goal] and SEGMENTS[b, goal] == SEGMENTS[b, t] >= 0:
                total, count = total + share * nats(row(b, t, i), b, goal), count + 1
    return total / (count / len(shares))


def hard(logits, b, goal):
    return -np.log(softmax(logits)[TOKENS[b, goal]])


def taught(b, goal):
    """The target's law of a token."""
    return softmax(hidden()[b, goal - 1] @ np.asarray(h.target_params()["head"], np.float64))


def soft(logits, b, goal):
    return -(taught(b, goal) * np.log(softmax(logits))).sum()


def kl(logits, b, goal):
    p = taught(b, goal)
    return (p * np.log(p / softmax(logits))).sum()


def total_variation(logits, b, goal):
    return np.abs(taught(b, goal) - softmax(logits)).sum() / 2


def check(recipe, params, reference):
    """Loss and the gradient along three random directions, against reference(params in float64) and central differences.

    A gradient's rounding is measured by its norm, which is what it is along a direction in the mean: a direction that happens
    to lie across the gradient sees little of it and all of the rounding.
    """
    given = batch()  # outside of what is traced, for it is kept
    f = lambda p: recipe.loss(p, h.target_params(), given, jax.random.key(0))[0]
    loss, gradient = jax.jit(jax.value_and_grad(f))(params)
    exact, gradient = double(params), jax.tree.leaves(double(gradient))
    norm = np.sqrt(sum(np.vdot(g, g) for g in gradient))
    np.testing.assert_allclose(float(loss), reference(exact), rtol=1e-5)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        way = jax.tree.map(lambda x, rng=rng: rng.standard_normal(x.shape), exact)
        ends = [reference(jax.tree.map(lambda x, d, e=e: x + e * d, exact, way)) for e in (1e-5, -1e-5)]
        slope = (ends[0] - ends[1]) / 2e-5
        along = sum(np.vdot(g, d) for g, d in zip(gradient, jax.tree.leaves(way), strict=True))
        np.testing.assert_allclose(along, slope, rtol=0, atol=1e-5 * norm)


# A transformer in NumPy, token by token: the target, and an MTP module's entries.

DOCUMENTS = [(0, slice(0, 6)), (0, slice(6, 11)), (1, slice(0, 8))]
"""Row and place of the documents in the batch."""


def rms(x, norm):
    return x / np.sqrt((x * x).mean() + 1e-6) * norm["scale"]


def rotate(x, position):
    """x [.., 8], half-split."""
    angle = position * 10_000.0 ** (-np.arange(4) / 4)
    a, b = x[..., :4], x[..., 4:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def attended(own, x, position, before):
    """What attention adds at x, which it reads as it is, and the key and value there.  4 heads over 2 KV heads of 8."""
    qkv = (x @ own["qkv"]["kernel"]).reshape(2, 4, 8)
    normed = lambda v, name: np.stack([rms(row, own[name]) for row in v]) if name in own else v
    q = np.stack([rotate(normed(qkv[:, r], "q_norm"), position) for r in range(2)], 1)
    k, v = rotate(normed(qkv[:, 2], "k_norm"), position), qkv[:, 3]
    seen = [*before, (k, v)]
    y = [
        softmax(np.asarray([q[g, r] @ k[g] for k, _ in seen]) / 8**0.5) @ np.asarray([v[g] for _, v in seen])
        for g in range(2)
        for r in range(2)
    ]
    return np.concatenate(y) @ own["out"]["kernel"], (k, v)


def fed(p, x):
    """What the feed-forward adds at x."""
    gate, up = np.split(rms(x, p["mlp_norm"]) @ p["mlp"]["gate_up"]["kernel"], 2)
    return (silu(gate) * up) @ p["mlp"]["down"]["kernel"]


def layer(p, x, position, before):
    """One token through a layer, and its key and value, given those `before` it."""
    y, entry = attended(p["attention"], rms(x, p["attention_norm"]), position, before)
    x = x + y
    return x + fed(p, x), entry


def states(p, tokens):
    """The target's last hidden state at each token of one document: a layer that sees 6 tokens, and one that sees all."""
    narrow, wide, result = [], [], []
    for t, token in enumerate(tokens):
        x, entry = layer(p["layer_0"], p["embedding"][token], t, narrow[-5:])
        narrow.append(entry)
        x, entry = layer(p["layer_1"], x, t, wide)
        wide.append(entry)
        result.append(rms(x, p["norm"]))
    return result


def enter(p, c, embedded, hidden, position, before):
    """One entry of a module: (recycled, normed) and its key and value, given those `before` it."""
    both = [rms(embedded, p["embed_norm"]), rms(hidden, p["hidden_norm"])]
    x, entry = layer(p, np.concatenate(both if c.embedding_first else both[::-1]) @ p["proj"]["kernel"], position, before)
    last = rms(x, p["norm"])
    return (last if c.recycle_normed else x), last, entry


def extrapolate(p, c, embedded, hidden, position, before):
    """`enter` of an EAGLE module; `hidden` has been fused, and an entry is one for each layer."""
    if c.wide:
        normed = rms(hidden, p["hidden_norm"])
        x = np.concatenate([rms(embedded, p["input_norm"]) if c.input_norm else embedded, normed])
        residual = normed if c.norm_before_residual else hidden
    else:
        residual = np.concatenate([embedded, hidden]) @ p["fc"]["kernel"] + p["fc"]["bias"]
        x = rms(residual, p["input_norm"]) if c.input_norm else residual
        residual = x if c.norm_before_residual else residual
    y, first = attended(p["attention"], x, position, [entry[0] for entry in before])
    x, own = residual + y, [first]
    x = x + fed(p, x)
    for i in range(1, c.layers):
        x, more = layer(p[f"deeper_{i - 1}"], x, position, [entry[i] for entry in before])
        own.append(more)
    last = rms(x, p["norm"]) if c.output_norm else x
    return (last if c.norm_output else x), last, own


def fused(p, c, features):
    """features [M, D] of one position -> what its entry starts from."""
    parts = [rms(x, p[f"fc_norm_{i}"]) if c.fc_norm else x for i, x in enumerate(features)]
    x = np.concatenate(parts)
    x = rms(x, p["fused_norm"]) if c.norm_before_fc else x
    return x @ p["fc"]["kernel"] if c.wide and len(parts) > 1 else x


def entries(p, c, embedding, tokens, hidden, steps, enter=enter):
    """normed[t][j] of one document: step j from the true entries up to t and its own before it, entry by entry."""
    true, result = [], []
    for t in range(len(tokens) - 1):
        recycled, normed, entry = enter(p, c, embedding[tokens[t + 1]], hidden[t], t, true)
        true.append(entry)
        own, row = list(true), [normed]
        for j in range(1, min(steps, len(tokens) - 1 - t)):
            recycled, normed, entry = enter(p, c, embedding[tokens[t + 1 + j]], recycled, t + j, own)
            own.append(entry)
            row.append(normed)
        result.append(row)
    return result


def layer_rows(p):
    """[2, 11, D] what a layer of a drafter gives on the target's states, entry by entry, each document by itself."""
    found = np.zeros_like(hidden())
    for b, part in DOCUMENTS:
        before = []
        for position, x in enumerate(hidden()[b, part]):
            found[b, part.start + position], entry = layer(p, x, position, before)
            before.append(entry)
    return found


# Text that is known but for one fair bit a token: token 2 c + bit, c the position modulo COUNT.  A predictor that is right,
# however far ahead, gives two tokens one half each: its loss is ln 2, the entropy, whatever the bits were.

COUNT = 5


class Known(NamedTuple):
    """The target and a batch of its text."""

    target: LanguageModel
    batch: Batch


def known():
    """h_t is the one-hot of token t, embeddings are one-hots, and the vocabulary head gives a token's pair 50 each."""
    size = 2 * COUNT
    pairs = np.kron(np.eye(COUNT), np.ones((2, 2))).astype(np.float32) * 50
    target = LanguageModel(
        init=lambda key: (), apply=None, init_cache=None, embed=lambda params, tokens: jax.nn.one_hot(tokens, size),
        unembed=lambda params, x: x @ pairs, truncate=None, vocab_size=size, width=size, num_layers=1, max_length=99,
    )  # fmt: skip
    tokens = 2 * (np.arange(14) % COUNT)[None] + np.random.default_rng(0).integers(0, 2, (2, 14))
    tokens = jnp.asarray(tokens.astype(np.int32))
    out = Output(logits=jnp.zeros(()), hidden=jax.nn.one_hot(tokens, size), features=jnp.zeros(()))
    return Known(target, Batch(tokens, jnp.ones(tokens.shape, bool), jnp.zeros(tokens.shape, jnp.int32), out))


def later(steps):
    """[D, D] that takes a token's one-hot to that of the token `steps` on, with the same bit."""
    return jnp.asarray(np.roll(np.eye(2 * COUNT), 2 * steps, 1), jnp.float32)


def eagle2(log_q, width, levels, nodes):
    """EAGLE-2 in plain Python: (tokens, parents, scores) of the `nodes` best; ties go to the earlier candidate."""
    pool, beam = [], [((), 0.0, -1)]
    for _ in range(levels):
        level = []
        for prefix, score, place in beam:
            law = log_q(prefix)
            for x in np.argsort(-law, kind="stable")[:width]:
                level.append(((*prefix, int(x)), np.float32(score + law[x]), place))
        placed = [(path, score, len(pool) + i) for i, (path, score, _) in enumerate(level)]
        pool += level
        beam = [placed[i] for i in np.argsort([-s for _, s, _ in placed], kind="stable")[:width]]
    keep = sorted(np.argsort([-s for _, s, _ in pool], kind="stable")[:nodes])
    index = {old: new for new, old in enumerate(keep)}
    return [pool[i][0][-1] for i in keep], [index.get(pool[i][2], -1) for i in keep], [pool[i][1] for i in keep]
