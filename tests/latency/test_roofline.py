"""FLOPs and bytes of Llama-3 worked by hand, and what follows from them for speculation."""

import numpy as np
import pytest

from specjax.latency import rounds, yields
from specjax.latency.cost_table import draft_seconds, pass_seconds
from specjax.latency.hardware import HARDWARE, find_hardware
from specjax.latency.roofline import (
    Load,
    Placement,
    Shape,
    kv_numbers,
    layer_weights,
    num_parameters,
    resident_bytes,
    seconds,
    shape_of,
    turning_tokens,
    work,
)
from specjax.models.transformer import TransformerConfig

LLAMA_8B = Shape(vocab_size=128_256, width=4096, layers=32, heads=32, kv_heads=8, head_dim=128, hidden=14_336)
LLAMA_70B = Shape(vocab_size=128_256, width=8192, layers=80, heads=64, kv_heads=8, head_dim=128, hidden=28_672)
H100 = HARDWARE["h100"]


def test_parameters_by_hand():
    """8B, a layer: q 4096 x 4096, k and v 4096 x 1024, o 4096 x 4096: 41,943,040; three of 4096 x 14336: 176,160,768.

    32 layers 6,979,321,856; 65 norms 266,240; embedding and head 525,336,576 each: 8,030,261,248, as published.
    70B, a layer: 150,994,944 + 704,643,072; 80 of them 68,451,041,280; norms 1,318,912; 2 x 1,050,673,152.
    """
    assert layer_weights(LLAMA_8B) == 41_943_040 + 176_160_768 == 218_103_808
    assert num_parameters(LLAMA_8B) == 32 * 218_103_808 + 266_240 + 2 * 525_336_576 == 8_030_261_248
    assert layer_weights(LLAMA_70B) == 150_994_944 + 704_643_072
    assert num_parameters(LLAMA_70B) == 68_451_041_280 + 1_318_912 + 2 * 1_050_673_152 == 70_553_706_496
    tied = LLAMA_8B._replace(tied=True)
    assert num_parameters(LLAMA_8B) - num_parameters(tied) == 525_336_576


def test_cache_by_hand():
    """8B: 2 x 8 heads x 128 x 32 layers = 65,536 numbers a token, 128 KiB; 70B: 163,840, 320 KiB."""
    assert kv_numbers(LLAMA_8B, 1) * 2 == 131_072 and kv_numbers(LLAMA_70B, 1) * 2 == 327_680
    half = LLAMA_8B._replace(window=512, sliding=(True, False) * 16)
    assert kv_numbers(half, 4096) == 65_536 * (512 + 4096) / 2 and kv_numbers(half, 100) == 65_536 * 100
    weights = 8_030_261_248 * 2
    assert resident_bytes(LLAMA_8B, Load(4, 1000)) == weights + 4 * 1000 * 131_072
    assert resident_bytes(LLAMA_8B, Load(4, 1000), Placement(parallel=16)) == weights / 16 + 4 * 1000 * 131_072 / 8


def test_a_pass_of_8b_by_hand():
    """4 requests of 1,000 tokens, 5 new ones each, bfloat16 on one chip: 20 tokens.

    products   2 x 20 x (6,979,321,856 + 525,336,576)                       = 300,186,337,280
    attention  4 x 20 x 32 layers x 1,003 keys (1,000 + the mean of 1..5) x 32 x 128 = 10,517,217,280
    weights    (6,979,321,856 + 525,336,576 + 266,240 + 20 rows x 4,096) x 2 = 15,010,013,184
    caches     (4 x 1,000 read + 20 written) x 131,072                      = 526,909,440
    logits     20 x 128,256 x 4, written and read                           = 20,520,960
    """
    w = work(LLAMA_8B, Load(4, 1000), 5)
    assert w.flops == 300_186_337_280 + 10_517_217_280
    assert (w.weight_bytes, w.kv_bytes, w.logit_bytes, w.link_bytes) == (15_010_013_184, 526_909_440, 20_520_960, 0)
    assert w.bytes == 15_557_443_584
    assert seconds(w, H100) == pytest.approx(15_557_443_584 / 3.35e12)  # 4.64 ms of memory, .31 ms of compute
    assert w.flops / H100.flops < seconds(w, H100) / 10


