"""Planted faults of sharding: each makes the named check of `sharded.QUICK` fail, with these words in what it says.

They run after the checks: what a result is compared with was made on one device before anything was planted.
"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import jax
import meshes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from specjax import keys, sharding
from specjax.models import gguf
from specjax.sharding import over, placing, rules
from specjax.verify import draw


class Fault(NamedTuple):
    """A mistake, and what finds it."""

    check: str  # a key of `sharded.QUICK`
    said: str  # part of its failure
    plant: Callable[[], contextlib.AbstractContextManager]


def found(fault, check):
    """The check fails while the fault is planted, for the reason it should."""
    try:
        with fault.plant():
            check()
    except AssertionError as error:
        assert fault.said in str(error), f"it was found for another reason: {error}"
    else:
        raise AssertionError(f"{fault.check} does not see it")


def in_module(module, name, make):
    """`make(original)` in place of `module.name`."""
    return lambda: mock.patch.object(module, name, make(getattr(module, name)))


@contextlib.contextmanager
def placed_anew(plant):
    """A fault in placement: the target is placed while it is there, and again without it."""
    try:
        for cached in (meshes.placed, over.model_over):
            cached.cache_clear()
        with plant():
            yield
    finally:
        for cached in (meshes.placed, over.model_over):
            cached.cache_clear()


def in_rules(change):
    """`change(rule) -> Rule` on the rules that parameters are placed by."""
    faulty = tuple(map(change, rules.RULES))
    plant = in_module(placing, "placement", lambda own: lambda *args, rules, **how: own(*args, rules=faulty, **how))
    return lambda: placed_anew(plant)


def output_cut_by_its_width(rule):
    """o_proj by the axis that is not summed over: each device would need all heads."""
    return rule._replace(axes=rule.axes[::-1]) if "out/kernel" in rule.path else rule


def heads_cut_in_pieces(rule):
    return rule._replace(by_head=False)


def rows_alone(own):
    """KV heads are forgotten where states are held."""
    return lambda tree, mesh: jax.tree.map(lambda x: own(x, mesh), tree)


def argmax_of_a_shard(own):
    """The largest of the tokens that a device has, by its number there."""
    cut = dict(in_specs=PartitionSpec(None, "model"), out_specs=PartitionSpec(), check_vma=False)
    return lambda scores: jax.shard_map(own, mesh=meshes.mesh("1x8"), **cut)(scores)


def keys_of_a_shard(own):
    """Rows are counted from 0 on each of two devices."""
    return lambda key, ids: own(key, ids % (len(ids) // 2))


def rows_of_the_first(own):
    """Every device is fed the rows of the first one."""

    def one(x):
        places = NamedSharding(x.sharding.mesh, x.sharding.spec)
        rows, whole = x.sharding.shard_shape(x.shape)[1], np.asarray(x)
        return jax.make_array_from_callback(x.shape, places, lambda index: whole[:, :rows])

    return lambda parts, mesh: jax.tree.map(one, own(parts, mesh))


def columns_of_the_first(own):
    """Every device reads the columns of the first one."""

    def faulty(tensor, index):
        return own(tensor, (*index[:1], *(slice(0, one.stop - one.start) for one in index[1:])))

    return faulty


FAULTS = {
    "o_proj by the wrong axis": Fault("logits 1x8", "a layer sends", in_rules(output_cut_by_its_width)),
    "gate and up joined": Fault(
        "logits 1x8", "gate_up", lambda: placed_anew(in_module(placing, "parted", lambda own: lambda params: params))
    ),
    "caches by row alone": Fault("logits 2x4", "a device has keys", lambda: placed_anew(in_module(over, "held", rows_alone))),
    "KV heads in pieces": Fault("2 KV heads 1x8", "cut within a head", in_rules(heads_cut_in_pieces)),
    "argmax of a shard": Fault("verdicts coupled 1x8", "tokens of row", in_module(draw, "first_argmax", argmax_of_a_shard)),
    "keys that repeat": Fault("medusa, sampled 2x4", "]] != [[", in_module(keys, "request_keys", keys_of_a_shard)),
    "rows of the first shard": Fault("gradients 2x4", "Not equal to tolerance", in_module(sharding, "fed", rows_of_the_first)),
    "restored without the mesh": Fault(
        "restores",
        "restored on {1} devices for 8x1",
        in_module(sharding, "abstract", lambda own: lambda shapes, places: shapes),
    ),
    "columns of the first shard": Fault(
        "reads gguf", "Arrays are not equal", in_module(gguf, "dequantize_part", columns_of_the_first)
    ),
}
