# SPDX-License-Identifier: Apache-2.0
"""Rockmate's classes with fixed solvers and partitioners, and modules made from configurations."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch

from .._errors import Error
from . import partitioned, solvers
from ._configs import Config, Settings, checked, generate_config, nearest
from ._modules import Rockmate


class PureRotor(Rockmate):
    """Treats the model as a chain of blocks and saves or recomputes each block. Uses remat's method `rotor`. For arguments see `Rockmate`."""

    def __init__(self, model: torch.nn.Module, model_inputs: Any, budget: int | float | str | None = None, rotor_solve_with_python: bool = False,
                 **kwargs: Any):
        _refuse_solvers(type(self), kwargs)
        super().__init__(model, model_inputs, budget, top_solvers=[solvers.RK_rotor(force_python=rotor_solve_with_python)],
                         partitioners=[partitioned.PartitionerSequence()], **kwargs)


class PureCheckmate(Rockmate):
    """Solves one integer program for the whole graph, of up to a few hundred operations. Uses remat's method `checkmate`. For arguments see `Rockmate`."""

    def __init__(self, model: torch.nn.Module, model_inputs: Any, budget: int | float | str | None = None, **kwargs: Any):
        _refuse_solvers(type(self), kwargs)
        super().__init__(model, model_inputs, budget, top_solvers=[solvers.HILP()], partitioners=[], **kwargs)


class PureRockmate(Rockmate):
    """Cuts the model into a chain of parts, finds several schedules per part, and joins them by dynamic programming.

    Uses remat's method `rockmate`. For arguments see `Rockmate`.
    """

    def __init__(self, model: torch.nn.Module, model_inputs: Any, budget: int | float | str | None = None, rotor_solve_with_python: bool = False,
                 **kwargs: Any):
        _refuse_solvers(type(self), kwargs)
        super().__init__(model, model_inputs, budget, top_solvers=[solvers.RK_rotor(force_python=rotor_solve_with_python)],
                         bottom_solvers=[solvers.HILP()], partitioners=[partitioned.PartitionerSequence()], **kwargs)


class Hiremate(Rockmate):
    """Cuts the model into parts recursively and joins their schedules by an integer program.

    Uses remat's methods `hiremate` and `rockmate`. For other arguments see `Rockmate`.
    algorithms: names out of "hilp", "rotor" and "twremat".
    partitioner_params: options of the partitioner `bottom_to_top`.
    """

    valid_algorithms = ("hilp", "rotor", "twremat")

    def __init__(self, model: torch.nn.Module, model_inputs: Any, budget: int | float | str | None = None, algorithms: Sequence[str] = ("hilp", "rotor"),
                 partitioner_params: Mapping[str, Any] = {}, **kwargs: Any):
        _refuse_solvers(type(self), kwargs)
        for name in algorithms:
            if name not in self.valid_algorithms:
                raise Error(f"algorithms: {name!r} is unknown; Hiremate has {', '.join(self.valid_algorithms)}")
        made = {"hilp": solvers.HILP, "rotor": solvers.RK_rotor, "twremat": solvers.TwRemat}
        super().__init__(model, model_inputs, budget, top_solvers=[made[name]() for name in algorithms], bottom_solvers=[made[name]() for name in algorithms],
                         partitioners=[partitioned.PartitionerBottomToTop(**{"can_use_rotor": "rotor" in algorithms, **partitioner_params})], **kwargs)


class Offmate(Rockmate):
    """A model that also performs the optimizer's step, and whose weights need not fit on the device.

    Each backward ends with a step of all parameters, which frees the gradients. On a machine with an accelerator, training steps run on the accelerator.
    Weights, gradients and optimizer states are in page-locked host memory and are fetched on demand. Without an accelerator nothing is offloaded, and the
    plan only recomputes.
    budget: bytes on the device for activations, weights and gradients. It leaves out buffers, inputs, and weights below minor_offload_size with their
        gradients and states. remat's `budget` counts them, so it is this budget plus their bytes.
    nlayers: number of layers by which Rockmate cuts the model; without effect in remat.
    cpu_optim: class of the optimizer. It steps each parameter on the host during the backward. None: gpu_optim steps the parameters on the device after
        the backward.
    optim_kwargs: options of the optimizer. The attribute `optimizer` is the optimizer, for learning-rate schedulers.
    minor_offload_size: bytes, see budget. For other arguments see `Rockmate`.
    """

    def __init__(self, model: torch.nn.Module, model_inputs: Any, budget: int | float | str | None = None, nlayers: int = 32,
                 algorithms: Sequence[str] = ("hilp",), partitioner_params: Mapping[str, Any] = {}, **kwargs: Any):
        _refuse_solvers(type(self), kwargs)
        if list(algorithms) != ["hilp"]:
            raise Error(f"algorithms: Offmate has hilp alone, got {list(algorithms)!r}")
        if nlayers > 1 << 16:
            raise Error(f"nlayers={nlayers}: Offmate takes the budget third, and nlayers by name")
        unused = [f"{name}={value!r}" for name, value, default in (("nlayers", nlayers, 32), ("partitioner_params", dict(partitioner_params), {}))
                  if value != default]
        super().__init__(model, model_inputs, budget, top_solvers=[solvers.HILP(offload=True)], bottom_solvers=[solvers.CheapSolver()],
                         partitioners=[partitioned.PartitionerRecognizeRepetitivePattern()], _unused=unused, **kwargs)


def _refuse_solvers(cls: type, kwargs: Mapping[str, Any]) -> None:
    for name in ("top_solvers", "bottom_solvers", "partitioners"):
        if name in kwargs:
            raise Error(f"{name}: {cls.__name__} chooses its own; Rockmate takes it")


def from_config(model: torch.nn.Module, model_inputs: Any, budget: int | float | str | None = None, config_type: str | Mapping[str, Any] = "hiremate",
                config: Mapping[str, Any] | None = None, **kwargs: Any) -> Rockmate:
    """Makes a module from a configuration.

    config: the configuration. Default: that of the kind `config_type`.
    config_type: a kind, see `generate_config`. It may also be the configuration, as in Rockmate's README.
    With offloading (top solver hilp with offload=True) the module steps its optimizer, as `Offmate` does. For other arguments see `Rockmate`.
    Raises Error naming an unknown key or kind.
    """
    if isinstance(config_type, Mapping):
        config = config_type
    complete = checked(generate_config(str(config_type)) if config is None else config)
    base = nearest(complete)
    top, bottom, parts = ([_setting(name, options, base[(*path, name)]) for name, options in part.items()]
                          for path, part in ((("solver", "top"), complete.solver.top), (("solver", "bottom"), complete.solver.bottom),
                                             (("partitioner",), complete.partitioner)))
    return Rockmate(model, model_inputs, budget, top_solvers=top, bottom_solvers=bottom, partitioners=parts or [partitioned.Partitioner()], **kwargs)


_BY_NAME: dict[str, type[Settings]] = {cls.name: cls for room in (solvers, partitioned) for cls in map(vars(room).get, room.__all__) if cls is not None}


def _setting(name: str, options: Config, base: Config) -> Settings:
    made = _BY_NAME[name](**options)
    made.base = base
    return made
