"""What `test_distributed.py` runs as several processes: it generates and trains, on whatever devices there are together.

python tests/hosts.py FOLDER [STEP]      writes FOLDER/result.npz; at STEP the process numbered 1 kills itself
"""

import os
import signal
import sys
import time
from pathlib import Path

import jax

from specjax import distributed

if __name__ == "__main__":
    distributed.join()

import conftest  # noqa: F401 - its strictness
import numpy as np
from meshes import PROMPTS, batch, table

from specjax import api, sharding
from specjax.models.load import LM
from specjax.train import loop
from specjax.train.packing import Batches


def main(folder, fatal=-1, mesh=None):
    t = table()
    lm = sharding.lm_over(LM(t.TARGET, t.target_params(), None, t.CONFIG), mesh)
    law = api.SamplingParams(1.0)
    drafter = api.load_drafter("early_exit", lm, num_draft=2)
    done = api.generate(lm, drafter, PROMPTS, key=jax.random.key(1), max_new_tokens=12, rule="coupled", sampling=law)
    numbers = loop.Settings(4, peak=0.01, warmup=1, log_every=1, save_seconds=0.0)
    rows = Batches(lambda n: batch(step=n), lambda n: np.arange(8), lambda n: f"batch {n}", 8)

    def progress(report):
        if report.step == fatal and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if fatal > 0:
            time.sleep(0.2)

    params = loop.fit(
        t.RECIPES["mtp"](3),
        rows,
        numbers,
        folder / "run",
        target=lm.model,
        target_params=lm.params,
        mesh=mesh,
        progress=progress,
    )
    whole = [sharding.fetch(x) for x in jax.tree.leaves(params)]
    if distributed.first():
        np.savez(folder / "result.npz", *whole, tokens=np.asarray([one.tokens for one in done]), hosts=jax.process_count())
    distributed.together("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]), mesh=sharding.parse_mesh("data=2,model=4"))
