"""Continuous batching: many requests at once, each as if it were alone.

    engine = Engine(params, target=..., drafter=..., rule=..., tokenizer=...)
    request = engine.submit("Why is the sky blue?", sampling=SamplingParams(temperature=0.7))
    for piece in engine.stream(request): ...
    request.result.tokens, request.result.finish_reason, request.result.times.to_first_token()

`slots.py` is the device, `ask.py` what may enter, `request.py` text and counts, `engine.py` the steps.
"""

from specjax.engine.engine import Engine, Load, QueueFull
from specjax.engine.request import Request, Result, Times

__all__ = ["Engine", "Load", "QueueFull", "Request", "Result", "Times"]
