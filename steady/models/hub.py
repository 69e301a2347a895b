"""Files of the Hugging Face hub."""

from pathlib import Path

from steady.options import ConfigError


def fetch_files(name: str, code: bool = False, weights: bool = True) -> Path:
    """A folder, or its download from the hub, with Python if `code`. Raises ConfigError."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    kinds = ["*.json", "*.model", "*.txt", "*.jinja", *(["*.py"] if code else []),
             *(["*.safetensors"] if weights else [])]
    try:
        folder = Path(snapshot_download(name, allow_patterns=kinds))
        if weights and not any(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=["pytorch_model*.bin"])
        return folder
    except Exception as e:  # offline, no such model, no permission: each raises its own class
        raise ConfigError(f"no folder or hub model called {name} ({reason(e)})") from None


def reason(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return ("it comes with code, which would run on this machine: read it, then pass "
                "--trust_remote_code")
    return (str(error).strip() or type(error).__name__).splitlines()[0]
