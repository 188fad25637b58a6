"""The batch size of made-up spectra on either side of each decision."""

import math

import pytest
import torch

from spear.factors.spectrum import _before_a_drop, _gaussian_from, batch_size_from, rank_without_gap

# A gap


def size_of(*parts, shape=(20, 20), eps=1e-7):
    """Of pairs (how many, value)."""
    s = torch.cat([torch.full((count,), value, dtype=torch.float64) for count, value in parts])
    assert len(s) == min(shape)
    return batch_size_from(s, *shape, eps)


def test_nothing_but_zeros_is_no_batch():
    assert size_of((20, 0.0)) == 0
    assert size_of((3, 0.0), shape=(3, 1000)) == 0
    assert size_of((1, 1.0), (19, 0.0)) == 1
    assert batch_size_from(torch.zeros(0), 0, 5, 1e-7) == 0
    assert size_of((5, 1.0), (15, 1e-9)) == 5


def test_a_gap_is_one_only_in_front_of_noise():
    """Behind it one value stands twelve edges out of the rest: that is a sixth sample."""
    assert size_of((5, 1.0), (1, 5e-3), (394, 1e-4), shape=(400, 900)) == 6
    assert size_of((5, 1.0), (1, 3e-4), (394, 1e-4), shape=(400, 900)) == 5


@pytest.mark.parametrize(("edges", "b"), [(1.25, 400), (0.9, 401)])
def test_the_edge_of_noise_is_that_of_what_is_left(edges, b):
    """Of 1000 x 1000 four hundred are samples; the next value against ten edges of 600 x 600."""
    value = 1e-3
    rest = math.sqrt((1.5 * edges**2 - 1) / 599) * value
    assert size_of((400, 1.0), (1, value), (599, rest), shape=(1000, 1000)) == b


def test_a_value_far_above_the_median_behind_it_is_no_rounding():
    assert size_of((5, 1.0), (1, 5e-6), (1, 1e-7), (1, 5e-9), (12, 1e-9)) == 6  # 5000 times
    assert size_of((5, 1.0), (1, 5e-7), (1, 1e-8), (13, 1e-9)) == 5  # 500 times
    assert size_of((5, 1.0), (1, 5e-6), (4, 1e-7), (2, 5e-9), (8, 1e-9)) == 6  # of the last eight


def test_a_median_below_rounding_counts_as_rounding():
    """1e-8 is 40 times the floor of 2.2e-10, whatever zeros follow."""
    assert size_of((5, 1.0), (1, 1e-8), (14, 1e-14)) == 5
    assert size_of((5, 1.0), (1, 1e-7), (14, 1e-14)) == 6  # falls by more than a hundred itself


def test_the_last_of_several_gaps_counts_if_it_is_a_hundredfold():
    assert size_of((5, 1.0), (3, 2e-4), (12, 6.7e-7), eps=1e-9) == 8  # 5000 times, then 300
    assert size_of((5, 1.0), (3, 2e-4), (12, 4e-6), eps=1e-9) == 5  # 5000 times, then 50


@pytest.mark.parametrize(
    ("r", "b", "seen"),
    [(100, 80, 1), (100, 81, 0), (10, 7, 1), (10, 8, 0), (30, 24, 1), (30, 25, 0)],
)
def test_a_fifth_of_the_spectrum_or_three_values_have_to_show_the_noise(r, b, seen):
    """For a gap of ten to a hundred; a hundredfold stands by itself."""
    assert (size_of((b, 1.0), (r - b, 0.02), shape=(r, 1000)) == b) is bool(seen)
    assert size_of((b, 1.0), (r - b, 0.002), shape=(r, 1000)) == b


def test_three_values_show_nothing():
    assert size_of((1, 1.0), (1, 0.5), (1, 0.3), shape=(3, 1000)) is None
    assert size_of((1, 1.0), (2, 0.02), shape=(3, 1000)) is None
    assert size_of((1, 1.0), (3, 0.02), shape=(4, 1000)) == 1


# A spectrum that fades into rounding


def test_fading_is_told_from_levelling_off():
    eps = 1e-6
    fades = torch.logspace(0, -12, 25, dtype=torch.float64)  # half a decade each
    assert rank_without_gap(fades, eps) == 12  # 10^-5.5 is 3.2 roundings, 10^-6 one
    assert rank_without_gap(fades[:3], eps) == 0
    levels = torch.logspace(0, -11.9, 25, dtype=torch.float64)  # the median stays above rounding
    assert rank_without_gap(levels, eps) == 0
    assert rank_without_gap(fades[[0, 4, 12, 20]], eps) == 2  # four are enough
    assert rank_without_gap(fades[[0, 4, 11, 20]], eps) == 0


# Noise: its edge, and the drop behind the last sample


def drops(count, **where):
    """Falls of 1.1 from each value to the next, but for those named."""
    found = torch.full((count,), 1.1, dtype=torch.float64)
    for place, drop in where.items():
        found[int(place[2:])] = drop
    return found


def test_samples_end_where_the_spectrum_falls_or_a_little_before():
    assert _before_a_drop(drops(30, at4=1.3), 5) == 5
    assert _before_a_drop(drops(30, at3=1.3), 5) == 4  # one as faint as noise
    assert _before_a_drop(drops(30, at2=1.3), 5) is None
    assert _before_a_drop(drops(30, at4=1.15), 5) is None
    assert _before_a_drop(drops(30, at17=1.3), 20) == 18  # of twenty, two
    assert _before_a_drop(drops(30, at16=1.3), 20) is None
    assert _before_a_drop(drops(30), 0) == 0
    assert _before_a_drop(drops(30), 1) == 0


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 20])
@pytest.mark.parametrize("seed", range(4))
def test_a_few_rows_of_a_clean_batch_are_not_called_noise(rows, seed):
    """As many samples as rows, or more, leave no gap; so few values look like noise by chance."""
    generator = torch.Generator().manual_seed(seed)
    D = torch.randn(rows, 2 * rows, generator=generator, dtype=torch.float64)
    X = torch.randn(2 * rows, 100, generator=generator, dtype=torch.float64)
    assert batch_size_from(torch.linalg.svdvals(D @ X), rows, 100, 1e-7) is None


