"""Atheris (coverage-guided fuzzing) on every reader of files.

    pip install atheris
    python tools/fuzz.py torch -runs=100000 -max_total_time=600 corpus/

Targets: torch (.pt), npz, safetensors, report (spear.load), rows (spear reproduce, bench, audit),
cifar (pickles), idx (MNIST), adult. Further arguments are libFuzzer's: `-runs`, `-max_total_time`, a
folder to keep the corpus in, or a file that once crashed, to run it again. A corpus starts from valid
and from hostile files. Any error but SPEAR's own is a crash.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import atheris

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("src", "tests")]

with atheris.instrument_imports(include=["spear", "zipfile", "pickletools", "json", "numpy.lib"]):
    import numpy as np
    import torch

    from spear.data import adult as adult_reader
    from spear.data.images import read_idx, unpickle
    from spear.errors import SpearError
    from spear.files.tensors import read_tensors
    from spear.report import load
    from spear.trials import RowFile
    from support import hostile_files as hostile
    from support import reports

SCRATCH = Path(tempfile.mkdtemp(prefix="spear-fuzz-"))


def _on(name: str, read: Callable[[Path], object]) -> Callable[[bytes], None]:
    """A target that writes its bytes to a file of that name, and reads it."""
    path = SCRATCH / name

    def target(data: bytes) -> None:
        path.write_bytes(
            data + b"\n" * (path.suffix == ".jsonl")
        )  # a line without is torn, and none
        with contextlib.suppress(SpearError):
            read(path)

    return target


def _page(path: Path) -> None:
    found = load(path)
    found.json()
    found.page()


def _adult(path: Path) -> None:
    adult_reader.__globals__["_read"](path, 2)


TARGETS = {
    "torch": _on("w.pt", read_tensors),
    "npz": _on("w.npz", read_tensors),
    "safetensors": _on("w.safetensors", read_tensors),
    "report": _on("report.json", _page),
    "rows": _on("main.jsonl", lambda path: RowFile(path.parent, "main").rows()),
    "cifar": _on("test_batch", unpickle),
    "idx": _on("images", lambda path: read_idx(path, 100, (28, 28))),
    "adult": _on("adult.data", _adult),
}


def seeds(target: str) -> list[bytes]:
    """Valid and hostile files to start from."""
    marker = SCRATCH / "ran"
    small = {"a.weight": torch.ones(3, 2), "b": torch.zeros(2, dtype=torch.int64)}
    if target == "torch":
        old = hostile.saved(small, _use_new_zipfile_serialization=False)
        kept = _small(hostile.torch_files(marker))
        return [hostile.saved(small), hostile.saved([torch.ones(2)]), old, *kept]
    if target == "npz":
        plain = io.BytesIO()
        np.savez(plain, **{name: tensor.numpy() for name, tensor in small.items()})
        return [
            plain.getvalue(),
            *_small(hostile.npz_files(marker)),
        ]
    if target == "safetensors":
        from safetensors.torch import save

        return [save(small), *_small(hostile.safetensors_files())]
    if target == "report":
        return [report.json().encode() for report in reports.every().values()]
    return _other_seeds(target)


def _small(files: dict[str, hostile.Content]) -> list[bytes]:
    return [raw for raw in files.values() if isinstance(raw, bytes) and len(raw) < 10_000]


def _other_seeds(target: str) -> list[bytes]:
    if target == "cifar":
        import pickle

        content = {b"data": np.zeros((2, 3), np.uint8), b"labels": [0, 1]}
        return [pickle.dumps(content, protocol=protocol) for protocol in range(6)]
    if target == "idx":
        return [bytes([0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 28, 0, 0, 0, 28]) + bytes(784)]
    return [hostile.LINES[target]]


def main() -> None:
    """Run one target until libFuzzer ends."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in TARGETS:
        sys.exit(f"expected a target of {', '.join(TARGETS)}, got {name!r}")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    corpus = SCRATCH / "seeds"
    corpus.mkdir()
    for i, content in enumerate(seeds(name)):
        (corpus / f"{i:03}").write_bytes(content)
    folders = [word for word in sys.argv[2:] if not word.startswith("-")]
    arguments = [
        sys.argv[0],
        *sys.argv[2:],
        *([] if any(map(_is_file, folders)) else [str(corpus)]),
    ]
    atheris.Setup(arguments, TARGETS[name])
    atheris.Fuzz()


def _is_file(word: str) -> bool:
    return Path(word).is_file()


if __name__ == "__main__":
    main()
