"""Files of torch.save, as zip archives and as torch wrote them before 1.6, without `torch.load`.

Versions of torch before 2.6 ran code of a file that was made for it (CVE-2025-32434), also with
`weights_only`; later ones still allocate whatever a file claims.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from torch import Tensor

from spear.errors import InvalidFile
from spear.files.archives import archive, fill
from spear.files.limits import check_unpacked, looks_like
from spear.files.pickle_machine import Bounded, Refused
from spear.files.torch_pickles import ForeignValue, Storage, Stored, TensorsOnly

_PICKLED = 2**26  # bytes of the pickle: 64 MB describe far more tensors than `most_steps` allows
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # how files began before torch 1.6
_DEEPEST = 32  # of dicts and lists in each other
_PACKED = re.compile(r"\.u?int[1-7]$|_x2$|float4|qu?int")  # several numbers in a byte, or encoded

Read = Callable[[Storage], Tensor]


def read_torch(path: Path) -> Any:
    """The dicts, lists, numbers and tensors of a file, on the CPU; nothing in it is run.

    Tensors that are not dense, real and of the CPU's kind are `ForeignValue`.
    """
    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"
    with _told(path):
        return _zipped(path) if zipped else _old(path)


def _zipped(path: Path) -> Any:
    with archive(path, "file of torch.save") as opened:
        roots = [n.removesuffix("data.pkl") for n in opened.namelist() if n.endswith("/data.pkl")]
        if len(roots) != 1 or f"{roots[0]}constants.pkl" in opened.namelist():
            raise InvalidFile(
                f"{path}: expected an archive of torch.save, got another (a .npz, or a TorchScript "
                "model): store model.state_dict() with torch.save"
            )
        (root,) = roots
        if opened.getinfo(f"{root}data.pkl").file_size > _PICKLED:
            raise Refused(
                f"expected at most {_PICKLED:,} bytes that describe its tensors, got more"
            )
        content = TensorsOnly().load(opened.read(f"{root}data.pkl"))
        order = f"{root}byteorder"
        swapped = order in opened.namelist() and opened.read(order) == b"big"

        def read(storage: Storage) -> Tensor:
            return _numbers(opened, f"{root}data/{storage.key}", storage, swapped)

        return _Filled(path, read).of(content)


def _numbers(opened: ZipFile, name: str, storage: Storage, swapped: bool) -> Tensor:
    """The bytes of a storage."""
    if opened.getinfo(name).file_size != storage.bytes:
        raise ValueError(f"{name} holds another number of bytes than it should")
    raw = torch.empty(storage.bytes, dtype=torch.uint8)
    with opened.open(name) as entry:
        fill(raw.numpy(), entry)
    if swapped:
        item = storage.dtype.itemsize // (2 if storage.dtype.is_complex else 1)
        raw = raw.view(-1, item).flip(1).flatten()
    return raw


def _old(path: Path) -> Any:
    """As torch wrote before 1.6: pickles one after the other, then the numbers of each storage."""
    size = path.stat().st_size
    with path.open("rb") as file:
        stream = Bounded(file, min(size, _PICKLED))
        began = TensorsOnly().load(stream)
        if began != _MAGIC or TensorsOnly().load(stream) != _PROTOCOL:
            raise ValueError("it does not begin as files of torch.save do")
        TensorsOnly().load(stream)  # of the machine that wrote it
        machine = TensorsOnly()
        content = machine.load(stream)
        keys = TensorsOnly().load(stream)
        if not isinstance(keys, list) or not all(isinstance(k, str | bytes) for k in keys):
            raise ValueError("the list of its storages is none")
        held: dict[str, Tensor] = {}
        for name in keys:
            key = name.decode("latin1") if isinstance(name, bytes) else name
            count = int.from_bytes(file.read(8), "little", signed=True)
            storage = machine.storages.get(key)
            if storage is None or storage.count != count:
                raise ValueError("its tensors and their numbers do not fit each other")
            if storage.bytes > size - file.tell():
                raise EOFError("it ends too soon")
            held[key] = torch.empty(storage.bytes, dtype=torch.uint8)
            fill(held[key].numpy(), file)
        return _Filled(path, lambda storage: held[storage.key]).of(content)


class _Filled:
    """Puts tensors where their descriptions are, each storage read once."""

    def __init__(self, path: Path, read: Read) -> None:
        self.path, self.read = path, read
        self.held: dict[Storage, Tensor] = {}
        self.copied = 0  # bytes

    def of(self, content: Any, depth: int = 0) -> Any:
        if isinstance(content, Stored):
            return self._tensor(content)
        if depth > _DEEPEST:
            return None  # nobody's tensors are here, or it holds itself
        if isinstance(content, dict):
            return {key: self.of(value, depth + 1) for key, value in content.items()}
        if isinstance(content, list | tuple):
            return [self.of(part, depth + 1) for part in content]
        return content

    def _tensor(self, stored: Stored) -> Tensor | ForeignValue:
        if _PACKED.search(str(stored.dtype)):
            return ForeignValue(f"a tensor of {stored.dtype}")
        if stored.storage not in self.held:
            self.held[stored.storage] = self.read(stored.storage)
        raw = self.held[stored.storage]
        flat = raw != 0 if stored.dtype is torch.bool else raw.view(stored.dtype)
        tensor = flat.as_strided(stored.shape, stored.stride, stored.offset)
        if tensor.is_contiguous() and not stored.negated:
            return tensor
        self.copied += stored.bytes  # where it was expanded, many times what it takes on disk
        check_unpacked(self.path, self.copied)
        return -tensor if stored.negated else tensor.contiguous()


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """What is wrong with a file, in one sentence."""
    try:
        yield
    except Refused as error:
        raise InvalidFile(
            f"{path} is no file of tensors, or it holds objects that could run code when loaded (a "
            f"pickled model): store model.state_dict(), or a dict or list of tensors, with torch.save "
            f"({error}){looks_like(path)}"
        ) from error
    except (ValueError, LookupError, EOFError, OverflowError, TypeError) as error:
        if isinstance(error, InvalidFile):
            raise
        raise InvalidFile(
            f"{path} is no file of torch.save, or a damaged one ({str(error)[:200]}){looks_like(path)}"
        ) from error
