"""specjax: speculative decoding of language models in JAX.  This is the face; see `types.py` for the picture."""

from specjax.api import Completion, Piece, generate, load, load_drafter, stream
from specjax.drafters import METHODS
from specjax.metrics import Statistics
from specjax.models.load import LM
from specjax.sampling import SamplingParams
from specjax.verify import RULES

__all__ = [
    "LM",
    "METHODS",
    "RULES",
    "Completion",
    "Piece",
    "SamplingParams",
    "Statistics",
    "generate",
    "load",
    "load_drafter",
    "stream",
]
