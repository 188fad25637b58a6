"""Flower: strategies, mods and messages of the real thing, in one process and in its simulation."""

import copy
import json
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="needs the flower extra")
pytest.importorskip("jinja2", reason="needs the cli extra")

from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg, Result

import spear
from spear.errors import InvalidOption, InvalidUpdate
from spear.federated import fedavg, fedsgd
from spear.integrations import examiner
from spear.integrations.examiner import Examined
from spear.integrations.flower import Audited, what_leaves
from spear.integrations.running_report import headline
from spear.inversion import Outcome
from spear.judge import Cause
from spear.report import ImageFormat, Level
from spear.update.readings import read
from support import reports
from support.flower_federation import (
    BATCH,
    CLASSES,
    NODES,
    PIXELS,
    WIDTH,
    InProcess,
    client_app,
    differences,
    gradients,
    lone,
    many,
    narrow,
    net,
    private,
    replaced,
    run,
    truth,
    weights,
)

ONE = NODES[:1]  # where more clients would only repeat what one shows
ROOT = Path(__file__).resolve().parents[2]


def audited(strategy=None, **options):
    options = {"model": net(seed=9), "report": None, "truth": truth, **options}
    return Audited(strategy or lone(), **options)


def ran(strategy, *args, **options):
    run(strategy, *args, **options)
    return strategy


def outcomes(strategy):
    return [finding.outcome.name for finding in strategy.report.findings]


def subjects(strategy, level=None):
    return [r.subject for r in strategy.report.remarks if level in (None, r.level)]


def assert_all_exact(strategy, count=3):
    findings = strategy.report.findings
    assert outcomes(strategy) == ["EXACT"] * count
    assert all(min(finding.truth.psnr) >= 60 for finding in findings)
    assert all(finding.recovered == len(finding.truth.names) for finding in findings)


def same(one, other):
    """Are two results of a federation equal, bit for bit?"""
    return all(one.arrays[name] == other.arrays[name] for name in one.arrays)


def test_every_reply_of_every_round_is_audited_and_listed(tmp_path):
    page, file = tmp_path / "spear-report.html", tmp_path / "report.json"
    strategy = ran(audited(report=page, json=file, image_format=ImageFormat((3, 8, 8))), rounds=2)
    assert_all_exact(strategy, 6)
    report = spear.load(file)
    assert report.kind == "flower"
    assert report.headline == "Of 6 audited replies, 6 gave away every sample, exactly and proved."
    expected = {f"round {r}, client {node}" for r in (1, 2) for node in NODES}
    assert {finding.name for finding in report.findings} == expected
    rows = [dict(zip(report.tables[0].columns, row, strict=True)) for row in report.tables[0].rows]
    assert {f"round {row['round']}, client {row['client']}" for row in rows} == expected
    seen = ("outcome", "certified", "samples seen", "learning rate")
    assert {tuple(row[name] for name in seen) for row in rows} == {("exact", BATCH, BATCH, 0.05)}
    assert all("read from the train config" in finding.notes[0] for finding in report.findings)
    assert page.stat().st_size > 0
    assert page.stat().st_mode & 0o077 == 0  # it holds the clients' data


def numpy_seeded(strategy):
    """The result of two rounds with the noise of DP wrappers fixed."""
    np.random.seed(0)
    return run(strategy, rounds=2)[0]


