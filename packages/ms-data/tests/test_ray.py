"""Ray clusters give the same bytes as one machine, tested with a local cluster."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ms_data import DedupOptions, SettingError, TokenizerError, build, clean, dedup, train_tokenizer
from ms_data.cli import main
from ms_data.engine.pools import Send, worker_count
from ms_data.engine.ray_cluster import ClusterError, _connect, _get

from .chat_templates import write_rows, write_tokenizer
from .media_samples import QWEN2, encode_image, media_row, random_image, write_model
from .test_array_jobs import RULES, read_tree
from .test_build import random_texts, write_lines

CLEAN_SCRIPT = """
import sys
import time
from pathlib import Path
from ms_data.cli import main
from ms_data.engine import batches, ray_cluster

batches.BATCH_CHARACTERS = 2000
marker, *arguments = sys.argv[1:]
get = ray_cluster._get

def get_later(ray, result):
    while not Path(marker).exists():
        time.sleep(0.05)
    return get(ray, result)

ray_cluster._get = get_later
sys.exit(main(["clean", *arguments]))
"""
"""`ms-data clean` with small batches, which takes no result before a file exists.

So the work cannot finish before Ray notices that its head or node is gone, which takes a minute.
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts with some duplicates."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = random_texts(1, 200)
    write_lines(folder / "a.jsonl", [*texts, *texts[:50]])
    return folder


def test_invalid_workers_are_refused(corpus: Path, tmp_path: Path) -> None:
    """Before anything is read, and without importing ray."""
    for value in ("spark", "ray:8000", "16"):
        with pytest.raises(SettingError, match="must be a number, ray or ray://HOST:PORT"):
            worker_count(value)
    assert worker_count(3) == 3
    rules = tmp_path / "rules.toml"
    rules.write_text("[unicode]\n")
    command = [
        "clean",
        str(corpus),
        str(rules),
        "--out",
        str(tmp_path / "out"),
        "--workers",
        "many",
    ]
    with pytest.raises(SystemExit) as exit_info:
        main(command)
    assert exit_info.value.code == 2


@pytest.fixture
def conversations(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """`build` arguments for conversations, preference pairs, and rows with images."""
    messages = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Since 日本."},
    ]
    model = write_tokenizer(tmp_path / "model")
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"messages": messages * n, "weight": 0.5} for n in range(1, 40)]
    )
    pairs = [
        {"prompt": f"What is {n}?", "chosen": f"It is {n}.", "rejected": "No." * n, "margin": n}
        for n in range(1, 40)
    ]
    vision_model = write_model(tmp_path / "seeing", QWEN2)
    media_rows = []
    for number in range(9):
        (tmp_path / f"{number}.png").write_bytes(
            encode_image(random_image(20 + number, 20, number))
        )
        parts: list[dict[str, Any]] = [{"type": "text", "text": f"What is {number}?"}]
        parts += [{"type": "image", "image": f"{number}.png"}] * (number % 3)
        media_rows.append(media_row(parts, f"It is {number}."))
    return {
        "conversations": {"corpus": rows, "tokenizer": model, "chat": model},
        "preferences": {
            "corpus": write_rows(tmp_path / "pairs.jsonl", pairs),
            "tokenizer": model,
            "chat": model,
            "pairs": True,
        },
        "media": {
            "corpus": write_rows(tmp_path / "pictures.jsonl", media_rows),
            "tokenizer": vision_model,
            "chat": vision_model,
            "processor": vision_model,
        },
    }


