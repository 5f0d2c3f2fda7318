import pytest

from decoupled_diloco.merge import token_weight


@pytest.mark.parametrize(
    ("tokens", "steps", "expected"),
    [(100, 10, 1000.0), (100, 1, 10000.0), (0, 5, 0.0), (5, 0, 0.0), (0, 0, 0.0), (1.5, 3, 0.75)],
)
def test_quantity_times_quality(tokens, steps, expected):
    assert token_weight(tokens, steps) == expected


def test_large_counters_stay_finite():
    assert token_weight(10**12, 10**5) == 1e19


@pytest.mark.parametrize(("tokens", "steps"), [(-1, 1), (1, -1)])
def test_negative_counters_are_a_programmer_error(tokens, steps):
    with pytest.raises(AssertionError, match="negative"):
        token_weight(tokens, steps)
