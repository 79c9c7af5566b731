"""Posteriors on the Hugging Face Hub: ``pip install torch_lla_em[hub]``."""

from __future__ import annotations

from importlib import import_module
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from torch_lla_em.report import as_card

FILE, CARD = "posterior.safetensors", "README.md"
_DOWNLOAD = "revision", "token", "cache_dir", "force_download", "local_files_only"


class OnHub:
    """Methods of ``LinearisedLaplace`` for the Hub.

    A repository or folder holds the posterior as safetensors and a model card with its scores. The
    network is not in it: it has a repository of its own.
    """

    load: Any

    def save_pretrained(self: Any, folder: str | PathLike[str], validation: Any = None) -> None:
        """Write the posterior and its model card to a folder, as ``push_to_hub`` uploads them.

        Args:
            folder (str): Name of the folder, which is created.
            validation (DataLoader, optional): Held-out data, whose scores the card then shows.

        Raises:
            ImportError: Without safetensors.

        Example:
            >>> la.save_pretrained("posterior", validation=loader)  # doctest: +SKIP
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.save(folder / FILE)
        (folder / CARD).write_text(as_card(self, validation), encoding="utf-8")

    def push_to_hub(
        self,
        repo_id: str,
        validation: Any = None,
        *,
        private: bool | None = None,
        token: str | None = None,
        commit_message: str = "Add a posterior by torch_lla_em",
    ) -> str:
        """Upload what ``save_pretrained`` writes to a repository, and return the commit's address.

        Args:
            repo_id (str): Name of the repository, "user/name". It is created if it does not exist.
            validation (DataLoader, optional): Held-out data, whose scores the card then shows.
            private (bool, optional): Whether a new repository is private. Default None: as your
                account has it.
            token (str, optional): Access token. Default None: that of ``hf auth login``.
            commit_message (str): Message of the commit.

        Raises:
            ImportError: Without huggingface_hub and safetensors.
        """
        api = _hub().HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder, validation)
            address: str = api.upload_folder(
                repo_id=repo_id, folder_path=folder, commit_message=commit_message
            )
        return address

    @classmethod
    def from_pretrained(cls, name: str | PathLike[str], model: nn.Module, **options: Any) -> Any:
        """Return the posterior in a folder or a repository of the Hub, on its network.

        Args:
            name (str): Name of the folder or of the repository.
            model (nn.Module): The network, with the weights that the posterior was fitted to.
            **options: ``revision``, ``token``, ``cache_dir``, ``force_download`` and
                ``local_files_only`` are those of the Hub; others those of ``load``.

        Raises:
            ValueError: If the posterior belongs to another network.

        Example:
            >>> la = LinearisedLaplace.from_pretrained("user/name", model)  # doctest: +SKIP
        """
        download = {key: options.pop(key) for key in _DOWNLOAD if key in options}
        folder = Path(name)
        is_local = folder.is_dir()
        path = folder / FILE if is_local else _hub().hf_hub_download(str(name), FILE, **download)
        return cls.load(path, model, **options)


def _hub() -> Any:
    try:
        return import_module("huggingface_hub")
    except ImportError as error:
        raise ImportError(
            "The Hugging Face Hub needs huggingface_hub and safetensors: "
            "pip install torch_lla_em[hub]."
        ) from error
