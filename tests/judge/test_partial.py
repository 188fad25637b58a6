"""Parts of a batch: what can be read while much fainter samples are missing."""

import torch

from spear.factors import factorise
from spear.judge.selection import select_part
from spear.search.watch import Watch
from support.planted import plant, pool_of, true_directions, weighed


def part_of_a_batch(faint, found=4):
    """Six samples, the last two this much fainter; a pool with some of the others' directions."""
    weights = torch.tensor([1.0, 1.0, 1.0, 1.0, faint, faint])
    planted = plant(6, m=150, n=80, loss=weighed(weights, total=True))
    factors = factorise(planted.view)
    if factors.row_factors is not None:
        factors = factors.with_other_rows
    pool = pool_of(factors, *true_directions(planted, factors))
    return planted, factors, pool.pick(list(range(found)))


def test_loud_samples_are_read_as_if_alone_and_what_is_left_is_their_noise():
    planted, factors, pool = part_of_a_batch(1e-4)
    part, selection = select_part(factors, pool, Watch())
    assert (factors.batch_size, part.batch_size, selection.b) == (6, 4, 4)
    assert part.has_unresolved_samples
    assert selection.match == 1
    inputs = part.reconstruct(selection.C)
    near = torch.cdist(inputs, planted.inputs).min(1)
    assert sorted(near.indices.tolist()) == [0, 1, 2, 3]
    assert float(near.values.max()) < 2e-3  # a ten-thousandth of the other samples is in them
    # What counts as zero now is what the missing samples leave in an entry.
    assert part.zero > 100 * factors.zero


def test_nothing_is_read_beside_samples_that_are_as_loud():
    _, factors, pool = part_of_a_batch(1.0)
    part, selection = select_part(factors, pool, Watch())
    assert selection is None
    assert part is factors


def test_no_part_is_the_whole_or_nothing():
    _, factors, whole = part_of_a_batch(1e-4, found=6)
    assert select_part(factors, whole, Watch()) == (factors, None)
    assert select_part(factors, whole.pick([]), Watch()) == (factors, None)


def test_directions_that_do_not_complete_the_part_are_no_choice():
    _, factors, pool = part_of_a_batch(1e-4)
    twice = pool.pick([0, 0, 1, 2])
    part, selection = select_part(factors, twice, Watch())
    assert selection is None
    assert part is factors
