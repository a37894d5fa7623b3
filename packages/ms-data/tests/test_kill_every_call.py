"""Every file-changing system call may be a command's last: the same command resumes.

A preloaded library, `die_at_call.c`, counts such calls, from Python, numpy, pyarrow or
the tokenizer. It covers writes, syncs, renames, removals, new files and truncations.
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

from .chat_templates import write_rows
from .media_samples import QWEN2, encode_image, media_row, random_image, write_model
from .test_array_jobs import RULES, read_tree
from .test_build import random_texts, write_lines

COMPILER = shutil.which("cc") or shutil.which("gcc")
Command = Callable[[Path, Path], object]


def build_text(workspace: Path, out: Path) -> None:
    """A text dataset with two splits."""
    build(
        workspace / "corpus", tokenizer=workspace / "tokenizer.json", out=out, held_out_fraction=0.2
    )


def build_images(workspace: Path, out: Path) -> None:
    """A conversation dataset whose images have their own split."""
    model = workspace / "model"
    build(
        workspace / "seen",
        tokenizer=model,
        out=out,
        chat=model,
        processor=model,
        held_out_fraction=0.4,
    )


def clean_text(workspace: Path, out: Path) -> None:
    """Three rules."""
    clean(workspace / "corpus", RULES, out=out, workers=1)


def clean_images(workspace: Path, out: Path) -> None:
    """Finds near-duplicate images, which reads the corpus a second time."""
    clean(workspace / "seen", {"pictures": {"near_bits": 3}}, out=out, workers=1)


def dedup_text(workspace: Path, out: Path) -> None:
    """All three criteria."""
    dedup(workspace / "corpus", out=out, options=DedupOptions(substring_words=8), workers=1)


def import_megatron(workspace: Path, out: Path) -> None:
    """The file pair that an export wrote."""
    import_dataset(workspace / "pair.idx", tokenizer=workspace / "tokenizer.json", out=out)


def export_megatron(workspace: Path, out: Path) -> None:
    """Both files."""
    export_dataset(workspace / "shards", out=out / "pair", target="megatron")


def export_parquet(workspace: Path, out: Path) -> None:
    """One file, written by pyarrow."""
    export_dataset(workspace / "shards", out=out / "a.parquet", target="parquet")


def train_bpe(workspace: Path, out: Path) -> None:
    """A folder in transformers format."""
    train_tokenizer(workspace / "corpus", vocab_size=270, out=out)


def draw_page(workspace: Path, out: Path) -> None:
    """The page that shows a ledger."""
    out.mkdir(exist_ok=True)
    draw_stats(workspace / "cleaned", out=out / "page.html")


COMMANDS: dict[str, Command] = {
    work.__name__: work
    for work in (
        *(build_text, build_images, clean_text, clean_images, dedup_text),
        *(import_megatron, export_megatron, export_parquet),
        *(train_bpe, draw_page),
    )
}
MIN_CALLS = {
    "draw_page": 3,
    "import_megatron": 15,
    "train_bpe": 8,
    "export_parquet": 4,
    "export_megatron": 8,
}
"""Lower bound on the calls per command; 20 for all others."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands' inputs, and the library that kills."""
    if COMPILER is None:
        pytest.skip("a C compiler is needed")
    folder = tmp_path_factory.mktemp("place")
    source = Path(__file__).with_name("die_at_call.c")
    library = folder / "die_at_call.so"
    command = [COMPILER, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"]
    subprocess.run(command, check=True)
    corpus = folder / "corpus"
    corpus.mkdir()
    texts = random_texts(1, 60)
    write_lines(corpus / "a.jsonl", texts)
    write_lines(corpus / "b.jsonl.gz", [*random_texts(2, 20), *texts[:9]])
    train_tokenizer(corpus, vocab_size=300, out=folder / "tokenizer.json")
    build_text(folder, folder / "shards")
    clean_text(folder, folder / "cleaned")
    export_dataset(folder / "shards", out=folder / "pair", target="megatron")
    write_model(folder / "model", {**QWEN2, "max_pixels": 56 * 56})
    media_folder = folder / "seen"
    media_folder.mkdir()
    rows = []
    for number in range(9):
        if number % 3:
            (media_folder / f"{number}.bin").write_bytes(
                encode_image(random_image(40 + number, 40, number // 2))
            )
        image_part = [{"type": "image", "image": f"{number}.bin"}] if number % 3 else []
        text_part = {"type": "text", "text": f"What is {number}?"}
        rows.append(media_row([text_part, *image_part], f"It is {number}."))
    write_rows(media_folder / "rows.jsonl", rows)
    return folder


@pytest.mark.parametrize("step", [17, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_resumes_after_a_kill_at_any_call(
    name: str, step: int, workspace: Path, tmp_path: Path
) -> None:
    """The output equals an undisturbed run's, with no other files left."""
    script = (
        "import sys\nfrom tests.test_kill_every_call import every_kill\nevery_kill(*sys.argv[1:])\n"
    )
    quiet = {"TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", script, name, str(step), workspace, tmp_path],
        cwd=Path(__file__).parents[1],  # so that `tests` is importable
        env={**os.environ, **quiet, "LD_PRELOAD": str(workspace / "die_at_call.so")},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(result.stdout) * step + step >= MIN_CALLS.get(name, 20)


def every_kill(name: str, step: str, workspace: str, folder: str) -> None:
    """Run in a separate process: kill a child at every `step`-th call, then run again."""
    # Small batches, and a save after each.
    batches.BATCH_CHARACTERS = 4000
    run.SAVE_EVERY_S = 0.0
    command, source, output_root = COMMANDS[name], Path(workspace), Path(folder) / "home"
    output_root.mkdir()
    command(source, output_root / "out")
    expected = read_tree(output_root / "out")
    call = kills = 0
    while True:
        shutil.rmtree(output_root / "out")
        call += int(step)
        status = run_and_die_at_call(call, lambda: command(source, output_root / "out"))
        assert status in (0, signal.SIGKILL), (call, status)
        rerun(command, source, output_root / "out")
        assert read_tree(output_root / "out") == expected, call
        assert [path.name for path in output_root.iterdir()] == ["out"], call
        if not status:
            break
        kills += 1
    sys.stdout.write(str(kills))


def rerun(work: Command, workspace: Path, out: Path) -> None:
    """Run the command again; it may refuse only because its output is complete."""
    try:
        work(workspace, out)
    except OutputError as error:
        if not re.search(
            "(?:is there|exists|is not empty); (?:choose|use) another",
            str(error),
        ):
            raise


def run_and_die_at_call(call: int, work: Callable[[], object]) -> int:
    """Run in a child that dies at its n-th file-changing call; return its wait status."""
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
