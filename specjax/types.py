"""The named tuples and the three signatures that carry the library; no logic.

    text ──tokenizer──► prompt [B, T] right-padded, lengths [B]
                           │ prefill: the target runs every prompt token but the last, in chunks; drafter.absorb sees each
                           ▼
               State(tokens, length, target cache, drafter state, keys, sampling, status)   every leaf has B first
                           │
       ┌───────────────────▼─────────────────────────────────────────────────────┐
       │ drafter.propose ─► Draft(tokens, parents, log_q, confidence)            │
       │ limit (optional) ─► nodes a scheduler will not verify become absent     │
       │ target.apply(last token + draft) ─► Output(logits, hidden, features)    │  until every row is done,
       │ sampling.warp(logits) ─► log_p        (the ONE function that defines p) │  all in one lax.while_loop,
       │ rule.plan(draft, log_p) ─► Plan       (deterministic: probabilities)    │  no host sync
       │ draw(keys, plan) ─► Verdict           (the only coins)                  │
       │ probe (optional) looks on: ceilings, tests                              │
       │ commit: append tokens, keep the accepted path, drafter.commit           │
       └───────────────────┬─────────────────────────────────────────────────────┘
                           ▼                          RoundInfo ─► metrics
           tokens, text, finish reason, statistics

Shapes are written with one legend everywhere: `B` sequences, `T` new tokens, `S` cache slots, `K` drafted tokens in a
chain, `N` draft-tree nodes, `V` vocabulary, `D` model width, `H` heads, `G` KV heads, `L` layers, `M` feature taps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

Array = jax.Array

RUNNING, EOS, LENGTH, STOP, ERROR = range(5)
"""`State.status`: why a row ended, or `RUNNING`."""

CHILDREN = ("point", "iid", "independent", "without_replacement", "sampled_then_top")
"""How the siblings at one node may have been drawn: not by chance; from one law, each by itself; each by itself from laws
of their own; one after the other without repeats; one from all but the top K - 1, then those."""

FINISH_REASONS = ("running", "eos", "length", "stop", "error")
"""`FINISH_REASONS[status]` is what a user reads."""


class KVCache(NamedTuple):
    """Keys and values of every layer.  Slots at or past `length` are free: written at will, never read."""

    k: tuple[Array, ...]  # L arrays [B, G, head_dim, S]: scores are then a plain matrix product, without a transpose
    v: tuple[Array, ...]  # L arrays [B, G, S, head_dim]
    length: Array  # [B] int32 slots in use


class Output(NamedTuple):
    """What one pass of a model gives.  A field nobody reads is never computed: XLA drops it."""

    logits: Array  # [B, T, V] float32
    hidden: Array  # [B, T, D] after the final norm
    features: Array  # [B, T, M, D] raw outputs of the layers asked for


class Draft(NamedTuple):
    """Tokens proposed for one verification: a tree whose parents stand before their children.

    A node may be absent (parent -2): a short match, siblings exhausted, a scheduler's limit.  Absent nodes have no law.
    """

    tokens: Array  # [B, N] int32
    parents: Array  # [B, N] int32: a node, -1 for the last committed token, -2 for no such node
    log_q: Array | None = (
        None  # [B, N, V] law each node was REALLY drawn from, given parent and earlier siblings; None = point mass
    )
    confidence: Array | None = None  # [B, N] P(accepted | parent accepted); may look at earlier nodes only


class Plan(NamedTuple):
    """A rule's decision list for ONE sequence.  Decision 0 comes first; it holds a function, so it never crosses a vmap.

    A target below N is the next decision, N + r means: the round stops at row r of the verified block.
    """

    accept: Array  # [N] probability that decision m says yes
    if_accept: Array  # [N] int32
    if_reject: Array  # [N] int32
    correction: Callable[[Array], Array]  # (row) -> [V] log law of the token emitted when the round stops at `row`


class Verdict(NamedTuple):
    """What a round decided: the accepted path and one token of the target's own."""

    path: Array  # [B, K+1] rows of the verified block: 0, then accepted nodes + 1; junk past num_accepted
    num_accepted: Array  # [B] int32
    tokens: Array  # [B, K+1] accepted tokens, then the emitted one; junk after it


class Params(NamedTuple):
    """Always whole: drafting heads share the target's embedding and head."""

    target: Any
    drafter: Any = ()


