"""Weights of others come in, ours go out, and the numbers are the same on both sides."""

import json
import re
import shutil
from random import random

import families
import pytest
import torch
from conftest import column, finished_run
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import config
from model import Transformer, generate
from steady.checkpoints import checkpoint
from steady.models import foreign, huggingface
from steady.options import ConfigError
from steady.ranks.parallel import Shards
from steady.tokens.tokenizers import byte_tokenizer
from tools import generate as generation
from tools import prepare

SMALL = dict(vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
             eos_token_id=256, bos_token_id=None, pad_token_id=None)
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=32)
GPT2 = dict(vocab_size=257, n_embd=64, n_layer=2, n_head=4, n_positions=64, eos_token_id=256,
            bos_token_id=None)


def small(kind, **more):
    return AutoConfig.for_model(kind, **(GPT2 if kind == "gpt2" else SMALL) | more)


FAMILIES = {
    "llama": lambda: small("llama"),
    "llama, head_dim": lambda: small("llama", head_dim=24, rms_norm_eps=1e-5),
    "llama3 rope": lambda: small("llama", rope_parameters=LLAMA3, tie_word_embeddings=True),
    "linear rope": lambda: small("llama", rope_parameters=dict(
        rope_type="linear", rope_theta=10000.0, factor=4.0)),
    "mistral": lambda: small("mistral", sliding_window=None),
    "qwen2": lambda: small("qwen2"),
    "qwen2, tied": lambda: small("qwen2", tie_word_embeddings=True),
    "qwen3": lambda: small("qwen3", head_dim=32)}


