# SPDX-License-Identifier: Apache-2.0
"""Optimizers with states on a disk, or with steps during the backward. They step a few parameters at a time."""

from __future__ import annotations

import collections
import functools
import inspect
import numbers
import os
from typing import Any, Callable, Iterable, Iterator, Literal, NamedTuple, cast

import torch

from . import _core, _torch
from ._arithmetic import FUSED, bare, faster, may_fuse, step_alone
from ._disk import Disk, Layout, in_file, movable
from ._errors import CopyFailed, Refused
from ._options import folder, number, size
from ._overlap import Overlap, detach
from ._wrap import of

PARCEL = 8 << 20  #: largest size of the states that are fetched together, bytes; a larger parameter is fetched alone


def optimizer(params: Iterable[Any], cls: type[torch.optim.Optimizer] = torch.optim.AdamW, *, disk: str | os.PathLike[str] | None = None,
              disk_budget: int | float | str | None = None, step: Literal["after", "overlap"] = "after", accumulate: int = 1,
              where: Literal["auto", "host", "device"] = "auto", model: torch.nn.Module | None = None, **options: Any) -> torch.optim.Optimizer:
    """An optimizer of class `cls` that keeps its states on a disk, or steps during the backward.

    params, options: as for `cls`. `fused=True` is added if `cls` has a fused kernel for the host, and neither `fused` nor `foreach` is given.
        The results equal those of `cls` with the same options bit by bit.
    disk: folder on the disk for the states. Space is reserved before the step that makes the states, in files without names that go with the
        process. Default: states stay in memory.
    disk_budget: largest number of bytes on the disk, as a number or as text. Default: the free bytes.
    step: "after" steps all parameters in `step()`, as usual. "overlap" steps each parameter during the backward, as soon as its gradient is
        complete, and frees the gradient; `step()` ends the step. Operations that need the gradients later (clipping, gradient scaling, closures,
        DistributedDataParallel) are Refused. The first step keeps the gradients, and refuses before any weight changes.
    accumulate: with "overlap": number of backwards whose gradients add up before a parameter steps.
    where: place of the arithmetic, for a model with weights on the host whose steps run on a device (see `model`). "host" computes on the host;
        with "overlap" beside the rest of the backward. "device" fetches parameters, gradients and states, some at a time, and sends them back.
        "auto" measures both on a few MiB and takes the faster place; with "overlap" it takes "host".
    model: a model wrapped with offload="optimizer" or "all", whose disk and disk_budget the optimizer takes over. With offload="auto", `wrap`
        decides whether states go to the disk or stay in memory.

    Raises Refused for a class or an option that cannot step parameter by parameter, Error if no file can be made, NoSpace if the disk is full. A step
    raises NoSpace before it changes weights, and CopyFailed if the disk fails.

        opt = remat.optimizer(model.parameters(), torch.optim.AdamW, disk="/scratch", lr=3e-4)
    """
    device = None
    if model is not None:
        if disk is not None or disk_budget is not None:
            raise ValueError("give model, or disk and disk_budget")
        model_options = of(model)._options
        device = model_options.steps_on
        if model_options.offload in ("optimizer", "all"):
            disk, disk_budget = model_options.disk, model_options.disk_budget
        elif not model_options.was_auto:
            raise ValueError(f'model is wrapped with offload="{model_options.offload}": its optimizer has no disk')
    if where not in ("auto", "host", "device"):
        raise ValueError(f"where must be one of auto, host, device, got {where!r}")
    if where == "device" and (device is None or step == "overlap"):
        raise ValueError('where="device" is for model, wrapped with device, and step="after"')
    number("accumulate", accumulate, numbers.Integral)
    if accumulate < 1 or (accumulate > 1 and step != "overlap"):
        raise ValueError(f'accumulate must be at least 1, and is for step="overlap", got {accumulate}')
    step_place = None if device is None or where == "host" or step == "overlap" else (str(device), where)
    return _checked(cls, disk, disk_budget, step, accumulate, step_place)(params, **options)


