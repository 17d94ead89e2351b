"""One door to every model: a name, a Hugging Face directory, a .gguf file, or a hub id."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from specjax import sharding, text, zoo
from specjax.models import fetch, huggingface
from specjax.models.families import config_from_gguf, config_from_hf
from specjax.models.gguf import open_gguf, read_gguf
from specjax.models.transformer import TransformerConfig, language_model
from specjax.types import LanguageModel

NAMES: dict[str, Callable[[fetch.Progress | None], Path]] = {
    "smollm2-135m": fetch.demo_model_path,
    "testbed": lambda progress: zoo.path("testbed"),
}
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class LM(NamedTuple):
    """A model with everything that text needs."""

    model: LanguageModel
    params: Any
    tokenizer: text.Tokenizer
    config: TransformerConfig
    name: str = ""  # a key of NAMES, if it was loaded by one: drafters are packaged for names
    notes: tuple[str, ...] = ()  # what a mesh could not divide, one line each


def load(
    name_or_path: str | Path,
    *,
    weights_dtype: str = "float32",
    max_length: int | None = None,
    mesh: str | Mesh | None = None,
    progress: fetch.Progress | None = None,
) -> LM:
    """A model by name ("smollm2-135m"), Hugging Face directory, .gguf file, or hub id ("org/name").

    weights_dtype "bfloat16" stores kernels, embedding and head in bfloat16 (norms and biases stay float32): half the
    memory, and another target with its own exact law.  `max_length` lowers the longest context, in tokens.  `mesh`, such as
    "data=2,model=4", spreads it over all devices (`sharding.parse_mesh`); `notes` then say what does not divide.  `progress`
    is called with (bytes so far, total) while the demo model is fetched.  Raises ValueError, FileNotFoundError,
    ConnectionError or ImportError, one line each, saying what to do.
    """
    if weights_dtype not in DTYPES:
        raise ValueError(f"weights_dtype {weights_dtype!r} is not known: use one of {', '.join(DTYPES)}")
    mesh = sharding.as_mesh(mesh)  # first, as is all that can be wrong at once
    dtype, path = DTYPES[weights_dtype], _find(str(name_or_path), progress)
    if path.is_dir():
        tokenizer = text.from_directory(path)  # first: its faults are found in a moment
        _, config, params = huggingface.read_directory(path, dtype=dtype, mesh=mesh)
    else:
        config, params, reader = read_gguf(path, dtype=dtype, mesh=mesh)
        tokenizer = text.from_gguf(reader)
    if max_length is not None:
        if not 2 <= max_length <= config.max_length:
            raise ValueError(
                f"max_length {max_length} does not lie in 2 to {config.max_length}, the context {name_or_path} was made for"
            )
        config = config._replace(max_length=max_length)
    name = str(name_or_path)
    lm = LM(language_model(config, dtype=dtype), params, tokenizer, config, name if name in NAMES else "")
    return lm if mesh is None else sharding.spread(lm, mesh)


def read_config(name_or_path: str | Path) -> TransformerConfig:
    """What a model is made of, without its weights: named as for `load`, or a config.json alone.  Errors as `load`."""
    path = Path(name_or_path).expanduser()
    if not (path.suffix == ".json" and path.is_file()):
        path = _find(str(name_or_path), None)
        path = path / "config.json" if path.is_dir() else path
    return config_from_hf(huggingface.read_object(path)) if path.suffix == ".json" else config_from_gguf(open_gguf(path))


def _find(name: str, progress: fetch.Progress | None) -> Path:
    if name in NAMES:
        return NAMES[name](progress)
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.endswith(".gguf") and not name.startswith("."):
        return fetch.hub_snapshot(name)
    kinds = f"a name ({', '.join(NAMES)}), a Hugging Face directory, a .gguf file, or a hub id org/name"
    raise ValueError(f"no model {name!r}: it must be {kinds}")
