"""Chooses the encoder of a build by its arguments."""

from pathlib import Path

from ms_data.building.encoders import ChatEncoder, TextEncoder
from ms_data.chat.template import ChatTemplate
from ms_data.errors import SettingError
from ms_data.tokenization.tokenizer import Tokenizer


def encoder_for(
    tokenizer: str | Path | Tokenizer,
    chat: str | Path | ChatTemplate | None,
    *,
    pairs: bool,
    allow_special: bool,
) -> TextEncoder:
    """Choose the encoder of a build by its arguments.

    Raises:
        SettingError: arguments that need a chat template without one, or a template whose text
            differs from day to day.
        TokenizerError: the tokenizer or the template cannot be read.
    """
    model = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
    if chat is None:
        if pairs or allow_special:
            raise SettingError("pairs and allow_special need a chat template; give `chat`")
        try:
            return TextEncoder(tokenizer=model, words=model.word_encoder())
        except ValueError as error:
            return TextEncoder(tokenizer=model, why_library=str(error))
    template = chat if isinstance(chat, ChatTemplate) else ChatTemplate.load(chat)
    if template.asks_date and template.today is None:
        raise SettingError(
            "the chat template prints today's date, so a build would differ from day to day; "
            "choose the date with --today"
        )
    return ChatEncoder(
        template=template.with_tokens_of(model.folder),
        tokenizer=model,
        kind="preferences" if pairs else "conversations",
        allow_special=allow_special,
    )
