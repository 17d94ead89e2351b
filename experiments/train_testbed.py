"""Train the testbed target and write it as a packaged model.

Question: does specjax train a language model from nothing, on text that every user has, to a loss worth drafting for?

Command:    nice -n 19 python experiments/train_testbed.py --out /tmp/testbed              # again to go on after a kill
            python experiments/train_testbed.py --out /tmp/testbed --export               # newest checkpoint -> zoo/testbed
            python experiments/train_testbed.py --out /tmp/smoke --steps 20               # 1 minute
            python experiments/train_figure.py /tmp/testbed/run                           # loss over tokens
Run time:   about an hour of two idle cores (1,700 tokens a second in rows of 512); at nice 19 beside other work, much longer
Expected:   held-out loss 8.10 nats a token at the start and 5.19 after 0.3 million tokens; the last one stands in the card.
            float16 costs nothing (5.19359 against 5.19360)

glibc gives large arrays back to the system after every step and takes them anew; 15 % of the time is saved by
MALLOC_MMAP_THRESHOLD_=4000000000 MALLOC_TRIM_THRESHOLD_=8000000000 in the environment.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specjax import checkpoint, zoo
from specjax.models.transformer import language_model
from specjax.train import testbed
from specjax.train.export import save_directory
from specjax.train.loop import Report, Settings, begin, fit
from specjax.train.target import target_recipe

CARD = """# testbed

A small Llama-shaped language model of Python source, on which speculative decoding methods are compared.  Not a useful
assistant: it continues Python code.

| | |
|---|---|
| architecture | {layers} layers, width {width}, {heads} query and {kv_heads} KV heads of {head_dim}, feed-forward {hidden}, context {max_length}, tied head |
| parameters | {parameters:,} |
| tokenizer | byte-level BPE of {vocab_size}, trained on the same text; id 0 is {eos}, which ends every module |
| data | {source} without tests, generated files, encodings/ and pydoc_data/: {modules} modules, {data_tokens:,} tokens; sha256 {digest} |
| held out | {held_modules} modules by a hash of their names, {held_tokens:,} tokens; sha256 {held_digest} |
| steps | {step} of {steps} updates of {update} tokens: {seen:,} tokens seen |
| optimizer | AdamW, peak {peak}, warm-up {warmup}, cosine to {floor} of it, weight decay {weight_decay}, clip {clip}, seed {seed} |
| held-out loss | {loss:.4f} nats a token as shipped in {dtype} ({bits:.3f} bits a byte); {full:.4f} in float32 |
| held-out accuracy | {accuracy:.4f} teacher-forced |
| made by | specjax {version}, jax {jax}: `python experiments/train_testbed.py`, then `--export` |
| licence | weights Apache-2.0; the training text is under the PSF licence |
"""  # noqa: E501


def show(report: Report) -> None:
    """One line a report."""
    numbers = "  ".join(f"{k} {v:.4g}" for k, v in report.metrics.items() if k not in ("step", "weight", "empty"))
    left = f"{report.seconds_left / 60:.0f} min left" if report.seconds_left == report.seconds_left else ""
    print(f"{time.strftime('%H:%M:%S')} step {report.step}/{report.steps}  {numbers}  {left}", file=sys.stderr, flush=True)


def export(bed: testbed.Testbed, settings: Settings, run: Path, goal: Path) -> dict:
    """Write the newest checkpoint in float16 with its card; what was measured."""
    if not checkpoint.steps(run / "checkpoints"):
        raise FileNotFoundError(f"{run}: no checkpoint yet: train first")
    state = begin(target_recipe(language_model(testbed.CONFIG)), (), settings, run)
    judge, dtype = testbed.judge(bed), np.float16
    rounded = jax.tree.map(lambda x: jnp.asarray(x, dtype).astype(jnp.float32), state.params)
    full, shipped = (judge(params, ()) for params in (state.params, rounded))
    save_directory(goal, testbed.CONFIG, state.params, bed.tokenizer, dtype=dtype)
    train, held = bed.train.provenance, bed.held_out.provenance
    held_bytes = len(bed.tokenizer.decode(bed.held_out.tokens.tolist()).encode())
    step = int(state.step)
    facts = {
        **testbed.CONFIG._asdict(), **settings._asdict(), "step": step, "update": testbed.TOKENS, "eos": testbed.EOS,
        "parameters": sum(x.size for x in jax.tree.leaves(state.params)), "seen": step * testbed.TOKENS,
        "source": train["source"], "modules": train["modules"], "digest": train["sha256"], "data_tokens": len(bed.train.tokens),
        "held_modules": held["modules"], "held_digest": held["sha256"], "held_tokens": len(bed.held_out.tokens),
        "loss": shipped["held_out_loss"], "full": full["held_out_loss"], "accuracy": shipped["held_out_accuracy"],
        "bits": shipped["held_out_loss"] / np.log(2) * len(bed.held_out.tokens) / held_bytes, "dtype": np.dtype(dtype).name,
        "version": importlib.metadata.version("specjax"), "jax": jax.__version__,
    }  # fmt: skip
    (goal / "card.md").write_text(CARD.format(**facts), "utf-8")
    return {name: facts[name] for name in ("step", "loss", "full", "accuracy", "bits", "parameters", "seen")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("/tmp/testbed"))
    parser.add_argument("--steps", type=int, default=testbed.SETTINGS.steps)
    parser.add_argument("--export", action="store_true", help="write the newest checkpoint into the package and stop")
    parser.add_argument("--zoo", type=Path, default=Path(zoo.__file__).parent / "testbed", help="where --export writes")
    args = parser.parse_args()
    settings, run = testbed.SETTINGS._replace(steps=args.steps), args.out / "run"
    bed = testbed.prepare(args.out / "corpus")
    counts = {name: part.provenance["counts"] for name, part in (("train", bed.train), ("held_out", bed.held_out))}
    print(json.dumps(counts), file=sys.stderr)
    if args.export:
        print(json.dumps(export(bed, settings, run, args.zoo)))
        return
    recipe = target_recipe(language_model(testbed.CONFIG))
    fit(recipe, testbed.rows(bed, settings), settings, run, evaluate=(testbed.judge(bed),), progress=show)


if __name__ == "__main__":
    main()
