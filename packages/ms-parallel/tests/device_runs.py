"""Engine and trainer runs on the best device, for `test_device.py`."""

from pathlib import Path
from typing import Any

from launching import MODEL, RUN
from own_models import PLAN, Mine
from runs import build, global_batch, local_rows, tiny, train

from ms_parallel import DistributedTrainer, Engine, Layout, NextTokenLoss
from ms_parallel.cluster.connection import connect
from ms_parallel.pipeline.recorder import recorded_step
from ms_parallel.planner.tuning import search_schedule

SETTINGS = {"num_hidden_layers": 4, "num_key_value_heads": 4, "vocab_size": 48}


def search_and_record(layout: str) -> dict[str, Any]:
    """Search a schedule by measuring, and record a step with it."""
    groups = connect(Layout.parse(layout))
    rows = 4 * groups.layout.data
    searched = search_schedule(
        tiny(**SETTINGS), groups, rows=4, sequence_length=16, microbatch_size=1
    )
    engine = build(SETTINGS, groups, schedule=searched.staged, microbatch_size=1)
    batch = local_rows(global_batch(0, rows), groups)
    update, recorder = engine.record_step(batch, NextTokenLoss())
    step = recorded_step(recorder, groups, 0)
    assert step is not None
    return {"loss": update.loss, "times": [len(times) for times in step.times_ns]}


def custom_model(layout: str) -> list[float]:
    """Losses of a custom module; its buffer and weights move with it."""
    groups = connect(Layout.parse(layout))
    plan = PLAN if groups.layout.tensor > 1 else None
    engine = Engine(Mine().to(groups.device), groups=groups, plan=plan, microbatch_size=2)
    return train(engine, 2)[0]


def train_and_resume(corpus: str, output: str, layout: str) -> dict[str, Any]:
    """Losses, final step and held-out loss of a run that is resumed once."""
    losses = []

    def on_event(event: str, fields: Any) -> None:
        if event == "step":
            losses.append(fields["loss"])

    settings = {
        **{name: value for name, value in RUN.items() if name not in ("steps", "device")},
        "model_config": MODEL,
        "parallel_config": layout,
        "output_dir": Path(output),
        "checkpoint_every": 1,
        "record_every": 2,
        "mixed_precision": True,
        "progress": False,
    }
    DistributedTrainer(**settings, on_event=on_event).train(corpus, steps=1)
    trainer = DistributedTrainer(**settings, on_event=on_event)
    result = trainer.train(corpus, steps=3)
    return {"losses": losses, "step": result.step, "held out": result.held_out_loss}
