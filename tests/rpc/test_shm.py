"""Names of shared memory come from another process: none of them may lead anywhere else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from msaserve.errors import InvalidRequestError
from msaserve.rpc import shm


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "shm"
    directory.mkdir()
    (tmp_path / "secret").write_bytes(b"0123456789")
    monkeypatch.setattr(shm, "DIRECTORY", directory)
    return directory


def test_a_part_of_a_file(directory: Path) -> None:
    (directory / "a").write_bytes(b"0123456789")
    assert shm.read("a", 3, 4) == b"3456"
    assert shm.read("a", 10, 0) == b""
    shm.remove("a")
    assert not (directory / "a").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "../secret", "a/b", "/etc/passwd", "a..b", "a\0b", "x" * 300])
def test_names_that_lead_elsewhere(directory: Path, name: str) -> None:
    with pytest.raises(InvalidRequestError):
        shm.read(name, 0, 4)
    shm.remove(name)
    assert (directory.parent / "secret").exists()


def test_a_link_is_not_followed_and_not_removed(directory: Path) -> None:
    (directory / "link").symlink_to(directory.parent / "secret")
    with pytest.raises(InvalidRequestError, match="cannot be opened"):
        shm.read("link", 0, 4)
    shm.remove("link")
    assert (directory / "link").is_symlink()


def test_only_regular_files(directory: Path) -> None:
    os.mkfifo(directory / "pipe")  # and opening it must not wait for a writer
    (directory / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(InvalidRequestError, match="no regular file"):
            shm.read(name, 0, 4)
        shm.remove(name)
        assert (directory / name).exists()


@pytest.mark.parametrize(("offset", "num_bytes"), [(0, 11), (7, 4), (11, 0), (2**62, 1), (0, 2**62)])
def test_beyond_the_end(directory: Path, offset: int, num_bytes: int) -> None:
    (directory / "a").write_bytes(b"0123456789")
    with pytest.raises(InvalidRequestError, match="has 10 bytes"):
        shm.read("a", offset, num_bytes)


def test_what_a_dead_process_left(directory: Path) -> None:
    mine = shm.write(b"abc").name
    others = [directory / name for name in (f"msaserve-{os.getpid()}1-x", "msaserve-x", "other")]
    for path in others:
        path.touch()
    shm.remove_all(os.getpid())
    assert not (directory / mine).exists()
    assert all(path.exists() for path in others)


def test_what_a_dead_process_of_several_left(directory: Path) -> None:
    """Each has a name of its own within its supervisor's."""
    names = [shm.write(b"abc", owner).name for owner in ("100-7", "100-8", "1007", "8")]
    shm.remove_all("100-7")
    assert sorted(path.name for path in directory.iterdir()) == sorted(names[1:])
    shm.remove_all(100)
    assert sorted(path.name for path in directory.iterdir()) == sorted(names[2:])


def test_what_is_written_is_private_and_new(directory: Path) -> None:
    handle = shm.write(memoryview(b"abc"))
    path = directory / handle.name
    assert path.read_bytes() == b"abc"
    assert path.stat().st_mode & 0o777 == 0o600
    assert (handle.offset, handle.nbytes) == (0, 3)
    assert shm.write(b"abc").name != handle.name


def test_no_room_leaves_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: object) -> int:
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="no space"):
        shm.write(b"abc")
    assert not list(directory.iterdir())


def test_the_namespace(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shm.namespace_id() == shm.namespace_id()
    assert shm.namespace_id().endswith(f":{directory.stat().st_dev}")
    monkeypatch.setattr(shm, "DIRECTORY", directory / "none")
    assert shm.namespace_id() == ""
