"""Tokenizers, chat templates and streamed text against transformers, sentencepiece and naive references.

Goldens: tests/golden/make_text.py.  Cases of the field: E07 (several EOS ids), L17 (git-lfs pointers), T01 and T03
(chat text and generated text agree), T07 (one BOS).
"""

import json
import os
import random
from collections import Counter
from pathlib import Path

import gguf
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from specjax import text
from specjax.text.chat_template import render_chat

GOLDEN = Path(__file__).parents[1] / "golden"
TOKENS = json.loads((GOLDEN / "text_tokens.json").read_text())
CHATS = json.loads((GOLDEN / "text_chat.json").read_text())
SMOLLM2 = Path(os.environ.get("SPECJAX_SMOLLM2_GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf"))
SHARED = Path(__file__).parents[2].parent / "shared"
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0a1b\nsize 9085657\n"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def open_gguf(path, values):
    """A GGUF file without tensors that holds `values` under tokenizer.ggml.* (or the full key, where it has a dot)."""
    writer = gguf.GGUFWriter(path / "tokenizer.gguf", "llama")
    for name, value in values.items():
        key = name if "." in name else f"tokenizer.ggml.{name}"
        kinds = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        kinds[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf.GGUFReader(path / "tokenizer.gguf")


def byte_level(**values):
    """The smallest byte-level vocabulary: 256 bytes, "he", "hel" and "hello" (which no merge reaches), one control."""
    tokens = [*ALPHABET, "he", "hel", "hello", "<end>"]
    base = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": [NORMAL] * 259 + [CONTROL]}
    return base | {"merges": ["h e", "he l"], "eos_token_id": 259} | values


def sentencepiece(**values):
    """A SentencePiece vocabulary by hand: specials, bytes, letters and a few pieces with scores."""
    pieces = {"▁": -9.0, "a": -9.0, "b": -9.0, "c": -9.0, "ab": -2.0, "bc": -1.0, "▁a": -3.0, "abc": -4.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces)
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": kinds,
        "scores": [0.0] * 259 + [*pieces.values()],
    } | values


@pytest.fixture(scope="module")
def golden_tokenizers(tmp_path_factory):
    """The three golden vocabularies, through GGUF."""

    def build(name, **values):
        found = TOKENS[name]
        arrays = {"tokens": found["tokens"], "token_type": found["types"]}
        return text.from_gguf(open_gguf(tmp_path_factory.mktemp(name), arrays | values))

    spm = {"model": "llama", "add_bos_token": False}
    return {
        "smollm2": build("smollm2", model="gpt2", pre="smollm", merges=TOKENS["smollm2"]["merges"]),
        "mixtral": build("mixtral", scores=TOKENS["mixtral"]["scores"], **spm),
        "gemma_like": build("gemma_like", scores=TOKENS["gemma_like"]["scores"], add_space_prefix=False, **spm),
    }


def one_line(raised):
    assert "\n" not in str(raised.value) and len(str(raised.value)) > 20


# --- GGUF vocabularies ---------------------------------------------------------------------------------------------


def test_smollm2_equals_transformers(golden_tokenizers):
    found, tokenizer = TOKENS["smollm2"], golden_tokenizers["smollm2"]
    for source, ids, decoded in zip(found["texts"], found["ids"], found["decoded"], strict=True):
        ours = tokenizer.encode(source)
        assert [found["real_ids"][i] for i in ours] == ids, source
        assert tokenizer.decode(ours) == decoded
        assert tokenizer.decode(ours, skip_special=False) == source


