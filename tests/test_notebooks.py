"""The notebooks run from top to bottom, with small sizes, and are kept without outputs."""

from pathlib import Path

import nbformat
import pytest
import tiny_model
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def run(path, folder, **sizes):
    """Execute a notebook with `sizes` set after its cell of sizes; the notebook with outputs.  A failing cell raises."""
    notebook = nbformat.read(path, as_version=4)
    (index,) = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
    for name in sizes:
        assert f"\n{name} = " in notebook.cells[index].source, f"{path.name} has no size {name}"
    notebook.cells.insert(index + 1, nbformat.v4.new_code_cell("\n".join(f"{n} = {v!r}" for n, v in sizes.items())))
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def printed(notebook):
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout"), outputs


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_kept_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None, f"clear the outputs of {path.name}"


def test_quickstart_offline(tmp_path):
    """On a random model: every cell runs, its own assertions hold, and the plot is drawn."""
    model = tiny_model.save(tmp_path / "model")
    done = run(NOTEBOOKS[0], tmp_path, MODEL=str(model), MAX_NEW_TOKENS=12, NUM_PROMPTS=1, NUM_DRAFT=2)
    text, outputs = printed(done)
    assert "2 layers, 61 tokens, 2 prompts" in text and "chat: tau 1." in text and "copy: tau " in text
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.slow  # the README's quickstart and `specjax demo` run on that model in CI
@pytest.mark.model
def test_quickstart(tmp_path):
    """On the demo model: answers that copy have the larger tau."""
    text, _ = printed(run(NOTEBOOKS[0], tmp_path, MAX_NEW_TOKENS=16, NUM_PROMPTS=1))
    chat, copy = (float(text.split(f"{kind}: tau ")[1].split(",")[0]) for kind in ("chat", "copy"))
    assert 1 <= chat < copy


def test_verification(tmp_path):
    """Every cell runs with its own assertions; the known fractions, the wrong q and all five drawings are shown."""
    text, outputs = printed(run(NOTEBOOKS[1], tmp_path, MOST=3, LONGEST=3, SEEDS=2))
    assert "two tokens: 10/9 token by token, 11/9 as a block" in text and "told the point mass: off by at most" in text
    assert "2 x 1: recursive " in text and sum("image/png" in output.get("data", {}) for output in outputs) == 5


def test_losslessness(tmp_path):
    """The famous fault is what was derived; a small sample cannot tell, a large one can; every fault shown is found."""
    sizes = dict(DRAWS=(100, 3000), FAULTS=("argmax draft, softmax q",), ROWS=2048)
    text, outputs = printed(run(NOTEBOOKS[2], tmp_path, **sizes))
    assert "by hand [0.667 0.333]" in text and "inconclusive" in text and "told the softmax : fail" in text
    assert "found by " in text and "nobody" not in text
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2


def test_train_a_drafter(tmp_path):
    """Every cell runs with its own assertions: heads learn, text stays plain's, a tree is made of measured ranks."""
    sizes = dict(STEPS=24, JUDGE_EVERY=12, LENGTH=128, BATCH=4, MODULES=24, PROMPTS=4, NEW_TOKENS=24, NUM_DRAFT=2, TREE_NODES=6)
    text, outputs = printed(run(NOTEBOOKS[3], tmp_path, **sizes))
    assert "step 24: held-out loss" in text and "same tokens as plain: True" in text and "T=1 tree" in text
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_when_does_it_pay(tmp_path):
    """Every cell runs with its own assertions: numbers by hand, the roofline, passes measured here, a full server."""
    sizes = dict(NUM_DRAFT=2, PROMPTS=2, NEW_TOKENS=16, BATCHES=(1,), LOADS=(1, 64, 512), GENERATED=64)
    (path,) = [path for path in NOTEBOOKS if path.stem == "07_when_does_it_pay"]
    text, outputs = printed(run(path, tmp_path, **sizes))
    assert "alpha 0.8, k 4: 3.36 tokens a round, 2.80 times" in text and "bound by compute from 303 tokens" in text
    assert "batch 1, k 1: tau " in text and "512 requests: plain " in text
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3


def test_sharded_target(tmp_path):
    """Every cell runs with its own assertions, on eight devices: tokens stay, a layer sends two sums, placements are drawn."""
    (path,) = [path for path in NOTEBOOKS if path.stem == "08_sharded_target"]
    text, outputs = printed(run(path, tmp_path, NEW_TOKENS=12, NUM_DRAFT=2, METHODS=("mtp",)))
    assert "8 devices (cpu), mesh data=4,model=2" in text and "mtp: same tokens as plain decoding on one device: True" in text
    assert "layer_0    2 all-reduce" in text and "weights gathered: 0" in text
    assert "2 KV heads do not divide by model=8" in text and "8 devices:   5.56 ms" in text
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2


def test_eagle(tmp_path):
    """Every cell runs with its own assertions: the module learns, the trees that grew are drawn, text stays plain's."""
    sizes = dict(
        STEPS=16, JUDGE_EVERY=8, LENGTH=64, BATCH=4, MODULES=24, PROMPTS=4, NEW_TOKENS=16, NUM_DRAFT=3, TOP_K=2, NODES=6
    )
    text, outputs = printed(run(next(p for p in NOTEBOOKS if p.stem == "05_eagle"), tmp_path, **sizes))
    assert "step 16: accuracy by step" in text and "T=1 eagle3, dynamic" in text and "T=0 eagle1" in text
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2


def test_dflash_and_dspark(tmp_path):
    """Every cell runs with its own assertions: a block drafter learns, text stays plain's, fuller servers verify less."""
    sizes = dict(
        NUM_DRAFT=3, STEPS=12, JUDGE_EVERY=6, LENGTH=64, BATCH=4, MODULES=24, PROMPTS=6, NEW_TOKENS=24, REQUESTS=(1, 256)
    )
    (path,) = [path for path in NOTEBOOKS if path.stem == "06_dflash_dspark"]
    text, outputs = printed(run(path, tmp_path, **sizes))
    assert "step 12: accuracy by position" in text and "T=1 dspark, trained here" in text and "tempered: ECE" in text
    assert "1 requests: of 3 tokens each, early stop verifies 3.00" in text and "256 requests" in text
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