def offloaded(cls: type[torch.optim.Optimizer], *, disk: str | os.PathLike[str] | None = None, disk_budget: int | float | str | None = None,
              step: Literal["after", "overlap"] = "after") -> type[torch.optim.Optimizer]:
    """A subclass of `cls` whose instances are like those of `optimizer`. For code that constructs its optimizers itself.

    For arguments and exceptions see `optimizer`. `disk_budget` holds for each instance.

        Trainer(..., optimizer_cls_and_kwargs=(remat.offloaded(torch.optim.AdamW, disk="/scratch"), {"lr": 3e-4}))
    """
    return _checked(cls, disk, disk_budget, step)


def _checked(cls: type, disk: Any, disk_budget: Any, step: str, accumulate: int = 1, step_place: tuple[str, str] | None = None) -> type[torch.optim.Optimizer]:
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(f"cls must be a class derived from torch.optim.Optimizer, got {cls!r}")
    if issubclass(cls, _Offloaded):
        raise TypeError(f"cls is made by remat.offloaded already: {cls.__name__}")
    if issubclass(cls, torch.optim.LBFGS):
        raise Refused("LBFGS makes its step of all parameters together", advice="a class that steps each parameter by itself")
    if step not in ("after", "overlap"):
        raise ValueError(f"step must be one of after, overlap, got {step!r}")
    if disk is None and disk_budget is not None:
        raise ValueError("disk_budget is for disk, a folder")
    return _derived(cast(Any, cls), None if disk is None else folder("disk", disk), None if disk_budget is None else size("disk_budget", disk_budget), step,
                    accumulate, step_place)


@functools.lru_cache(maxsize=None)
def _derived(cls: type, *options: Any) -> type:
    return type(f"Offloaded{cls.__name__}", (_Offloaded, cls), {"__module__": __name__, "__doc__": cls.__doc__, "_plain": cls, "_options": options})


def _empty(cls: type, *options: Any) -> torch.optim.Optimizer:
    made = _checked(cls, *options)
    instance = cast(_Offloaded, made.__new__(made))
    instance._begin()
    return instance


class _Parcel(NamedTuple):
    group: dict[str, Any]
    params: list[torch.Tensor]


