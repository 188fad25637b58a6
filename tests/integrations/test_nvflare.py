"""NVFlare: filters, events and DXOs of the real thing, in one process and in its simulator."""

import copy
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("nvflare", reason="needs the nvflare extra")
pytest.importorskip("jinja2", reason="needs the cli extra")

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import FilterChainType, FilterContextKey
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.filters.svt_privacy import SVTPrivacy
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.fuel.utils.component_builder import ComponentBuilder
from nvflare.fuel.utils.fobs.decomposers.via_downloader import LazyDownloadRef
from nvflare.job_config.api import FedJob
from nvflare.job_config.defs import FilterType

import spear
from spear.errors import InvalidOption
from spear.federated import fedavg
from spear.integrations.nvflare import AuditFilter
from spear.inversion import Outcome
from spear.report import ImageFormat
from support.nvflare_site import JOB, Site, numpy

ROOT = Path(__file__).resolve().parents[2]
INPUTS, CLASSES, LR = 48, 5, 0.05


def net(seed=0, width=60):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, 24), nn.ReLU(),
            nn.Linear(24, CLASSES),
        )  # fmt: skip


def private(seed=1, count=5):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(count, INPUTS, generator=generator)
    return inputs, torch.randint(CLASSES, (count,), generator=generator)


def trained(before, held=None):
    model = net()
    model.load_state_dict(before)
    return fedavg(model, *(held or private()), lr=LR)


def weights(before, after):
    return DXO(DataKind.WEIGHTS, data=after)


def difference(before, after):
    changes = {name: after[name] - before[name] for name in after}
    return DXO(DataKind.WEIGHT_DIFF, data=changes)


def first_layer(make):
    """The same of some layers only: partial weights, or a partial difference."""

    def part(before, after):
        dxo = make(before, after)
        dxo.data = {name: dxo.data[name] for name in ("0.weight", "0.bias")}
        return dxo

    return part


def in_numpy(make):
    def converted(before, after):
        dxo = make(before, after)
        dxo.data = numpy(dxo.data)
        return dxo

    return converted


def audit(**options):
    return AuditFilter(**{"model": net(seed=9), "lr": LR, "epochs": 1, **options})


def report(folder, number=0, client="site-1", job=JOB, name="spear-audit"):
    return spear.load(folder / job / name / f"round-{number}-client-{client}.json")


def recovered(finding, truth):
    """Is every sample there, as it was?"""
    distances = torch.cdist(torch.as_tensor(finding.inputs).double(), truth.double())
    return bool((distances.min(0).values < 1e-3).all())


FORMS = {
    "weights": weights,
    "difference": difference,
    "weights of a layer": first_layer(weights),
    "difference of a layer": first_layer(difference),
    "NumPy weights": in_numpy(weights),
    "NumPy difference": in_numpy(difference),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_update_is_audited_and_left_as_it_is(form, tmp_path):
    before = net().state_dict()
    result = FORMS[form](before, trained(before)).to_shareable()
    given = copy.deepcopy(result)
    site = Site(tmp_path, audit())
    sent = numpy(before) if "NumPy" in form else before
    handed = site.answer(sent, result, number=3)
    assert handed is result
    assert handed.keys() == given.keys()
    one, other = from_shareable(handed), from_shareable(given)
    assert (one.data_kind, one.meta) == (other.data_kind, other.meta)
    assert all(
        np.array_equal(np.asarray(one.data[k]), np.asarray(other.data[k])) for k in other.data
    )
    found = report(tmp_path, 3)
    assert (found.kind, found.outcome) == ("nvflare", Outcome.EXACT)
    assert recovered(found.findings[0], private()[0])
    assert found.settings["nvflare"] == "2.9.0"


def held(client):
    assert client == "site-1"
    return (*private(), [f"picture {i}" for i in range(5)])


@pytest.mark.parametrize("truth", [held, f"{Path(__file__)}:held"])
def test_what_a_client_holds_is_shown_beside_what_came_back(truth, tmp_path):
    before = net().state_dict()
    site = Site(tmp_path, audit(truth=truth))
    site.answer(before, weights(before, trained(before)).to_shareable())
    (found,) = report(tmp_path).findings
    assert sorted(found.truth.names) == [f"picture {i}" for i in range(5)]
    assert min(found.truth.psnr) > 60
    assert recovered(found, private()[0])


@pytest.mark.parametrize("truth", ["nowhere:held", lambda client: 1 / 0])
def test_a_truth_that_fails_costs_nothing_but_itself(truth, tmp_path):
    before = net().state_dict()
    site = Site(tmp_path, audit(truth=truth))
    site.answer(before, weights(before, trained(before)).to_shareable())
    (found,) = report(tmp_path).findings
    assert found.outcome is Outcome.EXACT
    assert found.truth is None
    assert any("truth= failed" in note for note in found.notes)


def test_reports_are_for_their_owner_only(tmp_path):
    before = net().state_dict()
    site = Site(tmp_path, audit(), audit(folder="redacted", redact=True))
    site.answer(before, weights(before, trained(before)).to_shareable())
    files = list((tmp_path / JOB / "spear-audit").iterdir())
    assert sorted(file.suffix for file in files) == [".html", ".json"]
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)
    redacted = report(tmp_path, name="redacted")
    assert (redacted.is_redacted, redacted.outcome) == (True, Outcome.EXACT)


