"""Creates the encoder of a build from its arguments."""

from pathlib import Path

from ms_data.building.encoders import ChatEncoder, TextEncoder
from ms_data.chat.template import ChatTemplate
from ms_data.errors import SettingError
from ms_data.tokenization.tokenizer import Tokenizer


def make_encoder(
    tokenizer: str | Path | Tokenizer,
    chat: str | Path | ChatTemplate | None,
    *,
    pairs: bool,
    allow_special: bool,
) -> TextEncoder:
    """Create the encoder of a build.

    Raises:
        SettingError: an argument needs a chat template and none is set, or the output of the
            template depends on the current date.
        TokenizerError: the tokenizer or the template cannot be read.
    """
    model = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
    if chat is None:
        if pairs or allow_special:
            raise SettingError("pairs and allow_special need a chat template; set `chat`")
        try:
            return TextEncoder(tokenizer=model, words=model.word_encoder())
        except ValueError as error:
            return TextEncoder(tokenizer=model, library_reason=str(error))
    template = chat if isinstance(chat, ChatTemplate) else ChatTemplate.load(chat)
    if template.asks_date and template.today is None:
        raise SettingError(
            "the chat template prints today's date, so builds would differ from day to day; "
            "set the date with --today"
        )
    return ChatEncoder(
        template=template.with_tokens_of(model.folder),
        tokenizer=model,
        document_kind="preferences" if pairs else "conversations",
        allow_special=allow_special,
    )
