"""User errors give one clear line and exit code 2, without a traceback."""

import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from launching import IMPORTS, environment, train, words, write_run
from processes import Command, run_command

from ms_parallel import checkpoint
from ms_parallel.cli import main
from ms_parallel.cluster.device import pick_device
from ms_parallel.errors import ConfigError, LaunchError
from ms_parallel.training.options import Options


def complaint(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str) -> str:
    """The one line of error output of `train` in this process, after checking the exit code."""
    assert main(["train", str(run), *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("ms-parallel: ")
    return lines[0]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("sequence_lenght=64", "unknown key 'sequence_lenght'; did you mean 'sequence_length'"),
        ("hidden_size=64", "unknown key 'hidden_size'; did you mean 'model_config.hidden_size'"),
        ("model_config.hiden_size=64", "'hiden_size'; did you mean 'hidden_size'"),
        ("parallel_config.tenser=2", "'tenser'; did you mean 'tensor'"),
        ("optimizer=Admw", "optimizer is 'Admw'; did you mean 'AdamW'"),
        ("optimizer={name='muon', momentun=0.9}", "'momentun'; did you mean 'momentum'"),
        ("optimizer=lbfgs", "optimizer 'LBFGS' cannot be used: LBFGS.step() missing"),
        ("learning_rate_decay.name=wds", "learning_rate_decay is 'wds'; did you mean 'wsd'"),
        ("schedule=zb-w", "schedule is 'zb-w'; did you mean 'zb-v'? Or name a CSV file"),
        ("schedule=none.csv", "schedule none.csv: cannot be read: No such file"),
        ("model=lama", "'lama'; did you mean 'llama'"),
        ("epochs=1", "set either epochs or steps, got both"),
        ("steps=0", "steps must be an integer of at least 1, got 0"),
        ("batch_size=2.5", "batch_size must be an integer"),
        ("betas=0.9", "betas must be two numbers of at least 0 and below 1, got 0.9"),
        ("learning_rate=-1", "learning_rate must be a number of at least 0, got -1"),
        (
            "held_out_fraction=1",
            "held_out_fraction must be a number of at least 0 and less than 1, got 1",
        ),
        ("parallel_config.data=2", "needs 2 processes and this is one; type: torchrun"),
        ("parallel_config.expert=2", "expert=2 does not divide the 1 ranks of data and context"),
        ("sequence_length=8192", "longer than the model's 4096 positions"),
        ("model_config.vocab_size=300", "vocabulary of 300 does not match the shards"),
        ("microbatch_size=0", "microbatch_size must be an integer of at least 1, got 0"),
        ("schedule=serch", "schedule is 'serch'; did you mean 'search'?"),
        ("schedule_memory_gib=-1", "schedule_memory_gib must be a number of at least 0, got -1"),
        (
            "schedule_memory_gib=[1, -1]",
            "schedule_memory_gib must be a number of at least 0, got -1",
        ),
        ("model_config.hidden_size='x'", "hidden_size must be an integer"),
        (
            "model_config.rope_scaling={kind='linear'}",
            "rope_scaling of kind 'linear' needs 'factor'",
        ),
    ],
)
def test_an_invalid_setting_is_named_with_its_remedy(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, message: str
) -> None:
    """The line has the offending value and the remedy."""
    run = write_run(tmp_path / "run.toml", shards)
    assert message in complaint(capsys, run, "--set", setting)


def corpora(folder: Path) -> dict[str, Any]:
    """Text folders that cannot be trained on."""
    for name in ("empty", "latin", "short"):
        (folder / name).mkdir()
    (folder / "latin" / "a.txt").write_bytes("déjà vu".encode("latin-1"))
    (folder / "short" / "a.txt").write_text("no more than a few words " * 3)
    return {name: folder / name for name in ("empty", "latin", "short", "missing")}


@pytest.mark.parametrize(
    ("corpus_name", "message"),
    [
        ("empty", "empty"),
        ("latin", "a.txt.*UTF-8"),
        ("missing", "missing"),
        ("short", "tokens, fewer than one sequence of 32.*lower sequence_length"),
    ],
)
def test_an_unusable_corpus_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], corpus_name: str, message: str
) -> None:
    """Empty, not UTF-8, missing, or shorter than one sequence."""
    run = write_run(tmp_path / "run.toml", corpora(tmp_path)[corpus_name], held_out_fraction=0.0)
    assert re.search(message, complaint(capsys, run))


def test_a_missing_or_malformed_run_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the line where parsing failed."""
    (tmp_path / "bad.toml").write_text("steps = \n")
    assert "bad.toml: not TOML: " in complaint(capsys, tmp_path / "bad.toml")
    assert "none.toml: cannot be read: No such file" in complaint(capsys, tmp_path / "none.toml")


def test_a_checkpoint_of_another_model_is_refused(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has the first changed setting with both values, and the checkpoint stays."""
    run = write_run(tmp_path / "run.toml", shards, steps=3)
    assert main(["train", str(run)]) == 0
    capsys.readouterr()
    message = complaint(capsys, run, "--set", "model_config.num_hidden_layers=3")
    assert "changed settings: model_config.num_hidden_layers is 3, was 2" in message
    assert "resume=false" in complaint(capsys, run, "--set", "resume=false")
    assert "sequence_length is 16, was 32" in complaint(capsys, run, "--set", "sequence_length=16")
    assert checkpoint.complete_steps(run.with_suffix("") / "checkpoints") == [3]


