"""`specjax bench`: methods side by side with plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from specjax import api, bench, ceilings, demo, sampling
from specjax.commands.common import Write, as_prompts, build_drafter, check_counts, check_names, choose, load_target, resolved
from specjax.console import progress_bar, say, table, word
from specjax.flags import Bench
from specjax.models.load import LM


def run(command: Bench, write: Write) -> dict:
    """Measure methods side by side."""
    asked, params, drafting = command.asked, command.sampling.params(), command.drafting
    rows = choose(command.prompt, asked, demo.PROMPTS)
    check_names(command.methods, drafting, command.target.model)
    check_counts(asked.max_new_tokens, command.num_draft)
    sampling.check(params, 0)
    lm = load_target(command.target)
    prompts, chat = as_prompts(lm, rows, asked)
    several = [(name, k) for name in command.methods if name != "plain" for k in command.num_draft]
    loaded = [build_drafter(lm, name, k, drafting) for name, k in several]
    rules = [drafting.rule or drafter.rule for drafter in loaded]
    contenders = [bench.Contender(n, d, r) for (n, _), d, r in zip(several, loaded, rules, strict=True)]
    work = bench.Work(prompts, jax.random.key(asked.seed), asked.max_new_tokens, params, asked.stop, command.batch_size)
    with progress_bar("run") as progress:
        results = bench.compare(lm, contenders, work, progress=progress)
    results = [r._replace(passes=bench.pass_times(lm, r.contender, work)) for r in results]
    say(bench_table(results))
    held = hold_all(lm, contenders, work) if command.ceiling else [None] * len(contenders)
    if command.ceiling:
        say("\n" + ceiling_table(contenders, held))
    chosen = resolved(command, params, rule=rules, chat=chat, raw=not chat)
    summary = {"seed": asked.seed, "settings": chosen, "num_prompts": len(rows)}
    records = [bench.record(r) for r in results]
    for record, one in zip(records[1:], held, strict=True):
        record["ceiling"] = one and {**one._asdict(), "excess": one.excess._asdict(), "above": one.above}
    return {"summary": summary, "methods": records}


def hold_all(lm: LM, contenders: Sequence[bench.Contender], work: bench.Work) -> list[ceilings.Held | None]:
    """Each contender against its ceiling, in another run; None where none is known."""
    held, total = [], len(contenders)
    with progress_bar("run") as progress:
        for i, contender in enumerate(contenders):
            progress(i, total, f"ceiling of {contender.method}")
            known = ceilings.known(contender.loaded.drafter, api.find_rule(contender.rule))
            held.append(ceilings.hold(lm, contender, work) if known else None)
        progress(total, total, "done")
    return held


def ceiling_table(contenders: Sequence[bench.Contender], held: Sequence[ceilings.Held | None]) -> str:
    """Accepted tokens of a round beside what no lossless rule could exceed; - where nothing is known."""
    rows = [["method", "K", "rule", "accepted a round", "ceiling", "accepted - ceiling [95 %]", "above?"]]
    for c, one in zip(contenders, held, strict=True):
        names = [c.method, str(c.loaded.drafter.depth), c.rule]
        if one is None:
            rows.append([*names, "-", "-", "-", "-"])
            continue
        excess = f"{one.excess.mean:+.3f} [{one.excess.low:+.3f}, {one.excess.high:+.3f}]"
        lossy = " (lossy rule)" if not api.find_rule(c.rule).lossless else ": a bug"
        above = f"YES{lossy}" if one.above else "no"
        rows.append([*names, f"{one.accepted:.3f}", f"{one.ceiling:.3f}", excess, above])
    return table(rows)


def bench_table(results: Sequence[bench.Result]) -> str:
    """Results as people read them; acceptance is by position in the draft."""
    heads = ["method", "K", "rule", "lossless", "same tokens?", "tau [95 %]", "acceptance", "tokens/s", "speed-up [95 %]"]
    rows = [[*heads, "draft ms", "verify ms", "ms/token", "its speed-up [95 %]"]]
    for r in results:
        names = [r.contender.method, str(r.contender.loaded.drafter.depth), r.contender.rule, word(r.lossless)]
        rates = " ".join(f"{x:.2f}" for x in r.stats.per_position_acceptance_rate)
        speed, decoding = (f"{x.mean:.2f}x [{x.low:.2f}, {x.high:.2f}]" for x in (r.speedup, r.itl_speedup))
        tau, rate = f"{r.tau.mean:.2f} [{r.tau.low:.2f}, {r.tau.high:.2f}]", f"{r.tokens_per_second:.1f}"
        yields = [word(r.same_tokens_as_plain), tau, rates, rate, speed]
        rows.append([*names, *yields, *(f"{ms:.2f}" for ms in (*(r.passes or ()), r.itl_ms)), decoding])
    return table(rows)
