"""spear audit: settings, what clients send, and where leakage starts and stops."""

import math
import re
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import spear
from spear.errors import InvalidFile, InvalidOption, NoAttackableLayer
from spear.federated import fedavg, fedsgd, mlp, send, split
from spear.federated.privacy import Noise, Privacy, noise_of, resolved
from spear.metrics import psnr
from spear.report import ImageFormat, Level, columns_of
from spear.sweep.grid import Axis, Grid, default_lists
from spear.sweep.leakage import Leakage, LeakageLevel, trend
from spear.sweep.plan import Sweep
from spear.sweep.private_data import PrivateData, load_data
from spear.sweep.report import case_of, exit_code, headline, sweep_report
from spear.sweep.running import sweep, work
from spear.sweep.setting import Setting
from spear.sweep.subject import Subject
from spear.sweep.trial import attacked, is_clear
from spear.sweep.utility import Training, too_small, trained
from spear.trials import InlineEngine, Row, RowFile, Status
from support.command_line import in_this_process
from support.planted import module

QUICK = Training(rounds=12, seeds=2)


def numbers(count=240, n=30, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, n, generator=generator)
    return x, x[:, :classes].argmax(1)


def narrow():
    return mlp(30, 3, width=60, depth=3)


def wide(width=60):
    return mlp(30, 3, width=width, depth=3)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"samples": 0}, "samples"),
        ({"samples": 2.5}, "samples"),
        ({"clients": True}, "clients"),
        ({"sigma": -1.0}, "sigma"),
        ({"clip": math.inf}, "clip"),
        ({"sigma": 1e-4, "noise_multiplier": 1.0, "clip": 1.0}, "one unit"),
        ({"noise_multiplier": 1.0}, "give clip"),
        ({"epsilon": 8.0}, "give clip"),
        ({"sends": "weights", "epochs": 2}, "epochs and one lr together"),
        ({"sends": "weights", "epochs": 2, "lr": (0.1, 0.1)}, "epochs and one lr together"),
        ({"local_batch_size": 4}, "local training"),
        ({"precision": "int8"}, "2-bit to 16-bit"),
        ({"pruned": 1.5}, "pruned"),
        ({"precision": "40-bit"}, "2-bit to 16-bit"),
        ({"width": 0}, "width"),
        ({"width": 10**6}, "width <= 100,000"),
        ({"rounds": 0}, "rounds to be a whole number >= 1"),
        ({"rounds": 10**4, "width": 0}, "width.*rounds <= 1,000"),
        ({"optimizer": "adam"}, "does not support optimizer"),
        ({"clip": 1.0, "clipping": "per-layer"}, "does not support clipping"),
        ({"samples": 0, "clients": 0, "precision": "half"}, "precision.*samples.*clients"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, word):
    with pytest.raises(InvalidOption, match=word):
        Setting(**wrong)


def test_noise_is_the_same_in_all_units():
    privacy = Privacy(delta=1e-5, steps=50)
    by_multiplier = noise_of(Setting(samples=20, clip=2.0, noise_multiplier=0.7), privacy)
    assert by_multiplier.sigma == pytest.approx(0.7 * 2.0 / 20)
    by_sigma = noise_of(Setting(samples=20, clip=2.0, sigma=by_multiplier.sigma), privacy)
    assert by_sigma.multiplier == pytest.approx(0.7)
    epsilon = by_multiplier.epsilon
    by_epsilon = noise_of(Setting(samples=20, clip=2.0, epsilon=epsilon), privacy)
    assert by_epsilon.multiplier == pytest.approx(0.7, rel=1e-6)
    whole_update = noise_of(Setting.of(clip=2.0, noise_multiplier=0.7, epochs=1), privacy)
    assert whole_update.sigma == pytest.approx(1.4)  # the client's update, not a sample's gradient


