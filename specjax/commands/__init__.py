"""The subcommands of `specjax`: one file each, a `run(flags, write) -> what --json says`."""

from collections.abc import Callable

from specjax import flags
from specjax.commands import bench, demo, engine, generate, latency, lossless, methods, serve_sim, train

RUN: dict[type, Callable] = {
    flags.Demo: demo.run,
    flags.Methods: methods.run,
    flags.Generate: generate.run,
    flags.Bench: bench.run,
    flags.Lossless: lossless.run,
    flags.Latency: latency.run,
    flags.ServeSim: serve_sim.run,
    flags.Engine: engine.run,
    flags.Testbed: train.testbed,
    flags.Corpus: train.corpus,
    flags.Drafter: train.drafter,
}
