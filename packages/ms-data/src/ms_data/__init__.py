"""From raw corpus to token batches: tokenize, shard, shuffle, stream and resume, exactly."""

from ms_data.build import Summary, build
from ms_data.errors import (
    CorpusError,
    DamageError,
    DataError,
    OutputError,
    SettingError,
    StateError,
    TokenizerError,
)
from ms_data.inspection import Facts, inspect
from ms_data.stream import Place, TokenStream
from ms_data.tokenizer import Tokenizer, train_tokenizer
from ms_data.verify import Fault, Report, verify
from ms_data.window import Batch

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "CorpusError",
    "DamageError",
    "DataError",
    "Facts",
    "Fault",
    "OutputError",
    "Place",
    "Report",
    "SettingError",
    "StateError",
    "Summary",
    "TokenStream",
    "Tokenizer",
    "TokenizerError",
    "__version__",
    "build",
    "inspect",
    "train_tokenizer",
    "verify",
]
