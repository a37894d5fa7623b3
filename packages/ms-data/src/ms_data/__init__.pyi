"""The public names; `__init__.py` imports each when it is first asked for."""

from .building.build import build
from .building.output import Summary
from .chat.messages import Conversation, read_conversation
from .chat.pairs import Pair, Unpaired, read_pair, read_unpaired
from .chat.template import ChatTemplate
from .cleaning.clean import clean
from .corpus.find import read_rows
from .deduplication.dedup import dedup
from .deduplication.options import DedupOptions
from .disk.inspection import DatasetInfo, inspect
from .disk.remote import RemoteShards
from .disk.samples import PairSample, Sample, Samples, UnpairedSample
from .disk.verification import Fault, Report, verify
from .errors import (
    ConfigError,
    CorpusError,
    DamageError,
    DataError,
    OutputError,
    RemoteError,
    SettingError,
    StateError,
    TokenizerError,
)
from .exchange.exports import Exported, export_dataset
from .exchange.imports import Imported, import_dataset
from .ledger.page import draw_stats
from .ledger.record import LedgerSummary
from .media.processor import Processor
from .media.video import Video, VideoLimits, decode_video
from .streams.batch import Batch
from .streams.instructions import InstructionBatch, InstructionStream
from .streams.mixture import Mixture, Phase
from .streams.packer import Packer, Segment
from .streams.packing_rules.best_fit import BestFitPacker
from .streams.preferences import PreferenceBatch, PreferenceStream
from .streams.share import StreamPlace
from .streams.tokens import TokenStream
from .streams.trainer_dataset import TrainerDataset
from .streams.unpaired import UnpairedBatch, UnpairedStream
from .tokenization.tokenizer import Tokenizer
from .tokenization.training import train_tokenizer

__version__: str

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
    "Exported",
    "Fault",
    "Imported",
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
    "Processor",
    "RemoteError",
    "RemoteShards",
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
    "TrainerDataset",
    "Unpaired",
    "UnpairedBatch",
    "UnpairedSample",
    "UnpairedStream",
    "Video",
    "VideoLimits",
    "__version__",
    "build",
    "clean",
    "decode_video",
    "dedup",
    "draw_stats",
    "export_dataset",
    "import_dataset",
    "inspect",
    "read_conversation",
    "read_pair",
    "read_rows",
    "read_unpaired",
    "train_tokenizer",
    "verify",
]
