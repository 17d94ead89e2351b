"""The testbed: a small Llama-shaped target, trained on Python's standard library, on which every method can be compared.

2.0 million parameters: 4 layers of width 192, 6 query and 2 KV heads of 32, feed-forward 512, context 1024, a byte-level
BPE of 2048 tokens, head tied to the embedding.  Small enough that drafters saturate in minutes on two cores; real text, so
that acceptance depends on what is being written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from specjax import checkpoint, text
from specjax.drafters import files, mtp
from specjax.drafters.recipe import Recipe
from specjax.models.transformer import TransformerConfig, language_model
from specjax.train import cards, corpus, stdlib
from specjax.train.digests import vocabulary
from specjax.train.evaluate import acceptance, held_out
from specjax.train.export import save_directory
from specjax.train.joint import DRAFTER, joint_mtp
from specjax.train.loop import Evaluate, begin
from specjax.train.packing import Batches, batches, then
from specjax.train.run import prompts_of
from specjax.train.settings import Settings
from specjax.train.target import target_recipe
from specjax.verify import RULES

EOS = "<eos>"
CONFIG = TransformerConfig(
    vocab_size=2048, width=192, layers=4, heads=6, kv_heads=2, head_dim=32, hidden=512, max_length=1024, tied=True
)  # fmt: skip
SETTINGS = Settings(steps=3600, peak=3e-3, warmup=150, evaluate_every=200, log_every=10)
TOKENS = 2048  # an update
LONG_FROM = 0.78  # of the run in rows of half the context, which cost a third less a token; the rest in whole ones


class Testbed(NamedTuple):
    """What the testbed is trained and judged on."""

    tokenizer: text.Tokenizer
    train: corpus.Corpus
    held_out: corpus.Corpus


def prepare(
    directory: str | Path, progress: corpus.Progress = lambda done, total: None, tokenizer: text.Tokenizer | None = None,
    modules: int | None = None,
) -> Testbed:  # fmt: skip
    """Tokenizer and both corpora, made in `directory` where they are not there yet; a given tokenizer is used as it is.

    `modules` is how many of the library's modules each of the two is made of, its first ones; all unless given.
    """
    directory = Path(directory)
    train, held = (part[:modules] for part in stdlib.sources())
    if tokenizer is None:
        tokenizer = load_tokenizer(directory / "tokenizer.json", train)
    both = [tokenize(directory / name, part, tokenizer, progress) for name, part in (("train", train), ("held_out", held))]
    return Testbed(tokenizer, *both)


def rows(bed: Testbed, settings: Settings) -> Batches:
    """What each update learns from."""
    short, long = (batches(bed.train, length=n, batch=TOKENS // n) for n in (CONFIG.max_length // 2, CONFIG.max_length))
    return then(short, int(LONG_FROM * settings.steps), long)


def alone() -> Recipe:
    """The testbed's target by itself."""
    return target_recipe(language_model(CONFIG))


def joint(num_draft: int = 4) -> Recipe:
    """The testbed's target and an MTP module shaped like one of its layers, trained together; give `fit` no target."""
    return joint_mtp(language_model(CONFIG), num_draft=num_draft, config=mtp.config_of(CONFIG))


def judges(bed: Testbed, recipe: Recipe) -> list[Evaluate]:
    """Loss and accuracy on 32 whole rows of held-out modules, and tau of what drafts, where something does."""
    found = [held_out(recipe, batches(bed.held_out, length=CONFIG.max_length, batch=4), steps=8)]
    if recipe.drafter is None:
        return found
    new = min(64, CONFIG.max_length // 2)
    prompts = prompts_of(bed.held_out, 24, min(128, CONFIG.max_length - new))
    ask: dict[str, Any] = dict(target=language_model(CONFIG), rule=RULES["rejection"], new_tokens=new)
    return [*found, acceptance(recipe, prompts, temperatures=(0.0, 1.0), **ask)]


def export(
    bed: Testbed, settings: Settings, run: str | Path, goal: str | Path, *, recipe: Recipe, dtype: str = "float16"
) -> dict:  # fmt: skip
    """Write the newest checkpoint of `run` to the directory `goal` as a model with its card; what was measured.

    The MTP module of a `joint` recipe goes to drafter/ within it.

    Raises:
      FileNotFoundError: there is no checkpoint.
    """
    run, goal = Path(run), Path(goal)
    if not checkpoint.steps(run / "checkpoints"):
        raise FileNotFoundError(f"{run}: no checkpoint yet: train first")
    state = begin(recipe, (), settings, run)
    params = state.params if recipe.drafter is None else recipe.assemble(state.params, ()).target
    rounded = jax.tree.map(lambda x: jnp.asarray(x, dtype).astype(jnp.float32), params)
    full, shipped = (judges(bed, alone())[0](own, ()) for own in (params, rounded))
    save_directory(goal, CONFIG, params, bed.tokenizer, dtype=dtype)
    if recipe.drafter is not None:
        about = {"method": "mtp", "num_draft": recipe.drafter.depth, "vocab_size": CONFIG.vocab_size}
        about |= mtp.config_of(CONFIG)._asdict()
        files.save(goal / DRAFTER, recipe.assemble(state.params, ()).drafter, about, dtype=jnp.dtype(dtype))
    train, held, step = bed.train.provenance, bed.held_out.provenance, int(state.step)
    held_bytes = len(bed.tokenizer.decode(bed.held_out.tokens.tolist()).encode())
    facts = {
        **CONFIG._asdict(), **settings._asdict(), "step": step, "update": TOKENS, "eos": EOS, "seen": step * TOKENS,
        "parameters": sum(x.size for x in jax.tree.leaves(params)), "versions": cards.versions(), "dtype": dtype,
        "source": train["source"], "modules": train["modules"], "digest": train["sha256"], "data_tokens": len(bed.train.tokens),
        "held_modules": held["modules"], "held_digest": held["sha256"], "held_tokens": len(bed.held_out.tokens),
        "loss": shipped["held_out_loss"], "full": full["held_out_loss"], "accuracy": shipped["held_out_accuracy"],
        "bits": shipped["held_out_loss"] / np.log(2) * len(bed.held_out.tokens) / held_bytes,
    }  # fmt: skip
    (goal / "card.md").write_text(cards.TESTBED.format(**facts), "utf-8")
    return {name: facts[name] for name in ("step", "loss", "full", "accuracy", "bits", "parameters", "seen")}


def load_tokenizer(path: Path, documents: Sequence[stdlib.Source]) -> text.Tokenizer:
    """The tokenizer in `path`, trained on `documents` where there is none."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        train_tokenizer([source.text for source in documents]).save(str(path))
    backend = tokenizers.Tokenizer.from_file(str(path))
    return text.from_tokenizers(backend, eos_ids=(backend.get_vocab()[EOS],))


def train_tokenizer(texts: Sequence[str], vocab_size: int = CONFIG.vocab_size) -> tokenizers.Tokenizer:
    """Byte-level BPE; id 0 ends a document."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def tokenize(
    directory: Path, documents: Sequence[stdlib.Source], tokenizer: text.Tokenizer, progress: corpus.Progress
) -> corpus.Corpus:  # fmt: skip
    """Each module and the token that ends it; ValueError where the directory holds another tokenizer's."""

    def make(numbers: range) -> list[corpus.Item]:
        return [corpus.Document([*tokenizer.encode(documents[i].text), tokenizer.eos_ids[0]]) for i in numbers]

    facts = {**stdlib.provenance(list(documents)), "vocabulary": vocabulary(tokenizer)}
    return corpus.build(directory, len(documents), make, provenance=facts, progress=progress)
