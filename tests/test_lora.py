"""Adapters beside frozen weights, added rows of a vocabulary, and the defaults of fine-tuning."""

# ruff: noqa: F401, F811 -- fixtures of another file

import json

import pytest
import torch
from conftest import change, column, largest_file
from safetensors.torch import load_file, save_file
from test_huggingface import FAMILIES, relative, save_random, small, tokens, tune
from transformers import AutoModelForCausalLM

import config
import train
from config import Config
from data import load_data
from model import flops_per_token
from steady.checkpoints import checkpoint
from steady.checkpoints.checkpoint import Checkpoint
from steady.models import huggingface, lora
from steady.options import ConfigError
from steady.ranks.parallel import Shards
from steady.tokens.tokenizers import byte_tokenizer
from tools import generate as generation

LORA = ["--init_from", "m", "--lora_rank", 4, "--learning_rate", 1e-2]
PHI3 = small("phi3", pad_token_id=256, tie_word_embeddings=False)


def adapted(folder, corpus, dtype=torch.float32, **options):
    """The model that a run with these options begins with, and its configuration."""
    cfg = Config(init_from=str(folder), data=[str(corpus)], lora_rank=4, **options)
    cfg = config.resolve(huggingface.config_from_hf(cfg))
    train_data, _ = load_data(cfg)
    return train.make_model(cfg, train_data, None, torch.device("cpu"), dtype, Shards()), cfg


def logits(folder, tokens):
    return generation.open_model(folder)[0].eval()(tokens)


@pytest.mark.parametrize("kind", ["qwen2", pytest.param("phi3", marks=pytest.mark.slow)])
def test_an_adapter_trains_resumes_and_becomes_a_model(tmp_path, tune, tokens, tool, kind):
    base = save_random(tmp_path / "m", PHI3 if kind == "phi3" else FAMILIES[kind]())
    told = tune(*LORA, "--out_dir", "r", "--save_interval", 10)
    assert "M trained), 2 layers" in told
    assert ("through transformers' own module" in told) == (kind == "phi3")
    losses = column(tmp_path / "r", "train/loss")
    assert losses[20] < losses[1] - 0.2
    last = Checkpoint(tmp_path / "r/checkpoints/step_00000020.pt")
    wanted = dict(last.state(), config=None)
    assert all(".lora." in name for name in wanted["model"])
    for path in (last.path, last.path.with_name("best.pt")):
        path.unlink()
    tune("--out_dir", "r", "--auto_resume")
    assert checkpoint.compare(dict(last.state(), config=None), wanted)[1] == []
    for out, flags in (("merged", []), ("adapter", ["--adapter"])):
        assert generation.main(["export", "r", out, *flags]) == 0
        assert len({p.stat().st_mode for p in (tmp_path / out).iterdir()}) == 1
    ours, theirs = logits(tmp_path / "r", tokens), base(tokens).logits
    assert relative(ours, theirs) > 0.05
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert relative(ours, merged(tokens).logits) < 1e-4
    assert torch.equal(logits(tmp_path / "adapter", tokens), ours)
    loss = tune("--eval_only", "--init_from", "adapter").partition("validation loss ")[2][:6]
    assert loss == f"{column(tmp_path / 'r', 'val/loss')[20]:.4f}"

    save_random(tmp_path / "m", base.config, max_shard_size="60KB")
    (tmp_path / "m/model.safetensors").unlink()
    told = tune("--out_dir", "r", "--auto_resume", "--max_steps", 30, expect=2)
    assert "adapts other weights than --init_from m now has" in told
    told = tool(generation.main, "generate", "r", "--prompt", "1", expect=2).err
    assert "adapts other weights than m now has" in told


