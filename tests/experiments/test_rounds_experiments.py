"""The experiments over several rounds: what their clients send, what counts, what they draw."""

from types import SimpleNamespace

import pytest
import torch

from spear.experiments import (
    rounds,
    rounds_aggregation,
    rounds_fedavg,
    rounds_noise,
    rounds_rate,
    rounds_sampling,
)
from spear.experiments.common.several_rounds import cell, enough, foreseen, samples_right
from spear.federated import epsilon
from spear.theory import rounds_needed
from spear.trials import Status
from support.experiment_rows import case, row, trials

EXPERIMENTS = (
    *(rounds, rounds_rate, rounds_aggregation, rounds_fedavg, rounds_noise),
    rounds_sampling,
)


def test_rounds_give_away_what_one_does_not(data_root):
    one, four = (rounds.measure(case(cell(20, 20, seen, 0.1, 30), 1, data_root)) for seen in (1, 4))
    assert (one.metrics["recovered"], one.metrics["movement"]) == (0, 0.0)
    assert (four.outcome, four.metrics["recovered"]) == ("EXACT", 20)
    assert four.metrics["movement"] > 0.1


def test_cohorts_change_from_round_to_round():
    settings = cell(8, 10, 20, 0.1, 30, clients=4, present=2)
    seen = rounds_aggregation.present(case(settings, 2))
    assert {len(clients) for clients in seen} == {2}
    assert set().union(*seen) == {0, 1, 2, 3}
    assert len(set(map(tuple, seen))) > 2
    everybody = rounds_aggregation.present(case({**settings, "present": 4}, 2))
    assert everybody == [[0, 1, 2, 3]] * 20


def test_a_sum_over_changing_clients_comes_apart(data_root):
    settings = cell(16, 20, 8, 0.1, 30, clients=4, present=2)
    found = rounds_aggregation.measure(case(settings, 1, data_root))
    assert found.metrics["recovered"] == found.metrics["sent"] == 16


def test_samples_that_were_never_sent_are_neither_found_nor_held_against_a_verdict(data_root):
    settings = cell(12, 30, 3, 0.1, 30, drawn=4, fresh=False)
    found = rounds_sampling.measure(case(settings, 1, data_root))
    assert found.outcome == "EXACT"
    assert 4 < found.metrics["recovered"] == found.metrics["sent"] < 12
    assert not found.metrics["false_exact"]
    few = cell(16, 30, 1, 0.1, 30, clients=4, present=1)
    found = rounds_aggregation.measure(case(few, 1, data_root))
    assert found.metrics["recovered"] == found.metrics["sent"] == 4
    assert not found.metrics["false_exact"]


def test_local_training_of_one_client_among_others(data_root):
    settings = cell(12, 40, 4, 0.02, 30, epochs=2, mini=6, clients=3)
    found = rounds_fedavg.measure(case(settings, 1, data_root))
    assert found.metrics["recovered"] == 12
    assert found.outcome == "APPROXIMATE"


def test_noise_is_counted_by_the_accountant_and_bounded_by_the_oracle(data_root):
    pytest.importorskip("opacus", reason="needs the opacus extra")
    settings = cell(5, 40, 3, 0.1, 30, clip=1.0, multiplier=0.001, delta=1e-5)
    found = rounds_noise.measure(case(settings, 1, data_root)).metrics
    assert found["epsilon"] == epsilon([(0.001, 1.0, 3)], 1e-5)
    assert found["clear"] == 5
    assert found["reference"] - 6 < found["median_psnr"] < found["reference"] + 1
    louder = {**settings, "multiplier": 0.01}
    assert rounds_noise.measure(case(louder, 1, data_root)).metrics["reference"] == pytest.approx(
        found["reference"] - 20, abs=1
    )


def test_batches_are_drawn_from_all_data_or_never_seen_twice():
    settings = cell(12, 10, 4, 0.1, 30, drawn=3, fresh=True)
    assert torch.cat(rounds_sampling.chosen(case(settings, 2))).tolist() == list(range(12))
    drawn = rounds_sampling.chosen(case({**settings, "fresh": False, "rounds": 40}, 2))
    assert {len(own.unique()) for own in drawn} == {3}
    assert len(torch.cat(drawn).unique()) == 12


def test_a_batch_without_a_result_counts_as_nothing_recovered():
    grid = [trial for trial in trials("rounds", 2) if trial.settings["b"] == 100]
    good = {"recovered": 100, "movement": 0.1}
    rows = [row(trial, good if trial.settings["rounds"] >= 8 else {}) for trial in grid]
    assert enough(rows) == 8
    assert foreseen(rows) == rounds_needed(100, 50, movement=0.1)
    last = max(range(len(rows)), key=lambda i: grid[i].settings["rounds"])
    rows[last] = row(grid[last], good, Status.TIMED_OUT)
    assert samples_right(rows[last : last + 1]) == [0.0]
    assert enough(rows) is None  # one of the two batches of most rounds has failed
    assert samples_right([row(grid[0], {"recovered": 25})]) == [25.0]


def test_unfound_samples_count_as_0_decibels():
    truth = torch.tensor([[0.1, 0.5], [0.2, 0.4], [1.0, 0.5]])
    pairs = SimpleNamespace(truth=torch.tensor([2, 1]), found=torch.tensor([0, 1]))
    score = SimpleNamespace(pairs=pairs, psnr=torch.tensor([30.0, 10.0]))
    result = SimpleNamespace(
        inputs=torch.tensor([[0.5, 0.25], [0.2, 0.4]])
    )  # one at half its scale
    found = SimpleNamespace(
        truth=truth,
        score=score,
        attacked=SimpleNamespace(result=result),
        batch=SimpleNamespace(pixels=lambda x: x[:, None, None]),
    )
    quality = rounds_noise.quality(found)
    assert (quality["median_psnr"], quality["clear"]) == (10.0, 1)
    assert quality["up_to_scale"] > 100
    rows = [row(trial, {}, Status.FAILED) for trial in trials("rounds_noise", 1)]
    assert set(rounds_noise.decibels(rows)) == {0.0}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_wrong_verdicts_are_told(experiment):
    name = experiment.__name__.rsplit(".", 1)[-1]
    wrong = {"false_exact": True, "certified_wrong": 2, "recovered": 1}
    drawn = experiment.EXPERIMENT.draw({name: [row(t, wrong) for t in trials(name, 1)[:1]]})
    assert "1 false EXACT, 2 certified wrong in 1 rows." in drawn.notes[-1]
