"""Text in, text out: the public surface, its errors, and stop strings across rounds.

Targets are tables over characters: a is followed by b, b by c, and so on, unless told otherwise.
"""

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import api
from specjax.drafters import METHODS
from specjax.drafters.precision import lowered
from specjax.models.load import LM
from specjax.sampling import SamplingParams
from specjax.types import Params

KEY = jax.random.key(0)
LETTERS = {i: (i + 1) % 26 for i in range(26)}  # z is followed by a
SURE = h.successor_table(LETTERS, 32)
SOFT = jax.nn.log_softmax((jax.random.normal(jax.random.key(3), (33, 32)) * 2).at[:, 31].set(-30), -1)  # hardly ever ends
ALPHABETICAL = h.text_lm(SURE)
CHATTY = h.text_lm(SOFT)


def cached_drafter(method, lm, **settings):
    name = (method, id(lm), *((k, id(v) if isinstance(v, LM) else v) for k, v in settings.items()))
    return LOADED.setdefault(name, None) or LOADED.update({name: specjax.load_drafter(method, lm, **settings)}) or LOADED[name]


LOADED = {}


def small(lm, model=None, num_draft=3):
    return cached_drafter("small", lm, model=model or lm, num_draft=num_draft)


def text_of(completions):
    return [c.text for c in completions]


def test_the_face():
    out = specjax.generate(ALPHABETICAL, small(ALPHABETICAL), ["abc", [0], np.asarray([7, 8])], key=KEY, max_new_tokens=5)
    assert text_of(out) == ["defgh", "bcdef", "jklmn"] and [c.finish_reason for c in out] == ["length"] * 3
    assert [c.prompt_tokens for c in out] == [[0, 1, 2], [0], [7, 8]] and out[0].tokens == [3, 4, 5, 6, 7]
    stats = out[0].stats
    assert (stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_draft_tokens, stats.num_emitted_tokens) == (
        2,
        6,
        4,
        5,
    )
    assert set(specjax.RULES) == set(api.RULES) and set(specjax.METHODS) == set(METHODS)


def test_no_drafter_is_plain_decoding():
    out = specjax.generate(ALPHABETICAL, None, ["abc"], key=KEY, max_new_tokens=4)[0]
    assert out.text == "defg" and out.stats.num_draft_tokens == 0 and out.stats.mean_acceptance_length == 1


def test_the_end_token_is_a_token_and_no_text():
    lm = h.text_lm(h.successor_table({**LETTERS, 5: 31}, 32))  # f ends
    for drafter in (None, small(lm)):
        out = specjax.generate(lm, drafter, ["abc", "x"], key=KEY, max_new_tokens=6)
        assert out[0].text == "def" and out[0].tokens == [3, 4, 5, 31] and out[0].finish_reason == "eos"
        assert out[1].text == "yzabcd" and out[1].finish_reason == "length"


def test_E07_the_tokenizer_names_the_ends():
    for ends, expected in (((5, 9), "bcde"), ((9,), "bcdefghi"), ((), "bcdefghijk")):
        lm = h.text_lm(SURE, eos_ids=ends)
        out = specjax.generate(lm, small(lm), ["a"], key=KEY, max_new_tokens=10)[0]
        assert out.text.rstrip("fj" if ends else "") == expected and out.finish_reason == ("eos" if ends else "length")


def test_M01_what_the_end_cut_off_is_not_counted():
    lm = h.text_lm(h.successor_table({**LETTERS, 3: 31}, 32))
    out = specjax.generate(lm, small(lm, num_draft=5), ["b"], key=KEY, max_new_tokens=50)[0]
    assert out.tokens == [2, 3, 31]
    assert out.stats.tokens_per_step == 3 and out.stats.num_emitted_tokens == 3 and out.stats.num_spec_steps == 1


# Stop strings.


