"""A mirror writes whole states, uploads little twice, and yields to another writer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="obstore is not installed: pip install -e '.[store]'")

from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.storage import mirror as module
from decoupled_diloco.storage.mirror import (
    GRACE_SECONDS,
    OBJECTS,
    Mirror,
    Standing,
    StoredCopy,
    StoredState,
    newest_state,
    require_continues,
    required_state,
    restore,
)
from decoupled_diloco.storage.object_store import Objects


def write(folder: Path, path: str, content: bytes) -> None:
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)


def append(folder: Path, path: str, content: bytes) -> None:
    with (folder / path).open("ab") as file:
        file.write(content)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    write(run, "run.toml", b"[run]\n")
    write(run, "tape/shard-0.jsonl", b'{"a": 1}\n')
    write(run, "durable/shard-0/00000001.safetensors", b"weights")
    write(run, "durable/shard-0/00000001.journal", b"record")
    write(run, "coordinator/00000001.json", b"{}")
    write(run, "learners/a/00000001.ranks/.metadata", b"of all ranks")
    return run


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return Objects(f"file://{tmp_path}/bucket/x")


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that no state needs are deleted at once."""
    assert GRACE_SECONDS > 0
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.0)


def content_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "store.json"
    }


def restored(objects: Objects, place: Path) -> dict[str, bytes]:
    shutil.rmtree(place, ignore_errors=True)
    restore(objects, place, required_state(objects))
    return content_of(place)


def test_a_state_has_everything_that_a_run_needs_and_no_secret(
    folder: Path, objects: Objects, tmp_path: Path
) -> None:
    expected = content_of(folder)
    for path in ("token", ".token", "lock", "addresses", "payloads/shard-0/1", "report.html"):
        write(folder, path, b"not mirrored")
    write(folder, "durable/shard-0/.00000002.safetensors.7.part", b"torn")
    write(folder, "learners/a/00000001.ranks/.metadata.tmp", b"torn")
    write(folder, "checkpoints/000001/shard-0.safetensors", b"without a manifest")
    assert Mirror(folder, objects, "x").write()
    assert restored(objects, tmp_path / "other") == expected


def test_a_state_without_changes_is_not_written_again(folder: Path, objects: Objects) -> None:
    mirror = Mirror(folder, objects, "x")
    assert mirror.write()
    assert not mirror.write()
    append(folder, "tape/shard-0.jsonl", b'{"a": 2}\n')
    sent = mirror.sent_bytes
    assert mirror.look() == 9
    assert mirror.write()
    assert mirror.number == 2
    # A small piece is uploaded again with the next one.
    assert mirror.sent_bytes - sent == 18
    assert mirror.look() == 0


def test_a_file_that_grows_has_few_pieces_and_is_uploaded_about_once(
    folder: Path, objects: Objects, tmp_path: Path
) -> None:
    mirror = Mirror(folder, objects, "x")
    for number in range(64):
        append(folder, "tape/shard-0.jsonl", b"x" * 100 + b"%d\n" % number)
        mirror.write()
    state = required_state(objects)
    assert len(state.files["tape/shard-0.jsonl"].pieces) <= 8
    size = (folder / "tape/shard-0.jsonl").stat().st_size
    assert mirror.sent_bytes < 8 * size
    assert restored(objects, tmp_path / "other") == content_of(folder)