STRATEGIES = {
    "FedAvg": FedAvg,
    "FedAvgM": lambda: flower.FedAvgM(server_learning_rate=0.5),
    "FedAdam": lambda: flower.FedAdam(eta=0.01),
    "FedYogi": flower.FedYogi,
    "FedProx": lambda: flower.FedProx(proximal_mu=0.1),
    "FedMedian": flower.FedMedian,
    "Krum": lambda: flower.Krum(num_malicious_nodes=0),
    "server-side DP": lambda: flower.DifferentialPrivacyServerSideFixedClipping(
        FedAvg(), noise_multiplier=0.1, clipping_norm=0.5, num_sampled_clients=3
    ),
    "adaptive server-side DP": lambda: flower.DifferentialPrivacyServerSideAdaptiveClipping(
        FedAvg(), noise_multiplier=0.1, num_sampled_clients=3
    ),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_any_strategy_does_what_it_did_and_its_replies_are_audited(name):
    make = STRATEGIES[name]
    plain = numpy_seeded(make())
    strategy = audited(make(), rounds=[1])  # how well it goes later is the strategy's affair
    assert same(plain, numpy_seeded(strategy))
    assert_all_exact(strategy)
    if "server-side" in name:  # its noise comes too late
        remark = next(r for r in strategy.report.remarks if "ServerSide" in r.subject)
        assert remark.level is Level.EXPOSED
        assert "not from the server" in remark.words


def test_the_learning_rate_that_qfedavg_was_told():
    plain = run(flower.QFedAvg(client_learning_rate=0.05), lr=None)[0]
    strategy = audited(flower.QFedAvg(client_learning_rate=0.05))
    assert same(plain, run(strategy, lr=None)[0])
    assert_all_exact(strategy)
    assert strategy.report.findings[0].notes == ("lr = 0.05, read from the strategy",)


def test_replies_may_come_as_any_iterable():
    strategy = audited()
    grid = InProcess(client_app())
    start = ArrayRecord(net().state_dict())
    messages = strategy.configure_train(1, start, ConfigRecord({"lr": 0.05}), grid)
    replies = (reply for reply in grid.send_and_receive(messages))
    arrays, metrics = strategy.aggregate_train(1, replies)
    assert arrays.keys() == start.keys()
    assert metrics["train_loss"] == pytest.approx(1.0)
    assert_all_exact(strategy)


@pytest.mark.parametrize(
    ("make", "mod", "bound"),
    [
        (
            flower.DifferentialPrivacyClientSideFixedClipping,
            fixedclipping_mod,
            {"clipping_norm": 0.01},
        ),
        (
            flower.DifferentialPrivacyClientSideAdaptiveClipping,
            adaptiveclipping_mod,
            {"initial_clipping_norm": 0.01},
        ),
    ],
)
def test_clipping_on_the_client_hides_nothing(make, mod, bound):
    strategy = ran(
        audited(make(FedAvg(), noise_multiplier=0.1, num_sampled_clients=3, **bound)),
        client_app(mods=[mod]),
    )
    assert_all_exact(strategy)
    assert any("ClientSide" in subject for subject in subjects(strategy, Level.EXPOSED))


LOCAL_DP = LocalDpMod(clipping_norm=1.0, sensitivity=1e-3, epsilon=2.0, delta=1e-5)


def test_noise_of_the_client_is_in_what_is_judged():
    strategy = ran(audited(), client_app(mods=[LOCAL_DP]))
    for finding in strategy.report.findings:
        assert finding.outcome in (Outcome.FAILED, Outcome.INCONCLUSIVE, Outcome.APPROXIMATE)
        assert not any(finding.certified)


class Custom(FedAvg):
    """Somebody's strategy with a loop and state of its own, as Flower's advanced example has."""

    best = 0

    def set_save_path(self, path):
        self.path = path

    def start(self, grid, initial_arrays, num_rounds=3, timeout=3600, train_config=None):
        result = Result()
        arrays = initial_arrays
        for current in range(1, num_rounds + 1):
            replies = grid.send_and_receive(
                self.configure_train(current, arrays, train_config, grid), timeout=timeout
            )
            arrays, metrics = self.aggregate_train(current, replies)
            self.best = current
            result.arrays = arrays
            result.train_metrics_clientapp[current] = metrics
        return result

    def configure_train(self, server_round, arrays, config, grid):
        config["lr"] *= 0.5  # Flower's guide decays it so
        return super().configure_train(server_round, arrays, config, grid)


def test_a_loop_of_ones_own_is_run_and_audited():
    plain = run(Custom(), rounds=2)[0]
    own = Custom()
    strategy = audited(own)
    strategy.set_save_path("models")
    strategy.fraction_evaluate = 0.5
    assert same(plain, run(strategy, rounds=2)[0])
    assert_all_exact(strategy, 6)
    assert (own.path, own.fraction_evaluate, own.best, strategy.best) == ("models", 0.5, 2, 2)
    assert "configure_train" not in vars(own)  # left as it was
    rates = [row[6] for row in strategy.report.tables[0].rows]
    assert rates == [0.025] * 3 + [0.0125] * 3


def test_inside_another_wrapper_it_says_so():
    inner = audited()
    run(
        flower.DifferentialPrivacyServerSideFixedClipping(
            inner, noise_multiplier=0.1, clipping_norm=0.5, num_sampled_clients=3
        )
    )
    (said,) = [r for r in inner.report.remarks if r.subject.startswith("Audited is inside")]
    assert "outermost" in said.words
    assert inner.report.remarks[0] == said
    assert said.level is Level.EXPOSED
    assert not any("as they arrived" in remark.words for remark in inner.report.remarks)
    assert len(inner.report.findings) == 3
    assert not any(s.startswith("Audited is") for s in subjects(audited()))


@pytest.mark.parametrize(("reply", "sends"), [(differences, "difference"), (gradients, "gradient")])
def test_differences_and_gradients(reply, sends):
    strategy = ran(audited(sends=sends), client_app(reply), nodes=ONE)
    assert_all_exact(strategy, 1)
    taken_for_weights = ran(audited(), client_app(reply), nodes=ONE)
    weights_taken_for_it = ran(audited(sends=sends), nodes=ONE)
    assert_called_wrong(
        taken_for_weights, "this was given as weights, but it is far from the weights"
    )
    assert_called_wrong(weights_taken_for_it, "but it is close to the weights: read as weights")


def assert_called_wrong(strategy, words):
    """What clients send is recognised, said first, and attacked as what it is."""
    assert_all_exact(strategy, 1)
    assert subjects(strategy, Level.EXPOSED) == ["sends= looks wrong"]
    assert words in strategy.report.findings[0].reason.split(";")[0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"epochs": 1}, BATCH),
        ({"epochs": 1, "batch_size": BATCH}, BATCH),
        ({"epochs": 1, "aggregate": True}, 3 * BATCH),
        ({}, None),  # nobody said that the step was on all of them
        ({"epochs": 2}, None),
        ({"epochs": 1, "batch_size": 4}, None),
        ({"sends": "gradient"}, None),  # it may be that of a part
    ],
)
def test_the_number_of_examples_is_told_where_it_is_that_of_the_update(options, told, monkeypatch):
    seen = []

    def only_look(view, **given):
        seen.append(view.samples)
        raise InvalidUpdate(["enough was seen"])

    monkeypatch.setattr(examiner, "invert", only_look)
    run(audited(**options))
    assert set(seen) == {told}