@pytest.mark.model
def test_real_smollm2_file():
    if not SMOLLM2.exists():
        pytest.skip(f"no {SMOLLM2}: set SPECJAX_SMOLLM2_GGUF to the demo model's file")
    tokenizer = text.from_gguf(gguf.GGUFReader(SMOLLM2))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (49152, 1, (2,))
    for source, ids in zip(TOKENS["smollm2"]["texts"], TOKENS["smollm2"]["ids"], strict=True):
        assert tokenizer.encode(source) == ids
    prompt = tokenizer.decode(tokenizer.chat([{"role": "user", "content": "Hi"}]), skip_special=False)
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("name", ["mixtral", "gemma_like"])
def test_scores_vocabulary_equals_sentencepiece(golden_tokenizers, name):
    found, tokenizer = TOKENS[name], golden_tokenizers[name]
    for source, pieces in zip(found["texts"], found["pieces"], strict=True):
        ours = tokenizer.encode(source)
        assert [found["tokens"][i] for i in ours] == pieces, source
        assert tokenizer.decode(ours) == source == tokenizer.backend.decode(ours)


def test_mixtral_golden_uses_byte_fallback():
    pieces = {piece for pieces in TOKENS["mixtral"]["pieces"] for piece in pieces}
    assert len([piece for piece in pieces if piece.startswith("<0x")]) > 20


SPLITS = {
    "gpt-2": "I|'|LL|Ġpay|Ġ12345|Ġ|Ġx|(){};|ĊĊ|Ġy",
    "default": "I|'|LL|Ġpay|Ġ12345|Ġ|Ġx|(){};|ĊĊ|Ġy",
    "smollm": "I|'|LL|Ġpay|Ġ|1|2|3|4|5|Ġ|Ġx|(){};|ĊĊ|Ġy",
    "qwen2": "I|'LL|Ġpay|Ġ|1|2|3|4|5|Ġ|Ġx|(){};ĊĊ|Ġy",
    "deepseek-r1-qwen": "I|'LL|Ġpay|Ġ|1|2|3|4|5|Ġ|Ġx|(){};ĊĊ|Ġy",
    "llama-bpe": "I|'LL|Ġpay|Ġ|123|45|Ġ|Ġx|(){};ĊĊ|Ġy",
    "tekken": "I|'LL|Ġpay|Ġ|1|2|3|4|5|Ġ|Ġx|(){};ĊĊ|Ġy",
}


@pytest.mark.parametrize("pre", SPLITS)
def test_published_split(tmp_path, pre):
    tokenizer = text.from_gguf(open_gguf(tmp_path, byte_level(pre=pre)))
    words = tokenizer.backend.pre_tokenizer.pre_tokenize_str("I'LL pay 12345  x(){};\n\n y")
    assert "|".join(word for word, _ in words) == SPLITS[pre]
    camel = [word for word, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str("camelCase")]
    assert camel == (["camel", "Case"] if pre == "tekken" else ["camelCase"])


def test_whole_words_and_composition(tmp_path):
    def encode(pre, source):
        return text.from_gguf(open_gguf(tmp_path, byte_level(pre=pre))).encode(source)

    he, hel, hello = 256, 257, 258
    assert encode("llama-bpe", "hello") == [hello]  # ignore_merges of the published Llama 3 tokenizer
    assert encode("gpt-2", "hello") == [hel, *encode("gpt-2", "lo")]
    assert encode("qwen2", "he\u0301") == encode("qwen2", "h\u00e9") != encode("gpt-2", "he\u0301")  # NFC
    assert encode("gpt-2", "he\u0301")[0] == he