def test_epsilon_is_that_of_opacus():
    from opacus.accountants.utils import get_noise_multiplier

    privacy = Privacy(delta=1e-5, dataset_size=2000, steps=100)
    ours = noise_of(Setting(samples=20, clip=1.0, epsilon=3.0), privacy)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Optimal order is the")  # on its way there
        theirs = get_noise_multiplier(
            target_epsilon=3.0, target_delta=1e-5, sample_rate=0.01, steps=100, accountant="rdp"
        )
    assert ours.multiplier == pytest.approx(theirs, rel=0.01)
    assert ours.epsilon == pytest.approx(3.0, abs=1e-5)
    assert noise_of(Setting(sigma=1e-3), privacy) == Noise(1e-3, None, None)  # bounds nothing
    with pytest.raises(InvalidOption, match="hold its batch"):
        noise_of(Setting(samples=20, clip=1.0, sigma=1.0), Privacy(dataset_size=10))


def test_one_thing_is_varied_at_a_time():
    grid = Grid({"samples": [8, 32], "clip": [None, 2.0], "noise_multiplier": [0, 0.1]})
    assert grid.base == Setting(samples=8)
    assert grid.settings == (
        Setting(samples=8),
        Setting(samples=32),
        Setting(samples=8, clip=2.0),
        Setting(samples=8, clip=2.0, noise_multiplier=0.1),
    )
    assert [axis.name for axis in grid.axes] == ["samples", "clip", "noise"]
    crossed = replace(grid, cross=True).settings
    assert len(crossed) == len(set(crossed)) == 6  # noise without a norm takes the one given
    with pytest.raises(InvalidOption, match="give clip"):
        Grid({"noise_multiplier": [0, 0.1]})
    with pytest.raises(InvalidOption, match="depth"):
        Grid({"depth": [3]})
    assert Grid({"lr": [0.1]}).base == Setting(sends="weights", epochs=1, lr=0.1)
    local = Setting(sends="weights", epochs=5, lr=0.05)
    assert Grid({"epochs": [0, 5]}).settings[1] == local


def test_the_default_sweep_shrinks_to_the_data():
    assert max(s.total for s in Sweep().grid.settings) > 60
    for count in (3, 60, 500):
        assert max(s.total for s in Grid(default_lists(count)).settings) <= count


def test_aggregated_clients_are_one_batch():
    net, (x, y) = mlp(30, 3, width=60, depth=3, seed=0), numbers(32)
    setting = Setting(samples=8, clients=4)
    options = {"loss": nn.CrossEntropyLoss(), "generator": torch.Generator()}
    four = send(net, split(x, y, setting), setting, **options)
    for name, gradient in fedsgd(net, x, y).items():
        assert torch.allclose(four.update[name], gradient, atol=1e-7)
    local = Setting.of(samples=8, epochs=2, lr=0.1, clients=2)
    two = send(net, split(x[:16], y[:16], local), local, **options).after(net)
    each = [fedavg(net, x[i : i + 8], y[i : i + 8], lr=0.1, epochs=2) for i in (0, 8)]
    for name, value in two.items():
        assert torch.allclose(value, (each[0][name] + each[1][name]) / 2, atol=1e-6)


@pytest.mark.parametrize("extra", [{}, {"epochs": 2, "lr": 0.1}, {"clip": 0.5}])
def test_clients_send_what_the_setting_says(extra):
    net, (x, y) = mlp(30, 3, width=60, depth=3, seed=0), numbers(8)
    quiet = Setting.of(**extra)

    def sent(setting, seed=0):
        generator = torch.Generator().manual_seed(seed)
        options = {"loss": nn.CrossEntropyLoss(), "generator": generator}
        return send(net, split(x, y, setting), setting, **options).update["0.weight"]

    plain = sent(quiet)
    noisy = sent(replace(quiet, sigma=0.01))
    assert float((noisy - plain).std()) == pytest.approx(0.01, rel=0.1)
    pruned = sent(replace(quiet, pruned=0.9))
    assert float((pruned == 0).double().mean()) >= 0.9
    assert len(sent(replace(quiet, precision="4-bit")).unique()) <= 15
    if "clip" in extra:  # each sample's gradient is bounded, and with it their mean
        assert float(plain.norm()) <= 0.5


