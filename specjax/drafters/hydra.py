r"""Heads that see the tokens drafted before theirs (Hydra, Ankner et al., arXiv 2402.05109).  Lossless.

    h_t, x_{t+1} ─────────────────► head 0 ──► x_{t+2}, the first drafted token
    h_t, x_{t+1}, .., x_{t+i+1} ──► head i ──► x_{t+2+i}

h_t is the target's last hidden state at the row where the last round stopped, and x_{t+1} the token which it emitted; the
others come from the path to the node.  A head is a perceptron over [h_t; E(x_{t+1}); ..; E(x_{t+i+1})], E the target's
embedding.  A tree is drafted level by level, each node's children from its own path: K steps a round, without a cache, each
2 products [(i+2) D, D] and one with the vocabulary a parent.  Its draws have a true q, so any exact rule fits at any
temperature.

Hydra++ is the same behind one decoder layer: what it gives at row t, having seen h_0 .. h_t, stands in for h_t.  That costs
a pass of K + 1 tokens through it a round, and a cache of one layer.  The authors' own has 4 heads of 4 blocks and learns
from the target's law: `recipe(..., num_draft=4, layers=4, prefix=layer.config_of(lm.config), objective=objectives.soft)`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.cache import take
from specjax.drafters import files, objectives
from specjax.drafters.base import LoadedDrafter, card
from specjax.drafters.blockwise import head_drafter
from specjax.drafters.layer import LayerConfig, layer_drafter, layer_init, over_rows, saved_config
from specjax.drafters.medusa import Paths, chain_paths, choose_tree, copied_head, grow, residual, static_tree, to_vocabulary
from specjax.drafters.recipe import Batch, Recipe, labels
from specjax.drafters.siblings import SIBLINGS, Siblings, find_siblings
from specjax.drafters.vocabulary import draft_size, drawing_within, named, seen_by
from specjax.models.layers import matmul
from specjax.types import Array, Drafter, LanguageModel


@functools.cache  # the same drafter for the same arguments: a rebuilt closure would recompile
def hydra(
    target: LanguageModel, *, paths: Paths, siblings: Siblings = SIBLINGS["without_replacement"],
    prefix: LayerConfig | None = None,
) -> Drafter:  # fmt: skip
    """A tree of the given rank paths, as deep as the longest; its children are drawn at the request's temperature.

    State: [B, D] the hidden state at the row where the last round stopped; zeros before anything has run (a prompt of one
    token), which leaves a draft to the embeddings alone.  With a prefix, LayerState of its one layer.

    Args:
      target: the model to draft for.
      paths: the tree.
      siblings: how children are drawn, one of `siblings.SIBLINGS`.
      prefix: of the decoder layer before the heads (Hydra++); None: there is none.

    Raises:
      ValueError: paths that are no tree, or that skip a rank which `siblings` draw.
    """
    tree = static_tree(paths, siblings, draft_size(target, target.vocabulary))

    def propose(noise, params, state, sequences):
        last = take(sequences.tokens, sequences.length[:, None] - 1)
        hidden = state if prefix is None else state.last[:, 0]

        def look(depth, path):
            b, w, _ = path.shape
            drafted = named(path, target.vocabulary)
            tokens = jnp.concatenate([jnp.broadcast_to(last[:, None], (b, w, 1)), drafted], -1).reshape(b * w, depth)
            logits = head_logits(target, params.target, params.drafter, depth - 1, jnp.repeat(hidden, w, 0), tokens)
            return logits.reshape(b, w, -1)

        return grow(tree, siblings, sequences.sampling.temperature, noise, look), state

    build = head_drafter if prefix is None else functools.partial(layer_drafter, config=prefix, names=("prefix",))
    propose = drawing_within(target, target.vocabulary, propose)
    return build(target, propose=propose, num_nodes=len(paths), depth=int(tree.depths.max()), children=siblings.kind)


# Heads: {"scale": [], "head_0": {"through": [2D, D], "gate": [2D, D], "gate_bias": [D]}, "head_1": {.. [3D, D] ..}, ..}; beside
# them {"kernel": [L-1, D, D], "bias": [L-1, D]} where a head has L > 1 blocks, {"head": [D, V or n]} where it has its own, and
# {"prefix": a layer} beside all heads.


def head_init(
    key, target: LanguageModel, target_params, *, num_draft: int, layers: int, own_head: bool,
    prefix: LayerConfig | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Heads that give the target's own logits: the identity on h_t, and nothing else.  The key is for a prefix only."""
    d = target.width
    every = target.embed(target_params, jnp.arange(target.vocab_size))
    # Embeddings are small beside a normed state (.07 against 1, say).  To lift them by a factor changes no head's reach,
    # for its matrices could do the same, but it spares an optimizer with steps of one size a long way.
    scale = jax.lax.rsqrt(jnp.square(every).mean() + 1e-12)
    deeper = {"kernel": jnp.zeros((layers - 1, d, d)), "bias": jnp.zeros((layers - 1, d))} if layers > 1 else {}
    own = {"head": copied_head(target, target_params, 1)[0]} if own_head else {}
    before = {} if prefix is None else {"prefix": layer_init(prefix, key, target_params, target.num_layers - 1)}

    def one(i: int) -> dict[str, Array]:
        through = jnp.eye((i + 2) * d, d)
        return {"through": through, "gate": jnp.zeros_like(through), "gate_bias": jnp.zeros(d), **deeper, **own}

    return {"scale": scale, **{f"head_{i}": one(i) for i in range(num_draft)}, **before}