class _Offloaded(torch.optim.Optimizer):
    """Base class that precedes the class of the user: `type(name, (_Offloaded, cls), ...)`."""

    _plain: type[torch.optim.Optimizer]  # the class of the user
    _step_device: torch.device | None
    _options: tuple[str | None, str | None, str, int, tuple[str, str] | None]  # arguments of `_checked` after `cls`

    def __init__(self, params: Iterable[Any], *args: Any, **options: Any):
        self._begin()
        if not isinstance(params, (torch.Tensor, set, dict)):
            params = list(params)
            step_place = self._options[4]
            if self._step_device is not None and step_place is not None and step_place[1] == "auto":
                self._step_device = faster(lambda place: _derived(cast(Any, self._plain), None, None, "after", 1, None if place is None else (str(place), "device")),
                                           self._step_device, params, args, options, PARCEL)
            chosen = {**inspect.signature(self._plain).bind_partial(params, *args).arguments, **options} if args else options
            if self._step_device is None and self._plain in FUSED and may_fuse(params, chosen):
                options["fused"] = self._fuses = True
        super().__init__(params, *args, **options)
        self._settle(self.state)

    def _begin(self) -> None:
        disk, disk_budget, step, accumulate, step_place = self._options
        self._step_device = None if step_place is None else torch.device(step_place[0])  # device of the arithmetic; None: the host
        self._disk = None if disk is None else Disk(disk, disk_budget)
        self._layouts: dict[tuple[Any, ...], dict[str, Layout]] = {}  # layouts of the states, for parameters that are alike
        self._reserved: dict[torch.Tensor, dict[str, torch.Tensor]] = {}  # reserved tensors on the disk, for states that do not exist yet
        self._fuses = False  # uses fused kernels, which the user has not asked for
        self._failure: str | None = None  # message about a failure of the disk, after which no step is possible
        self._freed = 0  # bytes freed since the last trim
        self._bytes = 0, 0  # bytes written and read by the last step
        self._memory_short = False  # memory is short
        self._overlap = Overlap(self, accumulate) if step == "overlap" else None

    # --- as an optimizer -----------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters that have gradients.

        Raises NoSpace or Refused before it changes weights. Raises CopyFailed if the disk fails: after all parameters have stepped if a state could
        not be written, else before some have stepped. The message tells which; a saved state must be loaded before the next step.
        """
        if self._overlap is not None:
            return self._overlap.finish(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_all()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._overlap is not None:
            self._overlap.check_idle("zero_grad()")
            self._overlap.dropped = False
            if not set_to_none:
                raise Refused("zero_grad(set_to_none=False) keeps gradients, which step=\"overlap\" frees", advice="set_to_none=True")
        bare(super().zero_grad)(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        given = list(param_group) if isinstance(param_group, dict) else []
        bare(super().add_param_group)(param_group)
        added = self.param_groups[-1]
        if self._fuses and "fused" not in given and not may_fuse([{key: added[key] for key in given}], {}):
            added["fused"] = False
        for flag in ("differentiable", "capturable"):
            if added.get(flag):
                del self.param_groups[-1]
                raise Refused(f"{flag}=True cannot go with states that leave the memory and parameters that step by themselves",
                              advice=f"{flag}=False")
        for p in added["params"]:
            detach(p)
        if self._overlap is not None:
            self._overlap.attach(self)

    def state_dict(self) -> dict[str, Any]:
        if self._overlap is not None:
            self._overlap.check_idle("state_dict()")
        state: dict[str, Any] = bare(super().state_dict)()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._overlap is not None:
            self._overlap.give_up()
        bare(super().load_state_dict)(state_dict)
        self._failure = None

    def __setstate__(self, state: dict[str, Any]) -> None:  # called by load_state_dict, for copies and for pickles
        super().__setstate__(state)
        self._layouts.clear()
        self._reserved.clear()
        self._settle(self.state)
        if self._overlap is not None:
            self._overlap.attach(self)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._overlap is not None:
            self._overlap.check_idle("a copy of the optimizer")
        return _empty, (self._plain, *self._options[:4], None if self._step_device is None else (str(self._step_device), "device")), {**self.__getstate__(), "_fuses": self._fuses}

    def memory(self) -> dict[str, int]:
        """Bytes of states: in `memory`, on the `disk` (reserved), and copied `to_disk` and `from_disk` by the last step."""
        tensors = [t for state in self.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        here = sum(t.numel() * t.element_size() for t in tensors if self._disk is None or not self._disk.holds(t))
        return {"memory": here, "disk": 0 if self._disk is None else self._disk.reserved, "to_disk": self._bytes[0],
                "from_disk": self._bytes[1]}

    # --- steps ---------------------------------------------------------------------------------------------------------------

    def _step_all(self) -> None:
        """Steps every parameter that has a gradient, a parcel at a time."""
        todo = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        self._check_free_memory()
        if self._step_device is not None:
            _torch.release_sessions()  # parcels use the memory of their arenas
        self._prepare(todo)
        parcels = list(self._parcels(todo))
        if self._disk is None:
            for parcel in parcels:
                self._apply(*parcel)
            return
        before, traffic, done = (self._disk.evicted, self._disk.fetched), _torch.Traffic(), 0
        try:
            for i, parcel in enumerate(parcels):
                traffic.ready(i, self._disk_states(parcel.params))
                if i + 1 < len(parcels):
                    following = parcels[i + 1].params
                    traffic.ahead(i + 1, self._disk_states(following), [t.detach() for p in following for t in (p, p.grad)])
                self._apply(*parcel)
                traffic.done(self._disk_states(parcel.params) + self._unneeded(parcel.params))
                done += len(parcel.params)
        except CopyFailed as e:
            raise self._failed(f"{e}; {done} of {len(todo)} parameters have made the step. Load a checkpoint") from e
        finally:
            traffic.wait()
            self._bytes = self._disk.evicted - before[0], self._disk.fetched - before[1]
        self._check_traffic(traffic)

    def _check_traffic(self, traffic: _torch.Traffic) -> None:
        """Raises CopyFailed if a state could not be written."""
        try:
            traffic.drain()
        except CopyFailed as e:
            raise self._failed(f"{e}; all parameters have made the step, but their states may be lost. Load a checkpoint") from e

    def _failed(self, message: str) -> CopyFailed:
        self._failure = message
        return CopyFailed(message)

    def _prepare(self, todo: list[tuple[dict[str, Any], torch.Tensor]]) -> None:
        """Checks that a step is possible (class, options), and reserves disk space for new states. Changes no weights."""
        if self._failure is not None:
            raise CopyFailed(self._failure)
        wanted = []
        for group, p in todo:
            if not self.state.get(p):
                sparse = p.grad is not None and p.grad.is_sparse
                like = id(group), Layout.of(p), p.device, sparse
                if like not in self._layouts:
                    self._layouts[like] = self._probe_states(group, p, sparse)
                if p not in self._reserved:
                    wanted.append((p, self._layouts[like]))
        self._trim()
        if self._disk is None:
            return
        self._disk.check_process()
        for _, p in todo:
            if p.device.type != "cpu":
                raise Refused(f"states of a parameter on {p.device} cannot be on a disk", advice="disk=None, or a model on the host")
        self._settle(p for _, p in todo)
        rooms = iter(self._disk.reserve(layout for _, layouts in wanted for layout in layouts.values()))
        for p, layouts in wanted:
            self._reserved[p] = {key: next(rooms) for key in layouts}

    def _probe_states(self, group: dict[str, Any], p: torch.Tensor, sparse: bool) -> dict[str, Layout]:
        """Steps a zero parameter like `p`, to see which states the class makes. Returns the layouts of states that can be on a disk."""
        double = torch.zeros_like(p, requires_grad=True)
        empty: Any = torch.sparse_coo_tensor  # Any: its stub does not know that sizes are enough
        double.grad = empty(size=p.shape, dtype=p.dtype, device=p.device, check_invariants=False) if sparse else torch.zeros_like(p)
        state: dict[Any, Any] = collections.defaultdict(dict)
        with torch.random.fork_rng(devices=[]):
            step_alone(self, group, [double], state=state, grad_scale=None, found_inf=None)
        self._freed += sum(t.numel() * t.element_size() for t in (p, p, *state[double].values()) if isinstance(t, torch.Tensor))
        return {key: Layout.of(t) for key, t in state[double].items() if movable(t)}

    def _apply(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        """Steps parameters of a group. Their states are on the disk afterwards, if there is one."""
        homes = {p: dict(self.state.get(p, ())) or self._reserved.pop(p, {}) for p in params}
        for sparse in (False, True):
            some = [p for p in params if p.grad.is_sparse == sparse]
            if some:
                self._step_at(self._step_device, group, some, self.state)
        if self._disk is not None:
            for p in params:
                self._bring_home(self.state.get(p, {}), homes[p])

    def _step_at(self, device: torch.device | None, group: dict[str, Any], params: list[torch.Tensor], state: dict[Any, Any]) -> None:
        """Steps parameters of the host on `device`; None means on the host. The parameters and their states are on the host afterwards."""
        if device is None:
            return step_alone(self, group, params, state=state)
        moves: Callable[[Any], bool] = lambda t: isinstance(t, torch.Tensor) and (t.dim() > 0 or bool(group.get("fused")))  # noqa: E731  steps are counted on the host
        copies: dict[torch.Tensor, torch.Tensor] = {}
        states: dict[torch.Tensor, dict[str, Any]] = collections.defaultdict(dict)
        for p in params:
            copies[p] = q = p.detach().to(device, non_blocking=True).requires_grad_()
            q.grad = p.grad.to(device, non_blocking=True)
            if state.get(p):
                states[q] = {k: t.to(device) if moves(t) else t for k, t in state[p].items()}
        step_alone(self, group, list(copies.values()), state=states)
        for p, q in copies.items():
            p.detach().copy_(q.detach())
            torch.autograd.graph.increment_version(p)
            for key, t in states[q].items():
                home = state[p].get(key)
                if isinstance(home, torch.Tensor) and home is not t and Layout.of(home) == Layout.of(t):
                    home.copy_(t)
                else:
                    state[p][key] = t.cpu() if isinstance(t, torch.Tensor) else t

    # --- states --------------------------------------------------------------------------------------------------------------

    def _settle(self, params: Iterable[Any]) -> None:
        """Moves those states of the parameters to the disk that are not on it yet."""
        if self._disk is None:
            return
        states = [state for p in params if isinstance(state := self.state.get(p), dict)]
        away = [(state, key) for state in states for key, t in state.items() if not self._disk.holds(t) and movable(t)]
        homes = self._disk.reserve(Layout.of(state[key]) for state, key in away)
        for (state, key), home in zip(away, homes):
            self._disk.write(home, state[key])
            state[key] = home
            _torch.evict([home])

    def _bring_home(self, state: dict[str, Any], homes: dict[str, Any]) -> None:
        """Moves state tensors that a step has replaced to their old places on the disk, or to the places reserved for them."""
        for key, t in state.items():
            if self._disk.holds(t) or not movable(t):
                continue
            home = homes.get(key)
            if not (isinstance(home, torch.Tensor) and self._disk.holds(home) and Layout.of(home) == Layout.of(t)):
                home, = self._disk.reserve([Layout.of(t)])
            self._disk.write(home, t)
            state[key] = home
            self._freed += t.nbytes
        self._trim()

    def _trim(self) -> None:
        """Returns freed memory to the system. The C library keeps free blocks that lie between smaller blocks in use."""
        if self._freed >= PARCEL:
            self._freed = 0
            _core.trim()

    def _disk_states(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        return [t for p in params for t in self.state.get(p, {}).values() if self._disk.holds(t)]

    def _check_free_memory(self) -> None:
        """Checks whether memory is short: the weights would not fit a second time. Then all sessions give back the memory that they keep for their next steps."""
        if self._disk is None:
            return
        here = (p for group in self.param_groups for p in group["params"] if p.device.type == "cpu")
        self._memory_short = _torch.host_free() < sum(p.numel() * p.element_size() for p in here)
        if self._memory_short:
            _torch.release_sessions()

    def _unneeded(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors in files to evict after a step of these parameters: their gradients, and if memory is short the parameters. The system would evict them
        late, and it could not drop weights before they are written."""
        tensors = (t.detach() for p in params for t in ((p.grad, p) if self._memory_short else (p.grad,)) if t is not None)
        return [t for t in tensors if movable(t) and in_file(t)]

    def _parcels(self, todo: list[tuple[dict[str, Any], torch.Tensor]]) -> Iterator[_Parcel]:
        """Splits the parameters into parcels: neighbours in a group whose states may be in memory together."""
        parcel, size = None, 0
        for group, p in todo:
            states = self.state.get(p) or self._reserved.get(p, {})
            count = sum(t.numel() * t.element_size() for t in states.values() if isinstance(t, torch.Tensor))
            count += 2 * p.nbytes if self._step_device is not None else 0  # the parameter goes to the device with its gradient
            if parcel is None or parcel.group is not group or size + count > PARCEL:
                if parcel is not None:
                    yield parcel
                parcel, size = _Parcel(group, []), 0
            parcel.params.append(p)
            size += count
        if parcel is not None:
            yield parcel
