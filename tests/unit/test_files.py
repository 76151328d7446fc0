"""Files that runs write: where they cannot be, that is known before the work."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from nibble.errors import ConfigError
from nibble.files import check_writable, remove_unused, write_atomic, write_new


def test_a_file_that_can_be_written_is_not_touched(tmp_path: Path) -> None:
    file = tmp_path / "scales.json"
    assert check_writable(file) == file and not list(tmp_path.iterdir())
    write_atomic(file, "{}")
    assert (
        check_writable(str(file)) == file and file.read_text() == "{}" and list(tmp_path.iterdir()) == [file]
    )


def test_of_several_that_write_a_file_the_first_one_counts(tmp_path: Path) -> None:
    file = tmp_path / "result"
    assert write_new(file, "first") and not write_new(file, "second")
    assert file.read_text() == "first" and list(tmp_path.iterdir()) == [file]


def test_a_home_folder_may_be_written_as_users_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_writable("~/scales.json") == tmp_path / "scales.json"


def test_what_cannot_be_written_is_refused_with_the_cause(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere; create it"):
        check_writable(tmp_path / "nowhere" / "x.json", "KV scales")
    with pytest.raises(ConfigError, match=r"cannot write KV scales to .* it is a folder"):
        check_writable(tmp_path, "KV scales")
    with pytest.raises(ConfigError, match=r"cannot write the result to /proc/x.json \("):
        check_writable("/proc/x.json")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full device is Linux's")
def test_a_full_file_system_is_found(tmp_path: Path) -> None:
    # What is written for the check goes to a device that is always full.
    (tmp_path / f".x.json.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match="No space left on device"):
        check_writable(tmp_path / "x.json")
    assert not list(tmp_path.iterdir())


def aged(path: Path, size: int, seconds: float) -> Path:
    """A file that was last used so long ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (time.time() - seconds, time.time() - seconds))
    return path


def test_what_is_unused_goes_first_and_whole(tmp_path: Path) -> None:
    old = [aged(tmp_path / "old" / name, 500, 1000 + i) for i, name in enumerate("ab")]
    os.utime(tmp_path / "old", (0, 0))
    middle, new = aged(tmp_path / "middle", 1000, 500), aged(tmp_path / "new", 1000, 10)
    entries = [tmp_path / "old", middle, new, tmp_path / "gone"]
    size = (tmp_path / "old").lstat().st_size
    assert remove_unused(entries, 1 << 20, 60) == 3000 + size and all(path.exists() for path in (*old, new))
    assert remove_unused(entries, 2500, 60) == 2000 and not (tmp_path / "old").exists()
    # What may be read right now stays, whatever the limit.
    assert remove_unused(entries, 0, 60) == 1000 and not middle.exists() and new.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_what_cannot_be_deleted_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = aged(tmp_path / "kept", 1000, 100)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError))
    assert remove_unused([file], 0, 60) == 1000 and file.exists()
