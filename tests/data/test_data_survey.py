"""What `spear data` says of a folder: found, damaged, missing, and where to get it."""

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer", reason="needs the cli extra")
from typer.testing import CliRunner

from spear.cli.app import app
from spear.cli.console import PlainConsole
from spear.cli.data import _show
from spear.data import State, survey
from spear.errors import NoDataFolder
from support.datasets_on_disk import jpeg, write_cifar, write_imagenet, write_mnist

NAMES = [
    "CIFAR-10",
    "MNIST",
    "TinyImageNet",
    "ImageNet",
    "ADULT",
    "AlexNet and LPIPS heads",
    "VGG16 features",
]


def states(root):
    return {item.name: item.state for item in survey(root)}


def run(*arguments, **variables):
    environment = {key: value for key, value in os.environ.items() if key != "SPEAR_DATA"}
    command = [sys.executable, "-m", "spear", "data", *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment | variables,
    )


def shown(*arguments):
    return CliRunner().invoke(app, ["data", *map(str, arguments)], env={"SPEAR_DATA": ""})


@pytest.fixture(scope="module")
def surveyed(data_root):
    """The real folder, which takes seconds to look through."""
    return survey(data_root)


def test_the_real_folder(data_root, surveyed):
    found = {item.name: item for item in surveyed}
    assert list(found) == NAMES
    assert all(item.state is State.FOUND for item in found.values())
    assert found["CIFAR-10"].detail == "10,000 test images of 32 x 32, no training set"
    assert found["MNIST"].where == data_root / "MNIST" / "raw"
    assert found["TinyImageNet"].detail.startswith("10,000 validation images of 64 x 64")
    assert "400 photos" in found["ImageNet"].detail
    assert "400 of 224 pixels, 400 of 256 pixels, 84 of 720 pixels" in found["ImageNet"].detail
    assert found["ADULT"].detail == "32,561 training records, 16,281 test records"
    assert found["VGG16 features"].detail.startswith("14,714,688 weights")


def test_an_empty_folder_and_none(tmp_path):
    assert set(states(tmp_path).values()) == {State.MISSING}
    with pytest.raises(NoDataFolder):
        survey(tmp_path / "nowhere")


def test_every_line_of_shell_parses_and_names_the_folder(tmp_path):
    folder = tmp_path / "it's mine"
    folder.mkdir()
    for item in survey(folder):
        line = item.source.line(folder)
        assert shlex.split(line)[:2] == ["cd", str(folder)]
        done = subprocess.run(["sh", "-n", "-c", line], check=False, capture_output=True)
        assert done.returncode == 0, done.stderr
        if "python -c" in line:
            parts = shlex.split(line)
            compile(parts[parts.index("-c") + 1], item.name, "exec")
        assert item.source.page.startswith("http")
        assert item.used_by


def test_parts_and_damage(tmp_path):
    write_cifar(tmp_path / "cifar10")
    write_mnist(tmp_path / "MNIST" / "raw", "train", 5)
    write_imagenet(tmp_path / "imagenet" / "val", size=(300, 250))
    jpeg(tmp_path / "tiny-imagenet-200" / "val" / "images" / "val_0.JPEG")
    (tmp_path / "adult").mkdir()
    found = {item.name: item for item in survey(tmp_path)}
    assert found["CIFAR-10"].detail == "4 test images of 32 x 32, no training set"
    assert found["MNIST"].detail == "5 training images of 28 x 28, no test set"
    assert "6 of 224 pixels, 0 of 256 pixels" in found["ImageNet"].detail
    for name in ("TinyImageNet", "ADULT"):
        assert found[name].state is State.DAMAGED
        assert "again" in found[name].detail
    write_cifar(tmp_path / "cifar10", "data_batch_1")
    assert states(tmp_path)["CIFAR-10"] is State.DAMAGED


def test_damaged_weights(data_root, tmp_path):
    def detail(name):
        (item,) = [item for item in survey(tmp_path) if item.name == name]
        assert item.state is State.DAMAGED
        return item.detail

    weights = tmp_path / "weights"
    weights.mkdir()
    alexnet, vgg = weights / "alexnet_features.pth", weights / "vgg16_features.pth"
    shutil.copy(data_root / "weights" / "alexnet_features.pth", alexnet)
    assert "expected lpips_alex_heads.pth as well" in detail("AlexNet and LPIPS heads")
    vgg.write_bytes(alexnet.read_bytes()[: 2**20])
    assert "incomplete" in detail("VGG16 features")
    shutil.copy(alexnet, vgg)
    assert "got 2,469,696 in 10" in detail("VGG16 features")
    torch.save([torch.zeros(3)], vgg)
    assert "got 3 in 1" in detail("VGG16 features")
    with zipfile.ZipFile(vgg, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(2**28))  # 256 MB in 260 kB
    assert "expected at most" in detail("VGG16 features")
    vgg.unlink()
    vgg.symlink_to(vgg)
    assert "expected weights by name" in detail("VGG16 features")


def test_the_table_is_whole_where_it_is_piped(data_root, surveyed):
    done = run(SPEAR_DATA=str(data_root))
    assert done.returncode == 0, done.stderr
    for item in surveyed:
        line = f"{item.where.relative_to(data_root)}: {item.detail}"
        assert line in done.stdout
    assert "\x1b" not in done.stdout
    assert "…" not in done.stdout
    assert "curl" not in done.stdout


def test_exit_codes(tmp_path):
    none = shown()
    assert none.exit_code == 2
    assert "give --data or set SPEAR_DATA" in none.stdout
    assert all(name in none.stdout for name in NAMES)
    gone = run("--data", tmp_path / "nowhere")
    assert gone.returncode == 2
    assert "does not exist" in gone.stderr
    assert "Traceback" not in gone.stderr
    empty = shown("--data", tmp_path)
    assert empty.exit_code == 0
    assert empty.stdout.count("missing") >= len(NAMES)
    assert f"cd {tmp_path} && curl -L https://www.cs.toronto.edu" in empty.stdout
    (tmp_path / "adult").mkdir()
    damaged = shown("--data", tmp_path)
    assert damaged.exit_code == 1
    assert f"{tmp_path / 'adult'} is empty" in damaged.stdout


def test_json(tmp_path):
    write_cifar(tmp_path / "cifar-10-batches-py")
    done = shown("--data", tmp_path, "--json")
    assert done.exit_code == 0
    record = json.loads(done.stdout)
    assert record["folder"] == str(tmp_path)
    assert [item["name"] for item in record["datasets"]] == NAMES
    cifar = record["datasets"][0]
    assert cifar["state"] == "found"
    assert Path(cifar["where"]) == tmp_path / "cifar-10-batches-py"
    assert {item["state"] for item in record["datasets"][1:]} == {"missing"}
    nowhere = shown("--json")
    assert nowhere.exit_code == 2
    assert json.loads(nowhere.stdout)["folder"] is None


def test_a_narrow_terminal_folds_and_does_not_cut(tmp_path):
    written = io.StringIO()
    _show(survey(tmp_path), tmp_path, PlainConsole(width=60, force_terminal=True, file=written))
    text = written.getvalue()
    assert "…" not in text
    assert "\x1b[33mmissing" in text
