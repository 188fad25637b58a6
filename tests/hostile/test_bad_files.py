"""Files of tensors that are damaged, mislabelled or hostile: refused in one sentence, nothing run."""

import contextlib
import io
import os
import pickle
import struct
import subprocess
import sys
import textwrap
import warnings
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("safetensors", reason="needs the cli extra")

from safetensors.torch import save as safetensors_save

from spear.errors import DataError, InvalidFile, InvalidOption
from spear.federated.models import Vgg16
from spear.files import limits
from spear.files.pickles import check_pickle
from spear.files.tensors import read_tensors
from spear.files.torch_files import read_torch
from spear.metrics.lpips import Lpips
from spear.report.truth import read_batch
from support import hostile_files as hostile

MARKER = "ran"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # names twice, quantised tensors
    HOSTILE = {
        **{("pt", name): raw for name, raw in hostile.torch_files(MARKER).items()},
        **{("npz", name): raw for name, raw in hostile.npz_files(MARKER).items()},
        **{("safetensors", name): raw for name, raw in hostile.safetensors_files().items()},
    }
SMALL = {"a.weight": torch.arange(6.0).view(3, 2), "a.bias": torch.ones(3, dtype=torch.float64)}


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    monkeypatch.setenv(limits.LIMIT_VARIABLE, hostile.LIMIT)


def npz(tensors) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **{name: tensor.numpy() for name, tensor in tensors.items()})
    return buffer.getvalue()


VALID = {
    "pt": hostile.saved(SMALL),
    "pth": hostile.saved(SMALL, _use_new_zipfile_serialization=False),
    "npz": npz(SMALL),
    "safetensors": safetensors_save(SMALL),
}


def refused(path):
    """What is said of a file, in one line."""
    with pytest.raises(InvalidFile) as told:
        read_tensors(path)
    assert str(path) in str(told.value)
    assert "\n" not in str(told.value)
    return str(told.value)


@pytest.mark.parametrize(("kind", "name"), HOSTILE)
def test_hostile_files_are_refused_and_run_nothing(tmp_path, monkeypatch, kind, name):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"w.{kind}"
    path.write_bytes(hostile.made(HOSTILE[kind, name]))
    refused(path)
    assert os.listdir(tmp_path) == [path.name]