def test_a_full_disk_leaves_earlier_checkpoints_intact(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a small tmpfs the run ends with one line; after freeing space it resumes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small tmpfs can only be mounted by root")
    try:
        run = write_run(tmp_path / "run.toml", shards, keep_checkpoints=9, checkpoint_every=1)
        output = ("--set", f"output_dir={disk / 'run'}")
        filler = disk / "filler"
        filler.write_bytes(bytes(1 << 20))
        assert "No space left on device; free some space" in complaint(capsys, run, *output)
        steps = checkpoint.complete_steps(disk / "run" / "checkpoints")
        assert steps
        assert list((disk / "run" / "checkpoints").glob("*.partial")) == []
        filler.unlink()
        few = ("--set", "keep_checkpoints=2")
        assert main(["train", str(run), *output, *few]) == 0
        assert f"step-{steps[-1]:08d} (step {steps[-1]} of 12)" in capsys.readouterr().out
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def start_rank(run: Path, rank: int, port: int) -> Command:
    """Start a single rank of two, without torchrun."""
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return Command(words(run, 1), environment=environment(**variables), imports=IMPORTS)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_in_use_is_named_with_the_remedy(shards: Path, tmp_path: Path, address: str) -> None:
    """Rank 0 exits with 2 if it cannot listen at MASTER_PORT."""
    run = write_run(tmp_path / "run.toml", shards)
    with socket.create_server((address, 0)) as occupied:
        port = occupied.getsockname()[1]
        started = start_rank(run, 0, port)
        _, stderr = started.communicate(timeout=120)
    assert started.returncode == 2
    assert f"ms-parallel: port {port} is in use" in stderr
    assert "MASTER_PORT" in stderr
    assert "Traceback" not in stderr


def test_a_lone_rank_times_out(shards: Path, tmp_path: Path) -> None:
    """Rank 1 alone exits after timeout_s without a traceback."""
    run = write_run(tmp_path / "run.toml", shards, timeout_s=1)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    started = start_rank(run, 1, port)
    _, stderr = started.communicate(timeout=120)
    assert started.returncode == 2
    assert "Traceback" not in stderr


def test_under_torchrun_the_line_comes_first_and_once(shards: Path, tmp_path: Path) -> None:
    """Only a single process prints it, before torchrun's report."""
    run = write_run(tmp_path / "run.toml", shards)
    result = train(run, 2, "--set", "parallel_config.tensor=3")
    assert result.returncode == 1  # torchrun's code for any failed worker
    stderr = result.stderr
    assert stderr.count("ms-parallel: layout tensor=3 needs 3 processes, but 2 run") == 1
    before = stderr[: stderr.index("ms-parallel: ")]
    assert "Traceback" not in before
    assert "exitcode  : 2" in stderr


def test_under_torchrun_an_error_of_rank_0_is_printed_once(tmp_path: Path) -> None:
    """Only rank 0 reads the text; the other rank exits silently."""
    run = write_run(tmp_path / "run.toml", corpora(tmp_path)["latin"])
    result = train(run, 2)
    assert result.returncode == 1
    assert result.stderr.count("ms-parallel: ") == 1
    assert re.search(r"ms-parallel: .*a\.txt.*UTF-8", result.stderr)


SCRIPT = """
from ms_parallel import DistributedTrainer
trainer = DistributedTrainer("llama", {"tensor_parallel": 2}, sequence_length=32)
trainer.train("corpus", steps=1)
"""


def python(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run `python WORDS` in a folder."""
    return run_command(words, folder=folder, environment=environment(), imports=IMPORTS)


def test_a_script_without_torchrun_prints_the_command(tmp_path: Path) -> None:
    """Where torchrun is needed: the command to type, exit code 2 and no traceback."""
    (tmp_path / "train.py").write_text(SCRIPT)
    result = python(tmp_path, "train.py", "--fast")
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "ms-parallel: layout tensor=2 needs 2 processes and this is one; type:"
        " torchrun --standalone --nproc-per-node 2 train.py --fast"
    ]


CONNECTED = """
import sys
from ms_parallel import DistributedTrainer
model = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
seed = int(sys.argv[2])
DistributedTrainer(
    "llama", model_config={**model, **heads}, sequence_length=32, batch_size=4, output_dir="out",
    seed=seed, device="cpu", progress=False,
).train(sys.argv[1], steps=1 + seed)
"""


def test_a_script_prints_one_line_for_an_error_after_connecting(
    shards: Path, tmp_path: Path
) -> None:
    """The excepthook is then wrapped by torch's, which keeps output that an exit would cut off."""
    (tmp_path / "train.py").write_text(CONNECTED)
    assert python(tmp_path, "train.py", str(shards), "0").returncode == 0
    result = python(tmp_path, "train.py", str(shards), "1")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("ms-parallel: ")
    assert "seed" in result.stderr


def test_an_error_that_a_script_catches_is_not_printed(tmp_path: Path) -> None:
    """If the caller catches it, nothing is printed and nothing exits."""
    handled = SCRIPT.replace("trainer.train", "try:\n    trainer.train")
    handled += "except Exception as error:\n    print(type(error).__name__)\n"
    (tmp_path / "train.py").write_text(handled)
    result = python(tmp_path, "train.py")
    assert (result.returncode, result.stdout, result.stderr) == (0, "LaunchError\n", "")


@pytest.mark.parametrize("name", ["cuda:300", "cuda:200", "cpu:200"])
def test_a_device_number_that_torch_would_truncate_is_refused(name: str) -> None:
    """Only eight bits are kept: cuda:300 would be cuda:44."""
    with pytest.raises(LaunchError, match="no machine has that many"):
        pick_device(name)


@pytest.mark.parametrize("name", ["", "a\0b", "cuda:", "cuda:-1", "x" * 5000, 3])
def test_an_invalid_device_is_refused_when_options_are_built(name: Any) -> None:
    """Before processes are connected."""
    with pytest.raises(ConfigError, match="must be 'cpu' or an accelerator"):
        Options(model_arch="llama", device=name)
