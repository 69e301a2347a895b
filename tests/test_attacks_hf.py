"""Models of others as hard users have them: each test was seen to fail before."""

# ruff: noqa: F401, F811 -- a fixture of another file

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import change, raising, saved
from safetensors.torch import load_file, save_file
from test_huggingface import FAMILIES, ours_of, save_random, small, tune
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, Gemma3ForConditionalGeneration, PreTrainedTokenizerFast

from config import Config
from steady.models import foreign, huggingface
from steady.options import ConfigError
from steady.tokens.tokenizers import byte_tokenizer, decode
from tools import generate as generation

GPT2 = small("gpt2")


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_weights(file, tensors):
    save_file(tensors, file, metadata=dict(format="pt"))


# --- weights ---


@pytest.mark.parametrize("found", [FAMILIES["qwen3"](), GPT2], ids=["ours", "foreign"])
def test_tensors_without_a_place_are_refused(tmp_path, found):
    save_random(tmp_path, found)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    if found.model_type == "qwen3":  # of older programs, harmless
        frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
        write_weights(path, tensors | frequencies)
        ours_of(tmp_path)
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    write_weights(path, tensors | {name: torch.ones(1)})
    with pytest.raises(ConfigError, match=f"no place for {name}") as error:
        ours_of(tmp_path)
    assert str(error.value).count(tmp_path.name) == 1
    name = min(n for n in tensors if "norm" in n or "ln_" in n)
    del tensors[name]
    write_weights(path, tensors)
    with pytest.raises(ConfigError, match=f"has no .*{name.removeprefix('transformer.')}"):
        ours_of(tmp_path)


@pytest.mark.parametrize("biased", [False, True], ids=["ours", "foreign"])
def test_a_tied_head_of_its_own_is_refused_and_can_be_untied(tmp_path, biased):
    save_random(tmp_path, small("llama", tie_word_embeddings=True, attention_bias=biased))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    write_weights(file, tensors)
    ours_of(tmp_path)  # as older programs save what is tied
    tensors["lm_head.weight"][200, 3] += 1
    write_weights(file, tensors)
    with pytest.raises(ConfigError, match="tie_word_embeddings to false"):
        ours_of(tmp_path)
    change_json(tmp_path / "config.json", tie_word_embeddings=False)
    assert torch.equal(ours_of(tmp_path).head.weight[:257], tensors["lm_head.weight"])


def test_only_the_files_of_the_index_are_read(tmp_path):
    for folder, how in ((tmp_path / "one", {}), (tmp_path / "many", dict(max_shard_size="60KB"))):
        theirs = save_random(folder, FAMILIES["qwen3"](), **how)
        write_weights(folder / "z.safetensors", {"model.norm.weight": torch.zeros(64)})
        assert torch.equal(ours_of(folder).norm.weight, theirs.state_dict()["model.norm.weight"])
    index = folder / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"]
    for name in ("../z.safetensors", "none.safetensors"):
        change_json(index, weight_map=files | {"model.norm.weight": name})
        with pytest.raises(ConfigError, match=f"weights in .*/{name}"):
            ours_of(folder)


def test_sequences_longer_than_a_sliding_window(tmp_path):
    """They can be trained through transformers' own module."""
    theirs = save_random(tmp_path, small("mistral", max_position_embeddings=64, sliding_window=16))
    assert huggingface.config_from_hf(Config(init_from=str(tmp_path))).seq_len == 16  # not 1,024
    cfg = Config(init_from=str(tmp_path), seq_len=64)
    with pytest.raises(ConfigError, match="has a context of 16.* --model transformers"):
        huggingface.config_from_hf(cfg)
    cfg = huggingface.config_from_hf(dataclasses.replace(cfg, model="transformers"))
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(foreign.HFModel(cfg)(tokens), theirs(tokens).logits)
    cfg.data_mode, cfg.seq_len = "packed", 65
    with pytest.raises(ConfigError, match="not with a mistral trained"):
        huggingface.config_from_hf(cfg)


# --- generation ---


@pytest.fixture
def write(tool, monkeypatch):
    """write(*flags) → token ids, standard output, standard error of `model.py generate`."""
    returned = []
    change(generation, "generate", lambda found, *_: returned.append(found) or found,
           monkeypatch.setattr)

    def write(*flags):
        printed = tool(generation.main, "generate", *flags)
        return returned[-1], *printed

    return write


