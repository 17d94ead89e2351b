"""A GGUF file's vocabulary as a `tokenizers` object, equal to the tokenizer the model was published with.

Two kinds of vocabulary (`tokenizer.ggml.model`):

* "gpt2": byte-level BPE, merges from the file; how text is split before merging is named by `tokenizer.ggml.pre`.
* "llama": SentencePiece BPE (Llama 2, Mistral, Gemma): no merges, the score of a piece is its rank.  Only normal pieces
  merge; characters outside the vocabulary become byte tokens; a space is written U+2581.  Llama 2 puts one before every
  text, Gemma does not (`tokenizer.ggml.add_space_prefix`).

Control and unknown tokens are matched whole in the text and are special; user-defined tokens are matched whole and are
text.  Sources: llama.cpp `src/llama-vocab.cpp` (types, defaults, regular expressions), the models' own tokenizer.json
(NFC for Qwen 2, digits split first for SmolLM), SentencePiece `bpe_model.cc`.  Differs on purpose from transformers
5.24, whose GGUF reader lacks SmolLM's digit split, Qwen 2's NFC, `ignore_merges` and the prefix of text after a special
token.  "default" means GPT-2's split, as there.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from gguf import GGUFReader
from gguf import TokenType as Kind
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Split(NamedTuple):
    """How text is cut before byte-level BPE."""

    regex: str | None = None  # None: GPT-2's own
    digits: bool = False  # each digit by itself, before all else
    nfc: bool = False  # compose characters first
    whole: bool = False  # a piece that is in the vocabulary is taken without merging (`ignore_merges`)
    add_bos: bool = False  # where the file does not say


_SPLITS = {
    "default": _Split(),
    "gpt-2": _Split(),
    "smollm": _Split(digits=True),
    "starcoder": _Split(digits=True),
    "qwen2": _Split(_QWEN2, nfc=True),
    "deepseek-r1-qwen": _Split(_QWEN2),
    "llama-bpe": _Split(_LLAMA3, whole=True, add_bos=True),
    "llama3": _Split(_LLAMA3, whole=True, add_bos=True),
    "llama-v3": _Split(_LLAMA3, whole=True, add_bos=True),
    "tekken": _Split(_TEKKEN, whole=True, add_bos=True),
}


class Vocabulary(NamedTuple):
    """A rebuilt tokenizer and the ids that the file names."""

    backend: Tokenizer
    tokens: list[str]  # by id
    bos_id: int | None
    eos_ids: tuple[int, ...]  # end of sequence, of turn, of message


def field(reader: GGUFReader, key: str, default: Any = None) -> Any:
    """The value of one metadata key, or `default` where the file lacks it."""
    found = reader.get_field(key)
    return default if found is None else found.contents()


def read_vocabulary(reader: GGUFReader) -> Vocabulary:
    """Rebuild the tokenizer of an open GGUF file.

    Raises ValueError in one line for a file without a vocabulary, for a vocabulary that contradicts itself, and for an
    unknown tokenizer model or pre-tokenizer (named).
    """
    model = field(reader, "tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if model not in builders:
        raise ValueError(f"GGUF tokenizer model {model!r} is not supported: convert with one of {sorted(builders)}")
    tokens, kinds = _tokens(reader)
    sentencepiece = model == "llama"
    bos_id = _special_id(reader, "bos", len(tokens), default=1 if sentencepiece else None)
    eos_id = _special_id(reader, "eos", len(tokens), default=2 if sentencepiece else None)
    ends = [eos_id, *(_special_id(reader, name, len(tokens)) for name in ("eot", "eom"))]
    try:
        backend, add_bos = builders[model](reader, tokens, kinds)
    except ValueError:
        raise
    except Exception as error:  # `tokenizers` raises bare Exception
        raise ValueError(f"GGUF vocabulary is broken ({error}): download or convert the file again") from error
    _add_specials(backend, tokens, kinds)
    bos = bos_id if field(reader, "tokenizer.ggml.add_bos_token", add_bos) else None
    eos = eos_id if field(reader, "tokenizer.ggml.add_eos_token", False) else None
    _add_template(backend, tokens, bos, eos)
    return Vocabulary(backend, tokens, bos_id, tuple(dict.fromkeys(i for i in ends if i is not None)))


def _tokens(reader: GGUFReader) -> tuple[list[str], list[int]]:
    """Tokens as `tokenizers` must spell them, and their kinds."""
    tokens = field(reader, "tokenizer.ggml.tokens", [])
    kinds = field(reader, "tokenizer.ggml.token_type", [int(Kind.NORMAL)] * len(tokens))
    if not tokens or len(kinds) != len(tokens):
        raise ValueError(f"GGUF file has {len(tokens)} tokens and {len(kinds)} token types: convert the file again")
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    if field(reader, "tokenizer.ggml.model") == "llama":
        # Normal pieces meet text whose spaces are already U+2581; user-defined ones are searched in the text as it is.
        respell = {int(Kind.NORMAL): (" ", "\u2581"), int(Kind.USER_DEFINED): ("\u2581", " ")}
        tokens = [t.replace(*respell[k]) if k in respell else t for t, k in zip(tokens, kinds, strict=True)]
    twice = [token for token, count in Counter(tokens).items() if count > 1]
    if twice:
        raise ValueError(f"GGUF vocabulary lists token {twice[0]!r} more than once: convert the file again")
    return tokens, kinds


def _special_id(reader: GGUFReader, name: str, size: int, default: int | None = None) -> int | None:
    token_id = field(reader, f"tokenizer.ggml.{name}_token_id", default)
    if token_id is None or 0 <= token_id < size:
        return token_id
    raise ValueError(f"GGUF {name}_token_id {token_id} is outside the vocabulary of {size}: convert the file again")


def _byte_level(reader: GGUFReader, tokens: list[str], kinds: list[int]) -> tuple[Tokenizer, bool]:
    del kinds
    name = field(reader, "tokenizer.ggml.pre", "default")
    if name not in _SPLITS:
        raise ValueError(f"GGUF pre-tokenizer {name!r} is not supported: use a file with one of {sorted(_SPLITS)}")
    split = _SPLITS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in field(reader, "tokenizer.ggml.merges", [])]
    if not merges:
        raise ValueError("GGUF file has a byte-level vocabulary without tokenizer.ggml.merges: convert the file again")
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.whole))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    if split.regex is not None:
        steps.append(pre_tokenizers.Split(Regex(split.regex), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.regex is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    return backend, split.add_bos


def _sentencepiece(reader: GGUFReader, tokens: list[str], kinds: list[int]) -> tuple[Tokenizer, bool]:
    scores = field(reader, "tokenizer.ggml.scores", [])
    if len(scores) != len(tokens):
        raise ValueError(f"GGUF file has {len(tokens)} tokens and {len(scores)} scores: convert the file again")
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == Kind.UNKNOWN), None)
    merges = _merges_by_score(tokens, kinds, scores)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "\u2581")
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if field(reader, "tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(steps)
    return backend, True


def _merges_by_score(tokens: list[str], kinds: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Every pair of normal pieces that makes a third, best score first, then lower id.

    SentencePiece applies the merge with the best piece score, leftmost first; equal scores of different pieces, which
    trained models do not have, would be ordered by place there.
    """
    normal = {t: i for i, (t, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == Kind.NORMAL}
    ranked = []
    for token, i in normal.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                ranked.append((-scores[i], i, cut, left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_specials(backend: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    pairs = list(zip(tokens, kinds, strict=True))
    special = [AddedToken(t, normalized=False, special=True) for t, kind in pairs if kind in (Kind.CONTROL, Kind.UNKNOWN)]
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t, kind in pairs if kind == Kind.USER_DEFINED])


def _add_template(backend: Tokenizer, tokens: list[str], bos: int | None, eos: int | None) -> None:
    """Make `encode` add these ids; None adds nothing."""
    before, after = ([] if i is None else [tokens[i]] for i in (bos, eos))
    if before or after:
        named = [(token, backend.token_to_id(token)) for token in dict.fromkeys(before + after)]
        single = [*before, "$A", *after]
        pair = [*single, *(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)]
        backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=named)
