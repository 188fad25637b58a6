"""A report as JSON: it keeps to its schema, comes back bit for bit, and damage is told."""

import dataclasses
import html
import itertools
import json
import math
import re
import sys
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("matplotlib", reason="needs the plots extra")

import spear
from spear.data import Column
from spear.errors import InvalidOption, InvalidReport, MissingExtra
from spear.federated import fedsgd, mlp
from spear.inversion import Outcome
from spear.judge import Cause, Proof
from spear.report import (
    Advice,
    Case,
    Drawing,
    Finding,
    ImageFormat,
    Level,
    Measured,
    Remark,
    Report,
    Step,
    Table,
    ThreatModel,
    Truth,
    compare,
    evidence,
    pictures,
    words,
)
from spear.report import page as pages
from spear.report.document import dump, name_in_json
from support import reports

KINDS = reports.every()
QUICK = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
text = st.text(max_size=12)
finite = st.floats(allow_nan=False, allow_infinity=False)
number = st.one_of(finite, st.just(math.nan))
cell = st.one_of(st.none(), st.booleans(), st.integers(-(2**60), 2**60), finite, text)
setting = st.recursive(
    cell,
    lambda part: st.lists(part, max_size=3) | st.dictionaries(text, part, max_size=3),
    max_leaves=6,
)


