"""The command line: help without torch, the template, one-line errors and exit codes."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import (
    IMPORTS,
    command,
    environment,
    events,
    train,
    training,
    wait_for,
    workers,
    write_run,
)
from processes import run_command

from ms_parallel import __version__
from ms_parallel.cli import main
from ms_parallel.run_file import known_keys
from ms_parallel.run_template import key_groups, template


def python(*words: str, **options: object) -> "subprocess.CompletedProcess[str]":
    """Run a new interpreter with this one's packages."""
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
        **options,
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--version"],
        ["--help"],
        *([name, "--help"] for name in ("train", "inspect", "init", "schedule", "prove")),
        ["init"],
        ["schedule", "zb-v", "--stages", "2", "--microbatches", "4"],
    ],
    ids=" ".join,
)
def test_commands_without_a_model_do_not_import_torch(words: list[str]) -> None:
    """Help, version, templates and schedules skip the seconds that importing torch takes."""
    script = (
        "import sys; from ms_parallel.cli import main\n"
        "try: code = main(sys.argv[1:])\n"
        "except SystemExit as done: code = done.code\n"
        "sys.exit('torch is imported' if 'torch' in sys.modules else code)"
    )
    result = python("-c", script, *words)
    assert result.returncode == 0, result.stderr
    assert result.stdout
    if "--help" in words:
        assert "example: " in result.stdout