def save_random(folder, found, tokenizer=None, **how):
    """A model of transformers with random weights, biases and norms, none of them 0 or 1."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(found)
    for name, p in theirs.named_parameters():
        torch.nn.init.normal_(p, mean=float("norm" in name), std=0.1)
    theirs.save_pretrained(folder, **how)
    if tokenizer:
        tokenizer.save_pretrained(folder)
    return theirs.eval()


def ours_of(folder):
    """The model that --init_from makes of it."""
    cfg = huggingface.config_from_hf(config.Config(init_from=str(folder)))
    if cfg.model == "transformers":
        return foreign.HFModel(cfg)
    ours = Transformer(config.resolve(cfg))
    huggingface.load_initial(ours, str(folder), Shards())
    return ours.eval()


def relative(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.fixture
def tokens():
    torch.manual_seed(1)
    return torch.randint(257, (2, 100))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(tmp_path, tokens, family):
    theirs = save_random(tmp_path, FAMILIES[family]())
    ours = ours_of(tmp_path)
    assert relative(ours(tokens), theirs(tokens).logits) < 1e-4
    targets = tokens.roll(-1, 1)
    ours(tokens, targets).mean().backward()
    logits = theirs(tokens).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    expected, gradients = dict(theirs.named_parameters()), {n: p.grad for n, p in
                                                             ours.named_parameters()}
    for name, (mine, rows) in huggingface.hf_key_map(ours.cfg).items():
        assert relative(gradients[mine][rows], expected[name].grad) < 1e-3, name
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        a, b = ours(tokens).float(), theirs(tokens).logits.float()
    assert relative(a, b) < 0.05


def test_what_our_model_cannot_compute_is_not_taken_for_it():
    for odd in (dict(hidden_act="gelu"), dict(attention_bias=True), dict(mlp_bias=True),
                dict(is_causal=False), dict(rope_parameters=dict(rope_type="dynamic", factor=2))):
        assert huggingface.native_shape(small("llama", **odd)) is None, odd
    found = small("llama")
    assert huggingface.native_shape(found)["max_position"] == 128
    del found.rope_parameters  # as in transformers 4: its base must not become a default
    pytest.raises(LookupError, huggingface.native_shape, found).match("rope_theta")


def test_what_does_not_fit_is_told(tmp_path, run):
    save_random(tmp_path / "m", FAMILIES["qwen2"]())
    flags = ["--init_from", tmp_path / "m"]
    for more, words in ((["--n_layer", 3], "--n_layer 3: "), (["--seq_len", 999], "context of 128"),
                        (["--model", "1b"], "--model 1b: the shape is that")):
        assert words in run(*flags, *more, bare=True, expect=2)
    (tmp_path / "empty").mkdir()
    for name, words in (("none", "no folder or hub model called"), ("empty", "--init_from empty")):
        assert words in run("--init_from", name, bare=True, expect=2)
    path = tmp_path / "m/config.json"
    cfg = json.loads(path.read_text())
    for odd in (dict(num_hidden_layers="two"), dict(rope_parameters=dict(rope_theta=None))):
        path.write_text(json.dumps(cfg | odd))
        assert "--init_from" in run(*flags, bare=True, expect=2)
    path.write_text(json.dumps(cfg | dict(hidden_size="64")))  # said in the second of two lines
    assert "expected int, got str" in run(*flags, bare=True, expect=2).splitlines()[-1]
    del cfg["layer_types"]
    for change, words in ((dict(num_hidden_layers=3), "has no model.layers.2"),
                          (dict(num_hidden_layers=1), "no place for model.layers.1.* and 9 more"),
                          (dict(intermediate_size=80), r"mlp.\w+_proj.weight is .*; expected")):
        path.write_text(json.dumps(cfg | change))
        with pytest.raises(ConfigError, match=words):
            ours_of(tmp_path / "m")
    (tmp_path / "m/model.safetensors").rename(tmp_path / "m/pytorch_model.bin")
    told = run("--init_from", "m", bare=True, expect=2)
    assert "expected its weights in m/model.safetensors" in told
    path.write_text(json.dumps(cfg | dict(quantization_config=dict(quant_method="fp8"))))
    assert "quantized (fp8)" in run(*flags, bare=True, expect=2)


def test_code_of_others_is_not_run_unless_it_is_trusted(tmp_path, tune, monkeypatch):
    touched = tmp_path / "touched"
    (tmp_path / "m").mkdir()
    (tmp_path / "m/odd.py").write_text(
        f"open({str(touched)!r}, 'w')\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class C(LlamaConfig): model_type = 'odd'\n"
        "class M(LlamaForCausalLM): config_class = C\n")
    save_random(tmp_path / "m", FAMILIES["llama"]())
    path = tmp_path / "m/config.json"
    found = json.loads(path.read_text()) | dict(model_type="odd", auto_map={
        "AutoConfig": "odd.C", "AutoModelForCausalLM": "odd.M"})
    path.write_text(json.dumps(found))
    flags = ["--init_from", tmp_path / "m"]
    assert "--trust_remote_code" in tune(*flags, expect=2) and not touched.exists()
    told = tune(*flags, "--trust_remote_code")
    assert touched.exists() and "through transformers' own module" in told
    touched.unlink()  # nor does a checkpoint say that it may be run
    assert "trust_remote_code" not in (tmp_path / "runs/001/config.yaml").read_text()
    assert "--trust_remote_code" in tune("--auto_resume", "--max_steps", 30, expect=2)
    assert generation.main(["generate", "runs/001"]) == 2 and not touched.exists()
    asked = []
    monkeypatch.setattr("builtins.input", lambda *prompt: asked.append(prompt) or "n")
    assert generation.main(["export", "runs/001", "out", "--trust_remote_code"]) == 0
    assert (tmp_path / "out/odd.py").exists() and not asked
    with open(tmp_path / "runs/001/config.yaml", "a") as file:
        file.write("trust_remote_code: true\n")
    told = tune("--auto_resume", "--max_steps", 30, expect=2)
    assert "trust_remote_code is for the command line" in told


FINE = ["--seq_len", 32, "--batch_size", 8, "--max_steps", 20, "--log_interval", 1, "--eval_steps",
        2, "--warmup_steps", 2, "--precision", "fp32"]


@pytest.fixture
def tune(run, corpus):
    """run with the corpus and no shape."""
    return lambda *flags, **how: run("--data", corpus, *FINE, *flags, bare=True, **how)


KINDS = {"qwen3": [], "qwen3, head_dim": ["--head_dim", 24], "llama": ["--no_qk_norm"],
         "qwen2": ["--qkv_bias", "--no_qk_norm"], "tied": ["--tie_embeddings"],
         "llama3 rope": ["--rope_scaling", 8, 1, 4, 16]}


# what vLLM and llama.cpp's converter read
READ = ("architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "hidden_act",
        "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_parameters",
        "eos_token_id", "dtype")


@pytest.mark.parametrize("flags", KINDS.values(), ids=KINDS)
def test_what_is_exported_comes_back_bit_for_bit(run, tmp_path, tool, flags):
    """And has the fields that the family's own configuration writes for that shape."""
    run("--out_dir", "r", "--max_steps", 3, *flags)
    assert "warning" not in tool(generation.main, "export", "r", "out").err
    _, state, _ = generation.open_checkpoint(tmp_path / "r", False)
    size, cfg = state["vocab_size"], state["config"]
    for name, tensor in ours_of(tmp_path / "out").state_dict().items():
        rows = slice(size) if name in ("embedding.weight", "head.weight") else slice(None)
        assert torch.equal(tensor[rows], state["model"][name][rows]), name

    found = json.loads((tmp_path / "out/config.json").read_text())
    shape = {name: found[name] for name in READ if name not in ("architectures", "model_type")}
    theirs = AutoConfig.for_model(found["model_type"], **shape)
    theirs.architectures = [f"{found['model_type'].capitalize()}ForCausalLM"]
    theirs.save_pretrained(tmp_path / "theirs")
    expected = json.loads((tmp_path / "theirs/config.json").read_text())
    assert {name: found[name] for name in READ} == {name: expected[name] for name in READ}
    rope = expected["rope_parameters"]
    assert found["rope_theta"] == rope["rope_theta"] and found["torch_dtype"] == "float32"
    assert (found.get("rope_scaling") or {}).get("factor") == rope.get("factor")
    assert (found["head_dim"], found["num_key_value_heads"]) == (cfg["head_dim"], cfg["n_kv_head"])
    assert (found["hidden_size"], found["vocab_size"]) == (cfg["d_model"], 257)