def test_a_pass_of_70b_on_eight_chips_by_hand():
    """1 request of 2,000 tokens, 1 new one, eight chips, 8-bit weights.

    products   2 x (68,451,041,280 + 1,050,673,152) / 8                     = 17,375,428,608
    attention  4 x 80 layers x 2,001 keys x 64 x 128 / 8                    = 655,687,680
    weights    (68,451,041,280 + 1,050,673,152 + 1,318,912 + 8,192) / 8     = 8,687,880,192
    caches     (2,000 + 1) x 327,680 / 8                                    = 81,960,960
    sent       (4 x 80 x 8,192 x 2 + 128,256 x 4) x 7/8                     = 5,036,416
    """
    w = work(LLAMA_70B, Load(1, 2000), 1, Placement(weight_bytes=1, parallel=8))
    assert w.flops == 17_375_428_608 + 655_687_680
    assert (w.weight_bytes, w.kv_bytes, w.link_bytes) == (8_687_880_192, 81_960_960, 5_036_416)
    assert w.logit_bytes == 128_256 * 8 / 8
    memory = (8_687_880_192 + 81_960_960 + 128_256) / 3.35e12
    assert seconds(w, H100, overhead=1e-4) == pytest.approx(memory + 5_036_416 / 450e9 + 1e-4)


def test_only_scored_rows_meet_the_vocabulary():
    all_rows, one = (work(LLAMA_8B, Load(2, 0), 8, scored=s) for s in (None, 1))
    assert all_rows.flops - one.flops == 2 * 2 * 7 * 525_336_576
    assert all_rows.logit_bytes == 8 * one.logit_bytes


def test_an_h100_turns_compute_bound_at_about_300_tokens():
    """989.5 TFLOP/s over 3.35 TB/s are 295 FLOPs a byte, and bfloat16 weights give 1 a token."""
    for shape in (LLAMA_8B, LLAMA_70B):
        turn = turning_tokens(shape, H100)
        assert turn == pytest.approx(300, rel=0.05)
        before, after = (work(shape, Load(t, 0), 1) for t in (turn - 1, turn))
        assert before.flops / H100.flops < before.bytes / H100.bandwidth
        assert after.flops / H100.flops >= after.bytes / H100.bandwidth
    assert turning_tokens(LLAMA_8B, H100, Placement(weight_bytes=1)) == pytest.approx(150, rel=0.05)
    assert turning_tokens(LLAMA_8B, H100, context=2000) == 0  # every request brings its own cache
    assert turning_tokens(LLAMA_8B, HARDWARE["tpu-v5e"]) == pytest.approx(240, rel=0.05)


def test_60_requests_of_5_tokens_or_300_of_1():
    """The same pass; at three times the speed each, 180 tokens come out of it in the time of 300."""
    few = rounds.whole_round(LLAMA_8B, None, H100, Load(60, 0), num_draft=4, tau=3)
    many = rounds.whole_round(LLAMA_8B, None, H100, Load(300, 0), num_draft=0, tau=1)
    assert few.seconds == pytest.approx(many.seconds, rel=1e-3)
    assert (few.tokens, many.tokens) == (180, 300)
    assert few.tokens_per_second / many.tokens_per_second == pytest.approx(0.6, rel=1e-3)
    assert (few.tokens_per_second / 60) / (many.tokens_per_second / 300) == pytest.approx(3, rel=1e-3)


def test_intensity_rises_from_one_to_k():
    intensity = [work(LLAMA_8B, Load(1, 0), k).intensity for k in range(1, 33)]
    np.testing.assert_allclose(intensity, np.arange(1, 33), rtol=0.03)
    assert np.diff(intensity).min() > 0


@pytest.mark.parametrize(("batch", "least", "most"), [(1, 2, 3.36), (16, 1.5, 3.36), (400, 0, 3.36 / 5)])
def test_speculation_spends_more_flops_per_token_and_fewer_bytes(batch, least, most):
    """Alpha .8, K 4: 3.36 tokens from 5 verified and 4 passes of one layer.

    Bound by memory it gains up to that; where 400 tokens keep the chip busy already, 5 passes' work gives 3.36 passes' tokens.
    """
    plain = rounds.whole_round(LLAMA_8B, None, H100, Load(batch, 0), num_draft=0, tau=1)
    drafting = rounds.one_layer(LLAMA_8B, 4)
    spec = rounds.whole_round(LLAMA_8B, drafting, H100, Load(batch, 0), num_draft=4, tau=yields.expected_tokens(0.8, 4))
    assert spec.flops_per_token > 5 / 3.37 * plain.flops_per_token
    assert spec.bytes_per_token < plain.bytes_per_token
    assert least < spec.tokens_per_second / plain.tokens_per_second < most


