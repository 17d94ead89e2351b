"""The command `specjax`: each subcommand is a dataclass of flags handed to a function of the library.

Progress and tables go to stderr, generated text to stdout, `--json FILE` (`-` = stdout) gets one object at the very end.
Exit status 0 = done, 2 = bad input, told in one line on stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import flax
import jax
import jax.numpy as jnp
import tyro
from tqdm import tqdm
from tyro.constructors import PrimitiveConstructorSpec

import specjax
from specjax import api, bench, keys, metrics, prompts, report
from specjax import demo as demonstration
from specjax.api import load_drafter
from specjax.drafters.base import LoadedDrafter, options
from specjax.models.fetch import cache_dir
from specjax.models.load import LM, load
from specjax.sampling import SamplingParams, check
