"""What tests share: tiny models, drafters of every kind, one compiled `go` per (target, drafter, rule), an independent oracle.

Models are random but peaked (the head is scaled), so that acceptance is neither 0 nor 1.  Shapes never change between
tests of one file: prompts, temperatures, budgets, EOS ids and drafter weights are data.
"""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, keys, sampling, trees
from specjax.drafters import blockwise, files, hydra, layer, medusa, mtp, objectives, parallel_heads
from specjax.drafters.dflash import dflash2, dspark
from specjax.drafters.dflash import drafter as dflash
from specjax.drafters.dflash.config import dflash_config
from specjax.drafters.eagle import drafter as eagle
from specjax.drafters.eagle import head as eagle_head
from specjax.drafters.eagle import parallel
from specjax.drafters.early_exit import early_exit
from specjax.drafters.ngram import ngram
from specjax.drafters.plain import plain
from specjax.drafters.siblings import SIBLINGS
from specjax.drafters.small import beside, of_trunk, small, trunk
from specjax.drafters.specinfer import specinfer
from specjax.models.table import table
from specjax.models.transformer import TransformerConfig, language_model
from specjax.sampling import SamplingParams
from specjax.types import FINISH_REASONS, Draft, Drafter, KVCache, Params
from specjax.verify import RULES

V = 17
SEED = 7
PROMPTS = [[3, 4, 5, 3, 4], [7], [1, 2], [9, 8, 7, 6, 9, 8, 7], [5, 11] * 11 + [5]]  # 5, 1, 2, 7 and 23 tokens
NEW = 20
GREEDY, HOT = 0.0, 1.0

# Grouped-query attention, a sliding window shorter than the prompts, a full layer.
CONFIG = TransformerConfig(V, 16, 2, 4, 2, 8, 32, 64, window=6, sliding=(True, False))
TARGET = language_model(CONFIG)
SMALL = language_model(CONFIG._replace(layers=1, sliding=(), window=None))


def peaked(params, scale):
    return {**params, "head": params["head"] * scale}


@functools.cache
def target_params():
    return peaked(jax.jit(TARGET.init)(jax.random.key(0)), 5)


@functools.cache
def small_params():
    """The target's first layer, disturbed: it agrees with the target sometimes."""
    own = jax.jit(SMALL.init)(jax.random.key(1))
    return jax.tree.map(lambda noise, x: x + 0.1 * noise, own, {name: target_params()[name] for name in own})


class Script(NamedTuple):
    """What the scripted drafter proposes, in round r of row b: node i at depth d is the truth there plus `wrong`, mod V."""

    truth: jax.Array  # [B, S] the tokens that plain decoding gives
    wrong: jax.Array  # [B, R, N] 0 = the right token
    parents: jax.Array  # [B, R, N]


def scripted(num_nodes, depth, *, vocab_size=V, soft=False, chain=True):
    """A drafter that proposes what it is told; it counts its rounds, and its state has a cache full of junk besides.

    `soft` makes it say that its tokens were drawn from the uniform law (true of none of them, allowed at temperature 0).
    """

    def propose(noise, params, state, sequences):
        r, junk = state
        at = jnp.minimum(r, params.drafter.wrong.shape[1] - 1)
        pick = lambda x: jax.vmap(lambda row, i: row[i])(x, at)
        wrong, parents = pick(params.drafter.wrong), pick(params.drafter.parents)
        level = jax.vmap(lambda p: trees.ancestors(p).sum(-1, dtype=jnp.int32)[1:] - 1)(parents)
        index = jnp.minimum(sequences.length[:, None] + level - 1, params.drafter.truth.shape[1] - 1)
        tokens = (jnp.take_along_axis(params.drafter.truth, index, 1) + wrong) % vocab_size
        law = jnp.full((*tokens.shape, vocab_size), -np.log(vocab_size), jnp.float32) if soft else None
        return Draft(tokens, parents, law), state

    def init(params, batch, capacity):
        junk = KVCache(
            (jnp.full((batch, 1, 1, 4), jnp.nan),), (jnp.full((batch, 1, 4, 1), jnp.nan),), jnp.zeros(batch, jnp.int32)
        )
        return jnp.zeros(batch, jnp.int32), junk

    return Drafter(
        init=init,
        absorb=lambda params, state, sequences, out, count: state,
        propose=propose,
        commit=lambda params, state, out, verdict: (state[0] + 1, state[1]),
        num_nodes=num_nodes,
        depth=depth,
        children="iid" if soft else "point",
        chain=chain,
        vocab_size=vocab_size,
    )


