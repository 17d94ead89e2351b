"""`specjax engine`: serve requests as they arrive, many at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax import api, sampling
from specjax.commands.common import Write, as_prompts, build_drafter, check_counts, check_names, choose, load_target
from specjax.console import progress_bar, say, table
from specjax.demo import PROMPTS
from specjax.drafters.base import LoadedDrafter
from specjax.engine import Engine
from specjax.engine.costs import Told, measured_costs
from specjax.engine.plan import Planner, PolicyPlanner
from specjax.engine.replay import Asked, Served, Summary, replay, summary
from specjax.flags import Engine as Flags
from specjax.flags import settings
from specjax.json_text import parsed
from specjax.models.load import LM
from specjax.names import unknown
from specjax.sampling import SamplingParams
from specjax.schedule import policies
from specjax.schedule.policies import Policy
from specjax.types import Params

POLICIES: dict[str, Callable[[Flags], Policy] | None] = {
    "fixed": None,
    "threshold": lambda command: policies.threshold(command.threshold),
    "early_stop": lambda command: policies.early_stop(),
    "fixed_budget": lambda command: policies.fixed_budget(),
}
"""None asks nobody: every draft is verified whole."""

OF_A_REQUEST = ("id", "prompt", "arrival", "max_new_tokens", "stop", "seed", "cancel_after")


def run(command: Flags, write: Write) -> dict:
    """Serve a file of requests, or made ones; the exit status does not tell of requests that failed, the table does."""
    check(command)
    lm = load_target(command.target)
    rows = read_requests(Path(command.requests)) if command.requests is not None else made(command, lm)
    if command.save_requests is not None:
        Path(command.save_requests).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    loaded = build_drafter(lm, command.method, command.num_draft, command.drafting)
    say(f"{len(rows)} requests, {command.build.slots} slots: compiling")
    engine = built(command, lm, loaded)
    with progress_bar("request") as bar:
        served = replay(engine, [as_asked(row, command) for row in rows], progress=bar)
    total = summary(served)
    write(table(lines(total)) + "\n")
    for row, one in [(row, one) for row, one in zip(rows, served, strict=True) if one.request is None][:8]:
        say(f"[{row['id']}] {one.error}")
    answers = [answer(row, one) for row, one in zip(rows, served, strict=True)]
    facts = {"settings": settings(command), "drafter": loaded.card._asdict(), "served": sound(total._asdict())}
    return {"summary": facts, "requests": answers}


def check(command: Flags) -> None:
    """ValueError for what can be seen before anything is loaded."""
    if (command.requests is None) == (command.poisson is None):
        raise ValueError("give --requests FILE, or --poisson RATE to make requests of prompts: one of them")
    if command.policy not in POLICIES:
        raise ValueError(unknown("policy", command.policy, POLICIES))
    if command.poisson is not None and not 0 < command.poisson < np.inf or command.count < 1:
        raise ValueError(f"--poisson {command.poisson} --count {command.count}: give a positive rate, and 1 request or more")
    if command.method == "plain" and command.policy != "fixed":
        raise ValueError(f"--policy {command.policy} decides about drafts, and the method plain makes none: name a --method")
    check_names([command.method], command.drafting, command.target.model)
    check_counts(command.asked.max_new_tokens, [command.num_draft])
    sampling.check(command.sampling.params(), 0)


def read_requests(path: Path) -> list[dict[str, Any]]:
    """Rows of a file, each with an id and a prompt.

    Raises:
      FileNotFoundError: no such file.
      ValueError: no rows, or one that is no request; it names the line.  What a request asks for is the engine's to refuse.
    """
    if not path.is_file():
        raise FileNotFoundError(f"--requests {path}: no such file; --poisson makes requests, --save-requests keeps them")
    known, rows = (*OF_A_REQUEST, *SamplingParams._fields), []
    for number, line in enumerate(path.read_text("utf-8").split("\n"), 1):
        if not line.strip():
            continue
        row = parsed(line, f"{path}, line {number}", "write one object a line")
        if not isinstance(row, dict) or "prompt" not in row:
            raise ValueError(f"{path}, line {number} has no prompt: write {{'prompt': ..., 'arrival': seconds}}")
        wrong = [name for name in row if name not in known]
        if wrong:
            raise ValueError(f"{path}, line {number}: {unknown('key', wrong[0], known)}")
        for name in ("arrival", "cancel_after"):
            if not isinstance(row.get(name, 0), int | float) or not 0 <= row.get(name, 0) < np.inf:
                raise ValueError(f"{path}, line {number}: {name} is {row[name]!r}, give seconds from 0")
        rows.append({"id": str(number), **row})
    if not rows:
        raise ValueError(f"{path} holds no request: give a file with at least one")
    return rows


def made(command: Flags, lm: LM) -> list[dict[str, Any]]:
    """Requests of prompts in turn, as token ids, at exponential intervals; each has the seed of its number."""
    asked, rng = command.asked, np.random.default_rng(command.asked.seed)
    ids, _ = as_prompts(lm, choose((), asked, PROMPTS), asked)
    arrivals = np.cumsum(rng.exponential(1 / float(command.poisson or 1), command.count))
    params = {name: value for name, value in command.sampling.params()._asdict().items() if value is not None}
    common = {"max_new_tokens": asked.max_new_tokens, "stop": list(asked.stop), **params}
    return [
        {"id": str(i), "arrival": float(at), "prompt": ids[i % len(ids)], "seed": asked.seed + i, **common}
        for i, at in enumerate(arrivals)
    ]


def as_asked(row: dict[str, Any], command: Flags) -> Asked:
    """A row as the engine takes it; what it leaves out is as the flags say.  A seed that is none is the engine's to refuse."""
    defaults = command.sampling.params()._asdict()
    params = {name: row.get(name, value) for name, value in defaults.items()}
    bias = params["logit_bias"]
    if isinstance(bias, dict):
        params["logit_bias"] = {int(token): value for token, value in bias.items() if token.lstrip("-").isdigit()}
    seed = row.get("seed")
    request = {
        "prompt": row["prompt"],
        "max_new_tokens": row.get("max_new_tokens", command.asked.max_new_tokens),
        "stop": row.get("stop", command.asked.stop),
        "sampling": SamplingParams(**params),
        "key": jax.random.key(seed) if isinstance(seed, int) and abs(seed) < 1 << 31 else seed,
    }
    return Asked(float(row.get("arrival", 0)), request, row.get("cancel_after"))