def test_pieces_merge_by_score_not_by_order(tmp_path):
    tokenizer = text.from_gguf(open_gguf(tmp_path, sentencepiece()))
    pieces = [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("abc", add_special=False)]
    assert pieces == ["▁a", "bc"]  # bc (-1) goes before ab (-2), then only ▁a is left
    unused = sentencepiece(token_type=[UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * 5 + [UNUSED, NORMAL, NORMAL])
    tokenizer = text.from_gguf(open_gguf(tmp_path, unused))
    pieces = [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("abc", add_special=False)]
    assert pieces == ["▁", "abc"]  # bc is not for use


def test_special_tokens_in_text(tmp_path):
    found = sentencepiece()
    found["tokens"] = [*found["tokens"], "<b>", "▁▁"]
    found |= {"token_type": [*found["token_type"], USER, USER], "scores": [*found["scores"], 0.0, 0.0]}
    tokenizer = text.from_gguf(open_gguf(tmp_path, found))
    ids = tokenizer.encode("a</s>a<b>  < /s>", add_special=False)
    pieces = [tokenizer.backend.id_to_token(i) for i in ids]
    assert pieces[:5] == ["▁a", "</s>", "▁a", "<b>", "  "] and "</s>" not in pieces[5:]
    assert tokenizer.decode(ids) == "a a<b>   < /s>"  # controls are hidden, user-defined tokens are text
    assert tokenizer.decode(ids, skip_special=False).startswith("a</s> a<b>")


@pytest.mark.parametrize(
    "values, before, after",
    [
        (sentencepiece(), [1], []),
        (sentencepiece(add_bos_token=False), [], []),
        (sentencepiece(add_eos_token=True), [1], [2]),
        (byte_level(), [], []),
        (byte_level(add_bos_token=True), [], []),  # there is no BOS to add
        (byte_level(pre="llama-bpe", bos_token_id=259), [259], []),
        (byte_level(pre="llama-bpe", bos_token_id=259, add_bos_token=False), [], []),
        (byte_level(add_bos_token=True, bos_token_id=259, add_eos_token=True), [259], [259]),
    ],
)
def test_added_ids(tmp_path, values, before, after):
    tokenizer = text.from_gguf(open_gguf(tmp_path, values))
    plain = tokenizer.encode("ab", add_special=False)
    assert len(plain) >= 2
    assert tokenizer.encode("ab") == before + plain + after


def test_gguf_end_ids(tmp_path):
    assert text.from_gguf(open_gguf(tmp_path, byte_level(eot_token_id=7, eom_token_id=8))).eos_ids == (259, 7, 8)
    assert text.from_gguf(open_gguf(tmp_path, byte_level(eot_token_id=259))).eos_ids == (259,)
    without = {key: value for key, value in byte_level().items() if key != "eos_token_id"}
    assert text.from_gguf(open_gguf(tmp_path, without)).eos_ids == ()
    assert text.from_gguf(open_gguf(tmp_path, sentencepiece())).eos_ids == (2,)
    templated = text.from_gguf(open_gguf(tmp_path, byte_level() | {"tokenizer.chat_template": "{{ 1 }}"}))
    assert templated.chat_template == "{{ 1 }}"


@pytest.mark.parametrize(
    "values, message",
    [
        (byte_level(model="rwkv"), "'rwkv'"),
        ({"tokens": ["a"]}, "None"),
        (byte_level(pre="viking"), "'viking'"),
        (byte_level(merges=["h x", "q zz"]), "zz|hx"),
        ({key: value for key, value in byte_level().items() if key != "merges"}, "merges"),
        (byte_level(tokens=[*ALPHABET, "he", "he", "hello", "<end>"]), "'he' more than once"),
        (byte_level(token_type=[NORMAL]), "260 tokens and 1 token types"),
        (byte_level(eos_token_id=260), "eos_token_id 260"),
        (sentencepiece(scores=[0.0]), "267 tokens and 1 scores"),
    ],
)
def test_gguf_errors(tmp_path, values, message):
    with pytest.raises(ValueError, match=message) as raised:
        text.from_gguf(open_gguf(tmp_path, values))
    one_line(raised)


# --- Hugging Face directories --------------------------------------------------------------------------------------


def write_directory(path, adds_bos=False, **files):
    """A word-level tokenizer.json (<s>=0, </s>=1, <end>=2, a=3, ...) and JSON files named by keyword."""
    words = ["<s>", "</s>", "<end>", "a", "b", "c", "d", "e"]
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="e"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(words[:3])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(2)
    backend.enable_padding(length=4)
    backend.save(str(path / "tokenizer.json"))
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


@pytest.mark.parametrize(
    "files, eos_ids",
    [
        ({"generation_config": {"eos_token_id": [5, 2]}, "config": {"eos_token_id": 1}}, (5, 2)),
        ({"generation_config": {"eos_token_id": 5}, "config": {}}, (5,)),
        ({"generation_config": {}, "config": {"eos_token_id": [1, 2, 1]}}, (1, 2)),
        ({"generation_config": {"eos_token_id": None}, "config": {"text_config": {"eos_token_id": 2}}}, (2,)),
        ({"config": {"eos_token_id": 0}, "tokenizer_config": {"eos_token": "</s>"}}, (0,)),
        ({"tokenizer_config": {"eos_token": "</s>"}}, (1,)),
        ({"special_tokens_map": {"eos_token": {"content": "<end>"}}}, (2,)),
        ({"tokenizer_config": {"eos_token": "<not there>"}}, ()),
        ({}, ()),
    ],
)
def test_directory_end_ids(tmp_path, files, eos_ids):
    assert text.from_directory(write_directory(tmp_path, **files)).eos_ids == eos_ids


def test_template_writes_the_end_token_of_the_tokenizer(tmp_path):
    """Llama 3 stops at several ids, of which the first is not what its chat template ends a turn with."""
    config = {"eos_token": "<end>", "chat_template": "a {{ eos_token }}"}
    write_directory(tmp_path, generation_config={"eos_token_id": [1, 2]}, tokenizer_config=config)
    assert text.from_directory(tmp_path).chat([]) == [3, 2]
    write_directory(tmp_path, tokenizer_config={"chat_template": "a {{ eos_token }}"})
    assert text.from_directory(tmp_path).chat([]) == [3, 1]


@pytest.mark.parametrize(
    "files, bos_id",
    [
        ({"tokenizer_config": {"bos_token": "<s>"}}, 0),
        ({"tokenizer_config": {"bos_token": {"content": "<s>", "lstrip": False}}}, 0),
        ({"special_tokens_map": {"bos_token": "<s>"}}, 0),
        ({"special_tokens_map": {"bos_token": "<s>"}, "tokenizer_config": {"bos_token": None}}, None),
        ({"config": {"bos_token_id": 3}}, None),
    ],
)
def test_directory_bos(tmp_path, files, bos_id):
    tokenizer = text.from_directory(write_directory(tmp_path, **files))
    assert (tokenizer.bos_id, tokenizer.vocab_size) == (bos_id, 8)
    assert tokenizer.encode("a b c") == [3, 4, 5]  # the truncation and padding of the file are off


def test_directory_template_precedence(tmp_path):
    write_directory(tmp_path, tokenizer_config={"chat_template": "config"})
    assert text.from_directory(tmp_path).chat_template == "config"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    write_directory(tmp_path, tokenizer_config={"chat_template": named})
    assert text.from_directory(tmp_path).chat_template == "plain"
    write_directory(tmp_path, chat_template={"chat_template": "json"})
    assert text.from_directory(tmp_path).chat_template == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert text.from_directory(tmp_path).chat_template == "jinja"


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "tokenizer_config.json", "chat_template.jinja"])
def test_git_lfs_pointer(tmp_path, name):
    write_directory(tmp_path)
    (tmp_path / name).write_text(LFS)
    with pytest.raises(ValueError, match="git-lfs pointer.*git lfs pull") as raised:
        text.from_directory(tmp_path)
    one_line(raised)
    assert name in str(raised.value)


