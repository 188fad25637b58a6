"""Many inversions, many rows, many threads: nothing grows, nothing crawls, nobody disturbs another."""

import gc
import json
import linecache
import shutil
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import spear
from spear.federated import fedsgd
from spear.report import Report, Table
from spear.sweep.grid import Grid
from spear.sweep.plan import Sweep
from spear.sweep.private_data import PrivateData
from spear.sweep.report import sweep_report
from spear.sweep.subject import Subject
from spear.sweep.utility import Training
from spear.trials import Row, RowFile, Status
from spear.trials.remaining import Remaining
from spear.update.layers import network_after
from support import reports
from support.judgements import bits
from support.planted import plant

MANY = 10_000
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def resident():
    """Megabytes of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's memory figures")
def test_many_inversions_take_no_more_memory_than_a_few():
    def inverted(count):
        for i in range(count):
            planted = plant(1 + i % 3, m=40, n=16, depth=2, seed=i % 20)
            result = spear.invert(planted.view, model=planted.model)
            assert result.batch_size == 1 + i % 3
        gc.collect()
        return resident(), len(gc.get_objects()), len(linecache.cache)

    # What is loaded or cached grows once; a leak grows every time.
    passes = list(pairwise(inverted(6) for _ in range(4)))
    assert min(later[0] - memory for (memory, *_), later in passes) < 0.4  # MB
    assert min(later[1] - objects for (_, objects, _), later in passes) < 12  # torch.fx kept 90
    assert passes[-1][1][2] <= passes[0][0][2]


def test_traced_models_work_after_their_source_is_forgotten():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    behind = network_after(net, "0")
    z = torch.randn(5, 4)
    assert torch.equal(behind(z), net[2](torch.relu(z)))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        behind(z[:, :3])


def test_threads_give_the_bits_of_one_after_the_other():
    batches = [plant(2 + i % 5, m=60, n=40, seed=i) for i in range(6)]
    shared = batches[0].model
    generator = torch.Generator().manual_seed(5)
    for i in range(4):  # updates of the same model object
        x, y = torch.randn(3 + i, 40, generator=generator), torch.arange(3 + i)
        batches.append(type(batches[0])(shared, x, y, fedsgd(shared, x, y)))

    def inverted(one):
        return bits(spear.invert(spear.observe(one.model, one.gradients), model=one.model))

    weights = {name: value.clone() for name, value in shared.state_dict().items()}
    one_by_one = [inverted(one) for one in batches]
    filters, calls = list(warnings.filters), (nn.Module.__call__, nn.Module.__getattr__)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(2):
            assert list(pool.map(inverted, batches)) == one_by_one
    assert {one[0] for one in one_by_one} == {spear.Outcome.EXACT}
    assert warnings.filters == filters
    assert (nn.Module.__call__, nn.Module.__getattr__) == calls
    assert all(torch.equal(value, weights[name]) for name, value in shared.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in shared.parameters())
    assert shared.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in shared.modules())


def test_a_model_that_trains_in_another_thread_is_not_disturbed():
    net, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(20, 6)
    expected, stop = net(x), []
    planted = plant(2, m=30, n=20)

    def running():
        count = 0
        while not stop:
            assert torch.equal(net(x), expected)
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(running)
        try:
            for _ in range(25):
                spear.observe(planted.model, planted.gradients)  # which traces it
        finally:
            stop.append(True)
        assert other.result() > 0


def test_random_numbers_of_another_thread_are_not_drawn_twice():
    """Replays put the global random state back only where the model itself draws from it."""
    planted, stop = plant(3, m=40, n=20), []

    def drawing():
        seen = set()
        while not stop:
            number = float(torch.rand((), dtype=torch.float64))
            assert number not in seen
            seen.add(number)
        return len(seen)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(drawing)
        try:
            for _ in range(5):
                spear.invert(planted.view, model=planted.model)
        finally:
            stop.append(True)
        assert other.result() > 0


def seconds(function, *arguments):
    """CPU time: that of others does not count."""
    began = time.process_time()
    made = function(*arguments)
    return time.process_time() - began, made


def test_ten_thousand_rows_of_an_audit_are_drawn_quickly(tmp_path):
    x, y = torch.randn(40, 12), torch.arange(40) % 3
    grid = Grid({"samples": range(2, 22), "sigma": [10 ** (-i / 5) for i in range(50)]}, cross=True)
    data = PrivateData.of("numbers", x, y)
    planned = Sweep(Subject(None, data), grid, repeats=10, training=Training(0, 1))
    took, trials = seconds(planned.trials)
    assert len(trials) == MANY
    assert took < 10
    metrics = {"samples": 2, "exact": True, "recovered": 2, "recognised": 2, "best": 90.0}
    metrics |= {"certified": 2, "certified_wrong": 0}
    done = (Status.DONE, "EXACT", metrics, 0.1, {}, 0.2)
    line = json.loads(Row("", "leakage", {}, 0, *done).line())  # a line by hand is made sooner
    lines = ({**line, "key": t.key, "settings": t.settings, "seed": t.seed} for t in trials)
    (tmp_path / "leakage.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    took, rows = seconds(RowFile(tmp_path, "leakage").rows)
    assert len(rows) == MANY
    assert took < 3
    took, report = seconds(sweep_report, planned, tmp_path)
    assert took < 15  # 29 s before intervals and plans were made once
    took, page = seconds(report.page)
    assert took < 5
    assert len(page) < 5_000_000


def test_an_estimate_of_ten_thousand_trials_costs_nothing():
    class Done:
        def __init__(self, i):
            self.key, self.settings, self.took = str(i), {"b": i % 100}, 1.0

    trials = [Done(i) for i in range(MANY)]

    def watched():
        remaining = Remaining(trials)
        return [remaining.done(one) or remaining.seconds() for one in trials]

    took, told = seconds(watched)
    assert took < 5
    assert told[-1] == 0.0
    assert told[MANY // 2] > 0  # how much is the clock's affair: the trials are made up


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the PATH")
def test_ten_thousand_rows_on_a_page_are_sorted_and_a_few_are_laid_out(tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (dev extra)")
    rows = tuple((i % 97, f"client {i}", 0.01 * (i * 7919 % MANY)) for i in range(MANY))
    table = Table("Every reply", ("round", "client", "seconds"), rows)
    path = tmp_path / "page.html"
    Report.new("audit", "Many", "All.", tables=[table]).save_page(path)
    flags = ["--headless", "--no-sandbox", "--disable-gpu"]
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        page = browser.new_page()
        page.goto(path.as_uri(), timeout=60_000)
        shown = page.locator("#tables tbody tr:visible")
        assert shown.count() == 300
        heads = page.locator("#tables th button")
        heads.nth(2).click()
        heads.nth(2).click()
        assert shown.first.inner_text().split()[-1] == "99.99"
        assert shown.count() == 300
        heads.nth(0).click()
        assert shown.first.inner_text().split()[0] == "0"
        assert shown.count() == 300  # laying out all of them takes seconds
        page.emulate_media(media="print")
        seen = "rows => rows.filter(row => row.checkVisibility()).length"
        assert page.locator("#tables tbody tr").evaluate_all(seen) == MANY
        page.emulate_media(media="screen")
        page.get_by_role("button", name="Show all 10,000 rows").click()
        assert shown.count() == MANY
        browser.close()


def test_a_report_of_many_findings_shows_the_worst_one_by_one():
    bad, good = reports.finding(1, 1, image_format=None, true=False), reports.failure().findings[0]
    findings = [good] * 600 + [bad] * 40
    page = Report.new("flower", "Many", "All.", findings).page()
    assert page.count('<details class="panel finding"') == 500
    assert all(f'id="finding-{i}"' in page for i in (601, 640))
    assert 'href="#finding-600"' not in page
    assert "The 500 worst follow one by one; the other 140" in page