TREE_NODES, TREE_DEPTH = 7, 3
HEAD_TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1))
"""Rank paths of three levels, for heads."""
MTP_CONFIG = mtp.config_of(CONFIG, qk_norm=True)
LAYER_CONFIG = layer.config_of(CONFIG, qk_norm=True)
EAGLES = {
    "eagle1": eagle_head.eagle1(CONFIG, qk_norm=True),
    "eagle3": eagle_head.eagle3(CONFIG),
    "eagle3.1": eagle_head.eagle31(CONFIG, norm_before_fc=True, norm_before_residual=True, own_head=False),
}
PEAGLE = eagle_head.peagle(CONFIG, layers=2)
BLOCKS = {  # the first with laws that chance can move, which a block of masks would not have on this target
    "dflash": dflash_config(CONFIG, layers=2, qk_norm=True, sliding=(True, False), window=6, output_multiplier=0.3),
    "dspark": dflash_config(CONFIG, anchor_first=True),
    "dflash2": dflash2.dflash2_config(CONFIG, conv_group=8),
}
HEADS = {"dspark": dspark.DSparkConfig(4, "rnn"), "dflash2": dflash2.SelectorConfig(4, 6)}

RECIPES = {
    "blockwise": lambda k: blockwise.recipe(TARGET, num_draft=k, hidden=8),
    "medusa": lambda k: medusa.recipe(TARGET, num_draft=k, layers=2, own_head=True),
    "hydra": lambda k: hydra.recipe(TARGET, num_draft=k, layers=2),
    "hydra, prefix": lambda k: hydra.recipe(TARGET, num_draft=k, layers=2, prefix=LAYER_CONFIG),
    "parallel_heads": lambda k: parallel_heads.recipe(TARGET, num_draft=k, config=LAYER_CONFIG),
    "mtp": lambda k: mtp.recipe(TARGET, num_draft=k, config=MTP_CONFIG),
    "eagle1": lambda k: eagle.recipe(TARGET, num_draft=k, config=EAGLES["eagle1"], objective=objectives.hard),
    "eagle3": lambda k: eagle.recipe(TARGET, num_draft=k, config=EAGLES["eagle3"], objective=objectives.hard),
    "eagle3.1": lambda k: eagle.recipe(TARGET, num_draft=k, config=EAGLES["eagle3.1"], objective=objectives.hard),
    "peagle": lambda k: parallel.recipe(TARGET, num_draft=k, config=PEAGLE, objective=objectives.hard, share=1.0),
    "dflash": lambda k: dflash.recipe(TARGET, num_draft=k, config=BLOCKS["dflash"]),
    "dspark": lambda k: dspark.recipe(TARGET, num_draft=k, config=BLOCKS["dspark"], heads=HEADS["dspark"]),
    "dflash2": lambda k: dflash2.recipe(TARGET, num_draft=k, config=BLOCKS["dflash2"], selector=HEADS["dflash2"]),
}
"""Drafters that are trained after the target; a comma sets a method's options off."""


@functools.cache
def trained(name, k=3, disturbed=0.15):
    """Parameters of a trained drafter: what its recipe begins with, disturbed, so that nothing in them is zero."""
    params = jax.jit(RECIPES[name](k).init)(jax.random.key(3), target_params())
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(4)
    return treedef.unflatten([x + jnp.asarray(disturbed * rng.standard_normal(x.shape), x.dtype) for x in leaves])


@functools.cache
def trunk_params():
    """The target's first layer and norm, disturbed."""
    rng = np.random.default_rng(4)
    move = lambda x: x + jnp.asarray(0.15 * rng.standard_normal(x.shape), x.dtype)
    return jax.tree.map(move, of_trunk(target_params(), 1))


def gumbel(batch, depth, width=1, ids=None):
    """Noise as decoding gives it to a drafter, the same for the same depth."""
    return jax.random.gumbel(jax.random.key(depth), (batch, width, V if ids is None else len(ids)))


