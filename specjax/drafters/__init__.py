"""Drafting methods: one file a method, each a factory and a `load`.  To add one: write its file, add its entry."""

from specjax.drafters import early_exit, ngram, plain, small, specinfer
from specjax.drafters.base import Method

METHODS: dict[str, Method] = {
    "plain": Method(plain.load, "none", "rejection", "no drafts: plain decoding"),
    "ngram": Method(ngram.load, "training-free", "rejection", "continue the longest earlier match of the text's end"),
    "small": Method(small.load, "same family", "rejection", "a smaller model of the same vocabulary drafts a chain"),
    "specinfer": Method(specinfer.load, "same family", "recursive", "trees of one or several smaller models, merged"),
    "early_exit": Method(early_exit.load, "training-free", "rejection", "the target's first layers with its own head"),
}
