"""Addresses keep their secrets, real servers are read, and their errors are one line."""

import functools
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import zstandard
from fsspec.implementations.memory import MemoryFileSystem

from ms_data import CorpusError, build, clean, train_tokenizer, verify
from ms_data.cli import main
from ms_data.corpus.places import strip_credentials

LINES = "".join(json.dumps({"text": f"text number {n} of some"}) + "\n" for n in range(200))
SECRETS = ("SECRETpw", "SECRETsignature", "someone")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "a.jsonl").write_text(LINES)
    train_tokenizer(folder / "a.jsonl", vocab_size=270, out=folder / "tokenizer.json")
    return folder / "tokenizer.json"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """An HTTP server of the standard library over a folder with JSON Lines."""
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "corpus.jsonl").write_text(LINES)
    handler = functools.partial(_Quiet, directory=str(tmp_path / "web"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()


@pytest.mark.parametrize("more", ["/corpus.jsonl", "/corpus.jsonl?X-Amz-Signature=SECRETsignature"])
def test_a_file_of_a_web_server_is_read(
    server: str, more: str, tokenizer: Path, tmp_path: Path
) -> None:
    """Listings tell no size there; a query does not hide what kind of file it is."""
    pytest.importorskip("aiohttp")
    build(server + more, tokenizer=tokenizer, out=tmp_path / "web-shards")
    build(tmp_path / "web" / "corpus.jsonl", tokenizer=tokenizer, out=tmp_path / "here")
    for folder in ("web-shards", "here"):
        assert verify(tmp_path / folder).ok
    shards = [tmp_path / name / "shard-00000.msd" for name in ("web-shards", "here")]
    assert shards[0].read_bytes() == shards[1].read_bytes()
    assert "SECRET" not in (tmp_path / "web-shards" / "build.json").read_text()


class _RefusedError(Exception):
    """An error of a client's own, as ftplib has."""


class _RefusingFile:
    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int = -1) -> bytes:
        raise _RefusedError("550 ftp://someone:SECRETpw@host/b.jsonl?sig=SECRETsignature refused")


class _RefusingSystem(MemoryFileSystem):
    """Lists all files and lets none be read whose name begins with b."""

    protocol = "refusing"
    store: dict[str, Any] = {}  # noqa: RUF012 - as fsspec declares it
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("refusing://").rpartition("@")[2].partition("/")[2]

    def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        file = super()._open(path, mode, **more)
        refused = mode == "rb" and path.rpartition("/")[2].startswith("b")
        return _RefusingFile(file) if refused else file


@pytest.fixture
def refusing() -> str:
    """The address, with a password, of a store that refuses one of two files."""
    fsspec.register_implementation("refusing", _RefusingSystem, clobber=True)
    system = fsspec.filesystem("refusing")
    system.pipe("/corpus/a.jsonl", LINES.encode())
    system.pipe("/corpus/b.jsonl", LINES.encode())
    system.pipe("/bad/c.jsonl", b'{"text": 3}\n' + LINES.encode())
    return "refusing://someone:SECRETpw@host"


def test_a_refused_read_is_one_line_without_secrets(
    refusing: str, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2 names the file; user, password and query are nowhere."""
    line = ["build", f"{refusing}/corpus", "--tokenizer", str(tokenizer)]
    assert main([*line, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert "refusing://host/corpus/b.jsonl: cannot be reached: 550" in said.err
    assert said.err.count("\n") == 1
    assert not [secret for secret in SECRETS if secret in said.err + said.out]


def test_no_secret_is_in_a_ledger_or_message(
    refusing: str, tokenizer: Path, tmp_path: Path
) -> None:
    """A document that cannot be read is named by its address, in a file that is published."""
    told: list[str] = []
    clean(
        f"{refusing}/bad",
        {"control_characters": {}},
        out=tmp_path / "out",
        workers=1,
        on_quarantine=told.append,
    )
    (part,) = (tmp_path / "out" / "ledger").iterdir()
    ledger = zstandard.ZstdDecompressor().stream_reader(part.read_bytes()).read().decode()
    assert "refusing://host/bad/c.jsonl:1" in ledger
    content = ledger + "".join(told) + (tmp_path / "out" / "ledger.json").read_text()
    assert not [secret for secret in SECRETS if secret in content]
    with pytest.raises(CorpusError) as caught:
        build("ftp://someone:SECRETpw@127.0.0.1:1/x.jsonl", tokenizer=tokenizer, out=tmp_path / "o")
    assert not [secret for secret in SECRETS if secret in str(caught.value)]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://bucket/key", "s3://bucket/key"),
        ("ftp://u:p@h:21/x", "ftp://h:21/x"),
        ("https://h/x.jsonl?X-Amz-Signature=s&b=1", "https://h/x.jsonl"),
        ("filecache::ftp://u:p/w@h/x", "filecache::ftp://u:p/w@h/x"),
        ("cannot open 'http://u:p@h/x?a=b' (404)", "cannot open 'http://h/x' (404)"),
        ("a/path?with=query", "a/path?with=query"),
    ],
)
def test_addresses_are_shown_without_secrets(text: str, shown: str) -> None:
    """User, password and query are left out, also within a client's message."""
    assert strip_credentials(text) == shown
