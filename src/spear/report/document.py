"""Reports to JSON and back. The schema has a version; `schema.json` beside this file defines it."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from spear.errors import InvalidOption, InvalidReport, SpearError
from spear.files import bytes_of, parsed
from spear.report import schema_1
from spear.report.report import Report

SCHEMA = "spear.report/2"
_LARGEST = 2**30  # bytes of a report; a hundred photos of 720 x 720 take 0.8 GB
_LARGEST_NUMBER = 2**64  # a seed has up to 64 bits
_DEEPEST = 32  # nesting of settings, well below Python's own limit
_DTYPES = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "int64": "<i8", "int32": "<i4"}
# Control characters that JSON allows and terminals obey.
_CONTROL_CHARACTERS = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}


def dump(report: Report) -> str:
    """The report as JSON text: tensors are base64 of their little-endian bytes, so no bit is lost."""
    fields = {f.name: getattr(report, f.name) for f in dataclasses.fields(report)}
    fields["settings"] = {str(k): _checked_setting(k, v) for k, v in report.settings.items()}
    outcome = report.outcome and report.outcome.value
    content = {"schema": SCHEMA, "outcome": outcome, **_plain(fields)}
    content["advice"] = _plain(report.advice)
    for part, finding in zip(content["findings"], report.findings, strict=True):
        part["threat"] = _plain(finding.threat)
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)
    # A path that is not UTF-8 contains lone surrogates; written as \udc.. they survive in JSON.
    return text.translate(_CONTROL_CHARACTERS).encode("utf-8", "backslashreplace").decode()


def load(path: str | Path) -> Report:
    """Read a report that `spear ... --json` or `Report.save` wrote.

    Every tensor comes back bit for bit; in a redacted report, recovered data are None. Reports of
    schema 1, which had no "cannot tell", are read as well: see `spear.report.schema_1`.
    """
    path = Path(path)
    try:
        content = parsed(bytes_of(path, _LARGEST), parse_constant=_refused, parse_float=_finite)
    except ValueError as error:
        raise InvalidReport(
            f"{path}: expected a report as JSON, got something else: {error!s:.200}"
        ) from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema not in (SCHEMA, schema_1.SCHEMA):
        raise InvalidReport(
            f"{path}: expected a report of schema {SCHEMA!r}, got {str(schema)[:40]!r}; if a newer "
            "SPEAR made it, read it with that"
        )
    try:
        return _report(schema_1.converted(content) if schema == schema_1.SCHEMA else content)
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, SpearError) as error:
        what = f"{type(error).__name__}: {error}"
        raise InvalidReport(
            f"{path}: the report is damaged ({what[:200]}): make it again, or restore the file"
        ) from error


def name_in_json(field: dataclasses.Field[Any]) -> str:
    """A field's name in the schema: its own, or the one it had when the schema was defined."""
    name: str = field.metadata.get("json", field.name)
    return name


def _refused(name: str) -> float:
    raise ValueError(f"{name} is not a number in JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits:.20} is too large")
    return value


def _plain(value: Any) -> Any:
    """A value as plain JSON types."""
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
        value = {name_in_json(f): getattr(value, f.name) for f in fields}
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if not (value is None or isinstance(value, (str, bool, int, float))):
        raise InvalidOption(
            f"expected words, numbers, lists and mappings in a report, got a {type(value).__name__}"
        )
    unreal = isinstance(value, float) and not math.isfinite(value)
    return None if unreal else value  # JSON has neither NaN nor infinity


def _checked_setting(name: object, value: Any) -> Any:
    """A setting as plain JSON types. Tensors are refused: redacting a report would not remove them."""
    try:
        return _setting(_plain_without_tensors(value))
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
        tensor = tensor.float()  # NumPy has no bfloat16; float32 holds every bit of it
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise InvalidOption(
            f"expected tensors of {', '.join(_DTYPES)} in a report, got {name}: convert them"
        )
    values = np.ascontiguousarray(tensor.numpy(), dtype=_DTYPES[name])
    text = base64.b64encode(values.tobytes()).decode("ascii")
    return {"dtype": name, "shape": list(tensor.shape), "base64": text}


