"""What every part writes and reads with: nothing half, nothing left over, one sentence about what is wrong."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loopformer import files
from loopformer.errors import FileProblem, remedy
from loopformer.files import (
    DamagedFile,
    append_line,
    explain_write_errors,
    json_bytes,
    lock_folder,
    open_exclusive,
    read_json,
    read_yaml,
    write_atomic,
    write_json,
)


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a.json", b"{}")
    write_atomic(tmp_path / "a.json", b'{"b": 1}')
    assert read_json(tmp_path / "a.json") == {"b": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    with pytest.raises(FileProblem, match=r"Cannot write .*nowhere.*check the path and the disk and start again"):
        write_atomic(tmp_path / "nowhere" / "a.json", b"")


def test_json_holds_what_utf_8_cannot(tmp_path: Path) -> None:
    value = {"ü": "b\udcff", "deep": [1, {"☕": None}]}
    write_atomic(tmp_path / "a.json", json_bytes(value))
    assert read_json(tmp_path / "a.json") == value
    assert '"ü": "b\\udcff"' in (tmp_path / "a.json").read_text("utf-8")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_what_could_not_be_written_leaves_nothing(
    tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise error

    write_atomic(tmp_path / "a.json", b"{}")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises((FileProblem, KeyboardInterrupt)):
        write_atomic(tmp_path / "a.json", b'{"b": 1}')
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a.json": b"{}"}


@pytest.mark.parametrize(
    ("error", "what_to_do"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "make room"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "make room"),
        (PermissionError(errno.EACCES, "Permission denied"), "change its permissions"),
        (OSError(errno.EROFS, "Read-only file system"), "change its permissions"),
        (OSError(errno.EIO, "Input/output error"), "check the path and the disk"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "make room"),
    ],
)
def test_no_room_and_no_permission_are_told_apart(tmp_path: Path, error: Exception, what_to_do: str) -> None:
    assert remedy(error).startswith(what_to_do)
    if isinstance(error, OSError):
        with (
            pytest.raises(FileProblem, match=f"{error.strerror}; .* so {what_to_do}"),
            explain_write_errors(tmp_path),
        ):
            raise error


def test_work_that_fails_leaves_no_empty_folder(tmp_path: Path) -> None:
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), lock_folder(tmp_path / "deep" / "down"):
            raise error
        assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError), lock_folder(tmp_path / "deep" / "down"):
        (tmp_path / "deep" / "down").rename(tmp_path / "deep" / "other").joinpath("nothing").read_bytes()
    assert [path.name for path in tmp_path.rglob("*")] == ["deep", "other"], "what is not empty stays"


def test_an_empty_folder_of_the_users_stays(tmp_path: Path) -> None:
    with pytest.raises(BlockingIOError), lock_folder(tmp_path):
        raise BlockingIOError  # the work's own, not the lock's
    assert tmp_path.is_dir()


def test_one_at_a_time(tmp_path: Path) -> None:
    with lock_folder(tmp_path / "out"):
        with pytest.raises(FileProblem, match="Another process is working"), lock_folder(tmp_path / "out"):
            pass
        assert (tmp_path / "out").is_dir()
    assert (tmp_path / "out").is_dir(), "work that ended well keeps its folder"
    assert not list((tmp_path / "out").iterdir())


def test_a_process_that_is_killed_frees_its_lock(tmp_path: Path) -> None:
    code = "import pathlib, sys, time; from loopformer.files import lock_folder\n"
    code += "with lock_folder(pathlib.Path(sys.argv[1])): "
    command = [sys.executable, "-c", f"{code}print(flush=True); time.sleep(600)", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(FileProblem, match="Another process is working"), lock_folder(tmp_path):
        pass
    process.kill()
    process.communicate()
    with lock_folder(tmp_path):
        assert not list(tmp_path.iterdir())


def test_a_file_grows_by_whole_pieces(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one\n")
    with open_exclusive(path) as file:
        with pytest.raises(FileProblem, match=f"Another process is working on {path}"), open_exclusive(path):
            pass
        append_line(file, path, b"two\n")
        assert path.read_bytes() == b"one\ntwo\n"

        class Full(io.FileIO):
            def write(self, content: Any) -> int:
                if path.stat().st_size > 10:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return super().write(content[:3])

        with Full(path, "r+") as full:
            append_line(full, path, b"34")
            with pytest.raises(FileProblem, match="No space left on device; what was finished is safe"):
                append_line(full, path, b"56789")
        assert path.read_bytes() == b"one\ntwo\n34"


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[1]", b"7", b"[" * 100_000])
def test_wrong_content_is_damage(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    for read in (read_json, read_yaml):
        with pytest.raises(DamagedFile, match=f"{path} (is not readable|must hold)") as caught:
            read(path)
        assert "\n" not in str(caught.value)
    monkeypatch.setattr(files, "_MAX_MB", {"JSON": 0, "YAML": 0})
    for read in (read_json, read_yaml):
        with pytest.raises(DamagedFile, match="too large"):
            read(path)


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b'\xef\xbb\xbf{"key": 1}\r\n')
    assert read_json(tmp_path / "a") == read_yaml(tmp_path / "a") == {"key": 1}


def test_yaml_files_are_bounded_by_a_megabyte(tmp_path: Path) -> None:
    """Parsing takes up to eight seconds per megabyte."""
    path = tmp_path / "a"
    path.write_text("key: ".ljust(1 << 20, "a"))
    assert len(read_yaml(path)["key"]) == (1 << 20) - len("key: ")
    path.write_text("key: ".ljust((1 << 20) + 1, "a"))
    with pytest.raises(DamagedFile, match=rf"^{path} is larger than 1 MB, too large for settings or an index\.$"):
        read_yaml(path)


def test_yaml_has_no_aliases(tmp_path: Path) -> None:
    """Nine lines of them stand for a billion words."""
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10))]
    (tmp_path / "a").write_text("\n".join(lines))
    with pytest.raises(DamagedFile, match="has aliases such as"):
        read_yaml(tmp_path / "a")


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ("model: {width: 64}\ntraining:\n  steps: 9\nmodel: {blocks: 1}\n", "1 and 4"),
        ("training:\n  model: 1\n  seed: [1]\n  'model': 2\n", "2 and 4"),
        ("a: [x, {model: 1, model: 2}]", "1 and 1"),
    ],
)
def test_a_key_must_not_repeat_in_yaml(tmp_path: Path, content: str, lines: str) -> None:
    (tmp_path / "a").write_text(content)
    with pytest.raises(
        DamagedFile, match=rf"a is not readable YAML \(model appears twice, in lines {lines}; keep one"
    ):
        read_yaml(tmp_path / "a")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("seed: " + "9" * 10_000, r"9+…[9.5]+ has more than 100 digits"),
        ("seed: -0x" + "f" * 300_000, r"-0xf+…f+ has more than 100 digits"),
        ("seed: 1" + ":59" * 300_000, r"1(:59)+.*….* has more than 100 digits"),  # base 60, in quadratic time
        ("seed: 1" + ":59" * 300_000 + ".5", r"1(:59)+.*….* has more than 100 digits"),
        ("rate: " + "9" * 10_000 + ".5", r"9+…[9.5]+ has more than 100 digits"),
        ("a: 1\nday: 2001-99-99", "'2001-99-99' in line 2 is no timestamp"),
        ("is: !!bool maybe", "'maybe' in line 1 is no bool"),
        ("seed: !!int ''", "'' in line 1 is no int"),
        ("seed: !!float many", "'many' in line 1 is no float"),
        ("day: !!timestamp never", "'never' in line 1 is no timestamp"),
        (f"{'k' * 1000}: 1\n" * 2, "k+…k+ appears twice, in lines 1 and 2; keep one"),
    ],
)
def test_values_that_yaml_cannot_hold_are_named_and_cut(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "a").write_text(content)
    with pytest.raises(DamagedFile, match=rf"a is not readable YAML \({said}\)\.$"):
        read_yaml(tmp_path / "a")


def test_a_key_may_stand_in_several_mappings_and_be_a_value(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a: a\nb: [a, a, {a: {a: b}}, {a: 1}]\nc: {a: a}\n")
    assert read_yaml(tmp_path / "a") == {"a": "a", "b": ["a", "a", {"a": {"a": "b"}}, {"a": 1}], "c": {"a": "a"}}


def test_a_file_that_cannot_be_read_is_not_damaged(tmp_path: Path) -> None:
    for path, reason in [(tmp_path, "Is a directory"), (tmp_path / "nothing", "No such file")]:
        for read in (read_json, read_yaml):
            with pytest.raises(FileProblem, match=f"{path} cannot be read: {reason}") as caught:
                read(path)
            assert not isinstance(caught.value, DamagedFile)


def test_json_of_any_text_comes_back(tmp_path: Path) -> None:
    value = {"naïve": ["café ☕", "half of a pair \udc80"], "number": 1.5}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value
    assert "café ☕".encode() in (tmp_path / "a.json").read_bytes()