def head_logits(target: LanguageModel, target_params, heads, i: int, hidden: Array, tokens: Array) -> Array:
    """hidden [R, D], tokens [R, i + 1] that follow it -> logits [R, V]: y = A u + SiLU(B u + b), u = [h; E(x); ..]."""
    head = heads[f"head_{i}"]
    embedded = target.embed(target_params, tokens) * heads["scale"]
    u = jnp.concatenate([hidden, embedded.reshape(len(tokens), -1)], -1)
    y = matmul(u, head["through"]) + jax.nn.silu(matmul(u, head["gate"]) + head["gate_bias"][None].astype(jnp.float32))
    y = y[:, None]
    if "kernel" in head:
        y = residual(y, head["kernel"][None], head["bias"][None])
    return to_vocabulary(target, target_params, {"head": head["head"][None]} if "head" in head else {}, y)[:, 0]


def recipe(
    target: LanguageModel, *, num_draft: int, layers: int = 1, own_head: bool = False, prefix: LayerConfig | None = None,
    paths: Paths | None = None, objective: objectives.Objective = objectives.hard, decay: float = 0.8,
) -> Recipe:  # fmt: skip
    """sum_i decay^i CE of head i against the token i after the next, i = 1..K, given the true tokens before it.

    The target is frozen.  With `objectives.soft` a head learns the target's law in the place of the token (the paper's
    "teacher" loss).

    Args:
      target: the model to draft for.
      num_draft: K.
      layers: L, blocks of a head.
      own_head: whether each head learns a vocabulary matrix of its own, from a copy of the target's.
      prefix: of the decoder layer before the heads (Hydra++), `layer.config_of(lm.config)` say; none unless given.
      paths: the tree that tau is measured with; a chain unless given.
      objective: one of `objectives`.
      decay: the weight of a head relative to the one before.
    """

    def loss(trainable, target_params, batch: Batch, key):
        unembed, hidden, scored = functools.partial(target.unembed, target_params), batch.output.hidden, []
        seen = hidden if prefix is None else over_rows(prefix, trainable["prefix"], hidden, batch.segments)
        for i in range(num_draft):
            given = jnp.stack([objectives.ahead(batch.tokens, j) for j in range(1, i + 2)], -1)
            logits_of = lambda x, i=i: head_logits(target, target_params, trainable, i, *x)
            same = objectives.ahead(hidden, i + 1)
            scored.append(objectives.score(logits_of, (seen, given), same, labels(batch, i + 2), unembed, objective))
        return objectives.pool(scored, [decay**i for i in range(1, num_draft + 1)])

    def init(key, target_params):
        return head_init(key, target, target_params, num_draft=num_draft, layers=layers, own_head=own_head, prefix=prefix)

    return Recipe(init, loss, hydra(target, paths=paths or chain_paths(num_draft), prefix=prefix))


def load(
    lm, *, num_draft: int, weights: str | None = None, tree: str | None = None, children: str = "without_replacement"
) -> LoadedDrafter:  # fmt: skip
    """Draft for `lm` with heads that `files.save` wrote to the directory `weights`; the first `num_draft` are used.

    They stand behind a decoder layer (Hydra++) where config.json says `"prefix": true`, or, in place of true, in what that
    layer differs from the target's own: `"prefix": {"hidden": 512}`.

    Args:
      lm: the target.
      num_draft: K, the depth of the tree.
      weights: the directory.
      tree: "chain", or a JSON file for `trees.read_paths`; otherwise what config.json lists as "tree", or a chain.
      children: how they are drawn, a key of `siblings.SIBLINGS`.

    Raises:
      ValueError: no weights, weights that do not fit, or a tree that cannot be.
    """
    saved, drawn = files.read_config(weights, "hydra", lm.model), find_siblings(children)
    facts = saved.get("prefix", False)
    prefix = saved_config(lm, facts if isinstance(facts, dict) else {}, weights) if facts else None
    target = seen_by(lm.model, saved.get("vocabulary"))
    heads = files.read_params(weights, functools.partial(like, target, lm.params, prefix))
    files.check_depth(num_draft, sum(name.startswith("head_") for name in heads))
    params = {name: x for name, x in heads.items() if not name.startswith("head_") or int(name[5:]) < num_draft}
    paths = choose_tree(tree, saved.get("tree", ()), num_draft)
    drafter = hydra(target, paths=paths, siblings=drawn, prefix=prefix)
    note = f"{num_draft} heads{' behind a layer' if prefix else ''}, {len(paths)} nodes, children {children}"
    return LoadedDrafter(drafter, params, card("hydra", params, note), "rejection" if drafter.chain else drawn.rule)


def like(target: LanguageModel, target_params, prefix: LayerConfig | None, shapes):
    """Shapes of saved heads: as many heads and blocks as there are in the file."""
    count = sum(name.endswith("/through") for name in shapes)
    layers, own_head = shapes.get("head_0/kernel", (0,))[0] + 1, "head_0/head" in shapes

    def init(key_data, params):
        key = jax.random.wrap_key_data(key_data)
        return head_init(key, target, params, num_draft=count, layers=layers, own_head=own_head, prefix=prefix)

    return jax.eval_shape(init, jax.ShapeDtypeStruct((2,), jnp.uint32), target_params)
