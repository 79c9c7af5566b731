"""Posteriors in a folder as the Hub holds them; nothing is sent."""

import shutil
import sys

import pytest
import tiny
import torch

from torch_lla_em import LinearisedLaplace

hub = pytest.importorskip("huggingface_hub")
pytest.importorskip("safetensors")


@pytest.fixture
def fitted():
    return tiny.fitted(em_steps=2)


def test_a_folder_holds_the_posterior_and_its_card(fitted, tmp_path):
    case, la = fitted
    folder = tmp_path / "posterior"
    la.save_pretrained(folder, [(case.x, case.y)])
    names = {path.name for path in folder.iterdir()}
    assert names == {"README.md", "posterior.safetensors"}
    again = LinearisedLaplace.from_pretrained(folder, case.model)
    assert type(again) is LinearisedLaplace
    assert torch.equal(again(case.x), la(case.x))
    card = hub.ModelCard.load(folder / "README.md")
    assert card.data.library_name == "torch_lla_em" and "laplace" in card.data.tags
    nll = -la.predict(case.x).log_prob(case.y).mean().item()
    assert "| NLL |" in card.text and f"| {nll:.4g} |" in card.text
    assert "30 validation examples" in card.text and "effective dimension" in card.text


def test_pushed_files_are_those_of_the_folder(fitted, tmp_path, monkeypatch):
    case, la = fitted
    sent = {}

    def create_repo(self, repo_id, **options):
        sent["private"] = options["private"]
        return hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def upload_folder(self, *, folder_path, **options):
        shutil.copytree(folder_path, tmp_path / "remote")
        return "https://huggingface.co/someone/posterior/commit/1"

    monkeypatch.setattr(hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(hub.HfApi, "upload_folder", upload_folder)
    assert la.push_to_hub("someone/posterior", private=True).endswith("commit/1")
    assert sent == {"private": True}
    assert "validation examples" not in (tmp_path / "remote/README.md").read_text()
    again = LinearisedLaplace.from_pretrained(tmp_path / "remote", case.model, seed=7)
    assert torch.equal(again(case.x), la(case.x)) and again.seed == 7


def test_a_repository_is_downloaded_as_asked(fitted, tmp_path, monkeypatch):
    case, la = fitted
    la.save_pretrained(tmp_path)
    asked = []

    def download(repo_id, filename, **options):
        asked.append((repo_id, filename, options["revision"]))
        return str(tmp_path / filename)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    again = LinearisedLaplace.from_pretrained("someone/posterior", case.model, revision="v1")
    assert asked[-1] == ("someone/posterior", "posterior.safetensors", "v1")
    assert torch.equal(again(case.x), la(case.x))


def test_a_missing_library_raises_with_the_command_to_install_it(fitted, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"torch_lla_em\[hub\]"):
        fitted[1].push_to_hub("someone/posterior")
