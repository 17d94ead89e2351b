"""Drafting methods: one file a method, each a factory and a `load`.  To add one: write its file, add its entry."""

from specjax.drafters import blockwise, early_exit, hydra, medusa, mtp, ngram, parallel_heads, plain, small, specinfer
from specjax.drafters.base import Method
from specjax.drafters.dflash.load import loader as of_blocks
from specjax.drafters.eagle import drafter as eagle
from specjax.drafters.eagle import parallel

METHODS: dict[str, Method] = {
    "plain": Method(plain.load, "none", "rejection", "no drafts: plain decoding"),
    "ngram": Method(ngram.load, "training-free", "rejection", "continue the longest earlier match of the text's end"),
    "small": Method(small.load, "same family", "rejection", "a smaller model of the same vocabulary drafts a chain"),
    "specinfer": Method(specinfer.load, "same family", "recursive", "trees of one or several smaller models, merged"),
    "blockwise": Method(blockwise.load, "trained after it", "rejection", "a feed-forward head for each token ahead"),
    "medusa": Method(medusa.load, "trained after it", "target_match", "a residual head for each token ahead, a static tree"),
    "hydra": Method(hydra.load, "trained after it", "recursive", "heads that see the tokens drafted before theirs"),
    "parallel_heads": Method(parallel_heads.load, "trained after it", "rejection", "a layer of its own for each token ahead"),
    "mtp": Method(mtp.load, "trained after it", "rejection", "one layer on the target's last state, fed with its own output"),
    "eagle1": Method(
        eagle.loader("eagle1"), "trained after it", "rejection", "one layer that extrapolates the target's last state"
    ),
    "eagle3": Method(eagle.loader("eagle3"), "trained after it", "rejection", "one layer on features of three of the target's"),
    "eagle3.1": Method(eagle.loader("eagle3.1"), "trained after it", "rejection", "eagle3 with normed features and feedback"),
    "peagle": Method(parallel.load, "trained after it", "rejection", "eagle3 with more layers, all tokens in one pass"),
    "dflash": Method(
        of_blocks("dflash"), "trained after it", "rejection", "a block in one pass of layers on the target's features"
    ),
    "dspark": Method(
        of_blocks("dspark"), "trained after it", "rejection", "dflash drawn left to right, with its own confidence"
    ),
    "dflash2": Method(
        of_blocks("dflash2"), "trained after it", "rejection", "dflash, convolved, and a path of its best tokens"
    ),
    "early_exit": Method(early_exit.load, "training-free", "rejection", "the target's first layers with its own head"),
}
