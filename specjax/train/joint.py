"""Recipes that train a target together with what drafts for it: Medusa-2 and a jointly trained MTP module.

    tokens ──► the target as it is being trained ──► h_t ──┬──► its head ─────────────► x_{t+1}   the model's own loss
                        ▲                                  └──► heads, or the module ─► x_{t+2} ..  theirs
                        └───────────── gradient of both ───┘

What is trained is then another model: "lossless" and plain decoding mean this one's law.  `Recipe.assemble` gives both
parts, tau during training is that of the pair, and `save` publishes them: the target as a model of its own, which every
tool loads, and the drafter beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import text
from specjax.drafters import files, medusa, mtp, objectives
from specjax.drafters.blockwise import first_heads, parallel_scores
from specjax.drafters.recipe import Batch, Recipe, forward
from specjax.models.transformer import TransformerConfig
from specjax.train import lora
from specjax.train.export import save_directory
from specjax.train.target import next_token, target_init
from specjax.types import Array, LanguageModel, Params

DRAFTER = "drafter"
"""Where in a published target's directory its drafter lies."""


def medusa_2(
    target: LanguageModel, *, num_draft: int, heads: Mapping[str, Array] | None = None, layers: int = 1, own_head: bool = False,
    paths: medusa.Paths | None = None, rank: int = 32, alpha: float = 16.0, heads_weight: float = 0.2, decay: float = 0.8,
    objective: objectives.Objective = objectives.hard, target_objective: objectives.Objective = objectives.hard,
) -> Recipe:  # fmt: skip
    """Medusa-2: L_LM + heads_weight * sum_i decay^i CE of head i, i = 1..K; trains {"adapters", "heads"} (arXiv 2401.10774).

    The target itself, in `fit`'s target_params, stays as it is.  Published are rank 32, alpha 16, weight 0.2, decay 0.8 and
    heads from stage 1; self-distillation has weight 0.01 times sin(pi/2 * step / steps).  Not as published: a loss knows no
    step, so the weight is constant; all parameters share one learning rate, where heads had four times the adapters'; no
    dropout; heads' sums are divided by the model's labels, not each by its own.

    Args:
      target: the model to tune and to draft for.
      num_draft: K.
      heads: trained ones to begin with (Medusa-1's parameters); new ones, of `layers` and `own_head`, unless given.
      layers: residual blocks of a head.
      own_head: whether each head learns a vocabulary matrix of its own, from a copy of the target's.
      paths: the tree that tau is measured with; a chain unless given.
      rank: of the adapters.
      alpha: their scale, times rank.
      heads_weight: of the heads' loss.
      decay: the weight of a head relative to the one before.
      objective: what heads learn; where that is a law, it is the tuned target's.
      target_objective: what the tuned target learns: `hard`, the text, or `kl`, the law of the target as it was, which
        is the published self-distillation for tuned models whose training text nobody has.

    Raises:
      ValueError: fewer heads than `num_draft` are given.
    """
    files.check_depth(num_draft, num_draft if heads is None else len(heads["kernel"]))
    shares = [heads_weight * decay**i for i in range(1, num_draft + 1)]

    def init(key, params):
        new = functools.partial(medusa.head_init, target, params, num_draft=num_draft, layers=layers, own_head=own_head)
        given = {name: jnp.asarray(x, jnp.float32) for name, x in (heads or {}).items()}
        begin = first_heads(given, num_draft) if given else new()
        return {"adapters": lora.init(key, params, rank=rank), "heads": begin}

    def assemble(trainable, params):
        return Params(lora.merge(params, trainable["adapters"], alpha=alpha), trainable["heads"])

    def loss(trainable, target_params, batch: Batch, key):
        tuned, own_heads = assemble(trainable, target_params)
        now = batch._replace(output=forward(target, tuned, batch))
        teacher = (target_params, batch.output.hidden)
        own = next_token(target, tuned, now.output.hidden, batch, target_objective, teacher)
        scored = parallel_scores(target, medusa.head_logits, own_heads, tuned, now, objective)
        return both(own, scored, shares)

    return Recipe(init, loss, medusa.medusa(target, paths=paths or medusa.chain_paths(num_draft)), assemble=assemble)


