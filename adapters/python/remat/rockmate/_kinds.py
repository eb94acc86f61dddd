# SPDX-License-Identifier: Apache-2.0
"""Rockmate's ready-made choices of solvers and partitioners, and modules of configurations."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch

from .._errors import Error
from . import partitioned, solvers
from ._configs import Config, Settings, checked, generate_config, nearest
from ._modules import Rockmate


class PureRotor(Rockmate):
    """Blocks in a chain, each saved or computed again. Its method is remat's `rotor`. For arguments see `Rockmate`."""

    def __init__(self, model: torch.nn.Module, model_inputs: Any, budget: int | float | str | None = None, rotor_solve_with_python: bool = False,
                 **kwargs: Any):
        _refuse_solvers(type(self), kwargs)
        super().__init__(model, model_inputs, budget, top_solvers=[solvers.RK_rotor(force_python=rotor_solve_with_python)],
                         partitioners=[partitioned.PartitionerSequence()], **kwargs)


class PureCheckmate(Rockmate):
    """One integer program for the whole graph, for some hundred operations. Its method is remat's `checkmate`. For arguments see `Rockmate`."""

    def __init__(self, model: torch.nn.Module, model_inputs: Any, budget: int | float | str | None = None, **kwargs: Any):
        _refuse_solvers(type(self), kwargs)
        super().__init__(model, model_inputs, budget, top_solvers=[solvers.HILP()], partitioners=[], **kwargs)


class PureRockmate(Rockmate):
    """A chain of parts, each with several schedules, joined by dynamic programming. Its method is remat's `rockmate`. For arguments see `Rockmate`."""

    def __init__(self, model: torch.nn.Module, model_inputs: Any, budget: int | float | str | None = None, rotor_solve_with_python: bool = False,
                 **kwargs: Any):
        _refuse_solvers(type(self), kwargs)
        super().__init__(model, model_inputs, budget, top_solvers=[solvers.RK_rotor(force_python=rotor_solve_with_python)],
                         bottom_solvers=[solvers.HILP()], partitioners=[partitioned.PartitionerSequence()], **kwargs)


class Hiremate(Rockmate):
    """Parts of parts, joined by an integer program. Its methods are remat's `hiremate` and `rockmate`. For arguments see `Rockmate`.

    algorithms: of "hilp", "rotor" and "twremat"; partitioner_params: options of the partitioner `bottom_to_top`.
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
    """A model that also performs its optimizer's step, and whose weights need not fit on the device. Each backward ends with a step of all parameters;
    gradients are gone then.

    On a machine with an accelerator, steps run there: weights, gradients and optimizer states are in page-locked memory of the host, and come as they are
    needed. Elsewhere nothing can move; the step is planned with recomputation alone.
    budget: bytes of the device for activations, weights and gradients. Buffers, inputs, and weights below minor_offload_size with their gradients and
        states are not counted. remat's `budget` counts them: it gets this budget and their bytes.
    nlayers: Rockmate cuts the model by it; without effect.
    cpu_optim: the class of the optimizer; parameters step on the host, each while the backward goes on. None: gpu_optim steps them on the device after
        the backward. optim_kwargs: its options. The optimizer itself is `optimizer`, for schedulers.
    minor_offload_size: bytes, see budget. For the rest see `Rockmate`.
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
    """The module that a configuration describes: `config`, or that of the kind `config_type`. A configuration may also come fourth, as in Rockmate's README.

    Offloading (top solver hilp with offload=True) makes it step its optimizer, as `Offmate` does. For the rest see `Rockmate`.
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