@functools.cache
def saved(name, k=3):
    """The directory of a trained drafter."""
    directory = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, directory, True)
    options = {"mtp": MTP_CONFIG._asdict(), "medusa": {"tree": HEAD_TREE}, "hydra": {"tree": HEAD_TREE}}
    options |= {"parallel_heads": LAYER_CONFIG._asdict()}
    options |= {method: config._asdict() for method, config in [*EAGLES.items(), ("peagle", PEAGLE)]}
    options |= {n: {**x._asdict(), **(HEADS[n]._asdict() if n in HEADS else {})} for n, x in BLOCKS.items()}
    options |= {"hydra, prefix": {"tree": HEAD_TREE, "prefix": LAYER_CONFIG._asdict()}}
    files.save(directory, trained(name, k), {"method": name.split(",")[0], **options.get(name, {})})
    return str(Path(directory))


def eagle_chain(name, k):
    return eagle.eagle(TARGET, config=EAGLES[name], paths=medusa.chain_paths(k), siblings=SIBLINGS["iid"])


BUILDERS = {
    "plain": lambda k: plain(),
    "ngram": lambda k: ngram(num_draft=k),
    "ngram, order 1": lambda k: ngram(num_draft=k, min_order=1),
    "small": lambda k: small(SMALL, num_draft=k),
    "small = target": lambda k: small(TARGET, num_draft=k),
    "small, trunk": lambda k: small(trunk(TARGET, 1), num_draft=k, own=beside),
    "specinfer": lambda k: specinfer((SMALL,), expansion=(2,) + (1,) * (k - 1), siblings=SIBLINGS["without_replacement"]),
    "blockwise": lambda k: blockwise.blockwise(TARGET, num_draft=k),
    "medusa": lambda k: medusa.medusa(TARGET, paths=HEAD_TREE),
    "medusa, sampled": lambda k: medusa.medusa(TARGET, paths=HEAD_TREE, siblings=SIBLINGS["without_replacement"]),
    "hydra": lambda k: hydra.hydra(TARGET, paths=HEAD_TREE),
    "hydra, chain": lambda k: hydra.hydra(TARGET, paths=medusa.chain_paths(k), siblings=SIBLINGS["iid"]),
    "hydra, prefix": lambda k: hydra.hydra(TARGET, paths=HEAD_TREE, prefix=LAYER_CONFIG),
    "parallel_heads": lambda k: parallel_heads.parallel_heads(TARGET, paths=medusa.chain_paths(k), config=LAYER_CONFIG),
    "mtp": lambda k: mtp.mtp(TARGET, num_draft=k, config=MTP_CONFIG),
    "eagle1": lambda k: eagle_chain("eagle1", k),
    "eagle1, static": lambda k: eagle.eagle(TARGET, config=EAGLES["eagle1"], paths=HEAD_TREE),
    "eagle3": lambda k: eagle_chain("eagle3", k),
    "eagle3, dynamic": lambda k: eagle.eagle2(TARGET, config=EAGLES["eagle3"], num_draft=k, top_k=3, nodes=5),
    "eagle3.1": lambda k: eagle_chain("eagle3.1", k),
    "peagle": lambda k: parallel.peagle(TARGET, config=PEAGLE, num_draft=k),
    "dflash": lambda k: dflash.dflash(TARGET, config=BLOCKS["dflash"], num_draft=k),
    "dflash, point": lambda k: dflash.dflash(TARGET, config=BLOCKS["dflash"], num_draft=k, siblings=SIBLINGS["point"]),
    "dspark": lambda k: dspark.dspark(TARGET, config=BLOCKS["dspark"], heads=HEADS["dspark"], num_draft=k),
    "dflash2": lambda k: dflash2.dflash2(TARGET, config=BLOCKS["dflash2"], selector=HEADS["dflash2"], num_draft=k),
    "early_exit, 1 layer": lambda k: early_exit(TARGET, num_draft=k, layers=1),
    "early_exit, all layers": lambda k: early_exit(TARGET, num_draft=k, layers=2),
    "script": lambda k: scripted(k, k),
    "script, soft": lambda k: scripted(k, k, soft=True),
    "script, tree": lambda k: scripted(TREE_NODES, TREE_DEPTH, chain=False),
}


