"""Promises about data that hostile or unlucky use once broke: each test was seen to fail before."""

import gzip
import os
import shutil

import numpy as np
import pytest
from conftest import TINY, Process, rows
from test_prepare import made, read, texts, tokenizer, write_jsonl  # noqa: F401
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import data
import train
from steady.cli import ConfigError
from steady.tokens import TokenFile, load_tokenizer, write_tokens

# --- data that changes between two starts ---


@pytest.mark.parametrize("what", ["no sidecar", "old sidecar", "mask"])
def test_data_replaced_under_the_same_name_and_size_is_refused(run, tmp_path, what):
    folder = tmp_path / "d"
    folder.mkdir()
    write_tokens(folder / "train.bin", [b"abcdefgh" * 2000])
    mask = np.ones(16_001, np.uint8)
    if what == "mask":
        mask.tofile(folder / "train.bin.mask")
    if what == "no sidecar":
        (folder / "train.bin.json").unlink()
    flags = [*TINY, "--data", folder, "--vocab_size", 257, "--out_dir", "r", "--save_interval", 4]
    run(*flags, "--max_steps", 4, bare=True)
    if what == "mask":
        mask[5:10] = 0
        mask.tofile(folder / "train.bin.mask")
    else:
        np.full(16_001, 7, np.uint16).tofile(folder / "train.bin")
    more = [*flags, "--auto-resume", "--max_steps", 8]
    told = run(*more, bare=True, expect=2)
    assert "data has changed: train.bin (16,001 tokens)" in told and "--allow_change data" in told
    run(*more, "--allow_change", "data", bare=True)
    assert rows(tmp_path / "r")[-1]["step"] == 8


def test_a_checkpoint_without_a_sample_of_its_data_resumes(run, tmp_path, corpus, monkeypatch):
    made_mixture = data.Mixture.__init__

    def without_sample(mixture, *args):
        made_mixture(mixture, *args)
        assert [len(file) for file in mixture.fingerprint] == [4]
        mixture.fingerprint = [file[:3] for file in mixture.fingerprint]

    monkeypatch.setattr(data.Mixture, "__init__", without_sample)
    run("--out_dir", "r", "--max_steps", 4, "--save_interval", 4)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    run("--auto-resume", "--out_dir", "r", "--max_steps", 8)
    other = tmp_path / "other"
    shutil.copytree(corpus, other)
    sidecar = other / "train.bin.json"
    sidecar.write_text(sidecar.read_text().replace('"checksum": "', '"checksum": "0'))
    told = run("--resume", "r/checkpoints/step_00000004.pt", "--data", other, expect=2)
    assert "data has changed: train.bin" in told


# --- tokenizers ---


def test_truncation_and_padding_of_a_tokenizer_are_switched_off(
    tmp_path, made, tokenizer  # noqa: F811
):
    from tokenizers import Tokenizer

    stored = tmp_path / "stored"
    shutil.copytree(tokenizer, stored)
    backend = Tokenizer.from_file(str(stored / "tokenizer.json"))
    backend.enable_truncation(16)
    backend.enable_padding(length=24, pad_id=5)
    backend.save(str(stored / "tokenizer.json"))
    found = ["the cat", *texts(3, longest=200)]
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in found])
    made(source, "--out", tmp_path / "o", "--tokenizer", stored, "--val_fraction", 0)
    loaded = load_tokenizer(str(tmp_path / "o/tokenizer"))
    assert [loaded.decode(ids[:-1]) for ids, _ in read(tmp_path / "o")] == found
    later = load_tokenizer(str(stored)).backend_tokenizer
    assert later.truncation is None and later.padding is None


# --- conversations ---