def test_schedules_work_without_torch() -> None:
    """All modules of `schedules`, a search, a simulation and a drawing without torch."""
    script = """
import sys
sys.modules["torch"] = None
from importlib import import_module
from pkgutil import walk_packages
import ms_parallel.schedules as s
for module in walk_packages(s.__path__, "ms_parallel.schedules."):
    import_module(module.name)
costs = s.Costs.uniform(2)
found = s.search(costs, microbatches=2, effort=0.01)
s.verify(found.schedule)
print(s.draw_text(s.simulate(found.schedule, costs)))
"""
    result = python("-c", script)
    assert result.returncode == 0, result.stderr


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """Such as `ms-parallel 0.1.0`."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"ms-parallel {__version__}\n"


def test_an_unknown_option_gives_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    """With the command's name, and exit code 2."""
    with pytest.raises(SystemExit) as ended:
        main(["schedule", "1f1b", "--jsn"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ms-parallel")
    assert "--jsn" in line


def test_the_help_of_train_names_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    """Grouped, with defaults; every key has a group."""
    listed = [key.name for group in key_groups() for key in group.keys]
    assert sorted(listed) == sorted(known_keys())
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    output = capsys.readouterr().out
    assert all(f"\n    {name}" in output for name in listed)
    assert "learning_rate = 0.0003  Peak learning rate" in output


def test_the_template_trains_when_its_dataset_is_filled_in(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It has every key; here sizes are reduced as well."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--out", "RUN.toml"]) == 0
    assert main(["init", "--out", "RUN.toml"]) == 2  # existing files are not overwritten
    text = Path("RUN.toml").read_text()
    assert text == template()
    assert all(
        f"\n# {name} " in text or f"\n{name} = " in text or f"[{name}]" in text
        for name in known_keys()
        if name != "epochs"
    )
    Path("RUN.toml").write_text(text.replace("corpus/", str(corpus)))
    small = ("steps=1", "sequence_length=64", "held_out_fraction=0.4", "vocab_size=512")
    few = [word for key in small for word in ("--set", key)]
    capsys.readouterr()
    assert main(["train", "RUN.toml", *few, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["step"], result["finished"]) == (1, True)
    assert Path(result["model_folder"]) == Path("runs/train/model")


@pytest.mark.parametrize("share", [1e-9, 0.0])
def test_a_held_out_fraction_that_is_too_small_warns(
    corpus: Path, tmp_path: Path, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning, unless held_out_fraction is 0."""
    run = write_run(tmp_path / "run.toml", corpus, held_out_fraction=share, steps=1)
    assert main(["train", str(run), "--set", f"output_dir={tmp_path / 'out'}"]) == 0
    warned = "leaves too little text for a held-out loss" in caplog.text
    assert warned is (share > 0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model_arch=llama", "unknown key 'model_arch'; did you mean 'model'?"),
        ("dataset_path=x", "unknown key 'dataset_path'; did you mean 'dataset'?"),
        ("tensor=2", "did you mean 'layout.tensor'?"),
    ],
)
def test_old_spellings_are_refused_by_name(
    override: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line has the current name."""
    run = write_run(tmp_path / "run.toml", tmp_path)
    assert main(["inspect", str(run), "--set", override]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("no_process_group")
def test_an_absurd_batch_size_is_refused_before_reading_rows(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reading its documents to inspect it would take hours."""
    run = write_run(tmp_path / "run.toml", shards, batch_size=1 << 20, sequence_length=32)
    assert main(["inspect", str(run), "--set", f"batch_size={1 << 32}"]) == 2
    assert "batch_size must be an integer" in capsys.readouterr().err
    assert main(["inspect", str(run)]) == 2
    assert "lower batch_size, or set microbatch_size" in capsys.readouterr().err


@pytest.mark.parametrize(
    "table", ["layout", pytest.param("parallel_config", marks=pytest.mark.slow)]
)
def test_the_suggested_command_works(table: str, corpus: Path, tmp_path: Path) -> None:
    """A single process prints the command to type, and that command trains."""
    run = write_run(tmp_path / "a run.toml", corpus, steps=1)
    single = train(run, 1, "--set", f"{table}.data=2")
    assert single.returncode == 2
    line = single.stderr.splitlines()[-1]
    assert "needs 2 processes and this is one; type: torchrun --standalone" in line
    advised = line.split("type: ")[1].replace("torchrun", "-m torch.distributed.run")
    words = subprocess.run(
        ["sh", "-c", f"printf '%s\\n' {advised}"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    result = run_command(words, environment=environment(), imports=IMPORTS)
    assert result.returncode == 0, result.stderr
    (begin,) = events(run, "begin")
    assert begin["layout"] == "data=2"


def test_the_suggested_command_fits_the_hosts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The suggested command splits 512 processes over hosts."""
    run = write_run(tmp_path / "run.toml", tmp_path, batch_size=512)
    assert main(["train", str(run), "--set", "layout.data=512"]) == 2
    stderr = capsys.readouterr().err
    assert "--nproc-per-node 512" not in stderr
    assert " hosts type: " in stderr
    assert "--nnodes " in stderr


@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c_saves_and_ends_with_one_line(processes: int, corpus: Path, tmp_path: Path) -> None:
    """One process prints it, without a traceback; a single process exits with 130."""
    run = write_run(tmp_path / "run.toml", corpus, steps=100_000, checkpoint_every=None)
    with training(run, processes) as started:
        wait_for(lambda: events(run, "step"), started)
        if processes > 1:
            ranks = workers(started.pid)
        started.send_signal(signal.SIGINT)
        code = started.wait(timeout=120)
    log = run.with_suffix(".log").read_text()
    assert log.count("stopped by SIGINT") == 1
    assert "KeyboardInterrupt" not in log
    assert "ms_parallel/" not in log
    if processes == 1:
        assert code == 130
    else:
        assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def test_ctrl_c_before_the_first_step_prints_one_line(corpus: Path, tmp_path: Path) -> None:
    """During the import of torch, or tokenization."""
    run = write_run(tmp_path / "run.toml", corpus, steps=1)

    def torch_is_loaded() -> bool:
        maps = Path(f"/proc/{started.pid}/maps")
        return maps.exists() and "libtorch" in maps.read_text()

    for condition in (torch_is_loaded, run.with_suffix("").exists):
        started = subprocess.Popen(
            command(run, 1), env=environment(), stderr=subprocess.PIPE, text=True
        )
        wait_for(condition, started)
        started.send_signal(signal.SIGINT)
        _, stderr = started.communicate(timeout=60)
        if started.returncode == 0:
            continue  # it had already finished
        assert started.returncode == 130
        (line,) = stderr.splitlines()
        assert line.startswith("ms-parallel: interrupted")


@pytest.mark.parametrize("words", [[], ["--output-dir", "runs"], ["--from", "x", "--json"]])
def test_doctor_names_the_command_of_ms_profile(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and exit code 2 for any options."""
    assert main(["doctor", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "`ms-profile doctor`" in line