@pytest.mark.parametrize(
    "name, content",
    [
        ("tokenizer.json", b'{"model": '),
        ("tokenizer.json", b'{"version": "1.0"}'),
        ("config.json", b'{"eos_token_id": 1,'),
        ("config.json", b"[1]"),
        ("config.json", b'{"eos_token_id": "</s>"}'),
        ("generation_config.json", b"\xff\xfe"),
    ],
)
def test_broken_file(tmp_path, name, content):
    write_directory(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=name) as raised:
        text.from_directory(tmp_path)
    one_line(raised)


def test_missing_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json: save one") as raised:
        text.from_directory(tmp_path)
    one_line(raised)


def test_published_tiny_directory():
    path = SHARED / "data/tokenizers/modelopt_tiny"
    if not path.exists():
        pytest.skip(f"no {path}")
    tokenizer = text.from_directory(path)
    chat = tokenizer.chat_tokens([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}])
    # transformers 5.24: apply_chat_template(return_assistant_tokens_mask=True)
    assert chat.ids == [100, 48, 25, 102, 39, 68, 75, 75, 78, 103, 32, 25, 102, 39, 72, 0, 103, 101]
    assert chat.mask == [False] * 13 + [True] * 3 + [False] * 2
    assert tokenizer.encode("Hello") == [100, 39, 68, 75, 75, 78] and (tokenizer.bos_id, tokenizer.eos_ids) == (
        100,
        (101,),
    )