@functools.cache
def drafter(name, k=3):
    return BUILDERS[name](k)


def drafter_params(name):
    for known in (name, name.split(",")[0]):
        if known in RECIPES:
            return trained(known)
    own = {"small": small_params(), "small = target": target_params(), "specinfer": (small_params(),)}
    return {**own, "small, trunk": trunk_params()}.get(name, ())


METHODS = ["ngram, order 1", "small", "early_exit, 1 layer"]
"""Every method once; the others are settings of these."""


def fitting(name):
    """Lossless rules that fit a drafter by name."""
    return [r for r, rule in RULES.items() if rule.lossless and fits(drafter(name), rule)]


def fits(drafter, rule):
    """Whether decoding can be built of the two."""
    return drafter.children in rule.accepts and (drafter.chain or not rule.chain)


CHAIN_RULES = [r for r, rule in RULES.items() if rule.lossless and "iid" in rule.accepts]
"""Lossless rules for a chain of sampled tokens."""
PAIRS = [(d, r) for d in METHODS for r in fitting(d)]
PAIRS += [("ngram", "rejection"), ("small = target", "block"), ("early_exit, all layers", "rejection")]


@functools.cache
def program(target, drafter, rule, limit=None, max_rounds=48):
    """(params, tokens, lengths, max_length, eos, keys, sampling, num_rounds) -> (State, RoundInfo), compiled."""
    decode.check(target, drafter, rule)
    static = dict(target=target, drafter=drafter)

    def go(params, tokens, lengths, max_length, eos, key, params_of_sampling, num_rounds):
        state = decode.start(params, tokens, lengths, max_length, eos, key, params_of_sampling, **static)
        state = decode.prefill(params, state, chunk=8, **static)
        return decode.run(params, state, num_rounds, rule=rule, limit=limit, max_rounds=max_rounds, **static)

    return jax.jit(go)


class Result(NamedTuple):
    """A run, on the host."""

    tokens: list  # [B] lists of new tokens
    reasons: list  # [B]
    drafted: np.ndarray  # [B, R]
    accepted: np.ndarray
    emitted: np.ndarray
    state: object


