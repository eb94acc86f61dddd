# SPDX-License-Identifier: Apache-2.0
"""Rockmate's configurations: their defaults, checks and files."""

from __future__ import annotations

import copy
import difflib
import os
import pathlib
from typing import Any, ClassVar, Iterator, Mapping

from .._errors import Error


class Config(dict[str, Any]):
    """A dictionary whose items are also attributes, like Rockmate's configurations."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this configuration has no {name!r}, only {', '.join(self) or 'nothing'}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]

    def __deepcopy__(self, memo: dict[int, Any]) -> Config:
        return Config({key: copy.deepcopy(value, memo) for key, value in self.items()})


_MIB = 1 << 20

#: Options and defaults of Rockmate's solvers.
_SOLVERS: dict[str, dict[str, Any]] = {
    "hilp": {"mem_unit": _MIB, "ilp_solver_params": {"LogToConsole": 0, "IntegralityFocus": 1, "NodeFileStart": 0.5}, "ilp_solver": "PULP_CBC_CMD",
             "protected_names": [], "nb_total_sched": 100, "nb_total_nodes": 20, "nb_bdg_save": 6, "nb_bdg_peak": 4, "time_limit": 60, "offload": False,
             "add_offload_sched": False, "activation_offload": False, "model_kwargs": {}, "accurate_mem": True, "minor_offload_size": 10 * _MIB},
    "rotor": {"mem_unit": _MIB, "force_python": False},
    "cheap": {"bandwidth": 1e7, "add_offload": False, "cheap_factor": 2.0},
    "twremat": {"mem_unit": _MIB, "contains_data_node": False, "allow_loss_recomputation": False, "verbose": False},
}

#: Options and defaults of Rockmate's partitioners.
_PARTITIONERS: dict[str, dict[str, Any]] = {
    "sequence": {"sub_partitioner": "bottom_to_top"},
    "bottom_to_top": {"max_len_seq": 99, "max_estimate_for_main_graph": 30, "max_estimate_per_sub_graph": 20, "min_size_per_sub_graph": 3,
                      "main_graph_as_any_other": False, "can_use_rotor": True, "estimate_coeff_size": 1, "estimate_coeff_sub_graph": 1,
                      "value_coeff_input_interfaces": 1, "value_coeff_output_interfaces": 1, "value_power_total_size": 0.5, "old_value_fct": False,
                      "old_value_fct_value_power_not_last": 1.1},
    "repetitive": {"sub_partitioner": "bottom_to_top", "split_patterns_in_two": False, "recognize_simply_by_main_fct_not_whole_ano_material": True,
                   "strict_max_number_of_top_level_nodes": 50, "max_number_of_patterns": 40, "min_number_of_patterns": 2,
                   "min_percentage_covered_required": 0.75, "put_intermediates_with_preceding_block": True, "put_inputs_with_first_block": False,
                   "put_outputs_with_last_block": False},
    "base": {},
    "dagp": {"max_estimate_for_main_graph": 30, "max_estimate_per_sub_graph": 20, "weighted": True, "executable": "rMLGP"},
}

_ALL: dict[str, dict[str, Any]] = {name: {} for name in _SOLVERS}
_SOLVED_BY_ILP = {"time_limit": 1200}

#: Per kind of configuration: the options that differ from the defaults, for (top solvers, bottom solvers, partitioners).
_KINDS: dict[str, tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]], dict[str, dict[str, Any]]]] = {
    "rotor": ({"rotor": {}}, {}, {"sequence": {}}),
    "rockmate": ({"rotor": {}}, {"hilp": {"nb_bdg_save": 10, "nb_bdg_peak": 10}}, {"sequence": {}}),
    "checkmate": ({"hilp": {"time_limit": 3600, "nb_total_nodes": 10000}}, {}, {}),
    "hilp": ({"hilp": _SOLVED_BY_ILP | {"nb_total_nodes": 30}}, {"hilp": {"accurate_mem": False}}, {"bottom_to_top": {"can_use_rotor": False}}),
    "hiremate": (_ALL | {"hilp": _SOLVED_BY_ILP | {"nb_total_nodes": 100}}, _ALL | {"hilp": {"accurate_mem": False}},
                 {name: {} for name in _PARTITIONERS}),
    "offmate": ({"hilp": _SOLVED_BY_ILP | {"offload": True, "nb_total_nodes": 100, "nb_total_sched": 500}}, {"cheap": {"add_offload": True}},
                {"repetitive": {}}),
    "noremat": ({"cheap": {"cheap_factor": 1e9}}, {}, {"base": {}}),
}


def default_config(name: str) -> Config:
    """All options of a solver or partitioner of Rockmate, at their defaults.

    Raises Error (a ValueError) for an unknown name.
    """
    known = _SOLVERS | _PARTITIONERS
    if name not in known:
        raise Error(f"default_config: {name!r} is no solver or partitioner of Rockmate{_meant(name, known)}; they are {', '.join(known)}")
    return Config(copy.deepcopy(known[name]))


def generate_config(config_type: str) -> Config:
    """The complete configuration of a kind: rotor, rockmate, checkmate, hilp, hiremate, offmate or noremat.

    Raises Error (a ValueError) for an unknown kind.
    """
    if config_type not in _KINDS:
        raise Error(f"generate_config: {config_type!r} is no kind of configuration{_meant(config_type, _KINDS)}; they are {', '.join(_KINDS)}")
    top, bottom, partitioners = (Config({name: Config(default_config(name) | copy.deepcopy(changed)) for name, changed in part.items()})
                                 for part in _KINDS[config_type])
    return Config(solver=Config(top=top, bottom=bottom), partitioner=partitioners)


class Settings:
    """A solver or partitioner of Rockmate, with its options in `config`. Raises Error naming an unknown option."""

    name: ClassVar[str]

    def __init__(self, **options: Any):
        options = {key: value.name if isinstance(value, Settings) else value for key, value in options.items()}
        try:
            _check_options(self.name, options, ())
        except _Wrong as e:
            raise Error(f"{type(self).__name__}: {e}") from None
        self.config = Config(default_config(self.name) | options)
        self.base = default_config(self.name)  #: options that count as not changed by the user

    def chosen(self) -> dict[str, Any]:
        """The options that the user has changed."""
        return {key: value for key, value in self.config.items() if value != self.base[key]}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.config.items() if v != default_config(self.name)[k])})"


class _Wrong(Exception):
    def __init__(self, path: tuple[str, ...], why: str):
        super().__init__(why)
        self.path = path


def checked(config: Any) -> Config:
    """A copy of `config` with defaults for all missing options. Raises Error naming an unknown key, or a value of a wrong type."""
    try:
        return _checked(config)
    except _Wrong as e:
        raise Error(f"configuration: {e}") from None


def _checked(config: Any) -> Config:
    _check_keys(config, ("solver", "partitioner"), ())
    _check_keys(config.get("solver") or {}, ("top", "bottom"), ("solver",))
    complete = Config(solver=Config(top=Config(), bottom=Config()), partitioner=Config())
    for path, known in ((("solver", "top"), _SOLVERS), (("solver", "bottom"), _SOLVERS), (("partitioner",), _PARTITIONERS)):
        part, into = config, complete
        for key in path:
            part, into = part.get(key) or {}, into[key]
        _check_keys(part, known, path)
        for name, options in part.items():
            if options is not None:  # as in Rockmate, None removes a solver
                _check_options(name, options, (*path, name))
                into[name] = Config(default_config(name) | options)
    return complete


def _check_options(name: str, options: Any, path: tuple[str, ...]) -> None:
    defaults = default_config(name)
    _check_keys(options, defaults, path)
    for key, value in options.items():
        kind = type(defaults[key])
        if not isinstance(value, (int, float) if kind is float else kind) or (isinstance(value, bool) and kind is not bool):
            raise _Wrong((*path, key), f"{'.'.join((*path, key))} must be of type {kind.__name__}, got {value!r}")
        if kind in (int, float) and not value >= (key == "time_limit"):
            raise _Wrong((*path, key), f"{'.'.join((*path, key))} must be >= {int(key == 'time_limit')}, got {value!r}")


def _check_keys(part: Any, known: Any, path: tuple[str, ...]) -> None:
    where = ".".join(path) or "it"
    if not isinstance(part, Mapping):
        raise _Wrong(path, f"{where} must be a mapping of {', '.join(known) or 'nothing'}, got {part!r}")
    for key in part:
        if key not in known:
            raise _Wrong((*path, key), f"{'.'.join((*path, str(key)))} is unknown{_meant(str(key), known)}; {where} has {', '.join(known) or 'no keys'}")


def _meant(word: str, known: Any) -> str:
    close = difflib.get_close_matches(str(word), list(known), 1)
    return f" (did you mean {close[0]}?)" if close else ""


def _parts(config: Config) -> Iterator[tuple[tuple[str, ...], Config]]:
    """The three parts of a configuration, each as (path, solvers or partitioners by name)."""
    for path in (("solver", "top"), ("solver", "bottom"), ("partitioner",)):
        part = config
        for key in path:
            part = part[key]
        yield path, part


def usual(path: tuple[str, ...], value: Any) -> bool:
    """True if `value` is the default of an option, or its value in one of the kinds of configuration."""
    kinds = [_by_path(generate_config(kind)) for kind in _KINDS]
    return value in [default_config(path[-2])[path[-1]], *(kind[path[:-1]][path[-1]] for kind in kinds if path[:-1] in kind)]


def nearest(config: Config) -> dict[tuple[str, ...], Config]:
    """The kind of configuration (or the defaults) that differs least from `config`: options by path of solver or partitioner.

    config: a complete configuration.
    """
    chosen = _by_path(config)
    defaults = {path: default_config(path[-1]) for path in chosen}

    def distance(base: dict[tuple[str, ...], Config]) -> int:
        values = sum(1 for path in chosen.keys() & base.keys() for key, value in chosen[path].items() if value != base[path][key])
        return values + 3 * len(base.keys() ^ chosen.keys())  # a missing or additional solver weighs more than a changed option

    kind = min((_by_path(generate_config(kind)) for kind in _KINDS), key=distance)
    return defaults | kind if distance(kind) <= distance(defaults) else defaults


def _by_path(config: Config) -> dict[tuple[str, ...], Config]:
    return {(*path, name): options for path, part in _parts(config) for name, options in part.items()}


def save_config(config: Mapping[str, Any], filename: str | os.PathLike[str]) -> None:
    """Writes a configuration as YAML. Raises Error naming an unknown key, without touching the file."""
    import yaml  # type: ignore[import-untyped,unused-ignore]

    text = yaml.safe_dump(_plain(checked(config)), sort_keys=False)
    whole = pathlib.Path(f"{os.fspath(filename)}.part")
    whole.write_text(text)
    whole.replace(filename)


def _plain(value: Any) -> Any:
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def load_config(filename: str | os.PathLike[str]) -> Config:
    """Reads a configuration from a file of remat's or Rockmate's `save_config`.

    Raises Error naming file and line if the file is not YAML, or has an unknown or repeated key.
    """
    import yaml

    name, data = os.fspath(filename), pathlib.Path(filename).read_bytes()
    try:
        tree = yaml.compose(data, yaml.SafeLoader)
        _refuse_repeated(tree, name)
        config = yaml.safe_load(data)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        line = data[:getattr(e, "position", 0)].count(b"\n") if mark is None else mark.line
        raise Error(f"{name}:{line + 1}: this is not YAML: {getattr(e, 'problem', None) or getattr(e, 'reason', e)}; "
                    "save_config writes files that load_config reads") from None
    try:
        return _checked(config)
    except _Wrong as e:
        raise Error(f"{name}:{_line(tree, e.path)}: {e}") from None


def _refuse_repeated(tree: Any, name: str) -> None:
    seen: set[str] = set()
    for key, value in tree.value if tree is not None and tree.id == "mapping" else ():
        if key.value in seen:
            raise Error(f"{name}:{key.start_mark.line + 1}: {key.value} is there twice")
        seen.add(str(key.value))
        _refuse_repeated(value, name)


def _line(tree: Any, path: tuple[str, ...]) -> int:
    """The line of a key, counted from 1."""
    line = 1
    for wanted in path:
        for key, value in tree.value:
            if key.value == str(wanted):
                line, tree = key.start_mark.line + 1, value
    return line
