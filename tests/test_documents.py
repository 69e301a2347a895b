"""Fine-tuning: documents padded, grouped by length or packed give one loss, and waste little."""

import itertools
import json
import math
import re
import shutil
from collections import namedtuple
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import column, rows, samples_seen, saved, tiny_config

import data
from data import Mixture, load_mixture
from model import Transformer
from steady.models.device import VARLEN, attention_backend, takes_varlen
from steady.options import ConfigError
from steady.tokens.files import IGNORE, TokenWriter
from steady.tokens.packing import pack
from steady.tokens.tokenizers import byte_tokenizer
from tools import prepare

ALONE = dict(micro_batch=10, rank=0, world_size=1, device=torch.device("cpu"), workers=0)
SEQ_LEN = 32


def write_documents(folder, documents, *splits, vocab_size=257):
    """documents: [(ids, mask)], the same for all splits; "train" by default."""
    folder.mkdir(exist_ok=True)
    for file in (folder / f"{split}.bin" for split in splits or ("train",)):
        writer = TokenWriter(file, vocab_size, tokenizer="bytes", end_of_text=256)
        for ids, mask in documents:
            mask = None if all(mask) else np.array(mask, np.uint8)
            writer.add(np.array(ids), np.array([len(ids)]), mask, len(ids))
        writer.close()
    return str(folder)