def generate(
    drafter, rule, prompts, *, params=None, target=TARGET, new=NEW, temperature=GREEDY, ids=None, eos=((-1, -1),), seed=SEED,
    rounds=1 << 20, longest=23 + NEW, limit=None, request_keys=None,
):  # fmt: skip
    """Run `prompts`; `new`, `temperature` and `eos` may differ by row.  `temperature` may also be a list of SamplingParams."""
    batch = len(prompts)
    tokens = np.zeros((batch, decode.capacity_for(longest, drafter)), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = np.asarray([len(p) for p in prompts], np.int32)
    each = temperature if isinstance(temperature, list) else [temperature] * batch
    each = [x if isinstance(x, SamplingParams) else SamplingParams(temperature=x) for x in each]
    key = (
        keys.request_keys(jax.random.key(seed), jnp.asarray(range(batch) if ids is None else ids))
        if request_keys is None
        else request_keys
    )
    ends = np.minimum(lengths + np.asarray(new, np.int32), longest).astype(np.int32)
    eos = np.broadcast_to(np.asarray(eos, np.int32), (batch, len(eos[0])))
    state, log = program(target, drafter, RULES[rule], limit)(
        Params(target_params(), ()) if params is None else params, jnp.asarray(tokens), jnp.asarray(lengths), jnp.asarray(ends),
        jnp.asarray(eos), key, sampling.stack(each, target.vocab_size), jnp.asarray(rounds, jnp.int32),
    )  # fmt: skip
    length, out = np.asarray(state.length), np.asarray(state.tokens)
    reasons = [FINISH_REASONS[i] for i in np.asarray(state.status)]
    new_tokens = [out[row, lengths[row] : length[row]].tolist() for row in range(batch)]
    return Result(new_tokens, reasons, *(np.asarray(x) for x in log[:3]), state)


def run(name, rule, prompts=PROMPTS, *, k=3, **settings):
    """`generate` by the name of a drafter, on the tiny transformer."""
    return generate(drafter(name, k), rule, prompts, params=Params(target_params(), drafter_params(name)), **settings)


MIXED = [*PROMPTS, *PROMPTS]
MIXED_HEAT = [GREEDY] * 5 + [HOT] * 5


def mixed(name, rule, *, k=3, **settings):
    """All prompts greedily, and again at temperature 1, in one batch of ten."""
    settings = {"temperature": MIXED_HEAT, **settings}
    return run(name, rule, MIXED, k=k, **settings)


@functools.cache
def reference():
    """Plain decoding of `MIXED` (coupled: at temperature 1 its tokens are the request's own)."""
    return mixed("plain", "coupled")


def oracle(prompts, heat, ids, *, new=NEW, target=TARGET, params=None, seed=SEED, seen_length=23 + NEW):
    """Independent of cache, rounds and `warp`: a fresh full pass for each token, then NumPy's argmax of logits (+ noise)."""
    params = target_params() if params is None else params
    batch, lengths = len(prompts), np.asarray([len(p) for p in prompts])
    tokens = np.zeros((batch, seen_length), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    key = keys.request_keys(jax.random.key(seed), jnp.asarray(ids))
    full = jax.jit(lambda tokens: target.apply(params, tokens, target.init_cache(batch, seen_length))[0].logits)
    noise_at = jax.jit(lambda position: keys.gumbel_at(key, position, target.vocab_size))
    for step in range(new):
        logits = np.asarray(full(jnp.asarray(tokens)))[np.arange(batch), lengths + step - 1]
        noise = np.asarray(noise_at(jnp.asarray(lengths + step)))
        hot = np.asarray(heat)[:, None]
        choice = np.where(hot > 0, logits / np.where(hot > 0, hot, 1) + noise, logits).argmax(-1)
        tokens[np.arange(batch), lengths + step] = choice
    return [tokens[row, n : n + new].tolist() for row, n in enumerate(lengths)]


def truth(prompts, result, capacity=80):
    """[B, capacity] prompts and the tokens of `result`, for a Script."""
    rows = np.zeros((len(prompts), capacity), np.int32)
    for row, prompt in enumerate(prompts):
        line = [*prompt, *result.tokens[row]]
        rows[row, : len(line)] = line
    return jnp.asarray(rows)


def chain_script(right, count, k=3, prompts=MIXED, result=None):
    """A Script of chains: in round r, row b, `count` nodes exist and the first `right` of them are right."""
    node = np.arange(k)
    right, count = np.asarray(right, np.int32)[..., None], np.asarray(count, np.int32)[..., None]
    parents = np.where(node < count, node - 1, -2).astype(np.int32)
    return Script(truth(prompts, result or reference()), jnp.asarray((node >= right).astype(np.int32)), jnp.asarray(parents))


# Medusa's tree of 63 nodes (mc_sim_7b_63), a word a path: its candidates' ranks.
MEDUSA_63 = [
    tuple(map(int, path))
    for path in """
    0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 0000 011 006
    030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070
    """.split()
]


# Tables: a target whose every law is known.


@functools.cache
def table_model(vocab_size, order=1):
    return table(vocab_size, order=order)


def successor_table(following, vocab_size, sure=30.0):
    """Parameters of an order-1 table under which token t is followed by following[t] (else by t + 1) almost surely."""
    logits = np.zeros((vocab_size + 1, vocab_size), np.float32)
    for t in range(vocab_size + 1):
        logits[t, following.get(t, (t + 1) % vocab_size)] = sure
    return jax.nn.log_softmax(jnp.asarray(logits), -1)


# A language model with text: one token a character.

ALPHABET = "abcdefghijklmnopqrstuvwxyz .!?\n"


def tokenizer(eos_ids=(31,)):
    """Characters, then <eos>; V = 32."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    from specjax import text

    vocab = {c: i for i, c in enumerate(ALPHABET)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<eos>"])
    return text.from_tokenizers(backend, eos_ids=eos_ids)


def text_lm(params, *, max_length=1 << 20, vocab_size=32, eos_ids=(31,)):
    """An LM whose target is an order-1 table over characters."""
    from specjax.models.load import LM

    return LM(table(vocab_size, order=1, max_length=max_length), params, tokenizer(eos_ids), None)
