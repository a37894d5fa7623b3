"""Type checks only: mypy --strict proves here that the packages fit each other's Protocols.

The consumer owns the Protocol; each line passes one producer to one consumer.
"""

from collections.abc import Mapping

import ms_align.engines.protocol
import ms_align.events
import ms_align.streams.protocol
import ms_compress
import ms_data
import ms_kernels
import ms_parallel.operators
import ms_profile
from ms_align.engines.generator import EngineGenerator
from ms_align.engines.local import LocalEngine
from ms_align.evaluation import ExportedModel
from ms_align.generation.responses import Generator
from ms_data import InstructionStream, PreferenceStream, TokenStream
from ms_parallel import DistributedTrainer, Engine, Layout
from ms_parallel.cluster.groups import Groups
from ms_parallel.events import OnEvent
from ms_parallel.operators import Ops
from ms_parallel.training.checkpoints import Stream
from ms_profile.trackers import TensorBoard, Tracker

default_operators: Ops = ms_parallel.operators
fused_operators: Ops = ms_kernels
stream: Stream = TokenStream("shards", sequence_length=1, batch_size=1)
events: OnEvent = ms_profile.EventLog("events")
tuning_data: ms_align.streams.protocol.TaskStream = InstructionStream(
    "shards", sequence_length=1, batch_size=1
)
instructions: ms_align.streams.protocol.Stream = InstructionStream(
    "shards", sequence_length=1, batch_size=1
)
pairs: ms_align.streams.protocol.Stream = PreferenceStream("pairs", sequence_length=2, batch_size=1)


class Reader:
    """The two numbers that `TokenStream` needs from its place."""

    rank = 0
    count = 1


place: ms_data.StreamPlace = Reader()


def on_event(kind: str, fields: Mapping[str, int | float | str]) -> None:
    """Any callable with this signature accepts events."""


def engine_takes_either_operators() -> tuple[Engine, Engine]:
    """The model's operators are a module."""
    return Engine("llama", Layout(), ops=ms_parallel.operators), Engine("llama", ops=ms_kernels)


def constructor_arguments_are_checked(groups: Groups) -> None:
    """Names and types of all options are checked, although constructors forward them as fields.

    If mypy accepted an unknown name or a wrong type, the unused `type: ignore` would be an error.
    """
    Engine("llama", Layout(), seed=1, groups=groups)
    Engine("llama", layout=Layout(), recompute="full", on_nonfinite="raise")
    Engine("llama", sed=1)  # type: ignore[call-arg]
    Engine("llama", recompute=0.5)  # type: ignore[arg-type]
    DistributedTrainer("llama", {"tensor_parallel": 2}, "AdamW", True, betas=[0.9, 0.95])
    DistributedTrainer("llama", output_dir="runs", tokenizer=None, model_config={"vocab_size": 300})
    DistributedTrainer("llama", batch_sice=8)  # type: ignore[call-arg]
    DistributedTrainer("llama", batch_size="8")  # type: ignore[arg-type]


def align_takes_either_engine(
    local: LocalEngine, parallel: Engine
) -> tuple[ms_align.engines.protocol.Engine, ms_align.engines.protocol.Engine]:
    """Its own single-process engine, and ms-parallel's with any layout."""
    return local, parallel


def align_generates_with_an_engine(engine: Engine) -> Generator:
    """An engine with a layout can generate."""
    return EngineGenerator(engine)


align_events: ms_align.events.OnEvent = ms_profile.EventLog("events")
tracked: OnEvent = Tracker(TensorBoard("tensorboard"))
align_tracked: ms_align.events.OnEvent = Tracker(TensorBoard("tensorboard"))
exported: ExportedModel = ms_compress.open_runtime("deploy", "ort")


def a_stream_accepts_the_place_of_a_layout(groups: Groups) -> TokenStream:
    """ms-data needs `rank` and `count`, which ms-parallel's `place` has."""
    stream_place: ms_data.StreamPlace = groups.place
    return TokenStream("shards", sequence_length=1, batch_size=1, place=stream_place)