def test_findings_are_ranked_by_what_they_mean_for_the_client():
    found = {outcome: reports.finding(outcome=outcome) for outcome in Outcome}
    examined = [Examined(found[outcome], spear.Protocol()) for outcome in Outcome]
    assert headline(examined, "reply") == (
        "Of 5 audited replies, 1 gave away every sample, exactly and proved; 1 gave away some "
        "samples exactly; 1 gave away approximate "
        "samples; 1 gave no answer, one way or the other; 1 gave away nothing that this attack can "
        "find."
    )


def test_weights_under_much_noise_are_still_weights():
    before = net().state_dict()
    with torch.random.fork_rng():
        torch.manual_seed(1)  # another than the model's own
        noisy = {name: value + torch.randn_like(value) for name, value in before.items()}
    told = spear.Protocol(sends="weights", lr=0.1)
    assert read(before, noisy, told).mistake == ""
    assert read(before, noisy, spear.Protocol(sends="difference")).mistake == ""


def listed(arrays):
    return [value.numpy() for value in arrays.values()]


@pytest.mark.parametrize(
    ("start", "sent", "dtype"),
    [
        (dict, listed, torch.float32),
        (listed, listed, torch.float32),
        (dict, lambda after: {f"_module.{k}": v for k, v in after.items()}, torch.float32),
        (dict, lambda after: {k: after[k] for k in ("1.weight", "1.bias")}, torch.float32),
        (dict, dict, torch.float64),
    ],
    ids=["a list", "a list from the start", "other names", "one layer", "doubles"],
)
def test_arrays_under_other_names(start, sent, dtype):
    def reply(model, inputs, labels, lr):
        return ArrayRecord(sent(fedavg(model.to(dtype), inputs.to(dtype), labels, lr=lr)))

    arrays = ArrayRecord(start(net().state_dict()))
    assert_all_exact(ran(audited(), client_app(reply), arrays=arrays, nodes=ONE), 1)


@pytest.mark.parametrize(
    ("options", "config", "metrics", "note"),
    [
        ({}, {"lr": None}, {"lr": 0.05}, "lr = 0.05, read from the reply's metrics"),
        ({"lr": 0.05}, {"lr": None}, {}, None),
        ({}, {"lr": None}, {}, "the learning rate is not known: inputs do not depend on it"),
        ({"lr": 0.05}, {"lr": 0.05}, {"lr": 0.1}, "metrics: lr = 0.1; used was lr = 0.05"),
        ({"epochs": 1, "batch_size": 32}, {}, {}, "lr = 0.05"),  # one batch holds all
        ({}, {"local-epochs": 1, "batch-size": 5}, {}, "epochs = 1, read from the train config"),
        ({"model": None}, {}, {}, "No model was given"),
        ({"model": net}, {}, {}, "lr = 0.05"),
        ({"layer": "1", "momentum": 0.9, "epochs": 1}, {}, {}, "lr = 0.05"),
    ],
)
def test_what_is_known_of_the_clients(options, config, metrics, note):
    strategy = ran(
        audited(**options), client_app(metrics=metrics), nodes=ONE, **{"lr": 0.05, **config}
    )
    assert_all_exact(strategy, 1)
    notes = strategy.report.findings[0].notes
    assert not notes if note is None else any(note in said for said in notes)