def conversations(n, seed=0, longest=60):
    """Prompts and replies of many lengths, some longer than SEQ_LEN, some replies cut off by it."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(n):
        prompt, reply = rng.integers(0, longest, 2) // rng.integers(1, 5, 2)
        ids = rng.integers(0, 256, prompt + reply).tolist() + [256]
        out.append((ids, [0] * int(prompt) + [1] * int(reply + 1)))
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    write_documents(folder, conversations(60, 1), "val")
    return write_documents(folder, conversations(300))


def mixture(*folders, seed=1, **how):
    return load_mixture([*folders], "train", SEQ_LEN, seed, **how)


def model(**changes):
    torch.manual_seed(0)
    model = Transformer(tiny_config(seq_len=SEQ_LEN, **changes))
    for p in model.parameters():  # blocks begin as the identity: not for this test
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.1)
    return model.eval()


def epoch(found, **ranks):
    """All batches of one epoch; in the last one, samples of the next are masked."""
    return list(data.eval_batches(found, found.n_samples, SimpleNamespace(**ALONE | ranks)))


def alone(net, documents):
    """Loss and count of each document by itself, by what the format says and no more."""
    for ids, mask in documents:
        ids, mask = torch.tensor([ids[: SEQ_LEN + 1]]), torch.tensor(mask[1 : SEQ_LEN + 1])
        if ids.shape[1] > 1:
            logits = net.head(net.hidden(ids[:, :-1]))[0]
            losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
            yield (losses * mask).sum().item(), mask.sum().item()


def test_padded_grouped_and_packed_have_the_loss_of_each_document_alone(folder):
    fixed, dynamic, grouped = (mixture(folder) for _ in range(3))
    fixed.ROUND = SEQ_LEN
    grouped.group_by_length(1, grouped.n_samples)
    packed, gradients = mixture(folder, mode="packed"), {}
    with torch.no_grad():
        expected, counts = zip(*alone(model(), conversations(300)), strict=True)
    real = sum(min(len(ids) - 1, SEQ_LEN) for ids, _ in conversations(300))
    for name, found in dict(fixed=fixed, dynamic=dynamic, grouped=grouped, packed=packed).items():
        net, batches = model(), epoch(found)
        losses = [net(*batch[:3]).sum() for batch in batches]
        assert sum(losses).item() == pytest.approx(sum(expected), rel=1e-5), name
        assert sum(int((b.targets != IGNORE).sum()) for b in batches) == sum(counts), name
        assert found.count_tokens(0, 5) + found.count_tokens(5, found.n_samples - 5) == real, name
        sum(losses).backward()
        gradients[name] = torch.cat([p.grad.flatten() for p in net.parameters()])
        torch.testing.assert_close(gradients[name], gradients["fixed"], rtol=1e-3, atol=1e-3)
    assert packed.n_samples == 225  # rows, as by best fit; the tokens alone fill 217


def best_fit(lengths, seq_len):
    """Room left in each row by best fit decreasing, one document at a time."""
    room = []
    for n in sorted(lengths, reverse=True):
        fits = [r for r in room if r >= n]
        if fits:
            room.remove(min(fits))
        room.append((min(fits) if fits else seq_len) - n)
    return sorted(room)


@pytest.mark.parametrize("seed", range(5))
def test_packing_takes_each_document_once_and_fills_rows(seed):
    rng = np.random.default_rng(seed)
    seq_len = int(rng.integers(8, 200))
    lengths = np.clip(rng.lognormal(3, 1, int(rng.integers(1, 3000))), 1, seq_len).astype(int)
    different = rng.choice(np.arange(1, 101), 60, replace=False)  # then it is best fit exactly
    for found, size in ((lengths, seq_len), (different, 100)):
        order, starts = pack(found, size)
        assert np.array_equal(np.sort(order), np.arange(len(found)))
        assert starts[0] == 0 and starts[-1] == len(found) and (np.diff(starts) > 0).all()
        room = size - np.add.reduceat(found[order], starts[:-1])
        assert room.min() >= 0 and len(room) <= 1.02 * len(best_fit(found, size)) + 1
    assert sorted(room) == best_fit(different, 100)


def rows_that_count(batch) -> list:
    """(token, target) at each place that is no padding, of each row with a target."""
    found = [[pair for pair in zip(*row, strict=True) if pair != (256, IGNORE)]
             for row in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True)]
    return sorted(row for row in found if any(target != IGNORE for _, target in row))


@pytest.mark.parametrize("how", ["dynamic", "grouped", "packed", "stream"])
@pytest.mark.parametrize("world_size, micro_batch", [
    (1, 4), (1, 16), (2, 8), (3, 5), (4, 2), (5, 2), (7, 1), (8, 2), (15, 1), (16, 1)])
def test_a_step_has_the_same_tokens_on_any_ranks(folder, how, world_size, micro_batch):
    """Surplus rows are padding; each target counts once."""
    found = mixture(folder, mode=how if how in ("packed", "stream") else "auto")
    found.group_by_length(2 * (how != "dynamic"), 16)
    cfg = tiny_config(batch_size=16, seq_len=SEQ_LEN)
    ranks = [list(data.loader(found, cfg, 48, 3, SimpleNamespace(**ALONE | dict(
        rank=rank, world_size=world_size, micro_batch=micro_batch)))) for rank in range(world_size)]
    per_step = -(-16 // (micro_batch * world_size))
    assert [[len(batch.tokens) for batch in batches] for batches in ranks] == [
        [micro_batch] * 3 * per_step] * world_size
    for step in range(3):
        start = 48 + 16 * step
        batches = [b for batches in ranks for b in batches[step * per_step :][:per_step]]
        whole = found.batch(start, start + 16).to(ALONE["device"])
        assert rows_that_count(whole) == sorted(sum(map(rows_that_count, batches), []))
        real = 16 * SEQ_LEN
        if how != "stream":
            d = found.datasets[0]
            held = [d.documents_of(s) for s in found.order(start, start + 16)[1]]
            real = d.document_lengths[np.concatenate(held)].sum()
        assert found.count_tokens(start, 16) == real <= sum(b.tokens.numel() for b in batches)


def test_what_is_said_of_documents_is_what_they_are(folder, tmp_path):
    documents = [(ids, mask[1 : SEQ_LEN + 1]) for ids, mask in conversations(300) if len(ids) > 1]
    lengths = np.array([min(len(ids) - 1, SEQ_LEN) for ids, _ in documents])
    cut = sum(len(ids) > SEQ_LEN + 1 for ids, _ in documents)
    empty = sum(not any(mask) for _, mask in documents)
    assert cut > 10 and empty > 10 and any(len(ids) == SEQ_LEN + 1 for ids, _ in documents)
    told = mixture(folder).datasets[0].details
    assert f", {len(documents)} documents" in told and f"({empty} without a response)" in told
    lost = 1 - lengths.sum() / sum(len(ids) - 1 for ids, _ in documents)
    assert f"({cut} longer than --seq_len are cut: {lost:.1%} of the tokens)" in told
    short = write_documents(tmp_path, [([1, 2, 3], [0, 1, 1])])
    for mode, n in (("documents", len(documents)), ("packed", 225)):  # n samples
        length = mixture(f"{folder}:1", f"{short}:3", mode=mode).typical_length()  # of a token
        assert length == pytest.approx(((lengths**2).sum() + 12 * n) / (lengths.sum() + 6 * n))


@pytest.mark.parametrize("mode", ["documents", "packed"])
def test_every_token_of_a_long_text_is_a_target_once(tmp_path, mode):
    sizes = [1, 2, SEQ_LEN, SEQ_LEN + 1, SEQ_LEN + 2, 3 * SEQ_LEN + 1, 1000]
    texts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    folder = write_documents(tmp_path / "d", [(ids, [1]) for ids in texts], vocab_size=5000)
    found = load_mixture([folder], "train", SEQ_LEN, 0, mode=mode)
    batch = found.batch(0, found.n_samples)
    counted = batch.targets != IGNORE
    assert (batch.tokens.int() + 1 == batch.targets)[counted].all()
    assert batch.targets[counted].sort()[0].tolist() == [i for ids in texts for i in ids[1:]]
    assert "6 documents (40 pieces)" in found.datasets[0].details
    assert found.prompt().tolist() == batch.tokens[:1, :1].tolist()  # 256 is only a target
    assert found.answer([*b"ab"], 1) == "ab"


FLAGS = ["--data_mode", "documents", "--batch_size", 16, "--save_interval", 6, "--log_interval", 1,
         "--optimizer", "adamw", "--eval_interval", 6]


def test_other_ranks_and_a_resume_see_the_same_samples(run, tmp_path, folder, monkeypatch):
    plain, log = Mixture.batch, tmp_path / "seen.txt"

    def batch(self, start, stop):
        found = plain(self, start, stop)
        for g, tokens, targets in zip(range(start, stop), found.tokens.tolist(),
                                      found.targets.tolist(), strict=True):
            kept = [pair for pair in zip(tokens, targets, strict=True) if pair != (256, IGNORE)]
            with open(log, "a") as file:
                print(self.order.seed, g, hash(tuple(kept)), file=file)
        return found

    def seen() -> set[str]:
        lines = set(log.read_text().splitlines())
        log.unlink()
        return lines

    monkeypatch.setattr(Mixture, "batch", batch)
    flags = [*FLAGS, "--data", folder]
    run(*flags, "--out_dir", "one", "--micro_batch_size", 16)
    one = seen()
    run(*flags, "--out_dir", "two", "--micro_batch_size", 4, ranks=2)
    assert seen() == one
    for metric in ("train/loss", "train/tokens", "val/loss"):
        assert column(tmp_path / "one", metric) == pytest.approx(
            column(tmp_path / "two", metric), rel=1e-4)
    row = next(row for row in rows(tmp_path / "one") if row.get("perf/padding_fraction"))
    assert row["perf/real_tokens_per_second"] < row["perf/tokens_per_second"]
    # from step 6 of two ranks on with one: the same steps again
    run("--out_dir", "two", "--resume", tmp_path / "two/checkpoints/step_00000006.pt",
        "--micro_batch_size", 8, bare=True)
    assert seen() == {line for line in one if line.startswith("0 ")
                      or int(line.split()[1]) >= 6 * 16}
    for metric in ("train/loss", "train/tokens"):
        assert column(tmp_path / "two", metric) == pytest.approx(
            column(tmp_path / "one", metric), rel=1e-4)
    run("--out_dir", "one", "--auto_resume", "--batch_size", 10, "--micro_batch_size", 5,
        "--allow_change", "batch_size", "--max_steps", 13, bare=True)
    assert saved(tmp_path / "one")["position"] == 200 + 10  # not 192, amid documents of a length


def test_documents_with_nothing_to_learn_are_no_nan(run, tmp_path, monkeypatch):
    monkeypatch.setattr(Mixture, "GROUP_STEPS", 0)
    prompts = [([1, 2, 3, 256], [0, 0, 0, 0])] * 40
    last = ([1, 2, 256], [0, 1, 1])
    write_documents(tmp_path / "p", [*prompts[:5], last], "val")
    folder = write_documents(tmp_path / "p", [*prompts[:10], last])
    run("--data", folder, "--out_dir", "r", "--log_interval", 1, "--max_steps", 8,
        "--monitoring", "full")
    losses = column(tmp_path / "r", "train/loss")
    assert 0 in losses.values() and max(losses.values()) > 0
    assert column(tmp_path / "r", "val/loss")[8] > 0
    none = write_documents(tmp_path / "none", [([1] * 100, [0] * 50 + [1] * 50)] * 9)
    told = run("--data", none, "--out_dir", "s", expect=2)
    assert "no document has a response within its first --seq_len 32 tokens" in told
    assert sum(column(tmp_path / "r", "health/nonfinite_steps").values()) == 0


def test_an_evaluation_without_a_target_is_refused_at_the_start(run, tmp_path):
    prompt, reply = ([1, 2, 3, 256], [0, 0, 0, 0]), ([1, 2, 3, 256], [0, 1, 1, 1])
    folder = write_documents(tmp_path / "p", [reply] * 9)
    write_documents(tmp_path / "p", [prompt] * 30 + [reply], "val")
    flags = ["--data", folder, "--batch_size", 1, "--max_steps", 2, "--out_dir"]
    told = run(*flags, "r", "--eval_steps", 1, expect=2)
    assert "larger --eval_steps" in told and not (tmp_path / "r").exists()
    run(*flags, "r", "--eval_steps", 1, "--eval_interval", 0)
    assert told == run(*flags, "r", "--resume", "r/checkpoints/step_00000002.pt",
                       "--eval_steps", 1, "--eval_only", expect=2)
    run(*flags, "s", "--eval_steps", 0)
    assert column(tmp_path / "s", "val/loss")[2] > 0


def test_a_field_that_a_fork_adds_to_a_batch_reaches_the_loop(monkeypatch):
    to, names = data.Batch.to, (*data.Batch._fields, "weights")
    monkeypatch.setattr(data, "Batch", wider := namedtuple("Batch", names, defaults=[0]))
    assert to(wider(*torch.ones(5, 2, 3)), torch.device("cpu"), 1).weights.tolist() == [[1] * 3] * 2


def test_documents_resume_bit_for_bit(run, folder):
    flags = [*FLAGS, "--data", folder, "--data_mode", "packed", "--dropout", 0.1, "--out_dir", "r"]
    assert " values same" in run(*flags, "--verify_resume", 6)
    run(*flags)
    flags = ["--out_dir", "r", "--auto_resume", "--max_steps", 20, "--data_mode", "auto"]
    assert "data_mode packed -> documents" in run(*flags, bare=True, expect=2)


def test_what_does_not_belong_together_is_refused(tmp_path, folder):
    plain = tmp_path / "train.bin"
    (np.arange(1000) % 100).astype(np.uint16).tofile(plain)

    def refused(words, path=plain, **options):
        cfg = tiny_config(**dict(data=[str(path)], data_mode="documents") | options)
        with pytest.raises(ConfigError, match=words):
            data.load_data(cfg)

    refused("has no document offsets .train.bin.docs.")
    for places in ([0, 10, 900], [0, 900, 10, 1000], [5, 10, 1000]):
        np.array(places, np.uint64).tofile(f"{plain}.docs")
        refused("not belong to train.bin: expected places from 0 to 1,000, each after")
    np.array([0, 10, 1000], np.uint64).tofile(f"{plain}.docs")
    for n in (900, 0):
        np.ones(n, np.uint8).tofile(f"{plain}.mask")
        refused(f"train.bin.mask: {n} bytes; expected one for each of the 1,000 tokens")
    (tmp_path / "train.bin.mask").unlink()
    refused("different tokenizers: .* bytes, .*/train.bin unknown", data=[str(folder), str(plain)])
    refused("--val_data: its tokenizer is unknown, but --data has bytes", folder,
            val_data=[str(plain)])
    refused("--val_data: validation data with prompts, training data without", data_mode="auto",
            val_data=[f"{folder}/val.bin"])
    (tmp_path / "train.bin.json").write_text(json.dumps(dict(dtype="float16")))
    refused("with dtype uint16 or uint32: 'float16'")
    refused("no document of two tokens or more",
            write_documents(tmp_path / "single", [([5], [1])] * 9))


def test_an_id_beyond_the_vocabulary_is_named_with_its_place(tmp_path):
    sound = [([1, 2, 3, 256], [1] * 4)]
    for bad, mode in itertools.product(([1, 2, 257, 256], [1, 2, 3, 257]),
                                       ("documents", "packed", "stream")):
        documents = [*sound * 3, (bad, [1] * 4), *sound * 9]
        folder = write_documents(tmp_path / "d", documents, vocab_size=400)
        sidecar = tmp_path / "d/train.bin.json"
        sidecar.write_text(sidecar.read_text().replace("400", "257"))
        found = load_mixture([folder], "train", SEQ_LEN, 0, mode=mode)
        place = 12 + bad.index(257)
        with pytest.raises(ConfigError, match=rf"train.bin: token id 257 at token {place}; .* 257"):
            found.batch(0, found.n_samples)


@pytest.mark.parametrize("mode", ["documents", "stream"])
def test_samples_are_shown(run, tmp_path, tool, monkeypatch, mode):
    """Those that the run had, at any step of any stage; documents without their padding."""
    end = [256] * (mode == "documents")  # which is not shown
    for name in ("web", "code", "math"):
        texts = [[*f"<{name} {'x' * (i % 13)} {i}>".encode(), *end] for i in range(40)]
        write_documents(tmp_path / name, [(ids, [1] * len(ids)) for ids in texts])
    with monkeypatch.context() as patch:
        seen = samples_seen(patch)
        run("--data", "web:3", "code:1", "--stage", "0.5", "math:1", "web:1", "0.75", "code",
            "--data_mode", mode, "--out_dir", "r", "--sample_interval", 0, "--save_interval", 10)
        run("--resume", "r/checkpoints/step_00000010.pt", "--out_dir", "r", "--seq_len", 40,
            "--allow_change", "seq_len", bare=True)
    assert sorted(seen) == list(range(96))
    for step in (1, 6, 7, 9, 10, 12):
        shown = tool(prepare.main, "show", "r", step).out.split("--- sample ")[1:]
        assert len(shown) == 8
        for g, text in enumerate(shown, 8 * (step - 1)):
            name, ids = seen[g]
            title, text = text.split("\n", 1)
            assert title.startswith(f"{g}: {name}, {name}/train.bin from token ")
            assert mode == "documents" or 256 not in ids
            assert text[:-1] == bytes(i for i in ids if i != 256).decode()


def test_samples_of_other_data_are_not_shown(run, corpus, tmp_path, tool):
    """Nor of steps that another run made, whose options are unknown, or that none will make."""
    other = shutil.copytree(corpus, tmp_path / "other")
    (other / "train.bin").write_bytes(bytes((other / "train.bin").stat().st_size))
    run("--out_dir", "r", "--max_steps", 4, "--sample_interval", 0)
    for out_dir, words, first in (("r", "trained with another", 1), ("s", "expected 5 to 5", 5)):
        run("--resume", "r/checkpoints/step_00000004.pt", "--out_dir", out_dir, "--max_steps", 5,
            "--data", other, "--allow_change", "data")
        assert words in tool(prepare.main, "show", out_dir, 4, expect=2).err
        assert f": expected {first} to 5" in tool(prepare.main, "show", out_dir, 6, expect=2).err
        assert tool(prepare.main, "show", out_dir, 5).out.count("--- sample") == 8


def test_replies_of_packed_documents_are_marked(run, tmp_path, tool):
    def document(i):
        prompt, reply = f"<{'?' * (i % 5)}{i}>".encode(), f"[{'!' * (i % 7)}{i}]".encode()
        return [*prompt, *reply, ord("|")], [0] * len(prompt) + [1] * (len(reply) + 1)

    folder = write_documents(tmp_path / "d", [document(i) for i in range(40)])
    run("--data", folder, "--data_mode", "packed", "--out_dir", "r", "--max_steps", 2)
    for text in tool(prepare.main, "show", "r", 2).out.split("--- sample ")[1:]:
        found = re.findall(r"<\?*(\d+)>⟦\[!*(\d+)\]\|⟧", text)  # with its last token
        assert len(found) == text.count("<") > 0 and all(a == b for a, b in found)
        assert text.count("<") == text.count("⟦") == len(found)


# --- mixtures --------------------------------------------------------------------------------


def test_the_loss_of_each_dataset_is_logged(run, tmp_path):
    """Of two sets with one token each."""
    for name, token, n in (("a", 7, 3000), ("b", 9, 30_000)):
        (tmp_path / name).mkdir()
        for split in ("train", "val"):
            np.full(n, token, np.uint16).tofile(tmp_path / name / f"{split}.bin")
    told = run("--data", "a:0.75", "b:0.25", "--vocab_size", 257, "--log_interval", 4,
               "--max_steps", 16, "--eval_interval", 8, "--out_dir", "r", "--micro_batch_size", 2,
               ranks=2)
    assert "a 75.0% (1.03 epochs), b 25.0% (0.03 epochs)" in told
    both, of_a, of_b = (column(tmp_path / "r", f"train/loss{n}") for n in ("", "/a", "/b"))
    for step, loss in both.items():  # both have sequences of one length: their shares are exact
        assert loss == pytest.approx(0.75 * of_a[step] + 0.25 * of_b[step], rel=1e-4)
    assert of_a[16] < of_b[16]  # it is seen more often
    assert column(tmp_path / "r", "train/epochs/a")[16] == pytest.approx(16 * 8 * 0.75 / 93)
    val = [column(tmp_path / "r", f"val/loss{n}")[16] for n in ("", "/a", "/b")]
    assert val[0] == pytest.approx(0.75 * val[1] + 0.25 * val[2], rel=0.1) and val[1] < val[2]


def test_an_evaluation_draws_by_weight_and_all_of_it_each_once(tmp_path):
    """Whatever the lengths of documents, and in patterns that are rounded, too."""
    for name, n, length in (("long", 30, 30), ("short", 11_753, 6)):
        write_documents(tmp_path / name, [([7] * length, [1] * length)] * n, "train", "val")
    cfg = tiny_config(data=[f"{tmp_path}/long:1", f"{tmp_path}/short:1"], data_mode="documents")
    part, whole = (data.load_data(replace(cfg, batch_size=10, eval_steps=n))[1] for n in (10, 0))
    assert np.bincount(part.order(0, 100)[0]).tolist() == [50, 50]
    assert np.unique(whole.order(0, 11_783), axis=1).shape == (2, 11_783)
    assert part.order(100, 300).shape == (2, 200)  # for whoever looks further


def test_the_tokenizer_is_found_beside_any_file_and_not_missed(run, tmp_path):
    for name in ("a", "b"):
        write_documents(tmp_path / name, [([*range(1, 9)], [1] * 8)] * 20, "train", "val")
        for sidecar in (tmp_path / name).glob("*.json"):
            sidecar.write_text(sidecar.read_text().replace('"bytes"', '"bpe@1"', 1))
    paths, own = [str(tmp_path / name) for name in ("a", "b")], tmp_path / "r/tokenizer"
    flags = ["--data", *paths, "--out_dir", "r", "--eval_interval", 0, "--max_steps"]
    written = run(*flags, 2).split("sample  of what it writes:")[1].split()
    assert written and all(word.isdecimal() for word in written)  # ids, no words
    byte_tokenizer().save_pretrained(tmp_path / "a/tokenizer")
    assert load_mixture(paths, "train", 8, 0).tokenizer_folder == str(tmp_path / "a/tokenizer")
    # a run has its own copy, which outlives that of the data but not --overwrite
    run(*flags, 2, "--overwrite")
    (tmp_path / "a/tokenizer").rename(tmp_path / "elsewhere")
    run(*flags, 3, "--auto_resume")
    assert own.is_dir()
    run(*flags, 2, "--overwrite")
    assert not own.exists()
    (tmp_path / "elsewhere").rename(tmp_path / "a/tokenizer")
    run(*flags, 2, "--out_dir", "a", "--overwrite")  # beside its data
    assert (tmp_path / "a/tokenizer").is_dir() and (tmp_path / "a/train.bin").exists()


@pytest.mark.parametrize("prompts", [True, False])
def test_what_a_run_writes_answers_the_first_prompt(run, tmp_path, prompts):
    prompt, reply = list(b"2 + 2 ="), list(b" 4.") + [256]
    documents = [(prompt + reply, [not prompts] * len(prompt) + [1] * len(reply))] * 40
    write_documents(tmp_path, documents, "train", "val")
    printed = run("--data", tmp_path, "--vocab_size", 257, "--max_steps", 4, "--data_mode",
                  "documents", bare=False, expect=0)
    written = printed.split("sample  of what it writes:")[1].strip()
    assert written.startswith("2 + 2 =\n→ ") == prompts
    assert ("bits_per_byte" in printed) != prompts  # a loss of replies is not one of all bytes


# --- without a mask --------------------------------------------------------------------------


def inside_documents(query, key, value, boundaries, longest):
    """Of query [total, H, D], key, value [total, H_kv, D]: (tokens, q, k, v, weights) for each
    document, [H, T, D] and [H, T, T]; all heads of a group have copies of their keys and values."""
    at = boundaries.tolist()
    assert boundaries.dtype == torch.int32 and at == sorted(at)
    assert at[0] == 0 and at[-1] == len(query) and len(at) % 64 == 0
    for begin, end in itertools.pairwise(at):
        assert end - begin <= longest
        if end > begin:
            q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
            k, v = (x.repeat_interleave(len(q) // len(k), dim=0) for x in (k, v))
            scores = (q @ k.mT) / q.shape[-1] ** 0.5
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            yield slice(begin, end), q, k, v, scores.masked_fill(later, -math.inf).softmax(-1)


@pytest.fixture(scope="module")
def varlen_on_cpu():
    """torch's varlen_attn with all that is around its kernels, for which formulas stand in."""
    from torch.nn.attention import varlen

    @varlen._varlen_attn.register_kernel("cpu")
    def forward(query, key, value, cu_q, cu_k, max_q, max_k, is_causal=False, scale=None,
                window_size=None, *newer):
        assert is_causal and window_size == [-1, 0] and scale is None and max_q == max_k
        assert torch.equal(cu_q, cu_k)
        out = torch.full_like(query, math.nan)
        for tokens, _, _, v, weights in inside_documents(query, key, value, cu_q, max_q):
            out[tokens] = (weights @ v).transpose(0, 1)
        return out, query.new_zeros(query.shape[1::-1]), torch.zeros(2, dtype=torch.uint64)

    @varlen._varlen_attn_backward.register_kernel("cpu")
    def backward(grad, query, key, value, out, lse, cu_q, cu_k, max_q, *rest):
        grads = [torch.full_like(x, math.nan) for x in (query, key, value)]
        for tokens, q, k, v, weights in inside_documents(query, key, value, cu_q, max_q):
            of_out = grad[tokens].transpose(0, 1)
            of_weights = of_out @ v.mT
            of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
            of_scores = of_scores / q.shape[-1] ** 0.5
            found = of_scores @ k, of_scores.mT @ q, weights.mT @ of_out
            for x, y in zip(grads, found, strict=True):  # the sum over each group
                x[tokens] = y.unflatten(0, (x.shape[1], -1)).sum(1).transpose(0, 1)
        return tuple(grads)


