"""Make text_tokens.json and text_chat.json: what transformers, tokenizers and sentencepiece give.

    python tests/golden/make_text.py SHARED SMOLLM2.gguf        (transformers 5.24, gguf, sentencepiece; 10 seconds)

Large vocabularies are cut to the tokens that occur while the golden texts are encoded.  Byte-pair encoding always
applies the best pair present; every pair applied is kept, so the cut vocabulary gives the same pieces as the whole one.
SmolLM2's expected ids come from transformers' own GGUF reader with the pre-tokenizer of the published tokenizer.json
(digits first) put in; `plain_transformers` lists the texts on which its unmodified reader, which lacks that split,
differs.
"""

import io
import json
import re
import sys
from pathlib import Path

import sentencepiece
from gguf import TokenType
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

AWKWARD = [
    "",
    " ",
    "   ",
    "\n",
    " \n\n  \n",
    "a\r\nb\r\n\r\n",
    "\ttab\t\ttabs",
    "\x00nul\x00",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 👍🏽",
    "e\u0301 é n\u0303 ñ Å A\u030a ﬁ",
    "2024 years, 3.14159 1,000,000 ²³ ٣٤٥ ½",
    "two  2 spaces   33 before digits",
    "中文字符测试，日本語テスト。한국어",
    "مرحبا بالعالم، كيف الحال؟ שלום",
    "I'll we've DON'T can't 'S x'y",
    "snake_case camelCase <html></html> {}[]();//",
    "ﷺ𝔘𝔫𝔦 𐍈 \u200b\u200d\ufeff \u00a0nbsp\u3000wide",
    "\ufffd replacement �",
    "Zürich straße naïve façade",
]
LOOKALIKES = ["<|im_start|>user\nhi<|im_end|>\n", "<|im_start |> <|im_end|", "a<|endoftext|>b <|im_end|> c"]
CHATS = [
    [{"role": "user", "content": " Hello <b>&</b> 'you' "}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello! 👋"},
        {"role": "user", "content": "Bye\n"},
        {"role": "assistant", "content": "<think>x</think>Bye."},
    ],
]


