"""Continuous batching: many requests at once, each as if it were alone.

    engine = Engine(params, target=..., drafter=..., rule=..., tokenizer=...)
    request = engine.submit("Why is the sky blue?", sampling=SamplingParams(temperature=0.7))
    for piece in engine.stream(request): ...
    request.result.tokens, request.result.finish_reason, request.result.times.to_first_token()

`slots.py` is the device, `ask.py` what may enter, `request.py` text and counts, `plan.py` how much is verified,
`drafting.py` who is drafted for, `engine.py` the steps, `replay.py` requests with arrival times, `costs.py` what rounds cost.
"""

from specjax.engine.engine import Engine
from specjax.engine.plan import Plan, Planner, PolicyPlanner, Rows
from specjax.engine.request import Load, QueueFull, Request, Result, Times

__all__ = ["Engine", "Load", "Plan", "Planner", "PolicyPlanner", "QueueFull", "Request", "Result", "Rows", "Times"]