def built(command: Flags, lm: LM, loaded: LoadedDrafter) -> Engine:
    """The engine; for policies that weigh costs, rounds are timed first on one of the same kind, which compiles for both."""
    b, policy = command.build, POLICIES[command.policy]
    rule = api.find_rule(command.drafting.rule or loaded.rule)

    def engine(planner: Planner | None) -> Engine:
        return Engine(
            Params(lm.params, loaded.params), target=lm.model, drafter=loaded.drafter, rule=rule, tokenizer=lm.tokenizer,
            slots=b.slots, capacity=b.capacity, chunk=b.chunk, stride=b.stride, packs=b.packs, max_waiting=b.max_waiting,
            planner=planner, key=jax.random.key(command.asked.seed),
        )  # fmt: skip

    if policy is None:
        return engine(None)
    told, num_draft = Told(), loaded.drafter.depth
    with progress_bar("round") as bar:
        costs = measured_costs(
            engine(told), told, slots=b.slots, num_draft=num_draft, stride=b.stride, capacity=b.capacity,
            sampling=command.sampling.params(), progress=bar,
        )  # fmt: skip
    return engine(PolicyPlanner(policy(command), costs, slots=b.slots, num_draft=num_draft))


def lines(total: Summary) -> Sequence[Sequence[str]]:
    """The table: percentiles, then counts."""
    milli = lambda name, x: [name, *(f"{1e3 * value:.1f}" for value in x.values())]
    counts = ", ".join(f"{getattr(total, n)} {n}" for n in ("finished", "cancelled", "failed", "invalid", "refused"))
    say(
        f"{counts}; {total.tokens} tokens in {total.seconds:.2f} s, {total.tokens_per_second:.0f} a second, tau {total.tau:.2f}"
    )
    return [
        ["", *total.time_to_first],
        milli("time to first token, ms", total.time_to_first),
        milli("between tokens, ms", total.inter_token),
        ["tokens/s of a request", *(f"{value:.1f}" for value in total.user_speed.values())],
    ]


def answer(row: dict[str, Any], one: Served) -> dict[str, Any]:
    """What --json says of one request; times in seconds."""
    result = None if one.request is None else one.request.result
    if result is None:
        return {"id": row["id"], "finish_reason": "refused" if one.refused else "invalid", "error": one.error}
    times = result.times
    return {
        "id": row["id"],
        "finish_reason": result.finish_reason,
        "prompt_tokens": len(result.prompt_tokens),
        "tokens": result.tokens,
        "text": result.text,
        "time_to_first": times.tokens[0] - one.arrived if times.tokens else None,
        "between_tokens": times.between_tokens(),
        "ended": times.ended - one.arrived,
        "stats": result.stats._asdict(),
    }


def sound(facts: Any) -> Any:
    """The same with None for what is no number, which JSON does not know."""
    if isinstance(facts, dict):
        return {name: sound(value) for name, value in facts.items()}
    return None if isinstance(facts, float) and np.isnan(facts) else facts
