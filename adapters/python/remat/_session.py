# SPDX-License-Identifier: Apache-2.0
"""The session of a wrapped model: turns each of its calls into a planned step."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import logging
import sys
import threading
import types
from typing import Any, Iterator, Mapping, cast

import torch

from . import _calls, _host, _live, _options, _snapshot, _torch, _tree, _weights
from ._calls import Attempt, Changed, Note, Step, forward_of, without_anomalies
from ._disk import Disk
from ._errors import Error, Refused
from ._gradients import Gradients
from ._planned_model import Source
from ._refusals import refuse_parts, refuse_transforms, refuse_unplanned
from ._report import Plan, Report
from ._snapshot import Snapshot
from ._sources import sources
from ._wrap_options import Options

log = logging.getLogger("remat")
_making = threading.RLock()  #: held while a session of `_torch` is made


class Session:
    """Trains one model by plans; `remat.of(model)` returns it."""

    def __init__(self, model: torch.nn.Module, options: Options, original: Any = None):
        self._original = original  # the user's `forward` in the model's `__dict__`, or None
        self._forward: Any = None  # the function in its place, which plans it
        self._options = options
        self._open = True
        self._paused: collections.Counter[int] = collections.Counter()  # per thread: depth of `paused` contexts
        self._plain_calls: collections.Counter[Any] = collections.Counter()  # per kind of call: number of calls in a row without a plan
        self._planned: set[Any] = set()  # kinds of calls that the present budget has room for
        self._warned: set[str] = set()
        self._parts_checked = False  # has searched for modules that no plan can hold
        self._source = Source(model, self)
        self._members: list[tuple[Any, ...]] = []
        self._native_if_made: _torch.Session | None = None
        self._weights: Disk | None = None  # disk of the weights; None: they are in memory
        self._gradients: Gradients | None = None  # moves gradients into files
        _live.sessions.add(self)

    @property
    def _native(self) -> _torch.Session:
        if self._native_if_made is None:  # made late: a copied model has no parameters yet when its session is copied
            with _making:
                if self._native_if_made is None:
                    self._native_if_made = self._make_native()
        return self._native_if_made

    def _check_open(self) -> None:
        if not self._open:
            raise Error("this session is closed: call remat.wrap again")

    def _make_native(self) -> _torch.Session:
        self._check_open()
        o, model = self._options, self._source.model()
        self._place_weights(model)
        paged = o.offload == "all" and o.steps_on is None
        self._source = Source(model, self)  # an earlier session of `_torch` with steps in flight keeps its own source
        return _torch.Session(type(model).__name__, self._source, *o.budget_text(),
                              o.solver_name(), dict(o.solver_options), o.time_limit, o.gap, o.seed, o.verify,
                              o.on_new_shape, o.cache_folder(), _progress, o.device, *o.activation_disk(),
                              paged, paged and o.weights == "planned", o.max_budget, o.far_bytes, o.graph,
                              "" if o.steps_on is None else str(o.steps_on), o.follows(), o.on_refuse == "raise", o.optimizer_bytes(),
                              o.first_limit)

    def _place_weights(self, model: torch.nn.Module) -> None:
        """Moves weights to the places that the options ask for, and directs gradients there."""
        o = self._options
        weights_on_host = o.steps_on is not None
        if weights_on_host and self._open:
            _host.place(model, o.steps_on, pinned=not o.weights_in_files)
        wanted = o.disk if o.offload == "all" and self._open and (o.weights_in_files or not weights_on_host) else None
        if self._weights is not None and (wanted is None or self._weights.options != (wanted, o.disk_budget)):
            _weights.bring_back(model, self._weights)
            self._weights = None
            if self._gradients is not None:
                self._gradients.detach()
                self._gradients = None
        if wanted is not None:
            if self._weights is None:
                self._weights = Disk(wanted, o.disk_budget)
                self._gradients = None if weights_on_host else Gradients(Disk(wanted, o.disk_budget))
            if self._gradients is not None:
                self._gradients.attach(model)
            if _weights.move(model, self._weights):
                _torch.meter_reset()  # the old peak includes the weights

    # --- calls ---------------------------------------------------------------------------------------------------------------

    def _set_forward(self, function: Any, original: Any) -> None:
        """Notes that `function`, which plans `original`, is now the forward of the model."""
        self._forward, self._original = function, original
        if not self._options.follows():
            self.invalidate()

    def _plain(self, model: torch.nn.Module, planned_by: Any = None) -> Any:
        """The original forward of the model, which runs on the device of its steps.

        planned_by: the planning function of an earlier step; None: the current one.
        """
        original = self._original if planned_by in (None, self._forward) else getattr(planned_by, "__wrapped__", None)
        plain = original if original is not None else types.MethodType(type(model).forward, model)
        device = self._options.steps_on
        return plain if device is None or not self._open else functools.partial(_host.run_plain, plain, device)

    def _call(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
        plain = self._plain(model)
        plans = torch.is_grad_enabled() and self._open and not self._paused[threading.get_ident()]
        if not plans or _torch.capturing() or torch._C._is_tracing() or torch.compiler.is_compiling():
            return plain(*args, **kwargs)
        if self._options.follows():
            return self._follow(model, plain, args, kwargs)
        try:
            inputs, form, text = _tree.flatten((args, kwargs), "arguments")
            if self._options.steps_on is not None:
                inputs = _host.to_device(inputs, self._options.steps_on)
            key = (text, tuple((t.shape, t.dtype) for t in inputs))
            refuse_unplanned(inputs)
        except Refused as why:
            return self._run_unplanned(why, plain, args, kwargs)
        if self._is_due(key):
            try:
                return self._step(model, plain, inputs, form, text, key)
            except Refused as why:
                if self._options.on_refuse == "raise":
                    raise
                self._warn_unplanned(why)
        self._plain_calls[key] += 1
        return plain(*args, **kwargs)

    def _follow(self, model: torch.nn.Module, plain: Any, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
        """Runs a step in which the model's own code runs."""
        if self._options.steps_on is not None:
            args, kwargs = _host.all_to_device((args, kwargs), self._options.steps_on)
        try:
            with torch._C.DisableTorchFunction():  # subclasses and modes must not see our own calls
                step = Step(self._source, plain, args, kwargs, self._options)
                refuse_unplanned(step.inputs)
                kind = step.text, tuple((t.shape, t.dtype) for t in step.inputs)
            if not self._parts_checked:
                refuse_parts(model)
                _live.free_unreferenced_models()
                self._parts_checked = True
        except Refused as why:
            return self._run_unplanned(why, plain, args, kwargs)
        if self._is_due(kind):
            step.undoable = kind not in self._planned
            try:
                self._native.forward(step, step.text, step.inputs, None)
                del self._plain_calls[kind]
                self._planned.add(kind)
                return step.take()
            except Refused as why:
                step.undo()
                why.source = step.where
                if self._options.on_refuse == "raise" or self._options.steps_on is None:
                    raise
                self._warn_unplanned(why)
            except Exception:
                self._planned.discard(kind)
                if not step.raised:  # if the module has raised, its effects so far are those of eager mode, and stay
                    step.undo()
                raise
        self._plain_calls[kind] += 1
        return plain(*args, **kwargs)

    def _is_due(self, kind: Any) -> bool:
        """True if a call should be planned. Exponential backoff: it should after 0, 1, 3, 7, ... calls of this kind without a plan."""
        calls = self._plain_calls[kind]
        return calls & (calls + 1) == 0

    def _forget_calls(self) -> None:
        self._plain_calls.clear()
        self._planned.clear()

    def _run_unplanned(self, why: Refused, plain: Any, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
        if self._options.on_refuse == "raise":
            raise why
        self._warn_unplanned(why)
        return plain(*args, **kwargs)

    def _warn_unplanned(self, why: Refused) -> None:
        if str(why) not in self._warned:
            self._warned.add(str(why))
            log.warning("this call is not planned: %s", why)

    def _step(self, model: torch.nn.Module, plain: Any, inputs: list[torch.Tensor], form: Any, text: str, kind: Any) -> Any:
        note, attempt = Note(), Attempt()
        before = None
        for _ in range(2):
            attempt.raised = None
            try:
                with without_anomalies():
                    outputs, used = self._native.forward(forward_of(self._source, plain, form, text, note, attempt), text, inputs, note)
            except Refused as e:
                e.source = attempt.where
                self._undo(before or attempt.before)
                raise
            except Changed as e:  # a first call may fill in caches; attributes that change a second time change in every step
                before = before or e.before
                continue
            except Exception as e:
                self._undo(before or attempt.before)
                if isinstance(e, Error) or (attempt.raised is None and before is None):
                    raise
                args, kwargs = _tree.unflatten(form, iter(inputs))
                result = plain(*args, **kwargs)  # an error of the model itself is raised here, with its effects until then
                refused = Refused(f"the forward raises {type(e).__name__} when it is captured: {e}", source=attempt.where)
                if self._options.on_refuse == "raise" and before is None:  # with `before`, it is a first call that fills in caches
                    raise refused from e
                self._warn_unplanned(refused)
                self._plain_calls[kind] += 1
                return result
            del self._plain_calls[kind]
            return _tree.unflatten(used.form, iter(outputs))
        self._undo(before)
        weights = all(isinstance(functools.reduce(lambda held, part: getattr(held, part, None), name.split("."), cast(Any, model)), torch.Tensor)
                      for name in attempt.changed)
        raise Refused(f"the forward changes {', '.join(attempt.changed)}, which no planned step would do", source=attempt.where,
                      advice="compute weights from others by torch.nn.utils.parametrize (parametrizations.weight_norm, spectral_norm), end pruning by "
                             "torch.nn.utils.prune.remove, or keep it in a buffer" if weights else
                             "count in the training loop or in a hook of the model, or keep it in a buffer")

    def _undo(self, before: Snapshot | None) -> None:
        """Restores the attributes that a capture has changed."""
        if before is not None:
            before.restore()

    def _prepare(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> None:
        """Plans a step. The attributes that its forward changes are restored."""
        args, kwargs = _options.arguments(args, kwargs)
        refuse_transforms()
        o, plain = self._options, self._plain(model)
        if not o.follows() and o.device is None:
            return _calls.prepare_replay(self._native, self._source, plain, args, kwargs)
        if o.steps_on is not None:
            args, kwargs = _host.all_to_device((args, kwargs), o.steps_on)
        _calls.prepare(self._native, Step(self._source, plain, args, kwargs, o, trial=True), model, o)

    def _tell_hooks(self, model: torch.nn.Module) -> None:
        hooked = _snapshot.hooked(model)
        if hooked and hooked not in self._warned:
            self._warned.add(hooked)
            log.warning("hooks of modules inside the model are called when a step is captured, not in planned steps: %s", hooked)

    # --- for the user --------------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan used last."""
        return Plan.of(self._native.plan(), sources(self._source.model()))

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the states of the optimizer that the budget counts."""
        return self._options.optimizer_bytes()

    @property
    def plans(self) -> list[Plan]:
        """All plans that are kept."""
        return [Plan.of(figures) for figures in self._native.plans()]

    def report(self, *, time_limit: float = 10.0, points: int = 12) -> Report:
        """A table of the memory and time of the plan used last; `report().save("report.html")` writes a page.

        time_limit, points: for the page, see `Plan.report`.
        Raises Error before the first plan.
        """
        return Report(self._native.report(), self.plan, "", time_limit, points)

    def memory(self) -> dict[str, int]:
        """Figures in bytes, by name. Figures of a plan, `budget` included, are 0 before the first plan.

        `budget`, `planned`, `arena` and `held` are figures of the plan used last. `unplanned` is the most that an operator has taken outside of that plan.
        `peak` is measured on the device of the model, and `host` is the peak on the host; both since `reset_peak`, or since weights moved to files. `disk`,
        `weights` and `gradients` are reserved on the disk: for activations, for weights, for gradients. `to_disk` and `from_disk` are copied in each step.
        `fetched` are the weights that a plan fetches in each step. On the device of the model, `live` are the bytes of tensors now, `reserved` the bytes
        that its allocator has taken, and `workspaces` those that libraries keep."""
        return {**self._native.memory(), "weights": 0 if self._weights is None else self._weights.reserved,
                "gradients": 0 if self._gradients is None else self._gradients.disk.reserved}

    def reset_peak(self) -> None:
        """Starts a new measurement of the peak."""
        self._native.reset_peak()

    def set_budget(self, budget: int | float | str | None = None, *,
                   activation_budget: int | float | str | None = None) -> None:
        """Plans for another budget from the next step on.

        budget: see `wrap`.
        activation_budget: see `Planner`.
        Raises Error or ValueError naming an invalid budget.
        """
        self._check_open()
        options = dataclasses.replace(self._options, budget=budget, activation_budget=activation_budget).check()
        with self._trying(options):
            pass

    @contextlib.contextmanager
    def _trying(self, options: Options) -> Iterator[None]:
        """A context in which these options hold, and the session is open. They stay, unless the context ends with an exception."""
        old, before = self._options, (self._options, self._native_if_made, self._source, self._open)
        model = self._source.model()
        with _host.unmoved(model):
            try:
                if self._open and old.steps_on is not None and options.steps_on is None:
                    _host.leave(model)
                self._options, self._open = options, True
                self._forget_calls()
                if dataclasses.replace(options, budget=old.budget, activation_budget=old.activation_budget) != old:
                    self._native_if_made = None
                elif self._native_if_made is not None and options.budget_text() != old.budget_text():
                    self._native_if_made.set_budget(*options.budget_text())
                yield
            except BaseException:
                self._options, self._native_if_made, self._source, self._open = before
                self._place_weights(model)
                if self._native_if_made is not None and options.budget_text() != old.budget_text():
                    self._native_if_made.set_budget(*old.budget_text())
                raise

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which the model runs plain when this thread calls it."""
        self._paused[threading.get_ident()] += 1
        try:
            yield
        finally:
            self._paused[threading.get_ident()] -= 1

    def invalidate(self) -> None:
        """Drops all plans. For a model that has changed in a way that is invisible from outside."""
        self._forget_calls()
        if self._native_if_made is not None:
            self._native_if_made.invalidate()

    def release(self) -> None:
        """Gives back the memory that is kept for the next step. Plans stay."""
        if self._native_if_made is not None:
            self._native_if_made.release()

    def close(self) -> None:
        """Ends planning; the model then runs plain. `unwrap` also removes everything that `wrap` put into it."""
        model = self._source._model()
        if self._open and self._options.steps_on is not None and model is not None:
            _host.leave(model)
        self._open = False
        self._native_if_made = None

    def __repr__(self) -> str:
        return f"<remat.Session budget={self._options.budget_text()[0]!r}{'' if self._open else ' closed'}>"

    def __deepcopy__(self, memo: dict[Any, Any]) -> Session:
        model = self._source.model()
        if id(model) not in memo:
            raise TypeError("a session is copied with its model only")
        session = Session(memo[id(model)], self._options, copy.deepcopy(self._original, memo))
        session._forward = self._forward
        return session

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a pickle holds the plain model: plans and memory belong to this process


def _progress(text: str, warning: bool = False) -> None:
    """Logs what the planner does, or a warning for the user."""
    if warning:
        log.warning("%s", text)
    elif sys.stderr is not None and sys.stderr.isatty() and not log.isEnabledFor(logging.INFO):
        print("remat: " + text, file=sys.stderr)
    else:
        log.info("%s", text)
