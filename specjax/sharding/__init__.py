"""Where arrays lie on a mesh of devices: rules from a parameter's path to the axes that cut it.  Nothing is computed here.

    axis     cuts
    data     rows of a batch: tokens, caches, states
    fsdp     rows too, and the side of every matrix that faces the width: no device holds a whole one (ZeRO-3)
    model    KV heads with the query heads they serve, the feed-forward's hidden units, the vocabulary; caches by KV head

Placement changes no function: a model or drafter `over` a mesh is the same one, with a word to the compiler on where caches
and logits lie.  A layer then ends attention and feed-forward in one sum over `model` each, and no weight is gathered.  What
an axis does not divide (2 KV heads over 8 devices) is whole on every device of that axis, and `Placement.notes` says so.
Axes are Auto: XLA's partitioner fills in the rest, and what it fills in is never wrong, only slower.

    mesh.py      axes; a mesh from "data=2,model=4" or the name of a slice
    rules.py     from a leaf's path to the axes that cut it
    placing.py   arrays to their places and back to the host: parameters, states, batches
    over.py      models, drafters and all that is loaded, over a mesh
"""

from specjax.sharding.mesh import AXES, PRESETS, ROWS, as_mesh, fitted, mesh_of, parse_mesh, parse_sizes
from specjax.sharding.over import drafter_over, lm_over, loaded_over, model_over, spread
from specjax.sharding.placing import abstract, fed, fetch, held, moved, place, settled
from specjax.sharding.rules import RULES, TRAINED, Placement, Rule, heads_of, name_of, parted, placement, whole

__all__ = [
    "AXES",
    "PRESETS",
    "ROWS",
    "RULES",
    "TRAINED",
    "Placement",
    "Rule",
    "abstract",
    "as_mesh",
    "drafter_over",
    "fed",
    "fetch",
    "fitted",
    "heads_of",
    "held",
    "lm_over",
    "loaded_over",
    "mesh_of",
    "model_over",
    "moved",
    "name_of",
    "parse_mesh",
    "parse_sizes",
    "parted",
    "place",
    "placement",
    "settled",
    "spread",
    "whole",
]
