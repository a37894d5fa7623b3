"""A setting that another setting makes useless is refused in one line, before anything runs."""

from pathlib import Path

import pytest
from launching import write_run

import ms_data
from ms_parallel import ConfigError, DistributedTrainer
from ms_parallel.cli import main
from ms_parallel.engine.balance.settings import BalanceSettings
from ms_parallel.models import architecture
from ms_parallel.run_file import read_run_file


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `corpus/`, its `tokenizer.json` and `shards/`."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "corpus").mkdir()
    text = "\n".join(f"the cat {n} sat on the mat" for n in range(200))
    (folder / "corpus" / "a.txt").write_text(text)
    tokenizer = folder / "tokenizer.json"
    ms_data.train_tokenizer(folder / "corpus", vocab_size=300, out=tokenizer)
    ms_data.build(folder / "corpus", tokenizer=tokenizer, out=folder / "shards")
    return folder


@pytest.mark.parametrize(
    ("dataset", "settings", "message"),
    [
        ("corpus", "cluster=c.toml", "cluster is only used with layout='auto', so c.toml has no"),
        ("corpus", "spike_factor=4", "spike_factor is only used with on_spike='skip', "),
        ("corpus", "spike_window=9", "spike_window is only used with on_spike='skip', "),
        ("corpus", "memory_gib=1", "memory_gib is only used with microbatch_size='auto' or "),
        ("corpus", "schedule_memory_gib=1", "is only used with schedule='search', so 1 has no"),
        ("corpus", "sample_tokens=5", "sample_tokens is only used with sample_prompt, so 5 has"),
        ("corpus", "tokenizer=DATA/tokenizer.json", "vocab_size is only used to train a tokenizer"),
        ("corpus", "mtp_weight=0.1", "mtp_weight is only used by models with layers for multi-"),
        ("corpus", "dataset_cache=cache", "is only used with shards in an object store"),
        ("corpus", "balance_bias_rate=1", "balance_bias_rate is only used by a mixture of experts"),
        ("shards", "vocab_size=400", "vocab_size is only used to build shards from raw text"),
        ("shards", "tokenizer=DATA/tokenizer.json", "tokenizer is only used to build shards from"),
        ("shards", "held_out_fraction=0.1", "held_out_fraction is only used to build shards from"),
        ("shards", "text_column=body", "text_column is only used to build shards from raw text"),
        ("shards", "dataset_cache_mib=9", "dataset_cache_mib is only used with shards in an obj"),
    ],
)
def test_train_refuses_settings_without_effect(
    dataset: str,
    settings: str,
    message: str,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With exit code 2; no checkpoint or shard is written."""
    run = write_run(tmp_path / "run.toml", data / dataset, steps=1)
    words = [word.replace("DATA", str(data)) for word in settings.split()]
    assert main(["train", str(run), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert line.endswith(" out")
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("convert R --from-dcp F --names huggingface", "--names is only used with --to-dcp"),
        ("convert R --to-dcp F --step 3", "--step is only used with --from-dcp, so 3 has no"),
        ("launch ray R --nodes 1 --devices 1 --grace-s 99", "--grace-s is only used with slurm or"),
        ("launch ray R --nodes 1 --devices 1 --out F", "--out is only used with slurm or kube"),
        ("launch slurm R --nodes 1 --devices 1 --image I", "--image is only used with kubernetes"),
        ("launch slurm R --nodes 1 --devices 1 --pack", "--pack is only used with ray, so True"),
        ("launch kubernetes R --nodes 1 --devices 1 --time 1:0:0", "--time is only used with slur"),
    ],
)
def test_options_without_effect_are_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit code 2, when the command line is parsed."""
    with pytest.raises(SystemExit) as exit_info:
        main(words.split())
    assert exit_info.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_python_arguments_share_the_check() -> None:
    """The constructor raises the same line."""
    with pytest.raises(ConfigError, match=r"^sample_tokens is only used with sample_prompt, so 7"):
        DistributedTrainer("llama", sample_tokens=7)
    DistributedTrainer("llama", sample_tokens=96, spike_factor=12.0, vocab_size=8192)  # defaults


def test_the_template_of_init_is_accepted(tmp_path: Path) -> None:
    """It lists defaults, none of which is refused."""
    assert main(["init", "--out", str(tmp_path / "run.toml")]) == 0
    DistributedTrainer.from_options(read_run_file(tmp_path / "run.toml").options)


def test_a_balance_coefficient_has_an_effect_or_is_refused() -> None:
    """It selects the step loss if config.json has no coefficient; `none` has no loss to weigh."""
    mixture = architecture("gpt_oss", {"router_aux_loss_coef": 0.0}).mixture
    assert BalanceSettings(coefficient=0.01).of(mixture).method == "step"
    assert BalanceSettings().of(mixture).method == "none"
    with pytest.raises(ConfigError, match="balance_coefficient is only used with a balance other"):
        BalanceSettings(method="none", coefficient=0.01).of(mixture)
    with pytest.raises(ConfigError, match="balance_bias_rate is only used with balance='bias'"):
        BalanceSettings(method="step", coefficient=0.01, bias_rate=0.5).of(mixture)