def test_several_local_epochs_are_repeated():
    def five(model, inputs, labels, lr):
        return ArrayRecord(fedavg(model, inputs, labels, lr=lr, epochs=5))

    strategy = ran(audited(epochs=5), client_app(five), nodes=ONE)
    for finding in strategy.report.findings:
        assert finding.outcome not in (Outcome.FAILED, Outcome.INCONCLUSIVE)
        assert min(finding.truth.psnr) >= 60
    assert "Several local steps" in subjects(strategy)


def test_adam_is_not_attacked_and_told():
    strategy = ran(audited(optimizer="adam"))
    assert all(f.reason.startswith("clients train with adam") for f in strategy.report.findings)
    assert strategy.report.headline.startswith("Nothing could be attacked: 3 replies")
    assert {row[2:4] for row in strategy.report.tables[0].rows} == {("not attacked", None)}


def test_an_optimiser_that_nobody_told_of_is_suspected():
    def signs(model, inputs, labels, lr):  # the first step of Adam
        step = {name: lr * torch.sign(g) for name, g in fedsgd(model, inputs, labels).items()}
        return ArrayRecord({name: value - step[name] for name, value in model.state_dict().items()})

    strategy = ran(audited(max_seconds=0.2), client_app(signs), lr=0.001, nodes=ONE)
    for finding in strategy.report.findings:
        assert (finding.outcome, finding.cause) == (Outcome.INCONCLUSIVE, Cause.OPTIMISER)
        assert finding.reason.startswith("the update looks like one of Adam")
        said = " ".join(finding.notes)
        assert "weight_decay=, momentum=, epochs=, local_batch_size= if clients use them" in said
        assert 'epochs=context.run_config["local-epochs"]' in said
        assert "the client reports 5 samples, but the update looks like one of" in said


def test_secure_aggregation_is_one_batch():
    strategy = audited(aggregate=True)
    plain = run(FedAvg(), rounds=2)[0]
    assert same(plain, run(strategy, rounds=2)[0])
    first, second = strategy.report.findings
    assert_all_exact(strategy, 2)
    assert first.name == "round 1, all 3 together"
    assert first.batch_size == second.batch_size == 3 * BATCH
    assert "Secure aggregation" in subjects(strategy)


def narrowly(strategy, *, rounds=5, nodes=ONE, held=many, **options):
    """Run a federation whose layer is too narrow for any one round; the strategy."""
    app = client_app(model=narrow, held=held)
    return ran(strategy, app, rounds=rounds, nodes=nodes, model=narrow, lr=0.5, **options)


def narrow_audit(strategy=None, held=many, **options):
    def known(server_round, reply):
        return held(reply.metadata.src_node_id)

    return audited(strategy, model=narrow(9), truth=known, **options)


def test_several_rounds_of_a_client_are_audited_together(tmp_path):
    page, file = tmp_path / "report.html", tmp_path / "report.json"
    strategy = narrowly(narrow_audit(report=page, json=file))
    report = spear.load(file)
    together, *alone = report.findings
    assert together.outcome is Outcome.EXACT, together.reason
    assert min(together.truth.psnr) >= 60
    assert together.recovered == WIDTH
    words = f"4 rounds together: {WIDTH} of {WIDTH}; best single round: 0 of {WIDTH}"
    assert together.name == f"client {NODES[0]}, rounds 1 to 4 together"
    assert together.notes[0] == words
    assert {finding.outcome for finding in alone} == {Outcome.INCONCLUSIVE}
    assert len(alone) == 5
    assert report.headline.startswith(
        "Rounds together gave away more than single replies: of 1 client, 1 gave away every sample, "
        f"exactly and proved ({words})."
    )
    growth = dict(zip(report.tables[0].columns, report.tables[0].rows[0], strict=True))
    assert growth["one round (the best)"] == 0
    assert growth["4 rounds"] == growth["proved"] == WIDTH
    assert "rounds together" in page.read_text()
    (said,) = [r.words for r in report.remarks if r.subject.startswith("What is kept")]
    assert "last 20 rounds" in said
    assert "never in a file" in said
    assert strategy._examiner.several.history.used == 0  # deleted at the end


def test_without_a_history_nothing_is_kept():
    strategy = narrowly(narrow_audit(history=1))
    assert strategy._examiner.several is None
    assert len(strategy.report.findings) == 5
    (said,) = [r.words for r in strategy.report.remarks if r.subject.startswith("What is kept")]
    assert said.startswith("Nothing (history=1)")


