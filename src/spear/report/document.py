"""A report as JSON and back. The schema has a version; `schema.json` beside this file states it."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spear.errors import InvalidOption, InvalidReport, SpearError
from spear.files import bytes_of, parsed
from spear.report import reading, schema_1
from spear.report.report import Report

SCHEMA = "spear.report/2"
_LARGEST = 2**30  # bytes of a report; a hundred photos of 720 x 720 take 0.8 GB
# Control characters that JSON lets pass, and terminals obey.
_CONTROL_CHARACTERS = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}


def dump(report: Report) -> str:
    """The report as JSON text: tensors are base64 of their little-endian bytes, so no bit is lost."""
    fields = {f.name: getattr(report, f.name) for f in dataclasses.fields(report)}
    fields["settings"] = {str(k): _setting(k, v) for k, v in report.settings.items()}
    outcome = report.outcome and report.outcome.value
    content = {"schema": SCHEMA, "outcome": outcome, **_plain(fields)}
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)
    # A path that is no UTF-8 has half characters; as \udc.. they are JSON, and come back.
    return text.translate(_CONTROL_CHARACTERS).encode("utf-8", "backslashreplace").decode()


def load(path: str | Path) -> Report:
    """Read a report that `spear ... --json` or `Report.save` wrote.

    Every tensor comes back bit for bit; in a redacted report what was recovered is None. Reports of
    schema 1, before there was "cannot tell", are read as well: see `spear.report.schema_1`.
    """
    path = Path(path)
    try:
        raw = bytes_of(path, _LARGEST)
        content = parsed(raw, parse_constant=_refused, parse_float=_finite)
    except ValueError as error:
        raise InvalidReport(
            f"{path}: expected a report as JSON, got something else: {error!s:.200}"
        ) from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema not in (SCHEMA, schema_1.SCHEMA):
        raise InvalidReport(
            f"{path}: expected a report of schema {SCHEMA!r}, got {str(schema)[:40]!r}; if it was made "
            "by a newer SPEAR, use that to read it"
        )
    try:
        current = schema_1.converted(content) if schema == schema_1.SCHEMA else content
        return reading.report(current)
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, SpearError) as error:
        what = f"{type(error).__name__}: {error}"
        raise InvalidReport(
            f"{path}: the report is damaged ({what[:200]}): make it again, or restore the file"
        ) from error


def _refused(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits:.20} is too large")
    return value


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, Tensor):
        return _packed(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        value = {reading.name_in_json(f): getattr(value, f.name) for f in fields}
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if not (value is None or isinstance(value, (str, bool, int, float))):
        raise InvalidOption(
            f"expected words, numbers, lists and mappings in a report, got a {type(value).__name__}"
        )
    unreal = isinstance(value, float) and not math.isfinite(value)
    return None if unreal else value  # JSON has neither NaN nor infinity: what is none is not there


def _setting(name: object, value: Any) -> Any:
    """A setting as JSON has it: no tensors, which a redacted report would not leave out."""
    try:
        return reading.setting(_plain_without_tensors(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidOption(f"setting {str(name)!r:.80}: {error}") from error


def _plain_without_tensors(value: Any) -> Any:
    if isinstance(value, (Tensor, np.ndarray)):
        raise TypeError("expected words, numbers, lists and mappings, got a tensor")
    if isinstance(value, Mapping):
        return {str(name): _plain_without_tensors(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_without_tensors(part) for part in value]
    return _plain(value)


def _packed(tensor: Tensor) -> dict[str, Any]:
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.float()  # NumPy has none; float32 holds every bit of it
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in reading.DTYPES:
        raise InvalidOption(
            f"expected tensors of {', '.join(reading.DTYPES)} in a report, got {name}: convert them"
        )
    values = np.ascontiguousarray(tensor.numpy(), dtype=reading.DTYPES[name])
    text = base64.b64encode(values.tobytes()).decode("ascii")
    return {"dtype": name, "shape": list(tensor.shape), "base64": text}
