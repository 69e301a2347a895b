"""Adapters beside frozen weights, added rows of a vocabulary, and the defaults of fine-tuning."""

import json

import pytest
import torch
from conftest import column
from test_huggingface import FAMILIES, FINE, SMALL, relative, save_random
from transformers import Phi3Config

import config
import train
from config import Config
from data import load_data
from model import Transformer
from steady import huggingface, lora
from steady.parallel import Shards
from tools import generate as generation

LORA = ["--lora_rank", 4, "--learning_rate", 1e-2]


@pytest.fixture
def tune(run, corpus):
    """run with the corpus, no shape, and a base in the folder m."""
    return lambda *flags, **how: run("--data", corpus, *FINE, *flags, bare=True, **how)


def newest(folder):
    state, _, path = generation.read_state(folder)
    return state, path


def test_an_adapter_trains_resumes_and_becomes_a_model(tmp_path, tune, capsys):
    theirs = save_random(tmp_path / "m", FAMILIES["qwen2"]())
    told = tune("--init_from", "m", *LORA, "--out_dir", "r", "--save_interval", 10)
    assert "M trained), 2 layers" in told and told.count("adamw") == 1
    losses = column(tmp_path / "r", "train/loss")
    assert losses[20] < losses[1] - 0.2
    state, path = newest(tmp_path / "r")
    assert all(lora.is_adapter(name) for name in state["model"])
    print(losses, {k: v.shape for k, v in state["model"].items()})
