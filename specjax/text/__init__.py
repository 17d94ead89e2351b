"""Text to token ids and back: tokenizers, chat templates, streams."""

from specjax.text.chat_template import RenderedChat, render_chat
from specjax.text.prompt import Prompt, is_whole, token_ids
from specjax.text.stream import StopStrings, StreamDecoder, StreamStep, Surfaces, TextStream, token_surfaces
from specjax.text.tokenizer import ChatTokens, Tokenizer, from_directory, from_gguf, from_tokenizers

__all__ = [
    "ChatTokens",
    "Prompt",
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
    "is_whole",
    "render_chat",
    "token_ids",
    "token_surfaces",
]
