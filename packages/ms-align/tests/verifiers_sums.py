"""A taskset of verifiers for tests: sums, which the policy may add with a tool."""

import asyncio
from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field
from verifiers_sums_tools import SumsToolset

__all__ = ["SumsTaskset"]


class SumsData(vf.TaskData):
    """A question and its answer."""

    answer: str
    fault: str = ""


class SumsTaskConfig(vf.TaskConfig):
    """The tools of a task."""

    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class SumsTask(vf.Task[SumsData, vf.State, SumsTaskConfig]):
    """Scores the last reply."""

    @classmethod
    def toolsets(cls, config: SumsTaskConfig) -> list[vf.Toolset]:
        """Return the calculator."""
        return [SumsToolset(config.tools)]

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Misbehave if the task says so."""
        if self.data.fault == "hang":
            await asyncio.sleep(1000)
        if self.data.fault == "raise":
            raise ValueError("no such\nthing")

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        """Reward the right sum."""
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.5)
    async def called(self, trace: vf.Trace) -> float:
        """Reward a call of the tool."""
        return float(any(message.role == "tool" for message in trace.branches[-1].messages))


class SumsConfig(vf.TasksetConfig):
    """Number of questions, and the faults of some."""

    task: SumsTaskConfig = SumsTaskConfig()
    count: int = 4
    faults: dict[str, str] = Field(default_factory=dict)


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    """Questions such as `12 + 30?`."""

    def load(self) -> Iterator[SumsTask]:
        """Yield the tasks."""
        for index in range(self.config.count):
            data = SumsData(
                prompt=f"{12 + index} + 30?",
                answer=str(42 + index),
                fault=self.config.faults.get(str(index), ""),
            )
            yield SumsTask(data, self.config.task)
