"""Text to token ids and back: tokenizers, chat templates, streams."""

from specjax.text.chat_template import RenderedChat, render_chat
from specjax.text.stream import StopStrings, StreamDecoder, StreamStep, Surfaces, TextStream, token_surfaces
from specjax.text.tokenizer import ChatTokens, Tokenizer, from_directory, from_gguf, from_tokenizers

__all__ = [
    "ChatTokens",
    "RenderedChat",
    "StopStrings",
    "StreamDecoder",
    "StreamStep",
    "Surfaces",
    "TextStream",
    "Tokenizer",
    "from_directory",
    "from_gguf",
    "from_tokenizers",
    "render_chat",
    "token_surfaces",
]
