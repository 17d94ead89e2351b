"""Token ids to text, all at once or as they arrive: valid UTF-8 pieces, cut before a stop string.

Text is defined by bytes: every token has bytes of its own, whatever its neighbours (only the first token of a text may
lose a leading space), and the text is their concatenation read as UTF-8, each broken sequence becoming U+FFFD.  Whole
decoding and streaming are then the same computation, and a token costs the same however long the text is.  For valid
UTF-8 this equals `tokenizers.Tokenizer.decode`; they differ where a run of byte-fallback tokens is broken (there
`tokenizers` replaces every byte of the run, also the sound ones, so its earlier text changes as tokens arrive).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple

import tokenizers


class Surfaces(NamedTuple):
    """What the tokens of a vocabulary look like."""

    first: Callable[[int], bytes]  # token id -> its bytes at the start of a text
    later: Callable[[int], bytes]  # token id -> its bytes after other tokens; b"" for an id outside the vocabulary
    special: frozenset[int]  # ids that a reader does not see


class StreamStep(NamedTuple):
    """What one push of tokens brought."""

    text: str  # new text that may be shown
    stop: str | None  # the stop string that ended the text
    num_tokens: int  # tokens kept in all; on a stop, up to and including the token that completed the stop string


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: character -> byte (`bytes_to_unicode`, Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def token_surfaces(backend: tokenizers.Tokenizer) -> Surfaces:
    """The bytes of every token, read off the tokenizer's own decoder and computed on demand."""
    special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
    decoder = repr(backend.decoder)
    if "ByteLevel" in decoder:
        byte_of = byte_alphabet()

        @cache
        def alphabet_bytes(token_id: int) -> bytes:
            token = backend.id_to_token(token_id) or ""
            known = all(character in byte_of for character in token)
            return bytes(byte_of[character] for character in token) if known else token.encode()

        return Surfaces(alphabet_bytes, alphabet_bytes, special)
    fallback = "ByteFallback" in decoder
    anchor = _anchor(backend, special)
    anchor_text = backend.decode(anchor, skip_special_tokens=False)

    def surface(context: list[int], context_text: str, token_id: int) -> bytes:
        token = backend.id_to_token(token_id)
        if token is None:
            return b""
        text = backend.decode([*context, token_id], skip_special_tokens=False)
        byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token) if fallback else None
        return bytes.fromhex(byte[1]) if byte and text != context_text else text[len(context_text) :].encode()

    first = cache(lambda token_id: surface([], "", token_id))
    later = cache(lambda token_id: surface(anchor, anchor_text, token_id))
    return Surfaces(first, later, special)


def _anchor(backend: tokenizers.Tokenizer, special: frozenset[int]) -> list[int]:
    """An ordinary token to stand before another one, so that the other is not the first of its text."""
    plain = [i for token, i in backend.get_vocab().items() if i not in special and token.isascii() and token.isalnum()]
    return [min(plain)] if plain else []


class StreamDecoder:
    """Text pieces as token ids arrive; their concatenation, `flush` included, is the text of all ids.

    An incomplete character is held back.  `skip_special` drops special tokens, as `Tokenizer.decode` does.
    """

    def __init__(self, surfaces: Surfaces, *, skip_special: bool = True) -> None:
        self._surfaces = surfaces
        self._hidden = surfaces.special if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._started = False

    def push(self, ids: Iterable[int]) -> str:
        """The text that is certain now and was not before."""
        chunks = []
        for token_id in map(int, ids):
            if token_id in self._hidden:
                continue
            chunks.append(self._surfaces.later(token_id) if self._started else self._surfaces.first(token_id))
            self._started = True
        return self._utf8.decode(b"".join(chunks))

    def flush(self) -> str:
        """The end of the text: U+FFFD if a character stayed incomplete, else nothing."""
        return self._utf8.decode(b"", final=True)


class StopStrings:
    """Passes text on up to the first stop string; holds back what could be the beginning of one.

    >>> stops = StopStrings(["</end>"])
    >>> stops.push("fine</e"), stops.push("nd> never shown")
    (('fine', None), ('', '</end>'))
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raise ValueError for an empty stop string, or for one string where a list of them is meant."""
        if isinstance(stops, str) or not all(stops):
            raise ValueError(f"stop must be a list of non-empty strings, got {stops!r}: write stop=['...']")
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """(text that may be shown, the stop string found).  Of several in one piece, the one that starts first."""
        text = self._held + piece
        found = [(text.find(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if found:
            start, _, stop = min(found)
            self._held = ""
            return text[:start], stop
        starts = range(max(0, len(text) - self._longest + 1), len(text))
        keep = next((i for i in starts if any(stop.startswith(text[i:]) for stop in self._stops)), len(text))
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """Token ids in, showable text out, until a stop string: `StreamDecoder` followed by `StopStrings`.

    Blocks of several tokens are read token by token: `num_tokens` says how many of all pushed tokens to keep, the text
    ends before the stop string, and what is pushed after a stop is ignored.
    """

    def __init__(self, surfaces: Surfaces, *, stop: Sequence[str] = (), skip_special: bool = True) -> None:
        self._decoder = StreamDecoder(surfaces, skip_special=skip_special)
        self._stops = StopStrings(stop)
        self._stop: str | None = None
        self._num_tokens = 0

    def push(self, ids: Iterable[int]) -> StreamStep:
        """Take in a block of tokens."""
        shown = []
        for token_id in ids:
            if self._stop is not None:
                break
            self._num_tokens += 1
            shown.append(self._advance(self._decoder.push([token_id])))
        return StreamStep("".join(shown), self._stop, self._num_tokens)

    def flush(self) -> StreamStep:
        """End of generation: the rest of the text (an incomplete character may still complete a stop string)."""
        text = "" if self._stop is not None else self._advance(self._decoder.flush())
        return StreamStep(text + self._stops.flush(), self._stop, self._num_tokens)

    def _advance(self, piece: str) -> str:
        text, self._stop = self._stops.push(piece) if piece else ("", None)
        return text
