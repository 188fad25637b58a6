"""Reader for UCI ADULT: census records of 48,842 people, and whether they earn over 50,000 dollars."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from spear.data.images import check_split
from spear.data.known import ADULT
from spear.data.places import text_of
from spear.data.tabular import Column, TabularData
from spear.errors import DamagedData, DataError

MISSING = "?"  # a category of its own where it occurs
LABELS = ("<=50K", ">50K")
FILES = {"train": ("adult.data", 32_561), "test": ("adult.test", 16_281)}  # and their rows
_LARGEST = 2**24  # bytes of a file; the larger one has 4 MB
# As adult.names lists them; an empty list marks a column of numbers.
COLUMNS = {
    "age": "",
    "workclass": "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov "
    "Without-pay Never-worked ?",
    "fnlwgt": "",
    "education": "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th "
    "12th Masters 1st-4th 10th Doctorate 5th-6th Preschool",
    "education-num": "",
    "marital-status": "Married-civ-spouse Divorced Never-married Separated Widowed "
    "Married-spouse-absent Married-AF-spouse",
    "occupation": "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty "
    "Handlers-cleaners Machine-op-inspct Adm-clerical Farming-fishing Transport-moving "
    "Priv-house-serv Protective-serv Armed-Forces ?",
    "relationship": "Wife Own-child Husband Not-in-family Other-relative Unmarried",
    "race": "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black",
    "sex": "Female Male",
    "capital-gain": "",
    "capital-loss": "",
    "hours-per-week": "",
    "native-country": "United-States Cambodia England Puerto-Rico Canada Germany "
    "Outlying-US(Guam-USVI-etc) India Japan Greece South China Cuba Iran Honduras Philippines "
    "Italy Poland Jamaica Vietnam Mexico Portugal Ireland France Dominican-Republic Laos Ecuador "
    "Taiwan Haiti Columbia Hungary Guatemala Nicaragua Scotland Thailand Yugoslavia El-Salvador "
    "Trinadad&Tobago Peru Hong Holand-Netherlands ?",
}
INDEX = {name: {c: i for i, c in enumerate(text.split())} for name, text in COLUMNS.items()}


def adult(root: Path, split: str = "train") -> TabularData:
    """UCI ADULT in its original files, `adult/adult.data` ("train") and `adult/adult.test` ("test").

    108 inputs: eight columns of categories one-hot, six numbers standardised by the mean and standard
    deviation of the training file, whichever split is read. A missing entry, `?`, is a category.
    """
    check_split(split, FILES)
    folder = ADULT.find(root)
    ADULT.split(root, folder, [FILES[split][0]], split)
    files = [FILES[name][0] for name in dict.fromkeys(("train", split))]
    paths = ADULT.split(
        root, folder, files, split
    )  # test records are standardised like the training ones
    values, labels = _read(paths[0], FILES["train"][1])
    columns = tuple(
        Column(name, tuple(INDEX[name])) if INDEX[name] else Column.of(name, values[:, i].tolist())
        for i, name in enumerate(COLUMNS)
    )
    if split == "test":
        values, labels = _read(paths[1], FILES["test"][1])
    return TabularData("ADULT", columns, LABELS, labels, values)


def _read(path: Path, rows: int) -> tuple[Tensor, Tensor]:
    """Numbers and category indices (N, 14) and labels (N,) of one file."""
    lines = text_of(path, _LARGEST).splitlines()
    values, problems = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("|"):  # a comment, the first line of adult.test
            continue
        try:
            values.append(_row(line))
        except DataError as error:
            problems.append(f"line {number}: {error}")
    if problems:
        more = f" (and {len(problems) - 3} more lines)" if len(problems) > 3 else ""
        raise DamagedData(f"{path}: {'; '.join(problems[:3])}{more}: copy the file again")
    if len(values) != rows:
        raise DamagedData(
            f"{path}: expected {rows:,} rows, got {len(values):,}; the last is line {len(lines):,}: "
            "copy the file again"
        )
    table = torch.tensor(values, dtype=torch.float64)
    return table[:, :-1].contiguous(), table[:, -1].long()


def _row(line: str) -> list[float]:
    """One line as fourteen numbers or category indices and the index of its label."""
    *fields, label = [field.strip() for field in line.split(",")]
    if len(fields) != len(COLUMNS):
        raise DataError(f"expected {len(COLUMNS) + 1} fields, got {len(fields) + 1}")
    label = label.removesuffix(".")  # adult.test writes one
    if label not in LABELS:
        raise DataError(f"expected one of the labels {', '.join(LABELS)}, got {label!r}")
    values = [_entry(name, text) for name, text in zip(COLUMNS, fields, strict=True)]
    return [*values, LABELS.index(label)]


def _entry(name: str, text: str) -> float:
    categories = INDEX[name]
    if categories:
        if text not in categories:
            raise DataError(f"{text!r} is not a known {name}")
        return categories[text]
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"expected a number for {name}, got {text!r}")
    return number
