"""`ProfilerCallback`: the Trainer of transformers writes an event log and is recorded.

Importing this module needs transformers.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ms_profile.errors import RecordError
from ms_profile.files.untrusted import check_path
from ms_profile.log.event_log import EventLog, Value
from ms_profile.recording.recorder import Recorder

__all__ = ["ProfilerCallback"]

STEP_FIELDS = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "learning_rate"}
"""Keys of the Trainer's log that have the same meaning in a `step` event."""


class ProfilerCallback(TrainerCallback):
    """Write events of a training, and record its steps, for the commands of ms-profile.

    Pass it to `Trainer(callbacks=[...])` of transformers, or to a trainer of TRL. Every process
    writes its own files: `rank-00000.000000.events`, and with `record` also `rank-00000.ring`.

    Events are `begin` or `resume`, `step` (whenever the Trainer logs a loss), `evaluate`,
    `checkpoint` and `end`. A `step` event has `step_time_s`, the mean since the last one, and
    `rate_tokens_per_s` if the Trainer counts tokens (`include_num_input_tokens_seen`).

    Args:
        folder: folder for the files; created if missing.
        record: also record steps, modules, collectives and waits (`Recorder`).
    """

    def __init__(self, folder: str | os.PathLike[str], *, record: bool = True) -> None:
        check_path("folder", folder, error=RecordError, written="folder")
        self.folder = Path(folder)
        self.record = record
        self._log: EventLog | None = None
        self._recorder: Recorder | None = None
        self._last: tuple[int, int, float] = (0, 0, 0.0)
        """Step, tokens and time (s) of the last `step` event."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Open the files. A training that starts after step 0 was resumed."""
        self._log = EventLog(self.folder, rank=args.process_index, world_size=args.world_size)
        if self.record:
            path = self.folder / f"rank-{args.process_index:05d}.ring"
            self._recorder = Recorder(path, rank=args.process_index)
            self._recorder.attach()
        event = "resume" if state.global_step else "begin"
        self._log(event, {"step": state.global_step, "max_steps": state.max_steps})
        self._last = (state.global_step, int(state.num_input_tokens_seen), time.perf_counter())

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Write what the Trainer logs."""
        if self._log is None or logs is None:
            return
        numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        if "loss" in numbers:
            fields: dict[str, Value] = {"step": state.global_step}
            fields |= {name: numbers[key] for key, name in STEP_FIELDS.items() if key in numbers}
            self._log("step", {**fields, **self._rates(state)})
        elif any(name.startswith("eval_") for name in numbers):
            self._log("evaluate", {"step": state.global_step, **numbers})

    def _rates(self, state: TrainerState) -> dict[str, Value]:
        step, tokens, time_s = self._last
        current = (state.global_step, int(state.num_input_tokens_seen), time.perf_counter())
        self._last = current
        if current[0] == step:
            return {}
        rates: dict[str, Value] = {"step_time_s": (current[2] - time_s) / (current[0] - step)}
        if current[1] > tokens:
            rates["rate_tokens_per_s"] = (current[1] - tokens) / (current[2] - time_s)
        return rates

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Note a checkpoint."""
        if self._log is not None:
            self._log("checkpoint", {"step": state.global_step})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Close the files."""
        if self._log is not None:
            finished = int(state.global_step >= state.max_steps)
            self._log("end", {"step": state.global_step, "finished": finished})
            self._log.close()
        if self._recorder is not None:
            self._recorder.close()
        self._log = self._recorder = None
