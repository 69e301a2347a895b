"""`python data.py`: text and records become token files, whole or not at all."""

import contextlib
import gzip
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from functools import partial
from types import SimpleNamespace
from unicodedata import ucd_3_2_0

import numpy as np
import pytest
from conftest import ROOT, before, contents, environment, python
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

import data
from steady.options import ConfigError
from steady.tokens.files import TokenWriter, find_files
from tools import prepare
from tools import read as read_module
from tools.prepare import Encoder

WORDS = "the cat sat on a mat ‒ naïve Ωmega 猫 and then\n it ran off, 123 times!\n\n".split(" ")


def texts(n, seed=0, longest=60):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, longest))) for _ in range(n)]


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def command(tool):
    """command(*arguments, expect=0) → what `python data.py` printed."""
    return lambda *arguments, **how: "".join(tool(prepare.main, *arguments, **how))


@pytest.fixture
def made(tmp_path, command):
    """The same for `python data.py INPUT…`, into tmp_path / "o", with nothing for validation."""
    return partial(command, "--out", tmp_path / "o", "--val_fraction", 0)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """Folder of a small BPE tokenizer, trained by the program itself."""
    folder = tmp_path_factory.mktemp("tokenizer")
    source = write_jsonl(folder / "t.jsonl", [{"text": text} for text in texts(300)])
    assert prepare.main([str(source), f"--out={folder}", "--train_tokenizer=400"]) == 0
    return folder / "tokenizer"


def read(folder, split="train"):
    """[(ids, mask) of each document], read without the program's help."""
    meta = json.loads((folder / f"{split}.bin.json").read_text())
    ids = np.fromfile(folder / f"{split}.bin", meta["dtype"])
    at = np.fromfile(folder / f"{split}.bin.docs", np.uint64).astype(int)
    mask = np.ones(len(ids), np.uint8)
    if (folder / f"{split}.bin.mask").exists():
        mask = np.fromfile(folder / f"{split}.bin.mask", np.uint8)
    assert len(ids) == len(mask) == meta["tokens"] == at[-1] and len(at) == meta["documents"] + 1
    return [(ids[a:b].tolist(), mask[a:b].tolist()) for a, b in zip(at, at[1:], strict=False)]


def strings(folder, split="train"):
    """The documents of data made with the tokenizer of bytes."""
    return [bytes(ids[:-1]).decode() for ids, _ in read(folder, split)]


def zstd():
    """The module of Python 3.14 or its backport."""
    with contextlib.suppress(ImportError):
        from compression import zstd
        return zstd
    return pytest.importorskip("backports.zstd")


@pytest.mark.parametrize("prefix", [[], [5]])
def test_documents_are_what_the_tokenizer_makes(tmp_path, made, tokenizer, monkeypatch, prefix):
    monkeypatch.setattr(read_module, "CHUNK_BYTES", 4000)
    monkeypatch.setattr(prepare.tokenizers, "text_start", lambda _: prefix)
    alone, found = AutoTokenizer.from_pretrained(tokenizer), texts(200)
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in [*found, ""]])
    told = made(source, "--tokenizer", tokenizer, "--val-fraction", 0.2)
    documents = {s: [ids for ids, _ in read(tmp_path / "o", s)] for s in ("train", "val")}
    expected = [prefix + alone(text)["input_ids"] + [alone.eos_token_id] for text in found]
    assert sorted(documents["train"] + documents["val"]) == sorted(expected)
    assert 20 < len(documents["val"]) < 60 and f"+ {len(documents['val'])} (training" in told
    assert [ids for ids in expected if ids in documents["train"]] == documents["train"]  # in order
    metas = [json.loads((tmp_path / f"o/{s}.bin.json").read_text()) for s in ("train", "val")]
    assert sum(meta["bytes"] for meta in metas) == sum(len(text.encode()) for text in found)
    content = (tmp_path / "o/train.bin").read_bytes()
    assert metas[0]["checksum"] == hashlib.sha256(content).hexdigest()
    mixture = data.load_mixture([str(tmp_path / "o")], "train", 8, 0)
    assert mixture.decode(documents["train"][0][:-1]) == alone.decode(documents["train"][0][:-1])
    assert mixture.vocab_size == len(alone) and mixture.end_of_text == alone.eos_token_id
    assert mixture.bytes_per_token == [metas[0]["bytes"] / mixture.n_tokens]
    packed = data.load_mixture([str(tmp_path / "o")], "train", 8, 0, mode="packed")
    bytes_are_in = packed.datasets[0].targets.sum() if prefix else packed.n_tokens
    assert packed.bytes_per_token == [metas[0]["bytes"] / bytes_are_in]