def test_the_hostile_files_are_hostile(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.load(io.BytesIO(HOSTILE["pt", "os.system"]), weights_only=False)
    assert os.listdir(tmp_path) == [MARKER]


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
def test_reading_takes_little_memory_and_time(tmp_path):
    for (kind, name), raw in HOSTILE.items():
        if not isinstance(raw, bytes) or "GB" in name or "huge" in name or "for" in name:
            path = tmp_path / f"{len(list(tmp_path.iterdir()))}.{kind}"
            path.write_bytes(hostile.made(raw))
    for kind, raw in VALID.items():
        with (tmp_path / f"sparse.{kind}").open("wb") as file:
            file.write(raw)
            file.truncate(40 * hostile.GIGABYTE)  # takes no room on disk
    code = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from spear.files.tensors import read_tensors
        from spear.errors import InvalidFile
        for path in Path(sys.argv[1]).iterdir():
            try:
                read_tensors(path)
            except InvalidFile:
                continue
            sys.exit(f"{path} was accepted")
        print(next(line.split()[1] for line in open("/proc/self/status") if "VmHWM" in line))
        """
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2**20  # kilobytes, half of them torch


@pytest.mark.parametrize("kind", VALID)
def test_files_cut_anywhere_are_refused(tmp_path, kind):
    path = tmp_path / f"w.{kind}"
    whole = VALID[kind]
    path.write_bytes(whole)
    assert {n: t.tolist() for n, t in read_tensors(path).items()} == {
        n: t.tolist() for n, t in SMALL.items()
    }
    for cut in {
        *range(0, len(whole), max(1, len(whole) // 60)),
        *range(len(whole) - 9, len(whole)),
    }:
        path.write_bytes(whole[:cut])
        refused(path)


@pytest.mark.parametrize("kind", VALID)
def test_mislabelled_files_are_refused(tmp_path, kind):
    others = {other: raw for other, raw in VALID.items() if {kind, other} != {"pt", "pth"}}
    others |= {
        "png": b"\x89PNG\r\n\x1a\n" + bytes(99),
        "html": b"<!doctype html>",
        "text": b"w = 1",
    }
    for other, raw in others.items():
        path = tmp_path / f"{other}.{kind}"
        path.write_bytes(raw)
        if other != kind:
            said = refused(path)
            assert other != "png" or "PNG" in said


def test_names_that_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.pt")
    assert "a pipe or a device" in refused(tmp_path / "pipe.pt")
    (tmp_path / "zero.npz").symlink_to("/dev/zero")
    assert "a pipe or a device" in refused(tmp_path / "zero.npz")
    (tmp_path / "loop.pt").symlink_to("loop.pt")
    assert "a link to nowhere" in refused(tmp_path / "loop.pt")
    (tmp_path / "folder.pt").mkdir()
    assert "is a folder" in refused(tmp_path / "folder.pt")
    (tmp_path / "empty.safetensors").touch()
    assert "is empty" in refused(tmp_path / "empty.safetensors")


def test_limits_can_be_raised(tmp_path, monkeypatch):
    path = tmp_path / "w.npz"
    np.savez_compressed(path, w=np.zeros(2**20, np.float32))
    assert read_tensors(path)["w"].numel() == 2**20
    monkeypatch.setenv(limits.LIMIT_VARIABLE, "0.01")
    assert limits.LIMIT_VARIABLE in refused(path)
    monkeypatch.setenv(limits.LIMIT_VARIABLE, "0.00001")
    path.write_bytes(VALID["npz"] * 99)
    assert "expected at most" in refused(path)
    for wrong in ("many", "-1", "nan"):
        monkeypatch.setenv(limits.LIMIT_VARIABLE, wrong)
        with pytest.raises(InvalidOption, match=limits.LIMIT_VARIABLE):
            read_tensors(path)


@pytest.mark.parametrize("kind", VALID)
def test_damaged_bytes_are_refused_or_read(tmp_path_factory, kind):
    path = tmp_path_factory.mktemp("damaged") / f"w.{kind}"
    whole = VALID[kind]

    @settings(max_examples=150, deadline=None, derandomize=True, database=None)
    @given(
        changes=st.lists(
            st.tuples(st.integers(0, len(whole) - 1), st.binary(min_size=1, max_size=8)),
            min_size=1,
            max_size=4,
        ),
        cut=st.integers(0, 40),
    )
    def damaged(changes, cut):
        raw = bytearray(whole)
        for place, content in changes:
            raw[place : place + len(content)] = content
        path.write_bytes(raw[: len(raw) - cut])
        with contextlib.suppress(InvalidFile):  # any other error fails
            assert all(isinstance(tensor, torch.Tensor) for tensor in read_tensors(path).values())

    damaged()


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32]
DTYPES += [torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn]


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    dtype=st.sampled_from(DTYPES),
    view=st.sampled_from(["whole", "turned", "part", "expanded"]),
    parameter=st.booleans(),
    old=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_what_torch_saves_is_read_as_torch_reads_it(
    tmp_path_factory, shape, dtype, view, parameter, old, seed
):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    tensor = {
        "whole": lambda: tensor,
        "turned": lambda: tensor.permute(tuple(reversed(range(tensor.ndim)))),
        "part": lambda: tensor[..., ::2] if tensor.ndim else tensor,
        "expanded": lambda: tensor.expand(3, *shape),
    }[view]()
    if parameter and tensor.is_floating_point():
        tensor = torch.nn.Parameter(tensor)
    assume(not old or dtype is not torch.float8_e4m3fn)  # which no old torch had
    path = tmp_path_factory.getbasetemp() / "same.pt"
    content = {"state_dict": {"w": tensor, "v": tensor}, "epoch": 3, "of": ("a", 1.5, None, True)}
    torch.save(content, path, _use_new_zipfile_serialization=not old)
    found = read_torch(path)
    for name in "wv":
        mine = found[name]
        assert (mine.shape, mine.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(mine.double(), tensor.detach().double()), name


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02]("
        + b"]q\0("
        + b"".join(b"J" + struct.pack("<i", i) + b"N\x86" for i in range(20_000))
        + b"e"
        + b"ccollections\nOrderedDict\nh\0\x85R" * 20_000
        + b"e.",  # a list, copied
        b"\x80\x02}X\x01\0\0\0k" + b"(" * 100 + b"t" * 100 + b"s.",  # nested
        b"\x80\x02" + b")q\0" + b"h\0h\0\x86q\0" * 60 + b".",  # each twice in the next
        b"\x80\x02]r\xff\xff\xff\x7f.",  # a memo of two billion
    ],
)
def test_what_would_cost_too_much_is_seen_before_it_is_built(pickled):
    with pytest.raises(ValueError, match=r"more memory or time|asks for a memo"):
        check_pickle(io.BytesIO(pickled))


@pytest.mark.parametrize("protocol", range(6))
def test_what_people_pickle_costs_little(protocol):
    shared = tuple(range(4))
    content = {f"a.{i}": [shared, {"n": i, "text": "x" * 50}] for i in range(5000)}
    check_pickle(io.BytesIO(pickle.dumps(content, protocol=protocol)))


def test_a_case_of_letters_is_no_other_entry(tmp_path):
    """torch finds "data/AB" as "data/ab" too: one entry could be read under many names."""
    path = tmp_path / "w.pt"
    entries = [("a/data.pkl", hostile.tensor_pickle(key=b"AB")), ("a/data/ab", bytes(32))]
    path.write_bytes(hostile.zipped([*entries, ("a/version", b"3\n")]))
    assert "not those that torch.save writes" in refused(path)


def test_attributes_of_a_tensor_are_not_obeyed(tmp_path):
    tensor = torch.nn.Parameter(torch.ones(3))
    tensor.detach = tensor.numel = OrderedDict
    torch.save({"w": tensor}, tmp_path / "w.pt")
    assert read_tensors(tmp_path / "w.pt")["w"].tolist() == [1, 1, 1]


def test_odd_numbers_are_widened(tmp_path):
    path = tmp_path / "w.pt"
    kinds = {torch.float8_e5m2: torch.float32, torch.uint16: torch.int64}
    for given_as, read_as in kinds.items():
        torch.save([torch.ones(3).to(given_as)], path)
        assert read_tensors(path)["0"].dtype is read_as


def test_truths_of_wrong_shapes(tmp_path):
    path = tmp_path / "t.npz"
    for arrays, words in [
        ({"inputs": np.ones(3)}, "expected an array 'inputs'"),
        ({"inputs": np.ones((0, 3))}, "expected an array 'inputs'"),
        ({"inputs": np.ones((3, 2)), "labels": np.ones(2)}, "a label for each of 3"),
        ({"inputs": np.ones((3, 2)), "labels": np.float32(1)}, "a label for each of 3"),
        ({"inputs": np.full((3, 2), np.nan)}, "NaN"),
    ]:
        np.savez(path, **arrays)
        with pytest.raises(InvalidFile, match=words):
            read_batch(path)


def test_hostile_weights_of_known_networks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "weights"
    folder.mkdir()
    for raw in (
        HOSTILE["pt", "os.system"],
        hostile.made(HOSTILE["pt", "bomb"]),
        VALID["pt"],
        b"",
        b"<html>",
    ):
        for name in ("vgg16_features.pth", "alexnet_features.pth", "lpips_alex_heads.pth"):
            (folder / name).write_bytes(raw)
        with pytest.raises((DataError, InvalidFile), match="weights"):
            Vgg16(10, width=8, pixels=32).load_features(tmp_path)
        with pytest.raises(DataError, match="expected"):
            Lpips.load(folder)
    assert os.listdir(tmp_path) == ["weights"]
