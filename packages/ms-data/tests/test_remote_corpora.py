"""Remote corpora: credentials never leak, and errors are one line."""

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
    """A small BPE tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "a.jsonl").write_text(LINES)
    train_tokenizer(folder / "a.jsonl", vocab_size=270, out=folder / "tokenizer.json")
    return folder / "tokenizer.json"


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """An HTTP server over a folder with JSON Lines."""
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "corpus.jsonl").write_text(LINES)
    handler = functools.partial(_QuietHandler, directory=str(tmp_path / "web"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


@pytest.mark.parametrize("path", ["/corpus.jsonl", "/corpus.jsonl?X-Amz-Signature=SECRETsignature"])
def test_a_file_on_an_http_server_is_read(
    server: str, path: str, tokenizer: Path, tmp_path: Path
) -> None:
    """Works without a size in the listing, and with a query string after the suffix."""
    pytest.importorskip("aiohttp")
    build(server + path, tokenizer=tokenizer, out=tmp_path / "web-shards")
    build(tmp_path / "web" / "corpus.jsonl", tokenizer=tokenizer, out=tmp_path / "here")
    for folder in ("web-shards", "here"):
        assert verify(tmp_path / folder).ok
    shards = [tmp_path / name / "shard-00000.msd" for name in ("web-shards", "here")]
    assert shards[0].read_bytes() == shards[1].read_bytes()
    assert "SECRET" not in (tmp_path / "web-shards" / "build.json").read_text()


class _RefusedError(Exception):
    """An error class of the client library, as ftplib has."""


class _RefusingFile:
    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int = -1) -> bytes:
        raise _RefusedError("550 ftp://someone:SECRETpw@host/b.jsonl?sig=SECRETsignature refused")


class _RefusingFileSystem(MemoryFileSystem):
    """Lists all files but refuses to read those whose names start with b."""

    protocol = "refusing"
    store: dict[str, Any] = {}  # noqa: RUF012 - as fsspec declares it
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("refusing://").rpartition("@")[2].partition("/")[2]

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super()._open(path, mode, **options)
        refused = mode == "rb" and path.rpartition("/")[2].startswith("b")
        return _RefusingFile(file) if refused else file


@pytest.fixture
def refusing() -> str:
    """The URL, with a password, of a store that refuses to read b.jsonl."""
    fsspec.register_implementation("refusing", _RefusingFileSystem, clobber=True)
    system = fsspec.filesystem("refusing")
    system.pipe("/corpus/a.jsonl", LINES.encode())
    system.pipe("/corpus/b.jsonl", LINES.encode())
    system.pipe("/bad/c.jsonl", b'{"text": 3}\n' + LINES.encode())
    return "refusing://someone:SECRETpw@host"


def test_a_refused_read_is_one_line_without_secrets(
    refusing: str, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2 names the file; user, password and query do not appear."""
    command = ["build", f"{refusing}/corpus", "--tokenizer", str(tokenizer)]
    assert main([*command, "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert "refusing://host/corpus/b.jsonl: cannot be reached: 550" in captured.err
    assert captured.err.count("\n") == 1
    assert not [secret for secret in SECRETS if secret in captured.err + captured.out]


def test_no_credentials_appear_in_ledgers_or_messages(
    refusing: str, tokenizer: Path, tmp_path: Path
) -> None:
    """An unreadable document is named by its URL in a file that may be published."""
    reasons: list[str] = []
    clean(
        f"{refusing}/bad",
        {"control_characters": {}},
        out=tmp_path / "out",
        workers=1,
        on_quarantine=reasons.append,
    )
    (part,) = (tmp_path / "out" / "ledger").iterdir()
    ledger = zstandard.ZstdDecompressor().stream_reader(part.read_bytes()).read().decode()
    assert "refusing://host/bad/c.jsonl:1" in ledger
    content = ledger + "".join(reasons) + (tmp_path / "out" / "ledger.json").read_text()
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
def test_urls_are_shown_without_credentials(text: str, shown: str) -> None:
    """User, password and query are removed, also within messages of client libraries."""
    assert strip_credentials(text) == shown
