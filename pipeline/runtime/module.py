"""The compiled layer as a PyTorch module.

Dimension legend: `B` batch, `S` query position, `E` embedding.
"""

from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from stepdown.models.definition import EncoderLayer
from stepdown.models.errors import BuildError, InputError
from stepdown.models.reference import INITIAL_DEVIATION
from stepdown.pipeline.runtime.binding import Binding, load_build

MASK_DTYPES = frozenset(
    getattr(torch, name) for name in ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
)
"""Accepted dtypes of an attention mask. Additive masks, which are floating-point ones, are refused."""

_PLAIN = frozenset({Tensor, nn.Parameter})
_PLAIN_OR_NONE = _PLAIN | {type(None)}

# What the module holds about its build, which is found again from its path after copying and pickling.
_TRANSIENT = ("_binding", "_call", "_slots", "_places", "_last_rng")


class ParameterGroup(nn.Module):
    """A part of the layer that holds parameters (or such parts) under Hugging Face's names and computes nothing.

    The compiled layer runs as a whole: a hook on one of its parts would never be called and is refused.
    """

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={list(value.shape)}" for name, value in self.named_parameters(recurse=False))

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise InputError(
            "a hook on a part of a compiled layer was given; accepted are hooks on the whole layer, which runs as one."
        )

    register_forward_hook = _refuse_hook
    register_forward_pre_hook = _refuse_hook
    register_full_backward_hook = _refuse_hook
    register_full_backward_pre_hook = _refuse_hook
    register_backward_hook = _refuse_hook


