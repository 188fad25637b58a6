"""The campaign against false verdicts: some of its cases, its judge, and the page of its rows."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

import spear
from spear import Outcome, Proof

ROOT = Path(__file__).parents[2]
import verdict_cases
import verdicts
from verdict_cases.base import party

# Families whose updates are more, or less, than their samples' gradients: noise, other weights, steps.
MORE = {"noisy", "pruned", "quantised", "FedAvg", "other model", "stitched", "random matrix"}
MORE |= {"wrong learning rate", "autocast", "penalties", "odd optimisers", "foreign rows"}
MORE |= {"masks", "mixed precisions", "trained apart"}


@pytest.mark.parametrize("family", verdict_cases.FAMILIES)
def test_verdicts_are_right(family, data_root, monkeypatch):
    monkeypatch.setenv("SPEAR_DATA", str(data_root))
    case = verdict_cases.case(family, 20)
    for door in verdicts.DOORS:
        result = verdicts.inverted(case, door, max_seconds=3)
        found = verdicts.judged(result, case, door)
        assert not found["wrong_exact"], (door, case.settings, found, result.reason)
        assert not found["certified_wrong"], (door, case.settings, found, result.reason)


def test_a_trace_is_no_sample_beside_a_part_of_it_that_switches_on_a_neuron_more(
    data_root, monkeypatch
):
    """Two classes: three samples leave one trace, and one of them a fainter one in a neuron more."""
    monkeypatch.setenv("SPEAR_DATA", str(data_root))
    case = verdict_cases.case("one cell", 791002)
    assert not spear.invert(case.bare).certified.any()


@pytest.mark.parametrize("family", sorted(set(verdict_cases.FAMILIES) - MORE))
def test_the_truth_is_what_was_sent(family, data_root, monkeypatch):
    monkeypatch.setenv("SPEAR_DATA", str(data_root))
    for seed in range(2):
        case = verdict_cases.case(family, seed)
        shown = case.truth if case.seen is None else case.seen
        weight, bias = case.view.weight_grad.double(), case.view.bias_grad.double()
        columns = case.columns.double()
        assert float((columns.T @ shown.double() - weight).norm()) <= 1e-5 * float(weight.norm())
        assert float((columns.sum(0) - bias).norm()) <= 1e-5 * float(bias.norm()) + 1e-12
        assert not any(name in case.bare.others for name in case.view.others)


def test_a_seed_is_a_case(data_root, monkeypatch):
    monkeypatch.setenv("SPEAR_DATA", str(data_root))
    for family in ("one cell", "uneven weights", "architectures"):
        one, again = verdict_cases.case(family, 7), verdict_cases.case(family, 7)
        assert one.settings == again.settings
        assert torch.equal(one.view.weight_grad, again.view.weight_grad)


@pytest.fixture
def exact():
    """An update of Gaussian rows, and its recovery."""
    client = verdict_cases.client(Random(0), b=4, width=120, source="gauss", depth=3)
    case = client.case(client.sent())
    return case, spear.invert(case.view, model=case.model)


def test_the_judge_accepts_what_is_right(exact):
    case, result = exact
    found = verdicts.judged(result, case, "observed")
    assert (found["wrong_exact"], found["certified_wrong"], found["unproved"]) == (False, 0, False)
    assert found["right_80"]
    assert found["worst_certified"] > 80
    assert found["calibration"]["samples"] == 4


def test_the_judge_notices_what_is_wrong(exact):
    case, result = exact
    off = case.truth.clone()
    off[0] += 2e-3 * case.span
    moved = verdicts.judged(result, replace(case, truth=off), "observed")
    assert (moved["wrong_exact"], moved["certified_wrong"]) == (True, 1)
    one_more = torch.cat([case.truth, -case.truth[:1]])
    unknown = replace(case, truth=one_more, columns=None)
    more = verdicts.judged(result, unknown, "observed")
    assert (more["wrong_exact"], more["certified_wrong"]) == (True, 0)
    assert result.proof is Proof.REPLAY
    forged = verdicts.judged(result, replace(case, honest=False), "observed")
    assert (forged["wrong_exact"], forged["certified_wrong"]) == (True, 4)
    nothing = verdicts.judged(result, replace(case, truth=None), "observed")
    assert (nothing["wrong_exact"], nothing["certified_wrong"]) == (True, 4)
    told = verdicts.judged(result, replace(case, never_exact=True), "observed")
    assert (told["wrong_exact"], told["certified_wrong"]) == (True, 0)


def test_a_sample_below_rounding_need_not_be_found(exact):
    case, result = exact
    truth = torch.cat([case.truth, -case.truth[:1]])
    for size, wrong in ((1e-12, False), (1e-3, True)):
        columns = torch.cat([case.columns, size * case.columns[:1]])
        faint = replace(case, truth=truth, columns=columns)
        assert verdicts.judged(result, faint, "observed")["wrong_exact"] is wrong


def test_a_mean_of_two_is_right_only_if_it_is_both(exact):
    case, result = exact
    step = torch.zeros_like(case.truth[:1])
    step[0, ::2] = case.span * 1e-3
    for apart, wrong in ((0.5, 0), (2.4, 1)):  # the returned one is 0.35 of a way between them
        near = torch.cat([case.truth, case.truth[:1] + 0.65 * apart * step])
        near[0] -= 0.35 * apart * step[0]
        found = verdicts.judged(result, replace(case, truth=near, columns=None), "observed")
        assert found["certified_wrong"] == wrong
        assert found["wrong_exact"] is bool(wrong)


def test_the_judge_counts_what_is_refused(exact):
    case, result = exact
    doubted = replace(result, outcome=Outcome.FAILED)
    found = verdicts.judged(doubted, case, "observed")
    assert found["right_80"]
    assert found["unproved"]
    assert not verdicts.judged(doubted, replace(case, never_exact=True), "observed")["unproved"]


def test_what_a_layer_cannot_see(exact):
    case, _ = exact
    assert verdict_cases.rivals(case) == []
    # the first two with parallel columns: one sample at their mean gives the same gradients
    shared = case.columns.clone()
    shared[1] = 2 * shared[0]
    merged = replace(case, columns=shared)
    with torch.no_grad():  # in one cell, as such samples are
        both = merged.truth.clone()
        both[1] = 1.01 * both[0]
    (rival,) = verdict_cases.rivals(replace(merged, truth=both))
    assert (rival.kind, rival.samples) == ("merge", (0, 1))
    assert torch.allclose(rival.x.float(), (both[0] + 2 * both[1]).float() / 3, atol=1e-5)
    # a number that was told speaks against it
    view = case.view.told(samples=4)
    assert verdict_cases.rivals(replace(merged, truth=both, view=view)) == []


@pytest.mark.parametrize(("biases", "factor", "seen"), [("zero", 2, 4), ("default", 50, 0)])
def test_a_layer_cannot_see_a_scale_without_biases(biases, factor, seen):
    one = party(Random(1), b=4, source="gauss", biases=biases)
    case = replace(one.case(one.sent()), seen=one.x / factor)
    assert [rival.kind for rival in verdict_cases.rivals(case)] == ["scale"] * seen


def test_the_page_is_drawn_from_the_rows():
    from spear.trials import RowFile

    rows = list(RowFile(ROOT / "benchmarks" / "rows", "verdicts").rows().values())
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert len(rows) >= 6000
    assert verdicts.table(rows) in page
    assert verdicts.unseen(rows) in page
    assert verdicts.calibrations(rows) in page
    assert not any(r.metrics["wrong_exact"] or r.metrics["certified_wrong"] for r in rows)
    run = {r.settings["family"] for r in rows}
    words = f"draws updates of {len(verdict_cases.FAMILIES)} families"
    assert words in page
    missing = ", ".join(f"`{name}`" for name in verdict_cases.FAMILIES if name not in run)
    assert f"(One family, {missing}, came after the run: the table has {len(run)}.)" in (
        " ".join(page.split())
    )
    bare = [r for r in rows if r.settings["door"] == "bare"]
    deceived = sum(r.metrics["invisible_exact"] for r in bare)
    limits = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    assert f"was said of {deceived} of {len(bare):,} bare layers" in " ".join(limits.split())