def test_output_is_the_same_for_any_number_of_workers(tmp_path, made, tokenizer, monkeypatch):
    monkeypatch.setattr(read_module, "CHUNK_BYTES", 2000)  # so that there are many
    folder = tmp_path / "in"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", [{"text": t} for t in texts(100)])
    write_jsonl(folder / "b.jsonl", [{"prompt": t, "completion": "r"} for t in texts(50, 1)])
    (folder / "long.txt").write_text("\n".join(texts(200, 2)))
    (folder / "short.md").write_text("# short\n")
    with gzip.open(folder / "c.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": t}) + "\n" for t in texts(50, 3))
    flags, outputs = ["--val_fraction", 0.1, "--tokenizer", tokenizer], []
    for workers in (1, 5):
        made(folder, "--out", tmp_path / f"o{workers}", "--workers", workers, *flags)
        outputs.append(contents(tmp_path / f"o{workers}"))
    assert outputs[0] == outputs[1]
    assert {"train.bin.mask", "val.bin", "train.bin.docs"} <= set(outputs[0])
    masks = [mask for split in ("train", "val") for _, mask in read(tmp_path / "o1", split)]
    assert sum(all(mask) for mask in masks) >= 150 and sum(mask[0] == 0 for mask in masks) == 50


def test_the_library_gets_short_texts_and_makes_the_tokens_of_the_whole(tmp_path):
    """For patterns as GPT-2's, o200k's and BLOOM's, where a text begins with a space of its own,
    and with a token that takes the white space around it. Where tokens span words, the ids at the
    cuts would be others: there the library gets the whole."""
    pieces = ["if (a)\n", "    return x;\n", "x = y;\n", "//note\n", "\u3000\u3000猫が。\n",
              "a  b ", "\n\n", "\t", "don't ", "_", "12 ", " \n", "word\n", "é ", "{ ",
              ").\n", "(b). (c)", "<|by|>"]
    text = "".join(np.random.default_rng(0).choice(pieces, 20_000))
    o200k = (r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|"
             r"\s+(?!\S)|\s+")
    bloom = " ?[^(\\s|[.,!?…。，、।۔،])]+"
    by = AddedToken("<|by|>", lstrip=True, rstrip=True)
    for splits in (
        [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        *([pre_tokenizers.Split(Regex(pattern), "isolated"),
           pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
          for pattern in (o200k, bloom)),
        [pre_tokenizers.ByteLevel(add_prefix_space=True)],
        [pre_tokenizers.Metaspace(split=False)],
    ):
        bpe = Tokenizer(models.BPE(unk_token="<|end|>"))
        bpe.pre_tokenizer = pre_tokenizers.Sequence(splits)
        bpe.train_from_iterator(text.splitlines(True), trainers.BpeTrainer(
            vocab_size=600, special_tokens=["<|end|>", by], show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
        PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>").save_pretrained(tmp_path)
        encoder, given = Encoder(tmp_path, prepare.Options()), []

        def spy(texts, bpe=bpe, given=given, **options):
            given += map(len, texts)
            return bpe.encode_batch_fast(texts, **options)

        encoder.tokenizer = SimpleNamespace(backend_tokenizer=SimpleNamespace(
            encode=bpe.encode, encode_batch_fast=spy))
        for whole in text, text.replace("\n", "") + "x\nx":
            [found] = encoder.tokenize((whole,), False, True)
            assert found.tolist() == bpe.encode(whole).ids
        assert encoder.adds_space or len(given) > 10 and max(given) < 9000


@pytest.mark.parametrize("as_spaces", [True, False])
def test_no_word_is_lost_where_a_long_text_is_cut(tmp_path, made, monkeypatch, as_spaces):
    """With a space before each text: line ends are spaces as for T5, or begin tokens."""
    vocab = ["▁cat", "▁", "cat", "\n", "\ncat", "▁x"]
    alone = Tokenizer(models.Unigram([("<end>", 0.0), *((v, -1.0) for v in vocab)], unk_id=0))
    if as_spaces:
        alone.normalizer = normalizers.Sequence([normalizers.Replace("\n", " "),
                                                 normalizers.Strip(left=False)])
    alone.pre_tokenizer = pre_tokenizers.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=alone, eos_token="<end>").save_pretrained(
        tmp_path / "t")
    text = "cat\ncat x\ncat\nx" * 500
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr(read_module, "CHUNK_BYTES", 1000)
    made(tmp_path / "a.txt", "--tokenizer", tmp_path / "t")
    found, expected = read(tmp_path / "o")[0][0][:-1], alone.encode(text).ids
    assert found == expected or not as_spaces
    assert [alone.decode(ids).count("cat") for ids in (found, expected)] == [1500, 1500]


def test_which_split_a_text_is_for(tmp_path, made):
    """A small one as a whole, by its name; a large one in two, unless it is packed."""
    (tmp_path / "in").mkdir()
    small = {f"s{i}.txt": f"text number {i}\n" * 5 for i in range(40)}
    for name, text in small.items():
        (tmp_path / "in" / name).write_text(text)
    large = "".join(f"line {i}\n" for i in range(20_000))
    (tmp_path / "in/large.txt").write_text(large, "utf-8-sig")
    (tmp_path / "in/packed.md.gz").write_bytes(gzip.compress(large.encode()))
    made(tmp_path / "in", "--val_fraction", 0.4)
    found = [strings(tmp_path / "o", split) for split in ("train", "val")]
    both = sum(found, [])
    assert set(small.values()) <= set(both) and len(both) == len(small) + 3 and large in both
    before, after = (next(text for text in texts if text.startswith("line") and text != large)
                     for texts in found)
    assert before + after == large and 0.55 < len(before) / len(large) < 0.65
    told = made(tmp_path / "in/s1.txt", tmp_path / "in/packed.md.gz", "--val_fraction", 0.0001)
    assert "for validation: try a larger --val_fraction" in told


def test_of_a_folder_of_the_hub_the_records_for_training_are_taken(tmp_path, made):
    for name in ("README.md", "data/train-0.jsonl", "data/Test-0.jsonl", "val/0.jsonl",
                 "dataset_infos.json", "latest.jsonl", "train/test.md"):
        path = tmp_path / "hub" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(path, [{"text": name}])
    told = made(tmp_path / "hub")
    for skipped in ("README.md (1)", "test split (1)", "val split (1)", "dataset_infos.json (1)"):
        assert skipped in told.split("skipped ")[1]
    assert strings(tmp_path / "o") == [
        "data/train-0.jsonl", "latest.jsonl", '{"text": "train/test.md"}\n']
    made(tmp_path / "hub/val", tmp_path / "hub/README.md")  # where it is named, or nothing else is
    assert len(read(tmp_path / "o")) == 2


def save_as(kind, folder, columns):
    """The same rows as a file or folder of this kind; returns the input to name."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict(columns)
    path = folder / f"rows[1].{kind}"
    if kind == "parquet":
        rows.to_parquet(path, batch_size=120)
    elif kind == "csv":
        rows.to_csv(path)
    elif kind == "json":
        path.write_text(json.dumps(rows.to_list(), indent=1))
    elif kind == "objects.json":
        path.write_text("".join(json.dumps(row, indent=1) + "\n" for row in rows.to_list()))
    elif kind == "saved":
        datasets.DatasetDict(train=rows, other=rows.take(1)).save_to_disk(path)
    elif kind == "arrow":
        rows.save_to_disk(path)
        (path / "state.json").unlink()
    elif kind == "hub":
        (folder / "hub").mkdir()
        rows.to_parquet(folder / "hub/train.parquet")
        return f"hf:{folder / 'hub'}"
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows.to_list()).encode()
        path.write_bytes(gzip.compress(lines) if kind.endswith("gz") else zstd().compress(lines))
    return path


@pytest.mark.parametrize("kind", ["jsonl.zst", "parquet", "csv", "json", "objects.json", "saved",
                                  "arrow", "hub"])
def test_all_kinds_of_input_give_the_same_documents(tmp_path, made, kind):
    columns = dict(id=[*range(500)], body=texts(500), none=[None] * 500)
    expected = save_as("jsonl.gz", tmp_path, columns)
    told = made(expected, "--out", tmp_path / "expected", "--text_field", "body")
    assert "ignored keys     id (500), none (500)\n" in told
    given = save_as(kind, tmp_path, columns)
    assert {*told.splitlines()[:-1]} <= {*made(given, "--text_field", "body").splitlines()}
    assert contents(tmp_path / "o") == contents(tmp_path / "expected")
    assert len(read(tmp_path / "o")) > 480
    made(given, "--text_field", "body", "--limit", 70, "--workers", 2)
    assert strings(tmp_path / "o") == columns["body"][:70]
    told = made(given, expect=2)
    assert "has id, body" in told and "expected text (see --text_field)" in told


def test_files_are_first_read_after_the_fork(tmp_path, made, monkeypatch):
    """Before Python 3.12 a process forked beside Arrow's threads may hang."""
    children = []
    monkeypatch.setattr(prepare, "usable_cores", lambda: 2)
    before(prepare, "read_items",
           lambda *_: children.append(len(multiprocessing.active_children())), monkeypatch.setattr)
    made(write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}]), "--workers", 2)
    assert children == [2]


