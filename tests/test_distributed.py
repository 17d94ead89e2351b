"""Two processes of four simulated devices each, joined by `jax.distributed` over gloo, and one of a single device."""

import importlib.metadata
import os
import subprocess
import sys
import time
from pathlib import Path

import hosts
import numpy as np
import pytest

from specjax import distributed

SCRIPT = Path(__file__).with_name("hosts.py")
FEWER = " --xla_cpu_use_fusion_emitters=false" * importlib.metadata.version("jaxlib").startswith("0.10.")  # as in conftest.py


def environment(devices):
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0{FEWER}"
    return {**os.environ, "XLA_FLAGS": flags}


def together(folder, *fatal):
    """(exit status, what was said, seconds) of the launcher."""
    words = [sys.executable, "-m", "specjax.distributed", "2", sys.executable, str(SCRIPT), str(folder), *map(str, fatal)]
    before = time.monotonic()
    done = subprocess.run(words, env=environment(4), capture_output=True, text=True, timeout=300)
    return done.returncode, done.stderr, time.monotonic() - before


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    hosts.main(folder)
    return dict(np.load(folder / "result.npz"))


def same(found, alone):
    assert found.pop("hosts") == 2
    np.testing.assert_array_equal(found["tokens"], alone["tokens"])
    for name, x in found.items():
        np.testing.assert_allclose(x, alone[name], atol=1e-5)


@pytest.mark.slow
def test_two_processes_do_what_one_does(alone, tmp_path):
    """Tokens, and trained parameters; one of them writes the journal."""
    status, said, _ = together(tmp_path)
    assert status == 0, said
    same(dict(np.load(tmp_path / "result.npz")), alone)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 5


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_others_and_training_goes_on(alone, tmp_path):
    status, said, seconds = together(tmp_path, 3)
    assert status == 128 + 9 and seconds < 60 + 60  # the first minute is for what comes before
    lines = [line for line in said.splitlines() if line.startswith("specjax: ")]
    assert lines == [
        "specjax: process 1 of 2 was killed by signal 9: the others were stopped; run the command again to go on from the last "
        "checkpoint"
    ], said
    assert not (tmp_path / "result.npz").exists() and (tmp_path / "run" / "checkpoints" / "2").is_dir()
    status, said, _ = together(tmp_path)
    assert status == 0, said
    same(dict(np.load(tmp_path / "result.npz")), alone)


@pytest.mark.slow
def test_without_a_launcher_the_survivor_ends_by_itself(tmp_path):
    own = {**environment(4), "SPECJAX_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "127.0.0.1:47811"}
    words = [sys.executable, str(SCRIPT), str(tmp_path), "3"]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pair = [subprocess.Popen(words, env={**own, "SPECJAX_PROCESS": str(n)}, **quiet) for n in range(2)]
    try:
        assert pair[1].wait(240) == -9
        before = time.monotonic()
        assert pair[0].wait(60) != 0, "the survivor went on"
        assert time.monotonic() - before < 60
    finally:
        distributed.stop(pair)


@pytest.mark.parametrize(
    ("variables", "several"),
    [
        ({}, False),
        ({"SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_STEP_NUM_TASKS": "8"}, True),
        ({"SPECJAX_PROCESSES": "2"}, True),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"MEGASCALE_COORDINATOR_ADDRESS": "x:1"}, True),
    ],
)
def test_one_of_several(variables, several):
    assert distributed.is_one_of_several(variables) is several


@pytest.mark.parametrize(
    "variables",
    [
        {"SPECJAX_PROCESSES": "2"},
        {"SPECJAX_PROCESSES": "2", "SPECJAX_PROCESS": "2", "JAX_COORDINATOR_ADDRESS": "a:1"},
        {"SPECJAX_PROCESSES": "2", "SPECJAX_PROCESS": "0", "JAX_COORDINATOR_ADDRESS": "a"},
    ],
)
def test_variables_that_do_not_fit(variables):
    with pytest.raises(ValueError, match="set them to host:port, the number of processes, and which one this is") as error:
        distributed.join(variables)
    assert "\n" not in str(error.value)
    distributed.join({})  # alone: nothing happens
    assert distributed.first() and distributed.agreed(True) and not distributed.agreed(False)