def joint_mtp(
    model: LanguageModel, *, num_draft: int, config: mtp.MTPConfig, steps: int | None = None, weight: float = 0.3,
    objective: objectives.Objective = objectives.hard,
) -> Recipe:  # fmt: skip
    """Next-token CE + weight / J * sum_j CE of step j of an MTP module; trains {"target", "mtp"}, both from the beginning.

    As DeepSeek-V3 was trained (arXiv 2412.19437; weight 0.3, at the end 0.1): the module's gradient reaches the trunk, and
    embedding and head are shared.  One module is applied to its own output, as it drafts, where the paper gives each depth
    one of its own and trains one depth; its sums are divided by the model's labels.  Give `fit` no target.

    Args:
      model: what is trained.
      num_draft: K of the drafter that tau is measured with.
      config: of the module; `mtp.config_of` makes it from the model's.
      steps: J, how often the module is applied; K unless given.
      weight: of the module's loss.
      objective: what the module learns; where that is a law, it is the model's as it is.
    """
    steps = num_draft if steps is None else steps

    def init(key, target_params):
        key_target, key_module = jax.random.split(key)
        params = target_init(model, key_target)
        return {"target": params, "mtp": mtp.module_init(config, key_module, params, model.num_layers - 1)}

    def loss(trainable, target_params, batch: Batch, key):
        params = trainable["target"]
        now = batch._replace(output=forward(model, params, batch))
        own = next_token(model, params, now.output.hidden, batch)
        scored = mtp.unrolled_scores(config, trainable["mtp"], model, params, now, steps, objective)
        return both(own, scored, [weight / steps] * steps)

    assemble = lambda trainable, target_params: Params(trainable["target"], trainable["mtp"])
    return Recipe(init, loss, mtp.mtp(model, num_draft=num_draft, config=config), assemble=assemble)


def both(
    own: objectives.Scored, scored: Sequence[objectives.Scored], shares: Sequence[float]
) -> tuple[Array, dict[str, Array]]:  # fmt: skip
    """(the model's nats + sum_i shares[i] * nats of head i) / the model's labels, and metrics.

    One count for all, so that its product with the loss is a plain sum, however rows are split into batches.  "accuracy" and
    "target_loss" are the model's own; "accuracy_i" and "tau" are `objectives.pool`'s of the heads.
    """
    sums = [share * objectives.total(s.nats, s.weights) for share, s in zip(shares, scored, strict=True)]
    count, alone = own.weights.sum(), objectives.mean(own.nats, own.weights)
    metrics = {**objectives.pool(scored, shares)[1], "weight": count, "target_loss": alone}
    metrics["accuracy"] = objectives.mean(own.hit, own.weights)
    return alone + sum(sums[1:], sums[0]) / jnp.maximum(count, 1), metrics


def save(
    directory: str | Path, config: TransformerConfig, params: Params, tokenizer: text.Tokenizer, about: Mapping[str, Any],
    *, dtype: Any = np.float16,
) -> Path:  # fmt: skip
    """Publish what `Recipe.assemble` gives: the trained target in `directory`, its drafter in drafter/ within it.

    Args:
      directory: where; `specjax.load` reads the target there, and `load_drafter(..., weights=directory / "drafter")`.
      config: of the target.
      params: both.
      tokenizer: the target's.
      about: config.json of the drafter: "method" ("medusa", "mtp") and its options.
      dtype: of every tensor of the target, and of the drafter's matrices.

    Raises:
      ValueError: what `save_directory` or `files.save` refuses.
    """
    path = save_directory(directory, config, params.target, tokenizer, dtype=dtype)
    files.save(path / DRAFTER, params.drafter, about, dtype=dtype)
    return path