@pytest.mark.parametrize("num_draft", [1, 2, 3, 4])
def test_E05_a_stop_string_across_rounds(num_draft):
    """The stop "klm" begins at every offset of a round of 2 to 5 tokens; text ends before it, tokens with it."""
    drafter = small(ALPHABETICAL, num_draft=num_draft)
    prompts = [ALPHABETICAL.tokenizer.decode([i]) for i in range(10)]
    out = specjax.generate(ALPHABETICAL, drafter, prompts, key=KEY, max_new_tokens=30, stop=["klm", "zzz"])
    for i, c in enumerate(out):
        assert c.text == h.ALPHABET[i + 1 : 10] and c.finish_reason == "stop"
        assert c.tokens == list(range(i + 1, 13)) and c.stats.num_emitted_tokens == len(c.tokens)
        assert c.stats.num_spec_steps == -(-len(c.tokens) // (num_draft + 1))


def test_E05_an_overlapping_beginning():
    """k k l m: the first k is not the stop's; nor is a stop string of the prompt."""
    following = {i: i for i in range(32)} | {10: 10}
    rows = np.full((33, 32), -30.0, np.float32)
    for t in range(33):
        rows[t, following.get(t, 0)] = 0
    rows[10, [10, 11]] = 0  # k is followed by k or l
    rows[11, [11, 12]] = [-30, 0]
    lm = h.text_lm(jax.nn.log_softmax(jnp.asarray(rows), -1))
    out = specjax.generate(
        lm,
        small(lm),
        ["klmk"] * 8,
        key=KEY,
        max_new_tokens=40,
        stop=["klm"],
        sampling=SamplingParams(temperature=1.0),
        rule="coupled",
    )
    runs = [c.tokens.index(11) for c in out]
    assert {0, 1} < set(runs), "l at once, after one k, after several"
    for c, run in zip(out, runs, strict=True):
        if run == 0:  # the k of the prompt does not count: no stop, m for ever
            assert c.tokens == [11] + [12] * 39 and c.text == "l" + "m" * 39 and c.finish_reason == "length"
        else:
            assert c.tokens == [10] * run + [11, 12] and c.text == "k" * (run - 1) and c.finish_reason == "stop"


def test_an_end_before_the_stop_and_a_stop_before_the_end():
    lm = h.text_lm(h.successor_table({**LETTERS, 9: 31}, 32))
    out = specjax.generate(lm, small(lm), ["a"], key=KEY, max_new_tokens=30, stop=["ghij!", "xyz"])[0]
    assert out.text == "bcdefghij" and out.finish_reason == "eos", "what was held back is shown"
    out = specjax.generate(lm, small(lm), ["a"], key=KEY, max_new_tokens=30, stop=["hij"])[0]
    assert out.text == "bcdefg" and out.finish_reason == "stop" and out.tokens == list(range(1, 10))


def test_a_row_that_stops_disturbs_no_other():
    out = specjax.generate(ALPHABETICAL, small(ALPHABETICAL), ["a", "m"], key=KEY, max_new_tokens=45, stop=["cd"])
    assert out[0].text == "b" and out[1].text == h.ALPHABET[13:26] + "ab"


def test_a_stream_equals_generate():
    sampling = SamplingParams(temperature=0.8)
    whole = specjax.generate(CHATTY, small(CHATTY), ["hello"], key=KEY, max_new_tokens=40, sampling=sampling, stop=["zq"])[0]
    for stride in (1, 3):
        pieces = list(
            specjax.stream(
                CHATTY, small(CHATTY), "hello", key=KEY, max_new_tokens=40, sampling=sampling, stop=["zq"], stride=stride
            )
        )
        assert "".join(p.text for p in pieces) == whole.text and pieces[-1].completion == whole
        assert [p.completion for p in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert len(pieces) > 3


# Requests.


def test_S15_a_prompt_depends_on_its_own_key_parameters_and_text():
    sampling = [
        SamplingParams(temperature=1.0),
        SamplingParams(),
        SamplingParams(temperature=0.5, top_k=5),
        SamplingParams(temperature=1.0),
    ]
    prompts = ["same", "same", "same", "same"]
    both = specjax.generate(CHATTY, small(CHATTY), prompts, key=KEY, max_new_tokens=12, sampling=sampling)
    assert len({c.text for c in both}) == 4
    keys = lambda *ids: jnp.stack([jax.random.fold_in(KEY, i) for i in ids])
    again = specjax.generate(CHATTY, small(CHATTY), prompts, key=keys(0, 1, 2, 3), max_new_tokens=12, sampling=sampling)
    assert again == both, "one key is folded by index"
    back = specjax.generate(CHATTY, small(CHATTY), prompts, key=keys(3, 2, 1, 0), max_new_tokens=12, sampling=sampling[::-1])
    assert back[::-1] == both
    alone = specjax.generate(CHATTY, small(CHATTY), prompts[3:], key=keys(3), max_new_tokens=12, sampling=sampling[3])
    assert alone[0] == both[3]


def test_keys_can_be_used_again():
    """The state's buffers are given away to the compiled loop; the caller's keys are not among them."""
    with jax.debug_key_reuse(False):
        keys = jax.random.split(jax.random.key(5), 2)
        once = [
            specjax.generate(CHATTY, None, ["a", "b"], key=keys, max_new_tokens=5, sampling=SamplingParams(1.0))
            for _ in range(2)
        ]
    assert once[0] == once[1]


def test_a_model_by_name_is_kept_in_the_targets_numbers(monkeypatch):
    asked = []
    monkeypatch.setattr(api, "load", lambda name, **how: asked.append((name, how)) or CHATTY)
    half = CHATTY._replace(params=lowered(CHATTY.params, jnp.bfloat16))
    for lm in (CHATTY, half):
        specjax.load_drafter("small", lm, model="a name")
        specjax.load_drafter("small", lm, model=CHATTY)
    assert asked == [("a name", {"weights_dtype": dtype}) for dtype in ("float32", "bfloat16")]


def test_coupled_text_is_plain_text_for_every_drafter():
    """The same seed gives the same text, whoever drafts (early_exit needs layers, which a table has not)."""
    arguments = dict(
        key=KEY, max_new_tokens=25, rule="coupled", sampling=SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=0.3)
    )
    prompts = ["abab", "hello hello", "x"]
    plain = specjax.generate(CHATTY, None, prompts, **arguments)
    for drafter in (small(CHATTY), small(CHATTY, ALPHABETICAL), cached_drafter("ngram", CHATTY, num_draft=4, min_order=1)):
        out = specjax.generate(CHATTY, drafter, prompts, **arguments)
        assert text_of(out) == text_of(plain) and [c.tokens for c in out] == [c.tokens for c in plain]
        assert sum(c.stats.num_draft_tokens for c in out) > 0


def test_E09_the_context_is_the_limit():
    lm = h.text_lm(SURE, max_length=64)
    prompts = [[i % 26 for i in range(n)] for n in (58, 63, 64)]
    out = specjax.generate(lm, small(lm, num_draft=5), prompts, key=KEY, max_new_tokens=100)
    assert [len(c.tokens) for c in out] == [6, 1, 0] and [c.finish_reason for c in out] == ["length"] * 3
    assert out[0].tokens == [(58 + i) % 26 for i in range(6)]
    with pytest.raises(ValueError, match="prompt 0 has 65 tokens, the context holds 64"):
        specjax.generate(lm, None, [[0] * 65], key=KEY)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 4, 5])
