"""Pages of the documentation: their examples run, their tables are drawn from the rows."""

import ast
import doctest
import json
import re
import statistics
from collections import Counter
from pathlib import Path

import pytest

import flops
import rounds_theory
from spear.experiments.common.figures import metric, where
from spear.trials import RowFile

ROOT = Path(__file__).parents[2]
PAGES = [
    "settings.md",
    "start.md",
    "send.md",
    "report.md",
    "extending.md",
    "rounds.md",
    "pipelines.md",
]
# What docs/settings.md says of a setting: the words, the experiment, and which of its rows.
MEASURED = [
    ("FedSGD, 20 of TinyImageNet", "main", {"data": "tiny_imagenet", "finder": "cascade"}),
    ("one class", "one_label", {}),
    ("FedAvg, 1 epoch", "fedavg_epochs", {"epochs": 1}),
    ("5 epochs, momentum 0.9", "fedavg_epochs", {"momentum": 0.9}),
    ("50 epochs", "fedavg_epochs", {"epochs": 50}),
    ("20 epochs, mini-batches of 5", "fedavg_epochs", {"mini": 5}),
    ("5 epochs, learning rate 0.001", "fedavg_rates", {"lr": 0.001}),
    ("clipping, C = 1", "dpsgd", {"clip": 1.0, "sigma": 0.0}),
    ("C = 1, σ = 1e-5", "dpsgd", {"clip": 1.0, "sigma": 1e-5}),
    ("C = 1, σ = 1e-4", "dpsgd", {"clip": 1.0, "sigma": 1e-4}),
    ("inputs of layer 5", "layers", {"layer": 5, "steps": 0}),
    ("layer 5 after 5,000 steps", "layers", {"layer": 5, "steps": 5000}),
    ("features of VGG16, 16 photos", "features", {"attack": "spear"}),
    ("ADULT, 16 people", "tabular", {"b": 16}),
    ("ADULT, 24 people", "tabular", {"b": 24}),
    ("ADULT, 32 people", "tabular", {"b": 32}),
]
# A page of the repository; the file that a user's own drawing goes to is none.
_PAGE_FILE = re.compile(r"(?<!--page )docs/\w|(?<!docs/)\b[\w-]+\.md\b")


def rows_of(folder, name):
    return list(RowFile(ROOT / "results" / folder, name).rows().values())


def verdicts(rows):
    return ", ".join(
        f"{n} {outcome}" for outcome, n in Counter(r.outcome for r in rows).most_common()
    )


def worst(rows):
    found = metric(rows, "worst")
    return f"{min(found):.1f} dB" if found else ""


def measured_table():
    """The last table of docs/settings.md."""
    lines = [
        "| setting | exact batches | verdicts | mean PSNR | worst sample | `spear reproduce` |",
        "|---|---|---|---|---|---|",
    ]
    for words, name, settings in MEASURED:
        rows = [row for row in where(rows_of("", name), **settings) if "proof" in row.metrics]
        exact, psnr = sum(map(bool, metric(rows, "exact"))), metric(rows, "psnr")
        mean = f"{statistics.fmean(psnr):.1f} dB" if psnr else ""
        lines.append(
            f"| {words} | {exact} of {len(rows)} | {verdicts(rows)} | {mean} | {worst(rows)} | {name} |"
        )
        assert not any(metric(rows, "certified_wrong"))
    return "\n".join(lines)


def defences_table():
    """What `spear audit` measured of each defence."""
    groups = {}
    for row in rows_of("defences", "leakage"):
        known = ("samples", "subject", "max_seconds")
        own = [f"{key} {value}" for key, value in row.settings.items() if key not in known]
        groups.setdefault(", ".join(own) or "none", []).append(row)
    lines = ["| defence | exact batches | verdicts | worst sample |", "|---|---|---|---|"]
    for words, rows in groups.items():
        exact = sum(map(bool, metric(rows, "exact")))
        lines.append(f"| {words} | {exact} of {len(rows)} | {verdicts(rows)} | {worst(rows)} |")
        assert not any(metric(rows, "certified_wrong"))
    return "\n".join(lines)


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page, data_root, monkeypatch):
    monkeypatch.setenv("SPEAR_DATA", str(data_root.resolve()))
    failed, _ = doctest.testfile(str(ROOT / "docs" / page), module_relative=False, encoding="utf-8")
    assert failed == 0


@pytest.mark.parametrize("table", [measured_table, defences_table])
def test_the_tables_of_settings_are_drawn_from_the_rows(table):
    assert table() in (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")


def test_the_speed_up_of_two_processes_is_what_the_rows_say():
    text = (ROOT / "benchmarks" / "rows" / "spread.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    page = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    assert all(row["same_bits"] and row["others"] <= 0.01 for row in rows)
    for case in {row["case"] for row in rows}:
        one, two = (
            [row["seconds"] for row in rows if (row["case"], row["arm"]) == (case, arm)]
            for arm in ("one process", "two processes")
        )
        faster = statistics.median(a / b for a, b in zip(one, two, strict=True))
        line = next(line for line in page.splitlines() if line.startswith(f"| {case}"))
        medians = f"| {statistics.median(one):.1f} s | {statistics.median(two):.1f} s "
        assert f"{medians}| {faster:.2f}x |" in line


def test_what_a_gpu_would_take_is_what_the_rows_say():
    text = (ROOT / "benchmarks" / "rows" / "flops.jsonl").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "devices.md").read_text(encoding="utf-8")
    assert flops.tables([json.loads(line) for line in text.splitlines()]) in page


def rounds_rows():
    text = (ROOT / "benchmarks" / "rows" / "rounds_theory.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("column", sorted(rounds_theory.SHARES))
def test_the_tables_of_rounds_are_drawn_from_the_rows(column):
    page = (ROOT / "docs" / "rounds.md").read_text(encoding="utf-8")
    assert rounds_theory.table(rounds_rows(), column) in page


def test_the_rounds_foreseen_are_those_measured():
    """For nine samples in ten, behind two layers; the page tells where it does not hold."""
    rows = [row for row in rounds_rows() if row["depth"] == 3 and row["most"]]
    off = [abs(rounds_theory.foreseen([row], "most") - row["most"]) for row in rows]
    assert statistics.mean(apart <= 1 for apart in off) >= 0.85
    assert all(apart <= max(1, 0.5 * row["most"]) for apart, row in zip(off, rows, strict=True))


def texts(path):
    """What a user may read of a file: strings and docstrings, not comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return [text]
    nodes = ast.walk(ast.parse(text))
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def test_messages_name_pages_that_come_with_the_wheel():
    """A user of the wheel has no `docs` folder: messages say `spear docs NAME`."""
    builder = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling")
    wheel = builder.WheelBuilder(str(ROOT)).recurse_included_files()
    there = {Path(file.distribution_path).as_posix() for file in wheel}
    source = ROOT / "src" / "spear"
    files = [p for p in source.rglob("*") if p.suffix in (".py", ".j2", ".json", ".js")]
    told = {text: path for path in files for text in texts(path)}
    files_named = [(path.name, text) for text, path in told.items() if _PAGE_FILE.search(text)]
    assert files_named == []
    named = {name for text in told for name in re.findall(r"spear docs ([a-z][a-z-]*)", text)}
    assert {"audit", "settings", "extending"} <= named
    assert {f"spear/docs/{name}.md" for name in named} <= there
    assert not [name for name in there if "docs/" in name and not name.endswith(".md")]