def test_configured_special_tokens_are_matched_whole(tmp_path):
    special = {"bos_token": "c", "pad_token": {"content": "d"}, "additional_special_tokens": ["e", "none such"]}
    tokenizer = text.from_directory(write_directory(tmp_path, tokenizer_config=special))
    assert tokenizer.encode("acbd") == [3, 5, 4, 6]  # no spaces around
    assert tokenizer.decode([3, 5, 6, 7, 4]) == "a b" and tokenizer.vocab_size == 8


# --- chat templates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHATS["templates"])
def test_templates_equal_transformers(name):
    cases = [case[1:] for case in CHATS["cases"] if case[0] == name]
    assert len(cases) == 4
    for messages, prompt, expected, spans in cases:
        chat = render_chat(CHATS["templates"][name], messages, add_generation_prompt=prompt, bos_token="<s>", eos_token="</s>")
        assert (chat.text, [list(span) for span in chat.spans]) == (expected, spans)


def test_generation_spans_are_exact():
    template = (
        "{% macro turn(m) %}{% generation %}{{ m.content }}{% endgeneration %}|{% endmacro %}"
        "{% for m in messages %}{% if m.role == 'skip' %}{% continue %}{% endif %}"
        "{% if m.role == 'user' %}{{ m.content }}{% else %}{% set kept %}{{ turn(m) }}{% endset %}{{ kept }}{% endif %}"
        "{% endfor %}"
    )
    roles = ["user", "assistant", "skip", "user", "assistant"]
    contents = ["héy ", "👋 you", "no", "<generation>", ""]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    chat = render_chat(template, messages)
    assert chat.text == "héy 👋 you|<generation>|"
    assert [chat.text[start:end] for start, end in chat.spans] == ["👋 you", ""] and chat.spans[0] == (4, 9)


def test_template_names():
    def render(template, content="x", **variables):
        return render_chat(template, [{"role": "user", "content": content, "name": None}], variables=variables).text

    assert render("{{ messages[0] | tojson }}", "<é&'>") == '{"role": "user", "content": "<é&\'>"}'  # None is left out
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": [\n  2\n ],\n "b": 1\n}'
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% set ns = namespace(n=1) %}{% set ns.n = 5 %}{{ ns.n }}") == "5"
    assert render("{{ tools }} {{ bos_token is defined }} {{ deep.x }}", deep={"x": 3}) == "None False 3"
    assert render("  {% if true %}\n  a\n  {% endif %}\nb") == "  a\nb"  # trim_blocks, lstrip_blocks


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.getcwd() }}", "unsafe"),
        ("{{ raise_exception.__globals__.x }}", "unsafe"),
        ("{{ (messages | attr('__class__')).x }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{{ messages[0].update(role='system') }}", "unsafe|not safely"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "range"),
        ("{% set ns = namespace(_x=1) %}", "underscore"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "underscore"),
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{% if %}", "Expected|Unexpected"),
        ("{{ messages[0].content.nothing.at_all }}", "no attribute"),
        ("{{ 1 // 0 }}", "division"),
    ],
)
def test_hostile_or_broken_template(template, reason):
    with pytest.raises(ValueError, match=reason) as raised:
        render_chat(template, [{"role": "user", "content": "x"}])
    one_line(raised)