def test_E03_prompt_lookup_keeps_to_its_budget(max_new_tokens):
    lookup = cached_drafter("ngram", ALPHABETICAL, num_draft=3)
    cycle = ALPHABETICAL._replace(params=h.successor_table({**LETTERS, 2: 0}, 32))
    out = specjax.generate(cycle, lookup, ["abcabcab"], key=KEY, max_new_tokens=max_new_tokens)[0]
    assert out.text == "cabca"[:max_new_tokens] and len(out.tokens) == max_new_tokens


def test_S13_a_broken_target_says_so():
    lm = h.text_lm(SURE.at[4].set(jnp.nan))
    out = specjax.generate(lm, small(lm), ["a", "f"], key=KEY, max_new_tokens=8)
    assert out[0].text == "bcde" and out[0].finish_reason == "error" and out[1].text == "ghijklmn"
    with pytest.raises(FloatingPointError, match=r"prompts \[0\]"):
        api.require_sound(out)
    api.require_sound(out[1:])


# Vocabularies that differ (L11, U03, T03).


def padded_lm(params, vocab_size):
    return h.text_lm(params, vocab_size=vocab_size)


def test_L11_U03_a_drafter_with_fewer_padding_rows():
    """Target 40 rows, drafter 36, both with a tokenizer of 32; the target puts mass on its padding.

    The drafter never proposes ids from 32 on, although its own table loves them; the law is the target's.
    """
    rng = np.random.default_rng(0)
    target = padded_lm(jax.nn.log_softmax(jnp.asarray(rng.normal(size=(41, 40)), jnp.float32), -1), 40)
    mine = padded_lm(jax.nn.log_softmax(jnp.asarray(rng.normal(size=(37, 36)), jnp.float32).at[:, 33].add(5.0), -1), 36)
    drafter = cached_drafter("small", target, model=mine, num_draft=2)
    assert drafter.drafter.vocab_size == 40
    p = np.exp(np.asarray(target.params, np.float64)[0])
    result = h.generate(
        drafter.drafter, "rejection", [[0]] * 20_000, target=target.model, params=Params(target.params, drafter.params),
        temperature=1.0, new=1, longest=2,
    )  # fmt: skip
    counts = np.bincount([t for row in result.tokens for t in row], minlength=40)
    assert counts[32:].sum() > 1000 and result.accepted.sum() > 1000
    assert ((counts - 20_000 * p) ** 2 / (20_000 * p)).sum() < 110, "39 degrees of freedom, alpha about 1e-8"
    out = specjax.generate(target, drafter, [[0], [5]], key=KEY, max_new_tokens=10)
    assert [c.tokens for c in out] == [c.tokens for c in specjax.generate(target, None, [[0], [5]], key=KEY, max_new_tokens=10)]


