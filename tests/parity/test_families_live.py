"""Every family against transformers, live: the goldens' checkpoints, checkpoints that transformers itself writes, and GGUF.

pip install -e ".[test,parity]" && pytest -m parity tests/parity/test_families_live.py        (3 minutes)
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import make_families as golden
from parity.agreement import close

from specjax.models.huggingface import read_directory
from specjax.models.transformer import language_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]  # the peers' own warnings are not ours

CHUNKS = (5, 1, 7, 1, 6)


def ours(directory, tokens, chunks):
    """Logits, hidden and features of a directory, over the cache in chunks."""
    _, config, params = read_directory(directory)
    model = language_model(config)
    run, cache, parts, at = jax.jit(model.apply, static_argnames="features"), model.init_cache(len(tokens), 20), [], 0
    for size in chunks:
        out, cache = run(params, jnp.asarray(tokens[:, at : at + size]), cache, features=tuple(range(config.layers)))
        cache, at = cache._replace(length=cache.length + size), at + size
        parts.append([np.asarray(x) for x in out])
    return [np.concatenate([part[i] for part in parts], 1) for i in range(3)]


def compare(theirs, got, record):
    for kind, a, b in zip(("logits", "hidden", "features"), theirs, got, strict=True):
        close(kind, a, b, record)


@pytest.mark.parametrize("chunks", [(20,), CHUNKS], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", golden.CONFIGS)
def test_checkpoints_of_the_goldens(tmp_path, name, chunks, record_property):
    directory = golden.save(tmp_path, golden.CONFIGS[name], golden.weights(name))
    tokens = golden.batch()
    compare(golden.transformers_results(directory, tokens), ours(directory, tokens, chunks), record_property)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", golden.CONFIGS)
def test_checkpoints_written_by_transformers(tmp_path, name, dtype, record_property):
    """Saved by transformers 5 in shards (rope_parameters, its own names), read by both in float32."""
    directory = golden.save(tmp_path / "a", golden.CONFIGS[name], golden.weights(name))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    model.save_pretrained(tmp_path / "b", max_shard_size="20KB")
    assert (tmp_path / "b" / "model.safetensors.index.json").exists()
    tokens = golden.batch()
    compare(golden.transformers_results(tmp_path / "b", tokens), ours(tmp_path / "b", tokens, CHUNKS), record_property)


def test_text_model_of_a_multimodal_gemma3(tmp_path, record_property):
    """Gemma3ForConditionalGeneration with a tiny vision tower: we read its text model."""
    text = {key: x for key, x in golden.CONFIGS["gemma3_new"].items() if key != "hidden_act"}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    config = transformers.Gemma3Config(text_config=text, vision_config={**vision, "patch_size": 14}, mm_tokens_per_image=4)
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    tokens, layers = golden.batch(), model.model.language_model.layers
    compare(golden.model_results(model, layers, tokens), ours(tmp_path, tokens, CHUNKS), record_property)
