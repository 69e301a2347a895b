"""Where the options come from, and what is refused before any work is done."""

import subprocess
import sys

import pytest
from conftest import ROOT

import config
from config import ConfigError


def parsed(*argv):
    return config.resolve(config.parse(list(argv)))


def refused(*argv) -> str:
    with pytest.raises(ConfigError) as error:
        config.micro_batch_size(parsed(*argv), world_size=1)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_defaults_then_preset_then_yaml_then_flags(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("max_steps: 77\nlog_interval: 7\nlearning_rate: 1e-4\n")
    assert parsed().max_steps == config.Config().max_steps
    assert parsed("--preset", "debug").max_steps == config.PRESETS["debug"]["max_steps"]
    cfg = parsed("--preset", "debug", "--config", str(file), "--log_interval", "3")
    assert (cfg.max_steps, cfg.log_interval, cfg.learning_rate) == (77, 3, 1e-4)
    assert cfg.precision == "fp32"  # from the preset alone


def test_dashes_and_underscores_are_the_same():
    assert parsed("--auto-resume").auto_resume and parsed("--auto_resume").auto_resume
    for form in ("--no_compile", "--no-compile"):
        assert parsed("--preset", "fast", form).compile is False
    assert parsed("--compile").compile is True and parsed().compile is None
    assert parsed("--no-qk-norm").qk_norm is False and parsed("--no_qk_norm").qk_norm is False
    assert parsed("--no-tensorboard").tensorboard is False


def test_the_written_configuration_is_read_back(tmp_path):
    cfg = parsed("--learning_rate", "3e-5", "--data", "a:0.7", "b:0.3", "--compile", "--seed", "0")
    config.write_yaml(cfg, tmp_path / "c.yaml", {"command": "train.py"})
    assert parsed("--config", str(tmp_path / "c.yaml")) == config.dataclasses.replace(
        cfg, config=str(tmp_path / "c.yaml")
    )


@pytest.mark.parametrize("preset", config.PRESETS)
def test_every_preset_and_size_is_valid(preset):
    for model in config.MODELS:
        cfg = parsed("--preset", preset, "--model", model)
        assert config.micro_batch_size(cfg, 1) >= 1


@pytest.mark.parametrize("flags, words", [
    (["--learning_rat", "1"], ["--learning_rat", "--learning_rate"]),
    (["--learning-rat=1"], ["--learning-rat", "--learning-rate"]),
    (["--max_steps", "many"], ["--max_steps", "many"]),
    (["--device", "tpu"], ["--device", "tpu", "cuda"]),
    (["--preset", "fst"], ["fst", "fast"]),
    (["--model", "gpt5"], ["gpt5", "gpt2-124m"]),
    (["--max_steps", "0"], ["max_steps", "at least 1"]),
    (["--d_model", "-64"], ["d_model", "at least 1"]),
    (["--n_head", "0"], ["n_head", "at least 1"]),
    (["--dropout", "1.5"], ["dropout", "1.5", "below 1"]),
    (["--learning_rate", "nan"], ["learning_rate"]),
    (["--d_model", "100", "--n_head", "3", "--n_kv_head", "3"], ["n_head", "100"]),
    (["--n_head", "4", "--n_kv_head", "3"], ["n_kv_head", "divisor of n_head 4"]),
    (["--head_dim", "7"], ["head_dim", "even"]),
    (["--warmup_steps", "99", "--max_steps", "9"], ["warmup_steps", "9"]),
    (["--min_learning_rate", "9"], ["min_learning_rate", "at most"]),
    (["--batch_size", "10", "--micro_batch_size", "4"], ["batch_size 10", "8 or 12"]),
    (["--batch_size", "2", "--micro_batch_size", "4"], ["batch_size 2", "nearest is 4"]),
    (["--num_workers", "-1"], ["num_workers"]),
    (["--resume", "x.pt", "--auto_resume"], ["--resume"]),
    (["--auto_resume", "--overwrite"], ["--overwrite"]),
    (["--seed", "99999999999999999999"], ["seed", "below"]),
])  # fmt: skip
def test_refused_with_what_was_given_and_what_was_expected(flags, words):
    message = refused(*flags)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("text, words", [
    ("learning_rat: 1", [":1", "learning_rate"]),
    ("seed: 1\nmax_steps: 5\nseed: 2", [":3", "seed", "twice"]),
    ("max_steps: 3.5", [":1", "max_steps", "3.5"]),
    ("seed: 1\n\tmax_steps: 5", [":2", "not YAML"]),
    ("- 1\n- 2", ["name: value"]),
    ("just text", ["name: value"]),
    ("data: {a: 1}", [":1", "data"]),
    ("compile: maybe", [":1", "compile"]),
    ("preset: debug", [":1", "preset", "command line"]),
    ("[1, 2]: 3", [":1"]),
])  # fmt: skip
def test_yaml_is_refused_with_key_and_line(tmp_path, text, words):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    message = refused("--config", str(file))
    assert all(word in message for word in ["c.yaml", *words]), message


def test_yaml_values_are_read_as_written(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("learning_rate: 1e-4\nout_dir: 007\ncompile: no\ntensorboard: off\n"
                    "monitor: off\ndata: [a:0.5, b:0.5]\nmicro_batch_size: null\n")  # fmt: skip
    cfg = parsed("--config", str(file))
    assert (cfg.learning_rate, cfg.out_dir, cfg.compile, cfg.tensorboard) == (
        1e-4, "007", False, False,
    )  # fmt: skip
    assert cfg.monitor == "off"  # the word, which YAML itself would read as False
    assert cfg.data == ["a:0.5", "b:0.5"] and cfg.micro_batch_size is None


def test_a_model_by_name_replaces_the_shape_in_a_file(tmp_path):
    config.write_yaml(parsed("--seed", "5"), tmp_path / "c.yaml", {})
    cfg = parsed("--config", str(tmp_path / "c.yaml"), "--model", "gpt2-124m", "--n_layer", "3")
    expected = config.MODELS["gpt2-124m"] | dict(n_layer=3, seed=5, head_dim=64)
    assert {name: getattr(cfg, name) for name in expected} == expected


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_every_size_runs_on_1_2_4_and_8_processes(world_size):
    for model in config.MODELS:
        cfg = parsed("--model", model)
        assert cfg.batch_size % (config.micro_batch_size(cfg, world_size) * world_size) == 0


def test_batch_that_does_not_divide_over_the_processes_names_the_nearest():
    with pytest.raises(ConfigError, match="8 processes.*8 or 16"):
        config.micro_batch_size(parsed("--batch_size", "12"), 8)


def test_usage_errors_are_one_line_and_exit_2():
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--learning_rat", "1"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "did you mean --learning_rate" in done.stderr


def test_help_names_every_option():
    text = " ".join(config.make_parser().format_help().split())
    for field in config.dataclasses.fields(config.Config):
        assert f"--{field.name}" in text and field.metadata["help"][:20] in text
