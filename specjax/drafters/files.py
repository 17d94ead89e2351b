"""A drafter on disk: a directory of drafter.safetensors and config.json, which names the method and its static options.

Parameters are a tree of dictionaries; a tensor's name is its path ("block/kernel").

Nothing that is missing is ever made up: a drafter of random weights drafts, and is right at the rate of chance, which nobody
would notice but by its tau.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specjax.drafters import facts
from specjax.drafters.precision import as_dtype, restored
from specjax.json_text import read_json
from specjax.types import LanguageModel

WEIGHTS = "drafter.safetensors"


def save(directory: str | Path, params: Mapping[str, Any], config: Mapping[str, Any], *, dtype: Any = None) -> None:
    """Write a drafter's parameters and its config.

    Args:
      directory: where; made if need be.
      params: a tree of dictionaries.
      config: must name the "method".
      dtype: of the matrices, a float or int8; as they are unless given.

    Raises:
      ValueError: no method, or a dtype that is neither.
    """
    if "method" not in config:
        raise ValueError(f"config {sorted(config)} names no method: add method=..., a key of METHODS")
    tensors = {name: np.asarray(x) for name, x in flat(params).items()}
    if dtype is not None:
        tensors = as_dtype(tensors, jnp.dtype(dtype))
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: np.array(x, order="C") for name, x in tensors.items()}, directory / WEIGHTS)
    (directory / WEIGHTS).chmod(0o644)  # safetensors writes for its owner alone; a package is for everyone
    (directory / "config.json").write_text(lines(config), "utf-8")


def lines(fields: Mapping[str, Any]) -> str:
    """JSON with a line a field: a draft vocabulary has thousands of ids.

    >>> print(lines({"method": "mtp", "vocabulary": (1, 5)}), end="")
    {
     "method": "mtp",
     "vocabulary": [1, 5]
    }
    """
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(x)}" for name, x in fields.items()) + "\n}\n"


def read_config(weights: str | Path | None, method: str, target: LanguageModel | None = None) -> dict:
    """config.json of a saved drafter of `method`, for `target` where that is known.

    Raises:
      ValueError: no weights are given, they are another method's or another target's, or `facts.check` finds a fault.
      FileNotFoundError: there is no such directory.
    """
    path = given(weights, method)
    file = path / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{path}: no config.json: give the directory that drafters.files.save wrote")
    config = facts.check(file, read_json(file, "save the drafter again"), target)
    if config.get("method") != method:
        raise ValueError(f"{path} holds a drafter of method {config.get('method')!r} != {method!r}: load it as what it is")
    return config


def given(weights: str | Path | None, method: str) -> Path:
    """The path of the weights; ValueError, which says what to train, where there is none."""
    if weights is None:
        home = "eagle" if "eagle" in method else "dflash" if method in ("dspark", "dflash2") else method
        raise ValueError(
            f"method {method!r} needs weights made for this target: train specjax.drafters.{home}.recipe and give weights="
            "DIRECTORY"
        )
    return Path(weights)


def check_depth(num_draft: int, heads: int) -> None:
    """ValueError where more tokens are asked for than there are heads."""
    if num_draft > heads:
        raise ValueError(f"num_draft {num_draft} > {heads} heads: draft at most {heads} tokens, or train more heads")


def shapes(init: Callable) -> Any:
    """Shapes of what `init(key)` makes, without making it."""
    return jax.eval_shape(lambda data: init(jax.random.wrap_key_data(data)), jax.ShapeDtypeStruct((2,), jnp.uint32))


def read_params(weights: str | Path | None, like: Callable[[Mapping[str, tuple[int, ...]]], Any]) -> Any:
    """The parameters of a saved drafter, in the dtypes of the file; matrices that it has in 8 bits are float32.

    Args:
      weights: the directory.
      like: (shape of each tensor there is) -> a tree of the paths and shapes there should be.

    Raises:
      ValueError: tensors that are missing, left over or of another shape, or a damaged file.
    """
    path = Path(weights or ".") / WEIGHTS
    tensors = restored(path, read_tensors(path))
    tree = like({name: x.shape for name, x in tensors.items()})
    wanted = flat(tree)
    check_tensors(path, {name: x.shape for name, x in wanted.items()}, tensors)
    return jax.tree.unflatten(jax.tree.structure(tree), [jnp.asarray(tensors[name]) for name in wanted])


def check_tensors(source: str | Path, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, np.ndarray]) -> None:
    """ValueError that lists the tensors which are missing, those that nobody would read, and those of another shape."""
    other = {n: (found[n].shape, shape) for n, shape in wanted.items() if n in found and found[n].shape != tuple(shape)}
    groups = {
        "missing": sorted(wanted.keys() - found.keys()),
        "not used": sorted(found.keys() - wanted.keys()),
        "of another shape": [f"{n} is {list(has)} but should be {list(shape)}" for n, (has, shape) in sorted(other.items())],
    }
    faults = [f"{len(n)} {what}: {', '.join(n[:8])}{', ...' if len(n) > 8 else ''}" for what, n in groups.items() if n]
    if not wanted or faults:
        raise ValueError(f"{source}: tensors do not fit: {'; '.join(faults)}: use weights made for this method and target")


def read_tensors(path: Path, keep: Callable[[str], bool] = lambda name: True) -> dict[str, np.ndarray]:
    """Tensors by name, of those that `keep` wants, from .safetensors, or from .pt and .bin where torch is installed."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    if path.suffix in (".pt", ".bin", ".pth"):
        return _read_torch(path, keep)
    try:
        with safe_open(path, "np") as file:
            return {name: file.get_tensor(name) for name in file.keys() if keep(name)}  # noqa: SIM118 - it is no mapping
    except SafetensorError as error:
        raise ValueError(f"{path}: truncated or damaged safetensors ({error}): download it again") from None


