"""What the experiments on the engine share: a target with a drafter, engines of it, and requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import specjax
from specjax import bench
from specjax.console import keep_compiled
from specjax.drafters.base import LoadedDrafter
from specjax.engine import Engine
from specjax.models.fetch import cache_dir
from specjax.models.load import LM
from specjax.sampling import SamplingParams
from specjax.types import Params
from specjax.verify import RULES

SLOTS, CAPACITY, CHUNK, FILLS = 8, 256, 64, 4
SNIPPETS = (
    "import os\n\ndef main(args):\n",
    "class Node:\n    def __init__(self, value",
    "for i in range(",
    "try:\n    import json\nexcept ImportError:\n",
    "def read(path):\n    with open(path) as f:\n",
    "    if not isinstance(x, int):\n        raise TypeError(",
    '    """Return the',
    "from collections import",
)


class Case(NamedTuple):
    """A target with a drafter, and plain decoding on the same target."""

    lm: LM
    loaded: LoadedDrafter
    plain: LoadedDrafter

    @property
    def num_draft(self):
        return self.loaded.drafter.depth


def source(parser, out):
    """Flags of every experiment here; `out` is the name of its file."""
    parser.add_argument("--model", default="testbed")
    parser.add_argument("--weights-dtype", default="float32", help="of the target")
    parser.add_argument("--method", default="mtp", help="a chain that is packaged for the model")
    parser.add_argument("--num-draft", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path(out), help="a .json file")


def loaded_case(args):
    """The models that flags name; compiled programs are kept."""
    keep_compiled(cache_dir() / "compiled")
    lm = specjax.load(args.model, weights_dtype=args.weights_dtype)
    drafters = (specjax.load_drafter(method, lm, num_draft=args.num_draft) for method in (args.method, "plain"))
    return Case(lm, *drafters)


def engine_of(case, loaded=None, *, rule="rejection", planner=None, stride=1):
    """An engine, of the case's drafter unless another is given; those of one rule, stride and drafter share their programs."""
    lm, loaded, block = case.lm, loaded or case.loaded, case.num_draft + 1
    return Engine(
        Params(lm.params, loaded.params), target=lm.model, drafter=loaded.drafter, rule=RULES[rule], tokenizer=lm.tokenizer,
        slots=SLOTS, capacity=CAPACITY, chunk=CHUNK, fills=FILLS, stride=stride, packs=(1, 2, block, 2 * block, 4 * block),
        planner=planner, max_waiting=1 << 20,
    )  # fmt: skip


def prompt(lm, i, rng):
    """Token ids of a snippet, cut at random: prompts of 1 to some 20 tokens."""
    ids = lm.tokenizer.encode(SNIPPETS[i % len(SNIPPETS)])
    return ids[: int(rng.integers(1, len(ids) + 1))]


def requests(lm, count, seed, new):
    """`count` requests of `new` tokens each, half of them greedy."""
    rng = np.random.default_rng(seed)
    return [
        dict(prompt=prompt(lm, i, rng), sampling=SamplingParams(0.8 * (i % 2)), key=jax.random.key(i), max_new_tokens=new,
             eos_ids=())
        for i in range(count)
    ]  # fmt: skip


def speed(taken):
    """Tokens a second of runs [(seconds, tokens)]."""
    return float(np.sum([x[1] for x in taken]) / np.sum([x[0] for x in taken]))


def ratio(first, other):
    """Tokens a second of `first` over those of `other`, [(seconds, tokens)] run by run, with a paired interval."""
    a, b = (np.asarray(x, np.float64) for x in (first, other))
    each = lambda x, i: x[i, 1].sum(-1) / x[i, 0].sum(-1)
    return bench.interval(lambda i: each(a, i) / each(b, i), len(a))._asdict()


def kept(path, found):
    """Write and print what was found."""
    path.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(json.dumps(found), flush=True)
