"""`spear invert` of several rounds on disk: a batch that no single update gives, and mistakes told."""

import json
import shutil

import pytest
import torch
from torch import nn

pytest.importorskip("typer", reason="needs the cli extra")

import spear
from spear.federated import fedavg, fedsgd, mlp
from spear.files import rounds_in, rounds_of
from spear.report import from_files, invert_files
from support.command_line import in_this_process
from support.planted import worst_error

B, M, N, LR = 20, 40, 60, 0.3
NUMBERS = (8, 9, 10, 11)  # by letters, 10 would come first


def run(*arguments, **options):
    return in_this_process("invert", *arguments, **options)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A folder with a folder for each round of FedSGD, and the batch behind all of them."""
    folder, generator = tmp_path_factory.mktemp("watched"), torch.Generator().manual_seed(4)
    x, y = torch.randn(B, N, generator=generator), torch.randint(5, (B,), generator=generator)
    model = mlp(N, 5, width=M, depth=3, seed=4)
    for number in NUMBERS:
        own = folder / f"round{number}"
        own.mkdir()
        gradients = fedsgd(model, x, y)
        torch.save(model.state_dict(), own / "before.pt")
        torch.save(gradients, own / "update.pt")
        with torch.no_grad():
            for name, gradient in gradients.items():
                model.get_parameter(name).sub_(gradient, alpha=LR)
    torch.save({"inputs": x, "labels": y}, folder / "batch.pt")
    return folder, x


@pytest.fixture
def copied(watched, tmp_path):
    return shutil.copytree(watched[0], tmp_path / "watched")


def pairs(folder):
    own = [folder / f"round{number}" for number in NUMBERS]
    return [(path / "before.pt", path / "update.pt") for path in own]


def as_options(folder):
    return [word for pair in pairs(folder) for word in ("--round", *pair)]


def test_rounds_on_disk_give_what_one_does_not(watched, tmp_path):
    folder, x = watched
    alone = run("--round", *pairs(folder)[0], "-q", "--max-seconds", 1)
    assert alone.returncode != 20, alone.stdout + alone.stderr
    written = tmp_path / "r.json", tmp_path / "r.html"
    done = run("--rounds", folder, "--json", written[0], "--report", written[1])
    assert done.returncode == 20, done.stdout + done.stderr
    assert "attacking '0' (60 -> 40, 4 rounds, ReLU after)" in done.stdout
    assert "in their order: round8, round9, round10, round11." in done.stdout
    made = spear.load(written[0])
    assert (made.title, made.findings[0].rounds) == ("What 4 rounds give away", 4)
    assert worst_error(made.findings[0].inputs, x) < 1e-4
    assert json.loads(written[0].read_text())["findings"][0]["rounds"] == 4
    assert made.settings["rounds"][3].endswith("round11/update.pt")
    assert all("/" not in words for words in made.redacted().settings["rounds"])
    page = written[1].read_text()
    assert "<dt>Rounds of the same data</dt><dd>4</dd>" in page
    assert "rounds attacked together" in page
    assert "Whoever receives the updates of these rounds can read every sample." in page


def test_pairs_of_files_are_the_same_rounds(watched, monkeypatch):
    folder, _ = watched
    seen = []
    monkeypatch.setattr(from_files, "invert", lambda view, **_: seen.append(view) or stopped())
    for words in (as_options(folder), ["--rounds", folder]):
        assert run(*words, "-q").returncode == 130
    assert torch.equal(seen[0].weight_grad, seen[1].weight_grad)
    assert [each.number for each in seen[0].rounds.each] == [1, 2, 3, 4]


def stopped():
    raise KeyboardInterrupt


def test_rounds_that_do_not_fit_are_named_once_and_left_out(copied):
    same = copied / "round12"
    shutil.copytree(copied / "round8", same)
    shutil.copy(same / "before.pt", same / "update.pt")  # the client did not train
    shutil.copytree(copied / "round9", copied / "round13")
    done = run("--rounds", copied)
    assert done.returncode == 20, done.stdout + done.stderr
    assert done.stdout.count("round 5 is left out: what was sent equals the model") == 1
    assert done.stdout.count("round 6 is left out: it repeats round 2") == 1


def test_what_a_client_sends_is_told_or_read_off_the_names(watched, tmp_path):
    """Weights and their differences, after one local step: the same batch."""
    model, x = mlp(N, 5, width=40, depth=2, seed=1), watched[1][:6]
    y, rounds = torch.arange(6) % 5, []
    for number in (1, 2):
        own = tmp_path / "rounds" / str(number)
        own.mkdir(parents=True)
        after = fedavg(model, x, y, lr=0.5, epochs=1)
        torch.save(model.state_dict(), own / "weights.pt")
        torch.save(after, own / "after.pt")
        rounds.append(("--round", own / "weights.pt", own / "after.pt"))
        model.load_state_dict(after)
    told = ("--lr", 0.5, "--epochs", 1, "-q")
    by_name = run("--rounds", tmp_path / "rounds", *told)
    by_option = run(*rounds[0], *rounds[1], "--sends", "weights", *told)
    assert (by_name.returncode, by_name.stdout) == (by_option.returncode, by_option.stdout)
    assert by_name.returncode == 20, by_name.stdout + by_name.stderr
    mistaken = run(*rounds[0], *rounds[1], "-q")  # taken for gradients
    assert "this was given as a gradient, but it is close to the weights" in mistaken.stderr


def test_the_library_takes_them_too(watched):
    folder, x = watched
    made = invert_files(rounds_of(pairs(folder)))
    assert (made.findings[0].outcome.name, made.findings[0].rounds) == ("EXACT", 4)
    assert worst_error(made.findings[0].inputs, x) < 1e-4
    with pytest.raises(spear.InvalidOption, match="expected at least one round, got none"):
        invert_files([])
    assert [int(each.path.parent.name[5:]) for each in rounds_in(folder)] == list(NUMBERS)


def test_what_is_wrong_is_said_with_its_round(copied):
    own, weights = copied / "round10", copied / "round8" / "before.pt"
    cases = {
        ("--rounds", copied / "round8"): "expected a folder for each round, with before.*",
        ("--rounds", copied / "nowhere"): "does not exist: expected a folder with one folder",
        ("--rounds", weights): "is a file: expected a folder",
        ("--rounds", copied, *as_options(copied)): "got --round and --rounds",
        ("--rounds", copied, "--weights", weights): "got --rounds and --weights",
        (*as_options(copied), "--after", weights): "got --round and --after",
        ("--rounds", copied, "--sends", "weights"): "--sends says what the updates of --round are",
        (
            *as_options(copied),
            "--sends",
            "grads",
        ): "expected --sends to be one of gradient, weights",
        ("--rounds", copied, "--lr", "0.1"): "--lr belongs to local training",
        ("--round", weights, copied / "none.pt"): "none.pt does not exist",
    }
    for arguments, words in cases.items():
        assert complaint(*arguments).count(words) == 1, arguments
    (own / "update.pt").write_bytes(b"not a file of torch")
    assert f"{own / 'update.pt'} is not" in complaint("--rounds", copied)
    wrong = nn.Linear(N, M + 1).state_dict()
    torch.save({f"0.{name}": tensor for name, tensor in wrong.items()}, own / "update.pt")
    assert f"{own / 'update.pt'} is of another model" in complaint("--rounds", copied)
    (own / "update.pt").rename(own / "after.pt")
    assert "round10: expected the same files as in round8" in complaint("--rounds", copied)
    (own / "after.pt").rename(own / "sent.pt")
    words = complaint("--rounds", copied)
    assert "round10: expected before.* (the weights sent out) and one of update.*" in words
    assert words.endswith("got before.pt, sent.pt\n")


def complaint(*arguments):
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stdout
    return done.stderr