def test_transformers_loads_what_is_exported(trained, tmp_path):
    assert generation.main(["export", "r", "out"]) == 0
    theirs, tokenizer = (kind.from_pretrained(tmp_path / "out")
                         for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    assert theirs.generation_config.eos_token_id == tokenizer.eos_token_id == 256
    text = "naïve 猫 1 + 2 =\n"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text
    prompt = torch.tensor([ids[-5:]])
    ours, *_ = generation.open_model(tmp_path / "r")
    expected = theirs.generate(prompt, max_new_tokens=8, do_sample=False)
    assert torch.equal(generate(ours, prompt, 8, temperature=0), expected)


@pytest.mark.parametrize("kind, more", [("llama3 rope", []), ("llama3 rope", ["--lora_rank", 4]),
                                        ("gpt2", [])])
def test_an_export_keeps_what_training_leaves_alone(tmp_path, tune, kind, more):
    """And has the keys that transformers 4 reads."""
    save_random(tmp_path / "m", small("gpt2") if kind == "gpt2" else FAMILIES[kind]())
    usual = dict(bos_token_id=7, pad_token_id=8, eos_token_id=[9, 256], repetition_penalty=1.05,
                 min_p=0.1, do_sample=True, temperature=0.6)
    (tmp_path / "m/generation_config.json").write_text(json.dumps(usual))
    tune("--init_from", "m", "--max_steps", 2, "--out_dir", "r", *more)
    assert generation.main(["export", "r", "out", "--dtype", "bf16"]) == 0
    base, new, written, settings = (json.loads((tmp_path / name).read_text()) for name in (
        "m/config.json", "out/config.json", "out/generation_config.json",
        "out/tokenizer_config.json"))
    changed = {name for name in base | new if base.get(name) != new.get(name)}
    old = set() if kind == "gpt2" else {"rope_theta", "rope_scaling"}
    assert changed == {"dtype", "torch_dtype", "eos_token_id", *old}
    assert new["dtype"] == new["torch_dtype"] == "bfloat16"
    if old:
        assert new["rope_theta"] == 500000.0 and new["rope_scaling"]["rope_type"] == "llama3"
    assert written == usual | dict(eos_token_id=[256, 9])
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_an_exported_chat_model_ends_its_turns(run, tmp_path):
    """Where the template ends a reply with another token than the tokenizer's end-of-text."""
    tokenizer = families.make_tokenizer(families.QWEN2, families.CHATML, None, "<|endoftext|>")
    talk = dict(messages=families.CHATS["one turn"])
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(talk)}\n" * 9)
    for family in ("qwen3", "gemma3"):
        save_random(tmp_path / family, families.config_of(family, tokenizer))
        tokenizer.save_pretrained(family)
        assert prepare.main(["a.jsonl", "--out", "chats", "--tokenizer", family]) == 0
        run("--init_from", family, "--data", "chats", "--max_steps", 1, "--out_dir", "r",
            "--overwrite", *FINE[:4], bare=True)
        assert generation.main(["export", "r", f"{family}-out"]) == 0
        found = AutoModelForCausalLM.from_pretrained(f"{family}-out").generation_config
        saved = AutoTokenizer.from_pretrained(f"{family}-out")
        ends = saved.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
        assert ends[0] != ends[1] and {*ends} <= {*found.eos_token_id}