class Sequences(NamedTuple):
    """What a drafter may look at."""

    tokens: Array  # [B, S] int32
    length: Array  # [B] tokens known so far
    cache: KVCache  # the target's, read only
    sampling: Any  # sampling.SamplingParams with one value a row


class State(NamedTuple):
    """What the next round needs.  Invariant: the target's cache holds every committed token but the last."""

    tokens: Array  # [B, S] int32
    length: Array  # [B] committed tokens
    prompt_length: Array  # [B]
    max_length: Array  # [B] a row ends here at the latest
    eos: Array  # [B, E] token ids that end a row, padded with -1
    status: Array  # [B] int32: RUNNING, EOS, LENGTH, STOP, ERROR
    key: Array  # [B] typed keys, one a request
    sampling: Any  # sampling.SamplingParams with one value a row
    cache: KVCache
    drafter: Any
    schedule: Any = ()  # whatever the scheduler's `limit` needs, as traced data


class RoundInfo(NamedTuple):
    """What a human needs of one round; all zero for a row that had already ended."""

    drafted: Any  # [B] nodes that existed
    accepted: Any  # [B] drafted tokens that were accepted AND emitted
    emitted: Any  # [B] tokens appended
    probed: Any = ()  # what a `probe` saw, every leaf [B, ...]


class LanguageModel(NamedTuple):
    """A model seen from outside; only `models/` knows that it is Flax."""

    init: Callable  # (key) -> params
    apply: Callable  # (params, tokens [B,T], cache, *, positions=, mask=, features=, context=, pack=) -> (Output, cache)
    init_cache: Callable  # (batch, capacity) -> KVCache
    embed: Callable  # (params, tokens) -> [..., D]
    unembed: Callable  # (params, hidden [..., D]) -> [..., V] logits, float32
    truncate: Callable  # (num_layers) -> LanguageModel of the first layers with this one's norm and head, on the same params
    vocab_size: int
    width: int
    num_layers: int
    max_length: int  # the longest context it was made for, in tokens
    narrow: Callable | None = None  # (params, ids [n]) -> params for an `unembed` to the logits [..., n] of these ids
    vocabulary: tuple[int, ...] | None = None  # of a view for drafters: the ids of the logits that `unembed` gives


class Drafter(NamedTuple):
    """A way to propose tokens: pure functions plus the static shape of a draft.

    `noise(depth, width) -> [B, width, V]` is Gumbel noise for tokens at `depth` (from 1), `noise(depth, width, ids)` that of
    the tokens `ids` [n] alone; a drafter gets no key.  Ask once for each depth, a row for each draw: two calls at one depth
    give the same noise.  Under a coupled rule all its rows are the target's own: take siblings as the top k of ONE row.

    A chunk that `absorb` sees ends at `sequences.cache.length` and holds `count` tokens (0 for a row that is through); a
    prompt of one token has none.  `commit` sees the Output of the whole block, zero where nothing was run, and a
    Verdict that an end or a budget may still cut (the row is done then).  States keep their form; of a row that is done all
    leaves are restored except K/V buffers, so let large buffers be a KVCache.
    """

    init: Callable  # (params, batch, capacity) -> empty state
    absorb: Callable  # (params, state, sequences, Output [B,T], count [B]) -> state: the target has run a chunk of prompt
    propose: Callable  # (noise, params, state, sequences) -> (Draft, state)
    commit: Callable  # (params, state, Output [B,N+1], Verdict) -> state: forget rejected work, take in true features
    num_nodes: int
    depth: int
    children: str = "point"  # how siblings are drawn, one of CHILDREN
    chain: bool = True
    features: tuple[int, ...] = ()  # target layers it wants, known before prefill
    widths: tuple[int, ...] = ()  # shorter verified blocks worth a compilation, when drafts are often short
    vocab_size: int | None = None  # of the tokens it proposes, where it has a vocabulary of its own


class Rule(NamedTuple):
    """A verification rule.  `plan` is for one sequence: (Draft, log_p [N+1, V]) -> Plan."""

    plan: Callable
    accepts: tuple[str, ...]  # the kinds of children it is exact for
    coupled: bool = False  # the emitted token is argmax(log_p + the request's noise); the coins are ignored
    chain: bool = False  # only for chains
    top_down: bool = True  # decides from the root down, so that the ceiling of one position holds at every node it reaches
    lossless: bool = True
