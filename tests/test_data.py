"""The order is a function of (seed, position), and the field's token files are read as they are."""

import contextlib
import json
import os
import pwd
import subprocess
import sys
import sysconfig
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import before, contents, environment, largest_file

from data import load_mixture
from steady.options import ConfigError
from steady.tokens import order as order_room
from steady.tokens.files import TokenFile, TokenWriter, find_sources, stdlib
from steady.tokens.order import mixture_pattern
from steady.tokens.tokenizers import decode


def shard(tokens, magic=20240520, dtype="<u2") -> bytes:
    """llm.c's format, from its description: 256 int32 of header, then the tokens."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, len(tokens)
    return header.tobytes() + np.asarray(tokens, dtype).tobytes()


def token_folder(tmp_path, name="d", n=1000, vocab=100, dtype=np.uint16):
    """nanoGPT's layout: headerless train.bin and val.bin. Token i is i modulo vocab."""
    folder = tmp_path / name
    folder.mkdir()
    for split in ("train", "val"):
        (np.arange(n) % vocab).astype(dtype).tofile(folder / f"{split}.bin")
    return folder


def test_the_order_is_the_one_that_earlier_runs_were_trained_in():
    """A run that another version saved goes on with the samples that come next. Never change this
    test, only add an order beside it.
    """
    order = order_room.Order([1000, 50], [Fraction(3, 4), Fraction(1, 4)], seed=1337)
    assert order(0, 10).tolist() == [[0, 0, 1, 0, 0, 0, 1, 0, 0, 0],
                                     [112, 209, 49, 840, 434, 961, 1, 908, 42, 641]]
    assert order(10**12, 10**12 + 6).tolist() == [[0, 0, 1, 0, 0, 0], [938, 43, 21, 328, 968, 916]]
    order.group_by_length(4, 4, lambda dataset, sample: sample % 7)
    assert order(0, 12).tolist() == [[1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1],
                                     [45, 641, 908, 817, 887, 166, 209, 454, 42, 1, 961, 44]]

    small = order_room.Order([10], [Fraction(1)], seed=1337)  # less than a window
    small.group_by_length(4, 4, lambda dataset, sample: sample % 7)
    assert small(0, 24)[1].tolist() == [0, 7, 8, 1, 2, 9, 3, 4, 5, 6, 0, 7,
                                        3, 4, 5, 6, 1, 8, 2, 9, 7, 0, 8, 1]


def assert_epochs_are_whole(order, sizes, n):
    """Of each data set no sample twice in an epoch, whichever part of the order is asked for."""
    source, sample = order(0, n)
    for k, size in enumerate(sizes):
        mine = sample[source == k]
        for begin in range(0, len(mine) - size + 1, size):
            assert len(set(mine[begin : begin + size])) == size
    for start in range(0, n - 5, 5):
        assert np.array_equal(order(start, start + 5)[1], sample[start : start + 5])


@pytest.mark.parametrize("sizes, steps, batch_size, stage", [
    ([32], 32, 32, 0), ([50], 32, 8, 0), ([7], 2, 4, 0), ([10], 32, 8, 0), ([100], 4, 32, 0),
    ([3], 32, 8, 0), ([40, 10, 5], 32, 16, 0), ([60], 4, 8, 0), ([1, 1], 2, 2, 0),
    ([300, 40], 32, 8, 0), ([32], 32, 8, 16), ([60], 32, 8, 24), ([50], 32, 8, 8),
    ([40, 10, 6], 32, 8, 40), ([12], 32, 8, 24), ([300, 40], 32, 8, 104)])
