"""Promises about data that hostile or unlucky use once broke: each test was seen to fail before."""

# ruff: noqa: F401, F811 -- fixtures of another file

import codecs
import gzip
import json
import multiprocessing
import os
import shutil
import socket
import sys
from unittest.mock import Mock

import numpy as np
import pytest
from conftest import after_step, before, wait_for
from test_prepare import command, made, read, strings, texts, tokenizer, write_jsonl, zstd
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import data
from steady.options import ConfigError
from steady.tokens.files import TokenFile, TokenWriter, write_tokens
from steady.tokens.tokenizers import load_tokenizer
from steady.watch.screen import Screen
from tools import prepare
from tools import read as read_module
from tools.prepare import IN_PIECES, Encoder


@pytest.mark.parametrize("n", [3, 40])  # of many files less is looked at
def test_one_file_of_several_that_changed_is_noticed(tmp_path, n):
    for i in range(n):
        np.full(70_000, i, np.uint16).tofile(tmp_path / f"x_train_{i:02}.bin")
    before = data.load_mixture([str(tmp_path)], "train", 8, 0).fingerprint
    with open(tmp_path / "x_train_02.bin", "r+b") as file:
        file.write(b"\7" * 4096)
    after = data.load_mixture([str(tmp_path)], "train", 8, 0).fingerprint
    assert after[2] != before[2]
    assert before[:2] + before[3:] == after[:2] + after[3:]


# --- tokenizers ---


def test_a_malformed_tokenizer_is_reported_in_one_line(tmp_path, made, tokenizer, monkeypatch):
    PanicException = type("PanicException", (BaseException,), {})  # as Rust's are: no Exception
    panic = Mock(side_effect=PanicException("range end index 4 out of range for slice of length 2"))
    shutil.copytree(tokenizer, tmp_path / "t")
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "the cat"}])
    (tmp_path / "t/tokenizer.json").write_text("null")
    for words in ("", "PanicException: range end index 4"):
        told = made(source, "--tokenizer", tmp_path / "t", expect=2)
        assert told.count("\n") == 1 and f"{tmp_path / 't'}: cannot be loaded: {words}" in told
        monkeypatch.setattr(PreTrainedTokenizerFast, "from_pretrained", panic)


def test_a_tokenizer_is_what_its_json_says_without_truncation_padding_and_class(tmp_path, made,
                                                                               tokenizer):
    stored, plain = tmp_path / "stored", Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    shutil.copytree(tokenizer, stored)
    backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    backend.enable_truncation(16)
    backend.enable_padding(length=24, pad_id=5)
    backend.model.dropout = 0.5
    backend.save(str(stored / "tokenizer.json"))
    about = stored / "tokenizer_config.json"
    settings = json.loads(about.read_text()) | dict(tokenizer_class="Qwen2Tokenizer")
    about.write_text(json.dumps(settings))  # Qwen2's would take each digit apart
    found = ["the cat", "the cat sat on 12345 mats", *texts(3, longest=200)]
    made(write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in found]),
         "--tokenizer", stored)
    documents = [ids[:-1] for ids, _ in read(tmp_path / "o")]
    assert documents == [plain.encode(text).ids for text in found]
    assert [load_tokenizer(str(tmp_path / "o/tokenizer")).decode(ids) for ids in documents] == found
    later = load_tokenizer(str(stored)).backend_tokenizer
    assert later.truncation is None and later.padding is None


# --- folders of input ---


