"""What tests of exact laws share: random context-dependent laws with zeros, and every way of drawing children."""

import numpy as np

from specjax.lossless import law
from specjax.lossless.drawn import random_law

V = 4
TOLERANCE = 1e-12


def table(seed, zeros):
    """A context-dependent law, some entries of it zero."""
    return random_law(seed, V, zeros=zeros)


def constant(*p):
    return lambda prefix, siblings=(): np.asarray(p, float)


def distance(rule, parents, q, *, p=None, point=False):
    """Total variation between the law of a round and the target's, and the expected number of accepted tokens."""
    p = p or table(1, zeros=True)
    result = law.exact(rule, np.asarray(parents, np.int32), p, q, V, point=point)
    return np.abs(result.joint - law.truth(p, V, result.joint.ndim)).sum() / 2, result.accepted
