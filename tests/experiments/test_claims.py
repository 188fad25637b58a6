"""The paper's claims: a verdict for each from the rows, and another from other rows."""

from dataclasses import replace
from pathlib import Path

import pytest

from spear.experiments import claims
from spear.experiments.claims import CLAIMS, Verdict
from spear.experiments.common import catalogue
from spear.experiments.common.page import page_text
from spear.experiments.common.reproduce import rows_for
from spear.metrics import Rate

ROOT = Path(__file__).parents[2]
COMMITTED = rows_for("claims", ROOT / "results")
JUDGES = {claim.judge.__name__: claim for claim in CLAIMS}
WORSE = {  # a change of metrics that no confirmed claim survives
    "accuracy": {"exact": False},
    "spectrum": {"match": 0.9},
    "shape_of_network": {"submatrices": 1000, "exact": False},
    "submatrices": {"submatrices": 10**9},
    "narrow": {"submatrices": 1000},
    "failure": {"failures": 150},
    "second_stage": {"exact_both": False, "recovered_both": 0},
    "clipping": {"exact": False, "psnr": 20.0},
    "noise": {"psnr": 15.0},
    "defence": {"clear": 0.0},
    "fedavg": {"exact": False},
    "exponential": {"submatrices": 1000},
    "aggregation": {"recovered": 40},
    "any_layer": {"exact": False},
    "one_class": {"exact": False},
    "people": {"discrete": 0.5, "continuous": 5000.0},
    "prior": {"exact": False},
    "features": {"cosine": 0.5},
    "trained": {"matched": False},
}
NEVER_REFUTED = {"shape_of_network", "defence"}  # by rows alike


def changed(claim, metrics, among=lambda row: True):
    return {
        source: [
            replace(row, metrics={**row.metrics, **metrics}) if row.metrics and among(row) else row
            for row in COMMITTED[source]
        ]
        for source in claim.sources
    }


def test_the_summary_comes_first_and_every_claim_has_its_line():
    text = page_text(["claims", "failure"], ROOT / "results", Path("images"))
    assert text.index("## The paper's claims") < text.index("## How to read the numbers")
    assert text.index("## How to read") < text.index("## Figures\n\n### Figure 3: ")
    for claim in CLAIMS:
        assert text.count(f"| {claim.words} | {claim.paper} | ") == 1
        assert text.count(f"- {claim.words}: {claim.rule}.") == 1
    assert str(Verdict.OPEN) not in text


@pytest.mark.parametrize("name", JUDGES)
def test_without_rows_a_claim_is_open(name):
    claim = JUDGES[name]
    line = claim.line({source: [] for source in claim.sources})
    assert line[2:4] == ["not run", f"**{Verdict.OPEN}**"]


@pytest.mark.parametrize("name", JUDGES)
def test_other_rows_give_another_verdict(name):
    claim = JUDGES[name]
    _, verdict = claim.judge(changed(claim, WORSE[name]))
    assert verdict is (Verdict.QUALIFIED if name in NEVER_REFUTED else Verdict.REFUTED)


def test_places_are_those_of_the_experiments():
    for claim in CLAIMS:
        *_, where = claim.line({source: [] for source in claim.sources})
        for source in claim.sources:
            assert f"`{source}`" in where
            place = catalogue.load(source).place
            assert place == "Beyond the paper" or f"{place}, `{source}`" in where


def test_a_narrow_share_reaches_what_its_interval_holds():
    assert claims.reaches(Rate(97, 100), 0.99)
    assert not claims.reaches(Rate(90, 100), 0.99)
    assert not claims.reaches(Rate(0, 0), 0.5)  # nothing was run


def test_noise_that_hides_nothing_confirms():
    claim = JUDGES["defence"]
    told, verdict = claim.judge(changed(claim, {"clear": 1.0}))
    assert verdict is Verdict.CONFIRMED
    assert "at no noise that was tried" in told


def test_noise_tells_what_a_prior_adds():
    claim = JUDGES["noise"]
    told, verdict = claim.judge(changed(claim, {"psnr": 25.0, "psnr_prior": 29.0}))
    assert "mean PSNR 25.0 dB at C = 1 to 2, 29.0 dB with the prior that images are smooth" in told
    assert verdict is Verdict.QUALIFIED


def test_a_trained_network_counts_among_the_layers():
    claim = JUDGES["any_layer"]
    lost = changed(claim, {"exact": False}, lambda row: row.settings["steps"] > 0)
    told, verdict = claim.judge(lost)
    assert verdict is Verdict.QUALIFIED
    assert "layer 5 of a trained network: 0 of" in told


