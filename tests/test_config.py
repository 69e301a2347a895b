"""Where the options come from, and what is refused before any work is done."""

import dataclasses
import re
from typing import get_args, get_origin

import pytest
import torch

import config
import train
from model import Transformer
from steady.guard import memory
from steady.options import ConfigError, check_bounds, write_yaml
from tools import estimate, prepare
from tools.generate import GenerateOptions


def parsed(*argv):
    return config.resolve(config.parse([*map(str, argv)]))


def refused(*argv) -> str:
    with pytest.raises(ConfigError) as error:
        memory.micro_batch_size(parsed(*argv), world_size=1)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("saved, flags, kept", [
    ("--model 1b", "--model gpt2-124m --n_layer 3", []), ("--depth 3", "--depth 4", []),
    ("--depth 3", "--model 350m", ["max_steps", "warmup_steps", "weight_decay"])])
def test_a_size_that_is_named_replaces_that_in_a_file(tmp_path, saved, flags, kept):
    """Its rope_theta as well, and what was derived from it; the rest of the file counts."""
    file = tmp_path / "run.yaml"
    write_yaml(parsed("--seed", "5", *saved.split()), file, {})
    old, cfg = (parsed("--config", str(file), *more.split()) for more in ("", flags))
    alone = parsed(*flags.split(), "--seed", "5")
    of_the_file = {name: getattr(old, name) for name in kept}
    assert dataclasses.replace(cfg, config=None) == dataclasses.replace(alone, **of_the_file)
    if "depth" in saved:
        assert (old.depth, old.d_model) == (3, 192)
    file.write_text("batch_size: 3\nlearning_rate: 0.5\n")  # names no model: all of it counts
    cfg = config.parse(["--config", str(file), "--model", "gpt2-124m"])
    assert (cfg.batch_size, cfg.learning_rate) == (3, 0.5)


