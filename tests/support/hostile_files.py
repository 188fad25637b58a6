"""Files that were made to do harm, by name: each is to be refused, at once, in little memory."""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable

import numpy as np
import torch

GIGABYTE = 2**30
LIMIT = "0.25"  # SPEAR_MAX_FILE_GB for the tests: small bombs will do
BOMB = 5 * 2**23  # bytes: 40 MB, more than may be unpacked under that limit
Content = bytes | Callable[[], bytes]


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function, *arguments):
        self.parts = function, arguments

    def __reduce__(self):
        return self.parts


def zipped(entries, compression=zipfile.ZIP_STORED) -> bytes:
    """An archive of (name, content); names may repeat."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression, compresslevel=1) as archive:
        for name, content in entries:
            archive.writestr(zipfile.ZipInfo(name), content, compression)
    return buffer.getvalue()


def saved(content, **options) -> bytes:
    """As torch.save writes it."""
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def npy(header: bytes | dict, content: bytes = b"", version=(1, 0)) -> bytes:
    """An array of numpy.save whose header says what it likes."""
    text = header if isinstance(header, bytes) else repr(header).encode()
    length = struct.pack("<H" if version == (1, 0) else "<I", len(text) + 1)
    return b"\x93NUMPY" + bytes(version) + length + text + b"\n" + content


def described(descr, shape, fortran=False) -> dict:
    return {"descr": descr, "fortran_order": fortran, "shape": shape}


def safetensors(header, content: bytes = b"", length: int | None = None) -> bytes:
    """A file of safetensors whose header says what it likes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + content


