"""What to do now: for every outcome and every door, from what the report holds."""

import dataclasses
import itertools
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="needs the cli extra")
pytest.importorskip("matplotlib", reason="needs the plots extra")

import spear
from spear.inversion import Outcome
from spear.judge import Cause
from spear.report import Case, Measured, Report, Step, how_to_redact, safe_settings
from spear.report.advice import PUBLISHED
from support import reports
from support.command_line import in_this_process
from support.planted import plant

COMMAND = "spear invert --weights before.safetensors --update grads.npz"
AUDIT_PAGE = Path(__file__).parents[2] / "docs" / "audit.md"


def made(outcome=Outcome.EXACT, command=COMMAND, kind="inversion", **more):
    none = outcome in (Outcome.FAILED, Outcome.INCONCLUSIVE)
    found = reports.finding(0 if none else 4, 4, outcome=outcome, true=not none, **more)
    settings = {} if command is None else {"command": command}
    return Report.new(kind, "t", found.headline, [found], settings=settings)


def commands(report):
    return [step.command for step in report.advice.steps]


def test_figures_are_those_of_the_page():
    """Nothing is invented: each published mitigation is a line of the example in docs/audit.md."""
    page = AUDIT_PAGE.read_text("utf-8")
    for case in PUBLISHED:
        line = next(x for x in page.splitlines() if x.startswith(f" {case.name}  "))
        leaks, cost, spread = re.match(
            r"\s+(\d+)%.* (\S+) ±(\S+)$", line[len(case.name) + 1 :]
        ).groups()
        measured = case.measured
        assert 100 * measured.leaked == int(leaks) * measured.batches, case.name
        assert (measured.cost, measured.spread) == (float(cost), float(spread)), case.name
        assert (case.outcome in (Outcome.FAILED, Outcome.INCONCLUSIVE)) == (measured.leaked == 0)


def test_what_leaked_is_rehearsed_with_noise_and_then_measured():
    rehearse, measure = commands(made())
    assert rehearse == (
        "spear check --weights before.safetensors --samples 4 --clip 1 --noise-multiplier 0.1"
    )
    assert measure.startswith("spear audit --samples 4 --clip none,1 --noise-multiplier 0,0.01,0.1")
    assert "not safe" in made().advice.found
    assert made().advice.mitigations == PUBLISHED


def test_noise_that_was_not_enough_is_not_recommended_again():
    (measure,) = commands(made(protocol={"sigma": 1e-5}))
    assert measure.startswith("spear audit")


@pytest.mark.parametrize("sends", ["weights", "difference"])
def test_fedavg_is_rehearsed_as_fedavg(sends):
    """Without a rate or epochs nothing in the command says that weights are sent."""
    rehearse = commands(made(protocol={"sends": sends}))[0]
    assert "--epochs 1" in rehearse
    for told in ({"lr": 0.1}, {"epochs": 5}, {"local_steps": 3}):
        assert "--epochs 1" not in commands(made(protocol={"sends": sends, **told}))[0]
    assert "--epochs" not in commands(made())[0]


@pytest.mark.parametrize("told", ["-b 16", "--samples 16", "--samples=16"])
def test_a_check_of_many_clients_is_measured_with_the_samples_of_one(told):
    settings = {"command": f"spear check --model n.py:Net {told} --clients 10", "batch_size": 160}
    (measure,) = commands(Report.new("check", "t", "h", settings=settings))
    assert measure.startswith("spear audit --samples 16 ")
    settings["command"] = "spear check --weights w.pt --update g.pt"
    (measure,) = commands(Report.new("check", "t", "h", settings={**settings, "batch_size": 20}))
    assert measure.startswith("spear audit --samples 20 ")


def test_fedavg_is_measured_as_fedavg():
    told = {"sends": "weights", "lr": 0.01}
    assert "--epochs 1 --lr 0.01" in commands(made(protocol=told))[-1]
    assert "--epochs 5 --lr 0.01" in commands(made(protocol={**told, "epochs": 5}))[-1]
    assert "--lr" not in commands(made(protocol={"lr": 0.01}))[-1]  # FedSGD has no local rate