@pytest.fixture(scope="session")
def chats(tokenizer):
    """The tokenizer with a chat template."""
    found = AutoTokenizer.from_pretrained(tokenizer)
    found.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    found.save_pretrained(tokenizer.parent / "chats")
    return tokenizer.parent / "chats"


CHAT = [dict(role="user", content="sat?"), dict(role="assistant", content="on a mat")]


@pytest.mark.parametrize("kind", ["parquet", "json", "saved", "hub"])
def test_columns_of_other_types_and_chats(tmp_path, made, chats, kind):
    """Nested lists, JSON as text, columns that no document needs."""
    given = save_as(kind, tmp_path, dict(messages=[CHAT, CHAT, None], scores=[[1.5], [], []],
                                         text=["", "x", None]))
    told = made(given, "--tokenizer", chats, "--skip_bad")
    (ids, mask), other = read(tmp_path / "o")
    text = AutoTokenizer.from_pretrained(chats).decode(ids)
    assert (ids, mask) == other and text.startswith("[user]sat?[assistant]on a mat")
    assert 0 < sum(mask) < len(mask) and "scores, " in told and "messages: null" in told
    rated = save_as(kind, tmp_path / "o", dict(prompt=["a"], completion=["b"], label=[False]))
    assert "label false: a rejected completion" in made(rated, expect=2)


