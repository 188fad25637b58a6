"""The parts of a report from their JSON. Nothing is guessed: what is not as written raises."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from spear.inversion import Outcome
from spear.judge import Cause, Proof
from spear.report.finding import Finding, ImageFormat, Truth
from spear.report.report import Cell, Drawing, Level, Remark, Report, Table

DTYPES = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "int64": "<i8", "int32": "<i4"}
_DEEPEST = 32  # of settings; far from Python's limit, which a page or a copy would meet
_LARGEST = 2**64  # a seed has up to 64 bits

T = TypeVar("T")


def report(content: dict[str, Any]) -> Report:
    """The report; its stated outcome and redaction must be true of its findings."""
    _only(content, Report, "schema", "outcome")
    read = Report(
        kind=_text(content["kind"]),
        title=_text(content["title"]),
        headline=_text(content["headline"]),
        findings=_each(finding, content["findings"]),
        remarks=_each(_remark, content["remarks"]),
        tables=_each(_table, content["tables"]),
        drawings=_each(_drawing, content["drawings"]),
        settings={_text(k): setting(v) for k, v in _mapping(content["settings"]).items()},
        versions={k: _text(v) for k, v in _mapping(content["versions"]).items()},
        created=_text(content["created"]),
        seconds=_maybe(_number, content["seconds"]),
        is_redacted=_flag(content["is_redacted"]),
        overall=None if content["overall"] is None else Outcome(content["overall"]),
    )
    stated = content["outcome"]
    if stated != (read.outcome and read.outcome.value):
        raise ValueError(f"it says the outcome was {stated!r:.40}, its findings say {read.outcome}")
    if read.is_redacted and any(found.holds_data for found in read.findings):
        raise ValueError("it says it is redacted, but holds recovered or true data")
    return read


def finding(content: Any) -> Finding:
    """One finding; its parts must fit each other."""
    content = {"details": [], **_mapping(content)}  # which reports had not from the start
    _only(content, Finding)
    return Finding(
        name=_text(content["name"]),
        layer=_text(content["layer"]),
        outcome=Outcome(content["outcome"]),
        proof=Proof(content["proof"]),
        reason=_text(content["reason"]),
        batch_size=_maybe(_count, content["batch_size"]),
        match=_maybe(_number, content["match"]),
        certified=_each(_flag, content["certified"]),
        approximate=_each(_flag, content["approximate"]),
        inputs=_maybe(tensor, content["inputs"]),
        labels=_maybe(tensor, content["labels"]),
        predicted_error=_maybe(_numbers, content["predicted_error"]),
        stats={name: _known(value) for name, value in _mapping(content["stats"]).items()},
        image_format=_maybe(_image_format, content["look"]),
        truth=_maybe(_truth, content["truth"]),
        activations=_flag(content["activations"]),
        notes=_each(_text, content["notes"]),
        cause=_maybe(Cause, content["cause"]),
        assumptions=_each(_text, content["assumptions"]),
        details=_each(_text, content["details"]),
    )


def tensor(content: Any) -> Tensor:
    """A tensor from its dtype, shape and bytes."""
    if set(_mapping(content)) != {"dtype", "shape", "base64"}:
        raise ValueError(
            f"expected a tensor's dtype, shape and base64, got {sorted(content)!r:.80}"
        )
    try:
        raw = base64.b64decode(_text(content["base64"]), validate=True)
    except binascii.Error as error:
        raise ValueError(f"a tensor is not base64: {error}") from error
    values = np.frombuffer(raw, dtype=DTYPES[_text(content["dtype"])])
    shape = _each(_count, content["shape"])
    if len(shape) > 2 or max(shape, default=0) >= 2**31 or math.prod(shape) != values.size:
        raise ValueError(f"a tensor has {values.size} values for the shape {shape!r:.80}")
    native = values.astype(values.dtype.newbyteorder("="))
    return torch.from_numpy(native).reshape(shape)


def setting(content: Any, depth: int = 0) -> Any:
    """A setting: words, numbers, lists and mappings, not nested without end."""
    if depth > _DEEPEST:
        raise ValueError(f"expected settings nested at most {_DEEPEST} deep")
    if isinstance(content, list):
        return [setting(part, depth + 1) for part in content]
    if isinstance(content, dict):
        return {_text(name): setting(part, depth + 1) for name, part in content.items()}
    return _cell(content)


def _image_format(content: Any) -> ImageFormat:
    _only(content, ImageFormat)
    channels, height, width = _each(_count, content["shape"])
    mean, std = _each(_number, content["mean"]), _each(_number, content["std"])
    return ImageFormat((channels, height, width), mean, std)


def _truth(content: Any) -> Truth:
    _only(content, Truth)
    return Truth(
        _each(_text, content["names"]),
        _maybe(tensor, content["inputs"]),
        _maybe(tensor, content["labels"]),
        _each(_whole, content["index"]),
        _numbers(content["psnr"]),
    )


def _remark(content: Any) -> Remark:
    _only(content, Remark)
    return Remark(Level(content["level"]), _text(content["subject"]), _text(content["words"]))


def _table(content: Any) -> Table:
    _only(content, Table)
    return Table(
        _text(content["title"]),
        _each(_text, content["columns"]),
        _each(lambda row: _each(_cell, row), content["rows"]),
        _text(content["caption"]),
    )


def _drawing(content: Any) -> Drawing:
    _only(content, Drawing)
    return Drawing(_text(content["title"]), _text(content["svg"]), _text(content["caption"]))


def name_in_json(field: dataclasses.Field[Any]) -> str:
    """What a report calls a field: its name, or the one that it had before."""
    name: str = field.metadata.get("json", field.name)
    return name


def _only(content: Any, kind: type, *more: str) -> None:
    """Raise unless the mapping has the fields of the dataclass, and no others."""
    wanted = {name_in_json(field) for field in dataclasses.fields(kind)} | set(more)
    missing, unknown = wanted - set(_mapping(content)), set(content) - wanted
    if missing:
        raise KeyError(f"{kind.__name__} without {', '.join(sorted(missing))}")
    if unknown:
        raise ValueError(f"unknown fields {', '.join(map(repr, sorted(unknown)[:5]))}")


def _mapping(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise TypeError(f"expected a mapping, got {content!r:.40}")
    return content


def _each(read: Callable[[Any], T], content: Any) -> tuple[T, ...]:
    if not isinstance(content, list):
        raise TypeError(f"expected a list, got {content!r:.40}")
    return tuple(read(part) for part in content)


def _maybe(read: Callable[[Any], T], content: Any) -> T | None:
    return None if content is None else read(content)


def _numbers(content: Any) -> tuple[float, ...]:
    return _each(_known, content)


def _known(content: Any) -> float:
    """A number; one that was none, or not finite, is NaN."""
    return math.nan if content is None else _number(content)


def _number(content: Any) -> float:
    if isinstance(content, bool) or not isinstance(content, (int, float)):
        raise TypeError(f"expected a number, got {content!r:.40}")
    return content if isinstance(content, float) else _whole(content)


def _whole(content: Any) -> int:
    if isinstance(content, bool) or not isinstance(content, int):
        raise TypeError(f"expected a whole number, got {content!r:.40}")
    if abs(content) >= _LARGEST:
        raise ValueError("a whole number is too large")
    return content


def _count(content: Any) -> int:
    if _whole(content) < 0:
        raise ValueError(f"expected a count, got {content}")
    return int(content)


def _cell(content: Any) -> Cell:
    if content is None or isinstance(content, (str, bool)):
        return content
    return _number(content)


def _flag(content: Any) -> bool:
    if not isinstance(content, bool):
        raise TypeError(f"expected true or false, got {content!r:.40}")
    return content


def _text(content: Any) -> str:
    if not isinstance(content, str):
        raise TypeError(f"expected words, got {content!r:.40}")
    return content