def test_L11_ids_past_the_tokenizer_are_never_proposed():
    from specjax.drafters.small import fit_vocabulary

    law = np.asarray(fit_vocabulary(jnp.zeros((1, 5)), 8, 4))
    assert (law[0, :4] == 0).all() and (law[0, 4:] == -np.inf).all()
    assert fit_vocabulary(jnp.zeros((1, 9)), 8, 8).shape == (1, 8)
    assert np.asarray(fit_vocabulary(jnp.zeros((1, 5)), 8, 8))[0].tolist() == [0] * 5 + [-np.inf] * 3


def test_U03_without_tokenizers_one_clear_error_or_none():
    """Equal sizes work without tokenizers; different sizes are refused by both numbers and the way out."""
    target, mine = padded_lm(jnp.zeros((41, 40)), 40)._replace(tokenizer=None), padded_lm(jnp.zeros((37, 36)), 36)
    with pytest.raises(ValueError, match="drafter vocabulary 36 != target 40.*load both with their tokenizers"):
        specjax.load_drafter("small", target, model=mine)
    assert specjax.load_drafter("small", target, model=target).drafter.vocab_size == 40


def test_T03_another_tokenizer_is_refused():
    other = h.tokenizer()
    other.backend.add_tokens(["ab"])
    with pytest.raises(ValueError, match="tokenizer is not the target's"):
        specjax.load_drafter("small", ALPHABETICAL, model=ALPHABETICAL._replace(tokenizer=other))


def test_U07_ngram_needs_no_model():
    """Nothing but the target: no draft path, no weights, no tokenizer."""
    bare = ALPHABETICAL._replace(tokenizer=None, config=None)
    drafter = specjax.load_drafter("ngram", bare)
    assert drafter.params == () and drafter.card.extra_parameters == 0
    out = specjax.generate(bare, drafter, [[0, 1, 2, 0, 1]], key=KEY, max_new_tokens=4)[0]
    assert out.tokens == [2, 3, 4, 5] and out.text == "" and out.stats.num_draft_tokens > 0


def test_U05_T0_ignores_the_seed_and_T1_does_not():
    go = lambda t, s: specjax.generate(
        CHATTY, small(CHATTY), ["abc"], key=jax.random.key(s), max_new_tokens=20, sampling=SamplingParams(t)
    )
    assert len({go(0.0, s)[0].text for s in range(10)}) == 1
    assert len({go(1.0, s)[0].text for s in range(10)}) == 10