def test_which_data_set_of_the_hub_is_asked_for(tmp_path, made, monkeypatch):
    datasets, asked = pytest.importorskip("datasets"), []

    def load_dataset(*names, **options):
        asked.append((*names, options))
        rows = [dict(text=text, n=[i]) for i, text in enumerate("abc")]
        return datasets.Dataset.from_list(rows).to_iterable_dataset()

    with monkeypatch.context() as patch:
        patch.setattr(datasets, "load_dataset", load_dataset)
        made("hf:owner/name:10BT", "--limit", 2, "--split", "test")
        assert strings(tmp_path / "o") == ["a", "b"]
        made("hf:owner/name")
        assert asked[0] == ("owner/name", "10BT", dict(split="test", streaming=True))
        assert asked[-1] == ("owner/name", None, dict(split="train", streaming=True))
    saved = save_as("saved", tmp_path, dict(text=["a"]))
    assert "no split x; expected train or other" in made(saved, "--split", "x", expect=2)
    for name in ("owner/name", str(tmp_path / "none")):
        out, err = python("data.py", f"hf:{name}", "--out", tmp_path / "p", HF_HUB_OFFLINE="1",
                          expect=2)
        assert not out and err.startswith(f"data.py: error: hf:{name}: cannot be read: ")
        assert err.count("\n") == 1


