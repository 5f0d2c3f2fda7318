import math

import pytest
import torch

from decoupled_diloco.merge.blocks import BLOCK, ROW, blocks_of, is_finite, norm_of, squares_of

SIZES = [1, 7, ROW - 1, ROW, ROW + 1, 3 * ROW, BLOCK, BLOCK + 3]


@pytest.mark.parametrize("size", SIZES)
def test_blocks_are_views_that_cover_the_vector(size):
    vector = torch.arange(float(size))
    assert torch.equal(torch.cat(list(blocks_of(vector))), vector)
    assert next(blocks_of(vector)).data_ptr() == vector.data_ptr()


@pytest.mark.parametrize("size", SIZES)
def test_squares_agree_with_fp64(size):
    vector = torch.randn(size, generator=torch.Generator().manual_seed(size))
    assert squares_of(vector) == pytest.approx(float(vector.double().square().sum()), rel=1e-6)
    assert norm_of(vector) == math.sqrt(squares_of(vector))


@pytest.mark.parametrize("size", SIZES)
def test_the_number_of_threads_does_not_change_a_bit(size):
    vector = torch.randn(size, generator=torch.Generator().manual_seed(size))
    threads = torch.get_num_threads()
    try:
        found = set()
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.add(squares_of(vector))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1


@pytest.mark.parametrize("value", [1e-30, 3e38, 1e-42])
def test_lengths_outside_the_range_of_fp32_squares(value):
    vector = torch.full((5,), value)
    assert norm_of(vector) == pytest.approx(math.sqrt(5) * float(vector[0]), rel=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, ROW, BLOCK + 1])
def test_one_bad_value_is_found(value, place):
    vector = torch.ones(BLOCK + 2)
    vector[place] = value
    assert not is_finite(vector)
    assert not math.isfinite(squares_of(vector))


def test_infinities_of_both_signs_are_found():
    assert not is_finite(torch.tensor([math.inf, -math.inf]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_sum_that_overflows_is_not_a_bad_value(dtype):
    assert is_finite(torch.full((3, 4), torch.finfo(dtype).max, dtype=dtype))


def test_a_vector_of_zeros_and_an_empty_one():
    assert squares_of(torch.zeros(10)) == 0
    assert is_finite(torch.zeros(0))