def tensors(*shape, dtypes=(torch.float32, torch.float64, torch.float16)):
    """Any bits, so NaN of every kind as well."""

    def of(dtype, raw):
        size = torch.empty(0, dtype=dtype).element_size()
        count = math.prod(shape) * size
        values = bytearray((raw * (count // max(1, len(raw)) + 1))[:count])
        flat = torch.frombuffer(values, dtype=dtype) if count else torch.empty(0, dtype=dtype)
        return flat.reshape(shape)

    return st.builds(of, st.sampled_from(dtypes), st.binary(min_size=8, max_size=24))


@st.composite
def truths(draw, b, k, n):
    return Truth(
        tuple(draw(text) for _ in range(b)),
        draw(st.none() | tensors(b, n)),
        draw(st.none() | tensors(b, dtypes=(torch.int64, torch.int32))),
        tuple(draw(st.integers(-1, b - 1)) for _ in range(k)),
        tuple(draw(number) for _ in range(k)),
    )


@st.composite
def findings(draw):
    image_format = draw(
        st.sampled_from(
            [None, ImageFormat((1, 2, 2)), ImageFormat((3, 1, 2), (0.1, 0.2, 0.3), (0.5,))]
        )
    )
    n = image_format.inputs if image_format else draw(st.integers(0, 4))
    k, b = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    return Finding(
        draw(text),
        draw(text),
        draw(st.sampled_from(Outcome)),
        draw(st.sampled_from(Proof)),
        draw(text),
        draw(st.none() | st.integers(0, 2**40)),
        draw(st.none() | finite),
        tuple(draw(st.booleans()) for _ in range(k)),
        tuple(draw(st.booleans()) for _ in range(k)),
        draw(st.none() | tensors(k, n)),
        draw(st.none() | tensors(k, dtypes=(torch.int64, torch.float32))),
        draw(st.none() | st.just(tuple(draw(number) for _ in range(k)))),
        draw(st.dictionaries(text, st.integers(0, 2**50) | finite, max_size=3)),
        image_format,
        draw(st.none() | truths(b, k, n)),
        tuple(draw(st.lists(text, max_size=2))),
        draw(st.booleans()),
        draw(st.none() | st.sampled_from(Cause)),
        tuple(draw(st.lists(text, max_size=2))),
    )


measured = st.builds(
    lambda leaked, more, late, *rest: Measured(leaked, leaked + more, late, *rest),
    st.integers(0, 9),
    st.integers(1, 9),
    st.integers(0, 3),
    st.none() | finite,
    st.none() | finite,
    text,
)
cases = st.builds(Case, text, st.sampled_from(Outcome), text, st.none() | measured)


@st.composite
def any_report(draw):
    width = draw(st.integers(0, 3))
    row = st.tuples(*[cell] * width)
    table = st.builds(
        Table, text, st.just(("a",) * width), st.lists(row, max_size=3).map(tuple), text
    )
    return Report(
        draw(text),
        draw(text),
        draw(text),
        tuple(draw(st.lists(findings(), max_size=2))),
        tuple(draw(st.lists(st.builds(Remark, st.sampled_from(Level), text, text), max_size=2))),
        tuple(draw(st.lists(table, max_size=2))),
        tuple(draw(st.lists(st.builds(Drawing, text, text, text), max_size=2))),
        draw(st.dictionaries(text, setting, max_size=3)),
        draw(st.dictionaries(text, text, max_size=2)),
        draw(text),
        draw(st.none() | finite),
        cases=tuple(draw(st.lists(cases, max_size=2))),
        steps=tuple(draw(st.lists(st.builds(Step, text, text), max_size=2))),
    )


def same(a, b):
    """Equal bit for bit, and of one type."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape) == (
            b.dtype,
            b.shape,
        ) and a.numpy().tobytes() == b.numpy().tobytes()
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return np.float64(a).tobytes() == np.float64(b).tobytes() or (a != a and b != b)
    return a == b


@pytest.fixture(scope="module")
def validator():
    jsonschema = pytest.importorskip("jsonschema", reason="needs the dev extra")
    schema = json.loads((resources.files("spear.report") / "schema.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_keeps_to_the_schema_and_loads_back(kind, tmp_path, validator):
    KINDS[kind].save(tmp_path / "report.json")
    validator.validate(json.loads((tmp_path / "report.json").read_bytes()))
    assert same(spear.load(tmp_path / "report.json"), KINDS[kind])


@QUICK
@given(report=any_report())
def test_any_report_loads_back_redacted_or_not_and_has_a_page(report, tmp_path, validator):
    pytest.importorskip("PIL", reason="needs the cli extra")
    path = tmp_path / "report.json"
    for kept in (report, report.redacted()):
        kept.save(path)
        text = path.read_text(encoding="utf-8")
        validator.validate(json.loads(text))
        assert same(spear.load(path), kept)
        assert kept.page().startswith("<!doctype html>")
        assert kept._repr_html_().startswith("<div")
    assert '"base64"' not in text
    for finding in kept.findings:
        assert not finding.holds_data
        names = finding.truth.names if finding.truth else ()
        assert names == tuple(f"original {i + 1}" for i in range(len(names)))


def test_the_schema_names_the_fields_of_the_classes(validator):
    parts = validator.schema["$defs"]
    kinds = (Report, Case, Finding, Truth, ImageFormat, Remark, Table, Drawing, ThreatModel)
    for kind in (*kinds, Advice, Column, Measured, Step):
        own = {ImageFormat: "look", ThreatModel: "threat"}
        part = parts[own.get(kind, kind.__name__.lower())]
        names = {name_in_json(field) for field in dataclasses.fields(kind)}
        extra = {Report: {"schema", "outcome", "advice"}, Finding: {"threat"}}.get(kind, set())
        assert set(part["properties"]) == names | extra
        # Which earlier reports have not.
        later = {"details", "rounds", "sees", "told", "cases", "protocol", "columns", "steps"}
        later |= {"measured"}
        assert names - set(part["required"]) <= later


def put(*path, value):
    """Sets what is found along a path."""

    def change(content):
        for name in path[:-1]:
            content = content[name]
        content[path[-1]] = value

    return change


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


FIRST = ("findings", 0)
CHANGES = {
    "newer schema": put("schema", value="spear.report/3"),
    "older schema": put("schema", value="spear.report/1"),
    "no schema": lambda content: content.pop("schema"),
    "no findings": lambda content: content.pop("findings"),
    "findings no list": put("findings", value={}),
    "unknown field": put("more", value=1),
    "unknown field within": put(*FIRST, "more", value=1),
    "missing field within": lambda content: content["findings"][0].pop("stats"),
    "other outcome": put("outcome", value="exact"),
    "no outcome": put("outcome", value=None),
    "unknown outcome": put(*FIRST, "outcome", value="perhaps"),
    "unknown cause": put(*FIRST, "cause", value="the weather"),
    "assumptions no words": put(*FIRST, "assumptions", value=[3]),
    "name missing": put(*FIRST, "name", value=None),
    "seconds a word": put("seconds", value="1"),
    "seconds too large": put("seconds", value=10**400),
    "redacted a word": put("is_redacted", value="no"),
    "redacted, but not": put("is_redacted", value=True),
    "batch size negative": put(*FIRST, "batch_size", value=-1),
    "batch size a fraction": put(*FIRST, "batch_size", value=1.5),
    "batch size huge": put(*FIRST, "batch_size", value=10**100),
    "certified short": put(*FIRST, "certified", value=[True]),
    "certified words": put(*FIRST, "certified", value=["yes"] * 4),
    "errors short": put(*FIRST, "predicted_error", value=[1.0]),
    "stats words": put(*FIRST, "stats", value={"seek": "fast"}),
    "tensor without bytes": put(*FIRST, "inputs", value={"dtype": "float32", "shape": [0, 0]}),
    "tensor of other bytes": put(*FIRST, "inputs", "base64", value="AAAA"),
    "tensor of no bytes": put(*FIRST, "inputs", "base64", value="?"),
    "tensor beyond ASCII": put(*FIRST, "inputs", "base64", value="é"),
    "tensor dtype": put(*FIRST, "inputs", "dtype", value="object"),
    "tensor shape negative": put(*FIRST, "inputs", "shape", value=[4, -1]),
    "tensor shape huge": put(*FIRST, "inputs", "shape", value=[10**30, 192]),
    "tensor shape empty and huge": put(
        *FIRST, "inputs", value={"dtype": "float32", "shape": [0, 2**62], "base64": ""}
    ),
    "tensor shape words": put(*FIRST, "inputs", "shape", value=["4", "192"]),
    "tensor of three axes": put(*FIRST, "inputs", "shape", value=[4, 3, 64]),
    "tensor on its side": put(*FIRST, "inputs", "shape", value=[192, 4]),
    "look too small": put(*FIRST, "look", "shape", value=[3, 8, 4]),
    "look of two": put(*FIRST, "look", "shape", value=[8, 8]),
    "look huge": put(*FIRST, "look", "shape", value=[3, 10**15, 10**15]),
    "look std zero": put(*FIRST, "look", "std", value=[0]),
    "truth index out of range": put(*FIRST, "truth", "index", value=[9, 9, 9, 9]),
    "truth index short": put(*FIRST, "truth", "index", value=[]),
    "truth names short": put(*FIRST, "truth", "names", value=["one"]),
    "truth psnr missing": put(*FIRST, "truth", "psnr", value=None),
    "remark level": put("remarks", value=[{"level": "x", "subject": "", "words": ""}]),
    "table ragged": put(
        "tables", value=[{"title": "", "columns": ["a"], "rows": [[1, 2]], "caption": ""}]
    ),
    "table cell a list": put(
        "tables", value=[{"title": "", "columns": ["a"], "rows": [[[1]]], "caption": ""}]
    ),
    "drawing a number": put("drawings", value=[{"title": "", "svg": 1, "caption": ""}]),
    "drawing with more": put("drawings", value=[{"title": "", "svg": "", "caption": "", "x": 1}]),
    "measured more than there is": put(
        "cases",
        value=[
            {"name": "", "outcome": "failed", "words": "", "measured": {"leaked": 3, "batches": 2}}
        ],
    ),
    "column without a width": put(
        *FIRST,
        "columns",
        value=[{"name": "a", "categories": [], "mean": 0, "std": 0, "constant": False}],
    ),
    "settings a list": put("settings", value=[]),
    "settings deep": put("settings", value={"a": nested(200)}),
}


OLD = Path(__file__).parents[1] / "golden" / "report-1.json"


def test_reports_of_schema_1_are_read():
    """What could not be judged, or came back without a proof, cannot be told today."""
    report = spear.load(OLD)
    assert report.outcome is Outcome.EXACT
    assert {found.name: (found.outcome, found.cause) for found in report.findings} == {
        "exact": (Outcome.EXACT, None),
        "partial": (Outcome.PARTIAL, None),
        "approximate": (Outcome.APPROXIMATE, None),
        "likely exact": (Outcome.APPROXIMATE, None),
        "candidates": (Outcome.INCONCLUSIVE, None),
        "nothing": (Outcome.FAILED, None),
        "sends= was wrong": (Outcome.INCONCLUSIVE, Cause.UNFIT),
        "sends= was wrong, and something came back": (Outcome.INCONCLUSIVE, Cause.UNFIT),
        "not attacked": (Outcome.INCONCLUSIVE, Cause.NOT_ATTACKED),
    }
    assert not any(found.assumptions for found in report.findings)
    assert "Cannot tell" in report.page()


def test_the_worst_of_a_report_of_schema_1_is_that_of_today(tmp_path, validator):
    content, path = json.loads(OLD.read_bytes()), tmp_path / "report.json"
    content["findings"] = [one for one in content["findings"] if one["outcome"] == "failed"]
    for change, outcome in (
        ({"outcome": "failed"}, Outcome.INCONCLUSIVE),
        ({"outcome": "approximate", "overall": "approximate"}, Outcome.APPROXIMATE),  # a sweep
    ):
        path.write_text(json.dumps(content | change), encoding="utf-8")
        report = spear.load(path)
        assert report.outcome is outcome
        report.save(path)
        validator.validate(json.loads(path.read_bytes()))
        assert same(spear.load(path), report)


OLD_CHANGES = {
    "other outcome": put("outcome", value="partial"),
    "an outcome of today": put(*FIRST, "outcome", value="inconclusive"),
    "findings no list": put("findings", value={}),
    "finding no mapping": put("findings", value=[3]),
    "judged a word": put(*FIRST, "judged", value="yes"),
    "not judged": lambda content: content["findings"][0].pop("judged"),
    "a field of today": put(*FIRST, "cause", value="proved"),
}


def test_the_schema_lists_every_outcome_and_cause(validator):
    parts = validator.schema["$defs"]
    outcomes = {outcome.value for outcome in Outcome}
    assert set(parts["outcome"]["enum"]) == outcomes
    assert set(parts["report"]["properties"]["overall"]["enum"]) == outcomes | {None}
    causes = {cause.value for cause in Cause}
    assert set(parts["finding"]["properties"]["cause"]["enum"]) == causes | {None}


def test_the_worst_for_the_client_counts():
    """Exact, partial, approximate; then what cannot be told, then nothing."""
    order = ["EXACT", "PARTIAL", "APPROXIMATE", "INCONCLUSIVE", "FAILED"]
    for worst, better in itertools.pairwise(order):
        found = [reports.finding(outcome=Outcome[name]) for name in (better, worst)]
        assert Report("flower", "", "", tuple(found)).outcome is Outcome[worst]


@pytest.mark.parametrize("schema", [1, 2])
def test_damage_is_told(schema, tmp_path):
    whole = OLD.read_bytes() if schema == 1 else dump(KINDS["partial"]).encode()
    path = tmp_path / "report.json"
    for name, change in (OLD_CHANGES if schema == 1 else CHANGES).items():
        content = json.loads(whole)
        change(content)
        path.write_text(json.dumps(content), encoding="utf-8")
        with pytest.raises(InvalidReport, match=r"report\.json"):
            pytest.fail(f"{name}: {spear.load(path)}")


def test_other_files_are_told(tmp_path):
    path, whole = tmp_path / "report.json", dump(KINDS["exact"]).encode()
    numbers = (b"1e999", b"NaN", b"9" * 5000, b"[" * 900 + b"]" * 900)
    others = (b"", b"\xff\xfe\x00", b"null", b"[]", b"[" * 200_000, b'{"schema":"spear.report/1"}')
    bare = b'{"schema":"spear.report/2"}'
    for content in (*others, bare, *(whole.replace(b"0.01", number) for number in numbers)):
        path.write_bytes(content)
        with pytest.raises(InvalidReport, match=r"report\.json"):
            pytest.fail(f"{content[:80]}: {spear.load(path)}")


def test_a_file_cut_off_anywhere_is_told(tmp_path):
    whole, path = dump(KINDS["partial"]).encode(), tmp_path / "report.json"
    for end in range(1, len(whole) - 1, len(whole) // 40):
        path.write_bytes(whole[:end])
        with pytest.raises(InvalidReport):
            spear.load(path)


def test_settings_are_as_json_has_them():
    def told(**made_with):
        return json.loads(dump(Report("audit", "", "", settings=made_with)))["settings"]

    assert told(out=Path("a/b"), lr=np.float32(0.5), b=np.int64(3), seed=2**64 - 1) == {
        "out": str(Path("a/b")),
        "lr": 0.5,
        "b": 3,
        "seed": 2**64 - 1,
    }
    assert told(lr=math.inf) == {"lr": None}
    endless = []
    endless.append(endless)
    for bad in (torch.zeros(2), {"x": [torch.zeros(2)]}, object(), 10**30, endless):
        with pytest.raises(InvalidOption, match="setting 'bad'"):
            told(bad=bad)


def test_names_that_are_no_utf8_come_back(tmp_path):
    report = dataclasses.replace(KINDS["failure"], title="caf\udce9.npz")
    report.save(tmp_path / "report.json")
    assert spear.load(tmp_path / "report.json").title == "caf\udce9.npz"
    report.save_page(tmp_path / "report.html")
    assert "caf\\udce9.npz" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_parts_that_do_not_fit_are_told():
    found = reports.finding()
    with pytest.raises(InvalidOption, match="inputs of 4 recovered samples, got 3 x 192"):
        dataclasses.replace(found, inputs=found.inputs[:3])
    with pytest.raises(InvalidOption, match="75 values, but the layer has 192 inputs"):
        dataclasses.replace(found, image_format=ImageFormat((3, 5, 5)), truth=None)
    with pytest.raises(InvalidOption, match="index of -1 to 1"):
        Truth(("a", "b"), None, None, (2,), (1.0,))
    with pytest.raises(InvalidOption, match="1 cells in each row"):
        Table("t", ("a",), ((1, 2),))


def test_surplus_samples_are_assigned_to_nothing():
    truth = compare(torch.tensor([[0.0, 1.0], [5.0, 5.0], [1.0, 0.0]]), torch.eye(2))
    assert truth.index == (1, -1, 0)
    assert math.isnan(truth.psnr[1])
    assert truth.psnr[0] == 400


def test_a_page_says_what_it_needs(monkeypatch):
    pages._environment.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtra, match="jinja2"):
        KINDS["failure"].page()


def test_a_redacted_page_says_what_a_verdict_rests_on():
    pytest.importorskip("jinja2", reason="needs the cli extra")
    found = reports.finding(assumptions=("no samples <merged>", "cross-entropy"))
    page = Report("inversion", "", found.headline, (found,)).redacted().page()
    listed = re.search(r"<p>Assumed, because it cannot be tested:</p>\s*<ul>(.*?)</ul>", page)
    assert re.findall(r"<bdi>(.*?)</bdi>", listed[1]) == [
        "no samples &lt;merged&gt;",
        "cross-entropy",
    ]
    assert "Assumed, because" not in KINDS["failure"].page()


def test_a_redacted_page_holds_no_data():
    pytest.importorskip("PIL", reason="needs the cli extra")
    shown, flat = reports.finding(3, 4), reports.finding(2, 2, image_format=None)
    names = [f"SECRET {i}" for i in range(4)]
    shown = dataclasses.replace(
        shown,
        labels=shown.labels + 98765,
        truth=dataclasses.replace(shown.truth, names=tuple(names)),
        layer="attacking '0', with the weights of /srv/ann/net.py",
    )
    report = Report("demo", "t", "h", (shown, flat))
    whole, redacted = report.page(), report.redacted().page()
    uris = [pictures.data_uri(image) for image in shown.image_format.pictures(shown.inputs)]
    value = evidence.values(flat, evidence.samples(flat))[0][1][0].cells[0]
    for word in (*names, str(shown.labels[0].item()), value, *uris, "/srv/ann", "Not redacted."):
        assert word in whole
        assert word not in redacted
    assert "data:image/" not in redacted
    assert "<b>Redacted.</b>" in redacted
    assert "3 samples were recovered and are left out of this redacted report." in redacted


@pytest.fixture(scope="module")
def photos():
    """Four pictures, and what was recovered from their gradient."""
    x = torch.rand(4, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    net, y = mlp(48, 4, width=60, depth=3, seed=0), torch.arange(4)
    inputs = (x.flatten(1) - 0.5) / 0.25
    return x, inputs, y, spear.invert(spear.observe(net, fedsgd(net, inputs, y)))


def test_a_result_writes_its_report(photos, tmp_path):
    x, inputs, y, result = photos
    options = {"shape": (3, 4, 4), "mean": 0.5, "std": (0.25,), "title": "Ours"}
    page, file = tmp_path / "r.html", str(tmp_path / "r.json")
    result.report(page, **options, truth=(inputs.view_as(x), y))
    assert page.read_text(encoding="utf-8").count("data:image/png;base64,") == 8
    made = result.report(file, **options, truth=inputs)
    assert same(spear.load(file), made)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    (found,) = made.findings
    assert (made.title, made.kind, made.headline) == ("Ours", "inversion", found.headline)
    assert (found.outcome, found.reason) == (Outcome.EXACT, result.reason)
    assert found.layer.startswith("attacking '0' (48 -> 60, ReLU after)")
    assert min(found.truth.psnr) > 60
    result.report(page, **options, redact=True)
    assert "data:image/png" not in page.read_text(encoding="utf-8")
    for path in ("r.pdf", "report"):
        with pytest.raises(InvalidOption, match=r"ends in \.html or \.json"):
            result.report(tmp_path / path)
    with pytest.raises(InvalidOption, match="but the layer has 48 inputs"):
        result.report(shape=(3, 8, 8))


def test_a_notebook_shows_results_and_reports(photos, monkeypatch):
    formatters = pytest.importorskip("IPython.core.formatters", reason="needs IPython")
    *_, result = photos
    show = formatters.DisplayFormatter().format
    told, _ = show(result)
    shown = html.unescape(told["text/html"])
    assert all(word in shown for word in ("Recovered exactly", *result.assumptions))
    assert "<img" not in shown
    assert show(result.report(shape=(3, 4, 4)))[0]["text/html"].count("<img") == 4
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "No pictures: this needs Pillow" in result.report(shape=(3, 4, 4))._repr_html_()


@pytest.mark.parametrize("outcome", Outcome)
def test_a_check_is_headed_by_its_verdict(outcome):
    report = Report.new("check", "Is it?", "It is.", cases=[Case("net", outcome, "It is.")])
    told = words.verdict(report)
    assert told.tone == outcome.value
    assert told.name.startswith("Not exposed") == (outcome is Outcome.FAILED)
    assert told.name.startswith("Exposed") == (outcome is Outcome.EXACT)


def test_samples_that_only_lack_the_proof_are_called_likely_exact():
    found = reports.finding(outcome=Outcome.APPROXIMATE, approximate=(False,) * 4)
    assert found.headline == "4 of 4 samples were recovered, likely exactly; nothing proves it."
    likely = Report("inversion", "", "", (found,))
    assert words.verdict(likely).name == "Recovered, not proved (likely exact)"
    blurred = reports.finding(outcome=Outcome.APPROXIMATE)
    both = words.verdict(Report("flower", "", "", (found, blurred)))
    assert (both.name, both.tone) == ("Recovered approximately", "approximate")


def test_what_cannot_be_told_is_neither_leaked_nor_safe():
    one = words.verdict(KINDS["inconclusive"])
    assert (one.tone, one.name) == ("inconclusive", "Cannot tell")
    assert "one way or the other" in one.meaning
    findings = (*KINDS["failure"].findings, *KINDS["inconclusive"].findings)
    assert words.verdict(Report("flower", "", "", findings)).tone == "inconclusive"
    assert KINDS["inconclusive"].headline == "What this update gives away cannot be told."


def test_updates_that_were_not_attacked_are_not_counted_as_such():
    pytest.importorskip("jinja2", reason="needs the cli extra")
    attacked, left = reports.finding(), KINDS["inconclusive"].findings[0]
    left = dataclasses.replace(left, cause=Cause.NOT_ATTACKED)
    page = Report("flower", "", "", (attacked, left)).page()
    assert "<dt>update attacked</dt><dd>1</dd>" in page


def test_an_infinite_epsilon_is_shown_in_tables():
    epsilons = Table(
        "Epsilons", ("setting", "ε"), (("no noise", math.inf), ("z = 1", 3.2), ("lost", math.nan))
    )
    shown = Report("audit", "Noise", "Tried.", tables=(epsilons,)).page()
    assert [shown.count(f">{words}</td>") for words in ("∞", "3.2", "–")] == [1, 1, 1]