def test_a_damaged_file_of_the_library_is_left_out_from_the_damage_on(tmp_path, made):
    source = save_as("parquet", tmp_path, dict(text=texts(2000)))
    content = bytearray(source.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 2000] = bytes(2000)
    source.write_bytes(content)
    assert f"{source}: cannot be read: " in made(source, expect=2)
    told = made(source, write_jsonl(tmp_path / "b.jsonl", [{"text": "the end"}]), "--skip_bad")
    *documents, last = strings(tmp_path / "o")
    assert documents == texts(2000)[: len(documents)] and last == "the end"
    assert f"left out         {source}: cannot be read" in told


@pytest.mark.slow
def test_one_process_and_two_make_the_same_of_chats_and_rows(tmp_path, made, chats):
    """From the command line, without a word beside the summary."""
    sources = [write_jsonl(tmp_path / "a.jsonl", [{"text": "the cat"}, {"messages": CHAT}]),
               save_as("parquet", tmp_path, dict(messages=[CHAT] * 40))]
    made(*sources, "--tokenizer", chats)
    for workers in (1, 2):
        _, err = python("data.py", *sources, "--out", tmp_path / "p", "--val_fraction", 0,
                        "--tokenizer", chats, "--workers", workers)
        assert not err
        assert contents(tmp_path / "p") == contents(tmp_path / "o")


def test_an_id_never_wraps(tmp_path):
    writer = TokenWriter(tmp_path / "train.bin", 50257)
    with pytest.raises(ConfigError, match="to 70000; expected ids below 50257"):
        writer.add(np.array([5, 70000]), np.array([2]), None, 9)