def test_files_that_are_not_read_are_named_by_kind(tmp_path, made):
    folder = tmp_path / "in"
    for inside in (".venv/lib", "sub/.cache", "sub/deep"):
        (folder / inside).mkdir(parents=True)
        (folder / inside / "a.txt").write_text(f"in {inside}")
    for name in ("a.xml", "b.XML", "c.py", "Makefile", "d.tar.gz"):
        (folder / name).write_text("no")
    os.mkfifo(folder / "pipe.txt")
    (folder / "elsewhere").symlink_to("sub")
    (folder / "A.TXT").write_text("upper case")
    (folder / "B.JsonL").write_text('{"text": "lines"}')
    (folder / "C.MD.GZ").write_bytes(gzip.compress(b"packed"))
    empty = {folder / "e.txt": "", folder / "e.jsonl": "", folder / "e.json": "[]"}
    for path, text in empty.items():
        path.write_text(text)
    (tmp_path / "link").symlink_to(folder / "sub")
    again = folder / "A.TXT", folder / "../in/A.TXT", tmp_path / "link"
    for _ in range(2):  # each file once, and not what was written
        told = made(folder, *again, "--out", folder / "o")
        assert sorted(strings(folder / "o")) == ["in sub/deep", "lines", "packed", "upper case"]
        for name in (".xml (2)", ".py (1)", "Makefile (1)", ".tar.gz (1)", " .txt (1)",
                     *(f"{path} (1)" for path in empty)):
            assert name in told
    made(folder / ".venv", "--out", tmp_path / "p")  # it was asked for
    assert strings(tmp_path / "p") == ["in .venv/lib"]
    assert f"{folder / 'pipe.txt'}: expected a regular file" in made(folder / "pipe.txt", expect=2)


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_json_is_an_array_or_lines_or_objects(tmp_path, made, mark):
    """Whose first line may be long."""
    records = [{"text": text + ' "quoted", [1] {2}', "n": [1, {"a": 2.5}]}
               for text in ("and so on" * 999, *texts(240))]
    lines = "\n".join(map(json.dumps, records))
    for content in (json.dumps(records), "\n" + json.dumps(records, indent=1), lines,
                    lines.replace(', "n"', ',\n"n"')):
        if mark and content[0] == "\n":
            continue
        (tmp_path / "a.json.gz").write_bytes(gzip.compress(mark + content.encode()))
        made(tmp_path / "a.json.gz")
        assert strings(tmp_path / "o") == [record["text"] for record in records]


@pytest.mark.parametrize("name, content, words, left", [
    ("a.csv", b'text,n\na,1\nb,2,3\nc,4\n', "a.csv:2: more fields than the header", ["a", "c"]),
    ("a.csv", b'text\na\nna\xefve\nb\n',
     "a.csv:2: half of a character (a lone surrogate), or not UTF-8", ["a", "b"]),
    ("a.csv", b'text,n,text\na,1,b\n', "a.csv: two columns have the same name", []),
    ("a.csv", b'prompt,completion,label\na,b,True\na,c,False\n', "a.csv:2: label false", ["ab"]),
    ("a.csv", b'text\na\n"b', "a.csv: cannot be read: unexpected end of data", ["a"]),
    ("a.json", b'[{"text": "a"}, {"text": "b"', "cannot be read", []),
    ("a.json", b'[{"text": "a"}, 5]', "a.json:2: record: expected an object", ["a"]),
    ("a.json", b'{"data": [{"text": "a"}]}', "a.json:1: has data; expected text", []),
    ("a.jsonl", b"[" * 100_000, "a.jsonl:1: ", []),
    ("a.jsonl", b'{"text": "a"}\n{"text": "%s"}\n' % (b"x" * 200_000),
     "a.jsonl:2: a line of 200,000 bytes or more", ["a"]),
    ("a.json", b'[{"text": "a"}, {"text": "na\xefve"}]', "cannot be read", []),
    ("a.jsonl", b'{"text": "a"}\n{"text": "na\xefve"}\n', "a.jsonl:2: not UTF-8", ["a"]),
    ("a.jsonl", b'{"text": "a"}\n\n{"text": "b"', "a.jsonl:3: not JSON", ["a"]),
    ("a.jsonl", b'{"text": "a"}\n{"text": 3}', "a.jsonl:2: text: expected text, found int", ["a"]),
    ("a.jsonl", b'{"text": "a"}\n{"text": null}', "a.jsonl:2: has text: null", ["a"]),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\\ud800"}', "a.jsonl:2: half of a character", ["a"]),
    ("a.jsonl", b'{"messages": [{"role": "user"}]}', "chats (messages): add --tokenizer", None),
    ("a.txt", b"a\nna\xefve", "a.txt: not UTF-8 at byte 4", ["a\n"]),
    ("a.txt", b"a\0b\0c\0", "a.txt: UTF-16, or no text; expected UTF-8", []),
    ("a.txt.gz", gzip.compress("text".encode("utf-16"), mtime=0), "UTF-16", []),
    ("a.jsonl", '{"text": "a"}'.encode("utf-16"), "a.jsonl: UTF-16", [])])
