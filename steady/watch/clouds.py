"""Where a cloud looks for TensorBoard files, and a link to that place in the run directory.

Without such a place, or with --tensorboard_dir, nothing here changes anything.
"""

import itertools
import json
import os
import sys
from pathlib import Path

ROOT = Path("/")  # another one in tests


def tensorboard_place() -> tuple[str, Path] | None:
    """(name of the cloud, the folder whose TensorBoard files it shows), or None.

    Sources: Azure ML sets AZUREML_TB_PATH; SageMaker writes its TensorBoardOutputConfig, if a job
    has one, to a file (smdebug's documentation of TENSORBOARD_CONFIG_FILE_PATH) and uploads from
    "LocalPath" only; OpenBayes shows /openbayes/home/tf_dir.
    """
    if os.environ.get("AZUREML_TB_PATH"):
        return "Azure ML", Path(os.environ["AZUREML_TB_PATH"])
    settings = Path(os.environ.get("TENSORBOARD_CONFIG_FILE_PATH") or
                    ROOT / "opt/ml/input/config/tensorboardoutputconfig.json")
    usual = ROOT / "opt/ml/output/tensorboard"
    if os.path.isfile(settings):  # False, too, for what may not be looked at
        try:
            local = Path(json.loads(settings.read_text())["LocalPath"] or usual)
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            local = usual
        return "SageMaker", local
    if os.path.isdir(ROOT / "openbayes/home"):
        return "OpenBayes", ROOT / "openbayes/home/tf_dir"
    return None


def tensorboard_folder(cfg, out_dir: Path) -> Path:
    """Where the event files of the run in out_dir go; made and linked to in a cloud's place.

    A run that continues goes on where it began. Says which place it is.
    """
    own = out_dir / "tensorboard"
    found = None if cfg.tensorboard_dir else tensorboard_place()
    if not found or own.is_dir() and not own.is_symlink():
        return Path(cfg.tensorboard_dir or own)
    cloud, place = found
    try:
        if not own.is_dir():
            own.unlink(missing_ok=True)  # a link to what is gone
            own.symlink_to(new_folder(place.absolute(), out_dir.resolve().name))
        if own.resolve().parent == place.resolve():  # not a link of the user's own
            print(f"TensorBoard files are in {own.resolve()}, where {cloud} shows them", flush=True)
    except (OSError, ValueError) as e:  # ValueError: a null character
        print(f"warning: no TensorBoard files in {place}, where {cloud} shows them: {e}",
              file=sys.stderr, flush=True)
    return own


def new_folder(place: Path, name: str) -> Path:
    """Another run of this name may have one already: then name-2, name-3, …"""
    place.mkdir(parents=True, exist_ok=True)
    names = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
    folder = next(place / each for each in names if not (place / each).exists())
    folder.mkdir()
    return folder