def test_secure_aggregation_is_undone_by_several_rounds():
    def few(node):
        return many(node, WIDTH // 3)

    strategy = narrowly(narrow_audit(aggregate=True, held=few), nodes=NODES, held=few)
    together, *_ = strategy.report.findings
    assert together.name == "all 3 clients, rounds 1 to 4 together"
    assert (together.outcome, together.recovered) == (Outcome.EXACT, WIDTH), together.reason
    assert min(together.truth.psnr) >= 60
    assert "of 1 cohort, 1 gave away every sample" in strategy.report.headline


def test_rounds_that_are_too_few_are_audited_at_the_end():
    strategy = narrowly(narrow_audit(), rounds=2)
    together, *_ = strategy.report.findings
    assert together.name.endswith("rounds 1 to 2 together")
    assert "2 rounds are too few" in together.reason
    assert strategy.report.headline.endswith("Up to 2 rounds together gave away no more.")


def test_a_run_that_fails_keeps_nothing_either():
    class Failing(FedAvg):
        def aggregate_train(self, server_round, replies):
            if server_round == 3:
                held.append(strategy._examiner.several.history.used)
                raise RuntimeError("the server is out of luck")
            return super().aggregate_train(server_round, replies)

    held: list[float] = []
    one = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}
    strategy = narrow_audit(Failing(**one))
    with pytest.raises(RuntimeError, match="out of luck"):
        narrowly(strategy)
    assert held[0] > 0
    assert strategy._examiner.several.history.used == 0


def test_rounds_for_which_there_is_no_room_are_told():
    strategy = narrowly(narrow_audit(history_megabytes=1e-3), rounds=2)
    assert "Some rounds were not kept" in subjects(strategy)
    assert len(strategy.report.findings) == 2


def test_rounds_behind_trained_layers_are_not_combined_and_told():
    def inner():
        torch.manual_seed(0)
        before = (nn.Flatten(), nn.Linear(PIXELS, 30), nn.Tanh())
        return nn.Sequential(*before, nn.Linear(30, 4), nn.ReLU(), nn.Linear(4, CLASSES))

    strategy = ran(
        audited(model=inner()), client_app(model=inner), model=inner, rounds=3, nodes=ONE
    )
    (said,) = [r.words for r in strategy.report.remarks if "not combined" in r.subject]
    assert "layers before it were trained meanwhile" in said
    assert len(strategy.report.findings) == 3


def test_an_attack_on_several_rounds_that_breaks_does_not_end_the_run(monkeypatch):
    def broken(view, **options):
        if view.rounds is not None:
            raise ZeroDivisionError("a bug of ours")
        return spear.invert(view, **options)

    monkeypatch.setattr(examiner, "invert", broken)
    strategy = narrowly(narrow_audit(), rounds=3)
    together, *alone = strategy.report.findings
    assert together.reason == "not attacked: ZeroDivisionError: a bug of ours"
    assert len(alone) == 3