def test_defaults_then_preset_then_yaml_then_flags(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("max_steps: 77\nlog_interval: 7\nlearning_rate: 1e-4\n")
    assert parsed().max_steps == 1000
    assert parsed("--preset", "debug").max_steps == config.PRESETS["debug"]["max_steps"]
    cfg = parsed("--preset", "debug", "--config", str(file), "--log_interval", "3")
    assert (cfg.max_steps, cfg.log_interval, cfg.learning_rate) == (77, 3, 1e-4)
    assert cfg.precision == "fp32" and cfg.compile is False  # from the preset alone


def test_a_run_has_one_end_and_a_new_one_replaces_the_old(tmp_path):
    steps, both = str(tmp_path / "steps.yaml"), str(tmp_path / "both.yaml")
    (tmp_path / "steps.yaml").write_text("model: default\nmax_steps: 77")
    (tmp_path / "both.yaml").write_text("epochs: 3\nmax_steps: 77")
    cfg = parsed("--epochs", "2")
    assert (cfg.epochs, cfg.max_steps) == (2, None)
    for flags, max_steps in (([], 77), (["--epochs", "2"], None), (["--max-minutes=3"], None),
                             (["--out_dir", "epochs"], 77)):  # which only reads like an option
        assert config.parse(flags, saved=steps).max_steps == max_steps
    for flags in (["--epochs", "2", "--max-steps=9"], ["--config", both],
                  ["--config", steps, "--epochs", "2"], ["--max_minutes", "1", "--epochs", "2"],
                  ["--max_minutes", "1", "--max_steps", "9"]):
        assert "--epochs and --max_minutes: expected one of them" in refused(*flags)
    assert "--eval_interval above 0" in refused("--patience", "1", "--eval_interval", "0")


@pytest.mark.parametrize("flags, learning_rate", [
    ([], 1.5e-2), (["--d_model", "256"], 7.5e-3), (["--d_model", "64"], 1.5e-2),
    (["--model", "7b", "--d_model", "8192"], 6e-5),
    (["--d_model", "256", "--learning_rate", "0.1"], 0.1)])
def test_the_wider_a_model_the_lower_its_rate(flags, learning_rate):
    cfg = parsed(*flags, "--max_steps", "5000")
    assert cfg.learning_rate == learning_rate and cfg.warmup_steps == 100  # 2 %


@pytest.mark.parametrize("preset", config.PRESETS)
def test_every_preset_and_size_is_valid(preset):
    for model in config.MODELS:
        cfg = parsed("--preset", preset, "--model", model)
        for ranks in (1, 2, 4, 8):
            assert cfg.batch_size % (memory.micro_batch_size(cfg, ranks) * ranks) == 0


@pytest.mark.parametrize("options", [config.Config, GenerateOptions, prepare.Options])
def test_numbers_of_any_length_and_empty_texts_are_refused(options):
    for field in dataclasses.fields(options):
        kinds = (field.type, *get_args(field.type))
        if int in kinds:
            for value in (10**30, -(10**30)):
                with pytest.raises(ConfigError, match=f"--{field.name} {value}: expected"):
                    check_bounds(options(**{field.name: value}))
        elif str in kinds and not field.metadata.get("may_be_empty"):
            value = [""] if get_origin(field.type) is list else ""
            with pytest.raises(ConfigError, match=f"--{field.name} '': expected"):
                check_bounds(options(**{field.name: value}))


def test_the_flag_that_torchrun_mistakes_for_its_own_has_another_name(tmp_path):
    from torch.distributed.run import parse_args

    flags = ["--monitoring", "full"]
    assert parse_args(["train.py", *flags]).training_script_args == flags
    assert parsed(*flags).monitor == parsed("--monitor", "full").monitor == "full"
    for name in "monitor", "monitoring":  # in files of older runs, and as the flag
        (tmp_path / "c.yaml").write_text(f"{name}: full\n")
        assert parsed("--config", str(tmp_path / "c.yaml")).monitor == "full"
    assert "--monitoring {off" in config.train_parser().format_help()
    assert "--monitor " not in config.train_parser().format_help()


def test_yaml_values_are_read_as_written(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("learning_rate: 1e-4\nout_dir: 007\ncompile: no\ntensorboard: off\n"
                    "monitor: off\ndata: [a:0.5, b:0.5]\nmicro_batch_size: null\nval_data: [-a]\n")
    cfg = parsed("--config", str(file))
    found = cfg.learning_rate, cfg.out_dir, cfg.compile, cfg.tensorboard
    assert found == (1e-4, "007", False, False)
    assert cfg.monitor == "off"  # the word, which YAML itself would read as False
    assert cfg.data == ["a:0.5", "b:0.5"] and cfg.micro_batch_size is None
    write_yaml(cfg, file, {"command": "train.py"})
    assert parsed("--config", str(file), "--out_dir", "007") == cfg


@pytest.mark.parametrize("device, lora, shards, local, bytes_each", [
    ("cpu", 0, 1, 1, 4), ("cpu", 0, 2, 1, 2), ("cpu", 0, 1, 8, 32), ("cpu", 0, 8, 4, 2),
    ("cpu", 8, 1, 1, 2), ("cuda", 0, 1, 8, 4), ("cuda", 0, 8, 8, 0.5)])
def test_weights_beyond_memory_are_refused(monkeypatch, device, lora, shards, local, bytes_each):
    """Frozen ones take bf16; on a CPU all ranks of the host count, on a GPU its own."""
    cfg = dataclasses.replace(parsed("--vocab_size", "512"), lora_rank=lora)
    needed = bytes_each * sum(p.numel() for p in Transformer(cfg).parameters())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    monkeypatch.setattr(memory, "memory_bytes", lambda device: needed * 1.02)
    memory.refuse_too_large(cfg, torch.device(device), shards)
    monkeypatch.setattr(memory, "memory_bytes", lambda device: needed * 0.98)
    with pytest.raises(ConfigError, match="choose smaller sizes"):
        memory.refuse_too_large(cfg, torch.device(device), shards)


@pytest.mark.parametrize("model, gigabytes, sequences", [
    ("gpt2-124m", 0, 16), ("gpt2-124m", 16, 16), ("gpt2-124m", 80, 43),
    ("gpt2-124m", 141, 64), ("350m", 141, 38), ("1b", 141, 10), ("7b", 192, 8)])
def test_a_gpu_with_much_memory_is_given_larger_micro_batches(model, gigabytes, sequences):
    """Without one, or told otherwise, they have 16,384 tokens."""
    cfg = parsed("--model", model, "--vocab_size", "50257")
    assert memory.usual_micro_batch(cfg, gigabytes * 10**9) == sequences
    assert memory.micro_batch_size(parsed("--seq_len", "99999"), 1) == 1
    assert memory.micro_batch_size(parsed("--model", "gpt2-124m"), 1, most=50) == 32


@pytest.mark.slow
def test_larger_micro_batches_take_less_than_half_of_the_memory():
    cfg = parsed("--model", "gpt2-124m", "--vocab_size", "50257")
    size = memory.usual_micro_batch(cfg, 141 * 10**9)
    need = estimate.simulate(cfg, torch.bfloat16, size, 1, train.make_optimizers)
    assert sum(need.values()) < 141e9 / 2


def test_a_rank_without_a_sequence_is_refused():
    with pytest.raises(ConfigError, match="nearest is 9; .*any number of processes up to 8"):
        memory.micro_batch_size(parsed("--batch_size", "8"), 9, uneven=True)


def test_help_shows_each_option_once(capsys):
    shown = {}
    for flag in ("--help", "-h", "--help-all"):
        with pytest.raises(SystemExit) as end:
            config.parse([flag])
        assert not end.value.code
        shown[flag] = capsys.readouterr().out
    short, text = shown["--help"], shown["--help-all"]
    assert short == shown["-h"]
    assert {*re.findall(r"^  --(\w+)", short, re.M)} == {"help_all", *config.NEEDED}
    names = [f.metadata.get("flag", f.name) for f in dataclasses.fields(config.Config)]
    assert re.findall(r"^  --(\w+)", text, re.M) == ["help_all", *names]
    assert "--no_NAME switches" in text and "--no_pin_memory" not in text
    assert all(f"(default: {shown})" in text for shown in ("0", "0.95", "stdlib", "on"))


def test_a_field_without_a_description_is_an_option(monkeypatch):
    mine = dataclasses.make_dataclass("Mine", [("mine", int, 3)], bases=(config.Config,))
    monkeypatch.setattr(config, "Config", mine)
    assert config.parse([]).mine == 3 and config.parse(["--mine", "4"]).mine == 4


@pytest.mark.parametrize("name", ["overwrite", "pin_memory", "compile"])
def test_switches_take_no_value(name):
    for flag, value in ((f"--{name}", True), (f"--no_{name}", False), (f"--{name}=true", True),
                        (f"--{name}=FALSE", False), (f"--{name}=1", True), (f"--{name}=no", False),
                        (f"--no_{name}=true", False)):
        assert getattr(config.parse([flag]), name) is value
    assert getattr(config.parse([f"--{name}", f"--no-{name.replace('_', '-')}"]), name) is False
    assert f"--{name} maybe: expected true or false" in refused(f"--{name}=maybe")
    assert "False; expected options: --NAME VALUE, and switches" in refused(f"--{name}", "False")


def test_depth_sets_shape_and_recipe():
    assert dataclasses.replace(parsed("--depth", "2"), depth=None) == parsed()
    assert parsed("--depth", "2", "--max_steps", "7", "--weight_decay", "0").weight_decay == 0
    assert parsed("--depth", "4", "--epochs", "2").max_steps is None
    cfg = parsed("--depth", "12")
    shape = (cfg.n_layer, cfg.d_model, cfg.n_head, cfg.head_dim, cfg.n_kv_head, cfg.d_ff)
    assert shape == (12, 768, 12, 64, 6, 2112)
    assert (cfg.seq_len, cfg.batch_size, cfg.max_steps) == (2048, 16, 13_500)
    for depth in range(1, 65):  # as many tokens for each weight, the same memory of weight decay
        cfg = parsed("--depth", str(depth))
        tokens = cfg.max_steps * cfg.batch_size * cfg.seq_len
        assert tokens == pytest.approx(2_048_000 * (depth / 2) ** 3, rel=0.01)
        assert cfg.learning_rate * cfg.weight_decay * cfg.max_steps == pytest.approx(1.5)
        assert memory.micro_batch_size(cfg, 8) >= 1
        assert (cfg.n_kv_head * 2 == cfg.n_head) == (cfg.n_head % 2 == 0)


@pytest.mark.parametrize("flags, world_size, expected", [
    (["--batch_size", "512", "--seq_len", "1024"], 3, 16),  # 11 micro-batches for 171 sequences
    (["--batch_size", "512", "--seq_len", "1024"], 4, 16),
    (["--batch_size", "8"], 3, 3),
    (["--batch_size", "8", "--micro_batch_size", "1"], 3, 1),
    (["--batch_size", "8", "--micro_batch_size", "4"], 3, 3),  # of at most 3 sequences
    (["--batch_size", "10", "--micro_batch_size", "4"], 2, 3),  # 3 + 2, not 4 + 1
    (["--batch_size", "10", "--micro_batch_size", "5"], 2, 5)])
def test_a_run_that_continues_has_a_micro_batch_for_any_ranks(flags, world_size, expected):
    assert memory.micro_batch_size(parsed(*flags), world_size, uneven=True) == expected
