"""The Kolmogorov-Smirnov test against values that are known, and what it says of samples alike and unlike."""

import random

import pytest

from benchmarks.two_sample import ks_test


def test_the_statistic_is_the_largest_distance_of_the_distributions() -> None:
    assert ks_test([1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 5.0, 6.0])[0] == pytest.approx(0.5)
    assert ks_test([1.0, 2.0], [1.0, 2.0]) == (0.0, 1.0)
    assert ks_test([1.0, 2.0], [3.0, 4.0])[0] == 1.0


@pytest.mark.parametrize(("scaled", "p_value"), [(1.3581, 0.05), (1.6276, 0.01), (0.8276, 0.5)])
def test_p_values_are_those_of_kolmogorovs_distribution(scaled: float, p_value: float) -> None:
    """Of large samples, whose correction is small: 10,000 each, the second moved by a share of them."""
    size = 10_000
    effective = (size / 2) ** 0.5
    moved = round(scaled / (effective + 0.12 + 0.11 / effective) * size)
    first = [float(index) for index in range(size)]
    second = [index + (size if index < moved else 0.0) for index in first]
    assert ks_test(first, second)[1] == pytest.approx(p_value, rel=0.05)


def test_samples_alike_are_rarely_told_apart_and_unlike_ones_are() -> None:
    rng = random.Random(1)
    alike = []
    for _ in range(100):
        first, second = ([rng.gauss(0, 1) for _ in range(300)] for _ in range(2))
        alike.append(ks_test(first, second)[1])
    assert sum(p_value < 0.05 for p_value in alike) <= 12
    assert ks_test([rng.gauss(0, 1) for _ in range(300)], [rng.gauss(0.5, 1) for _ in range(300)])[1] < 1e-3