def test_messages_must_be_plain_data():
    with pytest.raises(ValueError, match="JSON") as raised:
        render_chat("x", [{"role": "user", "content": Path("x")}])
    one_line(raised)
    messages = [{"role": "user", "content": "x", "extra": None}]
    render_chat("x", messages)
    assert messages == [{"role": "user", "content": "x", "extra": None}]


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("prefix, writes", [("", False), ("{{ bos_token }} ", True), ("\n {{ bos_token }} ", True)])
def test_exactly_one_bos(tmp_path, adds_bos, prefix, writes):
    write_directory(tmp_path, adds_bos, tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"})
    turn = "{% for m in messages %}{% generation %}{{ m.content }} {{ eos_token }}{% endgeneration %} {% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(prefix + turn + "{% if add_generation_prompt %}c{% endif %}")
    tokenizer = text.from_directory(tmp_path)
    messages = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "d"}]
    bos = [0] if adds_bos or writes else []
    assert tokenizer.chat(messages) == [*bos, 3, 4, 1, 6, 1, 5]
    trained = tokenizer.chat_tokens(messages)
    assert trained.ids == [*bos, 3, 4, 1, 6, 1]
    assert trained.mask == [False for _ in bos] + [True] * 5


def test_prompt_and_answer_equal_whole_chat(golden_tokenizers):
    """T01, T03: what is trained on and what is generated are the same ids."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = golden_tokenizers["smollm2"]._replace(chat_template=template)
    question, answer = {"role": "user", "content": "two  2\n"}, {"role": "assistant", "content": " 中文 é 33"}
    prompt = tokenizer.chat([question])
    whole = tokenizer.chat_tokens([question, answer])
    generated = tokenizer.encode(" 中文 é 33<|im_end|>")
    assert whole.ids[: len(prompt) + len(generated)] == prompt + generated
    assert whole.mask == [False] * len(prompt) + [True] * len(generated) + [False]
    assert tokenizer.decode(whole.ids, skip_special=False) == whole.text


def test_missing_template(golden_tokenizers):
    with pytest.raises(ValueError, match="no chat template: .*encode") as raised:
        golden_tokenizers["mixtral"].chat([{"role": "user", "content": "x"}])
    one_line(raised)


# --- streams -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOKENS)
def test_stream_equals_decode(golden_tokenizers, name):
    tokenizer, draw = golden_tokenizers[name], random.Random(0)
    texts = TOKENS[name]["texts"]
    for source in texts:
        stream, ids, shown = text.StreamDecoder(tokenizer.surfaces), tokenizer.encode(source), ""
        while ids:
            size = draw.randint(1, 3)
            piece, ids = stream.push(ids[:size]), ids[size:]
            assert piece.encode("utf-8") and "\ufffd" not in piece or "\ufffd" in source or piece == ""
            shown += piece
        assert shown == tokenizer.decode(tokenizer.encode(source)) and stream.flush() == ""
    for _ in range(300):  # any ids: broken characters, specials, ids outside the vocabulary
        ids = [draw.randrange(tokenizer.vocab_size + 2) for _ in range(draw.randint(0, 12))]
        for skip in (False, True):
            stream = text.StreamDecoder(tokenizer.surfaces, skip_special=skip)
            assert "".join([stream.push([i]) for i in ids]) + stream.flush() == tokenizer.decode(ids, skip_special=skip)


@pytest.mark.parametrize("name", TOKENS)
def test_decode_equals_tokenizers_on_random_tokens(golden_tokenizers, name):
    tokenizer, draw = golden_tokenizers[name], random.Random(1)
    compared = 0
    for _ in range(300):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randint(1, 8))]
        expected = tokenizer.backend.decode(ids, skip_special_tokens=True)
        if name != "smollm2" and "\ufffd" in expected:
            continue  # broken runs of byte tokens: see the module docstring
        compared += 1
        assert tokenizer.decode(ids) == expected
    assert compared > 30


def test_other_decoders(tmp_path):
    tokenizer = text.from_directory(write_directory(tmp_path))  # no decoder: words joined by spaces
    assert tokenizer.decode([0, 3, 4, 99, 1, 5]) == "a b c" == tokenizer.backend.decode([0, 3, 4, 1, 5])


def test_a_character_appears_when_complete(golden_tokenizers):
    tokenizer = golden_tokenizers["mixtral"]
    byte = tokenizer.backend.token_to_id
    stream = text.StreamDecoder(tokenizer.surfaces)
    assert stream.push([byte("<0x0A>")]) == "\n"  # at once, although more byte tokens might follow
    assert [stream.push([byte(f"<0x{b:02X}>")]) for b in "é".encode()] == ["", "é"]
    assert stream.push([byte("<0xF0>"), byte("<0x9F>")]) == "" and stream.flush() == "\ufffd"


def test_stream_reads_each_token_once(golden_tokenizers):
    tokenizer, calls = golden_tokenizers["smollm2"], Counter()

    def counted(look):
        return lambda token_id: calls.update([token_id]) or look(token_id)

    surfaces = text.Surfaces(*map(counted, tokenizer.surfaces[:2]), tokenizer.surfaces.special)
    ids = tokenizer.encode("中文 👩‍👩‍👧‍👦 words " * 40)
    stream = text.TextStream(surfaces, stop=["nothing like it"])
    for i in ids:
        stream.push([i])
    assert calls.total() == len(ids) > 400


# --- stop strings --------------------------------------------------------------------------------------------------


def word_stream(words, stop):
    """A stream over a vocabulary of the given words, as they are."""
    surfaces = text.Surfaces(lambda i: words[i].encode(), lambda i: words[i].encode(), frozenset())
    return text.TextStream(surfaces, stop=stop)


def test_stop_string_across_tokens_and_blocks():
    stream = word_stream(["one ", "tw", "o\n", "\nthree", "four"], ["\n\n"])
    assert stream.push([0, 1]) == ("one tw", None, 2)
    assert stream.push([2]) == ("o", None, 3)  # "\n" could be the beginning of the stop string
    assert stream.push([3, 4]) == ("", "\n\n", 4)  # "four" is not kept
    assert stream.push([4]) == ("", "\n\n", 4) == stream.flush()


def test_held_text_comes_out_at_the_end():
    stream = word_stream(["a", "<en", "x", "<e"], ["<end>"])
    assert stream.push([0, 1]) == ("a", None, 2)
    assert stream.push([2]) == ("<enx", None, 3)
    assert stream.push([3]) == ("", None, 4) and stream.flush() == ("<e", None, 4)


@pytest.mark.parametrize("seed", range(4))
def test_stop_strings_equal_naive_search(seed):
    draw = random.Random(seed)
    stops_seen = 0
    for _ in range(300):
        words = ["".join(draw.choice("ab") for _ in range(draw.randint(1, 3))) for _ in range(4)]
        stop = ["".join(draw.choice("ab") for _ in range(draw.randint(1, 5))) for _ in range(draw.randint(1, 3))]
        ids = [draw.randrange(4) for _ in range(8)]
        prefixes = ["".join(words[i] for i in ids[:n]) for n in range(9)]
        kept = next((n for n in range(9) if any(s in prefixes[n] for s in stop)), 8)
        starts = [prefixes[kept].find(s) for s in stop if s in prefixes[kept]]
        expected = prefixes[kept][: min(starts)] if starts else prefixes[8]
        stream, shown = word_stream(words, stop), ""
        while ids:
            size = draw.randint(1, 4)
            step, ids = stream.push(ids[:size]), ids[size:]
            shown += step.text
            assert expected.startswith(shown)  # nothing is ever shown that is taken back
        last = stream.flush()
        assert (shown + last.text, last.stop is not None, last.num_tokens) == (expected, bool(starts), kept)
        stops_seen += bool(starts)
    assert 100 < stops_seen < 300


@pytest.mark.parametrize("stop", ["end", [""], ["a", ""]])
def test_bad_stop_strings(stop):
    with pytest.raises(ValueError, match="list of non-empty strings") as raised:
        text.StopStrings(stop)
    one_line(raised)