@pytest.mark.parametrize("value, dtype, words", [
    (float("nan"), "fp32", "non-finite weights in norm.weight"),
    (1e5, "fp16", "non-finite weights in norm.weight, as torch.float16"), (1e5, "bf16", None)])
def test_what_must_not_be_exported(trained, tmp_path, tool, monkeypatch, value, dtype, words):
    path = trained / "checkpoints/step_00000060.pt"
    state = torch.load(path, weights_only=True)
    state["model"]["norm.weight"][0] = value
    wide = state["model"][(qkv := "blocks.0.attention.qkv.weight")].repeat(2, 1)  # as with gates
    state["model"] |= {"extra": torch.zeros(1), qkv: wide}  # of a changed model
    monkeypatch.setattr(checkpoint, "find_corruption", lambda p: None)
    torch.save(state, path)
    told = tool(generation.main, "export", path, "out", "--dtype", dtype,
                expect=2 if words else 0).err
    assert (words or f"a changed model: {qkv}, extra differ") in told and told.count("\n") == 1
    assert (tmp_path / "out").exists() == (not words)
    if not words:
        del state["model"]["blocks.0.mlp.down.weight"]  # as experts take its place
        torch.save(state, path)
        told = tool(generation.main, "export", path, "out2", expect=2).err
        assert "without blocks.0.mlp.down.weight" in told


def test_what_cannot_be_exported(run, trained, tmp_path, tool):
    path = trained / "checkpoints/step_00000060.pt"
    broken = bytearray(path.read_bytes())
    broken[len(broken) // 2] ^= 1
    path.write_bytes(broken)
    run("--out_dir", "both", "--max_steps", 3, "--qk_norm", "--qkv_bias")
    for source, out, words in ((path, "out", "not a checkpoint that can be read"),
                               ("both", "out", "has both --qk_norm and --qkv_bias"),
                               ("none", "out", "expected a run"), ("both", "r", "is not empty"),
                               ("both/checkpoints", "out", "expected a run, as runs/001")):
        assert words in tool(generation.main, "export", source, out, expect=2).err
    assert not (tmp_path / "out").exists()


def test_other_architectures_train_through_transformers(tmp_path, tune):
    found = small("gpt2", resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    theirs = save_random(tmp_path / "gpt2", found)
    (tmp_path / "gpt2/model.safetensors").unlink()  # it reads other formats, too
    torch.save(theirs.state_dict(), tmp_path / "gpt2/pytorch_model.bin")
    flags = ["--init_from", tmp_path / "gpt2", "--learning_rate", 2e-3, "--save_interval", 10]
    told = tune(*flags, "--out_dir", "r", "--monitoring", "full")
    assert "through transformers' own module" in told and "health/output_entropy" not in told
    losses = column(tmp_path / "r", "train/loss")
    assert losses[20] < 0.9 * losses[1]
    (tmp_path / "r/checkpoints/step_00000020.pt").unlink()
    (tmp_path / "r/checkpoints/best.pt").unlink()
    tune("--out_dir", "r", "--auto_resume")
    assert column(tmp_path / "r", "train/loss")[20] == losses[20]
    assert generation.main(["export", "r", "out"]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "gpt2"
    net, *_ = generation.open_model(tmp_path / "out")
    for p in net.train().modules():
        p.p = 0.5  # of dropouts
    prompt = torch.randint(257, (1, 64))  # as long as it can see
    texts = {tuple(generate(net, prompt, 20, temperature=0)[0].tolist()) for _ in range(4)}
    assert len(texts) == 1 and net.training
    for more in (["--data_mode", "packed"], ["--rope_scaling", 2], ["--qk_norm"]):
        assert "not with a gpt2 trained" in tune(*flags, *more, expect=2)


def test_eval_only(tmp_path, tune, run, corpus, other_validation, monkeypatch):
    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda _, x: x * torch.rand(1) * random())
    save_random(tmp_path / "m", FAMILIES["llama"]())
    tune("--init_from", tmp_path / "m", "--out_dir", "r", "--learning_rate", 1e-3)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "r").rglob("*")}
    told = run("--eval_only", "--resume", "r/checkpoints/step_00000020.pt", bare=True)
    assert f"validation loss {column(tmp_path / 'r', 'val/loss')[20]:.4f}" in told
    assert "perplexity" in told and "bits_per_byte" in told
    told = run("--eval_only", "--resume", "r/checkpoints/step_00000020.pt", "--val_data", corpus,
               other_validation, "--eval_steps", 0, bare=True)
    found = re.search(rf"loss \S+ \(([\d,]+) tokens\).*loss/{corpus.name} \S+ \(([\d,]+) tokens\)"
                      r".*loss/other \S+ \(([\d,]+) tokens\)", told)
    total, one, two = (int(n.replace(",", "")) for n in found.groups())
    assert total == one + two
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "r").rglob("*")}
    told = run("--eval_only", "--init_from", tmp_path / "m", "--val_data", corpus, bare=True)
    assert "step 0: validation loss" in told and not (tmp_path / "runs").exists()
    assert "--eval_only: expected --resume" in run("--eval_only", bare=True, expect=2)
    flags = ["--eval_only", "--auto_resume", "--data", corpus]
    assert "no checkpoint to evaluate" in run(*flags, bare=True, expect=2)


