"""The tag with which a chat template marks what the assistant said."""

from collections.abc import Callable

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro

__all__ = ["generation_tag"]


def generation_tag(mark: Callable[[str], str]) -> type[Extension]:
    """An extension whose `{% generation %}` … `{% endgeneration %}` prints `mark(body)`."""

    class GenerationTag(Extension):
        """Reads the tag."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Parser) -> nodes.Node:
            """A call of `_print` with the tag's body."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_print"), [], [], body).set_lineno(line)

        def _print(self, caller: Macro) -> str:
            return mark(str(caller()))

    return GenerationTag