KILLED = """
import os, signal, sys
from support.flower_federation import *
from spear.integrations.flower import Audited
strategy = Audited(lone(), model=narrow(9), report="report.html", history=20)

def reply(model, inputs, labels, lr):
    if strategy._examiner.several.history.count(str(NODES[0])) == 2:
        opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        print(*opened, sep="\\n", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return weights(model, inputs, labels, lr)

app = client_app(reply, model=narrow, held=many)
run(strategy, app, rounds=4, lr=0.5, model=narrow, nodes=NODES[:1])
"""


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_killed_run_leaves_no_file_but_its_report(tmp_path):
    for name in ("run", "temporary"):
        (tmp_path / name).mkdir()
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "temporary")}
    told = subprocess.run(
        [sys.executable, "-c", KILLED],
        cwd=tmp_path / "run",
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert told.returncode == -9, told.stderr[-2000:]
    assert [str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*") if f.is_file()] == [
        "run/report.html"
    ]
    assert not [name for name in told.stdout.split() if name.startswith(str(tmp_path))]
    assert not [name for name in told.stdout.split() if "deleted" in name]


def test_secure_aggregation_without_those_that_failed():
    def spoil(reply):
        if reply.metadata.src_node_id == NODES[0]:
            reply.content["arrays"] = ArrayRecord({"x": Array(torch.zeros(2).numpy())})
        return reply

    strategy = ran(audited(Lenient(), aggregate=True), spoil=spoil)
    (finding,) = strategy.report.findings
    assert (finding.outcome.name, finding.batch_size) == ("EXACT", 2 * BATCH)
    assert any(f"client {NODES[0]} is left out" in note for note in finding.notes)


class Lenient(FedAvg):
    """Somebody's strategy that takes what it can."""

    def aggregate_train(self, server_round, replies):
        names = set(net().state_dict())
        return super().aggregate_train(
            server_round,
            [r for r in replies if r.has_error() or set(r.content.get("arrays", {})) == names],
        )


def without_arrays(reply):
    del reply.content["arrays"]


def masked(reply):
    reply.content["arrays"] = ArrayRecord()
    reply.content["secaggplus_configs"] = ConfigRecord({"masked_params": [b"0101"]})


def not_a_number(reply):
    arrays = reply.content["arrays"].to_torch_state_dict()
    for name in ("1.weight", "1.bias", "5.bias"):
        arrays[name].view(-1)[0] = torch.nan
    reply.content["arrays"] = ArrayRecord(arrays)


def another_shape(reply):
    reply.content["arrays"]["1.weight"] = Array(torch.zeros(3, 3).numpy())


def cut_off(reply):
    array = reply.content["arrays"]["1.weight"]
    reply.content["arrays"]["1.weight"] = replaced(array, data=array.data[:-9])


def other_names(reply):
    reply.content["arrays"] = ArrayRecord({"conv.weight": Array(torch.zeros(2).numpy())})


def untrained(reply):
    reply.content["arrays"] = ArrayRecord(net().state_dict())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_arrays, "the message carries no arrays, only 'metrics'"),
        (masked, "masked by SecAgg+"),
        (not_a_number, "'1.weight' has NaN or infinite entries, and so have 2 more arrays"),
        (another_shape, "'1.weight' has shape (3, 3), the model's has (120, 192)"),
        (cut_off, "the array '1.weight' cannot be read"),
        (other_names, "the model has no 'conv.weight'"),
        (untrained, "equals the model"),
    ],
)
def test_a_bad_reply_is_told_and_training_goes_on(change, reason):
    class Robust(FedAvg):
        def aggregate_train(self, server_round, replies):
            good = [r for r in replies if r.metadata.src_node_id != NODES[1]]
            return super().aggregate_train(server_round, good)

    def spoil(reply):
        if reply.metadata.src_node_id == NODES[1]:
            change(reply)
        return reply

    strategy = audited(Robust())
    result, _ = run(strategy, spoil=spoil, nodes=NODES[:2])
    assert result.arrays is not None
    by_client = {f.name: f for f in strategy.report.findings}
    assert len(by_client) == 2
    bad = by_client.pop(f"round 1, client {NODES[1]}")
    assert bad.reason.startswith("not attacked: ")
    assert reason in bad.reason
    assert [f.outcome.name for f in by_client.values()] == ["EXACT"]
    assert strategy.report.headline == (
        "Of 1 audited reply, 1 gave away every sample, exactly and proved; 1 more could not be "
        "attacked."
    )
    assert ("SecAgg+" in subjects(strategy)) == (change is masked)


def test_a_client_that_crashes():
    def crash(model, inputs, labels, lr):
        if torch.equal(inputs, private(NODES[0])[0]):
            said = "\x1b[36mray::train()\x1b[39m out of memory\n  at line 3"
            raise RuntimeError(said + "x" * 999)
        return ArrayRecord(fedavg(model, inputs, labels, lr=lr))

    for redact, said in ((False, ": ray::train() out of memory"), (True, "")):
        strategy = audited(redact=redact)
        result, _ = run(strategy, client_app(crash))
        assert result.arrays is not None
        assert sorted(outcomes(strategy)) == ["EXACT", "EXACT", "INCONCLUSIVE"]
        (lost,) = [f for f in strategy.report.findings if f.outcome is Outcome.INCONCLUSIVE]
        assert lost.reason == f"not attacked: the client answered with an error{said}"
        assert lost.cause is Cause.NOT_ATTACKED


def test_the_report_is_on_disk_while_the_run_goes_on(tmp_path):
    file = tmp_path / "report.json"
    seen = []

    def look_at_the_disk(server_round, reply):
        seen.append(len(json.loads(file.read_text())["findings"]))
        raise OSError("no truth here")

    strategy = ran(audited(json=file, truth=look_at_the_disk), rounds=2)
    # Writing may take a tenth of the time only, but a round's end always writes.
    assert seen[0] == 0
    assert seen[3] == 3
    assert sorted(seen) == seen
    assert len(spear.load(file).findings) == 6
    assert "truth= failed (OSError: no truth here)" in strategy.report.findings[0].notes


def test_a_disk_that_fails_does_not_end_the_run(tmp_path):
    folder = tmp_path / "reports"
    strategy = audited(json=folder / "report.json")
    folder.write_text("no folder any more")
    result, _ = run(strategy)
    assert result.arrays is not None
    assert_all_exact(strategy)


