"""Weights from a .gguf file, dequantised through the `gguf` package.

Tried against that package's own quantiser or blocks: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K.
The files of architecture "llama" store the rows of q and k interleaved for llama.cpp's rotary; those of the other
families do not.  Gemma's norms are stored as 1 + w already.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax.models.families import config_from_gguf, header
from specjax.models.transformer import TransformerConfig
from specjax.models.weights import Index, assemble, check_file

TESTED = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
HEADER_ONLY = ("rope_freqs.weight",)  # read into the config

WHOLE = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PLAIN_NORMS = {"ffn_norm": "post_attention_layernorm"}
SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def read_gguf(
    path: str | Path, *, dtype: Any = jnp.float32, mesh: Mesh | None = None
) -> tuple[TransformerConfig, dict, gguf.GGUFReader]:
    """(architecture, parameters, the open reader: `text.from_gguf` makes the tokenizer of it) of a .gguf file.

    Kernels, embedding and head become `dtype`; norms and biases float32.  With a mesh each device's part is dequantised by
    itself, from the blocks that hold it.  Raises FileNotFoundError, and ValueError (one line) for a git-lfs pointer, a
    damaged file, an unsupported architecture or quantisation, tensors that do not fit.
    """
    path = Path(path)
    reader = open_gguf(path)
    config = config_from_gguf(reader)
    names = {**LAYER, **(SANDWICH_NORMS if config.post_norms else PLAIN_NORMS)}
    tensors = {published_name(t.name, names): t for t in reader.tensors if t.name not in HEADER_ONLY}
    interleaved = header(reader, "general.architecture") == "llama"

    def read(name: str, index: Index | None = None) -> np.ndarray:
        value = dequantize(tensors[name]) if index is None else dequantize_part(tensors[name], index)
        turned = interleaved and name.split(".")[-2] in ("q_proj", "k_proj")
        return half_split(value, len(value) // config.head_dim) if turned else value  # parts are of whole heads

    shapes = {name: tuple(reversed(t.shape.tolist())) for name, t in tensors.items()}
    return config, assemble(config, shapes, read, source=path, dtype=dtype, mesh=mesh), reader


def open_gguf(path: Path) -> gguf.GGUFReader:
    """A memory-mapped GGUF file; one-line errors for a git-lfs pointer and for a damaged or foreign file."""
    with check_file(path).open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ValueError(f"{path}: not a GGUF file (it starts with {magic!r}): download it again")
    try:
        return gguf.GGUFReader(path)
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{path}: truncated GGUF, or one the gguf package does not know ({reason}): download it again"
        ) from None


def published_name(name: str, layer_names: dict[str, str]) -> str:
    """Hugging Face's name for "blk.3.attn_q.weight" and its like; one nobody knows stays as it is and is reported later."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        return f"layers.{layer}.{layer_names[part]}.{kind}" if part in layer_names else name
    part, _, kind = name.rpartition(".")
    return f"{WHOLE[part]}.{kind}" if part in WHOLE else name


def dequantize(tensor: gguf.ReaderTensor, data: np.ndarray | None = None) -> np.ndarray:
    """Float32 values of a tensor, [out, in], or of whole blocks of it; ValueError where the gguf package cannot undo them."""
    try:
        return gguf.quants.dequantize(tensor.data if data is None else data, tensor.tensor_type)
    except NotImplementedError:
        raise ValueError(
            f"tensor {tensor.name}: quantisation {tensor.tensor_type.name} is not supported: use one of {', '.join(TESTED)}"
        ) from None


def dequantize_part(tensor: gguf.ReaderTensor, index: Index) -> np.ndarray:
    """Slices of a tensor as `dequantize` gives it, of which no other rows are undone, and no blocks but those with a part."""
    if len(index) < 2:
        return dequantize(tensor, tensor.data[index])
    (rows, columns), (block, size) = index, gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    unit = size if tensor.data.dtype == np.uint8 else 1  # what lies there as numbers is a number a block
    first, last = columns.start // block, -(-columns.stop // block)
    value = dequantize(tensor, tensor.data[rows, first * unit : last * unit])
    return value[:, columns.start - first * block : columns.stop - first * block]


def half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k [heads * head_dim, ...] from llama.cpp's interleaved rotary order back to the published half-split one."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
