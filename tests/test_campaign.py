"""The campaign against false verdicts: some of its cases, its judge, and the page of its rows."""

import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

import spear
from spear import Outcome, Proof

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import verdict_cases
import verdicts


@pytest.mark.parametrize("with_model", [True, False], ids=["model", "layer"])
@pytest.mark.parametrize("family", verdict_cases.FAMILIES)
def test_verdicts_are_right(family, with_model, data_root, monkeypatch):
    monkeypatch.setenv("SPEAR_DATA", str(data_root))
    for seed in range(20, 22):
        case = verdict_cases.case(family, seed)
        model = case.model if with_model else None
        result = spear.invert(case.view, model=model, loss=case.loss, max_seconds=4)
        found = verdicts.judged(result, case, with_model)
        assert not found["wrong_exact"], (seed, case.settings, found, result.reason)
        assert not found["certified_wrong"], (seed, case.settings, found, result.reason)


@pytest.fixture
def exact():
    """An update of Gaussian rows, and its recovery."""
    client = verdict_cases.client(Random(0), b=4, width=120, source="gauss", depth=3)
    case = client.clean(client.gradients())
    return case, spear.invert(case.view, model=case.model)


def test_the_judge_accepts_what_is_right(exact):
    case, result = exact
    found = verdicts.judged(result, case, True)
    assert (found["wrong_exact"], found["certified_wrong"], found["refused"]) == (False, 0, False)
    assert found["recovered"]


def test_the_judge_notices_what_is_wrong(exact):
    case, result = exact
    off = case.truth.clone()
    off[0] += 2e-3 * case.span
    moved = verdicts.judged(result, replace(case, truth=off), True)
    assert (moved["wrong_exact"], moved["certified_wrong"]) == (True, 1)
    more = verdicts.judged(
        result, replace(case, truth=torch.cat([case.truth, -case.truth[:1]])), True
    )
    assert (more["wrong_exact"], more["certified_wrong"]) == (True, 0)
    assert result.proof is Proof.REPLAY
    forged = verdicts.judged(result, replace(case, honest=False), True)
    assert (forged["wrong_exact"], forged["certified_wrong"]) == (True, 4)
    nothing = verdicts.judged(result, replace(case, truth=None), True)
    assert (nothing["wrong_exact"], nothing["certified_wrong"]) == (True, 4)


def test_the_judge_counts_what_is_refused(exact):
    case, result = exact
    doubted = replace(result, outcome=Outcome.PARTIAL)
    assert verdicts.judged(doubted, case, True)["refused"]
    assert not verdicts.judged(doubted, replace(case, provable=False), True)["refused"]


def test_the_page_is_drawn_from_the_rows():
    from spear.trials import RowFile

    rows = list(RowFile(ROOT / "benchmarks" / "rows", "verdicts").rows().values())
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert len(rows) >= 2000
    assert verdicts.table(rows) in page
    assert verdicts.refusals(rows) in page
    asked = [r for r in rows if (r.settings["family"], r.settings["with"]) != verdicts.FORGED]
    assert not any(r.metrics["wrong_exact"] or r.metrics["certified_wrong"] for r in asked)