def test_what_cannot_be_read_is_named_or_left_out(tmp_path, made, monkeypatch, name, content, words,
                                                  left):
    monkeypatch.setattr(read_module, "CHUNK_BYTES", 8)
    monkeypatch.setattr(read_module, "LINE_BYTES", 200_000)
    (tmp_path / name).write_bytes(content)
    told = made(tmp_path / name, expect=2)
    assert words in told and str(tmp_path / name) in told and told.count("\n") == 1
    assert not list((tmp_path / "o").iterdir())
    (tmp_path / "b.txt").write_text("b")
    if left is not None:
        told = made(tmp_path / "b.txt", tmp_path / name, "--skip_bad")
        assert strings(tmp_path / "o") == ["b", *left]
        assert "left out         " in told and "(1)" in told


def packed(content: bytes, suffix: str) -> bytes:
    if suffix == ".zst":
        return zstd().compress(content)
    return gzip.compress(content) if suffix else content


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_that_was_cut_is_named(tmp_path, made, suffix):
    path, found = tmp_path / f"a.jsonl{suffix}", texts(40)
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in found]
    first, second = (packed(b"".join(half), suffix) for half in (lines[:20], lines[20:]))
    path.write_bytes(first + second)
    made(path)
    assert strings(tmp_path / "o") == found
    for end in (3, len(first) - 1, len(first) + 3, len(first + second) - 1):
        path.write_bytes((first + second)[:end])
        told = made(path, expect=2)
        assert f"{path}: cannot be read: " in told and told.count("\n") == 1
    told = made(path, "--skip_bad")  # what comes before is kept
    assert strings(tmp_path / "o") == found[: len(strings(tmp_path / "o"))] >= found[:20]
    assert f"left out         {path}: cannot be read" in told


# --- one of many that is of no use ---


def foreign_parquet(path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(dict(id=[1], words=["a"])), path)


FOREIGN = {
    "z.parquet": foreign_parquet,
    "y.parquet": lambda path: path.write_bytes(b"PAR1" + b"\0" * 99),
    "z.jsonl.gz": lambda path: path.write_bytes(b"no gzip"),
    "z.json": lambda path: path.write_text("[1, 2"),
    "z.txt": lambda path: path.write_text("naïve", "utf-16")}


@pytest.mark.parametrize("name, train", [*((name, False) for name in FOREIGN), ("z.json", True)])
def test_a_foreign_file_among_many_is_found_before_work(tmp_path, made, monkeypatch, name, train):
    said, folder = [f"document {i}" for i in range(5)], tmp_path / "in"
    folder.mkdir()
    for i, text in enumerate(said):
        write_jsonl(folder / f"{i}.jsonl", [{"text": text}])
    FOREIGN[name](folder / name)
    flags = [folder, "--workers", 1, *["--train_tokenizer", 300] * train]
    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "encode", lambda *args: pytest.fail("it has begun"))
        patch.setattr(prepare.tokenizers, "byte_level_bpe",
                      lambda *args: pytest.fail("it has begun"))
        told = made(*flags, expect=2)
    assert str(folder / name) in told and told.count("\n") == 1
    assert f"left out         {folder / name}: " in made(*flags, "--skip_bad")
    assert len(read(tmp_path / "o")) == 5 and (train or strings(tmp_path / "o") == said)


def test_a_library_that_is_missing_is_no_bad_file(tmp_path, made, monkeypatch):
    foreign_parquet(tmp_path / "a.parquet")
    (tmp_path / "b.txt").write_text("whole")
    monkeypatch.setitem(sys.modules, "datasets", None)
    for flags in ([], ["--skip_bad"]):
        told = made(tmp_path, *flags, expect=2)
        assert "needs datasets: pip install datasets" in told and "Traceback" not in told


# --- long documents ---


@pytest.fixture
def sizes(monkeypatch) -> list[int]:
    """In bytes, of each text that is tokenized."""
    sizes = []
    before(Encoder, "tokenize", lambda encoder, texts, *_: sizes.extend(
        len(text.encode()) for text in texts), monkeypatch.setattr)
    return sizes