def test_training_in_place_does_not_reach_what_was_kept(tmp_path):
    before = net().state_dict()
    sent = numpy(before)
    site = Site(tmp_path, audit())
    site.send(sent)
    after = numpy(trained(before))
    for name, value in sent.items():
        value[...] = after[name]
    site.hand_in(DXO(DataKind.WEIGHTS, data=after).to_shareable())
    assert report(tmp_path).outcome is Outcome.EXACT


def test_the_last_filter_sees_what_leaves(tmp_path):
    np.random.seed(0)
    before = net().state_dict()
    noise = SVTPrivacy(fraction=0.9, noise_var=1.0)
    site = Site(tmp_path, audit(folder="early"), noise, audit(folder="last"))
    site.answer(numpy(before), in_numpy(difference)(before, trained(before)).to_shareable())
    assert report(tmp_path, name="early").outcome is Outcome.EXACT
    last = report(tmp_path, name="last")
    assert not sum(last.findings[0].certified)
    assert "Only the last of the list" in last.remarks[0].words


def test_the_server_sees_what_arrives_of_each_client_and_keeps_weights_once(tmp_path):
    before, auditing = net().state_dict(), audit()
    site = Site(tmp_path, auditing, server=True)
    for client in ("site-1", "site-2"):
        site.send(copy.deepcopy(before), client)
    one, other = auditing._tasks.values()
    assert one.arrays is other.arrays
    for seed, client in enumerate(("site-1", "site-2")):
        after = trained(before, private(seed))
        site.hand_in(weights(before, after).to_shareable(), client)
        found = report(tmp_path, client=client)
        assert found.outcome is Outcome.EXACT
        assert recovered(found.findings[0], private(seed)[0])
        assert "as it arrived" in found.remarks[0].words
    site.fire(EventType.END_RUN)
    assert not auditing._tasks


def encrypted(before, after):
    dxo = DXO(DataKind.WEIGHTS, data=dict.fromkeys(after, b"ciphertext"))
    dxo.set_meta_prop(MetaKey.PROCESSED_ALGORITHM, "CKKS")
    return dxo


def not_a_number(before, after):
    after["0.weight"][0, 0] = torch.nan
    return weights(before, after)


def of_another_model(before, after):
    return DXO(DataKind.WEIGHTS, data={"conv.weight": torch.zeros(3)})


def without_arrays(before, after):
    return DXO(DataKind.WEIGHTS, data=dict.fromkeys(after, "x"))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (encrypted, "encrypted or quantised (CKKS)"),
        (not_a_number, "NaN or infinite"),
        (of_another_model, "the model has no 'conv.weight'"),
        (without_arrays, "has shape ()"),
        (weights, ""),
    ],
)
def test_what_cannot_be_attacked_becomes_a_finding_that_says_why(make, reason, tmp_path):
    before = net().state_dict()
    result = make(before, trained(before)).to_shareable()
    assert Site(tmp_path, audit()).answer(before, result) is result
    (finding,) = report(tmp_path).findings
    assert finding.is_attacked == (not reason)
    assert reason in finding.reason


