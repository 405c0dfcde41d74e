"""AdamW as BERT is trained with it, and its state as named tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from stepdown.pipeline.training.options import TrainingOptions


def make_optimizer(model: nn.Module, options: TrainingOptions) -> torch.optim.AdamW:
    """AdamW (betas 0.9, 0.999) with decay on matrices only, not on biases and LayerNorm (Devlin et al. 2018, A.2)."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [(name, p) for name, p in named if _decays(name)], "weight_decay": options.weight_decay},
        {"params": [(name, p) for name, p in named if not _decays(name)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.999), eps=1e-8, fused=True)


def _decays(name: str) -> bool:
    return not name.endswith(".bias") and "LayerNorm" not in name


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Sets it for every parameter."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of each parameter, as `quantity/parameter name`."""
    return {
        f"{quantity}/{name}": value
        for name, parameter in _named(optimizer)
        for quantity, value in optimizer.state[parameter].items()
    }


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of :func:`optimizer_tensors`.

    :raises KeyError: when the state of a parameter is missing.
    """
    quantities = {key.partition("/")[0] for key in tensors}
    for name, parameter in _named(optimizer):
        optimizer.state[parameter] = {quantity: tensors[f"{quantity}/{name}"].clone() for quantity in quantities}


def _named(optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    return [
        (name, parameter)
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    ]
