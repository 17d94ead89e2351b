"""No rule holds temporaries that grow with the square of the draft, or more rows of V than the block has."""

import jax
import jax.numpy as jnp
import pytest

from specjax import trees
from specjax.types import Draft
from specjax.verify import RULES
from specjax.verify.draw import draw

VOCAB, SIZES = 4096, (8, 16, 32)
LIGHT = ("rejection", "target_match", "threshold", "block", "k_seq", "recursive", "traversal", "greedy_multi_draft")


def rows_held(rule, num_nodes):
    """Temporaries of a compiled batch of two, in rows of V float32 a sequence."""
    parents = jnp.asarray(trees.chain(num_nodes) if rule.chain else trees.k_ary((4, 7))[:num_nodes])
    depth = num_nodes if rule.chain else 2

    def one(key_accept, key_emit, noise, tokens, log_q, log_p):
        return draw(rule, key_accept, key_emit, noise, Draft(tokens, parents, log_q), log_p, depth)

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2))
    floats = lambda rows: jax.ShapeDtypeStruct((2, rows, VOCAB), jnp.float32)
    noise = floats(depth + 1) if rule.coupled else None
    tokens = jax.ShapeDtypeStruct((2, num_nodes), jnp.int32)
    program = jax.jit(jax.vmap(one)).lower(keys, keys, noise, tokens, floats(num_nodes), floats(num_nodes + 1)).compile()
    return program.memory_analysis().temp_size_in_bytes / (2 * 4 * VOCAB)


@pytest.mark.parametrize("name", RULES)
def test_temporaries_grow_no_faster_than_the_draft(name):
    small, middle, large = (rows_held(RULES[name], n) for n in SIZES)
    assert large < 3 * max(middle, 1) and middle < 3 * max(small, 1), (small, middle, large)
    assert large < (12 if name in LIGHT else 6 * SIZES[-1]), large
