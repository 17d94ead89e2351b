"""Text in, token ids out, and back: one `Tokenizer` for Hugging Face directories and GGUF files.

`tokenizers` does the work; this file finds the ids around it (BOS, every EOS, the chat template) and keeps two rules:
a chat prompt starts with exactly one BOS whether the template or the tokenizer writes it, and streamed text equals
whole text (`stream.py`).  No clean-up of spaces before punctuation is done: it would change what the model said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from gguf import GGUFReader

from specjax.json_text import as_object, parsed
from specjax.text import gguf
from specjax.text.chat_template import render_chat
from specjax.text.stream import StreamDecoder, Surfaces, TextStream, token_surfaces


class ChatTokens(NamedTuple):
    """A rendered conversation and its token ids."""

    ids: list[int]
    mask: list[bool]  # by token: it writes part of a generation block of the template (all False if there is none)
    text: str  # what the template wrote


class Tokenizer(NamedTuple):
    """A vocabulary with its special ids and chat template.  Build it with a `from_...` function."""

    backend: tokenizers.Tokenizer
    vocab_size: int  # one more than the largest id; a model's embedding may be padded beyond it
    bos_id: int | None
    eos_ids: tuple[int, ...]  # generation stops at any of them; () where nothing names one
    eos_token: str | None  # what the chat template writes; need not be one of the above
    chat_template: str | None
    surfaces: Surfaces  # token id -> bytes

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of `text`, with the BOS (or EOS) that the tokenizer's own post-processor adds, unless told not to.

        The text of a special token is read as that token, as transformers does.
        """
        return self.backend.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; broken UTF-8 becomes U+FFFD, ids outside the vocabulary are nothing."""
        decoder = StreamDecoder(self.surfaces, skip_special=skip_special)
        return decoder.push(ids) + decoder.flush()

    def stream(self, *, stop: Sequence[str] = (), skip_special: bool = True) -> TextStream:
        """A reader for tokens as they arrive, which ends before the first of the `stop` strings."""
        return TextStream(self.surfaces, stop=stop, skip_special=skip_special)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's next turn; see `chat_tokens`."""
        return self.chat_tokens(messages, add_generation_prompt, variables=variables).ids

    def chat_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        *,
        variables: Mapping[str, Any] | None = None,
    ) -> ChatTokens:
        """Render the chat template and encode the text; prompts and training data both come from here.

        BOS stands first exactly once: the template's if it starts with one, else the tokenizer's if that adds one
        (which transformers' `apply_chat_template` leaves out).  Raises ValueError without a template, or if rendering
        fails.
        """
        if self.chat_template is None:
            raise ValueError("tokenizer has no chat template: pass text to encode(), or add a chat_template.jinja file")
        bos = None if self.bos_id is None else self.backend.id_to_token(self.bos_id)
        text, spans = render_chat(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            bos_token=bos,
            eos_token=self.eos_token,
            variables=variables,
        )
        encoding = self.backend.encode(text, add_special_tokens=False)
        mask = [any(a < end and start < max(b, a + 1) for start, end in spans) for a, b in encoding.offsets]
        written = bos is not None and text.lstrip().startswith(bos)
        added = [i for i in self.encode("")[:1] if i == self.bos_id and not written]
        return ChatTokens([*added, *encoding.ids], [False for _ in added] + mask, text)


def from_tokenizers(
    backend: tokenizers.Tokenizer,
    *,
    bos_id: int | None = None,
    eos_ids: Sequence[int] = (),
    eos_token: str | None = None,
    chat_template: str | None = None,
) -> Tokenizer:
    """Wrap a `tokenizers` object; truncation and padding stored in it are switched off.

    `eos_token`, for the chat template, is the token of the first of `eos_ids` unless given.
    """
    backend.no_truncation()
    backend.no_padding()
    size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    if eos_token is None and eos_ids:
        eos_token = backend.id_to_token(eos_ids[0])
    return Tokenizer(backend, size, bos_id, tuple(eos_ids), eos_token, chat_template, token_surfaces(backend))


