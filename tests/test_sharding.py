"""The library over meshes of eight simulated devices.  What needs them runs in one process of its own, `sharded.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import sharded
import sharded_programs
from jax.sharding import PartitionSpec as P

from specjax import sharding


def in_a_process(names):
    script = Path(__file__).with_name("sharded.py")
    own = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # see `sharded.host_peak`
    done = subprocess.run([sys.executable, str(script), *names], capture_output=True, text=True, timeout=3600, env=own)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def quick():
    return in_a_process([*sharded.QUICK, *sharded.FAULTS])


@pytest.mark.parametrize("name", [*sharded.QUICK, *sharded.FAULTS])
def test_on_eight_devices(quick, name):
    assert quick[name] is None, quick[name]


@pytest.fixture(scope="module")
def slow():
    return in_a_process(sharded.SLOW)


@pytest.mark.slow
@pytest.mark.parametrize("name", sharded.SLOW)
def test_everything_on_eight_devices(slow, name):
    assert slow[name] is None, slow[name]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data=2,modle=4", "no axis 'modle': write data=2,model=4 with the axes data, fsdp, model"),
        ("model", "model has the size ''"),
        ("model=0", "model has the size '0': write a whole number from 1"),
        ("model=-1", "model has the size '-1'"),
        ("model=2", "is of 2 devices, and there are 1 cpu device: choose sizes whose product is that"),
        ("v5e-8", "mesh 'v5e-8' is of 8 devices"),
        ("", "no axis ''"),
    ],
)
def test_a_mesh_that_is_none(text, said):
    with pytest.raises(ValueError) as error:
        sharding.parse_mesh(text, jax.devices()[:1])
    assert said in str(error.value) and "\n" not in str(error.value)


def test_every_axis_is_there():
    mesh = sharding.parse_mesh(" model=1 ", jax.devices()[:1])
    assert mesh.axis_names == ("data", "fsdp", "model") and mesh.size == 1
    assert all(sharding.PRESETS)


def test_parted_and_whole():
    kernel = jax.numpy.arange(24.0).reshape(3, 8)
    params = {"layer_0": {"mlp": {"gate_up": {"kernel": kernel}, "down": {"kernel": kernel}}}}
    apart = sharding.parted(params)["layer_0"]["mlp"]
    assert (apart["gate_up"]["kernel"][:, 1] == kernel[:, 4:]).all() and apart["down"]["kernel"] is kernel
    assert sharding.parted(sharding.parted(params))["layer_0"]["mlp"]["gate_up"]["kernel"].shape == (3, 2, 4)
    assert (sharding.whole(sharding.parted(params))["layer_0"]["mlp"]["gate_up"]["kernel"] == kernel).all()
    shapes = jax.eval_shape(lambda: params)
    assert sharding.parted(shapes)["layer_0"]["mlp"]["gate_up"]["kernel"].shape == (3, 2, 4)


def test_one_device_is_left_alone():
    x = jax.numpy.ones(3)
    assert sharding.mesh_of({"a": x, "b": 1}) is None and sharding.settled(x, None) is x and sharding.fetch(x).sum() == 3
    assert sharding.fitted(("data", None), (4, 5), sharding.parse_mesh("data=1", jax.devices()[:1])) == P("data", None)


def sizes(layers, *more):
    """The table of experiments/sharded_sizes.py."""
    script = Path(__file__).parents[1] / "experiments" / "sharded_sizes.py"
    words = [sys.executable, str(script), "--layers", str(layers), "--json", "-", *more]
    done = subprocess.run(words, capture_output=True, text=True, timeout=7200)
    assert done.returncode == 0, done.stderr[-4000:]
    return [sharded_programs.sharded_sizes.Row(**row) for row in json.loads(done.stdout)]


@pytest.mark.slow
def test_all_real_sizes_without_weights():
    rows = sizes(2)
    assert {(row.target, row.drafter) for row in rows} == set(sharded_programs.GIGABYTES)
    for row in rows:
        sharded_programs.hold_at_two_layers(row)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["Llama-3.3-70B", "Qwen3-32B", "Gemma-3-27B"])
def test_real_sizes_at_full_depth(target):
    for row in sizes(0, "--targets", target):
        sharded_programs.hold(row)
