"""Token-faithful conversations: each turn's prompt starts with the tokens of the turn before it.

Sampled tokens are never decoded and tokenized again, as the result may differ from the tokens whose
log-probabilities were recorded. Only the text between two responses is tokenized: the end of the
assistant's turn if it was not sampled, the new messages, and the prompt for the next response.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from ms_align.chat.template import render_chat
from ms_align.environments.calls import Reply, parse_reply, tool_format_of
from ms_align.errors import ConfigError, DataError
from ms_align.tokenizer import HuggingFaceTokenizer

Message = Mapping[str, Any]
_MARK = "\ufdd3"
"""Unicode noncharacter used as a placeholder for a response."""


@frozen(kw_only=True)
class Turn:
    """Messages before a response, and their rendered text."""

    messages: tuple[Message, ...]
    text: str


@frozen(kw_only=True)
class Continuation:
    """Tokens to append after a response, and the next turn."""

    tokens: list[int]
    turn: Turn
    exact: bool
    """True if rendering the entire conversation gives the same text."""


class ChatFormat:
    """The chat template of a tokenizer, with tools.

    Args:
        tokenizer: tokenizer with a chat template; its `tools` are offered to the model.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not isinstance(tokenizer, HuggingFaceTokenizer) or not tokenizer.tokenizer.chat_template:
            raise ConfigError(
                "tools and environments need a tokenizer with a chat template; set `tokenizer` to "
                "a Hugging Face folder with a chat template"
            )
        self.tokenizer = tokenizer
        self.tools = tokenizer.tools
        """JSON schemas of the tools that the template prints."""
        self.tool_format = tool_format_of(tokenizer.tokenizer.get_chat_template())
        added = tokenizer.tokenizer.added_tokens_decoder.values()
        special = [str(token) for token in added if token.special and str(token).strip()]
        self._special_tokens = sorted(special, key=len, reverse=True)

    def start(self, messages: Sequence[Message]) -> tuple[Turn, list[int]]:
        """Render and tokenize the messages before a first response."""
        turn = Turn(messages=tuple(messages), text=self._render(messages, prompt=True))
        return turn, self.tokenizer.encode(turn.text)

    def parse(self, response: Sequence[int], *, stopped: bool) -> Reply:
        """Split a response into thoughts, text and tool calls."""
        return parse_reply(self._text(response, stopped), self.tool_format)

    def _text(self, response: Sequence[int], stopped: bool) -> str:
        """Decode a response with special tokens, without the token that ended it."""
        return self._decode(response[:-1] if stopped else response)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def without_special_tokens(self, text: str) -> str:
        """Remove special tokens from a tool's text, which could otherwise imitate other roles."""
        for token in self._special_tokens:
            text = text.replace(token, "")
        return text

    def extend(
        self,
        turn: Turn,
        response: Sequence[int],
        reply: Reply,
        new_messages: Sequence[Message],
        *,
        stopped: bool,
        call_ids: Sequence[str] = (),
    ) -> Continuation | None:
        """Continue a conversation after a response.

        Args:
            turn: messages before the response.
            response: tokens of the response, with its stop token.
            reply: the parsed response.
            new_messages: messages after the response, such as tool results.
            stopped: True if the response ended with a stop token.
            call_ids: id of each tool call in the response.

        Returns:
            The continuation; None if the template would change earlier text, for example because
            it drops the thoughts of earlier turns.
        """
        text = self._text(response, stopped)
        stop = self._decode(response[-1:]) if stopped else ""
        structured = reply.message(list(call_ids))
        rendered = ""
        # First with the response as plain text, then with parsed calls: the rendered conversation
        # must start with exactly the text of the tokens so far.
        for message in ({"role": "assistant", "content": text}, structured):
            messages = (*turn.messages, message, *new_messages)
            try:
                rendered = self._render(messages, prompt=True)
            except DataError:  # some templates reject tool results without structured calls
                continue
            start = turn.text + text + stop
            if rendered.startswith(start):
                return self._continuation(rendered[len(start) :], messages, rendered, stop, True)
        # The template may print calls with other whitespace than the model did. The sampled tokens
        # stay in the context; any other change is rejected.
        messages = (*turn.messages, structured, *new_messages)
        closed = self._render_closed((*turn.messages, structured))
        parts = (turn.text, reply.reasoning, reply.content)
        if rendered.startswith(closed) and closed.startswith(turn.text) and stop:
            tail = closed[len(turn.text) :]
            end = tail.rfind(stop)
            if end >= 0 and all(part in closed for part in parts):
                suffix = tail[end + len(stop) :] + rendered[len(closed) :]
                return self._continuation(suffix, messages, rendered, stop, False)
        return None

    def append(
        self,
        turn: Turn,
        response: Sequence[int],
        reply: Reply,
        new_messages: Sequence[Message],
        *,
        stopped: bool,
        call_ids: Sequence[str] = (),
    ) -> Continuation:
        """Continue a conversation and keep all earlier tokens, even if the template changes them.

        Raises:
            DataError: the template does not print the new messages after an assistant message.
        """
        continuation = self.extend(
            turn, response, reply, new_messages, stopped=stopped, call_ids=call_ids
        )
        if continuation is not None:
            return continuation
        suffix = self._suffix(response, reply, new_messages, stopped=stopped, call_ids=call_ids)
        stop = self._decode(response[-1:]) if stopped else ""
        messages = (*turn.messages, reply.message(list(call_ids)), *new_messages)
        text = self._render(messages, prompt=True)
        return self._continuation(suffix, messages, text, stop, False)

    def _suffix(
        self,
        response: Sequence[int],
        reply: Reply,
        new_messages: Sequence[Message],
        *,
        stopped: bool,
        call_ids: Sequence[str],
    ) -> str:
        """Return the text between a response and the next one.

        It is taken from a short conversation whose response is a placeholder without thoughts, so
        a template that drops earlier thoughts cannot change it.
        """
        example = Reply(content=_MARK, calls=reply.calls).message(list(call_ids))
        history = ({"role": "user", "content": "a"}, example)
        closed = self._render_closed(history)
        rendered = self._render((*history, *new_messages), prompt=True)
        stop = self._decode(response[-1:]) if stopped else ""
        if rendered.startswith(closed):
            end = closed.rfind(stop, max(0, closed.find(_MARK))) if stop else -1
            if end >= 0:
                return rendered[end + len(stop) :]
            # In GLM's templates, the token of the next role ends a response.
            return rendered[len(closed) :].removeprefix(stop)
        # Some templates print the last message differently; find its end by the stop token.
        start = rendered.find(_MARK)
        end = rendered.find(stop, start)
        if not stop or start < 0 or end < 0:
            raise DataError(
                "the chat template must print tool results and user messages after an assistant "
                "message without changing it; use another template"
            )
        return rendered[end + len(stop) :]

    def _continuation(
        self, suffix: str, messages: Sequence[Message], text: str, stop: str, exact: bool
    ) -> Continuation:
        # Tokenize together with the stop token, as in the entire conversation: some tokenizers add
        # a space at the start of a text.
        tokens = self.tokenizer.encode(stop + suffix)
        if stop:
            stop_tokens = self.tokenizer.encode(stop)
            if tokens[: len(stop_tokens)] == stop_tokens:
                tokens = tokens[len(stop_tokens) :]
            else:
                tokens = self.tokenizer.encode(suffix)
        turn = Turn(messages=tuple(messages), text=text)
        return Continuation(tokens=tokens, turn=turn, exact=exact)

    def _render_closed(self, messages: Sequence[Message]) -> str:
        """Render a conversation that ends with an assistant message; "" if the template fails."""
        try:
            return self._render(messages, prompt=False)
        except DataError:
            return ""

    def _render(self, messages: Sequence[Message], *, prompt: bool) -> str:
        return render_chat(
            self.tokenizer.tokenizer,
            messages,
            tools=self.tools,
            generation_prompt=prompt,
        )
