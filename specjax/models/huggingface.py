"""Weights from a Hugging Face directory: config.json beside model.safetensors, whole or in shards."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from specjax.json_text import as_object, read_json
from specjax.models.families import config_from_hf
from specjax.models.transformer import TransformerConfig
from specjax.models.weights import Shape, assemble, check_file, shortened

PREFIX = re.compile(r"^(model\.language_model\.|language_model\.model\.|language_model\.|model\.)")
NOT_TEXT = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector)\.")
LEGACY = re.compile(r"\.(inv_freq|cos_cached|sin_cached|masked_bias|position_ids)$|\.attn\.bias$")  # buffers, not weights
DTYPES = ("F32", "F16", "BF16")


def read_directory(
    path: str | Path, *, dtype: Any = jnp.float32, mesh: Mesh | None = None
) -> tuple[dict, TransformerConfig, dict]:  # fmt: skip
    """(config.json as a dict, architecture, parameters) of a published checkpoint directory.

    Kernels, embedding and head become `dtype`; norms and biases float32.  With a mesh each device's part is read from the
    file by itself, and of several hosts each reads its own.  Raises FileNotFoundError for a file that is not
    there and ValueError, always one line, for git-lfs pointers, damaged files, quantised tensors, unsupported
    architectures, and tensors that do not fit the config.
    """
    path = Path(path)
    published = read_object(path / "config.json")
    config = config_from_hf(published)
    files = [open_safetensors(file) for file in _files(path)]
    try:
        shapes, read = _catalogue(path, files)
        config, shapes, read = _tie(config, shapes, read)
        # Gemma 3, the one family with post-norms, stores w of 1 + w
        shift = 1.0 if config.post_norms else 0.0
        return published, config, assemble(
            config, shapes, read, source=path, dtype=dtype, norm_shift=shift, mesh=mesh
        )  # fmt: skip
    finally:
        for file in files:
            file.__exit__(None, None, None)


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; one-line errors that name it."""
    return as_object(read_json(check_file(path), "download it again"), path, "download it again")


def _files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.exists():
        names = read_object(index).get("weight_map", {}).values()
        return [check_file(path / name) for name in sorted(set(names))]
    if (path / "model.safetensors").exists():
        return [check_file(path / "model.safetensors")]
    other = sorted(p.name for p in path.glob("*.bin")) or "none"
    raise FileNotFoundError(
        f"{path}: no model.safetensors and no index of shards (.bin files: {other}): convert to safetensors"
    )


def open_safetensors(path: Path):
    """A memory-mapped safetensors file; one-line errors for a git-lfs pointer and a damaged file."""
    try:
        return safe_open(check_file(path), "np")
    except SafetensorError as error:
        raise ValueError(f"{path}: truncated or damaged safetensors ({error}): download it again") from None


def _catalogue(path: Path, files: list) -> tuple[dict[str, Shape], Callable[..., np.ndarray]]:
    """Shape by plain name of every text tensor, and a reader of one of them, or of slices of it."""
    where, shapes, bad = {}, {}, []
    for file in files:
        for name in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
            if NOT_TEXT.match(name) or LEGACY.search(name):
                continue
            view, plain = file.get_slice(name), PREFIX.sub("", name)
            if plain in where:
                raise ValueError(f"{path}: tensor {plain} is there twice, as {where[plain][1]} and as {name}: remove one")
            if view.get_dtype() not in DTYPES or name.endswith((".SCB", ".qweight", ".qzeros")):
                bad.append(f"{name} ({view.get_dtype()})")
            where[plain], shapes[plain] = (file, name), tuple(view.get_shape())
    if bad:
        int8 = "int8 (bitsandbytes .SCB) weights" if any(".SCB" in name for name in bad) else "quantised or integer weights"
        raise ValueError(f"{path}: {int8} are not supported, use a float32, float16 or bfloat16 copy: {shortened(bad)}")

    def read(plain: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        file, name = where[plain]
        return file.get_tensor(name) if index is None else file.get_slice(name)[index]

    return shapes, read


def _tie(config: TransformerConfig, shapes: dict[str, Shape], read: Callable[..., np.ndarray]):
    """One tensor of a tied pair serves as both; a file that holds two different ones is not tied, whatever it says."""
    embedding, head = "embed_tokens.weight", "lm_head.weight"
    if not config.tied or head not in shapes:
        return config, shapes, read
    rest = {name: shape for name, shape in shapes.items() if name != head}
    if embedding not in shapes:
        return config, {**rest, embedding: shapes[head]}, lambda name, *index: read(head if name == embedding else name, *index)
    if shapes[embedding] == shapes[head] and np.array_equal(read(embedding), read(head)):
        return config, rest, read
    return config._replace(tied=False), shapes, read
