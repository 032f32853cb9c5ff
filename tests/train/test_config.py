"""Settings refuse what cannot be trained, and schedules do what they say."""

import itertools

import pytest

from sparkgap.errors import ConfigError
from sparkgap.train.config import (
    ConversationConfig,
    FeatureConfig,
    LossConfig,
    NetworkConfig,
    OptimizationConfig,
    TrainConfig,
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConversationConfig(answer_tokens=0), "answer_tokens"),
        (lambda: NetworkConfig(markov_head_type="lstm"), "markov_head_type must be one of vanilla, gated, rnn"),
        (lambda: ConversationConfig(lanes=True), "lanes"),
        (lambda: ConversationConfig(answer_temperatures=()), "answer_temperatures"),
        (lambda: ConversationConfig(user_temperatures=(float("nan"),)), "user_temperatures"),
        (lambda: ConversationConfig(top_p=0), "top_p"),
        (lambda: ConversationConfig(only_prompts=True), "needs a prompts file"),
        (lambda: FeatureConfig(top_k=0), "top_k"),
        (lambda: FeatureConfig((1, 1)), "different layer ids"),
        (lambda: FeatureConfig((9,)).layer_ids(10), "layer 9 cannot be captured"),
        (lambda: NetworkConfig(method="eagle"), "dspark, dflash"),
        (lambda: NetworkConfig(num_layers=0), "num_layers"),
        (lambda: LossConfig(0, 0), "nothing would be learned"),
        (lambda: LossConfig(gamma=0), "gamma"),
        (lambda: OptimizationConfig(steps=1.5), "steps"),
        (lambda: OptimizationConfig(decay_share=2), "decay_share"),
        (lambda: OptimizationConfig(learning_rate=0), "learning_rate"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_an_output_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="must be a directory"):
        TrainConfig("m", tmp_path / "file")


@pytest.mark.parametrize("layers", [2, 3, 4, 12, 30, 48])
def test_default_taps_are_ascending_and_leave_out_the_last_layer(layers):
    ids = FeatureConfig().layer_ids(layers)
    assert list(ids) == sorted(set(ids))
    assert 0 <= ids[0] <= ids[-1] == layers - 2


def test_learning_rate_rises_stays_and_falls():
    config = OptimizationConfig(steps=100, warmup_steps=4, decay_share=0.4)
    factors = [config.learning_rate_factor(step) for step in range(100)]
    assert factors[0] == pytest.approx(0.2)
    assert factors[4:60] == [1.0] * 56
    assert all(a > b for a, b in itertools.pairwise(factors[61:]))
    assert factors[99] == pytest.approx(0.025)


def test_blocks_are_short_at_the_start():
    config = OptimizationConfig(steps=10, short_share=0.3, short_tokens=2)
    assert [config.tokens_at(step, 7) for step in range(10)] == [2] * 3 + [7] * 7
    assert config.tokens_at(0, 1) == 1
