"""TensorBoard files go where a cloud looks for them, and the run directory links to them."""

import json
from types import SimpleNamespace

import pytest

from steady.watch import clouds

DEFAULT = SimpleNamespace(tensorboard_dir=None)


@pytest.fixture
def root(tmp_path, monkeypatch):
    for name in ("AZUREML_TB_PATH", "TENSORBOARD_CONFIG_FILE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(clouds, "ROOT", tmp_path / "root")
    return tmp_path / "root"


def events(folder):
    return list(folder.glob("events.out.tfevents.*"))


def test_each_cloud_has_its_place(root, monkeypatch):
    assert clouds.tensorboard_place() is None
    (root / "openbayes/home").mkdir(parents=True)
    assert clouds.tensorboard_place() == ("OpenBayes", root / "openbayes/home/tf_dir")
    settings = root / "opt/ml/input/config/tensorboardoutputconfig.json"
    settings.parent.mkdir(parents=True)
    odd = "{}", "[]", "no JSON", "[" * 10**5, '{"LocalPath": 5}', '{"LocalPath": ["a"]}'
    for text in odd:
        settings.write_text(text)
        assert clouds.tensorboard_place() == ("SageMaker", root / "opt/ml/output/tensorboard")
    settings.write_text(json.dumps({"LocalPath": "/mine"}))
    assert str(clouds.tensorboard_place()[1]) == "/mine"
    monkeypatch.setenv("AZUREML_TB_PATH", "/azure")
    assert clouds.tensorboard_place()[0] == "Azure ML"


def test_files_go_to_the_place_and_are_linked(run, root, tmp_path):
    place = root / "openbayes/home/tf_dir"
    place.parent.mkdir(parents=True)
    told = run("--out_dir", "r", "--max_steps", 4, "--save_interval", 4)
    assert f"TensorBoard files are in {place / 'r'}, where OpenBayes shows them" in told
    assert (tmp_path / "r/tensorboard").resolve() == place / "r" and len(events(place / "r")) == 1

    for name in ("mine", "old.mine"):  # what others put there is left alone
        (place / "r" / f"events.out.tfevents.{name}").touch()
    run("--out_dir", "r", "--auto_resume", "--max_steps", 8)  # goes on in the same folder
    assert len(events(place / "r")) == 4

    old = events(place / "r")
    run("--out_dir", "r", "--overwrite", "--max_steps", 4)  # another run: another folder
    assert events(place / "r") == old and len(events(place / "r-2")) == 1
    assert (tmp_path / "r/tensorboard").resolve() == place / "r-2"


def test_a_folder_that_was_chosen_or_used_before_stays(root, tmp_path, capsys):
    (root / "openbayes/home").mkdir(parents=True)
    chosen = SimpleNamespace(tensorboard_dir=str(tmp_path / "mine"))
    assert clouds.tensorboard_folder(chosen, tmp_path / "r") == tmp_path / "mine"
    (tmp_path / "r/tensorboard").mkdir(parents=True)
    assert clouds.tensorboard_folder(DEFAULT, tmp_path / "r") == tmp_path / "r/tensorboard"
    assert not (tmp_path / "r/tensorboard").is_symlink()
    (tmp_path / "mine").mkdir()  # of a link of the user's own
    (tmp_path / "tensorboard").symlink_to(tmp_path / "mine")
    assert clouds.tensorboard_folder(DEFAULT, tmp_path).resolve() == tmp_path / "mine"
    assert capsys.readouterr().out == ""


def test_a_link_to_what_is_gone_is_made_anew(root, tmp_path):
    (root / "openbayes/home").mkdir(parents=True)
    (tmp_path / "r").mkdir()
    (tmp_path / "r/tensorboard").symlink_to(root / "gone")
    folder = clouds.tensorboard_folder(DEFAULT, tmp_path / "r")
    assert folder.resolve() == root / "openbayes/home/tf_dir/r"


@pytest.mark.parametrize("place", ["file", "x" * 300])  # no folder, no name that a disk can have
def test_a_place_that_cannot_be_written_costs_a_warning(root, tmp_path, monkeypatch, capsys, place):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AZUREML_TB_PATH", str(tmp_path / place))
    assert clouds.tensorboard_folder(DEFAULT, tmp_path) == tmp_path / "tensorboard"
    assert "no TensorBoard files in" in capsys.readouterr().err


def test_settings_of_nonsense_cost_a_warning_at_most(root, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TENSORBOARD_CONFIG_FILE_PATH", "x" * 5000)
    assert clouds.tensorboard_folder(DEFAULT, tmp_path) == tmp_path / "tensorboard"
    (tmp_path / "settings").write_text(json.dumps({"LocalPath": "/a\0b"}))
    monkeypatch.setenv("TENSORBOARD_CONFIG_FILE_PATH", str(tmp_path / "settings"))
    assert clouds.tensorboard_folder(DEFAULT, tmp_path) == tmp_path / "tensorboard"
    assert "no TensorBoard files in" in capsys.readouterr().err