def test_training_follows_what_was_sent():
    net, (x, y) = mlp(30, 3, width=20, depth=3, seed=0), numbers(8)
    options = {"loss": nn.CrossEntropyLoss(), "generator": torch.Generator()}
    gradient, moved = fedsgd(net, x, y)["0.weight"], mlp(30, 3, width=20, depth=3, seed=0)
    send(net, [(x, y)], Setting(), **options).apply(moved, lr=0.5)
    assert torch.allclose(moved[0].weight, net[0].weight - 0.5 * gradient, atol=1e-7)
    local = Setting.of(epochs=3, lr=0.1)
    moved = mlp(30, 3, width=20, depth=3, seed=0)
    send(net, [(x, y)], local, **options).apply(moved, lr=0.5)
    after = fedavg(net, x, y, lr=0.1, epochs=3)["0.weight"]
    assert torch.allclose(moved[0].weight, after, atol=1e-6)


def test_the_same_noise_in_other_units_is_the_same_trial():
    subject = Subject(narrow, PrivateData.of("numbers", *numbers()))
    by_sigma = Sweep(subject, Grid({"clip": [1.0], "sigma": [0.0125]}))
    by_multiplier = Sweep(subject, Grid({"clip": [1.0], "noise_multiplier": [0.1]}))
    others = Sweep(subject, Grid({"clip": [1.0], "noise_multiplier": [0.2]}))
    keys = [[t.key for t in plan.trials()] for plan in (by_sigma, by_multiplier, others)]
    assert keys[0] == keys[1]
    assert not set(keys[0]) & set(keys[2])
    data = PrivateData.of("numbers", *numbers(seed=1))
    elsewhere = Sweep(Subject(narrow, data), Grid({"clip": [1.0], "sigma": [0.0125]}))
    assert not set(keys[0]) & {t.key for t in elsewhere.trials()}


LISTS = {
    "samples": [4, 16],
    "clip": [None, 1.0],
    "noise_multiplier": [0, 1e-4, 1.0],
    "clients": [1, 3],
}


def table_of(made):
    """The report's first table, by setting and column."""
    columns = made.tables[0].columns
    return {row[0]: dict(zip(columns, row, strict=True)) for row in made.tables[0].rows}


def test_a_sweep_from_leak_to_no_leak(tmp_path):
    options = {"lists": LISTS, "repeats": 2, "workers": 0, "training": Training(rounds=6, seeds=2)}
    made = sweep(narrow, numbers(), out=tmp_path, **options)
    table = table_of(made)
    leaking = ["base: b = 4", "b = 16", "C = 1", "3 clients aggregated"]
    assert list(table) == [*leaking[:3], "C = 1, z = 0.0001", "C = 1, z = 1", leaking[3]]
    for name in leaking:
        assert table[name]["verdict"] == "whole batches exact"
        assert table[name]["exact, %"] == 100
        assert table[name]["best, dB"] > 60
    assert table["C = 1, z = 1"]["verdict"] == "nothing recovered"
    assert table["C = 1, z = 1"]["95 % interval"] == "0–84"  # of two batches
    assert table["base: b = 4"]["cost, points"] is None  # nothing is done to it
    assert table["3 clients aggregated"]["cost, points"] == "0"  # nor to their sum
    assert table["C = 1, z = 1"]["cost, points"] is not None
    whole = {
        row[0]: dict(zip(made.tables[2].columns, row, strict=True)) for row in made.tables[2].rows
    }
    noisy = whole["C = 1, z = 1"]
    assert (noisy["σ"], noisy["z"], noisy["ε"]) == (0.25, 1.0, pytest.approx(4.73, abs=0.01))
    assert "width" not in noisy  # it is the same everywhere
    noise = next(r for r in made.remarks if r.subject == "noise")
    assert noise.words.startswith("Whole batches exact at none")
    assert noise.words.endswith("nothing recovered at z = 1.")
    safe = next(r for r in made.remarks if r.subject == "C = 1, z = 1")
    assert safe.level is Level.PROTECTED
    assert "0 of 2 batches (95 % interval 0-84 %)" in safe.words
    assert "not a guarantee" in safe.words
    assert [drawing.title for drawing in made.drawings[:3]] == [
        "Leakage by batch size",
        "Best recovery by batch size",
        "Accuracy by batch size",
    ]
    assert len(made.drawings) == 12  # for each of four axes
    for drawing in made.drawings:
        assert drawing.svg.startswith("<svg")
        assert min(map(float, re.findall(r"scale\((0\.\d+) -", drawing.svg))) >= 0.085  # 8.5 points
        assert "<!-- z = 1 -->" in drawing.svg or "noise" not in drawing.title
    assert made.findings[0].outcome is spear.Outcome.EXACT
    assert made.outcome is spear.Outcome.EXACT

    assert made.headline.startswith("Safe from this attack: 1 of 6 settings (C = 1, z = 1).")
    assert "None of 2 batches leaked there, so at most 84 % do" in made.headline
    (held,) = made.advice.safe
    assert (held.measured.leaked, held.measured.batches) == (0, 2)
    assert (
        f"{held.measured.cost:.1f}" == f"{float(table[held.name]['cost, points'].split()[0]):.1f}"
    )
    assert next(case.name for case in made.advice.mitigations) == "C = 1, z = 1"
    assert made.advice.source.startswith("Measured by this sweep")

    made.save(tmp_path / "report.json")
    again = spear.load(tmp_path / "report.json")
    assert again.tables == made.tables
    assert made.redacted().findings[0].inputs is None


