# SPDX-License-Identifier: Apache-2.0
"""The session of a wrapped model: how each of its calls is turned into a planned step."""

from __future__ import annotations

import atexit
import collections
import contextlib
import copy
import dataclasses
import functools
import itertools
import logging
import numbers
import sys
import threading
import traceback
import types
import weakref
from typing import Any, Callable, Iterator, Literal, Mapping, cast

import torch

from . import _core, _host, _options, _patches, _snapshot, _torch, _tree, _weights
from ._disk import Disk
from ._errors import Error, Refused
from ._gradients import Gradients
from ._report import Plan, Report
from ._snapshot import Snapshot
from ._sources import sources

SLOT = "_remat"  #: of the model's `__dict__`, where its session is
log = logging.getLogger("remat")
_making = threading.RLock()  #: while sessions are made


@dataclasses.dataclass(frozen=True)
class Options:
    """What `wrap` was told."""

    budget: int | float | str | None = None
    activation_budget: int | float | str | None = None
    solver: str = "auto"
    solver_options: Any = ()  # a mapping; pairs of texts once checked
    time_limit: float = 20.0
    first_limit: float = 1.0
    gap: float = 0.005
    seed: int = 0
    verify: int = 0
    on_new_shape: Literal["nearest", "plan", "plain", "error"] = "nearest"
    on_refuse: Literal["raise", "warn"] = "warn"
    follow: bool | None = None
    cache: Any = True
    offload: Literal["none", "activations", "optimizer", "all", "auto"] = "none"
    weights: Literal["paged", "planned"] = "paged"
    host_budget: int | float | str | None = None
    disk: Any = None
    disk_budget: Any = None
    graph: bool = False
    optimizer: int | float | str | None = None  # bytes of its states
    steps_on: Any = None  # the device of the steps of a model whose weights are on the host
    device: Any = None  # a roofline: parts for `_torch.Session`
    most: int = dataclasses.field(default=-1, compare=False)  # bytes that any budget comes to, see `on_host`; -1: no limit
    auto: bool = dataclasses.field(default=False, compare=False)  # offload was "auto", and is decided
    far: int = dataclasses.field(default=-1, compare=False)  # bytes of the host for activations of another device; -1: they stay there
    files: bool = dataclasses.field(default=False, compare=False)  # weights are in files of the disk

    def check(self) -> Options:
        """The same with sizes as text and folders as absolute paths. Raises Error, ValueError or TypeError naming the option that is out of range."""
        if self.budget is not None and self.activation_budget is not None:
            raise ValueError("give budget or activation_budget, not both")
        if str(self.on_refuse) == "error":  # as older releases call it
            return dataclasses.replace(self, on_refuse="raise").check()
        for name, allowed in (("on_new_shape", ("nearest", "plan", "plain", "error")), ("on_refuse", ("raise", "warn")),
                              ("offload", ("none", "activations", "optimizer", "all", "auto")), ("weights", ("paged", "planned"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if not isinstance(self.solver, str):
            raise TypeError(f"solver must be a name, got {self.solver!r}")
        solver_options = self.solver_options
        if not isinstance(solver_options, tuple):  # not checked yet
            options = _options.of_solver(solver_options)
            if options:
                _core.check_solver(self.solver_name(), options)
            solver_options = tuple(options.items())
        for name, kinds in (("graph", bool), ("follow", (bool, type(None)))):
            if not isinstance(getattr(self, name), kinds):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name, kind in (("time_limit", numbers.Real), ("first_limit", numbers.Real), ("gap", numbers.Real), ("seed", numbers.Integral), ("verify", numbers.Integral)):
            _options.number(name, getattr(self, name), kind)
        if self.seed >= 1 << 64:
            raise ValueError(f"seed must be less than 2^64, got {self.seed}")
        told: dict[str, Any] = {"solver_options": solver_options}
        for name, parse in (("budget", lambda text: _torch.check_budget(text, False)), ("activation_budget", lambda text: _torch.check_budget(text, True)),
                            ("host_budget", _core.parse_bytes), ("disk_budget", _core.parse_bytes), ("optimizer", _core.parse_bytes)):
            if getattr(self, name) is not None:
                told[name] = _options.size(name, getattr(self, name), parse)
        if self.host_budget is not None and _core.parse_bytes(told["host_budget"]) > (most := _torch.host_limit()):
            raise ValueError(f"host_budget={self.host_budget!r} is more than the {most} bytes that this process can take at most")
        if self.offload == "none" and (self.disk is not None or self.disk_budget is not None):
            raise ValueError('disk and disk_budget are for offload="activations", "optimizer", "all" or "auto"')
        if self.weights == "planned" and self.offload not in ("all", "auto"):
            raise ValueError(f'weights="planned" is for offload="all" or "auto", got offload="{self.offload}"')
        for name in ("disk", "cache"):
            if (value := getattr(self, name)) is not None and not (name == "cache" and isinstance(value, bool)):
                told[name] = _options.folder(name, value)
        if "disk" in told:
            _torch.check_disk(told["disk"], told.get("disk_budget", ""))
        return dataclasses.replace(self, **told)

    def solver_name(self) -> str:
        return "automatic" if self.solver == "auto" else self.solver

    def followed(self) -> bool:
        """Does the model's own code run in every step?"""
        return self.follow is not False and self.device is None

    def optimizer_bytes(self) -> int:
        return 0 if self.optimizer is None else _core.parse_bytes(str(self.optimizer))

    def host_bytes(self) -> int:
        return _core.parse_bytes(str(self.host_budget))

    def on_host(self, model: torch.nn.Module) -> Options:
        """The same for a model: with the limit of the host, and "auto" decided. Activations of an accelerator may go to the host.

        Raises ValueError if there is nowhere to go.
        """
        there: Any = next((p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")), None)
        accelerator = there is not None
        if self.steps_on is not None or (accelerator and self.offload == "all"):
            return self._on_host_for(model, there if self.steps_on is None else self.steps_on)
        if self.disk is None and self.offload not in ("none", "auto") and not (accelerator and self.offload == "activations"):
            raise ValueError(f'offload="{self.offload}" needs disk, a folder: what leaves the memory of the host goes to a disk')
        if self.offload == "none" and self.host_budget is None:
            return self
        free = _torch.host_free() * 4 // 5
        if accelerator:  # whose budgets are of its own memory
            far = -1 if self.disk is not None or self.offload == "none" else free if self.host_budget is None else self.host_bytes()
            return dataclasses.replace(self, offload="activations" if self.offload == "auto" else self.offload, auto=self.offload == "auto", far=far)
        held = sum(storage.nbytes() for storage, _ in _weights.storages(model) if storage.device.type == "cpu")
        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        most = held + free if self.host_budget is None else self.host_bytes()
        offload = self.offload
        if offload == "auto":
            offload = "none" if self.disk is None else "activations" if held + 3 * trained <= most // 2 else "all"
        return dataclasses.replace(self, offload=offload, auto=self.offload == "auto", most=most)

    def _on_host_for(self, model: torch.nn.Module, device: torch.device) -> Options:
        """The same for steps on `device` with weights of the host."""
        if self.offload != "all":
            raise ValueError(f'device is where steps of a model run whose weights are on the host: it needs offload="all", got "{self.offload}"')
        for name in ("graph", "verify"):
            if getattr(self, name):
                raise ValueError(f"{name} needs weights that stay on the device")
        weights = sum(storage.nbytes() for storage, _ in _weights.storages(model))
        gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        most = self.host_bytes() if self.host_budget is not None else weights + _torch.host_free() * 4 // 5
        if self.disk is None:
            if most < weights:
                raise ValueError(f"host_budget={self.host_budget!r} is less than the {weights} bytes of the weights; with disk, they may be in files")
            return dataclasses.replace(self, steps_on=device, far=most - weights)
        if most < gradients:
            raise ValueError(f"host_budget={self.host_budget!r} is less than the {gradients} bytes of the gradients, which stay in memory of the host")
        files = most < weights + gradients
        room = -1 if files or most - weights - gradients < weights else most - weights
        return dataclasses.replace(self, steps_on=device, far=room, files=files)

    def spill(self) -> tuple[str | None, str]:
        """The folder that activations may go to, and the bytes that may be taken there, empty for all."""
        spills = self.offload in ("activations", "all") and (self.steps_on is None or self.far < 0)
        return self.disk if spills else None, self.disk_budget or ""

    def folder(self) -> str | None:
        """Where plans are kept: None for the usual place, empty for nowhere."""
        return None if self.cache is True else self.cache or ""

    def limit(self) -> tuple[str, bool]:
        """The budget as text, empty for none, and whether it is for activations only."""
        return str(self.budget or self.activation_budget or ""), self.activation_budget is not None


class Note:
    """What a call left beside its tensors. Plans keep it, and so it must not lead to the model."""

    __slots__ = ("form",)

    def __init__(self) -> None:
        self.form: Any = None


class Attempt:
    """How a capture goes."""

    __slots__ = ("where", "changed", "before", "raised")

    def __init__(self) -> None:
        self.where: str | None = None
        self.changed: list[str] = []
        self.before: Any = None
        self.raised: BaseException | None = None


class _Step:
    """The forward of one step, for the planner: called with its own tensors it is the step itself, which happens once; with others it
    is run again beside the step, and leaves no trace."""

    __slots__ = ("_source", "_plain", "_args", "_kwargs", "_form", "_strict", "_again", "_before", "_result", "inputs", "text", "where", "raised")

    def __init__(self, source: Source, plain: Any, args: tuple[Any, ...], kwargs: dict[Any, Any], options: Options):
        self._source, self._plain = source, plain
        self._args: Any = args
        self._kwargs: Any = kwargs
        self._strict = options.on_refuse == "raise"
        self._again = options.verify > 0 or options.steps_on is not None  # it may run once more, from its beginning
        self._before: Snapshot | None = None
        self._result: Any = None
        self._form: Any = None
        self.where: str | None = None
        self.raised = False
        try:
            self.inputs, self._form, self.text = _tree.flatten((args, kwargs), "arguments", values=False)
        except Refused:  # something that cannot be built again with other tensors
            self.inputs, self.text = _tree.tensors_in((args, kwargs)), "opaque"

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._plain is not None and all(a is b for a, b in zip(tensors, self.inputs)):
            return self._run()
        return self._run_again(tensors)

    def _run(self) -> list[torch.Tensor]:
        plain, args, kwargs = self._plain, self._args, self._kwargs
        self._plain = self._args = self._kwargs = None  # a graph may hold this, and the model that graph
        model = self._source.model()
        if self._again or (self._strict and _torch.capturing()):
            self._before = Snapshot(model)
        try:
            with _patches.recomputed():
                self._result = plain(*args, **kwargs)
        except BaseException as e:
            self.where, self.raised = _line(e), True
            raise
        if not (self._again or self._strict):
            self._before = None
        return _tree.tensors_in(self._result)

    def _run_again(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._form is None:
            raise Error("a forward whose arguments cannot be copied cannot run once more")
        now = Snapshot(self._source.model())
        try:
            self.undo()
            args, kwargs = _tree.unflatten(self._form, iter(tensors))
            return _tree.tensors_in(self._source.plain()(*args, **kwargs))
        finally:
            now.restore()

    def undo(self) -> None:
        """Puts attributes back as they were before the step, if that is known."""
        if self._before is not None:
            self._before.restore()

    def take(self) -> Any:
        """What the forward returned."""
        result, self._result = self._result, None
        return result


def _refuse_unplanned(inputs: list[torch.Tensor]) -> None:
    """Raises Refused if nothing is planned here and now."""
    for t in inputs:
        if t.layout is not torch.strided or t.is_quantized or t.is_nested:
            raise Refused("an argument is a tensor that is sparse, nested or quantized")
        if type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise Refused(f"an argument is a {type(t).__module__}.{type(t).__qualname__}, which is no plain tensor")
    if torch.is_anomaly_enabled():
        raise Refused("anomaly detection is on")
    if torch.autograd.forward_ad._current_level >= 0:
        raise Refused("forward-mode AD is on")
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        raise Refused("hooks around the call take the tensors that the backward needs (a checkpoint, save_on_cpu)",
                      advice="leave them out around a wrapped module: the planner decides what is kept")
    if torch._C._len_torch_dispatch_stack() > 0:
        raise Refused("a dispatch mode is active")
    _refuse_transforms()


def _members(model: torch.nn.Module, attributes: bool) -> list[tuple[Any, ...]]:
    """Per dict of parameters, buffers and modules, and of attributes and hooks: itself, and what it holds."""
    names = ("_parameters", "_buffers", "_modules", *(_snapshot.HOOKS if attributes else ()))
    held = [part.__dict__.get(name) for part in model.modules() for name in names]
    held += [part.__dict__ for part in model.modules() if attributes]
    return [(d, *itertools.chain.from_iterable(d.items())) for d in held if isinstance(d, dict)]


class Source:
    """The model as the planner sees it."""

    def __init__(self, model: torch.nn.Module, session: Session):
        self._model = weakref.ref(model)
        self._session = weakref.ref(session)

    def model(self) -> torch.nn.Module:
        model = self._model()
        if model is None:
            raise ReferenceError("the wrapped model is gone")
        return model

    def plain(self) -> Any:
        """The forward of the model as it was."""
        session, model = self._session(), self.model()
        return types.MethodType(type(model).forward, model) if session is None else session._plain(model)

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.model().named_parameters(remove_duplicate=False))

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.model().named_buffers(remove_duplicate=False))

    def signature(self) -> str:
        model, session = self.model(), self._session()
        followed = session is not None and session._options.followed()  # calls of the forward are compared
        if session is not None and session._source is self:
            session._members = _members(model, not followed)
            if not followed:
                session._tell_hooks(model)
            if session._gradients is not None and session._open:
                session._gradients.attach(model)  # what is trained since
        return "" if followed else _snapshot.settings(model)

    def changed(self) -> bool:
        """May anything be other than it was when `signature` was last asked for?"""
        session = self._session()
        return session is None or session._source is not self or not _torch.same_dicts(session._members)


class Session:
    """Trains one model by plans; `remat.of(model)` gives it."""

    def __init__(self, model: torch.nn.Module, original: Any, options: Options):
        self._original = original  # what `forward` was in the model's `__dict__`, or None
        self._options = options
        self._open = True
        self._paused: collections.Counter[int] = collections.Counter()  # by thread
        self._refused: set[Any] = set()
        self._unplanned: collections.Counter[Any] = collections.Counter()  # by kind of call: so often in a row
        self._warned: set[str] = set()
        self._looked = False  # for compiled modules
        self._source = Source(model, self)
        self._members: list[tuple[Any, ...]] = []
        self._made: _torch.Session | None = None
        self._weights: Disk | None = None  # where they are, unless in memory
        self._gradients: Gradients | None = None  # what puts them into files
        _sessions.add(self)

    @property
    def _run(self) -> _torch.Session:
        if self._made is None:  # not with the model: a copy has no parameters yet when its session is copied
            with _making:
                if self._made is None:
                    self._made = self._make()
        return self._made

    def _make(self) -> _torch.Session:
        if not self._open:
            raise Error("this session is closed: call remat.wrap again")
        o, model = self._options, self._source.model()
        self._place_weights(model)
        paged = o.offload == "all" and o.steps_on is None
        self._source = Source(model, self)  # one that may still have steps in flight keeps its own
        return _torch.Session(type(model).__name__, self._source, *o.limit(),
                              o.solver_name(), dict(o.solver_options), o.time_limit, o.gap, o.seed, o.verify,
                              o.on_new_shape, o.folder(), _progress, o.device, *o.spill(),
                              paged, paged and o.weights == "planned", o.most, o.far, o.graph,
                              "" if o.steps_on is None else str(o.steps_on), o.followed(), o.on_refuse == "raise", o.optimizer_bytes(),
                              o.first_limit)

    def _place_weights(self, model: torch.nn.Module) -> None:
        """Moves weights to where the options want them, and sees to it that gradients go there."""
        o = self._options
        there = o.steps_on is not None
        if there and self._open:
            _host.place(model, o.steps_on, pinned=not o.files)
        wanted = o.disk if o.offload == "all" and self._open and (o.files or not there) else None
        if self._weights is not None and (wanted is None or self._weights.options != (wanted, o.disk_budget)):
            _weights.bring_back(model, self._weights)
            self._weights = None
            if self._gradients is not None:
                self._gradients.detach()
                self._gradients = None
        if wanted is not None:
            if self._weights is None:
                self._weights = Disk(wanted, o.disk_budget)
                self._gradients = None if there else Gradients(Disk(wanted, o.disk_budget))
            if self._gradients is not None:
                self._gradients.attach(model)
            if _weights.move(model, self._weights):
                _torch.meter_reset()  # of the peak with weights in memory

    # --- calls ---------------------------------------------------------------------------------------------------------------

    def _plain(self, model: torch.nn.Module) -> Any:
        """The forward of the model as it was, where its steps run."""
        plain = self._original if self._original is not None else types.MethodType(type(model).forward, model)
        there = self._options.steps_on
        return plain if there is None or not self._open else functools.partial(_host.run_plain, plain, there)

    def _call(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
        plain = self._plain(model)
        plans = torch.is_grad_enabled() and self._open and not self._paused[threading.get_ident()]
        if not plans or _torch.capturing() or torch._C._is_tracing() or torch.compiler.is_compiling():
            return plain(*args, **kwargs)
        if self._options.followed():
            return self._follow(model, plain, args, kwargs)
        key = None
        try:
            inputs, form, text = _tree.flatten((args, kwargs), "arguments")
            if self._options.steps_on is not None:
                inputs = _host.to_device(inputs, self._options.steps_on)
            key = (text, tuple((t.shape, t.dtype) for t in inputs))
            if key in self._refused:
                return plain(*args, **kwargs)
            _refuse_transforms()
            result = self._step(model, plain, inputs, form, text)
        except Refused as e:
            if self._options.on_refuse == "raise":
                raise
            self._refused.add(key)
            log.warning("this call is not planned: %s", e)
            return plain(*args, **kwargs)
        return result

    def _follow(self, model: torch.nn.Module, plain: Any, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
        """A step in which the model's own code runs."""
        if self._options.steps_on is not None:
            args, kwargs = _host.all_to_device((args, kwargs), self._options.steps_on)
        step = _Step(self._source, plain, args, kwargs, self._options)
        try:
            _refuse_unplanned(step.inputs)
            if not self._looked:
                _refuse_parts(model)
                self._looked = True
        except Refused as why:
            if self._options.on_refuse == "raise":
                raise
            self._warn_unplanned(why)
            return plain(*args, **kwargs)
        kind = step.text, tuple((t.shape, t.dtype) for t in step.inputs)
        tries = self._unplanned[kind]
        if tries & (tries + 1) == 0:  # ever more seldom
            try:
                self._run.forward(step, step.text, step.inputs, None)
                del self._unplanned[kind]
                return step.take()
            except Refused as why:
                step.undo()
                why.source = step.where
                if self._options.on_refuse == "raise" or self._options.steps_on is None:
                    raise
                self._warn_unplanned(why)
            except Exception:
                if not step.raised:  # by the module, which has done all that eager mode does
                    step.undo()
                raise
        self._unplanned[kind] += 1
        return plain(*args, **kwargs)

    def _warn_unplanned(self, why: Refused) -> None:
        if str(why) not in self._warned:
            self._warned.add(str(why))
            log.warning("this call is not planned: %s", why)

    def _step(self, model: torch.nn.Module, plain: Any, inputs: list[torch.Tensor], form: Any, text: str) -> Any:
        note, attempt = Note(), Attempt()
        before = None
        for _ in range(2):
            attempt.raised = None
            try:
                with _without_anomalies():
                    outputs, used = self._run.forward(_forward(self._source, plain, form, text, note, attempt), text, inputs, note)
            except Refused as e:
                e.source = attempt.where
                self._undo(before or attempt.before)
                raise
            except _Changed as e:  # a first call may fill in what it computes once; what changes again changes in every step
                before = before or e.before
                continue
            except Exception as e:
                self._undo(before or attempt.before)
                if isinstance(e, Error) or (attempt.raised is None and before is None):
                    raise
                args, kwargs = _tree.unflatten(form, iter(inputs))
                result = plain(*args, **kwargs)  # raises the same, after what it does until then
                refusal = f"the forward raises {type(e).__name__} when it is captured: {e}"
                if self._options.on_refuse == "raise" and before is None:  # else it is a first call, that computes what it keeps
                    raise Refused(refusal, source=attempt.where) from e
                log.warning("this call is not planned: %s", refusal)
                return result
            return _tree.unflatten(used.form, iter(outputs))
        self._undo(before)
        weights = all(isinstance(functools.reduce(lambda held, part: getattr(held, part, None), name.split("."), cast(Any, model)), torch.Tensor)
                      for name in attempt.changed)
        raise Refused(f"the forward changes {', '.join(attempt.changed)}, which no planned step would do", source=attempt.where,
                      advice="compute weights from others by torch.nn.utils.parametrize (parametrizations.weight_norm, spectral_norm), end pruning by "
                             "torch.nn.utils.prune.remove, or keep it in a buffer" if weights else
                             "count in the training loop or in a hook of the model, or keep it in a buffer")

    def _undo(self, before: Snapshot | None) -> None:
        """Puts back what a capture has changed."""
        if before is not None:
            before.restore()

    def _prepare(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> None:
        inputs, form, text = _tree.flatten((_options.arguments(args), dict(kwargs or {})), "arguments")
        if self._options.steps_on is not None:
            inputs = _host.to_device(inputs, self._options.steps_on)
        _refuse_transforms()
        note = Note()
        with torch.enable_grad(), _without_anomalies(), _shadows(model, inputs) if self._options.device else contextlib.nullcontext(inputs) as inputs:
            self._run.prepare(_forward(self._source, self._plain(model), form, text, note, Attempt()), text, inputs, note)

    def _tell_hooks(self, model: torch.nn.Module) -> None:
        hooked = _snapshot.hooked(model)
        if hooked and hooked not in self._warned:
            self._warned.add(hooked)
            log.warning("hooks of modules inside the model are called when a step is captured, not in planned steps: %s", hooked)

    # --- for the user --------------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan used last."""
        return Plan.of(self._run.plan(), sources(self._source.model()))

    @property
    def optimizer_bytes(self) -> int:
        """What the budget counts for states of the optimizer."""
        return self._options.optimizer_bytes()

    @property
    def plans(self) -> list[Plan]:
        """All plans that are kept."""
        return [Plan.of(told) for told in self._run.plans()]

    def report(self, *, time_limit: float = 10.0, points: int = 12) -> Report:
        """A table of what the plan used last takes; `report().save("report.html")` writes a page.

        time_limit, points: of the page, see `Plan.report`.
        Raises Error before the first.
        """
        return Report(self._run.report(), self.plan, "", time_limit, points)

    def memory(self) -> dict[str, int]:
        """Bytes: `budget`, `peak` (measured since `reset_peak`, or since weights went to files, on the device of the model, and `host`: on the host), `planned`,
        `arena`, `held`; `disk`, reserved there for activations,
        and `to_disk`, `from_disk`, copied in each step; `weights` and `gradients`, reserved there for these; `fetched`, of weights in each
        step by its plan. What a plan decides, the budget too, is 0 before the first."""
        return {**self._run.memory(), "weights": 0 if self._weights is None else self._weights.reserved,
                "gradients": 0 if self._gradients is None else self._gradients.disk.reserved}

    def reset_peak(self) -> None:
        """Measures the peak anew from here on."""
        self._run.reset_peak()

    def set_budget(self, budget: int | float | str | None = None, *,
                   activation_budget: int | float | str | None = None) -> None:
        """Plans for another budget from the next step on.

        Raises Error or ValueError naming a budget that is none.
        """
        options = dataclasses.replace(self._options, budget=budget, activation_budget=activation_budget).check()
        self._set_options(options)

    def _set_options(self, options: Options) -> None:
        old, self._options = self._options, options
        if self._open and old.steps_on is not None and options.steps_on is None:
            _host.leave(self._source.model())
        if dataclasses.replace(options, budget=old.budget, activation_budget=old.activation_budget) != old:
            self._made = None
        elif self._made is not None and options.limit() != old.limit():
            self._made.set_budget(*options.limit())
        self._open = True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which the model runs as it is, when it is called by this thread."""
        self._paused[threading.get_ident()] += 1
        try:
            yield
        finally:
            self._paused[threading.get_ident()] -= 1

    def invalidate(self) -> None:
        """Forgets all plans, for a model that has changed in a way that cannot be seen from outside."""
        self._refused.clear()
        if self._made is not None:
            self._made.invalidate()

    def release(self) -> None:
        """Gives back the memory that is kept for the next step. Plans stay."""
        if self._made is not None:
            self._made.release()

    def close(self) -> None:
        """Ends planning; the model stays as it is. `unwrap` also removes what `wrap` put into it."""
        if self._open and self._options.steps_on is not None:
            _host.leave(self._source.model())
        self._open = False
        self._made = None

    def __repr__(self) -> str:
        return f"<remat.Session budget={self._options.limit()[0]!r}{'' if self._open else ' closed'}>"

    def __deepcopy__(self, memo: dict[Any, Any]) -> Session:
        model = self._source.model()
        if id(model) not in memo:
            raise TypeError("a session is copied with its model only")
        return Session(memo[id(model)], copy.deepcopy(self._original, memo), self._options)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a pickled model is the plain one: plans and memory belong to this process


@contextlib.contextmanager
def _shadows(model: torch.nn.Module, inputs: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of the host without memory, in the place of those of the model and its inputs that are on meta."""
    places: list[tuple[dict[str, Any], str]] = [(store, name) for m in model.modules() for store in (m._parameters, m._buffers)
              for name, t in store.items() if t is not None and t.is_meta]
    originals = [store[name] for store, name in places]
    distinct: dict[int, Any] = {id(t): t for t in originals + [t for t in inputs if t.is_meta]}
    shadows = dict(zip(distinct, _torch.without_memory(list(distinct.values()))))
    for key, t in distinct.items():
        if isinstance(t, torch.nn.Parameter):
            shadows[key] = torch.nn.Parameter(shadows[key], t.requires_grad)
        else:
            shadows[key].requires_grad_(t.requires_grad)
    for (store, name), t in zip(places, originals):
        store[name] = shadows[id(t)]
    try:
        yield [shadows.get(id(t), t) for t in inputs]
    finally:
        for (store, name), t in zip(places, originals):
            store[name] = t


def _without_anomalies() -> Any:
    """A context without autograd's detection of anomalies, which reads every gradient: a capture would take that for the model's."""
    return torch.autograd.set_detect_anomaly(False) if torch.is_anomaly_enabled() else contextlib.nullcontext()


class _Changed(Exception):
    """The forward changed attributes while it was captured."""

    def __init__(self, before: Any):
        super().__init__()
        self.before = before  # as they were


def _forward(source: Source, plain: Any, form: Any, text: str, note: Note, attempt: Attempt) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """The model as a function of tensors."""

    def forward(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        model = source.model()
        args, kwargs = _tree.unflatten(form, iter(tensors))
        if not _torch.capturing():  # beside a planned step, or as nothing is to be planned
            outputs, note.form, _ = _tree.flatten(plain(*args, **kwargs), "result")
            return outputs
        attempt.before = before = Snapshot(model)
        told = _snapshot.told(model)
        try:
            _refuse_parts(model)
            result = plain(*args, **kwargs)
            left, _, now = _tree.flatten((args, kwargs), "arguments")
            if now != text or any(a is not b for a, b in zip(left, tensors)):
                raise Refused("the forward changes its arguments, which no planned step would do",
                              advice="copy the container before it is written to")
            outputs, note.form, _ = _tree.flatten(result, "result")
            then = _snapshot.told(model)
            attempt.changed = sorted(name for name in told.keys() | then.keys() if told.get(name) != then.get(name))
            if attempt.changed:
                raise _Changed(before)
            if before.drawn():
                raise Refused("the forward draws from Python's random or numpy's, and no planned step would draw anew",
                              advice="draw with torch, or pass what was drawn as an argument")
            return outputs
        except BaseException as e:
            attempt.where, attempt.raised = _line(e), e
            if not isinstance(e, _Changed):
                before.restore()
            raise

    return forward


def _refuse_transforms() -> None:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise Refused("a wrapped model cannot be planned inside a transform of torch.func",
                      advice="call it within remat.of(model).paused()")


def _refuse_parts(model: torch.nn.Module) -> None:
    """Raises Refused if a module is one that no plan can hold."""
    for name, module in model.named_modules():
        if module is not model and (type(module).__module__.startswith("torch._dynamo") or module._compiled_call_impl is not None):
            raise Refused(f"module {name} inside is compiled: a plan is made of the operators of eager mode",
                          advice="wrap parts that hold no compiled modules, or leave out torch.compile")
        for c in type(module).__mro__:
            if c.__name__ in ("FSDPModule", "FullyShardedDataParallel", "DistributedDataParallel") and c.__module__.startswith("torch."):
                raise Refused(f"module {name or type(module).__name__} is a {c.__name__}: its parameters come and go, or gradients are averaged, within a step",
                              advice="DistributedDataParallel(remat.wrap(module)); sharded parameters are not planned yet")


def _line(e: BaseException) -> str | None:
    """Where in the model an exception comes from: the innermost line that is not PyTorch's own."""
    found = None
    for frame in traceback.extract_tb(e.__traceback__):
        module = frame.filename
        if not module.startswith((_TORCH, _HERE)):
            found = f"{module}:{frame.lineno}, in {frame.name}: {frame.line}"
    return found


_TORCH = torch.__path__[0]
_HERE = __file__.rpartition("/")[0]


#: Searches beside the steps end before the interpreter does.
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    for session in list(_sessions):
        session.close()


def _progress(text: str, warning: bool = False) -> None:
    """Tells what the planner does, or what the user should look at."""
    if warning:
        log.warning("%s", text)
    elif sys.stderr is not None and sys.stderr.isatty() and not log.isEnabledFor(logging.INFO):
        print("remat: " + text, file=sys.stderr)
    else:
        log.info("%s", text)
