"""Checkpoint directories: layouts that load, and faults that are named in one line (cases L09, L15, L17)."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden import make_families as golden
from safetensors.numpy import save_file

from specjax.models.huggingface import read_directory
from specjax.models.transformer import language_model

OID = "4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393"
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{OID}\nsize {{}}\n"


def make(tmp_path, name="llama", change=None, tensors=None):
    return golden.save(tmp_path / "model", {**golden.CONFIGS[name], **(change or {})}, tensors or golden.weights(name))


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def one_line(caught, *parts):
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def test_every_leaf_is_filled_from_the_file(tmp_path):
    """Of the same shapes as init, and every published number is in the tree exactly once."""
    for name in ("qwen2", "qwen3", "gemma3_new"):
        _, config, params = read_directory(make(tmp_path / name, name))
        like = jax.eval_shape(language_model(config).init, jax.random.key(0))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), like)
        shift = name == "gemma3_new"
        published = [x + np.float32(1) if shift and x.ndim == 1 else x for x in golden.weights(name).values()]
        found = np.sort(np.concatenate([np.ravel(x) for x in jax.tree.leaves(params)]))
        np.testing.assert_array_equal(found, np.sort(np.concatenate([np.ravel(x) for x in published])))


def test_shards_load_like_one_file(tmp_path):
    whole, tensors = make(tmp_path), golden.weights("llama")
    shards = tmp_path / "shards"
    shards.mkdir()
    (shards / "config.json").write_text((whole / "config.json").read_text())
    names = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({n: x for n, x in tensors.items() if names[n] == file}, shards / file)
    (shards / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    same(read_directory(whole)[2], read_directory(shards)[2])
    (shards / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        read_directory(shards)
    one_line(caught, "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bit_files(tmp_path, stored):
    """Read as they are, in float32 or bfloat16; norms and biases are float32 whatever is asked for."""
    tensors = {n: x.astype(stored) for n, x in golden.weights("qwen2").items()}
    directory = make(tmp_path, "qwen2", tensors=tensors)
    full, half = (read_directory(directory, dtype=dtype)[2] for dtype in (jnp.float32, jnp.bfloat16))
    np.testing.assert_array_equal(full["embedding"], tensors["model.embed_tokens.weight"].astype(np.float32))
    np.testing.assert_array_equal(half["embedding"], tensors["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16))
    for path, leaf in jax.tree.leaves_with_path(half):
        kind = path[-1].key
        assert leaf.dtype == (jnp.float32 if kind in ("scale", "bias") else jnp.bfloat16), path
    same(full["norm"], half["norm"])


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model."])
def test_names_as_published(tmp_path, prefix):
    """With and without a prefix; a Gemma 3 checkpoint with a vision tower beside its text model loads the text model."""
    tensors = {name.replace("model.", prefix, 1): x for name, x in golden.weights("gemma3_old").items()}
    config, extra = golden.CONFIGS["gemma3_old"], {}
    if "language" in prefix:
        config = {"model_type": "gemma3", "text_config": config, "vision_config": {}}
        top = "model." if prefix.startswith("model") else ""
        extra = {
            f"{top}vision_tower.x.weight": np.ones((2, 2), np.float32),
            f"{top}multi_modal_projector.y": np.ones(2, np.float32),
        }
    plain = make(tmp_path, "gemma3_old")
    named = golden.save(tmp_path / "named", config, {**tensors, **extra})
    same(read_directory(plain)[2], read_directory(named)[2])


def test_legacy_buffers_are_ignored(tmp_path):
    buffers = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.1.attn.masked_bias", "model.layers.1.attn.bias")
    tensors = golden.weights("llama") | {name: np.ones(4, np.float32) for name in buffers}
    same(read_directory(make(tmp_path, tensors=tensors))[2], read_directory(make(tmp_path / "plain"))[2])


class TestL15:
    """Tied embeddings: one tensor serves as both, whichever of the two the file holds."""

    tensors = golden.weights("llama3")
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"

    def read(self, tmp_path, present):
        rest = {n: x for n, x in self.tensors.items() if n != self.embedding}
        return read_directory(make(tmp_path, "llama3", tensors=rest | {n: self.tensors[self.embedding] for n in present}))

    def test_either_or_both_give_the_same_model(self, tmp_path):
        trees = [
            self.read(tmp_path / str(i), p) for i, p in enumerate([[self.embedding], [self.head], [self.embedding, self.head]])
        ]
        for _, config, params in trees:
            assert config.tied and "head" not in params
            same(params, trees[0][2])

    def test_two_different_tensors_are_not_tied(self, tmp_path):
        tensors = self.tensors | {self.head: 2 * self.tensors[self.embedding]}
        _, config, params = read_directory(make(tmp_path, "llama3", tensors=tensors))
        assert not config.tied
        np.testing.assert_array_equal(params["head"], 2 * self.tensors[self.embedding].T)

    def test_a_separate_head_that_is_absent_is_an_error(self, tmp_path):
        tensors = {n: x for n, x in golden.weights("llama").items() if n != self.head}
        with pytest.raises(ValueError) as caught:
            read_directory(make(tmp_path, tensors=tensors))
        one_line(caught, "1 missing: lm_head.weight")


def test_all_faults_of_the_tensors_in_one_error(tmp_path):
    tensors = golden.weights("llama")
    del tensors["model.layers.0.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.1.self_attn.k_proj.weight"] = np.ones((32, 32), np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(32, np.float32)
    with pytest.raises(ValueError) as caught:
        read_directory(make(tmp_path, tensors=tensors))
    one_line(
        caught,
        "2 missing: norm.weight, layers.0.mlp.up_proj.weight",
        "1 not used: layers.0.self_attn.q_proj.bias",
        "layers.1.self_attn.k_proj.weight is [32, 32] but should be [16, 32]",
    )


def test_long_lists_of_names_are_shortened(tmp_path):
    with pytest.raises(ValueError) as caught:
        read_directory(make(tmp_path, change={"num_hidden_layers": 6}))
    one_line(caught, "36 missing", "and 28 more")


def test_the_same_tensor_under_two_names_is_an_error(tmp_path):
    tensors = golden.weights("llama") | {"norm.weight": np.ones(32, np.float32)}
    with pytest.raises(ValueError) as caught:
        read_directory(make(tmp_path, tensors=tensors))
    one_line(caught, "norm.weight is there twice")


class TestL17:
    """Files that are not what they seem."""

    @pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
    def test_git_lfs_pointer(self, tmp_path, name):
        directory = make(tmp_path)
        (directory / name).write_text(POINTER.format(4_976_698_672))
        with pytest.raises(ValueError) as caught:
            read_directory(directory)
        one_line(caught, "git-lfs pointer", "git lfs pull", name)

    def test_git_lfs_pointer_among_shards(self, tmp_path):
        directory = make(tmp_path)
        (directory / "model.safetensors").rename(directory / "a.safetensors")
        (directory / "b.safetensors").write_text(POINTER.format(1))
        index = {"weight_map": {"model.norm.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match="b.safetensors: a git-lfs pointer.*git lfs pull"):
            read_directory(directory)

    @pytest.mark.parametrize("keep", [0, 5, 200, -1])
    def test_truncated(self, tmp_path, keep):
        file = make(tmp_path) / "model.safetensors"
        file.write_bytes(file.read_bytes()[:keep])
        with pytest.raises(ValueError) as caught:
            read_directory(file.parent)
        one_line(caught, "truncated or damaged safetensors", "model.safetensors")

    @pytest.mark.parametrize("declared", [True, False])
    def test_int8(self, tmp_path, declared):
        key = "model.layers.0.self_attn.q_proj"
        tensors = golden.weights("llama") | {f"{key}.weight": np.ones((32, 32), np.int8), f"{key}.SCB": np.ones(32, np.float32)}
        change = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}} if declared else {}
        with pytest.raises(ValueError) as caught:
            read_directory(make(tmp_path, change=change, tensors=tensors))
        one_line(caught, *(["'bitsandbytes'"] if declared else ["int8 (bitsandbytes .SCB)", f"{key}.weight (I8)"]))

    def test_torch_files_only(self, tmp_path):
        directory = make(tmp_path)
        (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
        with pytest.raises(FileNotFoundError) as caught:
            read_directory(directory)
        one_line(caught, "pytorch_model.bin", "convert to safetensors")

    def test_no_config(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="config.json: no such file"):
            read_directory(tmp_path)
