"""Downloads from a local server: complete, interrupted and resumed, truncated, corrupted, wrong."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from contnorm.bench.data.fetch import FETCHABLE, Fetchable, fetch
from contnorm.bench.data.published import find_lists, published_stream, read_lists
from contnorm.errors import UserError

pytest.importorskip("pooch", reason="pooch is not installed")
BODY = bytes(range(256)) * 4000


@dataclass
class Server:
    """Serves files, and remembers which ranges were asked for."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    break_after: int | None = None  # close the connection after so many bytes, once
    ranges: bool = True
    tells_length: bool = True
    asked: list[str | None] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.asked.append(wanted)
            body = state.files.get(self.path.lstrip("/"))
            if body is None:
                self.send_error(404)
                return
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and state.ranges else 0
            if start >= len(body):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            if state.tells_length:
                self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            end = len(body) if state.break_after is None else start + state.break_after
            state.break_after = None
            self.wfile.write(body[start:end])

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        state.address = f"http://127.0.0.1:{http.server_port}"
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        yield state
        http.shutdown()


def md5(body: bytes) -> str:
    return f"md5:{hashlib.md5(body).hexdigest()}"


WHAT = Fetchable("nowhere", {"a.gz": md5(BODY)}, folder="set")


def test_file_is_downloaded_once_with_progress(server: Server, tmp_path: Path) -> None:
    server.files["a.gz"] = BODY
    told: list[tuple[str, int, int]] = []
    fetch(WHAT, tmp_path, server.address, lambda *what: told.append(what))
    assert (tmp_path / "set" / "a.gz").read_bytes() == BODY
    assert told[-1] == ("a.gz", len(BODY), len(BODY)) and len(told) > 2
    fetch(WHAT, tmp_path, server.address)
    assert server.asked == [None], "what is there and right is not fetched again"


def test_interrupted_download_is_resumed(server: Server, tmp_path: Path) -> None:
    server.files["a.gz"], server.break_after = BODY, 300_000
    with pytest.raises(UserError, match=r"Run the command again to resume"):
        fetch(WHAT, tmp_path, server.address)
    assert not (tmp_path / "set" / "a.gz").exists()
    have = (tmp_path / "set" / "a.gz.part").stat().st_size
    assert 0 < have <= 300_000
    fetch(WHAT, tmp_path, server.address)
    assert server.asked[-1] == f"bytes={have}-" and (tmp_path / "set" / "a.gz").read_bytes() == BODY
    assert not (tmp_path / "set" / "a.gz.part").exists()


def test_server_without_ranges_restarts_download(server: Server, tmp_path: Path) -> None:
    server.files["a.gz"], server.break_after, server.ranges = BODY, 300_000, False
    with pytest.raises(UserError, match="download failed"):
        fetch(WHAT, tmp_path, server.address)
    fetch(WHAT, tmp_path, server.address)
    assert (tmp_path / "set" / "a.gz").read_bytes() == BODY


def test_complete_part_is_accepted(server: Server, tmp_path: Path) -> None:
    server.files["a.gz"] = BODY
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.gz.part").write_bytes(BODY)
    fetch(WHAT, tmp_path, server.address)
    assert (tmp_path / "set" / "a.gz").read_bytes() == BODY


def test_download_is_not_written_through_a_link(server: Server, tmp_path: Path) -> None:
    server.files["a.gz"] = BODY
    (tmp_path / "set").mkdir()
    (other := tmp_path / "other").write_bytes(b"mine")
    (tmp_path / "set" / "a.gz.part").symlink_to(other)
    fetch(WHAT, tmp_path, server.address)
    assert (tmp_path / "set" / "a.gz").read_bytes() == BODY and other.read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["set/in.bin", "set/.in.bin.part"])
