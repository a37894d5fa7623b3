"""The tool of `verifiers_sums`, whose server verifiers starts as a process."""

import verifiers.v1 as vf


class SumsToolset(vf.Toolset[vf.ToolsetConfig]):
    """A calculator."""

    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


if __name__ == "__main__":
    SumsToolset.run()
