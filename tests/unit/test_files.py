"""Files that runs write: where they cannot be, that is known before the work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nibble.errors import ConfigError
from nibble.files import check_writable, write_atomic


def test_a_file_that_can_be_written_is_not_touched(tmp_path: Path) -> None:
    file = tmp_path / "scales.json"
    assert check_writable(file) == file and not list(tmp_path.iterdir())
    write_atomic(file, "{}")
    assert (
        check_writable(str(file)) == file and file.read_text() == "{}" and list(tmp_path.iterdir()) == [file]
    )


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