def test_only_adapters_are_trained_and_the_rest_is_held_in_half(tmp_path, corpus, tokens):
    base = save_random(tmp_path / "m", FAMILIES["qwen3"]())
    model, cfg = adapted(tmp_path / "m", corpus, torch.bfloat16)
    for name, p in model.named_parameters():
        trained = ".lora." in name
        assert p.requires_grad == trained
        assert p.dtype == (torch.float32 if trained or p.ndim == 1 else torch.bfloat16), name
    [optimizer] = train.make_optimizers(model, cfg, torch.device("cpu"), Shards().hold(model))
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == 2 * 4 * cfg.n_layer and all(p.requires_grad for p in held)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert model.hidden(tokens).dtype == torch.float32  # the residual stream
        assert relative(model(tokens), base(tokens).logits) < 0.05  # B is zero
    full = generation.Transformer(cfg)
    matrices = sum(p.numel() for p in full.blocks.parameters() if p.ndim == 2) + 64 * 320
    added = 6 * sum(p.numel() for p in held) - 2 * matrices
    assert flops_per_token(model, cfg) - flops_per_token(full, cfg) == added


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["up_proj", "layers.1.mlp.down_proj"]])
def test_parts_of_a_matrix_have_adapters_of_their_own(tmp_path, corpus, tokens, targets):
    save_random(tmp_path / "m", FAMILIES["llama"]())
    model, cfg = adapted(tmp_path / "m", corpus, lora_targets=targets, lora_alpha=3.0)
    for name, p in model.named_parameters():
        if ".lora." in name:
            torch.nn.init.normal_(p, std=0.3)
    pairs = lora.pairs_of(model.state_dict(), huggingface.linear_parts(model), cfg)
    ends = {name.removeprefix("model.") for name in pairs}
    assert len(ends) == (4 if targets[0] == "q_proj" else 3)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    with torch.no_grad():
        for name, (a, b) in pairs.items():
            theirs.get_submodule(name).weight += 3 / 4 * b @ a
        assert relative(model(tokens), theirs(tokens).logits) < 1e-4


def test_what_has_no_adapter_is_told(tmp_path, tune, tool, monkeypatch):
    save_random(tmp_path / "m", FAMILIES["llama"]())
    for flags in (["--lora_targets", "q_proj"], ["--lora_alpha", 8]):
        assert f"{flags[0]}: expected --lora_rank" in tune("--init_from", "m", *flags, expect=2)
    assert "not with --lora_rank" in tune(*LORA, "--resize_embeddings", expect=2)
    assert "down_proj gate_proj" in tune(*LORA, "--lora_targets", "q_prj", expect=2)
    save_random(tmp_path / "gpt2", small("gpt2"))
    assert "has none" in tune("--init_from", "gpt2", "--lora_rank", 4, expect=2)
    save_random(tmp_path / "experts", small("qwen3_moe", moe_intermediate_size=32, num_experts=4,
                                            num_experts_per_tok=2, head_dim=16))
    told = tune("--init_from", "experts", "--lora_rank", 4, "--max_steps", 2)
    assert "M trained; no adapters in 0.05 M outside linear layers" in told  # 2 x 4 x 3 x 32 x 64
    tune("--init_from", "m", "--max_steps", 2, "--out_dir", "full")
    told = tool(generation.main, "export", "full", "out", "--adapter", expect=2).err
    assert "trained without --lora_rank" in told and not (tmp_path / "out").exists()
    told = tune("--resume", "full/checkpoints/step_00000002.pt", *LORA[2:], expect=2)
    assert "lora_rank 0 -> 4" in told
    change(train, "make_model", lambda net, *_: net.requires_grad_(True), monkeypatch.setattr)
    assert "--lora_rank: checkpoints would lack the other weights" in tune(*LORA, expect=2)


