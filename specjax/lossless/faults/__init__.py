"""Planted faults, off the production path: what shipped elsewhere, and which rung finds it."""