def test_weights_that_were_not_seen_going_out_are_not_guessed(tmp_path):
    before = net().state_dict()
    result = weights(before, trained(before)).to_shareable()
    site = Site(tmp_path, audit())
    assert site.hand_in(copy.deepcopy(result))
    assert "not known which weights the client was sent" in report(tmp_path).findings[0].reason
    elsewhere = LazyDownloadRef("server", "ref", "T0", 1)
    site.send(dict.fromkeys(before, elsewhere), number=1)
    site.hand_in(copy.deepcopy(result))
    assert "external process" in report(tmp_path, 1).findings[0].reason
    site.send(before, number=2, **{MetaKey.PROCESSED_ALGORITHM: "float16"})
    result.set_header("current_round", 2)
    site.hand_in(result)
    assert "neither encrypted nor quantised" in report(tmp_path, 2).findings[0].reason


def blank(kind):
    return DXO(kind, data={"accuracy": 0.5}).to_shareable()


def collection():
    whole = weights(None, net().state_dict())
    return DXO(DataKind.COLLECTION, data={"one": whole, "two": whole}).to_shareable()


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (blank(DataKind.METRICS), "METRICS is no update"),
        (Shareable({"anything": 1}), "not a valid DXO"),
        (collection(), "a collection of DXOs"),
        (make_reply("EXECUTION_EXCEPTION"), ""),
    ],
)
def test_results_that_are_no_updates_pass(result, words, tmp_path, caplog):
    caplog.set_level(logging.INFO, "spear.nvflare")
    site = Site(tmp_path, audit())
    given = copy.deepcopy(result)
    site.send(net().state_dict())
    assert site.hand_in(result) is result
    assert result.keys() == given.keys()
    assert words in caplog.text
    assert bool(caplog.records) == bool(words)
    assert not (tmp_path / JOB).exists()


def test_an_audit_that_fails_is_told_and_the_job_goes_on(tmp_path, caplog):
    before = net().state_dict()
    (tmp_path / "file").write_text("")
    unwritable = audit(folder=str(tmp_path / "file"))
    unknown = audit(model="nobody")
    site = Site(tmp_path, unwritable, unknown)
    result = weights(before, trained(before)).to_shareable()
    assert site.answer(before, result) is result
    assert "file is a" in caplog.text or "no folder" in caplog.text
    assert "'nobody' is unknown" in caplog.text
    assert caplog.text.count("this result could not be audited") == 2


def test_the_model_may_be_a_component_or_be_recognised(tmp_path):
    class Learner:
        model = net(seed=4)

    before = net().state_dict()
    filters = audit(model="learner", folder="its"), audit(model=None, folder="none")
    site = Site(tmp_path, *filters, learner=Learner())
    site.answer(before, weights(before, trained(before)).to_shareable())
    assert report(tmp_path, name="its").outcome is Outcome.EXACT
    known = report(tmp_path, name="none").findings[0]
    assert known.outcome is Outcome.EXACT
    assert "plain MLP" in "; ".join(known.notes)


def narrow(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(120, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, CLASSES)
        )


def test_several_rounds_of_a_client_are_audited_together_and_forgotten(tmp_path):
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(24, 120, generator=generator)  # as many as the layer has neurons
    labels = torch.randint(CLASSES, (24,), generator=generator)
    model = narrow()
    kept, forgetful = (
        AuditFilter(narrow(9), lr=0.5, epochs=1, folder=f"{history}", history=history)
        for history in (20, 1)
    )
    site = Site(tmp_path, kept, forgetful)
    for number in range(4):
        before = copy.deepcopy(model.state_dict())
        after = fedavg(model, inputs, labels, lr=0.5)
        site.answer(before, weights(before, after).to_shareable(), number=number)
        model.load_state_dict(after)
    together = report(tmp_path, 3, name="20")
    assert together.headline.startswith("Rounds together gave away more than single replies")
    assert together.findings[0].name == "client site-1, rounds 0 to 3 together"
    assert together.findings[0].outcome is Outcome.EXACT
    assert recovered(together.findings[0], inputs)
    alone = report(tmp_path, 3, name="1")
    assert [finding.outcome for finding in alone.findings] == [Outcome.INCONCLUSIVE]
    assert "Nothing (history=1)" in "".join(remark.words for remark in alone.remarks)
    assert kept._examiner.several.history.count("site-1") == 4
    site.fire(EventType.END_RUN)
    assert not kept._examiner.several.history.count("site-1")


