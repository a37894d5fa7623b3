"""Costs per rank of a run with 10,240 ranks, computed in a single process.

    python benchmarks/ten_thousand_ranks.py

Assumptions: Llama 3 70B (80 layers, hidden size 8,192) on 1,280 nodes of 8 H100; the layout is
data=320, tensor=8, pipeline=4 with weights sharded in groups of 64 ranks or over all ranks. The
local work of a rank (place, stream, manifest) runs here for sampled ranks and is timed. The work of
rank 0 for all ranks (building the manifest) runs for fewer ranks and is linear in chunks.
Communication and disks are not simulated.
"""

import argparse
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import ms_data
from ms_parallel import Layout
from ms_parallel.checkpoint.manifest import (
    MANIFEST,
    Chunk,
    Manifest,
    SavedFile,
    SavedTensor,
    read_manifest,
)
from ms_parallel.models import architecture
from ms_parallel.planner.roofline.calibrated import efficiency_of
from ms_parallel.planner.roofline.known_cluster import known_cluster
from ms_parallel.planner.roofline.model_sizes import decoder_sizes
from ms_parallel.planner.roofline.settings import StepSettings
from ms_parallel.planner.roofline.step_time import step_time

LAYOUT = Layout(data=320, tensor=8, pipeline=4)
LLAMA_70B = {
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
HEADER = 1 << 10
"""Bytes of the header of a checkpoint file."""
TENSORS_PER_LAYER = 9
STATES = 3
"""Weights and two moments of AdamW."""
SAMPLED = (0, 1, 79, 160, 319)
"""Data ranks that are run."""
BATCH = 10_240
"""Rows per step in the planner."""
ROWS, LENGTH = 2, 512
"""Rows per data rank and tokens per row of the loader's test data."""


def measured(action: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return an action's result, its seconds, and its peak of allocated Python memory in MiB."""
    started = time.perf_counter()
    action()
    seconds = time.perf_counter() - started
    tracemalloc.start()
    result = action()
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    return result, seconds, peak


def show(path: str, seconds: float, mib: float, note: str = "") -> None:
    """Print a row of the table."""
    sys.stdout.write(f"| {path} | {1e3 * seconds:,.3g} ms | {mib:,.3g} MiB | {note} |\n")
    sys.stdout.flush()


def places() -> None:
    """Place of a rank and back, for all ranks; their rows must fill each batch once."""
    world = LAYOUT.world_size

    def every() -> list[int]:
        return [LAYOUT.rank(LAYOUT.place(rank)) for rank in range(world)]

    ranks, seconds, mib = measured(every)
    assert ranks == list(range(world))
    data_ranks = [LAYOUT.place(rank).rank for rank in range(world)]
    assert sorted(set(data_ranks)) == list(range(LAYOUT.data_ranks))
    show("place of a rank", seconds / world, mib / world, f"all {world:,} ranks, exact")


def planner() -> None:
    """Predicted step time of every layout of 10,240 devices by the roofline model."""
    cluster = known_cluster("h100", LAYOUT.world_size, network_gb_per_s=50.0)
    sizes = decoder_sizes(architecture("llama", LLAMA_70B))
    efficiency = efficiency_of("h100")
    layouts = [
        Layout(data=LAYOUT.world_size // (tensor * pipeline), tensor=tensor, pipeline=pipeline)
        for tensor in (1, 2, 4, 8)
        for pipeline in (1, 2, 4, 5, 8, 10, 16, 20)
        if BATCH % (LAYOUT.world_size // (tensor * pipeline)) == 0
        and LAYOUT.world_size % (tensor * pipeline) == 0
    ]

    def every() -> list[float]:
        return [
            step_time(
                sizes,
                layout,
                StepSettings(
                    sequence=8192, microbatches=BATCH // layout.data_ranks, sharding="zero1"
                ),
                cluster,
                efficiency,
            ).total
            for layout in layouts
        ]

    times, seconds, mib = measured(every)
    note = f"{len(layouts)} layouts, predicted {min(times):.3g} to {max(times):.3g} s per step"
    show("planner, one layout", seconds / len(layouts), mib, note)


def loader(folder: Path) -> None:
    """Streams of sampled data ranks; their rows must equal a single reader's."""
    corpus = folder / "corpus.jsonl"
    with corpus.open("w") as file:
        for n in range(20_000):
            file.write(f'{{"text": "{f"Line {n} of {n * n}. " * 8}"}}\n')
    ms_data.train_tokenizer(corpus, vocab_size=300, out=folder / "tokenizer.json")
    ms_data.build(corpus, tokenizer=folder / "tokenizer.json", out=folder / "shards")
    count = LAYOUT.data_ranks
    settings: dict[str, Any] = {"sequence_length": LENGTH, "batch_size": ROWS * count, "seed": 1}
    everything = ms_data.TokenStream(folder / "shards", **settings)
    batches = [next(everything)["tokens"] for _ in range(3)]
    rank_0 = [rank for rank in range(LAYOUT.world_size) if LAYOUT.place(rank).tensor == 0]
    ranks = {LAYOUT.place(rank).rank: rank for rank in rank_0 if LAYOUT.place(rank).pipeline == 0}
    opened, read, peak = [], [], []
    for data_rank in SAMPLED:
        place = LAYOUT.place(ranks[data_rank])

        def create() -> ms_data.TokenStream:
            return ms_data.TokenStream(folder / "shards", place=place, **settings)  # noqa: B023

        stream, seconds, mib = measured(create)
        opened.append(seconds)
        peak.append(mib)
        started = time.perf_counter()
        for batch in batches:
            rows = next(stream)["tokens"]
            assert np.array_equal(rows, batch[place.rank * ROWS :][:ROWS])
        read.append((time.perf_counter() - started) / (len(batches) * ROWS))
    note = f"{len(SAMPLED)} of {count} data ranks; one index read, nothing listed"
    show("stream, opening", float(np.median(opened)), float(np.median(peak)), note)
    show("stream, one row", float(np.median(read)), 0.0, f"rows of {LENGTH} tokens, exact")
    state = msgspec.json.encode(everything.state_dict())
    show("stream, saved state", 0.0, len(state) / 2**20, "independent of the number of ranks")


def manifest_of(ranks: int, chunks_per_rank: int) -> Manifest:
    """Manifest of a checkpoint in which each rank saves one chunk of each of its tensors."""
    tensors: dict[str, list[Chunk]] = {}
    for rank in range(ranks):
        stage = rank % LAYOUT.pipeline
        for index in range(chunks_per_rank):
            chunk = Chunk(
                file=f"rank-{rank:05d}.safetensors",
                begin=HEADER + (index << 20),
                size_bytes=1 << 20,
                crc32=(rank * 2_654_435_761 + index) % 2**32,
                offsets=(rank // LAYOUT.pipeline, 0),
                shape=(1, 1 << 18),
            )
            tensors.setdefault(f"optimizer.stage.{stage}.tensor.{index}", []).append(chunk)
    return Manifest(
        step=1000,
        tensors={
            name: SavedTensor(dtype="F32", shape=(len(chunks), 1 << 18), chunks=tuple(chunks))
            for name, chunks in tensors.items()
        },
        files=tuple(
            SavedFile(
                name=f"rank-{rank:05d}.safetensors",
                size_bytes=HEADER + (chunks_per_rank << 20),
                header_bytes=HEADER,
                header_crc32=0,
            )
            for rank in range(ranks)
        ),
        facts={},
    )


def checkpoints(folder: Path) -> None:
    """Manifest of a checkpoint: building and encoding on rank 0, decoding on every rank."""
    per_rank = TENSORS_PER_LAYER * STATES * LLAMA_70B["num_hidden_layers"] // LAYOUT.pipeline
    for groups, shards in ((64, 256), (1, LAYOUT.world_size)):
        ranks = min(shards, 256)
        manifest, seconds, mib = measured(partial(manifest_of, ranks, per_rank))
        content, encode_s, _ = measured(manifest.encode)
        size_mib, scale = len(content) / 2**20, shards / ranks
        what = "replicas share chunks" if groups > 1 else "sharded over all ranks"
        note = f"{shards * per_rank:,} chunks, {what}" + ("" if scale == 1 else ", extrapolated")
        show("checkpoint, rank 0", scale * (seconds + encode_s), scale * mib, note)
        (folder / MANIFEST).write_bytes(content)
        _, decode_s, decode_mib = measured(partial(read_manifest, folder))
        show("checkpoint, reading", scale * decode_s, scale * decode_mib, "one file, no listing")
        show("checkpoint, manifest", 0.0, scale * size_mib, "size of the file")


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    sys.stdout.write("| path | time per rank | memory | |\n|---|---|---|---|\n")
    places()
    planner()
    with tempfile.TemporaryDirectory() as folder:
        loader(Path(folder))
        checkpoints(Path(folder))


if __name__ == "__main__":
    main()
