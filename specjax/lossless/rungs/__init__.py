"""The rungs of the ladder: each `rung(lab) -> Finding`."""