def test_beside_the_tasks_data_it_only_looks_on(tmp_path):
    auditing = audit()
    auditing.set_prop(FilterContextKey.CHAIN_TYPE, FilterChainType.TASK_DATA_CHAIN)
    site = Site(tmp_path, auditing)
    site.send(net().state_dict())
    assert not auditing._tasks
    task = DXO(DataKind.WEIGHTS, data=net().state_dict()).to_shareable()
    assert auditing.process(task, site.context()) is task
    assert not (tmp_path / JOB).exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, "lr > 0"),
        ({"learning_rate": 0.1}, "unknown option 'learning_rate'.* model, folder, redact"),
        ({"layer": "7"}, "its linear layers: '0', '2', '4'"),
        ({"model": 3}, "expected model= to be a module"),
        ({"history": 0}, "expected a history of 1 round or more"),
        ({"max_seconds": 0}, "max_seconds > 0"),
    ],
)
def test_wrong_options_are_told_at_once(options, words):
    with pytest.raises(InvalidOption, match=words):
        audit(**options)


def test_the_job_api_writes_it_into_a_config_that_makes_the_same_again(tmp_path):
    picture = ImageFormat((3, 4, 4), mean=(0.5,), std=(0.25,))
    job = FedJob("audited", min_clients=1)
    job.to_server(FedAvg(num_clients=1, num_rounds=1))
    job.to_clients(
        audit(model="learner", image_format=picture, history=3, sigma=0.5),
        filter_type=FilterType.TASK_RESULT,
        tasks=["train"],
    )
    job.export_job(str(tmp_path))
    (config,) = tmp_path.rglob("config_fed_client.json")
    ((chain),) = json.loads(config.read_text())["task_result_filters"]
    assert chain["tasks"] == ["train"]
    assert not list(tmp_path.rglob("spear"))  # SPEAR is installed, its sources stay where they are

    class Builder(ComponentBuilder):
        def get_module_scanner(self):
            raise NotImplementedError

    again = Builder().build_component(chain["filters"][0])
    assert isinstance(again, AuditFilter)
    assert (again.model, again.history, again.folder) == ("learner", 3, "spear-audit")
    assert tuple(again.image_format.shape) == picture.shape
    assert again.options == {"lr": LR, "epochs": 1, "sigma": 0.5}


def simulated(script, workspace, **threads):
    """What a job script prints, and what NVFlare's simulator logged."""
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    told = subprocess.run(
        [sys.executable, str(ROOT / script), str(workspace)],
        cwd=workspace,
        env={**own, "PYTHONPATH": paths, **threads},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert told.returncode == 0, told.stderr[-4000:]
    return told.stdout + told.stderr


def of_site(workspace, site):
    return workspace / "pictures" / site / "simulate_job" / "spear-audit"


def test_the_example_runs_in_nvflares_simulator_and_leaves_a_report_a_client_and_round(tmp_path):
    pytest.importorskip("skimage", reason="needs the cli extra")
    said = simulated("examples/nvflare_audit/job.py", tmp_path)
    for site in ("site-1", "site-2"):
        files = sorted(file.name for file in of_site(tmp_path, site).iterdir())
        assert files == [f"round-{r}-client-{site}.{k}" for r in (0, 1) for k in ("html", "json")]
        for number in (0, 1):
            found = spear.load(of_site(tmp_path, site) / f"round-{number}-client-{site}.json")
            assert (found.outcome, found.findings[0].batch_size) == (Outcome.EXACT, 12)
            assert min(found.findings[0].truth.psnr) > 60  # what it holds is beside it
            assert found.versions["threads"] == "1"  # by itself: other clients need the cores
            assert f"SPEAR: round {number}, client {site}: EXACT, all 12 samples" in said
        log = tmp_path / "pictures" / site / "log.txt"
        assert f"SPEAR: round 1, client {site}: EXACT" in log.read_text()


def test_the_server_audits_differences_while_the_clients_audit_fails_in_nvflares_simulator(
    tmp_path,
):
    pytest.importorskip("skimage", reason="needs the cli extra")
    said = simulated("tests/support/nvflare_doors.py", tmp_path, OMP_NUM_THREADS="1")
    for site in ("site-1", "site-2"):
        found = spear.load(of_site(tmp_path, "server") / f"round-0-client-{site}.json")
        assert (found.outcome, found.findings[0].batch_size) == (Outcome.EXACT, 12)
        assert "as it arrived" in found.remarks[0].words
        assert not of_site(tmp_path, site).exists()
    assert said.count("this result could not be audited") >= 2
    assert "Finished FedAvg" in said