def test_a_long_document_is_encoded_in_pieces(tmp_path, made, tokenizer, monkeypatch, sizes):
    """With the ids, and with the vocabulary, of the whole; also without lines, or words."""
    long, short = "\n".join(texts(300)), texts(3)
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in [*short, long, *short]])
    made(source, "--workers", 1, "--train_tokenizer", 400)
    whole = (tmp_path / "o/tokenizer/tokenizer.json").read_bytes()
    monkeypatch.setattr(read_module, "CHUNK_BYTES", 1000)
    made(source, "--workers", 1, "--train_tokenizer", 400)
    assert (tmp_path / "o/tokenizer/tokenizer.json").read_bytes() == whole
    sizes.clear()
    made(source, "--workers", 1, "--tokenizer", tokenizer)
    alone = load_tokenizer(str(tokenizer))
    assert len(long) > 20_000 and max(sizes) < 4000
    assert [ids[:-1] for ids, _ in read(tmp_path / "o")] == [
        alone(text)["input_ids"] for text in [*short, long, *short]]
    for whole in (long, " ".join(long.split()), "猫" * 5000):
        (tmp_path / "a.txt").write_text(whole)
        made(tmp_path / "a.txt", "--tokenizer", tokenizer)
        assert read(tmp_path / "o")[0][0] == alone(whole)["input_ids"] + [alone.eos_token_id]


def test_a_text_without_white_space_is_cut_at_a_length(tmp_path, made, monkeypatch, sizes):
    monkeypatch.setattr(read_module, "CHUNK_BYTES", 16)
    monkeypatch.setattr(read_module, "PIECE_BYTES", 64)
    text = "猫xé" * 1000
    (tmp_path / "a.txt").write_text(text)
    write_jsonl(tmp_path / "b.jsonl", [{"text": text}])
    made(tmp_path / "a.txt", tmp_path / "b.jsonl", "--workers", 1)
    assert strings(tmp_path / "o") == [text, text] and max(sizes) <= 64 + 16
    assert max(map(len, IN_PIECES.findall("x" * 100_000))) < 10_000


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("text, before, after", [
    ("ab cde " * 9000, "", " "),
    ("a line\n" * 300 + "of words " * 9000, "", " "),
    ("a line\n" * 9000 + "the last one, longer than it should be", "\n", ""),
    ("猫é" * 9000, "", ""),
], ids=["one line", "a long last line", "lines", "no white space"])
def test_the_end_of_any_text_is_for_validation(tmp_path, made, text, before, after, suffix):
    path = tmp_path / f"a.txt{suffix}"
    content = codecs.BOM_UTF8 + text.encode()
    path.write_bytes(packed(content[:1], suffix) + packed(content[1:], suffix))  # in two frames
    for share in (0.01, 0.5):
        made(path, "--val_fraction", share)
        [train], [val] = strings(tmp_path / "o"), strings(tmp_path / "o", "val")
        assert train + val == text and train.endswith(before) and val.startswith(after)
        assert 0.5 * share < len(val) / len(text) < 1.01 * share


# --- several processes ---


@pytest.mark.parametrize("end", ["goes on", "is killed"])
def test_two_preparations_into_one_folder(start, tmp_path, made, end):
    source, out = write_jsonl(tmp_path / "a.jsonl", [{"text": "first"}] * 50), tmp_path / "o"
    other = write_jsonl(tmp_path / "b.jsonl", [{"text": "second"}] * 9)
    flags = ["--out", out, "--workers", 1]

    def hook(rank):
        def wait(*folders):
            (tmp_path / "ready").touch()
            wait_for(tmp_path / "go")

        before(prepare, "publish", wait)
        os._exit(prepare.main([*map(str, [source, *flags])]))

    (process,) = start(hook=hook)
    wait_for(tmp_path / "ready")
    told = made(other, *flags, expect=2)
    assert f"--out {out}: process {process.pid} on {socket.gethostname()} is writing there" in told
    if end == "is killed":
        process.kill(9)
        assert process.code() == -9 and (out / ".preparing/new/train.bin").exists()
        made(other, *flags)
        assert strings(out) == ["second"] * 9
    else:
        (tmp_path / "go").touch()
        assert process.code() == 0 and strings(out) == ["first"] * 50
    assert {*os.listdir(out)} == {"train.bin", "train.bin.json", "train.bin.docs"}