def test_the_tokenizer_of_the_data_is_that_of_the_model(tmp_path, tune):
    save_random(tmp_path / "m", FAMILIES["llama"](), byte_tokenizer())
    tune("--init_from", "m", "--max_steps", 2)
    (tmp_path / "a.txt").write_text("one two three " * 500)
    assert prepare.main(["a.txt", "--out", "o", "--train_tokenizer", "257", "--workers", "1"]) == 0
    flags = ["--init_from", "m", "--data", "o"]
    assert "--tokenizer m, or" in tune(*flags, expect=2)
    tune(*flags, "--allow_change", "tokenizer", "--max_steps", 2)
    (tmp_path / "m/tokenizer.json").write_text("null")
    assert "tokenizer m: cannot be loaded" in tune("--init_from", "m", expect=2)
    (tmp_path / "m/tokenizer.json").unlink()  # as of GPT-2
    Tokenizer.from_file("o/tokenizer/tokenizer.json").model.save("m")
    (tmp_path / "m/tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    assert "its tokenizer is not bytes" in tune("--init_from", "m", expect=2)


@pytest.fixture(scope="module")
def run_of_60_steps(corpus, tmp_path_factory):
    return finished_run(tmp_path_factory.mktemp("trained"), corpus, "--max_steps", 60)


@pytest.fixture
def trained(run_of_60_steps, tmp_path, monkeypatch):
    """The run directory "r" in the current one."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(run_of_60_steps, tmp_path / "r")


def test_generate_from_the_command_line(trained, tool):
    def write(*flags):
        return tool(generation.main, "generate", "r", *flags).out

    prompt = ["--prompt", "12 + 3 = ", "--max_new_tokens", 30]
    assert write(*prompt).startswith("12 + 3 = ")
    assert write(*prompt, "--seed", 1) == write(*prompt, "--seed", 1) != write(*prompt)
    greedy = write(*prompt, "--temperature", 0)
    assert greedy == write(*prompt, "--temperature", 0, "--seed", 9)
    assert write(*prompt, "--top_k", 1) == greedy == write(*prompt, "--top_p", 1e-9)
    assert write("--prompt", "", "--max_new_tokens", 5)  # from end-of-text on
    for arguments in (["generate", "none"], ["generate", "r", "--chat"],
                      ["generate", "r", "--top_p", "0"], ["generate", "r", "--top_k=-1"],
                      ["generate", "r", "--temperature", "1e39"],
                      ["generate", "r", "--device", "mps"], ["export", "r", "r/metrics.jsonl"],
                      ["write", "r"], ["generate", "r", "--promt", "x"]):
        told = tool(generation.main, *arguments, expect=2).err
        assert told.startswith("model.py: error:") and told.count("\n") == 1
