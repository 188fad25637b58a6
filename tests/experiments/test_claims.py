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
NEVER_REFUTED = {"shape_of_network", "defence", "prior"}  # by rows alike, or so few


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


def test_sums_that_never_give_way_confirm_secure_aggregation():
    claim = JUDGES["aggregation"]
    _, verdict = claim.judge(changed(claim, {"recovered": 0, "exact": False}))
    assert verdict is Verdict.CONFIRMED


def test_a_second_stage_that_decides_batches_confirms():
    claim = JUDGES["second_stage"]
    _, verdict = claim.judge(changed(claim, {"exact_both": True, "exact_first": False}))
    assert verdict is Verdict.CONFIRMED


def test_two_networks_that_differ_refute_independence():
    claim = JUDGES["shape_of_network"]
    rows = changed(claim, {"exact": False}, lambda row: row.settings["m"] >= 800)
    many = {"architecture": rows["architecture"] * 5}
    assert claim.judge(many)[1] is Verdict.REFUTED