class StepdownLayer(nn.Module):
    """A compiled encoder layer with the parameters of Hugging Face's ``BertLayer``: names, shapes and order.

    Weights start as N(0, ``deviation``) and biases as zero, layer normalization as one and zero. The module can be
    copied and pickled; it then finds its libraries by the path of the build. Parameters that the libraries read as one
    (the projections of Q, K and V) are views of one block of memory; where something gave them other memory, the next
    call moves them into a new block.

    Dropout is drawn in training mode only. Each such call takes a (seed, offset) from PyTorch's default CPU generator,
    if one of the definition's probabilities is not zero, so that ``torch.manual_seed`` repeats the masks.

    :param build: the build folder that ``compile_layer`` or ``stepdown compile`` wrote.
    :param deviation: the standard deviation of freshly drawn weights.
    :param generator: draws the weights; PyTorch's default one otherwise.
    :raises BuildError: when the folder holds no complete build for this machine.
    """

    _binding: Binding

    def __init__(
        self,
        build: str | Path,
        *,
        deviation: float = INITIAL_DEVIATION,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        binding = load_build(build)
        for name, shape in zip(binding.parameters, binding.shapes, strict=True):
            *path, leaf = name.split(".")
            group: nn.Module = self
            for part in path:
                if part not in group._modules:
                    group.add_module(part, ParameterGroup())
                group = group.get_submodule(part)
            group.register_parameter(leaf, nn.Parameter(torch.empty(shape, dtype=binding.dtype)))
        self._path = str(binding.path)
        self._key = binding.key
        self._bind(binding, binding.definition)
        binding.pack(self._gather())
        self.reset_parameters(deviation, generator)

    @torch.no_grad()
    def reset_parameters(self, deviation: float = INITIAL_DEVIATION, generator: torch.Generator | None = None) -> None:
        """Draw all parameters again, as for a new layer."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "LayerNorm" in name:
                parameter.fill_(1)
            else:
                parameter.normal_(0, deviation, generator=generator)

    def _bind(self, binding: Binding, definition: EncoderLayer) -> None:
        """Prepare what calls need; entries go to ``__dict__`` to stay clear of ``nn.Module``'s bookkeeping."""
        places, slots, seen = [], [], set()
        for name in binding.parameters:
            *path, leaf = name.split(".")
            group: nn.Module = self
            for depth, part in enumerate(path, 1):
                child = group.get_submodule(part)
                prefix = ".".join(path[:depth])
                if prefix not in seen:
                    seen.add(prefix)
                    places.append((group._modules, part, child, prefix))
                group = child
            slots.append((group._parameters, leaf, group))
        self.__dict__.update(
            _binding=binding, _call=binding.layer.call, _places=tuple(places), _slots=tuple(slots), _last_rng=None
        )
        self._set_definition(definition)

    def _set_definition(self, definition: EncoderLayer) -> None:
        values = [float(getattr(definition, field)) for field in self._binding.probabilities]
        self.__dict__.update(_definition=definition, _probabilities=values if any(values) else [])

    @property
    def definition(self) -> EncoderLayer:
        """The layer. Dropout probabilities may be changed: assign a definition that differs in nothing else.

        :raises InputError: on assigning another layer, or a probability that this build has no dropout for.
        """
        return self.__dict__["_definition"]

    @definition.setter
    def definition(self, definition: EncoderLayer) -> None:
        given, built = definition.to_dict(), self._binding.definition.to_dict()
        fixed = [name for name in built if name not in self._binding.probabilities and given[name] != built[name]]
        if fixed:
            raise InputError(
                f"a definition with {fixed[0]}={given[fixed[0]]!r} was given to a layer built with "
                f"{built[fixed[0]]!r}; accepted are changes of {_quoted(self._binding.probabilities)}."
            )
        self._set_definition(definition)

    @property
    def build(self) -> Path:
        """The folder that holds the layer's libraries."""
        return self._binding.path

    @property
    def last_rng(self) -> Tensor | None:
        """A copy of the (seed, offset) of the last call, int64 `[2]`; None when it drew no dropout masks."""
        rng = self.__dict__["_last_rng"]
        return None if rng is None else rng.clone()

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The layer's output `[B, S, E]`.

        :param x: `[B, S, E]` of the layer's dtype, on the CPU, with any strides.
        :param attention_mask: `[B, S]`, boolean or integer; keys are attended to where it is not zero. A query whose
            keys are all masked has an attention context of zero.
        :raises InputError: when the input, the mask or a parameter is not what the layer was compiled for.
        """
        if torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() or _forward_mode():
            raise InputError(
                'a compiled layer was called inside a transform of "torch.func", forward-mode differentiation or '
                '"torch.jit.trace"; accepted are eager calls, with gradients by "backward" or "torch.autograd.grad".'
            )
        own = self.__dict__
        parameters = self._gather()
        probabilities = own["_probabilities"] if self.training else []
        result = None
        if type(x) in _PLAIN and type(attention_mask) in _PLAIN_OR_NONE and _PLAIN.issuperset(map(type, parameters)):
            result = own["_call"](x, attention_mask, parameters, probabilities, False)
            if not result and self._binding.pack(parameters):
                result = own["_call"](x, attention_mask, parameters, probabilities, True)
        if not result:
            self._prepare(x, attention_mask, parameters)
            result = own["_call"](x, attention_mask, parameters, probabilities, True)
            if not result:
                raise InputError(
                    "tensors that changed during the call were given to a compiled layer; accepted are those that no "
                    "other thread changes meanwhile."
                )
        own["_last_rng"] = result[1] if probabilities else None
        return result[0]

    def _gather(self) -> list[Any]:
        """The parameters in the order of the libraries."""
        for modules, name, module, path in self.__dict__["_places"]:
            if modules.get(name) is not module:
                raise InputError(
                    f'"{path}" of a compiled layer was replaced by {type(modules.get(name)).__name__}; accepted are '
                    f"other values of its parameters, because the layer runs as one."
                )
        slots = self.__dict__["_slots"]
        try:
            # Asked anew: torch.export puts another dictionary in place and then the first one back.
            return [module._parameters[name] for _, name, module in slots]
        except KeyError:  # torch.nn.utils.parametrize computes it instead
            return [getattr(module, name, None) for _, name, module in slots]

    def _prepare(self, x: Tensor, mask: Tensor | None, parameters: list[Tensor]) -> None:
        """Say why a call was refused; if it was not, its batch and length are new, and are made known.

        :raises InputError: with what was given and what is accepted.
        """
        binding = self._binding
        if _unfit(x, binding.dtype):
            self._refuse("x", x, binding)
        shape = x.shape
        if len(shape) != 3 or shape[2] != binding.definition.embed or not shape[0] or not shape[1]:
            self._refuse_shape(shape, binding)
        batch, seq, _ = shape
        if (batch != binding.batch and binding.batch is not None) or (seq != binding.seq and binding.seq is not None):
            self._refuse_shape(shape, binding)
        if mask is not None:
            self._check_mask(mask, batch, seq)
        for name, parameter, expected in zip(binding.parameters, parameters, binding.shapes, strict=True):
            if _unfit(parameter, binding.dtype) or parameter.shape != expected:
                self._refuse(name, parameter, binding, expected)
        binding.prepare(batch, seq)

    def _check_mask(self, mask: Tensor, batch: int, seq: int) -> None:
        """Refuse a mask that the libraries could not read."""
        if not self._binding.takes_mask:
            raise InputError("attention_mask was given; accepted is None, because the layer was built without masks.")
        if type(mask) not in _PLAIN or mask.layout is not torch.strided:
            given = f"of type {_kind(mask)}"
        elif mask.dtype not in MASK_DTYPES:
            given = f"of dtype {_name(mask.dtype)}"
        elif not mask.is_cpu:
            given = f'on device "{mask.device}"'
        elif mask.shape != (batch, seq):
            given = f"of shape {list(mask.shape)}"
        else:
            return
        raise InputError(
            f"attention_mask {given} was given; accepted is a boolean or integer tensor [{batch}, {seq}] on the CPU, 1 "
            f"where keys are attended to."
        )

    @staticmethod
    def _refuse(name: str, value: object, binding: Binding, shape: torch.Size | None = None) -> NoReturn:
        """Say what is wrong with the type, dtype, device or shape of an input or parameter."""
        subject = name if name == "x" else f'parameter "{name}"'
        if not isinstance(value, Tensor) or type(value) not in _PLAIN or value.layout is not torch.strided:
            raise InputError(f"{subject} of type {_kind(value)} was given; accepted is a dense torch.Tensor.")
        if value.dtype is not binding.dtype:
            raise InputError(
                f"{subject} of dtype {_name(value.dtype)} was given; accepted is {_name(binding.dtype)}, for which the "
                f"layer was compiled."
            )
        if not value.is_cpu:
            raise InputError(
                f'{subject} on device "{value.device}" was given; accepted is "cpu", for which the layer was compiled.'
            )
        raise InputError(f"{subject} of shape {list(value.shape)} was given; accepted is {list(shape or ())}.")

    @staticmethod
    def _refuse_shape(shape: torch.Size, binding: Binding) -> NoReturn:
        """Say what is wrong with the shape of the input."""
        batch, seq, embed = binding.batch, binding.seq, binding.definition.embed
        accepted = f"[{batch or 'batch'}, {seq or 'seq'}, {embed}]"
        reason = ""
        if len(shape) == 3 and shape[2] == embed:
            if not shape[0] or not shape[1]:
                reason = " with sizes of at least 1"
            else:
                reason = ", as promised when the layer was compiled"
        raise InputError(f"x of shape {list(shape)} was given; accepted is {accepted}{reason}.")

    def extra_repr(self) -> str:
        definition, binding = self.definition, self._binding
        sizes = f"embed={definition.embed}, heads={definition.heads}, ffn={definition.ffn}"
        options = f"activation={definition.activation!r}, norm={definition.norm!r}, causal={definition.causal}"
        dropout = ", ".join(
            f"{field}={getattr(definition, field)}" for field in ("dropout", "attention_dropout", "activation_dropout")
        )
        built = f"dtype={_name(binding.dtype)!r}, batch={binding.batch}, seq={binding.seq}, target={binding.target!r}"
        return f"{sizes}, {options}, {dropout}, {built}"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _TRANSIENT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        binding = load_build(self._path)
        if binding.key != self._key:
            raise BuildError(
                f'"{self._path}" holds another build than the one that the pickled layer was made with; accepted is '
                f'the one with key "{self._key}".'
            )
        self._bind(binding, self.__dict__["_definition"])


def _forward_mode() -> bool:
    """Whether a forward-mode differentiation is in progress: its tangents would be lost without a word."""
    return forward_ad._current_level >= 0


def _unfit(value: Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor is of another kind than the layer was compiled for; its shape is another question."""
    plain = type(value) in _PLAIN and value.layout is torch.strided
    return not plain or value.dtype is not dtype or not value.is_cpu


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(value: object) -> str:
    if isinstance(value, Tensor) and type(value) in _PLAIN:
        return f"{type(value).__name__} of layout {_layout(value)}"
    return type(value).__name__


def _layout(value: Tensor) -> str:
    return str(value.layout).removeprefix("torch.")


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(f'"{name}"' for name in names)