def test_a_large_piece_is_never_uploaded_again(
    folder: Path, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES_MAX", 100)
    mirror = Mirror(folder, objects, "x")
    append(folder, "tape/shard-0.jsonl", b"x" * 200)
    mirror.write()
    sent = mirror.sent_bytes
    append(folder, "tape/shard-0.jsonl", b"y" * 1000)
    mirror.write()
    assert mirror.sent_bytes - sent == 1000


@pytest.mark.parametrize("change", ["replaced", "shorter", "another end"])
def test_a_file_that_did_not_only_grow_is_uploaded_whole(
    folder: Path, objects: Objects, tmp_path: Path, change: str
) -> None:
    journal = "durable/shard-0/00000001.journal"
    write(folder, journal, b"start" + b"a" * 10_000)
    mirror = Mirror(folder, objects, "x")
    mirror.write()
    new = {
        "replaced": b"other" + b"a" * 10_005,
        "shorter": b"start",
        "another end": b"start" + b"a" * 9_999 + b"bcd",  # a failed record was overwritten
    }[change]
    write(folder, journal, new)
    mirror.write()
    assert restored(objects, tmp_path / "other") == content_of(folder)


def test_a_renamed_tape_is_in_the_state_once(
    folder: Path, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rename happens between the listing and the opening of the files."""
    tape, segment = folder / "tape/shard-0.jsonl", "tape/shard-0.segments/000000000009.jsonl"
    mirror, listed = Mirror(folder, objects, "x"), Mirror._listed
    renamed: list[int] = []

    def rename(self: Mirror, patterns: tuple[str, ...]) -> list[str]:
        found = listed(self, patterns)
        if "tape/*.jsonl" in patterns and len(renamed) < 2:
            renamed.append(1)
            if len(renamed) == 2:  # after the files were opened, and before the second look
                (folder / segment).parent.mkdir()
                tape.rename(folder / segment)
                tape.write_bytes(b'{"a": 2}\n')
                found = listed(self, patterns)
        return found

    monkeypatch.setattr(Mirror, "_listed", rename)
    mirror.write()
    found = restored(objects, tmp_path / "other")
    assert (found[segment], found["tape/shard-0.jsonl"]) == (b'{"a": 1}\n', b'{"a": 2}\n')


def test_the_files_of_a_state_are_read_in_reverse_order_of_cause_and_effect(
    folder: Path, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While files are opened, a merge happens: first the journal, then the tape has it."""
    mirror, opened = Mirror(folder, objects, "x"), Mirror._open

    def open_later(self: Mirror, path: str) -> object:
        found = opened(self, path)
        append(folder, "durable/shard-0/00000001.journal", b"+")
        append(folder, "tape/shard-0.jsonl", b"+")
        return found

    monkeypatch.setattr(Mirror, "_open", open_later)
    mirror.write()
    found = restored(objects, tmp_path / "other")
    merges = found["durable/shard-0/00000001.journal"].count(b"+")
    assert merges >= found["tape/shard-0.jsonl"].count(b"+")


def test_a_deleted_file_is_uploaded_if_it_was_in_the_state(
    folder: Path, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, "learners/learner-0/00000001.safetensors", b"checkpoint")
    mirror, upload = Mirror(folder, objects, "x"), Mirror._upload

    def delete_first(self: Mirror, opened: list[object]) -> object:
        (folder / "learners/learner-0/00000001.safetensors").unlink(missing_ok=True)
        return upload(self, opened)  # type: ignore[arg-type]

    monkeypatch.setattr(Mirror, "_upload", delete_first)
    mirror.write()
    assert restored(objects, tmp_path / "b")["learners/learner-0/00000001.safetensors"]


def test_a_torn_upload_is_never_used(
    folder: Path, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content_of(folder)
    Mirror(folder, objects, "x").write()
    for path in ("durable/shard-0/00000001.journal", "tape/shard-0.jsonl"):
        append(folder, path, b"more")
    write(folder, "durable/shard-0/00000002.safetensors", b"new")
    torn = Mirror(folder, objects, "x")
    calls: list[str] = []
    upload = Objects.upload

    def fail_at_the_third(self: Objects, name: str, source: object, nbytes: int) -> None:
        calls.append(name)
        if len(calls) > 2:
            raise StorageError("the store is away")
        upload(self, name, source, nbytes)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(Objects, "upload", fail_at_the_third)
        with pytest.raises(StorageError):
            torn.write()
    assert restored(objects, tmp_path / "other") == before
    assert torn.write(), "what was uploaded is part of the next state"
    assert restored(objects, tmp_path / "other") == content_of(folder)


def test_a_manifest_that_could_not_be_written_is_written_later(
    folder: Path, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = Mirror(folder, objects, "x")
    with monkeypatch.context() as patched:
        patched.setattr(Objects, "create", lambda *_: (_ for _ in ()).throw(StorageError("away")))
        with pytest.raises(StorageError):
            mirror.write()
    assert newest_state(objects) is None
    assert mirror.write()
    assert required_state(objects).number == 1


def test_a_lost_answer_is_no_other_writer(
    folder: Path, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, create = Mirror(folder, objects, "x"), Objects.create

    def answer_is_lost(self: Objects, name: str, content: bytes) -> bool:
        create(self, name, content)
        return False  # as after a repetition of the request

    with monkeypatch.context() as patched:
        patched.setattr(Objects, "create", answer_is_lost)
        assert mirror.write()
    assert mirror.number == 1
    assert not mirror.is_replaced


def test_of_two_writers_one_wins(folder: Path, objects: Objects, tmp_path: Path) -> None:
    first = Mirror(folder, objects, "x")
    first.write()
    other = tmp_path / "other"
    state = required_state(objects)
    restore(objects, other, state)
    Standing.of(objects, state).write(other)
    second = Mirror(other, objects, "x")
    append(other, "tape/shard-0.jsonl", b"second\n")
    assert second.write()
    append(folder, "tape/shard-0.jsonl", b"first\n")
    with pytest.raises(ConfigError, match="has state 2 from a process on") as caught:
        first.write()
    assert "this mirror has stopped" in str(caught.value)
    assert first.is_replaced
    assert restored(objects, tmp_path / "c")["tape/shard-0.jsonl"].endswith(b"second\n")
    # The first folder cannot continue either, and nothing in the store is lost.
    with pytest.raises(ConfigError, match="has state 2 of this run"):
        Mirror(folder, objects, "x").begin()
    with pytest.raises(ConfigError, match="already has a run, 'x' from"):
        require_continues(objects, newest_state(objects), None)


def test_a_restarted_mirror_continues_and_uploads_nothing_twice(
    folder: Path, objects: Objects
) -> None:
    Mirror(folder, objects, "x").write()
    again = Mirror(folder, objects, "x")
    assert not again.write()
    assert again.number == 1
    append(folder, "tape/shard-0.jsonl", b"more\n")
    assert again.write()
    assert again.number == 2


@pytest.mark.usefixtures("no_grace")
def test_objects_that_no_kept_state_needs_are_deleted(folder: Path, objects: Objects) -> None:
    objects.put(f"{OBJECTS}/dead/00000001.x", b"an orphan of a process that was killed")
    mirror = Mirror(folder, objects, "x")
    for number in range(5):
        write(folder, "durable/shard-0/00000002.safetensors", b"w" * (number + 1))
        mirror.write()
    found = {each.name for each in objects.listed(OBJECTS)}
    needed = set().union(*(each.objects for each in mirror._kept))
    assert found == needed
    assert len(list(objects.listed("manifests"))) == 2


def test_more_files_than_may_be_open_are_mirrored(
    folder: Path, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OPEN_FILES_MAX", 4)
    for number in range(30):
        write(folder, f"learners/a/00000001.ranks/{number}.distcp", b"%d" % number)
    mirror = Mirror(folder, objects, "x")
    most, opened = [0], Mirror._upload

    def count(self: Mirror, files: list[object]) -> object:
        most[0] = max(most[0], len(files))
        return opened(self, files)  # type: ignore[arg-type]

    monkeypatch.setattr(Mirror, "_upload", count)
    mirror.write()
    assert most[0] <= 4 + 5
    assert restored(objects, tmp_path / "other") == content_of(folder)


def test_a_restored_folder_has_the_times_of_its_files(
    folder: Path, objects: Objects, tmp_path: Path
) -> None:
    """So its mirror uploads nothing that the store already has."""
    os.utime(folder / "run.toml", ns=(5, 5))
    Mirror(folder, objects, "x").write()
    restored(objects, tmp_path / "other")
    assert (tmp_path / "other/run.toml").stat().st_mtime_ns == 5


def test_a_copy_has_only_the_parts_that_are_needed(folder: Path, objects: Objects) -> None:
    mirror = Mirror(folder, objects, "x")
    mirror.write()
    copy = StoredCopy(objects.address, "tape")
    assert sorted(content_of(copy.folder)) == ["run.toml", "tape/shard-0.jsonl"]
    append(folder, "tape/shard-0.jsonl", b"more\n")
    mirror.write()
    copy.refresh()
    assert content_of(copy.folder)["tape/shard-0.jsonl"].endswith(b"more\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "is not a manifest of a run"),
        (b'{"format": 9}', "has format=9, but this version reads only 2"),
        (
            b'{"format": 2, "number": 1, "run": "", "name": "", "writer": "", "host": "", '
            b'"wall": 0, "after": 0, "parts": {}, "files": {"../x": [0, ""]}}',
            "is not a path in a run folder",
        ),
    ],
)
def test_an_invalid_manifest_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(StorageError, match=message):
        StoredState.read(text, "manifests/00000001.json")


def test_a_missing_object_is_named(folder: Path, objects: Objects, tmp_path: Path) -> None:
    Mirror(folder, objects, "x").write()
    state = required_state(objects)
    (name, _), *_ = state.files["coordinator/00000001.json"].pieces
    objects.delete([name])
    with pytest.raises(StorageError, match="no longer has an object of coordinator"):
        restore(objects, tmp_path / "other", state)
    assert not (tmp_path / "other/run.toml").exists(), "a partial copy is not a run folder"


def test_a_folder_that_does_not_exist_is_not_created_by_a_reader(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist: create the bucket, or correct"):
        StoredCopy(f"file://{tmp_path}/none")
    assert not (tmp_path / "none").exists()


def test_a_store_without_a_run_is_refused(objects: Objects) -> None:
    with pytest.raises(ConfigError, match="has no run: use the address that"):
        required_state(objects)


@pytest.fixture
def second(tmp_path: Path) -> Path:
    """The folder of shards 1 and 2 on another machine."""
    run = tmp_path / "second"
    write(run, "run.toml", b"[run]\n# of the second machine\n")
    for shard in (1, 2):
        write(run, f"tape/shard-{shard}.jsonl", b'{"b": 1}\n')
        write(run, f"durable/shard-{shard}/00000001.safetensors", b"weights of %d" % shard)
        write(run, f"durable/shard-{shard}/00000001.journal", b"record")
    write(run, "tape/mirror.jsonl", b"of the part's mirror\n")
    write(run, "learners/b/00000001.safetensors", b"checkpoint")
    return run


def two_mirrors(folder: Path, second: Path, objects: Objects) -> tuple[Mirror, Mirror]:
    """Return the mirrors of a run and its part, with a state that has the files of both."""
    main, part = Mirror(folder, objects, "x"), Mirror(second, objects, "x", "shard-1")
    assert not part.write(), "there is no state of the run yet"
    assert main.write()
    assert part.write()
    assert main.write()
    return main, part


def test_a_state_has_the_files_of_all_folders(
    folder: Path, second: Path, objects: Objects, tmp_path: Path
) -> None:
    _, part = two_mirrors(folder, second, objects)
    found = restored(objects, tmp_path / "other")
    of_second = content_of(second)
    for path in ("run.toml", "tape/mirror.jsonl"):  # files of the whole run are from shard 0
        del of_second[path]
    assert found == content_of(folder) | of_second
    state = required_state(objects)
    assert {name: each.number for name, each in state.parts.items()} == {"shard-1": part.number}


def test_parts_are_read_before_the_own_files_so_that_none_is_newer_than_the_coordinator(
    folder: Path, second: Path, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, part = two_mirrors(folder, second, objects)
    opened: list[str] = []
    open_file, read_parts = Mirror._open, Mirror._read_parts

    def open_later(self: Mirror, path: str) -> object:
        opened.append(path)
        return open_file(self, path)

    def read_first(self: Mirror) -> None:
        assert not opened
        read_parts(self)
        append(second, "tape/shard-1.jsonl", b"later\n")
        with monkeypatch.context() as patched:
            patched.setattr(Mirror, "_open", open_file)
            assert part.write()

    monkeypatch.setattr(Mirror, "_open", open_later)
    monkeypatch.setattr(Mirror, "_read_parts", read_first)
    append(folder, "tape/shard-0.jsonl", b"more\n")
    assert main.write()
    assert b"later" not in restored(objects, tmp_path / "other")["tape/shard-1.jsonl"]


def test_a_part_waits_if_no_state_of_the_run_names_its_states_and_not_at_the_end(
    folder: Path, second: Path, objects: Objects
) -> None:
    main, part = two_mirrors(folder, second, objects)
    assert [part.write(), part.write(), part.write()] == [True, True, False]
    assert part.is_ahead
    append(second, "tape/shard-2.jsonl", b"the end\n")
    assert part.write(last=True)
    assert not part.write(last=True), "nothing is new"
    main.write()
    assert part.write()
    assert not part.is_ahead


@pytest.mark.usefixtures("no_grace")
def test_a_part_keeps_what_a_state_in_use_names_and_deletes_the_rest(
    folder: Path, second: Path, objects: Objects, tmp_path: Path
) -> None:
    objects.put("parts/shard-1/objects/dead/00000001.x", b"an orphan of a process that was killed")
    main, part = two_mirrors(folder, second, objects)
    for number in range(6):
        write(second, "durable/shard-1/00000001.safetensors", b"w" * (number + 1))
        write(folder, "durable/shard-0/00000001.safetensors", b"w" * (number + 1))
        part.write()
        if number % 2:
            main.write()
        for each in objects.listed("manifests"):
            text = objects.get(each.name)
            assert text is not None
            restore(objects, tmp_path / f"{number}", StoredState.read(text, each.name))
    needed = set().union(*(each.objects for each in (*main._kept, *part._kept)))
    found = {each.name for each in objects.listed("objects")}
    found |= {each.name for each in objects.listed("parts/shard-1/objects")}
    assert found == needed
    states = [int(each.name[-13:-5]) for each in objects.listed("parts/shard-1/manifests")]
    assert sorted(states) == [3, 4, 5, 6, 7], "from the older one that the part has found named"


@pytest.mark.usefixtures("no_grace")
def test_a_run_that_continues_in_one_folder_ends_its_parts(
    folder: Path, second: Path, objects: Objects, tmp_path: Path
) -> None:
    _, part = two_mirrors(folder, second, objects)
    other, state = tmp_path / "other", required_state(objects)
    restore(objects, other, state)
    Standing.restored(objects, state).write(other)
    append(second, "tape/shard-1.jsonl", b"of a process that is still alive\n")
    assert part.write()
    continued = Mirror(other, objects, "x")
    append(other, "tape/shard-1.jsonl", b"continued\n")
    assert continued.write()
    assert not required_state(objects).parts
    with pytest.raises(
        ConfigError, match=r"has state 3 from a process on .*, without part shard-1"
    ):
        part.write()
    assert part.is_replaced
    for number in range(3):
        write(other, "durable/shard-1/00000001.safetensors", b"w" * (number + 1))
        write(other, "durable/shard-2/00000001.safetensors", b"w" * (number + 1))
        continued.write()
    continued.end()
    assert restored(objects, tmp_path / "c") == content_of(other)
    of_part = [each.name for each in objects.listed("parts/shard-1")]
    assert set(of_part) <= required_state(objects).objects, "the rest is deleted"


def test_of_two_machines_with_one_part_the_later_one_wins(
    folder: Path, second: Path, objects: Objects, tmp_path: Path
) -> None:
    main, first = two_mirrors(folder, second, objects)
    third = tmp_path / "third"
    shutil.copytree(second, third)
    (third / "store.json").unlink()
    later = Mirror(third, objects, "x", "shard-1")
    assert not later.write(), "is this the run of the store? Its next state shows it"
    append(folder, "tape/shard-0.jsonl", b"more\n")
    main.write()
    write(third, "durable/shard-1/00000002.safetensors", b"of the later machine")
    assert later.write()
    with pytest.raises(
        ConfigError, match="has state 2 of part shard-1 from a process on"
    ) as caught:
        first.write()
    assert str(caught.value).endswith("this mirror has stopped; end one of the two runs")
    main.write()
    found = restored(objects, tmp_path / "other")
    assert found["durable/shard-1/00000002.safetensors"] == b"of the later machine"


def test_a_part_does_not_join_another_run(folder: Path, second: Path, objects: Objects) -> None:
    main, part = Mirror(folder, objects, "x"), Mirror(second, objects, "y", "shard-1")
    main.write()
    assert not part.write(), "the state may be of an earlier run"
    append(folder, "tape/shard-0.jsonl", b"more\n")
    main.write()
    with pytest.raises(ConfigError, match="has another run, 'x' from"):
        part.write()
    never = Mirror(second, objects, "x", "shard-1")
    with pytest.raises(StorageError, match="mirror the folder of shard 0 first"):
        never.write(last=True)


def test_a_restarted_mirror_of_a_part_continues(
    folder: Path, second: Path, objects: Objects
) -> None:
    two_mirrors(folder, second, objects)
    again = Mirror(second, objects, "x", "shard-1")
    assert not again.write(last=True)
    assert (again.number, again.sent_bytes) == (1, 0)
    append(second, "tape/shard-1.jsonl", b"more\n")
    assert again.write()
    assert again.number == 2


def test_a_shard_that_has_moved_is_from_the_folder_with_its_newest_file(
    folder: Path, second: Path, objects: Objects, tmp_path: Path
) -> None:
    write(folder, "durable/shard-1/00000009.safetensors", b"before it moved")
    write(folder, "tape/shard-1.jsonl", b"before it moved")
    for path in ("durable/shard-1/00000009.safetensors", "tape/shard-1.jsonl"):
        os.utime(folder / path, ns=(5, 5))
    two_mirrors(folder, second, objects)
    found = restored(objects, tmp_path / "other")
    assert "durable/shard-1/00000009.safetensors" not in found
    assert found["tape/shard-1.jsonl"] == b'{"b": 1}\n'


def test_a_checkpoint_of_the_run_without_a_part_is_left_out(
    folder: Path, second: Path, objects: Objects, tmp_path: Path
) -> None:
    main, part = two_mirrors(folder, second, objects)
    write(folder, "checkpoints/000001/manifest.json", b"{}")
    write(folder, "checkpoints/000001/shard-0.safetensors", b"0")
    main.write()
    assert not any(path.startswith("checkpoints") for path in required_state(objects).files)
    for shard in (1, 2):
        write(second, f"checkpoints/000001/shard-{shard}.safetensors", b"%d" % shard)
    part.write()
    main.write()
    found = restored(objects, tmp_path / "other")
    names = sorted(path for path in found if path.startswith("checkpoints"))
    assert [path.rpartition("/")[2].partition(".")[0] for path in names] == [
        "manifest",
        *(f"shard-{shard}" for shard in range(3)),
    ]


def test_after_two_writers_the_store_has_two_states_and_their_objects(
    folder: Path, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each writer has written two states before one of them loses."""
    first, other = Mirror(folder, objects, "x"), tmp_path / "other"
    for number in range(2):
        append(folder, "tape/shard-0.jsonl", b"%d\n" % number)
        first.write()
    state = required_state(objects)
    restore(objects, other, state)
    Standing.restored(objects, state).write(other)
    winner = Mirror(other, objects, "x")
    winner.begin()
    for number in range(2):
        append(other, "tape/shard-0.jsonl", b"of the winner %d\n" % number)
        winner.write()
    append(folder, "tape/shard-0.jsonl", b"of the loser\n")
    with monkeypatch.context() as patched:  # the loser ends before it deletes anything
        patched.setattr(Objects, "delete", lambda *_: None)
        with pytest.raises(ConfigError):
            first.write()
    append(other, "tape/shard-0.jsonl", b"the end\n")
    winner.write(last=True)
    winner.end()
    assert {each.name for each in objects.listed("manifests")} == {
        f"manifests/{number:08d}.json" for number in (4, 5)
    }
    needed = set().union(*(each.objects for each in winner._kept))
    assert {each.name for each in objects.listed(OBJECTS)} == needed
    assert restored(objects, tmp_path / "c") == content_of(other)


def test_the_objects_of_a_process_that_continues_the_run_are_not_orphans(
    folder: Path, objects: Objects
) -> None:
    mirror = Mirror(folder, objects, "x")
    mirror.write()
    objects.put(f"{OBJECTS}/next/00000001.x", b"of the next state")
    mirror.end()
    assert objects.get(f"{OBJECTS}/next/00000001.x") is not None


def test_a_loser_deletes_what_it_has_uploaded_for_no_state(
    folder: Path, objects: Objects, tmp_path: Path
) -> None:
    first, other = Mirror(folder, objects, "x"), tmp_path / "other"
    first.write()
    shutil.copytree(folder, other)
    second = Mirror(other, objects, "x")
    append(other, "tape/shard-0.jsonl", b"second\n")
    second.write()
    before = {each.name for each in objects.listed(OBJECTS)}
    append(folder, "tape/shard-0.jsonl", b"first\n")
    with pytest.raises(ConfigError):
        first.write()
    assert {each.name for each in objects.listed(OBJECTS)} == before