def test_unusual_adapters_are_refused(tmp_path):
    found = dict(peft_type="LORA", r=4, lora_alpha=4, base_model_name_or_path="m")
    for key, x in (("r", 0), *dict(r="x", use_dora=True, bias="all", peft_type="IA3", revision="v",
                                   alora_invocation_tokens=[1], init_lora_weights="pissa").items()):
        (tmp_path / lora.CONFIG).write_text(json.dumps(found | {key: x}))
        with pytest.raises(ConfigError, match="expected a LoRA adapter"):
            lora.read_config(tmp_path)
    (tmp_path / lora.CONFIG).write_text(json.dumps(found | dict(
        base_model_name_or_path=str(tmp_path), init_lora_weights=True, revision="main")))
    with pytest.raises(ConfigError, match="an adapter whose base is itself"):
        huggingface.folders(str(tmp_path))
    with pytest.raises(ConfigError, match="with q.lora.m: only A and B"):  # of a fork: DoRA
        lora.pairs_of({"q.lora.A": 0, "q.lora.m": 0}, {}, Config())
    weights, shards = {"q.weight": torch.zeros(64, 64)}, Shards()
    for shapes, words in (({"q.lora_A": (8, 64)}, "adapter of q is"),
                          ({"q.lora_A": ()}, "adapter of q is"),
                          ({"q.lora_embedding_A": (4, 64)}, "expected names in pairs"),
                          ({"k.lora_A": (4, 64), "k.lora_B": (64, 4)}, "an adapter of k")):
        shapes = {"q.lora_A": (4, 64), "q.lora_B": (64, 4)} | shapes
        save_file({f"{lora.PREFIX}{name}.weight": torch.zeros(shape)
                   for name, shape in shapes.items()}, tmp_path / lora.WEIGHTS)
        with pytest.raises(ConfigError, match=words):
            lora.merge(weights, shards, {"q": [("q", range(64))]}, lora.read_pairs(tmp_path), 1.0)


def test_defaults_of_fine_tuning(tmp_path):
    save_random(tmp_path, FAMILIES["llama"]())
    for given, expected in (({}, ("adamw", "cosine", 2e-5)), (dict(lora_rank=4), (
            "adamw", "cosine", 2e-4)), (dict(optimizer="muon", lr_schedule="wsd"), (
            "muon", "wsd", 2e-5))):
        cfg = huggingface.config_from_hf(Config(init_from=str(tmp_path), **given))
        assert (cfg.optimizer, cfg.lr_schedule, cfg.learning_rate) == expected


@pytest.mark.parametrize("kind, rows", [
    ("llama", 200), ("llama", 300), pytest.param("qwen2, tied", 200, marks=pytest.mark.slow)])
