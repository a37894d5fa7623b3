"""What commands do last: export a model, or say what came of it."""

from torch import Tensor, nn

from ms_compress.commands.run_options import ModelRun, SchemeRun
from ms_compress.corpus import read_tokens
from ms_compress.deploy import export
from ms_compress.errors import ConfigError, DataError

__all__ = ["finish", "tokens_of"]


def tokens_of(options: ModelRun, model: nn.Module) -> Tensor:
    """Rows of the run's dataset, one token longer than what is trained on.

    Raises:
        ConfigError: none was given.
        DataError: there is too little of it, or the model's vocabulary does not hold it.
    """
    if options.dataset is None:
        raise ConfigError("dataset is missing; give a folder of shards or a JSON list of tokens")
    length = options.tuning.sequence_length + 1
    tokens = read_tokens(options.dataset, count=options.rows, length=length)
    vocabulary = int(model.config.vocab_size)  # type: ignore[union-attr,arg-type]
    if int(tokens.max()) >= vocabulary or int(tokens.min()) < 0:
        raise DataError(
            f"{options.dataset}: its tokens are {int(tokens.min())} to {int(tokens.max())}, and"
            f" {options.model} has a vocabulary of {vocabulary}; use the model's own tokenizer"
        )
    return tokens


def finish(model: nn.Module, options: SchemeRun) -> int:
    """Export, and print where."""
    tokenizer = options.tokenizer
    if tokenizer is None and (options.model / "tokenizer.json").is_file():
        tokenizer = str(options.model / "tokenizer.json")
    folder = export(model, options.output_dir, verify=options.verify, tokenizer=tokenizer)
    size = sum(path.stat().st_size for path in folder.iterdir())
    checked = ", verified in its runtime" if options.verify else ""
    print(f"{folder}: {options.scheme}, {size / 1e6:.2f} MB{checked}")
    return 0
