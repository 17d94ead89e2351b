"""`specjax demo`: text, then a table."""

from __future__ import annotations

from specjax import bench, demo, metrics
from specjax.commands.common import Write, check_counts, load_target
from specjax.console import progress_bar, say, table, word
from specjax.flags import Demo, settings


def run(command: Demo, write: Write) -> dict:
    """Stream answers, then the table: plain decoding against n-gram drafts, prompt by prompt."""
    check_counts(command.max_new_tokens, [command.num_draft])
    lm = load_target(command.target)
    shape = dict(num_draft=command.num_draft, max_new_tokens=command.max_new_tokens)
    with progress_bar("run") as progress:
        plain, ngram = demo.demo(lm, **shape, write=write, progress=progress)
    pairs = list(zip(demo.PROMPTS, plain.samples, ngram.samples, strict=True))
    lines = [(row.id, row.category, [a], [b]) for row, a, b in pairs] + [("all", "", plain.samples, ngram.samples)]
    rows = [["prompt", "kind", "same tokens?", "tau", "plain tokens/s", "ngram tokens/s", "speed-up"]]
    for name, kind, before, after in lines:
        rates = [f"{sum(s.num_tokens for s in x) / sum(s.seconds for s in x):.1f}" for x in (before, after)]
        tau = metrics.merge([c.stats for s in after for c in s.completions]).mean_acceptance_length
        same, speed = word(bench.same_tokens(before, after)), f"{bench.speedup(before, after).mean:.2f}x"
        rows.append([name, kind, same, f"{tau:.2f}", *rates, speed])
    say("\n" + table(rows))
    return {"summary": {"settings": settings(command)}, "methods": [bench.record(r) for r in (plain, ngram)]}