def test_new_ids_get_the_mean_of_the_old_rows(tmp_path, tune, kind, rows):
    """Those of a padded vocabulary are kept."""
    family = FAMILIES[kind]()
    other = type(family)(**family.to_dict() | dict(vocab_size=rows, eos_token_id=1, pad_token_id=1))
    base = save_random(tmp_path / "m", other)
    flags = ["--init_from", "m", "--max_steps", 2]
    if rows < 257:
        told = tune(*flags, expect=2)
        assert "tokenizer of the data has 257 ids; --resize_embeddings adds rows if --init" in told
    tune(*flags, "--resize_embeddings", "--learning_rate", 1e-9, "--out_dir", "r")
    tune("--out_dir", "r", "--auto_resume", "--max_steps", 3)
    assert generation.main(["export", "r", "out"]) == 0
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert back.config.vocab_size == max(rows, 257)
    for get in ("get_input_embeddings", "get_output_embeddings"):
        old, new = (getattr(module, get)().weight for module in (base, back))
        assert torch.allclose(new[:rows], old, atol=1e-6)
        assert torch.allclose(new[rows:], old.mean(0), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("kind, precision, rel", [
    ("llama", "fp32", 1e-3), ("phi3", "fp32", 1e-3), ("llama", "bf16", 0.02)])
def test_several_ranks_train_the_same_adapter(tmp_path, tune, way, kind, precision, rel):
    save_random(tmp_path / "m", PHI3 if kind == "phi3" else FAMILIES["llama"]())
    flags = [*LORA, "--lora_rank", 1, "--save_interval", 10, "--lr_schedule", "constant",
             "--precision", precision]
    tune(*flags, "--out_dir", "alone")
    flags += ["--out_dir", "r", "--parallel", way]
    tune(*flags, "--max_steps", 10, ranks=2)  # of some A, one of them has no row
    tune(*flags, "--auto_resume", ranks=2)
    expected, found = (column(tmp_path / name, "train/loss") for name in ("alone", "r"))
    assert found == pytest.approx(expected, rel=rel) and found[20] < found[1] - 0.1
    shapes = [{name: t.shape for name, t in newest.items()} for newest in (
        generation.open_checkpoint(tmp_path / name, False)[1]["model"] for name in ("alone", "r"))]
    assert shapes[0] == shapes[1]


@pytest.mark.slow
def test_an_adapter_below_that_has_changed_is_refused(tmp_path, tune):
    """Also one below another, and where only its scale is another."""
    save_random(tmp_path / "m", FAMILIES["llama"]())
    short = [*LORA[2:], "--max_steps", 2]
    tune("--init_from", "m", *short, "--out_dir", "r")
    assert generation.main(["export", "r", "one", "--adapter"]) == 0
    tune("--init_from", "one", *short, "--out_dir", "s")
    assert generation.main(["export", "s", "two", "--adapter"]) == 0
    tune("--init_from", "two", *short, "--out_dir", "t")
    again = ["--out_dir", "t", "--auto_resume", "--max_steps", 3]
    for file in (tmp_path / "one" / lora.WEIGHTS, tmp_path / "one" / lora.CONFIG):
        before = file.read_bytes()
        if file.suffix == ".json":
            file.write_text(json.dumps(json.loads(before) | dict(lora_alpha=9.0)))
        else:
            save_file({k: 2 * v for k, v in load_file(file).items()}, file)
        assert "adapts other weights than --init_from two now has" in tune(*again, expect=2)
        assert generation.main(["export", "t", "out"]) == 2
        file.write_bytes(before)
    tune(*again)


def test_an_export_that_finds_no_space(tmp_path, tune, tool):
    save_random(tmp_path / "m", FAMILIES["llama"]())
    tune(*LORA, "--max_steps", 2, "--out_dir", "r", "--eval_interval", 0)
    for flags in ([], ["--adapter"]):
        out = f"out{len(flags)}"
        with largest_file(20_000):
            told = tool(generation.main, "export", "r", out, *flags, expect=2).err
        assert f"model.py: error: {out}: could not be written: " in told and "too large" in told
        assert "Traceback" not in told
        assert (tmp_path / out / "tokenizer_config.json").exists()  # weights come last
    (tmp_path / "m").rename(tmp_path / "gone")
    assert generation.main(["export", "r", "later"]) == 2
    assert not (tmp_path / "later").exists()


def test_a_sample_where_the_weights_are_finite_and_the_output_is_not(tmp_path, tune):
    save_random(tmp_path / "m", FAMILIES["llama"]())
    told = tune(*LORA, "--lora_alpha", 1e308, "--max_steps", 2)
    assert "(none: the output of the model is not finite)" in told


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "llama", "phi3"])
def test_peft_computes_the_same(tmp_path, tune, tokens, kind):
    peft = pytest.importorskip("peft")
    base = save_random(tmp_path / "m", PHI3 if kind == "phi3" else FAMILIES[kind]())
    byte_tokenizer().save_pretrained(tmp_path / "m")
    tune(*LORA, "--out_dir", "r")
    assert generation.main(["export", "r", "ours", "--adapter"]) == 0
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    assert relative(theirs(tokens).logits, logits(tmp_path / "r", tokens)) < 1e-4
    theirs.save_pretrained(tmp_path / "theirs")
    assert relative(logits(tmp_path / "theirs", tokens), theirs(tokens).logits) < 1e-4