def test_a_sweep_goes_on_where_it_stopped(tmp_path):
    options = {"lists": {"samples": [2, 4]}, "repeats": 2, "workers": 0, "out": tmp_path}
    sweep(narrow, numbers(), training=Training(rounds=0), **options)
    path = tmp_path / "leakage.jsonl"
    lines = path.read_text().splitlines()
    assert len(lines) == 4
    path.write_text("\n".join(lines[:3]) + "\n")  # as if it had been killed
    sweep(narrow, numbers(), training=Training(rounds=0), **options)
    after = path.read_text().splitlines()
    assert after[:3] == lines[:3]
    assert Row.of_line(after[3]).result == Row.of_line(lines[3]).result


def full():
    """As many neurons as the batches below have samples: one update tells nothing."""
    return mlp(100, 5, width=32, depth=2)


def over_rounds(**options):
    data = PrivateData.of("numbers", *numbers(n=100, classes=5))
    grid = Grid({"samples": [32], "rounds": [1, 4]})
    return Sweep(Subject(full, data, **options), grid, repeats=1, training=Training(2, seeds=1))


def test_rounds_are_one_more_thing_to_vary(tmp_path):
    """More of them give away what one does not. Training is the same for all."""
    planned = over_rounds(server_lr=0.3)
    for part in planned.parts(tmp_path):
        list(part.run(work(planned), InlineEngine(), lambda _: None))
    made = sweep_report(planned, tmp_path)
    table = table_of(made)
    assert list(table) == ["base: b = 32", "4 rounds"]
    assert table["base: b = 32"]["verdict"] == "cannot tell"
    assert table["4 rounds"]["verdict"] == "whole batches exact"
    whole = made.tables[2]
    assert [row[whole.columns.index("rounds")] for row in whole.rows] == [1, 4]
    assert made.drawings[0].title == "Leakage by rounds of the same data"
    said = {remark.subject: remark.words for remark in made.remarks}
    assert said["rounds of the same data"] == "Cannot tell at 1; whole batches exact at 4."
    rows = RowFile(tmp_path, "leakage").rows()
    assert list(rows) == [trial.key for trial in over_rounds(server_lr=0.3).trials()]  # to resume
    assert [row.settings.get("rounds") for row in rows.values()] == [None, 4]
    assert [row.metrics["rounds_used"] for row in rows.values()] == [1, 4]
    assert len(RowFile(tmp_path, "utility").rows()) == 1


def test_trials_of_rounds_depend_on_what_moves_the_model():
    plans = over_rounds(server_lr=0.1), over_rounds(server_lr=0.2)
    (one, several), (same, other) = ([t.key for t in plan.trials()] for plan in plans)
    assert one == same
    assert several != other


def test_an_inner_layer_has_nothing_to_combine(tmp_path):
    """Its inputs change as the layers before it are trained: the first round alone is attacked."""
    lists = {"samples": [4], "rounds": [3]}
    options = {"repeats": 1, "workers": 0, "training": Training(rounds=0)}
    made = sweep(behind_tanh, numbers(), out=tmp_path, lists=lists, **options)
    words = next(r.words for r in made.remarks if r.subject == "b = 4, 3 rounds")
    assert words.startswith("Of 3 rounds only 1 could be used together.")