@pytest.mark.parametrize("kind", ["ours", "foreign"])
def test_long_prompts_are_seen_or_the_cut_is_told(tmp_path, write, kind):
    theirs = save_random(tmp_path / "m", small("llama", max_position_embeddings=5200,
                                               attention_bias=kind == "foreign"), byte_tokenizer())
    flags = [tmp_path / "m", "--temperature", 0, "--max_new_tokens", 3, "--prompt"]
    text = "".join(chr(97 + i * i % 23) for i in range(6000))
    ids, _, told = write(*flags, text[:5000])
    prompt = torch.tensor([list(text[:5000].encode())])
    expected = theirs.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=256)
    assert torch.equal(ids, expected) and "tokens" not in told
    ids, _, told = write(*flags, text)
    assert ids.shape[1] > 6000
    assert "6,000 tokens, the model sees 5,200 at most" in told


@pytest.mark.parametrize("found", [FAMILIES["qwen3"](), GPT2], ids=["ours", "foreign"])
def test_every_listed_id_ends_an_answer_and_none_is_shown(tmp_path, write, found):
    save_random(tmp_path / "m", found, byte_tokenizer())
    stop = {*range(1, 220), 256}
    change_json(tmp_path / "m/generation_config.json", eos_token_id=[256, *range(1, 220)])
    text, lengths = "", set()
    for seed in range(16):
        ids, told, _ = write(tmp_path / "m", "--max_new_tokens", 9, "--temperature", 3, "--top_k",
                             0, "--prompt", "1 + 2", "--seed", seed)
        row, text = ids[0, 5:].tolist(), text + told.removeprefix("1 + 2").removesuffix("\n")
        end = next((i for i, token in enumerate(row) if token in stop), len(row))
        lengths.add(end)
        assert set(row[end:]) <= stop
    assert len(lengths) > 1
    assert not set(text) & {chr(i) for i in range(1, 128)}


def pretend(answer, tokenizer, monkeypatch):
    """Every prompt gets this answer, token ids."""
    def generate(model, tokens, *_, on_token, **how):
        for token in answer:
            on_token(torch.tensor([token]))

    model = torch.nn.Module()
    model.cfg = SimpleNamespace(seq_len=64, vocab_size=len(tokenizer))
    monkeypatch.setattr(generation, "open_model", lambda *_: (model, tokenizer, None))
    monkeypatch.setattr(generation, "generate", generate)


def test_answers_begin_with_their_space(monkeypatch, tool, tmp_path):
    """Where ▁ is before every word, also the first, as in Llama 2 and Mistral."""
    words = ["<unk>", "</s>", "▁", "▁the", "▁cat", "s", "▁sat"]
    built = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    built.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, eos_token="</s>")
    pretend((4, 5, 6, 1), tokenizer, monkeypatch)
    assert tool(generation.main, "generate", tmp_path, "--prompt", "the").out == "the cats sat\n"


def test_no_letter_of_an_answer_is_lost_to_a_cleanup(monkeypatch, tool, tmp_path):
    """It takes spaces before " n't" and around " ' " away, also of what is printed already."""
    words = ["[UNK]", "[SEP]", *"they said do n ' t know s yes .".split()]
    built = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}))
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.decoder = decoders.WordPiece(cleanup=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, eos_token="[SEP]",
                                        clean_up_tokenization_spaces=True)
    answer = tokenizer("said they do n't know ' yes '.", add_special_tokens=False)["input_ids"]
    pretend(answer, tokenizer, monkeypatch)
    told = tool(generation.main, "generate", tmp_path, "--prompt", "they").out
    assert told == "they said they do n ' t know ' yes ' .\n"
    tokenizer.save_pretrained(tmp_path)
    assert decode(str(tmp_path), answer) == told.removeprefix("they ").rstrip("\n")


# --- what --init_from takes ---

TEXT = dict(vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=64)
LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16,
              linear_value_head_dim=16)
GEMMA = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
             image_size=28, patch_size=14)


def test_configurations_with_a_text_config(tune, tmp_path, monkeypatch):
    flags = ["--max_steps", 2, "--init_from"]
    found = AutoConfig.for_model("qwen3_5", text_config=TEXT | LINEAR)
    assert save_random(tmp_path / "text", found).config is not found
    found.save_pretrained(tmp_path / "text")
    assert "through transformers' own module" in tune(*flags, "text", "--out_dir", "r")
    vision = AutoConfig.for_model("gemma3", text_config=TEXT | dict(sliding_window=32),
                                  vision_config=GEMMA, mm_tokens_per_image=4, image_token_index=250)
    save_random(tmp_path / "vision", vision)
    tune(*flags, "vision", "--out_dir", "v")
    monkeypatch.setattr(Gemma3ForConditionalGeneration, "forward", raising(
        ValueError("token_type_ids is required\nwhen training")))
    told = tune(*flags, "vision", expect=2).splitlines()[-1]
    assert "cannot be trained on text alone: token_type_ids" in told
    AutoConfig.for_model("t5", vocab_size=257).save_pretrained(tmp_path / "t5")
    assert "architecture t5: expected one of llama" in tune(*flags, "t5", expect=2)


