"""Downloads from a local server."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from contnorm.bench.data.fetch import FETCHABLE, Fetchable, fetch
from contnorm.bench.data.multilabel import published_stream
from contnorm.errors import UserError

BODY = bytes(range(256)) * 4000


@dataclass
class Server:
    """Serves files, and remembers which were asked for."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append(self.path.lstrip("/"))
            body = state.files.get(self.path.lstrip("/"))
            if body is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        state.address = f"http://127.0.0.1:{http.server_port}"
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        yield state
        http.shutdown()


def md5(body: bytes) -> str:
    return f"md5:{hashlib.md5(body).hexdigest()}"


def archive(name: str, member: str = "set/in.bin") -> bytes:
    content = io.BytesIO()
    if name.endswith(".zip"):
        with zipfile.ZipFile(content, "w") as file:
            file.writestr(member, BODY)
    else:
        with tarfile.open(fileobj=content, mode="w:gz") as file:
            info = tarfile.TarInfo(member)
            info.size = len(BODY)
            file.addfile(info, io.BytesIO(BODY))
    return content.getvalue()


def test_file_is_downloaded_once_with_progress(server: Server, tmp_path: Path) -> None:
    server.files["a.gz"] = BODY
    reports: list[tuple[str, int, int]] = []
    dataset = Fetchable("nowhere", {"a.gz": md5(BODY)}, folder="set")
    fetch(dataset, tmp_path, server.address, lambda *report: reports.append(report))
    assert (tmp_path / "set" / "a.gz").read_bytes() == BODY
    assert reports[-1] == ("a.gz", len(BODY), len(BODY)) and len(reports) > 2
    fetch(dataset, tmp_path, server.address)
    assert server.asked == ["a.gz"], "what is there and right is not fetched again"


@pytest.mark.parametrize("name", ["a.tar.gz", "a.zip"])
def test_archive_is_unpacked(server: Server, tmp_path: Path, name: str) -> None:
    server.files[name] = archive(name)
    fetch(Fetchable(server.address, {name: md5(server.files[name])}), tmp_path)
    assert (tmp_path / "set" / "in.bin").read_bytes() == BODY


@pytest.mark.parametrize("body", [b"other", None])
def test_wrong_or_missing_file_is_not_kept(server: Server, tmp_path: Path, body: bytes | None) -> None:
    server.files |= {} if body is None else {"a.gz": body}
    with pytest.raises(UserError, match=r"a\.gz: download failed .*--base"):
        fetch(Fetchable(server.address, {"a.gz": md5(BODY)}), tmp_path)
    assert not (tmp_path / "a.gz").exists()


def test_archive_is_not_unpacked_outside_its_folder(server: Server, tmp_path: Path) -> None:
    server.files["a.tar.gz"] = archive("a.tar.gz", "../outside")
    with pytest.raises(tarfile.FilterError):
        fetch(Fetchable(server.address, {"a.tar.gz": md5(server.files["a.tar.gz"])}), tmp_path / "root")
    assert not (tmp_path / "outside").exists()


def test_every_hash_is_well_formed() -> None:
    sources = [*FETCHABLE.values(), *(published_stream(name).lists for name in ("cocoseq", "nus-wideseq"))]
    digits = {"md5": 32, "sha256": 64}
    for checksum in (checksum for source in sources for checksum in source.files.values()):
        kind, _, digest = checksum.partition(":")
        assert len(digest) == digits[kind] and set(digest) <= set("0123456789abcdef")
