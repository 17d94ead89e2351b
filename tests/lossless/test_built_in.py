"""Built-in subjects of methods that are trained: the same heads each time, right sometimes, or those of a directory."""

import jax
import numpy as np
import pytest

from specjax.drafters import files
from specjax.lossless.built_in import HEADS, built_in, save_heads
from specjax.lossless.subject import decoded, without_drafts
from specjax.sampling import SamplingParams


@pytest.mark.parametrize("method", HEADS)
def test_heads_that_nobody_trained(method):
    """Some drafts are accepted and some are not, and greedily the tokens are plain decoding's."""
    subject = built_in(method, sampling=SamplingParams())
    again = built_in(method, sampling=SamplingParams())
    for a, b in zip(jax.tree.leaves(subject.params.drafter), jax.tree.leaves(again.params.drafter), strict=True):
        np.testing.assert_array_equal(a, b)
    assert subject.names.target == "tiny" and subject.drafter is again.drafter and subject.drafter.depth == 3
    rows = subject.prompts * 4
    (state, info), (plain, _) = (decoded(s, rows, key=jax.random.key(0), new=12) for s in (subject, without_drafts(subject)))
    length = int(state.length.max())
    np.testing.assert_array_equal(np.asarray(state.tokens)[:, :length], np.asarray(plain.tokens)[:, :length])
    assert 0 < np.asarray(info.accepted).sum() < np.asarray(info.drafted).sum()


def test_heads_of_a_directory(tmp_path):
    """Loaded as users load them; with the children asked for, and fewer drafts."""
    config = files.read_config(save_heads(str(tmp_path), "medusa", 3), "medusa")
    tensors = {name: 2 * x for name, x in files.read_tensors(tmp_path / files.WEIGHTS).items()}
    files.save(tmp_path, tensors, config)
    subject = built_in("medusa", weights=str(tmp_path), children="iid", num_draft=2)
    np.testing.assert_array_equal(subject.params.drafter["kernel"], tensors["kernel"][:2])
    assert (subject.drafter.children, subject.drafter.depth, subject.names.rule) == ("iid", 2, "recursive")
    with pytest.raises(ValueError, match="num_draft 4 > 3 heads"):
        built_in("medusa", weights=str(tmp_path), num_draft=4)
    with pytest.raises(ValueError, match="of method 'medusa' != 'hydra'"):
        built_in("hydra", weights=str(tmp_path))