def test_no_process_outlives_an_error(tmp_path, made, monkeypatch):
    """Else its end races that of the interpreter, which then prints "Bad file descriptor"."""
    monkeypatch.setattr("tools.prepare.usable_cores", lambda: 2)
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"words": "b"}])
    made(source, "--workers", 2, expect=2)
    assert not multiprocessing.active_children()

    def add(*args):
        for process in multiprocessing.active_children():
            process.kill()

    monkeypatch.setattr(read_module, "CHUNK_BYTES", 100)
    monkeypatch.setattr(TokenWriter, "add", add)
    write_jsonl(source, [{"text": text} for text in texts(500)])
    told = made(source, "--workers", 2, expect=2)
    assert "a tokenizing process was killed" in told and told.count("\n") == 1


# --- files that are not what they seem ---


@pytest.mark.parametrize("content", [
    b"[1]", b"{", b"\xff\xfe{", b'{"dtype": ["u"]}', b'{"tokens": "5"}', b'{"vocab_size": 2.5}',
    b'{"bytes": [1]}', b'{"end_of_text": 70000}', b'{"end_of_text": -1}', b'{"tokenizer": ["a"]}'])
def test_a_sidecar_of_the_wrong_kind_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "train.bin"
    write_tokens(path, [b"abcdefgh" * 2000])
    (tmp_path / "train.bin.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"\A\S+/train\.bin\.json: .*\Z"):  # in one line
        TokenFile(path)


@pytest.mark.parametrize("dtype", ["<u4", "<i8"])
@pytest.mark.parametrize("most", [65, 50_000, 200_000])
def test_ids_of_4_or_8_bytes_are_not_read_as_2(tmp_path, run, dtype, most):
    """Where nothing says how wide they are."""
    ids = np.random.default_rng(0).integers(0, most, 6000)
    path = tmp_path / "train.bin"
    ids.astype(dtype).tofile(path)
    told = run("--data", path, "--vocab_size", 65_536, bare=True, expect=2)
    assert f"{path}: read as uint16" in told and told.count("\n") == 1
    if dtype == "<u4":
        (tmp_path / "train.bin.json").write_text('{"dtype": "uint32"}')
        assert (TokenFile(path).tokens == ids).all()


def test_other_ids_without_a_type(tmp_path, run):
    path, ids = tmp_path / "train.bin", np.random.default_rng(0).integers(0, 65, 6000)
    for content in (ids % 4, ids, ids * 0):
        content.astype(np.uint16).tofile(path)
        assert (TokenFile(path).tokens == content).all()
    with open(path, "wb") as file:
        np.save(file, ids.astype(np.uint16))
    assert "is an .npy file" in run("--data", path, bare=True, expect=2)
    ids.astype(np.uint16).tofile(path)
    told = run("--data", path, "--vocab_size", 65_537, bare=True, expect=2)
    assert "the vocabulary has 65,537 ids" in told


@pytest.mark.parametrize("workers, mode", [(1, "stream"), (0, "documents")])
def test_a_file_cut_while_it_is_mapped_is_named(run, corpus, tmp_path, mode, workers):
    for path in corpus.glob("train.bin*"):
        shutil.copy(path, tmp_path)
    file = tmp_path / "train.bin"

    printed = run("--data", file, "--data_mode", mode, "--max_steps", 400, "--num_workers", workers,
                  "--eval_interval", 0, expect=2,
                  hook=lambda rank: after_step(4, lambda: os.truncate(file, 4096)))
    saved, error = printed.splitlines()[-2:]
    assert saved.startswith("saved the last completed step") and "Traceback" not in printed
    assert error.startswith(f"train.py: error: {file}: was cut to 4,096 bytes")
    mapped = TokenFile(shutil.copy(corpus / "train.bin", tmp_path / "mapped.bin"))
    os.replace(shutil.copy(corpus / "val.bin", tmp_path), mapped.path)
    mapped.require_complete()  # a shorter file in its place leaves the mapped one whole
    assert len(multiprocessing.reduction.ForkingPickler.dumps(mapped)) < 999  # its path alone


# --- tokenizers of a few letters ---


def test_what_a_tokenizer_does_not_know_is_counted(made, tmp_path):
    """Unknown tokens, characters without any, and documents without text."""
    source = write_jsonl(tmp_path / "s.jsonl", [dict(text="abxéé"), dict(text="xx c"),
                                                *[dict(text="")] * 3])
    vocab = {"<unk>": 0, "</s>": 1, "a": 2, "b": 3, "c": 4, " ": 5}
    told = []
    for unknown in ("<unk>", None):
        built = Tokenizer(models.BPE(vocab, [], unk_token=unknown))
        PreTrainedTokenizerFast(tokenizer_object=built, eos_token="</s>", unk_token="<unk>",
                                ).save_pretrained(tmp_path / "t")
        told.append(made(source, "--tokenizer", tmp_path / "t").replace(str(tmp_path), ""))
        assert "empty            documents (3)\n" in told[-1]
    assert [ids for ids, _ in read(tmp_path / "o")] == [[2, 3, 1], [5, 4, 1]]
    assert "unknown tokens   5 (45.5%)\n" in told[0] and "no token for" not in told[0]
    assert "no token for     'x' (3), 'é' (2)\n" in told[1] and "unknown" not in told[1]


@pytest.mark.parametrize("name", ["<unk>", None])
def test_unknown_tokens_are_counted_though_nothing_names_them(made, tmp_path, name):
    """A Unigram knows the id alone, and its tokenizer need not have a name for it."""
    words = [("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0), ("b", -2.0)]
    built = Tokenizer(models.Unigram(words, unk_id=0))
    PreTrainedTokenizerFast(tokenizer_object=built, eos_token="</s>", unk_token=name,
                            ).save_pretrained(tmp_path / "t")
    source = write_jsonl(tmp_path / "s.jsonl", [dict(text="abxa"), dict(text="zzb")])
    told = made(source, "--tokenizer", tmp_path / "t")
    ids = [ids for ids, _ in read(tmp_path / "o")]
    assert f"unknown tokens   {sum(document.count(0) for document in ids)} (" in told


@pytest.mark.parametrize("part", [
    dict(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first")),
    dict(normalizer=normalizers.Sequence([normalizers.Prepend("▁"),
                                          normalizers.Replace(" ", "▁")])),
], ids=["pre-tokenizer", "normalizer"])
def test_parts_of_a_document_get_no_space_of_their_own(made, tmp_path, monkeypatch, part):
    """Where a tokenizer puts one before every text."""
    words = ["<unk>", "</s>", "▁", *"abcdefghijklmnopqrstuvwxyz:\n"]
    built = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>"))
    for name, value in part.items():
        setattr(built, name, value)
    PreTrainedTokenizerFast(tokenizer_object=built, eos_token="</s>", unk_token="<unk>",
                            ).save_pretrained(tmp_path / "t")
    source = write_jsonl(tmp_path / "s.jsonl", [dict(prompt="the cat:", completion=" sat\ndown")])
    made(source, "--tokenizer", tmp_path / "t")
    [(ids, mask)] = read(tmp_path / "o")
    assert "".join(words[i] for i in ids) == "▁the▁cat:▁sat\ndown</s>"
    assert mask == [0] * len("▁the▁cat:") + [1] * (len("▁sat\ndown") + 1)
    monkeypatch.setattr(read_module, "CHUNK_BYTES", 16)  # nor do pieces of a long one
    (tmp_path / "s.txt").write_text("cat\n" * 30)
    made(tmp_path / "s.txt", "--tokenizer", tmp_path / "t")
    assert "".join(words[i] for i in read(tmp_path / "o")[0][0]) == "▁" + "cat\n" * 30 + "</s>"


# --- the screen ---


def test_data_and_names_cannot_control_a_terminal(tmp_path, made, command):
    said, name = "a\x1b]0;title\x07b\x9b31m\x7f\té\n", "\x1b[31m\udcff"
    write_jsonl(tmp_path / f"{name}a.jsonl", [{"text": said, "key\x1b[2J": 1}])
    (tmp_path / f"{name}b.txt").touch()
    told = made(tmp_path) + command("show", tmp_path / "o", 1)
    (tmp_path / f"{name}c.json").write_text("{")
    told += made(tmp_path, expect=2)
    shown = "\\x1b[31m\\udcff"
    for words in (f"{shown}b.txt (1)", "key\\x1b[2J (1)", f"{shown}c.json:1: not JSON",
                  "a\\x1b]0;title\\x07b\\x9b31m\\x7f\té\n"):
        assert words in told
    log = tmp_path / "log"
    with open(log, "w", encoding="utf-8") as file:
        print(said, end="", file=Screen(file))
    assert log.read_text("utf-8") == "a\\x1b]0;title\\x07b\\x9b31m\\x7f\té\n"