@pytest.mark.parametrize("n_lengths", [1, 5, 1000])
def test_grouping_keeps_epochs_apart(sizes, steps, batch_size, stage, n_lengths):
    """Of a set smaller than the window: each sample once per epoch, and none twice in a step.

    Also where a stage begins, at this position.
    """
    # with weights of their own, the epochs of the datasets end at different places
    weights = [Fraction(n) for n in ([2, 1] if sizes == [300, 40] and not stage else sizes)]
    order = order_room.Order(sizes, weights, 1, [(stage, weights)] if stage else [])
    lengths = np.random.default_rng(0).integers(0, n_lengths, (len(sizes), 300))
    order.group_by_length(steps, batch_size, lambda source, sample: lengths[source, sample])
    n = sum(sizes)
    n_steps = 40 if stage else max(12, 4 * n // batch_size)
    assert_epochs_are_whole(order, sizes, n_steps * batch_size)
    source, sample = order(0, n_steps * batch_size)
    drawn = (1000 * source + sample).reshape(n_steps, batch_size)
    if stage or batch_size <= n <= steps * batch_size:
        assert all(len(set(step)) == batch_size for step in drawn.tolist())
    elif n < batch_size:  # as evenly as can be
        counts = [np.unique(step, return_counts=True)[1] for step in drawn]
        assert max(c.max() for c in counts) <= -(-batch_size // n) + 1


@pytest.mark.parametrize("weights", [["0.7", "0.3"], ["1", "1", "1"], ["0.125", "5"], ["3"]])
def test_mixture_counts_are_exact_in_every_window_of_the_pattern(weights):
    weights = [Fraction(w) for w in weights]
    pattern = mixture_pattern(weights)
    length, twice = len(pattern), np.tile(pattern, 2)
    for start in range(length):
        counts = np.bincount(twice[start : start + length], minlength=len(weights))
        assert [Fraction(int(c), length) for c in counts] == [w / sum(weights) for w in weights]
    for k, w in enumerate(weights):  # spread evenly: never more than one off a fair share
        so_far = np.cumsum(pattern == k) - np.arange(1, length + 1) * float(w / sum(weights))
        assert np.abs(so_far).max() <= 1
    rare = mixture_pattern([Fraction(10_000_019), Fraction(200), Fraction(1)])
    assert np.bincount(rare).tolist() == [10_000, 1, 1]  # rounded, but none is left out


def test_ids_of_2_and_of_4_bytes_in_one_mixture(tmp_path):
    narrow = token_folder(tmp_path, "narrow")
    (narrow / "train.bin.json").write_text(json.dumps(dict(dtype="uint16")))
    wide = token_folder(tmp_path, "wide")
    writer = TokenWriter(wide / "train.bin", 102_000, end_of_text=101_999)  # pads narrow rows, too
    writer.add(100_000 + np.arange(1000), np.array([1000]), None, 1000)
    writer.close()
    mixture = load_mixture([str(narrow), str(wide)], "train", 10, seed=1)
    tokens, _, _, source = mixture.batch(0, 8).to(torch.device("cpu"))
    assert sorted(source.tolist()) == [0] * 4 + [1] * 4 and mixture.vocab_size == 102_000
    assert (tokens[source == 0] < 100).all() and (tokens[source == 1] >= 100_000).all()
    for folder in (narrow, wide):
        np.array([0, 15, 1000], np.uint64).tofile(folder / "train.bin.docs")
    batch = load_mixture([str(narrow), str(wide)], "train", 10, 1, mode="packed").batch(0, 200)
    assert batch.tokens[batch.targets == -100].unique().tolist() == [101_999]


def test_position_a_trillion_costs_the_same(tmp_path, monkeypatch):
    mixture = load_mixture([str(token_folder(tmp_path, n=700_000))], "train", 10, seed=1)
    hashed = []
    before(order_room, "mix", lambda x: hashed.append(len(x)), monkeypatch.setattr)

    def work(position):
        hashed.clear()
        for i in range(15):  # a new window each time
            mixture.batch(position + 8192 * i, position + 8192 * i + 16)
        return sum(hashed)

    assert work(10**12) < 1.1 * work(0)
    n = mixture.n_samples
    first = -(-(10**12) // n) * n  # the first position of an epoch
    epochs = [mixture.order(start, start + n)[1] for start in (0, n, first)]
    assert all(np.array_equal(np.sort(epoch), np.arange(n)) for epoch in epochs)
    other = load_mixture([str(tmp_path / "d")], "train", 10, seed=2).order(0, n)[1]
    assert len({tuple(epoch) for epoch in [*epochs, other]}) == 4
    for epoch in epochs:
        assert abs(np.corrcoef(epoch[:-1], epoch[1:])[0, 1]) < 4 / np.sqrt(n)


@pytest.mark.parametrize("magic, dtype, high", [(20240520, "<u2", 50000),
                                                (20240801, "<u4", 128000)])
def test_llmc_and_modded_nanogpt_shards(tmp_path, magic, dtype, high):
    """Several shards are one stream of blocks, none of which crosses from one to the next."""
    tokens = np.random.default_rng(0).integers(0, high, 100)
    for name, part in (("train_000001", tokens[:57]), ("train_000002", tokens[57:]),
                       ("val_000000", tokens[:11])):
        (tmp_path / f"fineweb_{name}.bin").write_bytes(shard(part, magic, dtype))
    mixture = load_mixture([str(tmp_path)], "train", 10, seed=1, vocab_size=high)
    expected = {tuple(tokens[i : i + 11]) for i in (0, 10, 20, 30, 40, 57, 67, 77, 87)}
    assert mixture.n_samples == 9
    assert {tuple(row) for row in mixture.batch(0, 9).tokens.tolist()} == expected
    assert mixture.prompt().tolist() == [[tokens[0]]]  # a sample continues the first token
    val = load_mixture([str(tmp_path)], "val", 10, 1, high).batch(0, 1).tokens
    assert val[0].tolist() == list(tokens[:11])
    (dataset,) = mixture.datasets
    for block in range(9):  # each is found in the file that holds it
        path, at = dataset.find(block, column=3)
        assert TokenFile(path).tokens[at] == dataset.read(np.array([block, 0]), 10, 0)[0][0][3]


def test_our_files_carry_their_description(corpus):
    mixture = load_mixture([str(corpus)], "train", 32, seed=1)
    meta = json.loads((corpus / "train.bin.json").read_text())
    assert (mixture.tokenizer, mixture.vocab_size, mixture.end_of_text) == ("bytes", 257, 256)
    assert mixture.n_tokens == meta["tokens"] == meta["bytes"] + meta["documents"]
    assert mixture.bytes_per_token == [meta["bytes"] / meta["tokens"]]
    ids = mixture.datasets[0].files[0].tokens[:19].tolist()
    assert mixture.answer([256, *ids], 1) == decode("bytes", ids) == "0 + 0 = 0\n0 + 1 = 1"
    assert decode("bytes", [*"né".encode(), 256, 0xC3]) == "né\ufffd"
    assert decode(None, [7, 300]) == "7 300"
    assert mixture.prompt().tolist() == [[256]]  # a sample is a document of its own


@pytest.mark.parametrize("name, content, words", [
    ("train.bin", b"", "0 bytes; expected 1 uint16 tokens"),
    ("train.bin", b"abc", "3 bytes; .* is the file complete"),
    ("train.bin", b"ab" * 5, "5 tokens; expected more than --seq_len 10"),
    ("x_train_1.bin", shard(range(100))[: 1024 + 60], "1,084 bytes; expected 100 uint16 tokens"),
    ("notes.txt", b"", "no train.bin"),
    ("train.bin", None, "train.bin: is a folder")])
def test_bad_files_are_refused(tmp_path, name, content, words):
    (tmp_path / name).mkdir() if content is None else (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words) as error:
        load_mixture([str(tmp_path)], "train", 10, seed=1)
    assert name in str(error.value) or name == "notes.txt"


def test_which_files_are_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = token_folder(tmp_path, "fineweb-1.5b")

    def found(*paths, split="train", option="--data"):
        sources = find_sources([*map(str, paths)], split, option)
        return [(name, *files) for name, files, _ in sources]

    assert found(folder, split="val") == [("fineweb-1.5b", folder / "val.bin")]
    assert found("~/fineweb-1.5b/train.bin", split="val") == []  # ~ may come from a YAML file
    assert found("~/fineweb-1.5b/train.bin") == [("train", folder / "train.bin")]
    monkeypatch.chdir(folder)
    assert found(".")[0][0] == "fineweb-1.5b"
    file, other = folder / "val.bin", token_folder(tmp_path) / "val.bin"
    assert found(file, other) == [(str(file), file), (str(other), other)]  # told apart
    for paths, words in (([tmp_path], ".*: no val.bin"), ([tmp_path / "none"], ".*: no such file"),
                         ([".", "~/fineweb-1.5b"], ".*: names a source twice")):
        with pytest.raises(ConfigError, match=f"--val_data {words}"):
            found(*paths, split="val", option="--val_data")


def test_the_vocabulary_is_the_largest_that_is_known(tmp_path):
    plain, small, large = (token_folder(tmp_path, name) for name in ("p", "s", "l"))
    about = {small: dict(vocab_size=200), large: dict(vocab_size=300, end_of_text=9)}
    for folder, meta in about.items():
        (folder / "train.bin.json").write_text(json.dumps(meta))

    def found(*folders, vocab_size=None):
        return load_mixture([str(f) for f in folders], "train", 10, 1, vocab_size)

    assert found(small, large).vocab_size == 300 and found(small, large).end_of_text == 9
    assert found(plain, small).vocab_size == 50257  # GPT-2's, where nothing says so
    assert found(plain).tokenizer is None
    assert found(plain, small, vocab_size=250).vocab_size == 250
    with pytest.raises(ConfigError, match="--vocab_size 250: the tokenizer of the data has 300"):
        found(small, large, vocab_size=250)


def test_stdlib_corpus_is_made_once_and_whole(tmp_path):
    code = "from steady.tokens.files import stdlib; print(stdlib('train'))"
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                             env=environment() | {"XDG_CACHE_HOME": str(tmp_path)})
            for _ in range(2)]
    folder, same = (process.communicate()[0].strip() for process in both)
    assert folder == same and sorted(os.listdir(folder)) == [
        "train.bin", "train.bin.docs", "train.bin.json", "val.bin", "val.bin.docs", "val.bin.json"]
    assert os.listdir(tmp_path / "steady") == [os.path.basename(folder)]
    train, val = (load_mixture([folder], split, 128, 0) for split in ("train", "val"))
    assert 0.01 < val.n_tokens / train.n_tokens < 0.2  # 0.14 of Python 3.13
    n_train, n_val = (os.path.getsize(f"{folder}/{split}.bin.docs") for split in ("train", "val"))
    assert 0.03 < n_val / (n_train + n_val) < 0.08  # one file in twenty
    text = decode("bytes", train.datasets[0].files[0].tokens[:100_000].tolist())
    assert "import" in text and "def " in text


def test_the_default_data_recover(tmp_path, monkeypatch):
    """From a process that was killed while it made them, and from a full disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "lib").mkdir()
    for i in range(99):
        (tmp_path / f"lib/{i}.py").write_text(f"print({i})\n" * 50)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    whole = None
    for kept in (99, 0, 1, 2, 3, 4, 5):
        left = iter(range(kept))
        with monkeypatch.context() as patch:  # at its end StopIteration, in place of the kill
            before(os, "replace", lambda *_, left=left: next(left), patch.setattr)
            with contextlib.suppress(StopIteration):
                stdlib("train")
        folder = Path(stdlib("train"))
        assert stdlib("val") == str(folder)
        whole = whole or contents(folder)
        assert contents(folder) == whole
        for path in folder.iterdir():
            if kept < 5 or path.name == "val.bin":
                path.unlink()
    with largest_file(1000):
        with pytest.raises(ConfigError, match=f"{tmp_path}/steady: cannot hold the default data"):
            stdlib("val")
    assert os.listdir(tmp_path / "steady") == [folder.name]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # no account: a container run by number
    monkeypatch.setattr(Path, "mkdir", lambda path, **_: path.stat())  # root could make it
    with pytest.raises(ConfigError, match="^/~/.cache/steady: cannot hold the default data"):
        stdlib("val")
