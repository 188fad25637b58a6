"""JSON of others: reports and rows that are damaged, nested without end, or say what cannot be."""

import contextlib
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("jinja2", reason="needs the cli extra")

import spear
from spear.errors import DataError, InvalidReport
from spear.files import json_text
from spear.trials import RowFile
from support import reports
from support.hostile_files import LINES

BARE = reports.every()["bare"].json()
ANY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["../../up.png", "\x1b[31m", "mnist", "cascade", "done", "exact"]),
    st.lists(st.integers(-3, 3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.one_of(st.integers(), st.text(max_size=3)), max_size=2),
)
QUICK = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[" * 5000 + b"]" * 5000,
        b'{"schema": ' + b"9" * 10_000 + b"}",
        b'{"schema": 1e999}',
        b'{"schema": NaN}',
        b'{"schema": "spear.report/1"}',
        b'{"schema": "spear.report/2"}',
        BARE.replace('"title"', '"headline"').encode(),
        BARE.replace('"seconds": null', f'"seconds": 1{"0" * 400}').encode(),
        b"\x89PNG",
        b"<html>",
    ],
)
def test_what_is_no_report_is_told(tmp_path, content):
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(InvalidReport, match=r"r\.json"):
        spear.load(path)


def test_names_that_are_no_reports(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**40)  # takes no room on disk
    for name in ("pipe", "zero", "large", "."):
        with pytest.raises(InvalidReport, match="expected"):
            spear.load(tmp_path / name)
    os.rename(tmp_path / "pipe", tmp_path / "main.jsonl")
    with pytest.raises(DataError, match="expected"):
        RowFile(tmp_path, "main").rows()


def test_a_byte_order_mark_does_no_harm(tmp_path):
    (tmp_path / "r.json").write_bytes(b"\xef\xbb\xbf" + BARE.encode())
    assert spear.load(tmp_path / "r.json").title == "Nothing yet"


def test_reports_hold_nothing_that_a_terminal_obeys():
    hostile = spear.Report("check", "a\x1b[31m\x9b31m\x07b", "c")
    assert not set(hostile.json()) & {"\x1b", "\x9b", "\x07"}
    assert json.loads(hostile.json())["title"] == hostile.title


@pytest.mark.parametrize("name", ["exact", "audit"])
def test_changed_reports_are_refused_or_rendered(tmp_path_factory, name):
    path = tmp_path_factory.mktemp("report") / "r.json"
    whole = json.loads(reports.every()[name].json())

    @QUICK
    @given(data=st.data())
    def changed(data):
        content = json.loads(json.dumps(whole))
        place = content
        while True:
            keys = sorted(place) if isinstance(place, dict) else range(len(place))
            key = data.draw(st.sampled_from(list(keys)))
            inner = place[key]
            if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
                break
            place = inner
        place[key] = data.draw(ANY)
        path.write_text(json.dumps(content), encoding="utf-8")
        with contextlib.suppress(InvalidReport):  # any other error fails
            found = spear.load(path)
            found.page()
            found.json()

    changed()


def test_changed_rows_are_refused_or_read(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    whole = json.loads(LINES["rows"])

    @QUICK
    @given(
        changes=st.dictionaries(st.sampled_from(sorted(whole)), ANY, min_size=1, max_size=2),
        without=st.sampled_from([None, *sorted(whole)]),
    )
    def changed(changes, without):
        content = {n: v for n, v in {**whole, **changes}.items() if n != without}
        line = json.dumps(content).encode()
        (folder / "main.jsonl").write_bytes(LINES["rows"] + b"\n" + line + b"\n")
        with contextlib.suppress(DataError):  # any other error fails
            for row in RowFile(folder, "main").rows().values():
                assert not {"/", "\\"} & {c for n in row.pictures.values() for c in n}
                assert row.cut_short in (True, False)

    changed()


def test_valid_rows_are_read(tmp_path):
    (tmp_path / "main.jsonl").write_bytes(LINES["rows"] + b"\n")
    assert len(RowFile(tmp_path, "main").rows()) == 1


def test_text_of_json_is_strict():
    assert json_text.parsed("[1, 2]") == [1, 2]
    for wrong in ('{"a": 1, "a": 2}', "[" * 10**5, "nothing", "1" * 5000):
        with pytest.raises(ValueError, match=r"twice|nested|Expecting|digits"):
            json_text.parsed(wrong)