def test_noise_that_is_not_gaussian_keeps_to_its_edge_too():
    """Values that are all the same, as of some quantised noise, and samples five times above it."""
    assert size_of((3, 5.0), (37, 1.0), shape=(40, 40)) == 3
    assert size_of((3, 1.3), (37, 1.0), shape=(40, 40)) != 3


# Gaussian noise, by its moments


@pytest.mark.parametrize("shape", [(200, 784), (400, 3072), (300, 300)])
@pytest.mark.parametrize("stands_out", [1.1, 1.3, 3.0])
def test_samples_that_hardly_stand_out_of_gaussian_noise_are_counted(shape, stands_out):
    """Of 12 samples the three faintest lie this far above the noise's edge; no gap shows."""
    m, n = shape
    generator = torch.Generator().manual_seed(m)
    options = {"generator": generator, "dtype": torch.float64}
    edge = m**0.5 + n**0.5
    levels = torch.tensor([*([20.0 * edge] * 9), *([stands_out * edge] * 3)], dtype=torch.float64)
    left = torch.linalg.qr(torch.randn(m, 12, **options)).Q
    right = torch.linalg.qr(torch.randn(n, 12, **options)).Q
    noisy = left * levels @ right.T + torch.randn(m, n, **options)
    assert batch_size_from(torch.linalg.svdvals(noisy), m, n, 1e-7) == 12


def edges(s, m, n):
    rest = s.square().flip(0).cumsum(0).flip(0)
    i = torch.arange(len(s), dtype=s.dtype)
    return (rest / ((m - i) * (n - i))).sqrt() * ((m - i).sqrt() + (n - i).sqrt())


def by_definition(s, m, n):
    """What `_gaussian_from` should give, value by value."""
    s = s.tolist()
    edge = edges(torch.tensor(s, dtype=torch.float64), m, n).tolist()
    energy = [sum(v**2 for v in s[i:]) for i in range(len(s))]
    for i in range(len(s)):
        k, p = min(m, n) - i, max(m, n) - i
        c, second = k / p, energy[i] / k
        fourth, sixth = (sum(v**power for v in s[i:]) / k for power in (4, 6))
        spread = 5 * math.sqrt(c) / k
        within = s[i] <= (1 + k ** (-2 / 3)) * edge[i]
        within &= abs(fourth / (second**2 * (1 + c)) - 1) <= spread
        within &= abs(sixth / (second**3 * (1 + 3 * c + c**2)) - 1) <= 3 * spread
        little = i <= len(s) / 4 and energy[i] <= 0.1 * energy[0]
        if within and (i <= len(s) / 12 or little):
            break
    else:
        return None
    apart = [j + 1 for j in range(i) if s[j] >= 1.05 * s[j + 1]]
    if i == 0:
        return 0
    return apart[-1] if apart and 2 * apart[-1] >= i else None


SIZES = [(48, 60), (60, 48), (60, 300)]


def noise_values(m, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(m, n, generator=generator, dtype=torch.float64)
    return 7 * torch.linalg.svdvals(noise)


def stretched(m, n):
    """Noise whose spread is more and more, or less and less, than that of Gaussian noise."""
    for power in torch.linspace(0.5, 1.6, 23).tolist():
        yield (noise_values(m, n) / 50).pow(power)


def with_samples(m, n):
    """More and more samples, louder and louder, in place of the first values."""
    s = noise_values(m, n)
    for count in range(1, len(s) // 3):
        for times in (1.0, 1.04, 1.06, 1.3, 2.2, 3.0, 4.5, 20.0):
            tail = noise_values(m - count, n - count, seed=count)
            yield torch.cat([times * tail[0] * torch.ones(count, dtype=s.dtype), tail])


def smeared(m, n):
    """A staircase into the noise: values that hardly stand apart from one another."""
    for count in (1, 2, 3, 4, 6):
        for step in (1.005, 1.02, 1.045, 1.055, 1.1, 1.3):
            for loud in (0, 1, 2, 3):
                tail = noise_values(m - count - loud, n - count - loud, seed=count)
                powers = torch.arange(count, 0, -1, dtype=tail.dtype)
                stairs = tail[0] * step**powers
                samples = stairs[0] * torch.full((loud,), 3.0, dtype=tail.dtype)
                yield torch.cat([samples, stairs, tail])


def dented(m, n):
    """Noise whose largest values are raised and others lowered: the higher moments part company."""
    s = noise_values(m, n)
    place = torch.linspace(0, 1, len(s), dtype=s.dtype)
    for turns in (0.5, 1.0, 1.5, 2.0, 3.0):
        for size in torch.linspace(-0.25, 0.25, 21).tolist():
            yield s * (1 + size * torch.cos(2 * math.pi * turns * place))


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("family", [stretched, with_samples, smeared, dented])
def test_gaussian_noise_is_known_by_its_edge_moments_and_energy(family, shape):
    seen = set()
    for values in family(*shape):
        s = values.sort(descending=True).values
        expected = by_definition(s, *shape)
        assert _gaussian_from(s, edges(s, *shape), *shape) == expected
        seen.add(expected)
    assert {None, 0} <= seen or len(seen) > 4