def behind_tanh():
    return nn.Sequential(
        nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 60), nn.ReLU(), nn.Linear(60, 3)
    )


def test_epsilon_covers_every_round_that_is_attacked():
    pytest.importorskip("opacus")
    data = PrivateData.of("numbers", *numbers())
    grid = Grid({"clip": [1.0], "noise_multiplier": [2.0], "rounds": [1, 4]})
    once, over = Sweep(Subject(narrow, data), grid).noises.values()
    assert once.sigma == over.sigma
    counted = noise_of(Setting(clip=1.0, noise_multiplier=2.0), Privacy(steps=4))
    assert once.epsilon < over.epsilon == counted.epsilon


def test_numbers_to_predict_are_judged_by_their_loss(tmp_path):
    x, _ = numbers()
    lists = {"samples": [4], "clip": [None, 0.01]}
    made = sweep(
        None, (x, x[:, 0] * 2.0), out=tmp_path, lists=lists, repeats=1, workers=0, training=QUICK
    )
    rows = list(table_of(made).values())
    assert rows[0]["verdict"] == "whole batches exact"
    assert rows[0]["held-out loss"] > 0
    assert made.cases[1].measured.cost > 0  # clipping that hard hardly moves the weights


def test_a_hidden_layer_is_judged_by_its_own_inputs():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 3)
            self.first, self.last = nn.Linear(2 * 6 * 6, 80), nn.Linear(80, 3)

        def forward(self, x):
            hidden = self.first(torch.tanh(self.conv(x)).flatten(1))
            return self.last(torch.relu(hidden))

    x = torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    subject = Subject(Net, PrivateData.of("pictures", x, torch.arange(60) % 3))
    done = attacked(subject, Setting(samples=4), 0, max_seconds=20)
    assert done.truth.shape == (4, 72)
    assert done.score.exact
    assert not done.pictures


def test_a_flat_colour_is_not_recognised():
    sky = torch.full((1, 300), 0.6, dtype=torch.float64)
    sky[0, ::10] += 0.1
    flat = sky.mean(1, keepdim=True).expand_as(sky)
    near = sky + 0.001
    assert float(psnr(flat, sky)) > 20
    assert not bool(is_clear(psnr(flat, sky), sky))
    assert bool(is_clear(psnr(near, sky), sky))


def test_utility_is_not_guessed_from_little_data(tmp_path):
    assert "could be held out" in too_small(30, Setting())
    assert "left to train on" in too_small(200, Setting(samples=8, clients=20))
    assert too_small(400, Setting()) == ""
    made = sweep(narrow, numbers(30), out=tmp_path, lists={"samples": [4]}, repeats=1, workers=0)
    assert table_of(made)["base: b = 4"]["accuracy, %"] is None
    assert any(r.subject == "utility" and "held out" in r.words for r in made.remarks)


def _row(
    setting,
    seed,
    outcome="FAILED",
    *,
    exact=False,
    recovered=0,
    recognised=0,
    certified=0,
    seconds=1.0,
):
    counts = {"recovered": recovered, "recognised": recognised, "certified": certified}
    metrics = {
        "samples": setting.total,
        "exact": exact,
        "certified_wrong": 0,
        "best": None,
        "reason": "why.",
    } | counts
    limits = {"max_seconds": 60}
    return Row(
        str(seed), "leakage", limits, seed, Status.DONE, outcome, metrics, seconds, {}, seconds
    )


def told(found):
    return [case_of(leakage, Setting(), True) for leakage in found]


