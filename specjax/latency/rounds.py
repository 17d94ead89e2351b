"""What a round costs by the roofline: the drafter's passes, the target's pass, and the tokens that come of it.

Speculation spends more FLOPs per emitted token, not fewer: rejected tokens are paid for, and so is the drafter.  What it
saves is memory traffic, as long as that is the bound.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from specjax.latency.cost_table import CostTable, cost_table
from specjax.latency.hardware import Hardware
from specjax.latency.roofline import BFLOAT16, Load, Placement, Shape, Work, kv_numbers, seconds, turning_tokens, work


class Drafting(NamedTuple):
    """What a drafter runs in a round: `passes` one after the other, each over `tokens` per request."""

    shape: Shape
    passes: int
    tokens: float = 1.0
    scored: float = 1.0  # rows of logits per request and pass


class Round(NamedTuple):
    """A round, on one chip of those that share the model; tokens are those of all requests."""

    draft: Work  # of all its passes
    verify: Work
    draft_seconds: float
    verify_seconds: float
    tokens: float  # emitted by the batch

    @property
    def seconds(self) -> float:
        """T_draft + T_verify."""
        return self.draft_seconds + self.verify_seconds

    @property
    def flops_per_token(self) -> float:
        """Arithmetic for each token that is emitted; what went into rejected ones is in it."""
        return (self.draft.flops + self.verify.flops) / self.tokens

    @property
    def bytes_per_token(self) -> float:
        """Memory traffic for each token that is emitted."""
        return (self.draft.bytes + self.verify.bytes) / self.tokens

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the batch."""
        return self.tokens / self.seconds


def chain(shape: Shape, num_draft: int) -> Drafting:
    """A model of its own, or one layer on the target's features: K passes over one token."""
    return Drafting(shape, num_draft)


def one_layer(target: Shape, num_draft: int, *, features: int = 1, vocab_size: int | None = None) -> Drafting:
    """EAGLE or MTP: one layer like the target's over (embedding, features), K passes; EAGLE-3 takes 3 features."""
    projection = (features + 1) * target.width**2
    vocab = target.vocab_size if vocab_size is None else vocab_size
    return chain(target._replace(layers=1, sliding=(), window=None, extra=projection, vocab_size=vocab), num_draft)


def block(target: Shape, num_draft: int, *, layers: int = 5, features: int = 5) -> Drafting:
    """DFlash, DSpark: one pass of a few layers over the last token and K masks, on `features` projected once a token."""
    shape = target._replace(layers=layers, sliding=(), window=None, extra=features * target.width**2)
    return Drafting(shape, 1, num_draft + 1, num_draft)


def heads(target: Shape, num_draft: int) -> Drafting:
    """Medusa: K products [D, D] on one hidden state, then K rows of the target's head."""
    return Drafting(target._replace(layers=0, sliding=(), window=None, extra=num_draft * target.width**2), 1, 1, num_draft)


DRAFTINGS: dict[str, Callable[[Shape, int], Drafting | None]] = {
    "ngram": lambda target, num_draft: None,
    "blockwise": heads,
    "medusa": heads,
    "hydra": heads,
    "mtp": one_layer,
    "eagle1": one_layer,
    "eagle3": functools.partial(one_layer, features=3),
    "eagle3.1": functools.partial(one_layer, features=3),
    "dflash": block,
    "dspark": block,
    "dflash2": block,
}
"""What methods run, as published: (target, K) -> Drafting; None is nothing worth counting."""


def whole_round(
    target: Shape, drafting: Drafting | None, hardware: Hardware, load: Load, *, num_draft: float, tau: float,
    placed: Placement = BFLOAT16, overhead: float = 0.0,
) -> Round:  # fmt: skip
    """A round in which every request drafts and verifies `num_draft` tokens and emits `tau`.  Plain decoding is 0 and 1.

    `drafting` None costs nothing, as n-gram lookup does.  The drafter is held as the target is.
    """
    nothing = Work(0, 0, 0, 0, 0)
    verify = work(target, load, num_draft + 1, placed)
    draft, draft_seconds = nothing, 0.0
    if drafting is not None and drafting.passes:
        one = work(drafting.shape, load, drafting.tokens, placed, scored=drafting.scored)
        draft = Work(*(drafting.passes * x for x in one))
        draft_seconds = drafting.passes * seconds(one, hardware, overhead)
    return Round(draft, verify, draft_seconds, seconds(verify, hardware, overhead), load.batch * tau)


def roofline_table(
    target: Shape, drafting: Drafting | None, hardware: Hardware, *, most_requests: int, most_draft: int,
    placed: Placement = BFLOAT16, overhead: float = 0.0,
) -> CostTable:  # fmt: skip
    """The table a schedule reads.  What caches add is summed, not hidden behind compute: an upper bound of `whole_round`."""
    most = most_requests * (most_draft + 1)
    tokens = sorted({*(1 << i for i in range(most.bit_length())), max(most, 2), _turn(target, hardware, placed, most)})
    requests = sorted({*(1 << i for i in range(most_requests.bit_length())), most_requests})

    def drafted(batch: int) -> float:
        rounds = whole_round(target, drafting, hardware, Load(batch, 0), num_draft=0, tau=1, placed=placed, overhead=overhead)
        return rounds.draft_seconds

    slot = kv_numbers(target, 1) * placed.kv_bytes / min(placed.parallel, target.kv_heads)
    if drafting is not None:
        one = kv_numbers(drafting.shape, 1) * placed.kv_bytes / min(placed.parallel, drafting.shape.kv_heads)
        slot += drafting.passes * one
    return cost_table(
        tokens,
        [seconds(work(target, Load(t, 0), 1, placed), hardware, overhead) for t in tokens],
        requests=requests,
        draft=[drafted(r) for r in requests],
        per_slot=slot / hardware.bandwidth,
    )


def _turn(shape: Shape, hardware: Hardware, placed: Placement, most: int) -> int:
    """The knee of the table, where it lies inside it."""
    turn = turning_tokens(shape, hardware, placed)
    return turn if 0 < turn < most else 1