def test_batches_encoded_by_cluster_workers_equal_local_ones(
    conversations: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs the workers' code in this process, with requests and replies as bytes."""

    @contextmanager
    def run_locally(function: str, setup: bytes, *, address: str) -> Iterator[tuple[Send, int]]:
        module, _, name = function.partition(":")
        work = getattr(import_module(module), name)(setup)
        addresses.append(address)
        yield lambda request: partial(work, request), 2

    addresses: list[str] = []
    monkeypatch.setattr("ms_data.engine.pools.ray_pool", run_locally)
    monkeypatch.setattr("ms_data.engine.pools.check_ray", lambda: None)
    monkeypatch.setattr("ms_data.engine.batches.BATCH_CHARACTERS", 800)
    for name, settings in conversations.items():
        build(out=tmp_path / "local" / name, held_out_fraction=0.2, **settings)
        build(out=tmp_path / "cluster" / name, held_out_fraction=0.2, workers="ray", **settings)
    assert addresses == ["ray"] * len(conversations)
    assert read_tree(tmp_path / "cluster") == read_tree(tmp_path / "local")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cluster_gives_the_same_bytes_as_one_machine(
    corpus: Path,
    conversations: dict[str, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every command, on a running cluster and on one started for the call."""
    ray = pytest.importorskip("ray")
    monkeypatch.setattr("ms_data.engine.batches.BATCH_CHARACTERS", 8000)
    tokenizer = train_tokenizer(corpus, vocab_size=320)
    options = DedupOptions(substring_words=8)

    def run(folder: Path, workers: str | None) -> None:
        build(
            corpus,
            tokenizer=tokenizer,
            out=folder / "build",
            held_out_fraction=0.2,
            workers=workers,
        )
        clean(corpus, RULES, out=folder / "clean", workers=workers or 1)
        dedup(corpus, out=folder / "dedup", options=options, workers=workers or 1)
        for name, settings in conversations.items():
            build(out=folder / name, held_out_fraction=0.2, workers=workers, **settings)

    run(tmp_path / "local", None)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        run(tmp_path / "cluster", "ray")
        assert ray.is_initialized()
        texts = write_lines(tmp_path / "ends.jsonl", ["a", "b c"])
        token_id = tokenizer.encode("b")[0]
        ambiguous = type(tokenizer)(tokenizer.content, end_of_text=token_id)
        with pytest.raises(TokenizerError, match="encodes a text with the end-of-text"):
            build(texts, tokenizer=ambiguous, out=tmp_path / "no", workers="ray")
    finally:
        ray.shutdown()
    assert read_tree(tmp_path / "cluster") == read_tree(tmp_path / "local")
    clean(corpus, RULES, out=tmp_path / "own", workers="ray")
    assert not ray.is_initialized()
    assert read_tree(tmp_path / "own") == read_tree(tmp_path / "local" / "clean")


def test_a_cluster_that_does_not_start_gives_one_line() -> None:
    """Ray raises a plain Exception when a node takes too long to start."""

    class SlowRay:
        def init(self, *_: object, **__: object) -> None:
            raise Exception("The current node timed out during startup.\nSee the logs.")

    with pytest.raises(ClusterError, match=r"no Ray cluster at ray \(.*ray start --head") as raised:
        _connect(SlowRay(), "ray")
    assert "\n" not in str(raised.value)


def test_lost_cluster_workers_give_one_line() -> None:
    """Errors of the work itself are raised unchanged."""
    ray = pytest.importorskip("ray")

    class LosingRay:
        exceptions = ray.exceptions

        def get(self, error: BaseException) -> bytes:
            raise error

    lost = [ray.exceptions.WorkerCrashedError(), ray.exceptions.ObjectLostError("1" * 28, None, "")]
    for error in lost:
        with pytest.raises(
            ClusterError, match=r"lost a worker process .* run the same command again"
        ) as raised:
            _get(LosingRay(), error)
        assert "\n" not in str(raised.value)
    cause = TokenizerError("no such token")
    with pytest.raises(TokenizerError, match="no such token"):
        _get(LosingRay(), ray.exceptions.RayTaskError("f", "trace", cause))


@pytest.mark.parametrize(("ending", "code", "lines"), [("os._exit(1)", 1, 1), ("pass", 0, 0)])
def test_a_process_terminated_by_ray_leaves_one_line(ending: str, code: int, lines: int) -> None:
    """Ray's C++ code calls _exit when it loses its head node; a normal exit prints nothing."""
    script = f"""
import os
from ms_data.engine.ray_cluster import explained_exit
with explained_exit():
    {ending}
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert result.returncode == code
    assert len(result.stderr.splitlines()) == lines
    assert ("run the same command again to resume" in result.stderr) == bool(lines)


def descendants(root: int) -> dict[int, str]:
    """Map the process ids of all descendants of a process to their command lines."""
    found_processes: dict[int, str] = {}
    parents, lines = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                status = (folder / "stat").read_text().rpartition(")")[2]
                parents[int(folder.name)] = int(status.split()[1])
                lines[int(folder.name)] = (folder / "cmdline").read_bytes().decode()
    level = {root}
    while level:
        level = {process for process, parent in parents.items() if parent in level}
        found_processes |= {process: lines[process] for process in level}
    return found_processes


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("victim", "recovers"),
    [("ray::_run_task", True), ("raylet/raylet", False), ("gcs_server", False)],
)
def test_killing_a_ray_process_recovers_or_ends_in_one_line_and_resumes(
    victim: str,
    recovers: bool,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGKILL of a worker, a node or the head; the output is the same.

    Ray's agents are also named `ray::`, and a node ends some time after its agents do.
    """
    pytest.importorskip("ray")
    rules = tmp_path / "rules.toml"
    rules.write_text("[unicode]\n")
    command = [
        sys.executable,
        "-c",
        CLEAN_SCRIPT,
        str(tmp_path / "take results"),
        str(corpus),
        str(rules),
        "--out",
        str(tmp_path / "out"),
    ]
    command += ["--workers", "ray"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not any("_run_task" in text for text in descendants(process.pid).values()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    victims: list[int] = []
    while not victims:  # the worker may be between two tasks
        processes = descendants(process.pid)
        victims = [number for number, text in processes.items() if victim in text]
        assert process.poll() is None, process.communicate()
    for number in victims:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    if recovers:
        (tmp_path / "take results").touch()
    _, errors = process.communicate()
    (tmp_path / "take results").touch()
    for number in processes:  # Ray's agents outlive a killed node
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    assert "Traceback" not in errors
    assert (process.returncode == 0) == recovers, errors
    if not recovers:
        assert process.returncode == 1
        assert sum("run the same command again" in text for text in errors.splitlines()) == 1
        assert subprocess.run(command, check=False).returncode == 0
    monkeypatch.setattr("ms_data.engine.batches.BATCH_CHARACTERS", 2000)  # a frame per batch
    clean(corpus, rules, out=tmp_path / "local", workers=1)
    assert read_tree(tmp_path / "out") == read_tree(tmp_path / "local")