def test_verdicts_and_exit_codes():
    none = Noise(0.0, None, None)
    quiet = [Leakage(Setting(), none, tuple(_row(Setting(), i) for i in range(3)), None)]
    assert exit_code(quiet) == 0
    assert headline(quiet, told(quiet)).startswith("Safe from this attack: 1 of 1 setting (")
    assert "at most 71 % do" in headline(quiet, told(quiet))
    hinted = Leakage(Setting(), none, (_row(Setting(), 0), _row(Setting(), 1, certified=1)), None)
    assert (
        hinted.verdict is LeakageLevel.RECOGNISABLE
    )  # certified counts as leaked, whatever its error
    assert hinted.leaked.count == 1
    assert exit_code([*quiet, hinted]) == 10
    whole = _row(Setting(), 2, exact=True, recovered=8, recognised=8)
    assert exit_code([*quiet, Leakage(Setting(), none, (whole,), None)]) == 20
    failed = Row("k", "leakage", {}, 0, Status.FAILED, None, {}, None, {}, 1.0, error="no")
    lost = Leakage(Setting(), none, (failed,), None)
    assert lost.verdict is LeakageLevel.UNMEASURED  # an error is no protection
    assert headline([lost], told([lost])) == "Nothing was measured."
    assert "1 of 2 settings are not measured yet" in headline([*quiet, lost], told([*quiet, lost]))
    slow = Leakage(Setting(), none, (_row(Setting(), 0, seconds=61.0),), None)
    assert slow.out_of_time == 1
    words = headline([slow], told([slow]))  # nothing came back, but nobody looked long enough
    assert words.startswith("Safe from this attack: none of 1 setting.")
    assert "time ran out, at base: b = 8: not known to be safe" in words


def test_what_the_attack_says_itself_is_not_called_safe():
    """A batch that `spear invert` would call APPROXIMATE or INCONCLUSIVE is nothing to rely on."""
    none, settings = Noise(0.0, None, None), [Setting(samples=b) for b in (8, 16, 32)]
    outcomes = (("FAILED", "APPROXIMATE"), ("INCONCLUSIVE", "FAILED"), ("FAILED", "FAILED"))
    _, undecided, held = found = [
        Leakage(setting, none, tuple(_row(setting, i, one) for i, one in enumerate(both)), None)
        for setting, both in zip(settings, outcomes, strict=True)
    ]
    assert [a.verdict.value for a in found] == ["blurred", "cannot tell", "nothing recovered"]
    assert [exit_code([a]) for a in found] == [10, 30, 0]
    assert exit_code(found) == 10
    cases = told(found)
    assert [case.outcome.name for case in cases] == ["APPROXIMATE", "INCONCLUSIVE", "FAILED"]
    assert [case.is_safe for case in cases] == [False, False, True]
    words = headline(found, cases)
    assert words.startswith("Safe from this attack: 1 of 3 settings (b = 32).")
    assert "the attack cannot tell, at b = 16: not known to be safe" in words
    assert words.endswith("Something blurred at 1.")
    assert exit_code([undecided, held]) == 30


def test_rows_of_a_table_have_the_names_of_their_columns(tmp_path):
    names = columns_of(["age,40,10", "sex=Female", "sex=Male", *(f"f{i}" for i in range(27))])
    options = {"repeats": 1, "workers": 0, "training": Training(rounds=0), "out": tmp_path / "o"}
    made = sweep(narrow, numbers(), lists={"samples": [4]}, columns=names, **options)
    assert [column.name for column in made.findings[0].columns[:2]] == ["age", "sex"]
    x, y = numbers()
    np.savez(tmp_path / "own.npz", inputs=x.numpy(), labels=y.numpy())
    own = Subject(narrow, str(tmp_path / "own.npz"), columns=names)
    assert own.samples().columns == names
    with pytest.raises(InvalidOption, match="each of the layer's 30 inputs"):
        Subject(narrow, str(tmp_path / "own.npz"), columns=names[:2]).samples()


def test_columns_and_the_size_of_the_run_are_told_on_the_command_line(tmp_path):
    x, y = numbers()
    np.savez(tmp_path / "own.npz", inputs=x.numpy(), labels=y.numpy())
    (tmp_path / "names.txt").write_text("\n".join(f"f{i}" for i in range(30)))
    data = ["--data", str(tmp_path / "own.npz"), "--columns", str(tmp_path / "names.txt")]
    run = ["--samples", "4,8", "--repeats", "1", "--training-rounds", "0", "--workers", "1"]
    out = ["--width", "60", "--max-seconds", "20", "--out", str(tmp_path / "o")]
    done = in_this_process("audit", *data, *run, *out)
    assert done.returncode == 20, done.stderr
    assert "2 attacks of at most 20 s each, and 0 training runs" in done.stdout
    kept = spear.load(tmp_path / "o" / "examples.json").findings
    assert len(kept[0].columns) == 30
    both = in_this_process("audit", *data, "--shape", "1x5x6")
    assert both.returncode == 2
    assert "--columns names the inputs of a table" in both.stderr