def prompts(shared):
    lines = (shared / "data/prompts/spec_bench/question.jsonl").read_text().splitlines()
    turns = [json.loads(line)["turns"][0][:500] for line in lines]
    return turns[:: len(turns) // 16][:16]


def merged(symbols, rank):
    """Every piece that byte-pair encoding makes on the way, best rank first, then leftmost."""
    symbols, made = list(symbols), set(symbols)
    while True:
        pairs = [(rank[p], i) for i, p in enumerate(zip(symbols, symbols[1:], strict=False)) if p in rank]
        if not pairs:
            return made
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
        made.add(symbols[i])


def smollm(gguf, texts):
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    plain = [tokenizer(text)["input_ids"] for text in texts]
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ids = [backend.encode(text).ids for text in texts]
    model = json.loads(backend.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    rank = {pair: i for i, pair in enumerate(merges)}
    special = sorted(backend.get_added_tokens_decoder().items())
    names = "|".join(re.escape(token.content) for _, token in special)
    used = set(backend.get_vocab()) & set(pre_tokenizers.ByteLevel.alphabet())
    for text in texts:
        for part in re.split(names, text):
            for word, _ in backend.pre_tokenizer.pre_tokenize_str(part):
                used |= merged(word, rank)
    vocab = model["vocab"]
    tokens = sorted(used | {token.content for _, token in special}, key=vocab.__getitem__)
    return {
        "texts": texts,
        "ids": ids,
        "plain_transformers": [i for i, (a, b) in enumerate(zip(plain, ids, strict=True)) if a != b],
        "decoded": [tokenizer.decode(i, skip_special_tokens=True) for i in ids],
        "real_ids": [vocab[token] for token in tokens],
        "tokens": tokens,
        "types": [int(TokenType.CONTROL if vocab[t] in dict(special) else TokenType.NORMAL) for t in tokens],
        "merges": [f"{a} {b}" for a, b in merges if {a, b, a + b} <= used],
        "bos": 1,
        "eos": 2,
    }


def spm_arrays(processor, user_defined=()):
    kinds = []
    for i in range(processor.get_piece_size()):
        known = [(processor.is_control(i), 3), (processor.is_unknown(i), 2), (processor.is_byte(i), 6)]
        known += [(processor.is_unused(i), 5), (processor.id_to_piece(i) in user_defined, 4)]
        kinds.append(next((kind for holds, kind in known if holds), 1))
    size = range(processor.get_piece_size())
    return [processor.id_to_piece(i) for i in size], [processor.get_score(i) for i in size], kinds


def mixtral(path, texts):
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokens, scores, kinds = spm_arrays(processor)
    normal = {token: score for token, score, kind in zip(tokens, scores, kinds, strict=True) if kind == 1}
    used = set()
    for text in texts:
        pieces = list("▁" + text.replace(" ", "▁")) if text else []
        rank = _Scores(normal)
        used |= merged(pieces, rank)
    keep = [i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != 1 or token in used]
    pieces = [processor.encode(text, out_type=str) for text in texts]
    return {
        "texts": texts,
        "pieces": pieces,
        "decoded": [processor.decode(processor.encode(text)) for text in texts],
        "tokens": [tokens[i] for i in keep],
        "scores": [scores[i] for i in keep],
        "types": [kinds[i] for i in keep],
    }


class _Scores(dict):
    """(left, right) -> minus the score of the merged piece."""

    def __contains__(self, pair):
        return all(self.get(piece) is not None for piece in (*pair, pair[0] + pair[1]))

    def __getitem__(self, pair):
        return -self.get(pair[0] + pair[1])


def gemma_like(shared, texts):
    """A tiny SentencePiece BPE model without dummy prefix, with runs of spaces as user-defined pieces: Gemma's kind."""
    user_defined = ["▁▁", "▁▁▁", "▁▁▁▁", "\n\n", "\n\n\n", "<b>"]
    lines = (shared / "data/prompts/spec_bench/question.jsonl").read_text().splitlines()
    corpus = [turn for line in lines[:160] for turn in json.loads(line)["turns"]]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=user_defined,
        split_digits=True,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        num_threads=1,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    tokens, scores, kinds = spm_arrays(processor, user_defined)
    pieces = [processor.encode(text, out_type=str) for text in texts]
    return {"texts": texts, "pieces": pieces, "tokens": tokens, "scores": scores, "types": kinds}


def chats(shared):
    cases = []
    for path in sorted((shared / "data/chat/templates").glob("*.jinja")):
        template = path.read_text()
        for messages in CHATS:
            for prompt in (False, True):
                given = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": prompt}
                texts, spans = render_jinja_template([messages], None, None, template, True, **given)
                cases.append([path.stem, messages, prompt, texts[0], [list(span) for span in spans[0]]])
    templates = {path.stem: path.read_text() for path in sorted((shared / "data/chat/templates").glob("*.jinja"))}
    return {
        "sources": "chujiezheng/chat_templates 11c49562, MIT; qwen3_train: NVIDIA/Model-Optimizer a2fbac7b, Apache-2.0",
        "templates": templates,
        "cases": cases,
    }


def main(shared, gguf):
    here, texts = Path(__file__).parent, prompts(shared) + AWKWARD
    found = {
        "smollm2": smollm(gguf, texts + LOOKALIKES),
        "mixtral": mixtral(shared / "data/tokenizers/mixtral/tokenizer.model", texts),
        "gemma_like": gemma_like(shared, [*texts[:8], *AWKWARD, "a  b    c     d\n\n\n\ne", "x <b>bold</b>"]),
    }
    (here / "text_tokens.json").write_text(json.dumps(found, ensure_ascii=True, separators=(",", ":")) + "\n")
    (here / "text_chat.json").write_text(json.dumps(chats(shared), ensure_ascii=True, indent=0) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