def _report(content: dict[str, Any]) -> Report:
    """The report; raises if its stated outcome or redaction contradicts its findings."""
    stated = content.pop("outcome")
    content.pop("schema")
    content.pop("advice", None)  # made anew from the report
    for finding in _of(list, content["findings"]):
        _of(dict, finding).pop("threat", None)  # worded anew from the finding
    read: Report = _dataclass(Report, content)
    if stated != (read.outcome and read.outcome.value):
        raise ValueError(f"it says the outcome was {stated!r:.40}, its findings say {read.outcome}")
    if read.is_redacted and any(finding.holds_data for finding in read.findings):
        raise ValueError("it claims to be redacted, but holds data")
    return read


@cache
def _fields(kind: type) -> dict[str, tuple[str, Any]]:
    """The fields of a dataclass and their types, by their names in JSON."""
    types = get_type_hints(kind)
    return {name_in_json(f): (f.name, types[f.name]) for f in dataclasses.fields(kind)}


def _dataclass(kind: type, content: Any) -> Any:
    """A dataclass from a mapping that has its fields, and no others; later ones may be missing."""
    fields = _fields(kind)
    missing, unknown = fields.keys() - _of(dict, content).keys(), content.keys() - fields.keys()
    added = {f.name for f in dataclasses.fields(kind) if "added" in f.metadata}
    if missing - added:
        raise KeyError(f"{kind.__name__} without {', '.join(sorted(missing))}")
    if unknown:
        raise ValueError(f"unknown fields {', '.join(map(repr, sorted(unknown)[:5]))}")
    given = {name: pair for name, pair in fields.items() if name in content}
    return kind(**{own: _value(type_, content[name]) for name, (own, type_) in given.items()})


def _value(kind: Any, content: Any) -> Any:
    """A value of this type. Nothing is guessed: anything unexpected raises an error."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:
        others = [part for part in parts if part is not NoneType]
        one = len(others) == 1 and content is not None
        return _value(others[0], content) if one else _cell(content)
    if origin is tuple:
        kinds = parts[:1] * len(_of(list, content)) if parts[-1] is Ellipsis else parts
        return tuple(_value(*pair) for pair in zip(kinds, content, strict=True))
    if origin is Mapping:
        return {name: _value(parts[1], part) for name, part in _of(dict, content).items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _dataclass(kind, content)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(content)
    return _READERS[kind](content)


def _of(kind: type, content: Any) -> Any:
    if type(content) is not kind:
        raise TypeError(f"expected a {kind.__name__}, got {content!r:.40}")
    return content


def _number(content: Any) -> Any:
    if type(content) not in (int, float):
        raise TypeError(f"expected a number, got {content!r:.40}")
    if type(content) is int and abs(content) >= _LARGEST_NUMBER:
        raise ValueError("a whole number is too large")
    return content


def _cell(content: Any) -> Any:
    return content if content is None or isinstance(content, (str, bool)) else _number(content)


def _setting(content: Any, depth: int = 0) -> Any:
    """Words, numbers, lists and mappings, nested at most `_DEEPEST` levels."""
    if depth > _DEEPEST:
        raise ValueError(f"expected settings nested at most {_DEEPEST} deep")
    if isinstance(content, list):
        return [_setting(part, depth + 1) for part in content]
    if isinstance(content, dict):
        return {name: _setting(part, depth + 1) for name, part in content.items()}
    return _cell(content)


def _tensor(content: Any) -> Tensor:
    """A tensor from its dtype, shape and bytes."""
    if set(_of(dict, content)) != {"dtype", "shape", "base64"}:
        raise ValueError(
            f"expected a tensor's dtype, shape and base64, got {sorted(content)!r:.80}"
        )
    try:
        raw = base64.b64decode(_of(str, content["base64"]), validate=True)
    except binascii.Error as error:
        raise ValueError(f"a tensor is not base64: {error}") from error
    values = np.frombuffer(raw, dtype=_DTYPES[_of(str, content["dtype"])])
    shape = [_of(int, size) for size in _of(list, content["shape"])]
    fits = len(shape) <= 2 and all(0 <= size < 2**31 for size in shape)
    if not fits or math.prod(shape) != values.size:
        raise ValueError(f"a tensor has {values.size} values for the shape {shape!r:.80}")
    return torch.from_numpy(values.astype(values.dtype.newbyteorder("="))).reshape(shape)


_READERS: dict[Any, Callable[[Any], Any]] = {
    Any: _setting,
    Tensor: _tensor,
    str: partial(_of, str),
    bool: partial(_of, bool),
    int: lambda content: _number(_of(int, content)),
    float: lambda content: math.nan if content is None else _number(content),  # see _plain
}