def entry(dtype="F32", shape=(2,), offsets=(0, 8)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def archive_of(pickled: bytes, storages=(b"\0" * 32,), **more: bytes) -> bytes:
    """An archive as torch.save writes, around any pickle."""
    entries = [("a/data.pkl", pickled), ("a/byteorder", more.get("byteorder", b"little"))]
    entries += [(f"a/data/{i}", content) for i, content in enumerate(storages)]
    return zipped([*entries, ("a/version", b"3\n")])


def tensor_pickle(count=8, offset=0, shape=(8,), stride=(1,), kind=b"FloatStorage", key=b"0"):
    """The pickle of {"w": tensor}, with any numbers in it."""

    def whole(n):
        return b"\x8a\x08" + struct.pack("<q", n)

    def several(numbers):
        return b"(" + b"".join(map(whole, numbers)) + b"t"

    storage = b"(X\x07\0\0\0storagectorch\n" + kind + b"\nX" + struct.pack("<I", len(key)) + key
    storage += b"X\x03\0\0\0cpu" + whole(count) + b"tQ"
    place = whole(offset) + several(shape) + several(stride)
    rebuilt = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + place
    return b"\x80\x02}X\x01\0\0\0w" + rebuilt + b"\x89ccollections\nOrderedDict\n)RtRs."


def torch_files(marker) -> dict[str, Content]:
    """Hostile .pt files; those that run code would make `marker`."""
    system, opened = Call(os.system, f"touch {marker}"), Call(open, str(marker), "w")
    whole = saved({"w": torch.ones(8)})
    old = saved({"w": torch.ones(8)}, _use_new_zipfile_serialization=False)
    lying = old.replace(struct.pack("<q", 8) + bytes(torch.ones(8).numpy()), b"")
    return {
        "os.system": saved({"w": system}),
        "eval": saved({"w": Call(eval, f"open({str(marker)!r}, 'w')")}),
        "open, old": saved({"w": opened}, _use_new_zipfile_serialization=False),
        "exec in a bare pickle": pickle.dumps(Call(exec, f"open({str(marker)!r}, 'w')")),
        "os.system, protocol 0": pickle.dumps(system, protocol=0),
        "inst": b"(S'touch " + str(marker).encode() + b"'\nios\nsystem\n.",
        "torch.load": saved({"w": Call(torch.load, str(marker))}),
        "a module": saved(torch.nn.Linear(2, 2)),
        "getattr chain": archive_of(
            b"\x80\x02cbuiltins\ngetattr\n(ctorch\nTensor\nX\x01\0\0\0xtR."
        ),
        "newobj of storage": archive_of(
            b"\x80\x02}X\x01\0\0\0wctorch.storage\nUntypedStorage\n\x8a\x05\0\0\0\0\x40\x85\x81s."
        ),
        "bytearray of 64 GB": archive_of(
            b"\x80\x02}X\x01\0\0\0bc__builtin__\nbytearray\n\x8a\x05\0\0\0\0\x10\x85Rs."
        ),
        "tensor without storage": archive_of(
            b"\x80\x02}X\x01\0\0\0wctorch\nTensor\n\x8a\x05\0\0\0\0\x10\x85Rs."
        ),
        "memo index": archive_of(b"\x80\x02}Nr\xff\xff\xff\x7f0."),
        "deep key": archive_of(b"\x80\x02})" + b"\x85" * 300_000 + b"Ns."),
        "wide key": archive_of(b"\x80\x02})" + b"q\x01h\x01\x86" * 60 + b"Ns."),
        "text of 4 GB": archive_of(b"\x80\x02}X" + struct.pack("<I", 2**32 - 1) + b"abc."),
        "holds itself": archive_of(b"\x80\x02}q\0X\x0a\0\0\0state_dicth\0s."),
        "holds itself in a list": archive_of(b"\x80\x02]q\0h\0a."),
        "numbers for more than there are": archive_of(tensor_pickle(2**40, shape=(2**40,))),
        "numbers beyond the storage": archive_of(tensor_pickle(shape=(2**20,))),
        "an offset beyond the storage": archive_of(tensor_pickle(offset=2**40)),
        "a negative offset": archive_of(tensor_pickle(offset=-4)),
        "a negative size": archive_of(tensor_pickle(shape=(-8,))),
        "a negative count": archive_of(tensor_pickle(-8)),
        "a negative stride": archive_of(tensor_pickle(stride=(-1,))),
        "a stride that overflows": archive_of(tensor_pickle(shape=(2, 2), stride=(2**62, 2**62))),
        "one number for a terabyte": archive_of(tensor_pickle(shape=(2**38,), stride=(0,))),
        "nothing of a huge shape": archive_of(tensor_pickle(shape=(0, 2**62), stride=(1, 1))),
        "dimensions without end": archive_of(tensor_pickle(shape=(1,) * 99, stride=(1,) * 99)),
        "a storage that is not there": archive_of(tensor_pickle(key=b"7")),
        "a storage elsewhere": archive_of(tensor_pickle(key=b"../data.pkl")),
        "a storage of another kind": archive_of(tensor_pickle(kind=b"Storage")),
        "half a storage": archive_of(tensor_pickle(), [b"\0" * 16]),
        "bomb": lambda: zipped([("a/data.pkl", bytes(BOMB))], zipfile.ZIP_DEFLATED),
        "bomb of numbers": lambda: overlapping("a/data/{}", bytes(BOMB // 8), 8, tensor_pickle()),
        "names twice": zipped([("a/data.pkl", b"\x80\x02}."), ("a/data.pkl", b"\x80\x02].")]),
        "no pickle": zipped([("a/version", b"3")]),
        "two pickles": zipped([("a/data.pkl", b"\x80\x02}."), ("b/data.pkl", b"\x80\x02}.")]),
        "TorchScript": zipped([("a/data.pkl", b"\x80\x02}."), ("a/constants.pkl", b"\x80\x02).")]),
        "a zip in a zip": zipped([("a/data.pkl", whole)]),
        "another magic number": old.replace(
            b"l\xfc\x9cF\xf9 j\xa8P\x19", b"l\xfc\x9cF\xf9 j\xa8P\x18"
        ),
        "old, without numbers": lying,
        "old, of more than it holds": old.replace(struct.pack("<q", 8), struct.pack("<q", 2**40)),
        "a line without end": b"c" + b"a" * 2**20,
        "sparse": saved({"w": torch.eye(3).to_sparse()}),
        "quantised": saved({"w": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}),
        "without values": saved({"w": torch.empty(3, device="meta")}),
        "complex": saved({"w": torch.ones(3, dtype=torch.complex64)}),
        "nothing": saved({}),
        "numbers, no tensors": saved({"w": [1, 2, 3]}),
    }


def npz_files(marker) -> dict[str, Content]:
    """Hostile .npz files."""

    def one(header, content=b"", **more):
        return zipped([("w.npy", npy(header, content, **more))])

    objects = io.BytesIO()
    np.savez(objects, w=np.array([Call(os.system, f"touch {marker}")], dtype=object))
    plain = io.BytesIO()
    np.savez(plain, w=np.ones(3, np.float32))
    encrypted = bytearray(plain.getvalue())
    encrypted[6] |= 1  # the flag, here and in the directory
    encrypted[encrypted.index(b"PK\x01\x02") + 8] |= 1
    zeros = described("<f4", (BOMB // 4,))
    part = described("<f4", (BOMB // 32,))
    return {
        "objects": objects.getvalue(),
        "bomb": lambda: zipped([("w.npy", npy(zeros, bytes(BOMB)))], zipfile.ZIP_DEFLATED),
        "overlapping": lambda: overlapping("{}.npy", npy(part, bytes(BOMB // 8)), 40),
        "huge shape": one(described("<f4", (2**40,)), b"1234"),
        "overflowing shape": one(described("<f4", (2**33, 2**33)), b"1234"),
        "negative shape": one(described("<f4", (-1,)), b"1234"),
        "shape of text": one(described("<f4", "abc"), b"1234"),
        "nothing of a huge shape": one(described("<f4", (0, 2**62))),
        "too many dimensions": one(described("<f4", (1,) * 99), b"1234"),
        "too few bytes": one(described("<f4", (2,)), b"1234"),
        "too many bytes": one(described("<f4", (1,)), b"12345678"),
        "records": one(described([("a", "<f4"), ("b", "O")], (1,)), b"12345678"),
        "dtype of text": one(described("<U8", (1,)), b"1" * 32),
        "dtype of times": one(described("<M8[s]", (1,)), b"1" * 8),
        "complex": one(described("<c8", (1,)), b"1" * 8),
        "no dtype": one(described("<q99", (1,)), b"1" * 8),
        "code in the header": one(
            b"__import__('os').system('touch " + str(marker).encode() + b"')"
        ),
        "nested header": one(b"(" * 5000),
        "nested list in the header": one(b"[" * 90 + b"]" * 90),
        "long header": one(b" " * 60_000),
        "no header": zipped([("w.npy", b"\x93NUMPY")]),
        "another version": one(described("<f4", (1,)), b"1234", version=(9, 0)),
        "no array": zipped([("w.npy", b"hello")]),
        "no .npy": zipped([("readme.txt", b"hello")]),
        "a folder": zipped([("w.npy/", b"")]),
        "names twice": zipped([("w.npy", b""), ("w.npy", b"")]),
        "encrypted": bytes(encrypted),
        "nothing": zipped([]),
        "a zip in a zip": zipped([("w.npy", plain.getvalue())]),
        "one array": npy(described("<f4", (1,)), b"1234"),
    }


def overlapping(name: str, content: bytes, count: int, pickled: bytes | None = None) -> bytes:
    """An archive whose directory has one entry under many names."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        if pickled is not None:
            archive.writestr("a/data.pkl", pickled)
        archive.writestr(name.format(0), content)
        info = archive.getinfo(name.format(0))
        for i in range(1, count):
            again = zipfile.ZipInfo(name.format(i))
            for part in ("CRC", "compress_size", "file_size", "header_offset", "compress_type"):
                setattr(again, part, getattr(info, part))
            archive.filelist.append(again)
            archive.NameToInfo[again.filename] = again
    return buffer.getvalue()


@functools.cache
def made(content: Content) -> bytes:
    """A file's bytes; large ones are made when they are asked for."""
    return content if isinstance(content, bytes) else content()


def safetensors_files() -> dict[str, bytes]:
    """Hostile .safetensors files."""
    return {
        "length of everything": safetensors(b"{}", length=2**64 - 1),
        "length of a terabyte": safetensors(b"{}", length=2**40),
        "length beyond the file": safetensors(b"{}", length=99),
        "no length": b"\1\2\3",
        "no JSON": safetensors(b"{hello}"),
        "no UTF-8": safetensors(b'{"\xff\xfe": 1}'),
        "a list": safetensors([]),
        "nested": safetensors(b'{"a":' * 5000 + b"1" + b"}" * 5000),
        "offsets out of range": safetensors({"w": entry(offsets=(0, 10**9))}, b"12345678"),
        "offsets the wrong way": safetensors({"w": entry(offsets=(8, 0))}, b"12345678"),
        "negative offsets": safetensors({"w": entry(offsets=(-8, 0))}, b"12345678"),
        "overlapping": safetensors({"v": entry(), "w": entry()}, b"12345678"),
        "a hole": safetensors({"w": entry(offsets=(8, 16))}, b"12345678" * 2),
        "an overflowing shape": safetensors({"w": entry(shape=(2**33, 2**33))}, b"12345678"),
        "another shape": safetensors({"w": entry(shape=(3,))}, b"12345678"),
        "nothing of a huge shape": safetensors({"w": entry(shape=(0, 2**63), offsets=(0, 0))}),
        "no dtype": safetensors({"w": entry("F33")}, b"12345678"),
        "complex": safetensors({"w": entry("C64", (1,))}, b"12345678"),
        "names twice": safetensors(
            b'{"w":'
            + json.dumps(entry()).encode()
            + b',"w":'
            + json.dumps(entry()).encode()
            + b"}",
            b"12345678",
        ),
        "a huge number": safetensors(b'{"w": ' + b"9" * 10_000 + b"}"),
        "nothing": safetensors({}),
        "more than it says": safetensors({"w": entry()}, b"12345678" * 2),
    }


# A valid line of each kind of rows, to be damaged.
LINES = {
    "rows": json.dumps(
        {
            "key": "0123456789abcdef",
            "experiment": "main",
            "settings": {"data": "mnist", "b": 20},
            "seed": 1,
            "status": "done",
            "outcome": "EXACT",
            "metrics": {"psnr": 110.5},
            "seconds": 1.5,
            "stages": {"seek": 0.5},
            "took": 2.5,
            "error": None,
            "pictures": {"first": "0123456789abcdef.png"},
            "versions": {"torch": "2.5"},
            "commit": None,
            "engine": "local",
        }
    ).encode(),
    "adult": b"39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, "
    b"White, Male, 2174, 0, 40, United-States, <=50K\n",
}
