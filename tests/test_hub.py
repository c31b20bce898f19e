"""Finding a model: local folders, the pinned revision, the offline cache, and each failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from ouro_batch.errors import ModelError
from ouro_batch.model.hub import FILE_PATTERNS, PINNED_REVISIONS, Checkpoint, resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_snapshot(home: Path, model: str, commit: str, ref: str | None = "main") -> Path:
    """A cached snapshot as huggingface_hub lays it out under HF_HOME."""
    repository = home / "hub" / ("models--" + model.replace("/", "--"))
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    if ref is not None:
        (repository / "refs").mkdir()
        (repository / "refs" / ref).write_text(commit)
    return snapshot


def resolve_elsewhere(home: Path, model: str, revision: str | None, **environment: str) -> str:
    """Resolve in a fresh process: huggingface_hub reads its environment on import."""
    code = (
        "import sys\n"
        "from ouro_batch.errors import ModelError\n"
        "from ouro_batch.model.hub import resolve\n"
        "try:\n"
        "    found = resolve(sys.argv[1], sys.argv[2] or None)\n"
        "    print(found.folder, found.name, found.revision)\n"
        "except ModelError as error:\n"
        "    print('ModelError', error)\n"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    result = subprocess.run(
        [sys.executable, "-c", code, model, revision or ""],
        env=kept | {"HF_HOME": str(home)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.strip()


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict]:
    """Record what is asked of the hub; every download succeeds with COMMIT."""
    calls: list[dict] = []

    def snapshot_download(repo_id: str, **options) -> str:
        calls.append({"repo_id": repo_id, **options})
        folder = tmp_path / "snapshots" / (options["revision"] or COMMIT)
        folder.mkdir(parents=True, exist_ok=True)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_local_folder(tmp_path: Path):
    assert resolve(str(tmp_path)) == Checkpoint(tmp_path, str(tmp_path), None)


def test_local_folder_wins_over_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, downloads: list[dict]
):
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/model").folder == Path("org/model")
    assert downloads == []


def test_revision_of_a_local_folder_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match=r"local folder.*'main'.*leave --revision out"):
        resolve(str(tmp_path), "main")


def test_a_file_is_no_model(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ModelError, match=r"model\.safetensors is a file \(give the folder"):
        resolve(str(path))


@pytest.mark.parametrize("model", ["./gone", "/gone", "../gone", "~/gone", "a/b/c"])
def test_missing_folder(model: str, downloads: list[dict]):
    with pytest.raises(ModelError, match=r"no model folder.*check the path") as error:
        resolve(model)
    assert repr(model) in str(error.value)
    assert downloads == []


def test_empty_name(downloads: list[dict]):
    with pytest.raises(ModelError, match=r"no model is given.*give a folder"):
        resolve("")
    assert downloads == []


def test_only_needed_files_are_asked_for(downloads: list[dict]):
    resolve("org/model")
    (call,) = downloads
    assert call["allow_patterns"] == list(FILE_PATTERNS)
    files = [
        *("config.json", "model-00001-of-00002.safetensors", "pytorch_model.bin", "tokenizer.json"),
        *("modeling_ouro.py", "training_args.pt", "original/model.safetensors", "README.md"),
        *("chat_template.jinja", "model.safetensors.index.json", "pytorch_model.bin.index.json"),
    ]
    kept = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=call["allow_patterns"], ignore_patterns=call["ignore_patterns"]
    )
    assert set(kept) == {
        *("config.json", "model-00001-of-00002.safetensors", "tokenizer.json"),
        *("chat_template.jinja", "model.safetensors.index.json"),
    }


@pytest.mark.parametrize(
    ("model", "revision", "asked", "commit"),
    [
        ("ByteDance/Ouro-1.4B", None, *[PINNED_REVISIONS["ByteDance/Ouro-1.4B"]] * 2),
        ("ByteDance/Ouro-1.4B", "v2", "v2", "v2"),
        ("org/model", None, None, COMMIT),
        ("org/model", "v2", "v2", "v2"),
    ],
)
def test_revisions(downloads: list[dict], model: str, revision: str, asked: str, commit: str):
    checkpoint = resolve(model, revision)
    assert downloads[0]["revision"] == asked
    assert checkpoint.name == model
    assert checkpoint.revision == checkpoint.folder.name == commit


@pytest.mark.parametrize("ref", ["main", "v2"])
def test_offline_from_the_cache(tmp_path: Path, ref: str):
    snapshot = make_snapshot(tmp_path, "org/model", COMMIT, ref)
    revision = None if ref == "main" else ref
    found = resolve_elsewhere(tmp_path, "org/model", revision, HF_HUB_OFFLINE="1")
    assert found == f"{snapshot} org/model {COMMIT}"


def test_pinned_commit_offline(tmp_path: Path):
    model = "ByteDance/Ouro-1.4B"
    snapshot = make_snapshot(tmp_path, model, PINNED_REVISIONS[model], ref=None)
    found = resolve_elsewhere(tmp_path, model, None, HF_HUB_OFFLINE="1")
    assert found == f"{snapshot} {model} {PINNED_REVISIONS[model]}"


def test_cache_answers_when_the_network_is_down(tmp_path: Path):
    snapshot = make_snapshot(tmp_path, "org/model", COMMIT)
    unreachable = {"HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
    assert resolve_elsewhere(tmp_path, "org/model", None, **unreachable) == (
        f"{snapshot} org/model {COMMIT}"
    )
    message = resolve_elsewhere(tmp_path, "org/other", None, **unreachable)
    assert message.startswith("ModelError model org/other is no local folder")
    assert "check the name and the network" in message


def test_offline_and_not_in_the_cache(tmp_path: Path):
    message = resolve_elsewhere(tmp_path, "org/model", "v2", HF_HUB_OFFLINE="1")
    assert message.startswith("ModelError model org/model at revision v2")
    assert "HF_HUB_OFFLINE is set" in message


def hub_error(name: str) -> Exception:
    """An error of huggingface_hub, made without the HTTP response that its versions differ in."""
    kind = getattr(huggingface_hub.errors, name)
    error = kind.__new__(kind)
    error.args = (f"the hub says {name}\nand more",)
    return error


@pytest.mark.parametrize(
    ("error", "way_out"),
    [
        ("GatedRepoError", "accept the model's terms"),
        ("RepositoryNotFoundError", "check the name; a private repository needs"),
        ("RevisionNotFoundError", "give --revision a branch, tag or commit"),
        ("HFValidationError", "check the name"),
        ("LocalEntryNotFoundError", "check the name and the network"),
    ],
)
def test_hub_failures_say_what_to_do(monkeypatch: pytest.MonkeyPatch, error: str, way_out: str):
    def snapshot_download(repo_id: str, **options) -> str:
        raise hub_error(error)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ModelError) as raised:
        resolve("org/model", "v2")
    message = str(raised.value)
    assert "model org/model at revision v2" in message
    assert f"{error}: the hub says {error} (" in message
    assert way_out in message


def test_the_hub_library_is_imported_only_when_needed(tmp_path: Path):
    code = (
        "import sys; from ouro_batch.model.hub import resolve; resolve(sys.argv[1]);"
        "assert 'huggingface_hub' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