def _read_torch(path: Path, keep: Callable[[str], bool]) -> dict[str, np.ndarray]:
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(f"{path} is a PyTorch file, and torch is not installed: pip install 'specjax[torch]'") from None
    tensors = torch.load(path, map_location="cpu", weights_only=True)  # never unpickle code
    return {name: x.to(torch.float32).numpy() for name, x in tensors.items() if keep(name)}


def flat(tree: Any) -> dict[str, Any]:
    """Leaves by path, in the order of `jax.tree.leaves`."""
    return {"/".join(key.key for key in path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


# Multi-token-prediction modules as they are published: beside the target, in its own files.


class Naming(NamedTuple):
    """How one publisher names a module."""

    prefix: str  # pattern of what stands before a module's names; {last} is the number of the target's layers
    embed_norm: str
    hidden_norm: str
    proj: str
    norm: str
    layer: str = ""  # what stands before the names of the layer
    copies: tuple[str, ...] = ()  # of the target's embedding and head: the target's own are used
    shift: float = 0.0  # added to norms: 1 where w of 1 + w is stored
    embedding_first: bool = True


NAMINGS = {
    "MiMo": Naming(
        r"(model\.)?mtp_layers\.0\.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm",
        embedding_first=False,
    ),
    "DeepSeek-V3": Naming(
        r"(model\.)?layers\.{last}\.", "enorm", "hnorm", "eh_proj", "shared_head.norm",
        copies=("embed_tokens.weight", "shared_head.head.weight"),
    ),
    "Qwen3-Next": Naming(
        r"mtp\.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", layer="layers.0.", shift=1.0,
    ),
}  # fmt: skip


def find_naming(path: Path, layers: int) -> tuple[Naming, dict[str, np.ndarray]] | None:
    """The naming of the published module in the directory `path` and its tensors by their names within it; None: no such."""
    for naming in NAMINGS.values():
        prefix = re.compile(naming.prefix.replace("{last}", str(layers)))
        found: dict[str, np.ndarray] = {}
        for file in sorted(path.glob("*.safetensors")) if path.is_dir() else ():
            own = read_tensors(file, lambda name, prefix=prefix: prefix.match(name) is not None)
            found |= {prefix.sub("", name, count=1): x for name, x in own.items()}
        if f"{naming.proj}.weight" in found:
            return naming, {name: x for name, x in found.items() if name not in naming.copies}
    return None


def mtp_shapes(naming: Naming, c: Any) -> dict[str, tuple[int, ...]]:
    """Shapes that the tensors of a module of config `c` have, [out, in] for matrices."""
    at, attention, q = naming.layer, f"{naming.layer}self_attn", c.heads * c.head_dim
    sizes = {"q": q, "k": c.kv_heads * c.head_dim, "v": c.kv_heads * c.head_dim}
    wanted = {f"{name}.weight": (c.width,) for name in (naming.embed_norm, naming.hidden_norm, naming.norm)}
    wanted |= {f"{naming.proj}.weight": (c.width, 2 * c.width)}
    wanted |= {f"{at}{name}.weight": (c.width,) for name in ("input_layernorm", "post_attention_layernorm")}
    wanted |= {f"{attention}.{n}_proj.weight": (size, c.width) for n, size in sizes.items()}
    wanted |= {f"{attention}.o_proj.weight": (c.width, q)}
    wanted |= {f"{at}mlp.{name}_proj.weight": (c.hidden, c.width) for name in ("gate", "up")}
    wanted |= {f"{at}mlp.down_proj.weight": (c.width, c.hidden)}
    if c.attention_bias:
        wanted |= {f"{attention}.{n}_proj.bias": (size,) for n, size in sizes.items()}
    if c.qk_norm:
        wanted |= {f"{attention}.{name}.weight": (c.head_dim,) for name in ("q_norm", "k_norm")}
    return wanted


def mtp_params(path: Path, naming: Naming, tensors: Mapping[str, np.ndarray], c: Any) -> dict[str, Any]:
    """Parameters of a module of config `c` from published tensors.

    Raises:
      ValueError: tensors that are missing, or that nobody would read: latent attention, gates, experts.
    """
    at, attention, heads = naming.layer, f"{naming.layer}self_attn", "qkv"
    check_tensors(path, mtp_shapes(naming, c), tensors)
    norm = lambda name: {"scale": jnp.asarray(tensors[f"{name}.weight"].astype(np.float32) + np.float32(naming.shift))}
    linear = lambda *names: {"kernel": jnp.asarray(np.concatenate([tensors[f"{name}.weight"] for name in names]).T)}

    def fused(kind: str) -> jax.Array:  # each KV head's query heads, then its k, then its v
        parts = [tensors[f"{attention}.{n}_proj.{kind}"] for n in heads]
        by_head = [x.reshape(c.kv_heads, -1, c.head_dim, *x.shape[1:]) for x in parts]
        return jnp.asarray(np.concatenate(by_head, 1).reshape(-1, *parts[0].shape[1:]).T)

    qkv = {"kernel": fused("weight"), **({"bias": fused("bias").astype(jnp.float32)} if c.attention_bias else {})}
    normed = {name: norm(f"{attention}.{name}") for name in ("q_norm", "k_norm")} if c.qk_norm else {}
    return {
        "embed_norm": norm(naming.embed_norm), "hidden_norm": norm(naming.hidden_norm), "norm": norm(naming.norm),
        "proj": linear(naming.proj),
        "attention_norm": norm(f"{at}input_layernorm"), "mlp_norm": norm(f"{at}post_attention_layernorm"),
        "attention": {"qkv": qkv, "out": linear(f"{attention}.o_proj"), **normed},
        "mlp": {"gate_up": linear(f"{at}mlp.gate_proj", f"{at}mlp.up_proj"), "down": linear(f"{at}mlp.down_proj")},
    }  # fmt: skip