def test_an_interrupted_run_ends_with_its_report(tmp_path):
    file = tmp_path / "report.json"
    calls = []

    def interrupted(outputs, targets):
        calls.append(0)
        raise KeyboardInterrupt

    strategy = audited(json=file, loss=interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(strategy)
    assert len(calls) == 1
    assert spear.load(file).kind == "flower"
    assert "configure_train" not in vars(strategy.strategy)


@pytest.mark.parametrize(
    ("which", "audited_rounds"), [({"every": 2}, {1, 3}), ({"rounds": [2]}, {2})]
)
def test_rounds_that_are_not_audited_are_left_alone(which, audited_rounds):
    strategy = ran(audited(**which), rounds=3, nodes=ONE)
    assert {row[0] for row in strategy.report.tables[0].rows} == audited_rounds


def test_redacted_reports_hold_no_data(tmp_path):
    file = tmp_path / "report.json"
    strategy = ran(audited(json=file, redact=True))
    report = spear.load(file)
    assert report.is_redacted
    assert all(f.inputs is None and f.truth.inputs is None for f in report.findings)
    assert outcomes(strategy) == ["EXACT"] * 3
    assert "base64" not in file.read_text()


def test_long_runs_keep_the_data_of_some_findings_only():
    strategy = ran(audited(keep=2), rounds=2)
    assert [f.inputs is not None for f in strategy.report.findings] == [True] * 2 + [False] * 4
    assert outcomes(strategy) == ["EXACT"] * 6
    assert "keep=" in strategy.report.findings[2].notes[-1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": nn.Linear(4, 2)}, "model= does not fit the federation's arrays"),
        ({"model": nn.Sequential(nn.Flatten(), nn.Linear(9, 120))}, "the model has no '3.weight'"),
    ],
)
def test_another_model_is_told_before_anything_is_sent(options, words, tmp_path):
    strategy = audited(**options, report=tmp_path / "r.html", json=tmp_path / "r.json")
    grid = InProcess(client_app())
    with pytest.raises(InvalidOption, match=words):
        strategy.start(grid, ArrayRecord(net().state_dict()))
    assert grid.sent == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, "lr > 0"),
        ({"sends": "updates"}, "expected sends to be one of gradient, weights, difference"),
        ({"layer": "7"}, "its linear layers: '1', '3', '5'"),
        ({"max_seconds": 0}, "max_seconds > 0"),
        ({"every": 0}, "every >= 1"),
        ({"keep": -1}, "keep >= 0"),
        ({"history": 0}, "expected a history of 1 round or more, got 0"),
        ({"history_megabytes": 0}, "expected a history of > 0 megabytes"),
        ({"learning_rate": 0.1}, "unknown option 'learning_rate'.* model, report, .* lr, epochs"),
        ({"optimizer": torch.optim.Adam}, "expected optimizer to be a name such as sgd"),
        ({"report": 3}, "expected report= to be the path"),
        ({"json": ""}, "expected json= .* it is a folder"),
        ({"model": 3}, "expected model= to be a module"),
        ({"strategy": "FedAvg"}, "expected a strategy of flwr.serverapp.strategy"),
    ],
)
def test_wrong_options_are_told_at_once(options, words):
    with pytest.raises(InvalidOption, match=words):
        audited(**options)


def test_a_path_that_cannot_be_written_is_told_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidOption, match=r"expected report= .*file is no folder"):
        audited(report=tmp_path / "file" / "report.html")


def test_the_log_says_where_the_report_is_and_ends_with_the_verdict(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("flwr.spear")
    logger.addHandler(handler)
    try:
        strategy = audited(json="report.json")
        run(strategy, nodes=ONE)
    finally:
        logger.removeHandler(handler)
    place = str(tmp_path / "report.json")
    assert told[0] == f"SPEAR audits this run, the report goes to {place}"
    assert told[-1] == f"SPEAR: {strategy.report.headline} Report: {place}"
    assert told[1].endswith(
        "EXACT, all 5 samples visible in the update were recovered, proved by replay"
    )


@pytest.mark.parametrize(
    ("normalised", "image_format"),
    [(False, ImageFormat((1, 28, 28))), (True, ImageFormat((1, 28, 28), mean=(0.5,), std=(0.25,)))],
)
def test_pictures_of_a_usual_size_are_shown_without_being_told(normalised, image_format):
    def mlp():
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 60), nn.ReLU(), nn.Linear(60, CLASSES))

    def reply(model, inputs, labels, lr):
        pictures = torch.rand(len(labels), 784, generator=torch.Generator().manual_seed(0))
        return weights(model, (pictures - 0.5) / 0.25 if normalised else pictures, labels, lr)

    strategy = ran(
        audited(model=mlp, truth=None, keep=1), client_app(reply, model=mlp), model=mlp, nodes=ONE
    )
    finding = strategy.report.findings[0]
    assert (finding.outcome, finding.image_format) == (Outcome.EXACT, image_format)
    assert "shown as 1 x 28 x 28 pictures" in finding.notes[-1]
    assert ("normalisation unknown" in finding.notes[-1]) == normalised


def test_a_model_that_needs_to_be_given():
    def cnn():
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))

    with pytest.raises(InvalidOption, match=r"give the clients' model, model=Net"):
        run(audited(model=None), model=cnn)