@pytest.mark.parametrize("changes", [
    dict(n_head=4, n_kv_head=2), dict(n_kv_head=2, activation_checkpointing="full", qk_norm=True),
], ids=["grouped", "recomputed"])
def test_without_a_mask_losses_and_gradients_are_the_same(folder, varlen_on_cpu, changes):
    padded = surplus = 0
    nets = [model(**changes).train() for _ in range(2)]
    numbers, boundaries = (mixture(folder, mode="packed") for _ in range(2))
    boundaries.boundaries = True
    for masked, begins in zip(
            epoch(numbers, micro_batch=30), epoch(boundaries, micro_batch=30), strict=True):
        assert masked.documents.ndim == 2 and begins.documents.ndim == 1
        losses = [net(*batch[:3]) for net, batch in zip(nets, (masked, begins), strict=True)]
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
        for loss in losses:
            loss.sum().backward()
        padded += int((masked.targets[:, -1] == IGNORE).sum())
        surplus += int((masked.targets == IGNORE).all(1).sum())
    for (name, p), q in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-3, msg=name)
    assert padded and surplus


@pytest.mark.slow
def test_without_a_mask_one_graph_serves_any_number_of_documents(tmp_path, varlen_on_cpu):
    documents = [([7] * n, [1] * n) for n, count in ((33, 30), (4, 400)) for _ in range(count)]
    net, plain = (model(activation_checkpointing="full").train() for _ in range(2))
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    from torch._dynamo.backends.debugging import aot_eager

    torch._dynamo.reset()
    net.compile(fullgraph=True, backend=backend)
    found, lengths = mixture(write_documents(tmp_path, documents), mode="packed"), set()
    found.boundaries = True
    for batch in epoch(found):
        lengths.add(len(batch.documents))
        losses = [each(*batch[:3]) for each in (net, plain)]
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
        for loss in losses:
            loss.sum().backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-3)
    assert len(lengths) > 1 and len(graphs) == 1, (lengths, len(graphs))


def test_which_packed_runs_go_without_a_mask():
    suits = tiny_config(data_mode="packed")
    assert suits.head_dim == 16 and takes_varlen(suits, torch.bfloat16)
    assert takes_varlen(replace(suits, attention="flash"), torch.float16)
    assert not takes_varlen(suits, torch.float32)
    for change in (dict(data_mode="documents"), dict(dropout=0.1), dict(attention="efficient"),
                   dict(head_dim=12), dict(head_dim=264)):
        assert not takes_varlen(replace(suits, **change), torch.bfloat16)
    assert attention_backend(suits, ALONE["device"], torch.bfloat16) != VARLEN
