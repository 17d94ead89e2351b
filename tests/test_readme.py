"""What the README shows is run."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.mark.model
def test_the_quickstart_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["fast"][0].tokens == names["plain"][0].tokens
    shown = capsys.readouterr().out
    assert names["fast"][0].text in shown and names["piece"].completion.text in shown


def test_nothing_was_left_to_fill_in():
    assert not re.findall(r"\b(?:TAU|TIME|TODO|NUMBERS)[A-Z_]*\b", README)