def test_sums_that_never_give_way_confirm_secure_aggregation():
    claim = JUDGES["aggregation"]
    told, verdict = claim.judge(changed(claim, {"recovered": 0, "exact": False}))
    assert verdict is Verdict.CONFIRMED
    assert told.startswith(
        "2 to 10 clients of 20 samples, m = 50: after one round samples came back"
    )


def test_a_second_stage_that_decides_batches_confirms():
    claim = JUDGES["second_stage"]
    _, verdict = claim.judge(changed(claim, {"exact_both": True, "exact_first": False}))
    assert verdict is Verdict.CONFIRMED


def test_two_networks_that_differ_refute_independence():
    claim = JUDGES["shape_of_network"]
    rows = changed(claim, {"exact": False}, lambda row: row.settings["m"] >= 800)
    many = {"architecture": rows["architecture"] * 5}
    assert claim.judge(many)[1] is Verdict.REFUTED


def test_a_second_stage_that_decides_small_batches_alone_does_not_confirm():
    claim = JUDGES["second_stage"]
    small = changed(
        claim, {"exact_both": True, "exact_first": False}, lambda row: row.settings["b"] <= 8
    )
    assert claim.judge(small)[1] is Verdict.QUALIFIED


def test_the_bound_is_refuted_without_a_count():
    """That it fails follows from the lemma's assumptions: a count without failures changes nothing."""
    claim = JUDGES["failure"]
    told, verdict = claim.judge(changed(claim, {"failures": 0}))
    assert verdict is Verdict.REFUTED
    assert "proved to fail more often than it allows at 13 of 47 sizes (up to 124 times)" in told
    assert "Counts lie above it at 0 of 47 sizes" in told


def test_few_batches_of_a_network_confirm_nothing():
    claim = JUDGES["shape_of_network"]
    rows = {"architecture": [row for row in COMMITTED["architecture"] if row.seed < 2]}
    assert claim.judge(rows)[1] is Verdict.QUALIFIED
    assert claim.judge({"architecture": rows["architecture"] * 5})[1] is Verdict.CONFIRMED


def test_few_batches_of_a_finder_confirm_nothing():
    claim = JUDGES["accuracy"]
    few = [row for row in COMMITTED["main"] if row.settings["finder"] == "cascade"]
    few += [row for row in COMMITTED["main"] if row.settings["finder"] == "sampling"][:4]
    assert claim.judge({"main": few})[1] is Verdict.QUALIFIED


def test_counts_of_small_batches_contradict_no_lemma():
    """Its q is a lower bound, and the paper's figure is flat below 10,000."""
    claim = JUDGES["submatrices"]
    small = changed(claim, {"submatrices": 5.0}, lambda row: row.settings["b"] <= 10)
    assert claim.judge(small)[1] is claim.judge(COMMITTED)[1]
    large = changed(claim, {"submatrices": 5.0}, lambda row: row.settings["b"] == 14)
    assert claim.judge(large)[1] is Verdict.QUALIFIED


def test_one_large_batch_puts_nothing_within_reach():
    claim = JUDGES["exponential"]
    frontier = [row for row in COMMITTED["frontier"] if row.settings["b"] <= 25]
    one = next(
        row
        for row in COMMITTED["frontier"]
        if row.settings["b"] > 100 and row.settings["finder"] == "cascade" and row.metrics["exact"]
    )
    rows = {"batch_size": COMMITTED["batch_size"], "frontier": [*frontier, one]}
    assert claim.judge(rows)[1] is Verdict.CONFIRMED
    rows["frontier"] += [one] * 4
    assert claim.judge(rows)[1] is Verdict.QUALIFIED


def test_trained_networks_are_held_to_the_paper_and_not_to_every_batch():
    claim = JUDGES["trained"]
    rows = changed(claim, {"matched": True, "submatrices": 5000.0})["training"] * 2
    own = [row for row in rows if row.settings.get("threshold", 0) is None]
    lost = replace(own[-1], metrics={**own[-1].metrics, "matched": False})
    assert claim.judge({"training": [*rows, lost]})[1] is Verdict.CONFIRMED
    slower = [
        replace(row, metrics={**row.metrics, "submatrices": 9000.0 if row.settings["steps"] else 5})
        for row in rows
    ]
    assert claim.judge({"training": slower})[1] is Verdict.QUALIFIED