@pytest.mark.parametrize("limit", ["", " --max-seconds 5", " --max-seconds=5"])
def test_what_ran_out_of_time_gets_more(limit):
    report = made(Outcome.INCONCLUSIVE, COMMAND + limit, cause=Cause.TIME)
    seconds = 50 if limit else 600
    assert commands(report) == [f"{COMMAND} --max-seconds {seconds}"]


def test_what_was_interrupted_is_run_again_and_says_nothing_else():
    report = made(Outcome.INCONCLUSIVE, cause=Cause.INTERRUPTED)
    assert commands(report) == [COMMAND]
    found = made(Outcome.APPROXIMATE, stats={"interrupted": 1, "search": 0.1})
    assert commands(found) == [COMMAND]
    page = report.page()
    assert "Interrupted" in page
    assert "Cannot tell" not in re.search(r'class="word">.*', page)[0]


def test_nothing_recovered_is_rehearsed_over_rounds():
    rehearse, measure = commands(made(Outcome.FAILED))
    assert rehearse.endswith("--rounds 10")
    assert measure.startswith("spear audit")
    assert "no guarantee" in made(Outcome.FAILED).advice.found


def test_each_door_has_its_own_words():
    flower = dataclasses.replace(reports.flower(), settings={})
    assert "--redact" in how_to_redact(made())
    assert 'result.report("redacted.html", redact=True)' in how_to_redact(made(command=None))
    assert "report.redacted()" in how_to_redact(made(command="python pilot.py", kind="audit"))
    assert "redact=True to Audited" in how_to_redact(flower)
    nvflare = dataclasses.replace(flower, kind="nvflare")
    assert "redact=True to AuditFilter" in how_to_redact(nvflare)
    for report in (made(command=None), flower):
        assert "--redact" not in how_to_redact(report)
    assert commands(made(command=None))[-1].startswith("from spear.sweep import sweep; sweep(")
    assert commands(flower)[-1].startswith("spear audit")


def runs(command):
    """The command is parsed as the command line would, and stops before it does anything."""
    words = shlex.split(command)
    assert words[0] == "spear"
    return in_this_process(*words[1:], "--help")


def test_commands_are_ours_and_their_options_exist():
    tried = set()
    for outcome, cause in itertools.product(Outcome, (None, Cause.TIME, Cause.NOT_ATTACKED)):
        protocol = {"sends": "weights", "epochs": 2, "lr": 0.1, "momentum": 0.5, "clients": 3}
        for told in ({}, protocol):
            tried |= {*commands(made(outcome, cause=cause, protocol=told))}
    assert len(tried) > 5
    for command in tried:
        done = runs(command)
        assert done.returncode == 0, command
        page = done.stdout
        options = [word for word in shlex.split(command) if word.startswith("--")]
        assert [word for word in options if word not in page] == [], command


def test_python_runs_as_it_stands(tmp_path, monkeypatch):
    pytest.importorskip("opacus", reason="needs the opacus extra")
    monkeypatch.chdir(tmp_path)
    found = made(command=None, batch_size=2)
    (command,) = commands(found)
    called = {}

    def recorded(**options):
        called.update(options)
        return Report.new("audit", "t", "h")

    monkeypatch.setattr("spear.sweep.sweep", recorded)
    exec(command, {})
    spear.sweep.Grid(called["lists"])  # raises if a list is not one of a sweep
    assert (tmp_path / "audit.html").is_file()


def swept(*cases, command="spear audit --repeats 5 --only-draw"):
    settings = {} if command is None else {"command": command}
    return Report.new("audit", "t", "h", cases=cases, settings=settings, overall=Outcome.EXACT)


LEAKS = Case("base", Outcome.EXACT, "", Measured(5, 5))
HELD = Case("C = 1, z = 1", Outcome.FAILED, "", Measured(0, 5, cost=9.0, spread=1.0))
CHEAP = Case("12 clients", Outcome.FAILED, "", Measured(0, 5, cost=0.5, spread=1.0))
LATE = Case("b = 96", Outcome.FAILED, "", Measured(0, 5, out_of_time=2))
OPEN = Case("b = 32", Outcome.INCONCLUSIVE, "")