def test_where_leakage_stops_is_said_in_a_sentence():
    none = Noise(0.0, None, None)
    verdicts = {8: True, 16: True, 64: False, 128: False}
    settings = {b: Setting(samples=b) for b in verdicts}
    found = [
        Leakage(settings[b], none, (_row(settings[b], 0, exact=whole, recovered=b * whole),), None)
        for b, whole in verdicts.items()
    ]
    axis = Axis("samples", tuple((b, settings[b]) for b in (16, 8, 128, 64)))
    assert trend(axis, found) == "whole batches exact up to 16; nothing recovered from 64 on"


def test_a_map_where_two_things_are_crossed(tmp_path):
    lists = {"samples": [2, 4], "width": [30, 60]}
    options = {"repeats": 1, "workers": 0, "training": Training(rounds=0), "cross": True}
    made = sweep(wide, numbers(), out=tmp_path, lists=lists, **options)
    assert len(made.tables[0].rows) == 4
    assert made.drawings[0].title == "Leakage by batch size and width"


def test_data_of_users(tmp_path):
    x, y = numbers(20)
    np.savez(tmp_path / "good.npz", x=x.numpy(), y=y.numpy())
    assert load_data(str(tmp_path / "good.npz"), None, None).classes == 3
    np.savez(tmp_path / "nameless.npz", pixels=x.numpy())
    with pytest.raises(InvalidFile, match="'inputs' and 'labels'"):
        load_data(str(tmp_path / "nameless.npz"), None, None)
    shown = {"image_format": ImageFormat((1, 8, 8))}
    for inputs, labels, options, words in (
        (x, y[:5], {}, "a label for each of 20"),
        (x, y - 1, {}, "counted from 0"),
        (x * math.nan, y, {}, "finite"),
        (9 * torch.randn(20, 64), y, shown, "mean and std"),
    ):
        with pytest.raises(InvalidOption, match=words):
            PrivateData.of("d", inputs, labels, **options)
    with pytest.raises(InvalidOption, match="one of cifar10"):
        load_data("cifar11", None, None)
    photos = PrivateData.of("d", torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8), y[:4])
    assert float(photos.inputs.max()) <= 1
    assert photos.image_format == ImageFormat((3, 8, 8))


def test_a_trained_model_is_attacked_where_asked_for():
    data = PrivateData.of("d", *numbers())
    fresh, later = Subject(wide, data), Subject(wide, data, trained_steps=5)
    models = [s.attacked_model(60, seed=3)[0].weight for s in (fresh, later, later)]
    assert torch.equal(models[1], models[2])
    assert not torch.equal(models[0], models[1])
    assert attacked(later, Setting(samples=4), 3, max_seconds=20).score.exact
    lists = Grid({"samples": [4]})
    keys = [Sweep(s, lists, repeats=1).trials()[0].key for s in (fresh, later)]
    assert keys[0] != keys[1]


def test_what_does_not_go_together_is_told_before_anything_is_run(tmp_path):
    x, y = numbers()

    def check(model, data, lists):
        Sweep(Subject(model, PrivateData.of("d", *data)), Grid(lists)).check()

    for data, lists, words in (
        ((x, y), {"width": [30, 60]}, "no argument `width`"),
        ((x[:, :7], y), {"samples": [4]}, "does not take the data"),
        ((x, torch.arange(240) % 10), {"samples": [4]}, "3 outputs and labels up to 9"),
        ((x, y), {"samples": [4], "clients": [1, 240]}, "at least 960 samples"),
    ):
        with pytest.raises(InvalidOption, match=words):
            check(narrow, data, lists)
    with pytest.raises(NoAttackableLayer):
        check(lambda: nn.Linear(30, 3), (x, y), {"samples": [4]})
    with pytest.raises(InvalidOption, match="workers=0"):
        sweep(lambda: nn.Linear(30, 3) and narrow(), (x, y), out=tmp_path, lists={"samples": [4]})