def test_a_tokenizer_that_transformers_corrects_as_it_loads_is_kept_so(tmp_path, made):
    """Those of Mistral models, by a flag: the pattern in their tokenizer.json joins e and Bay."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, "ay", "Bay", "eBay", "</s>", *map(str, range(100, 100_100))]
    bpe = Tokenizer(models.BPE({word: i for i, word in enumerate(words)},
                               [("a", "y"), ("B", "ay"), ("e", "Bay")]))
    split = pre_tokenizers.Split(Regex(r"\p{L}+"), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>").save_pretrained(tmp_path / "t")
    settings, source = tmp_path / "t/tokenizer_config.json", tmp_path / "a.txt"
    source.write_text("eBay")
    (tmp_path / "t/config.json").write_text(
        json.dumps(dict(model_type="mistral", transformers_version="4.57.1")))
    for flag, pieces in ((False, ["eBay"]), (True, ["e", "Bay"])):
        found = json.loads(settings.read_text()) | dict(fix_mistral_regex=flag)
        settings.write_text(json.dumps(found))
        made(source, "--tokenizer", tmp_path / "t", "--val_fraction", 0)
        (ids, _), = read(tmp_path / "o")
        assert [words[i] for i in ids] == [*pieces, "</s>"]


def test_a_tokenizer_folder_of_somebody_else_is_left_alone(tmp_path, made, tokenizer):
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    mine = tmp_path / "o/tokenizer/mine.txt"
    mine.parent.mkdir(parents=True)
    mine.touch()
    assert "was not made by this program" in made(source, "--tokenizer", tokenizer, expect=2)
    made(source)  # that of bytes has no use for it
    assert mine.exists()


def test_mistakes_are_reported_in_one_line(tmp_path, made, command, tokenizer):
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    same = write_jsonl(tmp_path / "b.jsonl", [{"text": "hello world"}] * 3)
    endless = AutoTokenizer.from_pretrained(tokenizer)
    endless.eos_token = None
    endless.save_pretrained(tmp_path / "endless")
    ByT5Tokenizer().save_pretrained(tmp_path / "slow")
    (tmp_path / "empty.txt").touch()
    for arguments, words in (
        ([], "required: INPUT"),
        ([source, "--tokeniser", "b"], "did you mean --tokenizer?"),
        ([source, "--val_split", "0.1"], "did you mean --val_fraction?"),
        ([tmp_path / "*.md"], "no such file"),
        (["~nosuchuser/a.txt"], "~nosuchuser/a.txt: no such file"),
        ([ROOT / "README.md", ROOT / "train.py"], "train.py: expected a regular file that ends in"),
        ([source, "--out", tmp_path / "empty.txt"], "cannot be made"),
        ([tmp_path, "--out", tmp_path], f"{tmp_path}: is what --out names"),
        ([source, "--tokenizer", tmp_path], "cannot be loaded"),
        ([source, "--tokenizer", tmp_path / "endless"], "no end-of-text"),
        ([source, "--tokenizer", tmp_path / "slow"], "expected one with a tokenizer.json"),
        ([source, "--tokenizer", "./none"], "no folder or hub model"),
        ([tmp_path / "empty.txt"], "no document to train on"),
        ([source, "--val_fraction", 1], "--val_fraction 1.0"),
        ([same, "--val_fraction", 0.99], "the 3 are drawn for validation"),  # one draw for all
        ([source, "--train_tokenizer", 9], "expected more than 256"),
        ([source, "--train_tokenizer", 300, "--tokenizer", "t"], "exclude each other"),
        ([source, "--workers", 0], "--workers 0: expected at least 1"),
    ):
        told = made(*arguments, expect=2)
        assert words in told and told.count("\n") == 1, told
    for arguments, words in (
            ([source], "--out DIR: expected"), (["show", tmp_path, 1], "no train.bin"),
            (["show", tmp_path], "expected: data.py show DIR N")):
        told = command(*arguments, expect=2)
        assert words in told and told.count("\n") == 1, told


def test_what_is_interrupted_leaves_the_old_data_alone(tmp_path, made):
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in texts(50)])
    made(source)
    before = contents(tmp_path / "o")
    large = write_large(tmp_path / "large.jsonl.gz", 100)
    for number, left in ((signal.SIGINT, False), (signal.SIGKILL, True)):
        shutil.rmtree(tmp_path / "o/.preparing", ignore_errors=True)
        process = subprocess.Popen(
            [sys.executable, ROOT / "data.py", large, "--out", tmp_path / "o"], env=environment(),
            start_new_session=True, stderr=subprocess.PIPE, text=True)
        draft = tmp_path / "o/.preparing/new/train.bin"
        while process.poll() is None and not (draft.exists() and draft.stat().st_size > 10**6):
            time.sleep(0.01)
        # Ctrl-C reaches the workers as well; a kill does not, but they have nothing left to do
        (os.kill if left else os.killpg)(process.pid, number)
        try:
            told = process.communicate(timeout=120)[1]  # until no worker can write there any more
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == (-9 if left else 130), told
        assert (tmp_path / "o/.preparing").exists() == left
        now = contents(tmp_path / "o")
        assert {name: now[name] for name in before} == before
        assert all(name in before or name.startswith(".preparing") for name in now)
        assert "Traceback" not in told
    assert len(find_files(str(tmp_path / "o"), "train")) == 1
    made(source)  # and that of the killed one is gone
    assert contents(tmp_path / "o") == before


def test_new_files_are_in_place_before_they_can_be_taken(tmp_path, made, monkeypatch):
    """Stopped anywhere while the old are replaced, there is no dataset made of both."""
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": t, "completion": t} for t in texts(50)])
    other = write_jsonl(tmp_path / "b.jsonl", [{"text": t} for t in texts(60, 1)])
    for fails_at in range(6):
        moved = iter(range(99))

        def fail(*_, moved=moved, fails_at=fails_at):
            if next(moved) == fails_at:
                raise KeyboardInterrupt

        made(source, "--val_fraction", 0.2)
        before(prepare.Path, "rename", fail, monkeypatch.setattr)
        prepare.main([str(other), "--out", str(tmp_path / "o"), "--val_fraction", "0.2"])
        monkeypatch.undo()
        assert find_files(str(tmp_path / "o"), "train") == []


def write_large(path, mb):
    """mb MB of lines in a file a hundredth of that size."""
    lines = "".join(json.dumps({"text": f"{i} " * 200}) + "\n" for i in range(1000)).encode()
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(max(1, round(mb * 1e6 / len(lines)))):
            file.write(lines)
    return path


def test_what_is_held_does_not_grow_with_the_input(tmp_path, monkeypatch):
    monkeypatch.setattr(read_module, "CHUNK_BYTES", 1 << 14)
    peaks = []
    for mb in (0.5, 0.5, 0.5, 2, 2):  # the first time also imports; twice: garbage waits at times
        source = write_large(tmp_path / "a.jsonl.gz", mb)
        tracemalloc.start()
        prepare.prepare([str(source)], prepare.Options(out=str(tmp_path / "o"), workers=1))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert min(peaks[3:]) < 1.1 * max(peaks[1:3]) < 1e6, peaks


# GPT-2's words, as llama.cpp has them under the pre-tokenizer "gpt-2"
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def test_a_trained_tokenizer_splits_text_as_gpt2_does_and_is_trained_on(tmp_path, made, run):
    regex = pytest.importorskip("regex")
    (tmp_path / "a.txt").write_text("\n".join(texts(800)))
    told = made(tmp_path / "a.txt", "--train_tokenizer", 300, "--val_fraction", 0.1)
    assert "vocabulary 300 (bpe-300@" in told
    loaded = AutoTokenizer.from_pretrained(tmp_path / "o/tokenizer")
    assert loaded.decode(loaded("naïve 猫")["input_ids"]) == "naïve 猫" and len(loaded) == 300
    splits = loaded.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    known = filter(lambda c: ucd_3_2_0.category(c) != "Cn", map(chr, range(0x3000)))  # of old
    for text in ("it's 12 o'clock,  isn't it?\n\n\tx = {'a': 1.5e-3}  ", "naïve 猫 𝛼²½ I’ll we'LL",
                 " \r\n  end\u3000of\u00a0it", "".join(known)):
        found = [text[begin:end] for _, (begin, end) in splits(text)]
        assert found == regex.findall(GPT2_WORDS, text)
    told = run("--data", tmp_path / "o", "--out_dir", "r")
    assert "vocabulary 300" in told and "bits_per_byte" in told
    made(tmp_path / "a.txt", "--out", tmp_path / "q", "--tokenizer", tmp_path / "o/tokenizer",
         "--val_fraction", 0.1)
    same = "--data", tmp_path / "o", tmp_path / "q", "--val_data", tmp_path / "q"
    run(*same, "--out_dir", "t")  # one tokenizer, under two names
    run("--data", tmp_path / "q", "--out_dir", "t", "--auto_resume", "--max_steps", 20,
        "--allow_change", "data", "max_steps")
    made(tmp_path / "a.txt", "--out", tmp_path / "p", "--train_tokenizer", 280)
    told = run("--data", tmp_path / "o", tmp_path / "p", "--out_dir", "s", expect=2)
    assert "sources with different tokenizers" in told
