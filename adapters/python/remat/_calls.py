# SPDX-License-Identifier: Apache-2.0
"""The forward of a call, as the planner runs it: as the step itself, in a capture, or a second time beside the step."""

from __future__ import annotations

import contextlib
import logging
import traceback
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping

import torch

from . import _patches, _snapshot, _torch, _tree
from ._errors import Error, Refused
from ._refusals import refuse_parts, refuse_unplanned, without_save_on_cpu
from ._snapshot import Snapshot

if TYPE_CHECKING:
    from ._planned_model import Source
    from ._wrap_options import Options

log = logging.getLogger("remat")


class Note:
    """The result of a call without its tensors. Plans keep a note, so it must not refer to the model."""

    __slots__ = ("form",)

    def __init__(self) -> None:
        self.form: Any = None


class Attempt:
    """State of a capture: line of an error, changed attributes, snapshot before the forward, exception."""

    __slots__ = ("where", "changed", "before", "raised")

    def __init__(self) -> None:
        self.where: str | None = None
        self.changed: list[str] = []
        self.before: Any = None
        self.raised: BaseException | None = None


class Step:
    """The forward of one step, as a function for the planner.

    Called with the tensors of the call, it runs the step itself, once. Called with other tensors, it runs the forward again beside the step and restores all
    attributes. A trial is a step that is only planned: `undo` restores the attributes that it has changed. With `undoable`, it also does so if there turns out
    to be no room for the step.
    """

    __slots__ = ("_source", "_plain", "_planned_by", "_args", "_kwargs", "_form", "_strict", "_again", "_before", "_result",
                 "inputs", "text", "where", "raised", "undoable")

    def __init__(self, source: Source, plain: Any, args: tuple[Any, ...], kwargs: Mapping[Any, Any], options: Options, trial: bool = False):
        self._source, self._plain, self._planned_by = source, plain, source.planned_by()
        self._args: Any = args
        self._kwargs: Any = kwargs
        self._strict = options.on_refuse == "raise"
        self._again = trial or options.verify > 0 or options.steps_on is not None  # the forward may run again from its beginning
        self._before: Snapshot | None = None
        self._result: Any = None
        self._form: Any = None
        self.where: str | None = None
        self.raised = self.undoable = False
        try:
            self.inputs, self._form, self.text = _tree.flatten((args, kwargs), "arguments", values=False)
        except Refused:  # arguments that cannot be rebuilt with other tensors
            self.inputs, self.text = _tree.tensors_in((args, kwargs)), "opaque"

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._plain is not None and all(a is b for a, b in zip(tensors, self.inputs)):
            return self._run()
        return self._run_again(tensors)

    def _run(self) -> list[torch.Tensor]:
        plain, args, kwargs = self._plain, self._args, self._kwargs
        self._plain = self._args = self._kwargs = None  # avoids a cycle: a graph may hold this object, and the model may hold the graph
        self.inputs = []  # a graph may also hold an input that the forward writes to
        model = self._source.model()
        if self._again or self.undoable or (self._strict and _torch.capturing()):
            self._before = Snapshot(model)
        try:
            with _patches.recomputed(), without_save_on_cpu():
                self._result = plain(*args, **kwargs)
        except BaseException as e:
            self.where, self.raised = line_of(e), True
            raise
        return _tree.tensors_in(self._result)

    def _run_again(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._form is None:
            raise Error("a forward whose arguments cannot be copied cannot run once more")
        now = Snapshot(self._source.model())
        try:
            self.undo()
            args, kwargs = _tree.unflatten(self._form, iter(tensors))
            with _patches.for_some_gradients(), without_save_on_cpu():
                return _tree.tensors_in(self._source.plain(self._planned_by)(*args, **kwargs))
        except BaseException as e:
            self.where = line_of(e)
            raise
        finally:
            now.restore()

    def undo(self) -> None:
        """Restores the attributes from before the step, if there is a snapshot."""
        if self._before is not None:
            self._before.restore()

    def take(self) -> Any:
        """The result of the forward; can be taken once."""
        result, self._result = self._result, None
        if not (self._again or self._strict):
            self._before = None
        return result


def forward_of(source: Source, plain: Any, form: Any, text: str, note: Note, attempt: Attempt) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """The model as a function from tensors to tensors, for a model whose code does not run in later steps.

    The function raises Changed if a capture changes attributes of the model, and Refused for other effects that no plan has.
    """

    @without_save_on_cpu()
    def forward(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        model = source.model()
        args, kwargs = _tree.unflatten(form, iter(tensors))
        if not _torch.capturing():  # a run beside a planned step, or a plain run
            outputs, note.form, _ = _tree.flatten(plain(*args, **kwargs), "result")
            return outputs
        attempt.before = before = Snapshot(model)
        old = _snapshot.fingerprints(model)
        try:
            refuse_parts(model)
            result = plain(*args, **kwargs)
            left, _, now = _tree.flatten((args, kwargs), "arguments")
            if now != text or any(a is not b for a, b in zip(left, tensors)):
                raise Refused("the forward changes its arguments, which no planned step would do",
                              advice="copy the container before it is written to")
            outputs, note.form, _ = _tree.flatten(result, "result")
            new = _snapshot.fingerprints(model)
            attempt.changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
            if attempt.changed:
                raise Changed(before)
            if before.drawn():
                raise Refused("the forward draws from Python's random or numpy's, and no planned step would draw anew",
                              advice="draw with torch, or pass what was drawn as an argument")
            return outputs
        except BaseException as e:
            attempt.where, attempt.raised = line_of(e), e
            if not isinstance(e, Changed):
                before.restore()
            raise

    return forward


def line_of(e: BaseException) -> str | None:
    """The line of the model that raised an exception: the innermost line outside PyTorch and this package."""
    line = None
    for frame in traceback.extract_tb(e.__traceback__):
        module = frame.filename
        if not module.startswith((_TORCH, _HERE)):
            line = f"{module}:{frame.lineno}, in {frame.name}: {frame.line}"
    return line


_TORCH = torch.__path__[0]
_HERE = __file__.rpartition("/")[0]


class Changed(Exception):
    """The forward changed attributes while it was captured."""

    def __init__(self, before: Any):
        super().__init__()
        self.before = before  # snapshot from before the forward


@contextlib.contextmanager
def shadows(model: torch.nn.Module, inputs: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """A context that replaces the tensors of a model on meta by tensors of the host without memory. Yields the inputs, replaced likewise."""
    places: list[tuple[dict[str, Any], str]] = [(store, name) for m in model.modules() for store in (m._parameters, m._buffers, m.__dict__)
              for name, t in store.items() if isinstance(t, torch.Tensor) and t.is_meta]
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


def without_anomalies() -> Any:
    """A context without autograd's anomaly detection. It reads every gradient, which a capture would record as a part of the model."""
    return torch.autograd.set_detect_anomaly(False) if torch.is_anomaly_enabled() else contextlib.nullcontext()


def prepare(run: Any, step: Step, model: torch.nn.Module, options: Options) -> None:
    """Plans a step. Its forward runs without data; the attributes that it changes are restored."""
    estimated = options.device is not None
    final = options.on_refuse == "raise" or estimated or any(t.is_meta for t in model.parameters())
    try:
        refuse_unplanned(step.inputs)
        refuse_parts(model)
        with torch.enable_grad(), without_anomalies(), shadows(model, step.inputs) if estimated else contextlib.nullcontext(step.inputs) as inputs:
            run.prepare(step, step.text, inputs, None)
    except Refused as why:
        why.source = why.source or step.where
        if final:
            raise
        log.info("the first call says whether such steps are planned: %s", why)
    finally:
        step.undo()


def prepare_replay(run: Any, source: Source, plain: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Captures and plans a step of a model whose code does not run in later steps."""
    inputs, form, text = _tree.flatten((args, kwargs), "arguments")
    note = Note()
    try:
        with torch.enable_grad(), without_anomalies():
            run.prepare(forward_of(source, plain, form, text, note, Attempt()), text, inputs, note)
    except Changed as e:  # the first call may run twice
        e.before.restore()
        log.info("the first call plans: the forward changes attributes of its modules")