def test_resolved_noise_is_asked_for():
    net, (x, y) = narrow(), numbers(8)
    options = {"loss": nn.CrossEntropyLoss(), "generator": torch.Generator()}
    setting = Setting(clip=1.0, noise_multiplier=0.8)
    with pytest.raises(InvalidOption, match="as sigma"):
        send(net, [(x, y)], setting, **options)
    assert resolved(setting, 0.1) == Setting(clip=1.0, sigma=0.1)


MODULE = """
from spear.federated import mlp

def net(width=60):
    return mlp(30, 3, width=width, depth=3)
"""


def test_the_command(tmp_path):
    x, y = numbers()
    np.savez(tmp_path / "data.npz", inputs=x.numpy(), labels=y.numpy())
    (tmp_path / "mynet.py").write_text(MODULE)
    command = ["audit", "--model", "mynet:net", "--data", "data.npz", "--workers", "1"]
    command += ["-b", "4", "--clip", "none,1", "--sigma", "0,1.0", "--repeats", "2"]
    command += ["--training-rounds", "0"]
    first = in_this_process(*command, "--json", "audit.json", "--redact", cwd=tmp_path)
    assert first.returncode == 20, first.stderr
    assert "wrote spear-audit/report.html" in first.stdout
    made = spear.load(tmp_path / "audit.json")
    assert made.is_redacted
    assert all(finding.inputs is None for finding in made.findings)
    assert made.settings["command"].startswith("spear audit --model mynet:net")
    assert not (tmp_path / "spear-audit" / "examples.json").exists()
    drawn = in_this_process(
        *command, "--only-draw", "--quiet", "--json", "drawn.json", cwd=tmp_path
    )
    assert drawn.returncode == 20
    assert drawn.stdout.startswith("Safe from this attack: 1 of 3 settings (σ = 1).")
    assert spear.load(tmp_path / "drawn.json").tables == made.tables
    rounds = in_this_process(*command, "--rounds", "3,0", cwd=tmp_path)
    assert rounds.returncode == 2
    assert "expected --rounds to be a whole number >= 1, got 0" in rounds.stderr
    bad = in_this_process(*command, "--width", "60,wide", cwd=tmp_path)
    assert bad.returncode == 2
    assert "expected --width to be numbers such as 8,16,32" in bad.stderr
    assert "Traceback" not in bad.stderr


def ends_in(tail, outputs):
    torch.manual_seed(0)
    return module(
        lambda self, x: tail(self.head(torch.relu(self.fc(x)))),
        fc=nn.Linear(30, 60),
        head=nn.Linear(60, outputs),
    )


@pytest.mark.parametrize(
    ("tail", "outputs", "loss", "targets"),
    [
        (lambda o: o.squeeze(), 1, None, 2),
        (lambda o: o.view(-1), 1, "mse", 2),
        (lambda o: torch.sigmoid(o)[:, 0], 1, None, 2),
        (lambda o: o.squeeze(1), 1, None, None),
        (lambda o: {"out": o, "probs": o.softmax(1)}, 3, None, 3),
        (lambda o: o, 3, "mse", 3),
        (lambda o: o, 3, "bce", 3),
        (lambda o: o.softmax(1), 3, "torch.nn:NLLLoss", 3),
    ],
)
def test_whatever_the_model_returns_is_attacked_and_trained(tail, outputs, loss, targets):
    x, y = numbers(classes=targets or 2)
    y = y if targets else x[:, 0].clone()
    subject = Subject(lambda: ends_in(tail, outputs), PrivateData("numbers", x, y), loss)
    for setting in (Setting(samples=4), Setting(samples=1), Setting(samples=4, clip=1.0)):
        found = attacked(subject, setting, 0, max_seconds=5)
        assert float(found.score.psnr.min()) > 60, setting
    measured = trained(subject, Setting(samples=8), 0, Training(rounds=60, seeds=1))
    better = measured.metrics["quality"] < 1 if targets is None else None
    assert better or measured.metrics["quality"] > 1 / targets


def test_probabilities_are_trained_as_such():
    x, y = numbers(classes=2)
    subject = Subject(lambda: ends_in(torch.sigmoid, 1), PrivateData("numbers", x, y))
    fitted = subject.fitted(subject.build(None, 0))
    assert isinstance(fitted.told, nn.BCELoss)
    outputs = torch.tensor([[0.4], [0.6]])
    assert fitted.predicted(outputs, 2).tolist() == [0, 1]
