"""A random model of 61 words as a Hugging Face directory, with a tokenizer and a chat template, for tests of whole commands."""

import json
from pathlib import Path

import numpy as np
import tokenizers
from golden import make_families as golden

TEMPLATE = "{% for m in messages %}w3 {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w4{% endif %}"


def save(path, *, max_length=512, words=61, broken=False, template=TEMPLATE) -> Path:
    """Write the directory; `words` below 61 makes another tokenizer, `broken` puts NaN into the head."""
    weights = dict(golden.weights("llama"))
    if broken:
        weights["lm_head.weight"] = np.full_like(weights["lm_head.weight"], np.nan)
    golden.save(path, {**golden.CONFIGS["llama"], "max_position_embeddings": max_length}, weights)
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(Path(path) / "tokenizer.json"))
    if template is not None:
        (Path(path) / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return Path(path)