def test_archive_is_not_unpacked_through_a_link(server: Server, tmp_path: Path, name: str) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("set/in.bin", BODY)
    server.files["a.zip"] = packed.getvalue()
    (tmp_path / "set").mkdir()
    (other := tmp_path / "other").write_bytes(b"mine")
    (tmp_path / name).symlink_to(other)
    dataset = Fetchable("nowhere", {"a.zip": md5(packed.getvalue())}, members={"set/in.bin": md5(BODY)})
    fetch(dataset, tmp_path, server.address)
    assert (tmp_path / "set" / "in.bin").read_bytes() == BODY and other.read_bytes() == b"mine"


@pytest.mark.parametrize("spoilt", [BODY[:-5], BODY[:-1] + b"x"], ids=["truncated", "corrupted"])
def test_file_with_wrong_hash_is_deleted(server: Server, tmp_path: Path, spoilt: bytes) -> None:
    server.files["a.gz"] = spoilt
    with pytest.raises(UserError, match=r"a\.gz: .*does not match md5:.*deleted"):
        fetch(WHAT, tmp_path, server.address)
    assert not [path for path in (tmp_path / "set").iterdir() if path.is_file()]


def test_archive_is_unpacked_and_verified(server: Server, tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        entry = tarfile.TarInfo("inner/train")
        entry.size = len(BODY)
        archive.addfile(entry, io.BytesIO(BODY))
    server.files["b.tar.gz"] = packed.getvalue()
    what = Fetchable("nowhere", {"b.tar.gz": md5(packed.getvalue())}, members={"inner/train": md5(BODY)})
    fetch(what, tmp_path, server.address)
    assert (tmp_path / "inner" / "train").read_bytes() == BODY
    (tmp_path / "inner" / "train").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"inner/train: is missing or .*md5:"):
        fetch(what, tmp_path, server.address)


def packed(ending: str, name: str, **attributes: object) -> bytes:
    """An archive with a proper member, and one of a given name and kind."""
    content = io.BytesIO()
    if ending == "zip":
        with zipfile.ZipFile(content, "w") as archive:
            archive.writestr("inner/train", BODY)
            archive.writestr(name, b"hostile")
    else:
        with tarfile.open(fileobj=content, mode="w:gz") as archive:
            proper, other = tarfile.TarInfo("inner/train"), tarfile.TarInfo(name)
            proper.size = len(BODY)
            for key, value in attributes.items():
                setattr(other, key, value)
            archive.addfile(proper, io.BytesIO(BODY))
            archive.addfile(other, io.BytesIO(b"hostile"))
    return content.getvalue()


@pytest.mark.parametrize(
    ("ending", "name", "attributes"),
    [
        ("tar.gz", "../outside", {"size": 7}),
        ("tar.gz", "inner/../../outside", {"size": 7}),
        ("tar.gz", "{root}/outside", {"size": 7}),
        ("tar.gz", "inner/link", {"type": tarfile.SYMTYPE, "linkname": "/etc"}),
        ("tar.gz", "inner/link", {"type": tarfile.LNKTYPE, "linkname": "../../outside"}),
        ("tar.gz", "inner/pipe", {"type": tarfile.FIFOTYPE}),
        ("zip", "../outside", {}),
        ("zip", "{root}/outside", {}),
    ],
)
def test_archive_with_outside_paths_is_refused(
    server: Server, tmp_path: Path, ending: str, name: str, attributes: dict[str, object]
) -> None:
    body = packed(ending, name.format(root=tmp_path), **attributes)
    server.files[f"b.{ending}"] = body
    with pytest.raises(UserError, match=r"member .* is not a file inside the target folder"):
        fetch(Fetchable("nowhere", {f"b.{ending}": md5(body)}, folder="deep/set"), tmp_path, server.address)
    assert not list(tmp_path.rglob("outside")) and not (tmp_path / "deep" / "set" / "inner").exists()


@pytest.mark.parametrize("ending", ["tar.gz", "zip"])
def test_deleted_member_is_unpacked_again(server: Server, tmp_path: Path, ending: str) -> None:
    body = packed(ending, "inner/more", size=7)
    server.files[f"b.{ending}"] = body
    what = Fetchable("nowhere", {f"b.{ending}": md5(body)}, folder="set")
    for _ in range(2):
        fetch(what, tmp_path, server.address)
        assert (tmp_path / "set" / "inner" / "train").read_bytes() == BODY
        assert (tmp_path / "set" / "inner" / "more").read_bytes() == b"hostile"
        (tmp_path / "set" / "inner" / "train").unlink()
    assert len(server.asked) == 1


