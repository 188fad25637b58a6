"""Files of torch.save: torch.load reads them once checks show that it will not cost too much."""

from __future__ import annotations

import io
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spear.errors import InvalidFile, SpearError
from spear.files.archives import archive
from spear.files.limits import check_unpacked, checked_bytes, looks_like
from spear.files.pickles import check_pickle

_PICKLED = 2**26  # bytes of the pickles: 64 MB describe far more tensors than models have
_OLD = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # how files began before torch 1.6
_OLD_PICKLES = 5  # before the numbers: two that identify it, the machine, the content, its storages
# torch allows them, but a few bytes of file can make them take gigabytes or hours.
_NOT_ALLOWED = re.compile(r"(__builtin__|builtins)\.bytearray|_codecs\.encode")
# Under which names checkpoints keep the tensors if they hold other things too.
_NESTED = ("state_dict", "model_state_dict", "model", "weights", "gradients", "grads", "update")
_DEEPEST = 3  # levels of such nesting


def read_torch(path: Path) -> dict[str, Tensor]:
    """The tensors of a dict, a list, or a checkpoint that holds one of these; nothing in it is run."""
    with _told(path):
        _check(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
        found = _tensors_in(content)
        if found is None:
            raise InvalidFile(
                f"{path}: expected a dict or list of tensors, got a {type(content).__name__} without "
                "any"
            )
        return _dense(path, found)


def _check(path: Path) -> None:
    """Refuse files that would cost torch.load too much memory or time."""
    with path.open("rb") as file:
        start = file.read(16)
        if not start.startswith(b"PK\x03\x04"):
            if _OLD not in start:
                raise ValueError("it does not start like one")
            pickles = io.BytesIO(start + file.read(_PICKLED))
            _check_names(*(check_pickle(pickles) for _ in range(_OLD_PICKLES)))
            return
    with archive(path, "file of torch.save") as opened:
        names = opened.namelist()
        sizes = [entry.file_size for entry in opened.infolist() if "data.pkl" in entry.filename]
    if len(sizes) != 1 or any(name.endswith("/constants.pkl") for name in names):
        raise InvalidFile(
            f"{path}: expected an archive of torch.save, got another (a .npz, or a TorchScript model): "
            "store model.state_dict() with torch.save"
        )
    if sizes[0] > _PICKLED:
        raise ValueError(f"expected at most {_PICKLED:,} bytes to describe its tensors, got more")
    # torch finds entries whatever their case: one with letters could be read under many names.
    if any(re.search(r"/data/(?!\d+$)", name, re.I) for name in names):
        raise ValueError("its entries are not those that torch.save writes")
    # Read it as torch does: a crafted archive could show two readers different pickles.
    pickled = torch._C.PyTorchFileReader(str(path)).get_record("data.pkl")
    _check_names(check_pickle(io.BytesIO(pickled)))


def _check_names(*mentioned: set[str]) -> None:
    refused = [name for names in mentioned for name in names if _NOT_ALLOWED.fullmatch(name)]
    if refused:
        raise ValueError(f"it holds raw bytes ({refused[0]}): expected tensors, numbers and text")


def _tensors_in(content: Any, depth: int = 0) -> dict[str, Tensor] | None:
    if isinstance(content, Mapping):
        tensors = {str(k): v for k, v in content.items() if isinstance(v, Tensor)}
        if tensors or depth > _DEEPEST:
            return tensors or None
        inner = (_tensors_in(content[name], depth + 1) for name in _NESTED if name in content)
        return next((part for part in inner if part), None)
    if isinstance(content, list | tuple) and all(isinstance(part, Tensor) for part in content):
        return {str(i): part for i, part in enumerate(content)} or None
    return None


def _dense(path: Path, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as dense, contiguous ones; others, and those that would grow a lot, are refused."""
    dense, copied = {}, 0
    for name, given in found.items():
        tensor = Tensor.detach(given)  # not given.detach(): a file may give a tensor attributes
        kind = _foreign(tensor)
        if kind:
            raise InvalidFile(
                f"{path}: expected dense tensors of numbers, but {name!r:.80} is {kind}: store "
                "tensor.to_dense(), or tensor.dequantize()"
            )
        size = checked_bytes(tensor.shape, tensor.itemsize)
        if tensor.untyped_storage().nbytes() > path.stat().st_size:
            raise ValueError(f"{name!r:.80} has more numbers than the file")
        if not tensor.is_contiguous() or tensor.is_neg():
            copied += size  # where it was expanded, many times what it takes on disk
            check_unpacked(path, copied)
        dense[name] = tensor.resolve_neg().contiguous()
    return dense


def _foreign(tensor: Tensor) -> str:
    """What kind of tensor it is if the attack cannot use it (it needs all the numbers); else empty."""
    kinds = {
        "a nested tensor": tensor.is_nested,
        "a sparse tensor": tensor.layout is not torch.strided,
        "a quantised tensor": tensor.is_quantized,
        "a tensor without values (meta)": tensor.is_meta,
        "a tensor of another device": tensor.device.type != "cpu",
        "a tensor of another class": type(tensor) is not Tensor,
    }
    return next((kind for kind, true in kinds.items() if true), "")


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong with a file into one sentence."""
    try:
        yield
    except (SpearError, OSError):
        raise
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S{1,80})", str(error))
        raise InvalidFile(
            f"{path} holds objects other than tensors, numbers and text"
            f"{f' ({wanted[1]})' if wanted else ''}, which could run code when loaded, as a pickled "
            "model could; or it was saved with another pickle_protocol than torch.save's own: store "
            "model.state_dict(), or a dict or list of tensors, with torch.save"
        ) from error
    except Exception as error:  # what torch.load raises for a damaged file may be anything
        words = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise InvalidFile(
            f"{path} is not a file of torch.save, or a damaged one ({words}){looks_like(path)}"
        ) from error
