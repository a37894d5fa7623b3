"""From raw corpus to token batches: tokenize, shard, shuffle, stream and resume, exactly."""

from ms_data.build import Summary, build
from ms_data.chat import ChatTemplate
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
from ms_data.instruction_stream import InstructionBatch, InstructionStream
from ms_data.messages import Conversation, read_conversation
from ms_data.mixture import Mixture, Phase
from ms_data.packing import Packer, Piece
from ms_data.preference import Pair, read_pair
from ms_data.preference_stream import PreferenceBatch, PreferenceStream
from ms_data.samples import PairSample, Sample, Samples
from ms_data.stream import Place, TokenStream
from ms_data.tokenizer import Tokenizer, train_tokenizer
from ms_data.verify import Fault, Report, verify
from ms_data.window import Batch

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "ChatTemplate",
    "Conversation",
    "CorpusError",
    "DamageError",
    "DataError",
    "Facts",
    "Fault",
    "InstructionBatch",
    "InstructionStream",
    "Mixture",
    "OutputError",
    "Packer",
    "Pair",
    "PairSample",
    "Phase",
    "Piece",
    "Place",
    "PreferenceBatch",
    "PreferenceStream",
    "Report",
    "Sample",
    "Samples",
    "SettingError",
    "StateError",
    "Summary",
    "TokenStream",
    "Tokenizer",
    "TokenizerError",
    "__version__",
    "build",
    "inspect",
    "read_conversation",
    "read_pair",
    "train_tokenizer",
    "verify",
]
