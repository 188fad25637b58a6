"""A report as JSON and back. The schema has a version; `schema.json` beside this file states it."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spear.certificate import Proof
from spear.errors import InvalidReport, SpearError
from spear.inversion import Outcome
from spear.report.finding import Finding, Look, Truth
from spear.report.report import Drawing, Level, Remark, Report, Table

SCHEMA = "spear.report/1"
_DTYPES = {"float64": "<f8", "float32": "<f4", "int64": "<i8"}


def dump(report: Report) -> str:
    """The report as JSON text: tensors are base64 of their little-endian bytes, so no bit is lost."""
    content = {
        "schema": SCHEMA,
        "outcome": report.outcome and report.outcome.value,
        **{f.name: _plain(getattr(report, f.name)) for f in dataclasses.fields(report)},
    }
    return json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)


def load(path: str | Path) -> Report:
    """Read a report that `spear ... --json` or `Report.save` wrote.

    Every tensor comes back bit for bit; in a redacted report what was recovered is None.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidReport(
            f"{path}: expected a report as JSON, got something else: {error}"
        ) from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise InvalidReport(
            f"{path}: expected a report of schema {SCHEMA!r}, got {str(schema)[:40]!r}; if it was made "
            "by a newer SPEAR, use that to read it"
        )
    try:
        return _report(content)
    except (KeyError, TypeError, ValueError, AttributeError, SpearError) as error:
        what = f"{type(error).__name__}: {error}"
        raise InvalidReport(
            f"{path}: the report is damaged ({what[:200]}): make it again, or restore the file"
        ) from error


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, Tensor):
        return _packed(value)
    if isinstance(value, (Outcome, Proof, Level)):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    unreal = isinstance(value, float) and not math.isfinite(value)
    return None if unreal else value  # JSON has neither NaN nor infinity: what is none is not there


def _packed(tensor: Tensor) -> dict[str, Any]:
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    name = str(tensor.dtype).removeprefix("torch.")
    values = np.ascontiguousarray(tensor.numpy(), dtype=_DTYPES[name])
    text = base64.b64encode(values.tobytes()).decode("ascii")
    return {"dtype": name, "shape": list(tensor.shape), "base64": text}


def _tensor(content: Any) -> Tensor | None:
    if content is None:
        return None
    try:
        raw = base64.b64decode(content["base64"], validate=True)
    except binascii.Error as error:
        raise ValueError(f"a tensor is not base64: {error}") from error
    values = np.frombuffer(raw, dtype=_DTYPES[content["dtype"]])
    shape = [int(size) for size in content["shape"]]
    return torch.from_numpy(values.astype(values.dtype.newbyteorder("="))).reshape(shape)


def _report(content: dict[str, Any]) -> Report:
    known = {field.name for field in dataclasses.fields(Report)} | {"schema", "outcome"}
    unknown = sorted(set(content) - known)
    if unknown:
        raise ValueError(f"unknown fields {', '.join(map(repr, unknown[:5]))}")
    report = Report(
        kind=_text(content["kind"]),
        title=_text(content["title"]),
        headline=_text(content["headline"]),
        findings=tuple(_finding(part) for part in content["findings"]),
        remarks=tuple(
            Remark(Level(part["level"]), _text(part["subject"]), _text(part["words"]))
            for part in content["remarks"]
        ),
        tables=tuple(_table(part) for part in content["tables"]),
        drawings=tuple(Drawing(**part) for part in content["drawings"]),
        settings=dict(content["settings"]),
        versions=dict(content["versions"]),
        created=_text(content["created"]),
        seconds=content["seconds"],
        is_redacted=bool(content["is_redacted"]),
    )
    stated = content["outcome"]
    if stated != (report.outcome and report.outcome.value):
        raise ValueError(f"it says the outcome was {stated!r}, its findings say {report.outcome}")
    return report


def _finding(content: dict[str, Any]) -> Finding:
    finding = Finding(
        **{
            **content,
            "outcome": Outcome(content["outcome"]),
            "proof": Proof(content["proof"]),
            "certified": tuple(bool(part) for part in content["certified"]),
            "approximate": tuple(bool(part) for part in content["approximate"]),
            "inputs": _tensor(content["inputs"]),
            "labels": _tensor(content["labels"]),
            "predicted_error": _numbers(content["predicted_error"]),
            "stats": dict(content["stats"]),
            "look": _look(content["look"]),
            "truth": _truth(content["truth"]),
            "notes": tuple(_text(part) for part in content["notes"]),
        }
    )
    k = finding.recovered
    lengths = {
        "approximate": finding.approximate,
        "inputs": finding.inputs,
        "labels": finding.labels,
        "truth": finding.truth.index if finding.truth else None,
    }
    for name, part in lengths.items():
        if part is not None and len(part) != k:
            raise ValueError(f"{name} has {len(part)} entries for {k} recovered samples")
    return finding


def _look(content: dict[str, Any] | None) -> Look | None:
    if content is None:
        return None
    channels, height, width = (int(size) for size in content["shape"])
    return Look((channels, height, width), tuple(content["mean"]), tuple(content["std"]))


def _truth(content: dict[str, Any] | None) -> Truth | None:
    if content is None:
        return None
    return Truth(
        tuple(_text(name) for name in content["names"]),
        _tensor(content["inputs"]),
        _tensor(content["labels"]),
        tuple(int(i) for i in content["index"]),
        _numbers(content["psnr"]) or (),
    )


def _table(content: dict[str, Any]) -> Table:
    return Table(
        _text(content["title"]),
        tuple(_text(name) for name in content["columns"]),
        tuple(tuple(row) for row in content["rows"]),
        _text(content["caption"]),
    )


def _numbers(content: Any) -> tuple[float, ...] | None:
    return (
        None if content is None else tuple(float("nan") if x is None else float(x) for x in content)
    )


def _text(content: Any) -> str:
    if not isinstance(content, str):
        raise TypeError(f"expected words, got {content!r:.40}")
    return content
