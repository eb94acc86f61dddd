# SPDX-License-Identifier: Apache-2.0
"""Finds side effects of custom backwards: anything that their code does beside computing gradients.

A plan is made from a run of this code without data, before the backward that computes. So a counter would count twice, and a list would keep a
tensor without data. Therefore the source of the backward is analysed first, with the functions of the same package that it calls. Code without
source counts as an effect.
"""

from __future__ import annotations

import ast
import builtins
import collections.abc
import functools
import inspect
import linecache
import sysconfig
import types
from typing import Any, Iterator

import torch

_UNKNOWN = object()
_NEW = object()  #: the object that a constructor makes
_LIBRARY = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_CONTAINERS = (list, dict, set, collections.deque)
#: Methods that change containers. The method `add` of tensors has the name of one but changes nothing.
_CHANGING = {name for kind in _CONTAINERS for name in vars(kind)
             if not name.startswith("_")} - {"copy", "count", "get", "index", "items", "keys", "values", "maxlen"}
_READING = {*dir(torch.Tensor), *dir(str), "get", "items", "keys", "values", "copy", "saved_tensors", "saved_variables"} - {"backward"}
#: Builtin functions with effects.
_BUILTIN = {"next", "setattr", "delattr", "exec", "eval", "__import__", "input"}
#: Methods of modules that only read. Other methods of PyTorch's modules may change them.
_READING_OF_MODULES = {"parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules", "children", "named_children", "state_dict",
                        "get_parameter", "get_buffer", "get_submodule", "forward", "__call__"}