# Errors.

WRONG = [
    (lambda: specjax.load_drafter("n-gram", ALPHABETICAL), "no method 'n-gram': did you mean 'ngram'"),
    (lambda: specjax.load_drafter("ngram", ALPHABETICAL, num_draft=0), "num_draft=0"),
    (
        lambda: specjax.load_drafter("ngram", ALPHABETICAL, min_ordr=1),
        "no option of ngram 'min_ordr': did you mean 'min_order'",
    ),
    (lambda: specjax.load_drafter("ngram", ALPHABETICAL, min_order=4, max_order=3), "min_order=4 and max_order=3"),
    (lambda: specjax.load_drafter("small", ALPHABETICAL), "needs `model`"),
    (lambda: generate(rule="rejectoin"), "no rule 'rejectoin': did you mean 'rejection'"),
    (lambda: generate(max_new_tokens=0), "max_new_tokens=0"),
    (lambda: generate(prompts=[]), "no prompts"),
    (lambda: generate(prompts="abc"), "prompts is one string, 'abc'"),
    (lambda: generate(prompts=["a", ""]), "prompt 1 is empty"),
    (lambda: generate(prompts=[[]]), "prompt 0 is empty"),
    (lambda: generate(prompts=[[0, 32]]), "id 32"),
    (lambda: generate(prompts=[[0, -1]]), "-1"),
    (lambda: generate(sampling=[SamplingParams()] * 3), "3 sets of sampling parameters for 1 prompts"),
    (lambda: generate(sampling=SamplingParams(top_p=2.0)), "top_p=2.0"),
    (lambda: generate(stop=[""]), "non-empty strings"),
    (lambda: generate(key=0), "key is of type int: give jax.random.key(seed)"),
    (lambda: generate(stop="end"), "stop=['...']"),
    (lambda: generate(key=jax.random.split(jax.random.key(1), 3)), "3 keys for 1 prompts"),
    (lambda: generate(lm=ALPHABETICAL._replace(tokenizer=None)), "loaded without a tokenizer"),
    (lambda: generate(lm=ALPHABETICAL._replace(tokenizer=None), prompts=[[1]], stop=["x"]), "stop strings need a tokenizer"),
    (lambda: generate(prompts=[[{"role": "user", "content": "hi"}]]), "chat template"),
    (lambda: list(specjax.stream(ALPHABETICAL, None, "a", key=KEY, stride=0)), "stride=0"),
]


def generate(**changes):
    arguments = dict(lm=ALPHABETICAL, drafter=None, prompts=["abc"], key=KEY, max_new_tokens=3)
    return specjax.generate(**{**arguments, **changes})


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[m for _, m in WRONG])
def test_bad_input_is_one_clear_line(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value) and "\n" not in str(error.value)


def test_what_does_not_belong_together_is_refused():
    from specjax import decode
    from specjax.types import Rule

    tree = h.drafter("script, tree")
    with pytest.raises(ValueError, match="chains only"):
        decode.check(h.TARGET, tree, specjax.RULES["block"])
    with pytest.raises(ValueError, match="exact for children drawn as"):
        decode.check(h.TARGET, h.drafter("small"), Rule(None, accepts=("point",)))
    with pytest.raises(ValueError, match=f"drafter vocabulary {h.V} != target 32"):
        decode.check(ALPHABETICAL.model, h.drafter("small"), specjax.RULES["block"])
    with pytest.raises(ValueError, match=r"wants layers \[2\], but the target has 2"):
        decode.check(h.TARGET, h.drafter("small")._replace(features=(0, 2)), specjax.RULES["block"])


def test_every_rule_of_the_face_runs():
    pairs = [*((None, r) for r in specjax.RULES), *((small(ALPHABETICAL), r) for r in h.CHAIN_RULES)]
    for drafter, rule in pairs:
        assert specjax.generate(ALPHABETICAL, drafter, ["abc"], key=KEY, max_new_tokens=3, rule=rule)[0].text == "def"