def test_a_sweep_names_what_is_safe_the_cheapest_first():
    told = swept(LEAKS, HELD, CHEAP, LATE).advice
    assert [case.name for case in told.safe] == ["12 clients", "C = 1, z = 1"]
    assert "b = 96: not known to be safe" in told.found
    assert [case.name for case in told.mitigations] == ["12 clients", "C = 1, z = 1"]
    assert [step.command for step in told.steps] == ["spear audit --repeats 30"]
    assert "Safe at 2 of 4 settings" in swept(LEAKS, HELD, CHEAP, LATE).page()


def test_what_leaked_all_the_same_is_no_mitigation():
    useless = dataclasses.replace(LEAKS, name="C = 1", measured=Measured(5, 5, cost=14.0))
    partly = dataclasses.replace(LEAKS, name="8-bit", measured=Measured(3, 5, cost=1.0))
    told = swept(LEAKS, useless, partly, HELD).advice
    assert [case.name for case in told.mitigations] == ["C = 1, z = 1", "8-bit"]
    assert swept(LEAKS, useless).advice.mitigations == PUBLISHED


def test_the_headline_says_how_few_batches_it_rests_on():
    few = dataclasses.replace(HELD, measured=Measured(0, 2))
    assert "Safe at 1 of 2 settings, by 2 batches each" in swept(LEAKS, few).page()


def test_an_unfinished_sweep_goes_on():
    (step,) = swept(LEAKS, OPEN).advice.steps
    assert step.command == "spear audit --repeats 5"
    assert "1 of 2 settings are not measured yet" in step.words


def test_where_nothing_held_stronger_defences_are_next():
    told = swept(LEAKS).advice
    assert told.found == "Safe from this attack: none of 1 setting."
    (step,) = told.steps
    line = "spear audit --repeats 5 --clip 1 --noise-multiplier 0,0.1,1 --clients 1,4,12"
    assert step.command == line
    assert told.mitigations == PUBLISHED  # it measured none of its own


@pytest.mark.parametrize(
    ("late", "command"),
    [(2, " --max-seconds 600"), (0, " --rounds 1,4,10")],
    ids=["time", "rounds"],
)
def test_where_nothing_could_be_told_the_next_command_may_tell(late, command):
    case = Case("b = 96", Outcome.INCONCLUSIVE, "", Measured(0, 5, out_of_time=late))
    (step,) = swept(case).advice.steps
    assert step.command == f"spear audit --repeats 5{command}"
    assert "Nothing held" not in step.words


def test_many_safe_settings_are_counted():
    many = [dataclasses.replace(HELD, name=f"s{i}") for i in range(8)]
    assert "8 of 8 settings (s0; s1; s2; s3; s4; 3 more)" in safe_settings(many)


def test_steps_of_the_maker_come_first():
    report = dataclasses.replace(made(), steps=(Step("Look.", "spear data /srv/ann/x.npz"),))
    assert report.advice.steps == report.steps
    assert report.redacted().advice.steps == (Step("Look.", "spear data x.npz"),)


def test_it_is_on_the_page_in_the_notebook_and_in_json(tmp_path):
    pytest.importorskip("PIL", reason="needs the cli extra")
    report = made()
    report.save(tmp_path / "report.json")
    loaded = spear.load(tmp_path / "report.json")
    assert loaded.advice == report.advice
    page = loaded.page()
    assert page.rindex('<section id="advice"') > page.rindex(
        '<section id="repeat"'
    )  # it ends with it
    read = re.sub(r"</?span[^>]*>", "", page)  # each option is kept on one line
    for text in (read, report._repr_html_(), report.json()):
        for command in commands(report):
            assert command in text
        assert "8.9" in text


def test_an_interrupted_search_does_not_blame_the_layer():
    """Whether it is too narrow shows once a search has given up: "run it again" stands alone."""
    planted = plant(40, m=60, n=100, depth=3, seed=3)

    def stop(step):
        if step.stage != "factorise":
            raise KeyboardInterrupt

    result = spear.invert(spear.observe(planted.model, planted.gradients), on_progress=stop)
    assert result.cause is Cause.INTERRUPTED
    assert result.reason.endswith("The search was interrupted: run it again")
    (step,) = result.report().advice.steps
    assert step.words == "The run was stopped: run it again, to its end."
