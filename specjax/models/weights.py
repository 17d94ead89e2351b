"""Published tensors -> the parameter tree: which tensors every leaf is made of, and how they are laid out.

Names are those of Hugging Face without their prefix ("layers.0.self_attn.q_proj.weight"); GGUF names are translated to
them.  The tree comes from `jax.eval_shape` of the model's own init and every leaf has a recipe: nothing keeps a random
value.  Tensors are read one at a time, so that the host holds the model once plus its largest fused tensor.  For a mesh every
device's part of a leaf is read by itself: the host never holds more than such a part, and the page cache does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax import sharding
from specjax.models.transformer import TransformerConfig, language_model

Shape = tuple[int, ...]
Index = tuple[slice, ...]


class Recipe(NamedTuple):
    """How one leaf is made."""

    names: tuple[str, ...]  # published tensors
    shapes: tuple[Shape, ...]  # theirs, [out, in] for matrices
    build: Callable[..., np.ndarray]  # the tensors -> the leaf; or parts of them -> a part of it
    cut: Callable[[Index], Sequence[Index]]  # slices of the leaf, as a mesh has it -> those of each tensor that make it


def recipes(c: TransformerConfig, norm_shift: float = 0.0) -> dict[str, Recipe]:
    """Recipe of every leaf by path ("layer_0/mlp/down/kernel").  `norm_shift` is added to norms: Gemma stores w of 1 + w."""

    def norm(name: str, size: int = c.width) -> Recipe:
        return Recipe(
            (f"{name}.weight",), ((size,),), lambda w: w.astype(np.float32) + np.float32(norm_shift), lambda at: (at,)
        )

    def linear(name: str, out: int, size: int) -> Recipe:
        return Recipe((f"{name}.weight",), ((out, size),), np.transpose, lambda at: (at[::-1],))

    embedding = Recipe(("embed_tokens.weight",), ((c.vocab_size, c.width),), lambda w: w, lambda at: (at,))
    table = {"embedding": embedding, "norm/scale": norm("norm")}
    if not c.tied:
        table["head"] = linear("lm_head", c.vocab_size, c.width)
    for i in range(c.layers):
        to, at, q = f"layer_{i}", f"layers.{i}", c.heads * c.head_dim
        table[f"{to}/attention_norm/scale"] = norm(f"{at}.input_layernorm")
        table[f"{to}/attention/qkv/kernel"] = _qkv(c, at, "weight")
        if c.attention_bias:
            table[f"{to}/attention/qkv/bias"] = _qkv(c, at, "bias")
        if c.qk_norm:
            table[f"{to}/attention/q_norm/scale"] = norm(f"{at}.self_attn.q_norm", c.head_dim)
            table[f"{to}/attention/k_norm/scale"] = norm(f"{at}.self_attn.k_norm", c.head_dim)
        table[f"{to}/attention/out/kernel"] = linear(f"{at}.self_attn.o_proj", c.width, q)
        if c.post_norms:
            table[f"{to}/post_attention_norm/scale"] = norm(f"{at}.post_attention_layernorm")
            table[f"{to}/post_mlp_norm/scale"] = norm(f"{at}.post_feedforward_layernorm")
        table[f"{to}/mlp_norm/scale"] = norm(f"{at}.{'pre_feedforward' if c.post_norms else 'post_attention'}_layernorm")
        gate_up = tuple(f"{at}.mlp.{part}_proj.weight" for part in ("gate", "up"))
        gate_up_cut = lambda at: ((at[2], at[0]),) * 2  # of [D, 2, F]
        table[f"{to}/mlp/gate_up/kernel"] = Recipe(
            gate_up, ((c.hidden, c.width),) * 2, lambda *w: np.concatenate(w).T, gate_up_cut
        )
        table[f"{to}/mlp/down/kernel"] = linear(f"{at}.mlp.down_proj", c.width, c.hidden)
    return table


def _qkv(c: TransformerConfig, at: str, kind: str) -> Recipe:
    """q, k, v [heads * head_dim, *] -> [*, G * (R+2) * head_dim]: each KV head's query heads, then its k, then its v."""
    rest = (c.width,) if kind == "weight" else ()
    shapes = tuple((heads * c.head_dim, *rest) for heads in (c.heads, c.kv_heads, c.kv_heads))

    group = c.heads // c.kv_heads
    each = [n * c.head_dim for n in (group, 1, 1)]  # rows of q, k and v for one KV head

    def build(*parts: np.ndarray) -> np.ndarray:
        by_head = [x.reshape(-1, n, *x.shape[1:]) for x, n in zip(parts, each, strict=True)]
        return np.concatenate(by_head, 1).reshape(-1, *parts[0].shape[1:]).T

    def cut(index: Index) -> Sequence[Index]:
        heads = [end // sum(each) for end in (index[-1].start, index[-1].stop)]
        return [(slice(*(h * n for h in heads)), *index[:-1]) for n in each]

    return Recipe(tuple(f"{at}.self_attn.{part}_proj.{kind}" for part in "qkv"), shapes, build, cut)


def assemble(
    config: TransformerConfig,
    shapes: Mapping[str, Shape],
    read: Callable[..., np.ndarray],
    *,
    source: str | Path,
    dtype: Any = jnp.float32,
    norm_shift: float = 0.0,
    mesh: Mesh | None = None,
) -> dict:
    """Parameters made of the tensors that `read` gives by name; `shapes` lists what there is.

    With a mesh they are placed on it as `sharding.place` does, and `read` is asked for slices: `read(name, index)`.

    Kernels, embedding and head become `dtype`; norms and biases stay float32.  Raises ValueError that lists every tensor
    which is missing, left over or of another shape than the config says.
    """
    table = recipes(config, norm_shift)
    _check(table, shapes, source)

    def leaf(path, like):
        recipe = table[sharding.name_of(path)]
        value = recipe.build(*(read(name) for name in recipe.names))
        if value.shape != like.shape:
            raise AssertionError(f"recipe of {path} built {value.shape}, the model has {like.shape}: recipes() is wrong")
        return jnp.array(np.asarray(value, like.dtype))

    def spread(path, like, place):
        recipe = table[sharding.name_of(path)]

        def part(index: Index) -> np.ndarray:
            index = tuple(slice(*one.indices(n)[:2]) for one, n in zip(index, like.shape, strict=True))
            value = recipe.build(*(read(name, at) for name, at in zip(recipe.names, recipe.cut(index), strict=True)))
            return np.asarray(value, like.dtype).reshape([one.stop - one.start for one in index])

        put = lambda device, index: jax.block_until_ready(jax.device_put(part(index), device))  # one after the other
        parts = [put(*one) for one in place.addressable_devices_indices_map(like.shape).items()]
        return jax.make_array_from_single_device_arrays(like.shape, place, parts)

    like = jax.eval_shape(language_model(config, dtype=dtype).init, jax.random.key(0))
    if mesh is None:
        return jax.tree_util.tree_map_with_path(leaf, like)
    places = sharding.placement(sharding.parted(like), mesh, kv_heads=(config.kv_heads,)).shardings
    return jax.tree_util.tree_map_with_path(spread, sharding.parted(like), places)


def _check(table: Mapping[str, Recipe], shapes: Mapping[str, Shape], source: str | Path):
    wanted = {name: shape for recipe in table.values() for name, shape in zip(recipe.names, recipe.shapes, strict=True)}
    wrong = [
        f"{n} is {list(shapes[n])} but should be {list(s)}" for n, s in wanted.items() if n in shapes and tuple(shapes[n]) != s
    ]
    groups = {
        "missing": [name for name in wanted if name not in shapes],
        "not used": [name for name in shapes if name not in wanted],
        "wrong shape": wrong,
    }
    faults = [f"{len(names)} {what}: {shortened(names)}" for what, names in groups.items() if names]
    if faults:
        raise ValueError(f"{source}: tensors do not fit the config: {'; '.join(faults)}")


def shortened(names: list[str], most: int = 8) -> str:
    """Names joined by commas, the first few of them when there are many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def check_file(path: Path) -> Path:
    """The path, unless there is no such file or git left a pointer in its place: one-line errors."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    with path.open("rb") as file:
        if file.read(64).startswith(b"version https://git-lfs"):
            raise ValueError(f"{path}: a git-lfs pointer instead of the file: run `git lfs pull` in {path.parent}")
    return path