#: Expressions and functions that make containers, and functions that iterate over the items of others.
_CONTAINER_EXPRESSIONS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.BinOp)
_CONTAINER_MAKERS = {"list", "dict", "set", "sorted", "deque", "defaultdict", "OrderedDict"}
_ITEM_GIVERS = {"enumerate", "filter", "iter", "list", "map", "reversed", "sorted", "tuple", "zip"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class _Effect(Exception):
    pass


def effect_of(context: Any) -> str:
    """Describes the side effect of a custom backward; an empty text if it has none.

    context: the context object that the backward of a custom function receives.
    """
    function = getattr(type(context), "_forward_cls", None)
    if function is None or _package(function) == "torch":
        return ""
    own = function.backward if function.backward is not torch.autograd.Function.backward else function.vjp
    try:
        _Reading(_package(function)).call(own, "its backward", [context])
    except _Effect as e:
        return f"the backward of {function.__qualname__} {e}"
    except Exception as e:  # raised by an object that cannot be inspected
        return f"the backward of {function.__qualname__} cannot be read ({e!r})"
    return ""


def _package(what: Any) -> str:
    return (getattr(what, "__module__", None) or "").partition(".")[0]


def _file(what: Any) -> str:
    code = getattr(what, "__code__", None)
    return code.co_filename if code else getattr(inspect.getmodule(what), "__file__", None) or ""


@functools.lru_cache(maxsize=64)
def _functions(file: str) -> dict[int, list[Any]]:
    """The functions of a file by their first lines, decorators included."""
    functions: dict[int, list[Any]] = {}
    for node in ast.walk(ast.parse("".join(linecache.getlines(file)))):
        if isinstance(node, _FUNCTIONS):
            lines = [node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]
            functions.setdefault(min(lines), []).append(node)
    return functions


def _sources(function: types.FunctionType) -> list[Any]:
    """The syntax tree of a function; several trees if lambdas on one line cannot be told apart."""
    code = function.__code__
    try:
        nodes = _functions(code.co_filename).get(code.co_firstlineno, [])
    except (SyntaxError, ValueError):
        nodes = []
    names = list(code.co_varnames[:code.co_argcount])
    nodes = [n for n in nodes if getattr(n, "name", "<lambda>") == code.co_name and [a.arg for a in [*n.args.posonlyargs, *n.args.args]] == names]
    if len(nodes) > 1 and hasattr(code, "co_positions"):
        ends = {(line, column) for _, line, _, column in code.co_positions()}
        nodes = [n for n in nodes if (n.body.end_lineno, n.body.end_col_offset) in ends] or nodes
    if not nodes:
        raise _Effect(f"calls {function.__qualname__}, whose source is not there")
    return nodes


class _Reading:
    """Analyses functions, each once.

    own: the package whose code is analysed.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self._seen: set[tuple[int, ...]] = set()

    def function(self, f: Any, arguments: list[Any]) -> None:
        """Analyses a function.

        arguments: the first arguments, as far as they are known.
        """
        while hasattr(f, "__wrapped__") and _file(f).startswith(_LIBRARY):  # such as `once_differentiable`
            f = f.__wrapped__
        if not isinstance(f, types.FunctionType):
            return self.call(f, getattr(f, "__qualname__", repr(type(f))), arguments)
        key = id(f.__code__), *map(id, arguments)
        if key in self._seen:
            return
        self._seen.add(key)
        for node in _sources(f):
            _Scope(self, f, node, arguments).read()

    def call(self, f: Any, text: str, arguments: list[Any]) -> None:
        """Analyses a call of `f`.

        text: expression of `f` in the source, for messages.
        """
        if isinstance(f, functools.partial):
            f, arguments = f.func, [*f.args, *arguments]
        if getattr(f, "__func__", f) is torch.Tensor.backward or f is torch.autograd.backward:
            raise _Effect("runs another backward")
        if isinstance(f, types.MethodType):
            if isinstance(f.__self__, torch.nn.Module) and _package(f.__func__) == "torch" and f.__name__ not in _READING_OF_MODULES:
                raise _Effect(f"calls {text}")
            if not self._trusted(f.__func__):
                self.function(f.__func__, [f.__self__, *arguments])
        elif isinstance(f, types.FunctionType):
            if not self._trusted(f):
                self.function(f, arguments)
        elif isinstance(f, types.BuiltinFunctionType):
            if (isinstance(f.__self__, _CONTAINERS) and f.__name__ in _CHANGING) or (f.__self__ is builtins and f.__name__ in _BUILTIN):
                raise _Effect(f"calls {text}")
        elif isinstance(f, torch.nn.Module) and not self._trusted(type(f)):
            self.function(type(f).forward, [f, *arguments])
        elif isinstance(f, type):
            made = inspect.getattr_static(f, "__init__")
            if not self._trusted(f) and isinstance(made, types.FunctionType) and _file(made) != "<string>":  # dataclasses generate theirs
                self.function(made, [_NEW, *arguments])
        elif not self._trusted(type(f)):
            called = inspect.getattr_static(type(f), "__call__", None)
            if not isinstance(called, types.FunctionType):
                raise _Effect(f"calls {text}, whose source is not there")
            self.function(called, [f, *arguments])

    def _trusted(self, what: Any) -> bool:
        """True for code of PyTorch and of installed packages, except the package of the backward."""
        package = _package(what)
        if package in ("torch", "builtins"):
            return True
        return package != self._own and _file(what).startswith(_LIBRARY)


class _Scope(ast.NodeVisitor):
    """Analyses one function."""

    def __init__(self, reading: _Reading, f: types.FunctionType, node: Any, arguments: list[Any]) -> None:
        self._reading, self._node = reading, node
        names = [a.arg for a in [*node.args.posonlyargs, *node.args.args]]
        self._rest = {node.args.vararg.arg: arguments[len(names):]} if node.args.vararg else {}
        self._outer = {n for x in ast.walk(node) if isinstance(x, (ast.Global, ast.Nonlocal)) for n in x.names}
        stored = {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
        self._known = {n: a for n, a in zip(names, arguments) if n not in stored}
        defined = {x.name for x in ast.walk(node) if isinstance(x, _FUNCTIONS[:2]) and x is not node}
        self._defined = defined | {t.id for x in ast.walk(node) if isinstance(x, ast.Assign) and isinstance(x.value, ast.Lambda)
                                   for t in x.targets if isinstance(t, ast.Name)}
        self._locals = ({a.arg for a in ast.walk(node) if isinstance(a, ast.arg)} | stored | defined) - self._outer
        cells = zip(f.__code__.co_freevars, f.__closure__ or ())
        self._free = {**vars(builtins), **f.__globals__, **{name: c.cell_contents for name, c in cells if _filled(c)}}
        stores = list(_stores(node))
        #: `_made`: locals that are containers made here. `_aliases`: locals that may be, or hold, containers from elsewhere
        self._made = stored - {name for name, value in stores if not _makes(value)}
        self._aliases: set[str] = set()
        while more := {name for name, value in stores if name not in self._aliases and self._from_elsewhere(value)}:
            self._aliases |= more

    def read(self) -> None:
        body = self._node.body
        for part in body if isinstance(body, list) else [body]:
            self.visit(part)

    def _from_elsewhere(self, value: ast.expr) -> bool:
        if isinstance(value, ast.Name):
            return value.id not in self._locals or value.id in self._aliases
        if isinstance(value, ast.Attribute):
            return value.attr not in _READING
        if isinstance(value, (ast.Subscript, ast.Starred, ast.NamedExpr)):
            return self._from_elsewhere(value.value)
        if isinstance(value, (ast.IfExp, ast.BoolOp)):
            return any(map(self._from_elsewhere, value.values if isinstance(value, ast.BoolOp) else [value.body, value.orelse]))
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            return value.func.attr not in dir(torch.Tensor) and value.func.attr in _READING | _CHANGING and self._from_elsewhere(value.func.value)
        return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "getattr"

    def _value(self, node: Any) -> Any:
        """The object that an expression names, if it is known without running code."""
        if isinstance(node, ast.Name):
            return (self._known if node.id in self._locals else self._free).get(node.id, _UNKNOWN)
        if not isinstance(node, (ast.Attribute, ast.Subscript)):
            return _UNKNOWN
        base = self._value(node.value)
        if isinstance(node, ast.Subscript):
            index = node.slice
            if not isinstance(index, ast.Constant) or type(base) not in (list, tuple, dict):
                return _UNKNOWN
            try:
                return base[index.value]
            except (LookupError, TypeError):
                return _UNKNOWN
        if base is _UNKNOWN or base is _NEW:
            return _UNKNOWN
        if isinstance(base, (types.ModuleType, type)) or _package(type(base)) == "torch" and not isinstance(base, (torch.nn.Module, torch.Tensor)):
            if isinstance(base, torch.autograd.function.FunctionCtx):
                return vars(base).get(node.attr, _UNKNOWN)
            return getattr(base, node.attr, _UNKNOWN)
        for name in ("_modules", "_parameters", "_buffers"):
            if node.attr in getattr(base, name, ()) and isinstance(base, torch.nn.Module):
                return getattr(base, name)[node.attr]
        member = inspect.getattr_static(base, node.attr, _UNKNOWN)
        if isinstance(member, property) and isinstance(member.fget, types.FunctionType):
            self._reading.call(types.MethodType(member.fget, base), ast.unparse(node), [])
            return _UNKNOWN
        if isinstance(member, (types.FunctionType, classmethod)):
            return getattr(base, node.attr)
        if isinstance(member, (types.MethodDescriptorType, types.WrapperDescriptorType)):
            return getattr(base, node.attr)
        return member.__func__ if isinstance(member, staticmethod) else member

    def _passed(self, arguments: list[ast.expr]) -> list[Any]:
        """The values of the first arguments of a call, as far as they are known."""
        values: list[Any] = []
        for a in arguments:
            if not isinstance(a, ast.Starred):
                values.append(self._value(a))
            elif isinstance(a.value, ast.Name) and a.value.id in self._rest:
                values += self._rest[a.value.id]
            else:
                break
        return values

    # --- effects ---------------------------------------------------------------------------------------------------------------

    def _is_made(self, container: ast.expr, perhaps: bool) -> bool:
        """True if a container was made in this function.

        perhaps: the object may as well be a tensor, whose method changes nothing.
        """
        if perhaps:
            return not self._from_elsewhere(container)
        while isinstance(container, (ast.Attribute, ast.Subscript, ast.Call)):
            container = container.func if isinstance(container, ast.Call) else container.value
        return isinstance(container, _CONTAINER_EXPRESSIONS) or isinstance(container, ast.Name) and container.id in self._made

    def _targets(self, target: ast.expr, adds: bool = False) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for t in target.elts:
                self._targets(t, adds)
        elif isinstance(target, ast.Starred):
            self._targets(target.value, adds)
        elif isinstance(target, ast.Name):
            if target.id in self._outer:
                raise _Effect(f"writes the variable {target.id}")
        elif isinstance(target, ast.Attribute):
            owner = self._value(target.value)
            if owner is not _NEW and (adds or not isinstance(owner, torch.autograd.function.FunctionCtx)):
                raise _Effect(f"writes {ast.unparse(target)}")
        elif isinstance(target, ast.Subscript):
            name = target.value
            here = isinstance(name, ast.Name) and name.id in self._locals and name.id not in self._aliases
            if not here or isinstance(self._value(name), _CONTAINERS):
                raise _Effect(f"writes {ast.unparse(target)}")

    def visit_Assign(self, node: ast.Assign) -> None:
        for t in node.targets:
            self._targets(t)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._targets(node.target, adds=True)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._targets(node.target)
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        for t in node.targets:
            self._targets(t)

    def visit_For(self, node: ast.For) -> None:
        self._targets(node.target)
        self._iterates(node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._iterates(node.iter)
        self.generic_visit(node)

    def _iterates(self, over: ast.expr) -> None:
        if isinstance(self._value(over), collections.abc.Iterator):
            raise _Effect(f"iterates over {ast.unparse(over)}")

    def visit_Yield(self, node: ast.AST) -> None:
        raise _Effect("is a generator")

    visit_YieldFrom = visit_Await = visit_Yield

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._value(node)  # analyses properties
        self.generic_visit(node)

    def _frees_graph(self, node: ast.Call) -> bool:
        """True if a call of `torch.autograd.grad` frees a graph that the backward has not made."""
        keywords = {k.arg: k.value for k in node.keywords}
        outputs = node.args[0] if node.args else keywords.get("outputs")
        listed = outputs.elts if isinstance(outputs, (ast.Tuple, ast.List)) else [outputs] if outputs else []
        return not {"retain_graph", "create_graph"} & keywords.keys() and len(node.args) < 4 and any(map(self._from_elsewhere, listed))

    def visit_Call(self, node: ast.Call) -> None:
        f, text = node.func, ast.unparse(node.func)
        value = self._value(f)
        if value is torch.autograd.grad and self._frees_graph(node):
            raise _Effect("runs a backward through a graph of before, which can run only once")
        if value is not _UNKNOWN:
            self._reading.call(value, text, self._passed(node.args))
        elif isinstance(f, ast.Attribute):
            if f.attr not in _READING | _CHANGING or f.attr in _CHANGING and not self._is_made(f.value, f.attr in dir(torch.Tensor)):
                raise _Effect("runs another backward" if f.attr == "backward" else f"calls {text}")
        elif not isinstance(f, ast.Lambda) and not (isinstance(f, ast.Name) and f.id in self._defined):
            raise _Effect(f"calls {text}")
        self.generic_visit(node)


def _makes(value: ast.expr) -> bool:
    return isinstance(value, _CONTAINER_EXPRESSIONS) or isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in _CONTAINER_MAKERS


def _stores(function: Any) -> Iterator[tuple[str, ast.expr]]:
    """The assignments of a function: each name, and the expression that it is assigned, iterates over or is unpacked from."""
    for x in ast.walk(function):
        if isinstance(x, ast.Assign):
            pairs = [(t, x.value) for t in x.targets]
        elif isinstance(x, (ast.AnnAssign, ast.NamedExpr)):
            pairs = [(x.target, x.value)] if x.value else []
        elif isinstance(x, (ast.For, ast.comprehension)):
            gives = isinstance(x.iter, ast.Call) and isinstance(x.iter.func, ast.Name) and x.iter.func.id in _ITEM_GIVERS
            pairs = [(x.target, a) for a in (x.iter.args if gives else [x.iter])]  # type: ignore[attr-defined]
        elif isinstance(x, ast.withitem) and x.optional_vars:
            pairs = [(x.optional_vars, x.context_expr)]
        else:
            continue
        while pairs:
            target, value = pairs.pop()
            if isinstance(target, ast.Name):
                yield target.id, value
            elif isinstance(target, ast.Starred):
                pairs.append((target.value, value))
            elif isinstance(target, (ast.Tuple, ast.List)):
                alike = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
                pairs += zip(target.elts, value.elts if alike else [value] * len(target.elts))  # type: ignore[attr-defined]


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents
    except ValueError:
        return False
    return True
