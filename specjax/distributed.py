"""One program on several hosts: each runs the same command, and together they have one mesh.

    Slurm        srun --ntasks-per-node=1 specjax train drafter eagle3 --mesh data=2,model=8 ...
    Cloud TPU    gcloud compute tpus tpu-vm ssh NAME --worker=all --command="specjax generate --mesh v5e-16 ..."
    GKE          the same command in every pod of a JobSet (TPU_WORKER_HOSTNAMES is set there)
    by hand      JAX_COORDINATOR_ADDRESS=host0:1234 SPECJAX_PROCESSES=2 SPECJAX_PROCESS=0 specjax ...     (1 on the other)
    one machine  python -m specjax.distributed 2 specjax ...     starts two, and stops both when one dies

`join` reads the environment; everything else is `jax.distributed`.  Every process computes the same numbers of batches and
draws with the same keys, feeds its own devices, and ends with the same results; the first of them writes.  A process that
dies takes the others with it (no heartbeat for half a minute, or a broken connection before that); training then goes on from
its last checkpoint when the command is run again.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

HEARTBEAT_SECONDS = 30
STOP_SECONDS = 10
"""What the launcher leaves a process to end by itself."""


def is_one_of_several(environment: Mapping[str, str]) -> bool:
    """Whether this process was started as one of several: by hand, by Slurm, on GKE or on a slice of several hosts.

    >>> is_one_of_several({"SLURM_STEP_NUM_TASKS": "4"}), is_one_of_several({"TPU_WORKER_HOSTNAMES": "localhost"})
    (True, False)
    """
    tasks = [environment.get(name, "1") for name in ("SPECJAX_PROCESSES", "SLURM_STEP_NUM_TASKS")]
    hosts = environment.get("TPU_WORKER_HOSTNAMES", "").count(",") + 1
    return any(n.isdecimal() and int(n) > 1 for n in tasks) or hosts > 1 or "MEGASCALE_COORDINATOR_ADDRESS" in environment


def join(environment: Mapping[str, str] = os.environ) -> None:
    """Join the other processes, if there are any; before anything else of JAX is used, and once.

    Raises:
      ValueError: the variables set by hand are not three, or no numbers.
      RuntimeError: the others did not come within five minutes.
    """
    if jax.distributed.is_initialized() or not is_one_of_several(environment):
        return
    how: dict[str, Any] = dict(heartbeat_timeout_seconds=HEARTBEAT_SECONDS, shutdown_timeout_seconds=HEARTBEAT_SECONDS)
    names = ("JAX_COORDINATOR_ADDRESS", "SPECJAX_PROCESSES", "SPECJAX_PROCESS")
    if "SPECJAX_PROCESSES" not in environment:
        jax.distributed.initialize(**how)
        return
    address, count, number = (environment.get(name, "") for name in names)
    if ":" not in address or not (count.isdecimal() and number.isdecimal() and int(number) < int(count)):
        given = ", ".join(f"{name}={environment.get(name, '')!r}" for name in names)
        raise ValueError(f"{given}: set them to host:port, the number of processes, and which one this is, from 0")
    jax.distributed.initialize(address, int(count), int(number), **how)


def first() -> bool:
    """Whether this process writes what is written once."""
    return jax.process_index() == 0


def agreed(flag: bool) -> bool:
    """What the first process says, so that clocks and disks that differ lead nobody astray."""
    return flag if jax.process_count() == 1 else bool(multihost_utils.broadcast_one_to_all(np.asarray(flag)))


def together(name: str) -> None:
    """Wait for all processes."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def launch(count: int, command: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Run a command as `count` processes of this machine; the exit status, 0 where all ended well.

    The first one's output is shown.  When one dies the others are stopped, and one line on stderr says which it was.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    shared = {**environment, "JAX_COORDINATOR_ADDRESS": address, "SPECJAX_PROCESSES": str(count)}
    quiet: dict[str, Any] = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    running = [
        subprocess.Popen(command, env={**shared, "SPECJAX_PROCESS": str(n)}, **(quiet if n else {})) for n in range(count)
    ]
    try:
        while True:
            ends = [process.poll() for process in running]
            dead, status = next(((n, status) for n, status in enumerate(ends) if status), (0, 0))
            if status:
                how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
                said = f"process {dead} of {count} {how}: the others were stopped; run the command again to go on"
                sys.stderr.write(f"specjax: {said} from the last checkpoint\n")
                return status if status > 0 else 128 - status
            if all(status == 0 for status in ends):
                return 0
            time.sleep(0.05)
    finally:
        stop(running)


def stop(running: Sequence[subprocess.Popen]) -> None:
    """End processes: asked first, killed after STOP_SECONDS."""
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    if len(sys.argv) < 3 or not sys.argv[1].isdecimal():
        sys.exit("usage: python -m specjax.distributed COUNT COMMAND...")
    sys.exit(launch(int(sys.argv[1]), sys.argv[2:]))
