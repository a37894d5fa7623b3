"""Whatever changes files may be the last thing that a command does: the same command resumes.

A process preloads `dying.c`, which counts its calls of the operating system, so that no write,
sync, rename, removal, new file or new length is left out, whoever makes it: Python, numpy, pyarrow
or the tokenizer.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path

import pytest

from ms_data import (
    DedupOptions,
    OutputError,
    build,
    clean,
    dedup,
    draw_stats,
    export_dataset,
    import_dataset,
    train_tokenizer,
)
from ms_data.engine import batches, run

from .chats import write_rows
from .pictures import QWEN2, asked, drawn, encoded, write_model
from .test_array_jobs import RULES, files_below
from .test_build import texts_of, write_lines

COMPILER = shutil.which("cc") or shutil.which("gcc")
Work = Callable[[Path, Path], object]


def a_build(place: Path, out: Path) -> None:
    """A dataset of text, in two splits."""
    build(place / "corpus", tokenizer=place / "tokenizer.json", out=out, held_out_fraction=0.2)


def a_build_with_pictures(place: Path, out: Path) -> None:
    """A dataset of conversations, whose pictures go into a split of their own."""
    model = place / "model"
    build(
        place / "seen", tokenizer=model, out=out, chat=model, processor=model, held_out_fraction=0.4
    )


def a_clean(place: Path, out: Path) -> None:
    """By some rules."""
    clean(place / "corpus", RULES, out=out, workers=1)


def a_clean_of_pictures(place: Path, out: Path) -> None:
    """Near-duplicates among them, for which the corpus is read once more."""
    clean(place / "seen", {"pictures": {"near_bits": 3}}, out=out, workers=1)


def a_dedup(place: Path, out: Path) -> None:
    """In all three ways."""
    dedup(place / "corpus", out=out, options=DedupOptions(substring_words=8), workers=1)


def an_import_of_megatron(place: Path, out: Path) -> None:
    """The pair of files that an export made."""
    import_dataset(place / "pair.idx", tokenizer=place / "tokenizer.json", out=out)


def an_export_to_megatron(place: Path, out: Path) -> None:
    """Both files."""
    export_dataset(place / "shards", out=out / "pair", target="megatron")


def an_export_to_parquet(place: Path, out: Path) -> None:
    """One file, which pyarrow writes."""
    export_dataset(place / "shards", out=out / "a.parquet", target="parquet")


def a_tokenizer(place: Path, out: Path) -> None:
    """A folder as transformers reads it."""
    train_tokenizer(place / "corpus", vocab_size=270, out=out)


def a_page(place: Path, out: Path) -> None:
    """The page that draws a ledger."""
    out.mkdir(exist_ok=True)
    draw_stats(place / "cleaned", out=out / "page.html")


WORKS: dict[str, Work] = {
    work.__name__: work
    for work in (
        *(a_build, a_build_with_pictures, a_clean, a_clean_of_pictures, a_dedup),
        *(an_import_of_megatron, an_export_to_megatron, an_export_to_parquet),
        *(a_tokenizer, a_page),
    )
}
FEWEST = {
    "a_page": 3,
    "an_import_of_megatron": 15,
    "a_tokenizer": 8,
    "an_export_to_parquet": 4,
    "an_export_to_megatron": 8,
}
"""Calls that a command makes at least; 20 of those that are not named."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands read, and the library that kills."""
    if COMPILER is None:
        pytest.skip("a C compiler is needed")
    place = tmp_path_factory.mktemp("place")
    source = Path(__file__).with_name("dying.c")
    library = place / "dying.so"
    command = [COMPILER, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"]
    subprocess.run(command, check=True)
    corpus = place / "corpus"
    corpus.mkdir()
    texts = texts_of(1, 60)
    write_lines(corpus / "a.jsonl", texts)
    write_lines(corpus / "b.jsonl.gz", [*texts_of(2, 20), *texts[:9]])
    train_tokenizer(corpus, vocab_size=300, out=place / "tokenizer.json")
    a_build(place, place / "shards")
    a_clean(place, place / "cleaned")
    export_dataset(place / "shards", out=place / "pair", target="megatron")
    write_model(place / "model", {**QWEN2, "max_pixels": 56 * 56})
    seen = place / "seen"
    seen.mkdir()
    rows = []
    for number in range(9):
        if number % 3:
            (seen / f"{number}.bin").write_bytes(encoded(drawn(40 + number, 40, number // 2)))
        picture = [{"type": "image", "image": f"{number}.bin"}] if number % 3 else []
        text = {"type": "text", "text": f"What is {number}?"}
        rows.append(asked([text, *picture], f"It is {number}."))
    write_rows(seen / "rows.jsonl", rows)
    return place


@pytest.mark.parametrize("step", [17, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WORKS)
def test_the_same_command_goes_on_after_any_kill(
    name: str, step: int, place: Path, tmp_path: Path
) -> None:
    """Its bytes are those of a calm run, and nothing is left beside them."""
    script = "import sys\nfrom tests.test_every_kill import every_kill\nevery_kill(*sys.argv[1:])\n"
    quiet = {"TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, name, str(step), place, tmp_path],
        cwd=Path(__file__).parents[1],  # where `tests` can be imported
        env={**os.environ, **quiet, "LD_PRELOAD": str(place / "dying.so")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) * step + step >= FEWEST.get(name, 20)


def every_kill(name: str, step: str, place: str, folder: str) -> None:
    """Runs in a process of its own: kills a child at every `step`-th call, then works again."""
    # Small batches, and a save after each.
    batches.BATCH_CHARACTERS = 4000
    run.SAVE_EVERY_S = 0.0
    work, source, home = WORKS[name], Path(place), Path(folder) / "home"
    home.mkdir()
    work(source, home / "out")
    calm = files_below(home / "out")
    at = kills = 0
    while True:
        shutil.rmtree(home / "out")
        at += int(step)
        status = killed_at(at, lambda: work(source, home / "out"))
        assert status in (0, signal.SIGKILL), (at, status)
        again(work, source, home / "out")
        assert files_below(home / "out") == calm, at
        assert [path.name for path in home.iterdir()] == ["out"], at
        if not status:
            break
        kills += 1
    sys.stdout.write(str(kills))


def again(work: Work, place: Path, out: Path) -> None:
    """The same command; one that writes over nothing refuses what is done, which must be whole."""
    try:
        work(place, out)
    except OutputError as error:
        if not re.search(
            "(?:is there|exists|is not empty); (?:choose|use) another",
            str(error),
        ):
            raise


def killed_at(call: int, work: Callable[[], object]) -> int:
    """Works in a child that dies at the n-th call that changes files; how it ended."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        CDLL(None).die_at(call)
        work()
        CDLL(None).die_at(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)
