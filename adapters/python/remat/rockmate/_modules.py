# SPDX-License-Identifier: Apache-2.0
"""The class `Rockmate`: a module with Rockmate's interface around a model that `remat.wrap` has wrapped."""

from __future__ import annotations

import inspect
import math
import warnings
import weakref
from typing import Any, Iterable, Mapping, NamedTuple, Sequence

import torch

from .. import _core, _options
from .._errors import Error, OverBudget
from .._groups import Planner
from .._optimizer import optimizer
from .._session import Session
from .._states import state_bytes
from .._wrap import is_wrapped, of, unwrap, wrap
from .._wrap_options import Options
from . import partitioned, solvers
from ._configs import Config, Settings, checked, default_config, usual
from ._methods import Method, methods_of

_STATE = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")  #: attributes of a module that it shares with the model
_offmates: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Rockmate]] = weakref.WeakKeyDictionary()  # per model that is offloaded
_MINOR = int(default_config("hilp")["minor_offload_size"])


class Schedule(NamedTuple):
    """Peak and time of a plan, in the units of Rockmate's `op_sched`."""

    peak_mem: int  #: bytes of activations: without weights, inputs, buffers and gradients of weights
    time: tuple[float]  #: ms, of the whole step


class Rockmate(torch.nn.Module):
    """A model that trains within a budget, with Rockmate's interface. Outputs, gradients, buffers and random numbers equal those of the plain model.

    original_mod: the model, on any device. `remat.wrap` wraps it. It shares parameters, buffers and modules with this object.
    model_inputs, model_kwargs: inputs of a training step: a tensor, a sequence, or a dictionary by name.
    budget: bytes for activations, their gradients and workspaces, as a number or as text such as "2 GiB". It leaves out weights, their gradients, optimizer
        states and inputs. remat's `activation_budget` counts new gradients, so it is this budget plus the bytes of the gradients. Default: no limit.
    top_solvers, bottom_solvers, partitioners: objects of `remat.rockmate.solvers` and `remat.rockmate.partitioned`. They choose methods of remat and
        their options (docs/coming-from.md). The methods compete, and the plan with the least time is used. If no method finds a plan, remat's default
        method is tried, with a warning.
    solve_sched: if False, the constructor does not plan; call `solve_sched()` later.
    cpu_optim, gpu_optim, optim_kwargs, minor_offload_size: see `Offmate`.
    keep_outputs, dynamic_batch_dim: accepted, without effect: remat always keeps outputs and plans for every shape.
    rkgb_res, verbose, solve_recursive: without effect.

    One warning names all options without effect that are not at their defaults. Raises OverBudget if no plan is known to fit, Error naming an
    unknown option, Refused if the model cannot be captured.
    """

    original_mod: torch.nn.Module

    def __init__(self, original_mod: torch.nn.Module, model_inputs: Any, budget: int | float | str | None = None,
                 top_solvers: Sequence[Settings] | None = None, bottom_solvers: Sequence[Settings] | None = None,
                 partitioners: Sequence[Settings] | None = None, rkgb_res: Any = None, solve_sched: bool = True, verbose: bool = False,
                 model_kwargs: Mapping[str, Any] | None = None, cpu_optim: type[torch.optim.Optimizer] | None = torch.optim.Adam,
                 gpu_optim: type[torch.optim.Optimizer] | None = torch.optim.Adam, optim_kwargs: Mapping[str, Any] = {},
                 minor_offload_size: int = _MINOR, keep_outputs: bool = False, dynamic_batch_dim: int | None = None, solve_recursive: bool = True,
                 *, _unused: Sequence[str] = ()):
        super().__init__()
        if not isinstance(original_mod, torch.nn.Module):
            raise TypeError(f"{type(self).__name__} takes a torch.nn.Module, got {type(original_mod).__qualname__}")
        if top_solvers is None and bottom_solvers is None:
            top_solvers, bottom_solvers = [solvers.HILP()], [solvers.HILP()]
        self.top_solvers, self.bottom_solvers = list(top_solvers or ()), list(bottom_solvers or ())
        self.partitioners = [partitioned.PartitionerBottomToTop(can_use_rotor=False)] if partitioners is None else list(partitioners)
        self.budget, self.keep_outputs, self.dynamic_batch_dim = budget, keep_outputs, dynamic_batch_dim
        self.optimizer: torch.optim.Optimizer | None = None  #: set by offloading, see `Offmate`
        object.__setattr__(self, "original_mod", original_mod)  # not registered as a submodule, which would prefix the names of parameters
        self.training = original_mod.training
        for name in _STATE:
            self.__dict__[name] = original_mod.__dict__[name]
        self._sample = _inputs(original_mod, model_inputs, model_kwargs)
        config = checked({"solver": {"top": _by_name(self.top_solvers), "bottom": _by_name(self.bottom_solvers)}, "partitioner": _by_name(self.partitioners)})
        chosen = {(*path, s.name, key): value for path, settings in ((("solver", "top"), self.top_solvers), (("solver", "bottom"), self.bottom_solvers),
                                                                     (("partitioner",), self.partitioners))
                  for s in settings for key, value in s.chosen().items()}
        self._methods, used = methods_of(config, chosen)
        self._offload = any(options.get("offload") for options in config.solver.top.values())
        if original_mod in _offmates and _offmates[original_mod]() is not None:
            raise Error("the model has an Offmate, which steps its weights in each backward; delete it before you make another module of the model")
        unused = [*_unused]  # options that the warning names
        unused += [f"{'.'.join(path)}={value!r}" for path, value in chosen.items() if path not in used and not usual(path, value)]
        unused += [f"{name}={value!r}" for name, value, default in (("rkgb_res", rkgb_res, None), ("verbose", verbose, False),
                                                                   ("solve_recursive", solve_recursive, True)) if value != default]
        if self._offload:
            if cpu_optim is not None and gpu_optim not in (None, cpu_optim):
                unused.append(f"gpu_optim={gpu_optim!r}")
        else:
            unused += [f"{name}={value!r}" for name, value, default in (("cpu_optim", cpu_optim, torch.optim.Adam), ("gpu_optim", gpu_optim, torch.optim.Adam),
                       ("optim_kwargs", dict(optim_kwargs), {}), ("minor_offload_size", minor_offload_size, _MINOR)) if value != default]
        if unused:
            warnings.warn(f"remat.rockmate: these options have no effect in remat: {', '.join(unused)}", stacklevel=3)
        self._solved = False
        was_wrapped = is_wrapped(original_mod)
        try:
            if self._offload:
                self._begin_offloading(cpu_optim, gpu_optim, dict(optim_kwargs), minor_offload_size)
            if solve_sched:
                self.solve_sched()
            if self._offload:
                _offmates[original_mod] = weakref.ref(self)
        except BaseException:
            if not was_wrapped:
                unwrap(original_mod)
            raise

    # --- planning ------------------------------------------------------------------------------------------------------------

    def solve_sched(self, budget: int | float | str | None = None) -> bool:
        """Plans for `budget` (default: the budget of the constructor). Raises OverBudget if no plan is known to fit."""
        self.budget = self.budget if budget is None else budget
        self._plan(self._methods)
        return True

    def fast_solve(self) -> None:
        """Plans without a budget: the step recomputes nothing."""
        self.budget = None
        self._plan([Method("store_all")])

    def get_compiled_fct(self) -> None:
        """Does nothing: a plan of remat needs no compilation."""

    @property
    def op_sched(self) -> Schedule | None:
        """Peak and time of the plan; None before planning."""
        session = self._session
        if session is None or not session.plans:
            return None
        plan = session.plan
        return Schedule(plan["peak"] - session.memory()["held"] - _gradient_bytes(self.original_mod), (plan["seconds"] * 1e3,))

    @property
    def _session(self) -> Session | None:
        """The session of the model; None before planning, and after unpickling."""
        return of(self.original_mod) if self._solved and is_wrapped(self.original_mod) else None

    def _plan(self, methods: list[Method]) -> None:
        limits = self._limits()
        fitting: list[tuple[float, Method]] = []
        for method in methods:
            try:
                self._wrap(method, limits)
            except OverBudget:
                continue
            plan = of(self.original_mod).plan if self._trains() else None
            if plan is None or not plan.fallback:
                fitting.append((0.0 if plan is None else plan.seconds, method))
        if fitting:
            best = min(fitting, key=lambda x: x[0])[1]
            if best != fitting[-1][1] or len(fitting) < len(methods):
                self._wrap(best, limits)
        else:
            try:
                self._wrap(Method("auto", max(method.time_limit for method in methods)), limits)
            except OverBudget as e:
                raise self._in_rockmate_terms(e) from None
            warnings.warn(f"remat.rockmate: {' and '.join(method.solver for method in methods)} found no plan for a budget of {self.budget}; "
                          "remat's default method did, and is used", stacklevel=4)
        self._solved = True

    def _wrap(self, method: Method, limits: dict[str, Any]) -> None:
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        if self._trains():
            args, kwargs = self._sample
        planner = Planner(solver=method.solver, solver_options=method.options_for(None if self.budget is None else self._bytes()),
                          time_limit=method.time_limit, activation_budget=limits.get("activation_budget"))
        wrap(self.original_mod, args, kwargs, planner=planner, **{name: value for name, value in limits.items() if name != "activation_budget"})

    def _trains(self) -> bool:
        """True if a parameter or an input requires a gradient. Otherwise there is no step to plan."""
        args, kwargs = self._sample
        return any(t.requires_grad for t in (*self.original_mod.parameters(), *args, *kwargs.values()) if isinstance(t, torch.Tensor))

    def _limits(self) -> dict[str, Any]:
        """Options of `wrap` for the budget and the offloading."""
        if self._offload:
            return self._offloading | ({} if self.budget is None else {"budget": self._bytes() + self._exempt()})
        return {} if self.budget is None else {"activation_budget": self._bytes() + self._exempt()}

    def _bytes(self) -> int:
        return int(_core.parse_bytes(_options.size("budget", self.budget)))

    def _exempt(self) -> int:
        """Bytes that Rockmate's budget leaves out, but remat's budget counts."""
        model = self.original_mod
        if not self._offload:
            return _gradient_bytes(model)
        minor = sum(p.nbytes * (1 + p.requires_grad) for p in model.parameters() if p.nbytes < self._minor)
        inputs = [t for t in (*self._sample[0], *self._sample[1].values()) if isinstance(t, torch.Tensor)]
        trained = _gradient_bytes(model)
        states = self._state_bytes * sum(p.nbytes for p in model.parameters() if p.requires_grad and p.nbytes < self._minor) // max(1, trained)
        return minor + states + sum(t.nbytes for t in (*model.buffers(), *inputs))

    def _in_rockmate_terms(self, e: OverBudget) -> OverBudget:
        """A copy of `e` whose message also tells the smallest budget in Rockmate's terms."""
        if e.needed is None:
            return e
        left_out = self._exempt()
        if not self._offload:  # the figures of e include tensors that are held before the step
            model, (args, kwargs) = self.original_mod, self._sample
            left_out += sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *args, *kwargs.values()) if isinstance(t, torch.Tensor))
        smallest = math.ceil((e.needed - left_out) / 4096) * 4096
        return OverBudget(f"{e} These figures count {left_out} bytes that Rockmate's budget leaves out: as it counts, about {smallest} bytes do",
                          e.needed, e.bound, e.largest)

    # --- offloading ----------------------------------------------------------------------------------------------------------

    def _begin_offloading(self, cpu_optim: type[torch.optim.Optimizer] | None, gpu_optim: type[torch.optim.Optimizer] | None,
                          options: dict[str, Any], minor: int) -> None:
        """Makes the optimizer. From here on, each backward ends with its step."""
        cls = cpu_optim or gpu_optim
        if cls is None:
            raise Error("Offmate performs the optimizer's step: give cpu_optim or gpu_optim")
        _options.number("minor_offload_size", minor)
        self._minor, self._state_bytes = minor, 0
        model = self.original_mod
        where = next((p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")), None)
        if where is None and torch.accelerator.is_available():
            where = torch.accelerator.current_accelerator()
        self._offloading: dict[str, Any] = {} if where is None else {"device": where, "offload": "all"}
        if "fused" in inspect.signature(cls).parameters and not options.keys() & {"fused", "foreach"}:
            options["fused"] = False  # the default of the class on the host
        if where is None:
            self.optimizer = optimizer(model.parameters(), cls, step="overlap", **options)
            self._state_bytes = state_bytes(self.optimizer, model)
            self._offloading["optimizer"] = self._state_bytes
        else:
            wrap(model, **self._offloading)
            on_host = cpu_optim is not None
            self.optimizer = optimizer(model.parameters(), cls, model=model, step="overlap" if on_host else "after", where="host" if on_host else "device",
                                       **options)
        me = weakref.ref(self)  # a weak reference, so the model stops stepping when this module is gone
        torch.autograd.graph.register_multi_grad_hook([p for p in model.parameters() if p.requires_grad], lambda _: _step_at_the_end(me), mode="any")

    def _step(self) -> None:
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad()

    def restore_exec(self) -> None:
        """Frees the memory that is kept for the next step. Unlike Rockmate, parameters always stay in the model."""
        if self._session is not None:
            self._session.release()

    # --- as the model --------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the outputs of the model, in the model's own structure. (Rockmate returns a tuple in training.)"""
        if self._session is None:
            raise Error("there is no plan yet: call solve_sched() or fast_solve() first")
        return self.original_mod(*args, **kwargs)

    def train(self, mode: bool = True) -> Rockmate:
        self.training = mode
        self.original_mod.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.original_mod.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.original_mod.load_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:  # called by copy and pickle
        if self._offload:
            raise TypeError("an Offmate steps one optimizer for one model, and cannot be copied or pickled; save its state_dict(), or make another one "
                            "of a copy of the model")
        return self.__dict__.copy()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "original_mod" not in self.__dict__ or name.startswith("__"):
                raise
            return getattr(self.original_mod, name)


def _step_at_the_end(me: weakref.ref[Rockmate]) -> None:
    """Makes the running backward end with a step of the optimizer."""
    module = me()
    if module is not None:
        torch.autograd.Variable._execution_engine.queue_callback(module._step)


def _by_name(settings: Iterable[Settings]) -> dict[str, Config]:
    configs: dict[str, Config] = {}
    for s in settings:
        if not isinstance(s, Settings):
            raise TypeError(f"solvers and partitioners are those of remat.rockmate.solvers and remat.rockmate.partitioned, got {s!r}")
        if s.name in configs:
            raise Error(f"{type(s).__name__} is given twice in one list")
        configs[s.name] = s.config
    return configs


def _gradient_bytes(model: torch.nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters() if p.requires_grad)


def _inputs(model: torch.nn.Module, inputs: Any, kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a step, in the form that `wrap` expects."""
    if isinstance(inputs, Mapping):
        return (), {**inputs, **(kwargs or {})}
    return tuple(inputs) if isinstance(inputs, (list, tuple)) else (inputs,), dict(kwargs or {})
