"""The demo model, end to end: its greedy tokens are transformers', with and without drafts."""

import json
from pathlib import Path

import jax
import pytest

import specjax

pytestmark = pytest.mark.model

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "smollm2_greedy.json").read_text())
MARGIN = 1e-3  # logits this close are told apart by rounding, not by the model


@pytest.fixture(scope="module")
def lm():
    return specjax.load("smollm2-135m")


def differs(tokens, row):
    """The first place where tokens differ from the golden ones although the margin there is no rounding matter."""
    for mine, theirs, margin in zip(tokens, row["tokens"], row["margins"], strict=False):
        if mine != theirs:
            return margin >= MARGIN
    return len(tokens) != len(row["tokens"])


@pytest.mark.parametrize("method", [pytest.param("plain", marks=pytest.mark.slow), "ngram"])
def test_greedy_tokens_equal_those_of_transformers(lm, method):
    drafter = specjax.load_drafter(method, lm, num_draft=4)
    prompts = [row["prompt"] for row in GOLDEN]
    out = specjax.generate(lm, drafter, prompts, key=jax.random.key(0), max_new_tokens=64)
    assert [row["id"] for row, o in zip(GOLDEN, out, strict=True) if differs(o.tokens, row)] == []
    assert sum(len(o.tokens) for o in out) > 500


def test_a_changed_token_would_be_seen():
    row = GOLDEN[0]
    assert max(row["margins"]) > MARGIN
    place = row["margins"].index(max(row["margins"]))
    tokens = [*row["tokens"][:place], row["tokens"][place] + 1, *row["tokens"][place + 1 :]]
    assert differs(tokens, row) and not differs(row["tokens"], row)