# As Qwen3's: what was thought is dropped from the turns before the last question.
THINKING = """
{%- if tools %}<|tools|>{% for t in tools %}{{ t['name'] }};{% endfor %}{{ '\\n' }}{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}{% set said = m['content'] %}
{%- if m['role'] == 'assistant' and loop.index0 < ns.last %}
{%- set said = said.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|' + m['role'] + '|>' }}
{%- if m['role'] == 'assistant' %}MARK{{ said + eos_token }}ENDMARK
{%- else %}{{ said }}{% endif %}{{ '\\n' }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
PLAIN = THINKING.replace("ENDMARK", "").replace("MARK", "")
MARKED = THINKING.replace("ENDMARK", "{% endgeneration %}").replace("MARK", "{% generation %}")
CHAT = [
    dict(role="user", content="the cat"),
    dict(role="assistant", content="<think>mat</think>sat on"),
    dict(role="user", content="naïve 猫"),
    dict(role="assistant", content="<think>run</think>ran 猫!"),
]
FIRST = "<|user|>the cat\n<|assistant|>"
SECOND = "sat on<|endoftext|>\n<|user|>naïve 猫\n<|assistant|>"


@pytest.fixture
def chats(tmp_path, made, tokenizer):  # noqa: F811
    """chats(template, records, *flags) → ([(text, what counts)] of each document, summary)."""
    from transformers import AutoTokenizer

    def chats(template, records, *flags):
        writer = AutoTokenizer.from_pretrained(tokenizer)
        writer.chat_template = template
        writer.save_pretrained(tmp_path / "t")
        source = write_jsonl(tmp_path / "chats.jsonl", records)
        told = made(source, "--out", tmp_path / "o", "--tokenizer", tmp_path / "t",
                    "--val_fraction", 0, *flags)
        documents = []
        for ids, mask in read(tmp_path / "o"):
            counted = [i for i, counts in zip(ids, mask, strict=True) if counts]
            documents.append((writer.decode(ids), writer.decode(counted)))
        return documents, told

    return chats


def test_a_template_that_drops_earlier_thoughts_makes_a_document_of_each_reply(chats):
    documents, told = chats(PLAIN, [{"messages": CHAT}, {"messages": CHAT[:2]}])
    first = f"{FIRST}<think>mat</think>sat on<|endoftext|>", "<think>mat</think>sat on<|endoftext|>"
    last = "<think>run</think>ran 猫!<|endoftext|>"
    assert documents == [first, (FIRST + SECOND + last, last), first]
    assert "conversations    1 as one document for each reply" in told


def test_replies_that_the_template_marks_are_what_counts(chats):
    documents, told = chats(MARKED, [{"messages": CHAT}, {"messages": [*CHAT, CHAT[0]]}])
    last = "<think>run</think>ran 猫!<|endoftext|>"
    assert documents[0] == (FIRST + SECOND + last, "sat on<|endoftext|>" + last)
    shown = f"{FIRST}{SECOND}ran 猫!<|endoftext|>\n<|user|>the cat\n<|endoftext|>"
    assert documents[1] == (shown, "sat on<|endoftext|>ran 猫!<|endoftext|>")
    assert "conversations    2 with the replies that the chat template marks" in told


def test_documents_of_one_conversation_are_in_one_split(tmp_path, chats):
    records = [{"messages": [dict(m, content=f"{i} {m['content']}") for m in CHAT]}
               for i in range(40)]
    chats(PLAIN, records, "--val_fraction", 0.5)
    numbers = [{tuple(ids[:12]) for ids, _ in read(tmp_path / "o", s)} for s in ("train", "val")]
    assert numbers[0] and numbers[1] and not numbers[0] & numbers[1]


def test_conversations_left_out_are_counted_with_the_reason(chats):
    refusing = "{% if messages|length > 3 %}{{ raise_exception('too long') }}{% endif %}" + PLAIN
    records = [{"messages": CHAT}, {"messages": CHAT[:2]}, {"messages": CHAT}, {"messages": [{}]}]
    documents, told = chats(refusing, records, "--skip_bad")
    assert len(documents) == 1
    assert ("left out         3 lines that cannot be read: the chat template refuses it: too long "
            "(2), no 'role' (1)") in told


@pytest.mark.parametrize("tools", [[{"name": "clock"}], '[{"name": "clock"}]'])
def test_tools_reach_the_template_and_ignored_keys_are_counted(chats, tools):
    records = [{"messages": CHAT[:2], "tools": tools, "id": 1},
               {"messages": CHAT[:2], "tools": None, "id": 2, "source": "web"}]
    documents, told = chats(PLAIN, records)
    assert documents[0][0] == "<|tools|>clock;\n" + documents[1][0]
    assert "ignored keys     id (2), source (1)\n" in told
    assert "no 'name'" not in told
    with pytest.raises(AssertionError, match="chats.jsonl:1: tools: expected a list, found dict"):
        chats(PLAIN, [{"messages": CHAT, "tools": {"name": "clock"}}])


def test_columns_that_are_not_read_are_counted(tmp_path, made, chats, tokenizer):  # noqa: F811
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    chats(PLAIN, [{"messages": CHAT}])
    table = {"messages": [CHAT[:2]] * 3, "tools": ['[{"name": "clock"}]'] * 3, "id": [1, 2, 3]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    told = made(tmp_path / "a.parquet", "--out", tmp_path / "p", "--tokenizer", tmp_path / "t",
                "--val_fraction", 0)
    assert "ignored keys     id (3)\n" in told
    loaded = load_tokenizer(str(tmp_path / "p/tokenizer"))
    assert loaded.decode(read(tmp_path / "p")[2][0]).startswith("<|tools|>clock;\n<|user|>")


# --- folders of input ---


def test_files_that_are_not_read_are_named_by_kind(tmp_path, made):  # noqa: F811
    folder = tmp_path / "in"
    for inside in (".venv/lib", ".git", "sub/.cache", "sub/deep"):
        (folder / inside).mkdir(parents=True)
        (folder / inside / "a.txt").write_text(f"in {inside}")
    for name in ("a.json", "b.JSON", "c.py", "Makefile", "d.tar.gz"):
        (folder / name).write_text("no")
    os.mkfifo(folder / "pipe.txt")
    (folder / "A.TXT").write_text("upper case")
    (folder / "B.JsonL").write_text('{"text": "lines"}')
    (folder / "C.MD.GZ").write_bytes(gzip.compress(b"packed"))
    for _ in range(2):
        told = made(folder, "--out", folder / "o", "--val_fraction", 0)
        found = {bytes(ids[:-1]).decode() for ids, _ in read(folder / "o")}
        assert found == {"in sub/deep", "upper case", "lines", "packed"}
        assert ("skipped          6 files: 2 .json, " in told
                and "hidden folders: .cache, .git, .venv\n" in told)
        for kind in ("1 .py", "1 without a suffix", "1 .tar.gz", "1 not regular"):
            assert kind in told
    made(folder / ".venv", "--out", tmp_path / "p", "--val_fraction", 0)  # it was asked for
    assert bytes(read(tmp_path / "p")[0][0][:-1]) == b"in .venv/lib"
    only = tmp_path / "only"
    only.mkdir()
    (only / "a.txt").write_text("a")
    assert "skipped" not in made(only, "--out", tmp_path / "q", "--val_fraction", 0)


# --- files that are not what they seem ---


@pytest.mark.parametrize("suffix", ["", ".json", ".docs", ".mask"])
def test_a_pipe_beside_the_data_is_refused(run, tmp_path, suffix):
    path = tmp_path / "train.bin"
    write_tokens(path, [b"abcdefgh" * 2000])
    pipe = tmp_path / f"train.bin{suffix}"
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    told = run("--data", path, expect=2)
    assert f"{pipe}: not a regular file" in told and "Traceback" not in told


def test_a_pipe_as_input_is_refused(tmp_path, made):  # noqa: F811
    os.mkfifo(tmp_path / "a.txt")
    told = made(tmp_path / "a.txt", "--out", tmp_path / "o", expect=2)
    assert f"{tmp_path / 'a.txt'}: not a regular file" in told


SIDECARS = {
    "a list": "[1]", "text": '"uint16"', "not JSON": "{", "not UTF-8": b"\xff\xfe{",
    "tokens as text": '{"tokens": "16001"}', "tokens unknown": '{"tokens": null}',
    "vocabulary as text": '{"vocab_size": "257"}', "vocabulary below 0": '{"vocab_size": -1}',
    "bytes as a list": '{"bytes": []}', "tokenizer as a number": '{"tokenizer": 3}',
    "end of text as text": '{"end_of_text": "a"}', "a dtype that is none": '{"dtype": ["u"]}',
    "checksum as a number": '{"checksum": 1}', "a truth": '{"tokens": true}',
}


@pytest.mark.parametrize("kind", SIDECARS)
def test_a_sidecar_of_the_wrong_kind_is_refused_in_one_line(tmp_path, kind):
    path = tmp_path / "train.bin"
    write_tokens(path, [b"abcdefgh" * 2000])
    content = SIDECARS[kind]
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "train.bin.json").write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        TokenFile(path, 32)
    told = str(refused.value)
    assert told.startswith(f"{path}.json: ") and "\n" not in told


# --- files that change while they are read ---


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("mode", ["stream", "documents"])
def test_a_file_cut_while_it_is_mapped_is_named(corpus, tmp_path, mode, workers):
    for path in corpus.glob("train.bin*"):
        shutil.copy(path, tmp_path)
    file = tmp_path / "train.bin"

    def cut(run):
        if run.step == 4:
            os.truncate(file, 4096)

    def hook():
        plain = train.check_finite
        train.check_finite = lambda run: (plain(run), cut(run))

    flags = [*TINY, "--data", file, "--data_mode", mode, "--max_steps", 400, "--num_workers",
             workers, "--out_dir", "r", "--eval_interval", 0]
    process = Process(tmp_path, flags, hook)
    code, printed = process.code(), process.text()
    assert code == 2, printed
    said = printed.splitlines()[-2:]
    assert said[0].startswith("saved the last completed step")
    assert said[1].startswith(f"train.py: error: {file}: was cut to 4,096 bytes")
    assert "Traceback" not in printed


# --- a tokenizer that puts a space before every text ---


@pytest.mark.parametrize("how", ["pre-tokenizer", "normalizer"])
def test_parts_of_a_document_get_no_space_of_their_own(made, tmp_path, how):  # noqa: F811
    words = ["<unk>", "</s>", "▁", *"abcdefghijklmnopqrstuvwxyz:\n"]
    built = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>"))
    if how == "normalizer":
        built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"),
                                                 normalizers.Replace(" ", "▁")])
    else:
        built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    PreTrainedTokenizerFast(tokenizer_object=built, eos_token="</s>", unk_token="<unk>",
                            ).save_pretrained(tmp_path / "t")
    source = write_jsonl(tmp_path / "s.jsonl", [dict(prompt="the cat:", response=" sat\ndown")])
    made(source, "--out", tmp_path / "d", "--tokenizer", tmp_path / "t", "--val_fraction", 0)
    [(ids, mask)] = read(tmp_path / "d")
    assert "".join(words[i] for i in ids) == "▁the▁cat:▁sat\ndown</s>"
    assert mask == [0] * len("▁the▁cat:") + [1] * (len("▁sat\ndown") + 1)
