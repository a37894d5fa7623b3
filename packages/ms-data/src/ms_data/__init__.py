"""From raw corpus to token batches: tokenize, shard, shuffle, stream and resume, exactly."""

from ms_data.building.build import build
from ms_data.building.record import Summary
from ms_data.chat.messages import Conversation, read_conversation
from ms_data.chat.pairs import Pair, read_pair
from ms_data.chat.template import ChatTemplate
from ms_data.cleaning.clean import clean
from ms_data.deduplication.dedup import dedup
from ms_data.deduplication.options import DedupOptions
from ms_data.disk.inspection import DatasetInfo, inspect
from ms_data.disk.samples import PairSample, Sample, Samples
from ms_data.disk.verification import Fault, Report, verify
from ms_data.errors import (
    ConfigError,
    CorpusError,
    DamageError,
    DataError,
    OutputError,
    SettingError,
    StateError,
    TokenizerError,
)
from ms_data.passes.page import draw_stats
from ms_data.passes.record import LedgerSummary
from ms_data.streams.batch import Batch
from ms_data.streams.instructions import InstructionBatch, InstructionStream
from ms_data.streams.mixture import Mixture, Phase
from ms_data.streams.packer import Packer, Segment
from ms_data.streams.packing_rules.best_fit import BestFitPacker
from ms_data.streams.preferences import PreferenceBatch, PreferenceStream
from ms_data.streams.share import StreamPlace
from ms_data.streams.tokens import TokenStream
from ms_data.tokenization.tokenizer import Tokenizer
from ms_data.tokenization.training import train_tokenizer

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "BestFitPacker",
    "ChatTemplate",
    "ConfigError",
    "Conversation",
    "CorpusError",
    "DamageError",
    "DataError",
    "DatasetInfo",
    "DedupOptions",
    "Fault",
    "InstructionBatch",
    "InstructionStream",
    "LedgerSummary",
    "Mixture",
    "OutputError",
    "Packer",
    "Pair",
    "PairSample",
    "Phase",
    "PreferenceBatch",
    "PreferenceStream",
    "Report",
    "Sample",
    "Samples",
    "Segment",
    "SettingError",
    "StateError",
    "StreamPlace",
    "Summary",
    "TokenStream",
    "Tokenizer",
    "TokenizerError",
    "__version__",
    "build",
    "clean",
    "dedup",
    "draw_stats",
    "inspect",
    "read_conversation",
    "read_pair",
    "train_tokenizer",
    "verify",
]