def from_gguf(reader: GGUFReader) -> Tokenizer:
    """The tokenizer inside an open GGUF file, `tokenizer.chat_template` included (errors: `read_vocabulary`)."""
    vocabulary = gguf.read_vocabulary(reader)
    template = gguf.field(reader, "tokenizer.chat_template")
    return from_tokenizers(vocabulary.backend, bos_id=vocabulary.bos_id, eos_ids=vocabulary.eos_ids, chat_template=template)


def from_directory(path: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face model directory.

    `tokenizer.json` is required; the rest is read where present.  EOS ids: the first file of generation_config.json,
    config.json (`eos_token_id`, a number or a list), tokenizer_config.json, special_tokens_map.json (`eos_token`) that
    names any.  BOS: tokenizer_config.json, where null means none, then special_tokens_map.json.  Chat template:
    chat_template.jinja, chat_template.json, tokenizer_config.json (of several, the one called "default").
    Raises FileNotFoundError without tokenizer.json, ValueError for a git-lfs pointer or a broken file, in one line.
    """
    directory = Path(path)
    source = _read(directory / "tokenizer.json")
    if source is None:
        raise FileNotFoundError(
            f"{directory} has no tokenizer.json: save one there with transformers' AutoTokenizer.save_pretrained"
        )
    try:
        backend = tokenizers.Tokenizer.from_str(source)
    except Exception as error:  # `tokenizers` raises bare Exception
        raise ValueError(f"{directory / 'tokenizer.json'} is broken ({error}): download it again") from error
    special = _json(directory / "special_tokens_map.json") | _json(directory / "tokenizer_config.json")
    _match_whole(backend, special)
    bos_id, eos_id = (_token_id(backend, special.get(name)) for name in ("bos_token", "eos_token"))
    eos_ids = _ids(directory / "generation_config.json") or _ids(directory / "config.json")
    if not eos_ids and eos_id is not None:
        eos_ids = [eos_id]
    eos_token = None if eos_id is None else backend.id_to_token(eos_id)
    template = _template(directory, special)
    return from_tokenizers(backend, bos_id=bos_id, eos_ids=eos_ids, eos_token=eos_token, chat_template=template)


def _read(path: Path) -> str | None:
    """The text of a file; None where there is none."""
    if not path.is_file():
        return None
    data = path.read_bytes()
    if data.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path} is a git-lfs pointer, not the file itself: run git lfs pull in that directory")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}): download it again") from error


def _json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is no file."""
    text = _read(path)
    if text is None:
        return {}
    return as_object(parsed(text, path, "download it again"), path, "download it again")


def _ids(path: Path) -> list[int]:
    """`eos_token_id` of a configuration file as a list; nested `text_config` (multimodal models) counts too."""
    config = _json(path)
    nested = config.get("text_config")
    value = config.get("eos_token_id", nested.get("eos_token_id") if isinstance(nested, dict) else None)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) for i in ids):
        raise ValueError(f"{path} has eos_token_id {value!r}: expected a number or a list of numbers")
    return list(dict.fromkeys(ids))


def _token_id(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    """The id of a special token given as text or as {"content": text}."""
    text = token.get("content") if isinstance(token, dict) else token
    return backend.token_to_id(text) if isinstance(text, str) else None


def _match_whole(backend: tokenizers.Tokenizer, special: Mapping[str, Any]) -> None:
    """Match the configured special tokens whole where tokenizer.json does not say so (transformers does the same)."""
    given = [value for key, value in special.items() if key.endswith("_token")]
    given += special.get("additional_special_tokens") or []
    texts = [token.get("content") if isinstance(token, dict) else token for token in given]
    matched = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [
        t for t in dict.fromkeys(texts) if isinstance(t, str) and t not in matched and backend.token_to_id(t) is not None
    ]
    backend.add_special_tokens([tokenizers.AddedToken(t, normalized=False, special=True) for t in missing])


def _template(directory: Path, special: Mapping[str, Any]) -> str | None:
    text = _read(directory / "chat_template.jinja")
    if text is not None:
        return text
    template = _json(directory / "chat_template.json").get("chat_template") or special.get("chat_template")
    if isinstance(template, list):
        return {item["name"]: item["template"] for item in template}.get("default")
    return template
