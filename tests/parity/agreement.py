"""How closely two implementations must agree."""

import numpy as np


def close(name, expected, got, record, size=1e-5):
    """That the largest difference is at most `size` of the largest value expected.

    Ours is float32, whose rounding is a part of what is rounded: beside values of 4 a product summed in another order (another
    machine's) is 1e-5 away with nothing wrong.  No element is held to its own size, as it is a sum of larger ones.
    """
    expected, got = np.asarray(expected), np.asarray(got)
    assert expected.shape == got.shape, f"{name}: {expected.shape} and {got.shape}"
    difference = float(np.abs(expected - got).max() / np.abs(expected).max())
    record(name, f"{difference:.1e}")
    assert difference <= size, f"{name}: {difference:.1e}"