def test_it_can_be_copied_and_pickled():
    strategy = ran(audited())
    for again in (pickle.loads(pickle.dumps(strategy)), copy.deepcopy(strategy)):
        assert outcomes(again) == ["EXACT"] * 3
        run(again)
        assert outcomes(again) == ["EXACT"] * 6
    assert len(strategy.report.findings) == 3


class QuickstartNet(nn.Module):
    """The model of Flower's quickstart-pytorch."""

    def __init__(self):
        super().__init__()
        self.conv1, self.pool, self.conv2 = (
            nn.Conv2d(3, 6, 5),
            nn.MaxPool2d(2, 2),
            nn.Conv2d(6, 16, 5),
        )
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x):
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x)))
        x = torch.relu(self.fc1(x.view(-1, 400)))
        return self.fc3(torch.relu(self.fc2(x)))


@pytest.mark.parametrize("examples", [160, 4])
def test_the_quickstart_gets_an_honest_answer(examples):
    def quickstart(model, inputs, labels, lr):
        generator = torch.Generator().manual_seed(len(calls))
        calls.append(lr)
        batch = torch.rand(examples, 3, 32, 32), torch.randint(10, (examples,))
        local = {"lr": lr, "momentum": 0.9, "batch_size": 32, "generator": generator}
        return ArrayRecord(fedavg(model, *batch, **local))

    calls: list[float] = []
    app = client_app(quickstart, model=QuickstartNet, metrics={"num-examples": examples})
    strategy = Audited(FedAvg(fraction_train=1.0), model=QuickstartNet(), report=None)
    run(strategy, app, model=QuickstartNet, lr=0.1)
    assert calls == [0.1] * 3
    for finding in strategy.report.findings:
        assert "lr = 0.1, read from the train config" in finding.notes
        assert finding.layer.startswith("attacking 'fc1' (400 -> 120, ReLU both)")
        if examples == 160:
            assert (finding.outcome, finding.cause) == (Outcome.INCONCLUSIVE, Cause.TRAINING)
            assert "The layers before this one were trained as well" in finding.reason
        else:  # one step on few pictures: features come back, and are called that
            assert "activations computed from the data" in "; ".join(finding.details)
            assert "features (activations of 'fc1') of" in strategy.report.headline


def test_the_mod_sees_what_leaves_and_only_first_in_the_list(tmp_path):
    def own(msg, context):
        return private(context.node_id)

    outer = what_leaves(tmp_path / "leaves", net, truth=own)
    inner = what_leaves(tmp_path / "before", net, truth=own)
    silent = pickle.loads(pickle.dumps(what_leaves(None, net)))
    app = client_app(mods=[silent, outer, LOCAL_DP, inner])
    plain = run(FedAvg(), client_app())[1]
    _, grid = run(FedAvg(), app)
    assert grid.sent == plain.sent == 6
    for folder, found in (("leaves", False), ("before", True)):
        for node in NODES:
            report = spear.load(tmp_path / folder / f"round-1-client-{node}.json")
            assert (report.outcome is Outcome.EXACT) == found
            assert (tmp_path / folder / f"round-1-client-{node}.html").exists()
            assert "first of the list" in report.remarks[0].words
            assert report.seconds >= report.tables[0].rows[0][-1] >= 0  # rounded
            if found:
                assert min(report.findings[0].truth.psnr) >= 60


def test_the_mod_changes_nothing_and_stands_in_nobodys_way(tmp_path):
    (tmp_path / "file").write_text("")
    unwritable = pickle.loads(pickle.dumps(what_leaves(tmp_path / "file", net)))
    another_model = what_leaves(tmp_path, nn.Linear(4, 2))
    plain = run(FedAvg(), rounds=2)[0]
    assert same(plain, run(FedAvg(), client_app(mods=[unwritable, another_model]), rounds=2)[0])
    with pytest.raises(InvalidOption, match="unknown option"):
        what_leaves(tmp_path, net, rate=0.1)


def test_the_example_runs_in_flowers_simulation_and_ends_with_the_report(tmp_path):
    pytest.importorskip("skimage", reason="needs the cli extra")
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    told = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "flower_audit" / "run.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert told.returncode == 0, told.stderr[-4000:]
    assert "Of 6 audited replies, 6 gave away every sample" in told.stdout
    assert (tmp_path / "report.html").stat().st_size > 0
    report = spear.load(tmp_path / "report.json")
    assert len(report.findings) == 6
    assert len({row[1] for row in report.tables[0].rows}) == 3
    for finding in report.findings:
        assert (finding.outcome, finding.batch_size) == (Outcome.EXACT, 12)
        assert min(finding.truth.psnr) >= 60
        assert sorted(finding.labels.tolist()) == sorted(finding.truth.labels.tolist())