def test_damaged_or_too_large_archive_is_refused(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files = {"c.tar.gz": b"no archive", "c.zip": b"no archive", "d.zip": packed("zip", "inner/more")}
    monkeypatch.setattr("contnorm.bench.data.fetch.UNPACKED_LIMIT", len(BODY))
    for name, words in (
        ("c.tar.gz", "cannot be unpacked"),
        ("c.zip", "cannot be unpacked"),
        ("d.zip", "more than the"),
    ):
        with pytest.raises(UserError, match=words):
            fetch(Fetchable("nowhere", {name: md5(server.files[name])}), tmp_path, server.address)
    assert not (tmp_path / "inner").exists()


@pytest.mark.parametrize("tells_length", [True, False])
def test_download_over_the_known_size_is_aborted(server: Server, tmp_path: Path, tells_length: bool) -> None:
    server.files["a.gz"], server.tells_length = BODY, tells_length
    what = replace(WHAT, sizes={"a.gz": len(BODY) - 1})
    received: list[int] = []
    with pytest.raises(UserError, match=r"a\.gz.* at most 1,023,999"):
        fetch(what, tmp_path, server.address, lambda _, done, __: received.append(done))
    assert max(received, default=0) < len(BODY)
    assert not [path for path in (tmp_path / "set").iterdir() if path.is_file()]
    fetch(replace(WHAT, sizes={"a.gz": len(BODY)}), tmp_path, server.address)


def test_too_large_partial_download_is_restarted(server: Server, tmp_path: Path) -> None:
    server.files["a.gz"] = BODY
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.gz.part").write_bytes(BODY + b"more")
    fetch(replace(WHAT, sizes={"a.gz": len(BODY)}), tmp_path, server.address)
    assert server.asked == [None] and (tmp_path / "set" / "a.gz").read_bytes() == BODY


@pytest.mark.parametrize("base", ["nowhere", "http://[", "http://127.0.0.1:1", "http://a b"])
def test_invalid_address_is_refused(tmp_path: Path, base: str) -> None:
    with pytest.raises(UserError, match="download failed"):
        fetch(WHAT, tmp_path, base)


def test_every_file_has_a_known_size() -> None:
    for what in FETCHABLE.values():
        assert set(what.sizes) == set(what.files) and min(what.sizes.values()) > 0


def test_missing_file_on_server_is_named(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"/a\.gz: .*\(HTTP Error 404"):
        fetch(WHAT, tmp_path, server.address)


def test_task_lists_are_downloaded_once(server: Server, tmp_path: Path) -> None:
    stream = published_stream("cocoseq")
    server.files = {name: f"[{i}, 7]".encode() for i, name in enumerate(stream.lists.files)}
    hashes = {name: f"sha256:{hashlib.sha256(body).hexdigest()}" for name, body in server.files.items()}
    ours = replace(stream, lists=replace(stream.lists, files=hashes))
    for _ in range(2):
        folder = find_lists(ours, None, tmp_path / "coco", tmp_path / "out", server.address)
        assert folder == tmp_path / "out" / "ids" and len(server.asked) == 8
    lists = read_lists(ours, folder)
    assert lists.as_published and lists.ids["test"][3] == [7, 7]
    (folder / "test_task3_id_coco.json").unlink()
    with pytest.raises(UserError, match=r"train_task0_id_coco\.json: .*does not match .*--ids"):
        find_lists(stream, None, tmp_path / "coco", tmp_path / "other", server.address)
    assert not list((tmp_path / "other").rglob("*.json"))


def test_every_hash_is_well_formed(tmp_path: Path) -> None:
    for what in FETCHABLE.values():
        for known in (*what.files.values(), *what.members.values()):
            kind, _, digits = known.partition(":")
            assert kind == "md5" and len(digits) == 32
