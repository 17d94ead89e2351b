"""What tests of exact laws share: random context-dependent laws with zeros, and every way of drawing children."""

import numpy as np

from specjax.lossless import law

V = 4
TOLERANCE = 1e-12


def table(seed, zeros):
    """A context-dependent law, some entries of it zero."""
    rows = {}

    def p(prefix):
        if prefix not in rows:
            rng = np.random.default_rng([seed, *[x + 1 for x in prefix]])
            w = rng.dirichlet(np.full(V, 0.6))
            if zeros and rng.random() < 0.5:
                w[rng.integers(V)] = 0
            rows[prefix] = w / w.sum()
        return rows[prefix]

    return p


def constant(*p):
    return lambda prefix, siblings=(): np.asarray(p, float)


# (q) -> the law of a node, given the prefix at its parent and its earlier siblings there.


def iid(q):
    return lambda prefix, siblings: q(prefix)


def independent(q):
    """The second sibling comes from another drafter."""
    other = table(77, True)
    return lambda prefix, siblings: (other if siblings else q)(prefix)


def without_replacement(q):
    def draw(prefix, siblings):
        w = np.array(q(prefix))
        w[list(siblings)] = 0
        return w / w.sum()

    return draw


def ranked(q, rank):
    return np.eye(len(q))[np.argsort(-q, kind="stable")[rank]]


def point(q):
    return lambda prefix, siblings: ranked(q(prefix), len(siblings))


def sampled_then_top(q):
    """The first sibling is drawn from all but the top one, the second is the top one."""

    def draw(prefix, siblings):
        top = ranked(q(prefix), 0)
        rest = np.where(top > 0, 0, q(prefix))
        return rest / rest.sum() if not siblings else top

    return draw


DRAWN = {
    "point": point,
    "iid": iid,
    "independent": independent,
    "without_replacement": without_replacement,
    "sampled_then_top": sampled_then_top,
}


def distance(rule, parents, q, *, p=None, point=False):
    """Total variation between the law of a round and the target's, and the expected number of accepted tokens."""
    p = p or table(1, zeros=True)
    result = law.exact(rule, np.asarray(parents, np.int32), p, q, V, point=point)
    return np.abs(result.joint - law.truth(p, V, result.joint.ndim)).sum() / 2, result.accepted