def foreign_model(folder, found, **changes):
    save_random(folder, found)
    return foreign.HFModel(huggingface.config_from_hf(Config(init_from=str(folder), **changes)))


def test_a_model_that_sees_later_tokens_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="its tokens attend to later ones; expected"):
        foreign_model(tmp_path, small("roberta", pad_token_id=1))


@pytest.mark.parametrize("found", [GPT2, *(
    small(name, hidden_dropout=0.1)  # Falcon's own is 0
    for name in ("opt", "seed_oss", "falcon"))], ids=lambda found: found.model_type)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_options_reach_a_model_of_transformers(tmp_path, found, dropout):
    """Whose own dropout is 0.1."""
    model = foreign_model(tmp_path, found, dropout=dropout, activation_checkpointing="full")
    tokens = torch.arange(20)[None]
    assert torch.equal(model(tokens), model(tokens)) == (not dropout)
    assert any(getattr(m, "gradient_checkpointing", False) for m in model.modules())


def test_a_model_that_would_search_by_beams_writes_one_text(tmp_path):
    model, found = foreign_model(tmp_path, GPT2), []
    assert len(model.blocks) == 2 and model.head.weight.shape == (257, 64)
    model.module.generation_config.num_beams = 3
    model.generate(torch.arange(5)[None], 4, 0.0, 0, 1.0, (), lambda ids: found.append(ids.shape))
    assert found == [(1,)] * 4


@pytest.mark.parametrize("asks", [
    dict(return_dict_in_generate=True), dict(stop_strings=["a"]), dict(penalty_alpha=0.6, top_k=4),
    dict(dola_layers="high"), dict(sequence_bias={"1": 2})], ids=lambda asks: min(asks))
def test_a_generation_config_cannot_end_a_talk(tmp_path, write, asks):
    save_random(tmp_path / "m", GPT2, byte_tokenizer())
    flags = [tmp_path / "m", "--max_new_tokens", 3, "--temperature", 0, "--prompt", "a"]
    plain = write(*flags)[1]
    (tmp_path / "m/generation_config.json").write_text(json.dumps(asks))
    assert write(*flags)[1] == plain


@pytest.mark.parametrize("found", [small("llama"), GPT2], ids=["ours", "foreign"])
def test_a_token_that_only_the_tokenizer_has_is_named(tmp_path, tool, found):
    """As one for padding that somebody has added."""
    save_random(tmp_path / "m", found)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(dict(pad_token="[PAD]"))
    tokenizer.save_pretrained(tmp_path / "m")
    flags = [generation.main, "generate", tmp_path / "m", "--max_new_tokens", 2, "--prompt"]
    assert tool(*flags, "a").out.startswith("a")
    assert "m: has no token 257, '[PAD]'" in tool(*flags, "a [PAD]", expect=2).err
    assert "did you mean --max_new_tokens?" in tool(*flags, "a", "--max_length=3", expect=2).err


def test_a_run_outlives_the_folder_it_began_with(tune, tmp_path, write):
    save_random(tmp_path / "m", FAMILIES["qwen3"](), byte_tokenizer())
    flags = ["--lr_schedule", "constant", "--init_from", "m", "--out_dir"]
    tune(*flags, "r", "--max_steps", 2)
    tune(*flags, "whole", "--max_steps", 4)
    assert "init_from m -> n" in tune("--auto_resume", "--init_from=n", "--out_dir", "r", expect=2)
    shutil.rmtree(tmp_path / "m")
    tune("--auto_resume", "--out_dir", "r", "--max_steps", 3, "--init_from=elsewhere/m")
    tune("--auto_resume", "--out_dir", "r", "--max_steps", 4)
    torch.testing.assert_close(*(saved(tmp_path / name, 4)["model"] for name in ("r", "whole")))
    *_, told = write("r", "--max_new_tokens", 3)
    assert told.startswith("note: without the configuration of --init_from: no folder or hub")
    assert generation.main(["export", "r", "out"]) == 0
    assert "python model.py export r FOLDER" in tune("--init_from", "r", expect=2)
