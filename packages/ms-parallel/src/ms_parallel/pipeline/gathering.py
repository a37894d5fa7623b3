"""Gathers what all ranks of a pipeline have recorded of one step."""

from ms_parallel.cluster.groups import Groups
from ms_parallel.pipeline.recorder import Recorder, gather_times
from ms_parallel.pipeline.step_file import RecordedStep


def recorded_step(recorder: Recorder, groups: Groups, step: int) -> RecordedStep | None:
    """Gather what all ranks of this pipeline have recorded; every process calls it.

    Args:
        recorder: of `Engine.record_step`.
        groups: the layout's processes.
        step: updates made before this one.

    Returns:
        The step, None where nothing had a loss.
    """
    if recorder.schedule is None:
        return None
    return RecordedStep(
        step=step,
        layout=str(groups.layout),
        name=recorder.schedule.name,
        table=recorder.schedule.to_csv(),
        times_ns=tuple(map(tuple, gather_times(recorder, groups))),
    )
