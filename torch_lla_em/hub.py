"""Posteriors on the Hugging Face Hub: ``pip install torch_lla_em[hub]``."""

from __future__ import annotations

from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from torch_lla_em.report import as_card

FILE = "posterior.safetensors"
_DOWNLOAD = "revision", "token", "cache_dir", "force_download", "local_files_only"


class OnHub:
    """Methods of ``LinearisedLaplace`` for the Hub, by huggingface_hub's ``ModelHubMixin``.

    A repository or folder holds the posterior as safetensors and a model card with its scores. The
    network is not in it: it has a repository of its own.
    """

    load: Any

    def save_pretrained(self, folder: str | PathLike[str], validation: Any = None) -> None:
        """Write the posterior and its model card to a folder, as ``push_to_hub`` uploads them.

        Args:
            folder (str): Name of the folder, which is created.
            validation (DataLoader, optional): Held-out data, whose scores the card then shows.

        Raises:
            ImportError: Without huggingface_hub and safetensors.

        Example:
            >>> la.save_pretrained("posterior", validation=loader)  # doctest: +SKIP
        """
        _mixin()(self, validation).save_pretrained(folder)

    def push_to_hub(self, repo_id: str, validation: Any = None, **options: Any) -> str:
        """Upload what ``save_pretrained`` writes to a repository, and return the commit's address.

        Args:
            repo_id (str): Name of the repository, "user/name".
            validation (DataLoader, optional): Held-out data, whose scores the card then shows.
            **options: Those of ``huggingface_hub.ModelHubMixin.push_to_hub``, such as ``private``,
                ``token`` and ``commit_message``.

        Raises:
            ImportError: Without huggingface_hub and safetensors.
        """
        options = {"commit_message": "Add a posterior by torch_lla_em", **options}
        return _mixin()(self, validation).push_to_hub(repo_id, **options)

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
        hub = {key: options.pop(key) for key in _DOWNLOAD if key in options}
        load = {"load": cls.load, "model": model, "options": options}
        return _mixin().from_pretrained(name, **hub, **load).la


@cache
def _mixin() -> Any:
    try:
        from huggingface_hub import ModelCard, ModelHubMixin, hf_hub_download
    except ImportError as error:
        raise ImportError(
            "The Hugging Face Hub needs huggingface_hub and safetensors: "
            "pip install torch_lla_em[hub]."
        ) from error

    class Posterior(
        ModelHubMixin,
        library_name="torch_lla_em",
        tags=["laplace", "uncertainty"],
        paper_url="https://arxiv.org/abs/2210.04994",
    ):
        def __init__(self, la: Any, validation: Any = None):
            self.la, self.validation = la, validation
            self._hub_mixin_config = {"likelihood": type(la.likelihood).__name__}

        def _save_pretrained(self, save_directory: Path) -> None:
            self.la.save(save_directory / FILE)

        @classmethod
        def _from_pretrained(
            cls, *, model_id: str, load: Any, model: nn.Module, options: Any, **hub: Any
        ) -> Posterior:
            folder = Path(model_id)
            path = folder / FILE if folder.is_dir() else hf_hub_download(model_id, FILE, **hub)
            return cls(load(path, model, **options))

        def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
            header = self._hub_mixin_info.model_card_data.to_yaml()
            return ModelCard(f"---\n{header}\n---\n\n{as_card(self.la, self.validation)}")

    return Posterior