def test_a_draft_by_hand():
    """EAGLE: a layer 218,103,808, its projection of (embedding, feature) 2 x 4096^2 and the head, four times."""
    spec = rounds.whole_round(LLAMA_8B, rounds.one_layer(LLAMA_8B, 4), H100, Load(1, 0), num_draft=4, tau=3)
    products = 2 * 4 * (218_103_808 + 33_554_432 + 525_336_576)
    assert spec.draft.flops == products + 4 * 4 * 32 * 128  # one key is seen: its own
    assert spec.draft_seconds == pytest.approx(spec.draft.bytes / H100.bandwidth)
    assert spec.seconds == spec.draft_seconds + spec.verify_seconds
    medusa = rounds.whole_round(LLAMA_8B, rounds.heads(LLAMA_8B, 4), H100, Load(1, 900), num_draft=4, tau=2)
    assert medusa.draft.flops == 2 * 4 * 4096**2 + 2 * 4 * 525_336_576 and medusa.draft.kv_bytes == 0
    dflash = rounds.block(LLAMA_8B, 7)
    assert (dflash.passes, dflash.tokens, dflash.scored) == (1, 8, 7)


def test_best_draft_length_shrinks_with_the_batch():
    """EAGLE on an H100 at alpha .7: several tokens for one user, none for a full server."""
    best = []
    for batch in (1, 32, 128, 512):
        spec = [
            rounds.whole_round(
                LLAMA_8B, rounds.one_layer(LLAMA_8B, k) if k else None, H100, Load(batch, 200), num_draft=k, tau=1
            )
            for k in range(9)
        ]
        tokens = [yields.expected_tokens(0.7, k) for k in range(9)]
        best.append(yields.best_num_draft(tokens, [s.draft_seconds for s in spec], [s.verify_seconds for s in spec]).num_draft)
    assert best == sorted(best, reverse=True) and best[0] >= 3 and best[-1] == 0


def test_table_follows_the_roofline():
    drafting = rounds.one_layer(LLAMA_8B, 4)
    table = rounds.roofline_table(LLAMA_8B, drafting, H100, most_requests=256, most_draft=4, overhead=1e-3)
    for tokens in (1, 37, 290, 700, 1280):
        exact = seconds(work(LLAMA_8B, Load(tokens, 0), 1), H100, 1e-3)
        assert pass_seconds(table, np.asarray(tokens), np.asarray(0)) == pytest.approx(exact, rel=0.01)
    for batch in (1, 100, 256):
        spec = rounds.whole_round(LLAMA_8B, drafting, H100, Load(batch, 0), num_draft=4, tau=3, overhead=1e-3)
        assert draft_seconds(table, np.asarray(batch)) == pytest.approx(spec.draft_seconds, rel=0.02)
        filled = rounds.whole_round(LLAMA_8B, drafting, H100, Load(batch, 800), num_draft=4, tau=3, overhead=1e-3)
        read = pass_seconds(table, np.asarray(1), np.asarray(batch * 800)) - pass_seconds(table, np.asarray(1), np.asarray(0))
        assert spec.seconds + read >= 0.99 * filled.seconds
    assert (np.diff(table.verify) >= 0).all()


def test_shapes_come_from_configs():
    config = TransformerConfig(128_256, 4096, 32, 32, 8, 128, 14_336, 8192)
    assert shape_of(config) == LLAMA_8B
    assert shape_of(config, layers=1, extra=5) == LLAMA_8B._replace(layers=1, extra=5)


def test_hardware_is_found_by_name():
    assert find_hardware("H100") is H100
    assert {"a100", "h100", "h200", "b200", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7"} == set(HARDWARE)
    with pytest.raises(ValueError, match="h200"):
        find_hardware("h101")
    balance = {name: h.flops / h.bandwidth for name, h in HARDWARE.items()}
    assert all(100 < x < 600 for x in balance.values()), balance
