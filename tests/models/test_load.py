"""One door to every model: `load` by directory, file and name, and the demo model against transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from golden import make_families as golden

from specjax.models import fetch
from specjax.models.load import LM, load


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = golden.save(tmp_path_factory.mktemp("load") / "model", golden.CONFIGS["llama"], golden.weights("llama"))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(path / "tokenizer.json"))
    return path


def test_directory(directory):
    lm = load(directory)
    assert isinstance(lm, LM) and lm.model.vocab_size == lm.config.vocab_size == 61
    assert lm.tokenizer.encode("w5 w7") == [5, 7] and lm.model.max_length == 64
    assert load(str(directory), max_length=16).model.max_length == 16


def test_bfloat16_weights_give_nearly_the_same_logits(directory):
    tokens = jnp.asarray(golden.batch())
    outputs = []
    for dtype in ("float32", "bfloat16"):
        lm = load(directory, weights_dtype=dtype)
        assert lm.params["embedding"].dtype == dtype and lm.params["norm"]["scale"].dtype == "float32"
        outputs.append(np.asarray(jax.jit(lm.model.apply)(lm.params, tokens, lm.model.init_cache(2, 20))[0].logits))
    difference = np.abs(outputs[0] - outputs[1]).max()
    assert 1e-4 < difference < 0.1


@pytest.mark.parametrize("name", ["smollm", "no/such/thing", "./org", "model.gguf", "org/model.gguf"])
def test_unknown_names_list_what_is_possible(name):
    with pytest.raises(ValueError, match="no model '.*smollm2-135m.*directory.*gguf.*org/name") as caught:
        load(name)
    assert "\n" not in str(caught.value)


def test_hub_ids_go_to_the_hub(directory, monkeypatch):
    asked = []
    monkeypatch.setattr(fetch, "hub_snapshot", lambda name: asked.append(name) or directory)
    assert load("org/model-1.5B").config.vocab_size == 61 and asked == ["org/model-1.5B"]


def test_bad_options_are_named(directory):
    with pytest.raises(ValueError, match="weights_dtype 'float16' is not known: use one of float32, bfloat16"):
        load(directory, weights_dtype="float16")
    with pytest.raises(ValueError, match="max_length 65 does not lie in 2 to 64"):
        load(directory, max_length=65)


# transformers 5.24, float32, the same GGUF file: the five largest logits after "The capital of France is"
PROMPT, TOP = "The capital of France is", {7042: 17.37127, 260: 14.888592, 4528: 13.244982, 2250: 13.009466, 1315: 12.951525}


@pytest.mark.model
def test_demo_model_equals_transformers():
    lm = load("smollm2-135m")
    tokens = jnp.asarray([lm.tokenizer.encode(PROMPT)], jnp.int32)
    logits = jax.jit(lm.model.apply)(lm.params, tokens, lm.model.init_cache(1, 16))[0].logits[0, -1]
    values, ids = jax.lax.top_k(logits, 5)
    assert ids.tolist() == list(TOP)
    np.testing.assert_allclose(values, list(TOP.values()), atol=1e-3)  # the smallest gap is 0.058
