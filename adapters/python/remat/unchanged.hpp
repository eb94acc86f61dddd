// SPDX-License-Identifier: Apache-2.0
/// @file
/// Whether Python objects still are what they were, told from pointers: what `remat._state.Record` holds. Runs no Python code.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstring>

namespace remat::python {

/// The same object, or another one of a builtin type that has the same value.
inline bool same_value(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  if (PyFloat_CheckExact(a)) {
    const double x = PyFloat_AS_DOUBLE(a), y = PyFloat_AS_DOUBLE(b);
    return std::memcmp(&x, &y, sizeof x) == 0;
  }
  return (PyLong_CheckExact(a) || PyUnicode_CheckExact(a)) && PyObject_RichCompareBool(a, b, Py_EQ) == 1;
}

/// `entry` is {dict, key, value, key, value, ...}.
inline bool same_dict(PyObject* entry) {
  auto* const dict = PyTuple_GET_ITEM(entry, 0);
  const auto n = PyTuple_GET_SIZE(entry);
  if (1 + 2 * PyDict_GET_SIZE(dict) != n) return false;
  Py_ssize_t at = 0, i = 1;
  for (PyObject *key = nullptr, *value = nullptr; PyDict_Next(dict, &at, &key, &value); i += 2)
    if (key != PyTuple_GET_ITEM(entry, i) || !same_value(value, PyTuple_GET_ITEM(entry, i + 1))) return false;
  return i == n;
}

/// `entry` is {list, set or ordered dict, item, item, ...}.
inline bool same_order(PyObject* entry) {
  auto* const from = PyTuple_GET_ITEM(entry, 0);
  const auto n = PyTuple_GET_SIZE(entry);
  if (1 + PyObject_Size(from) != n) return false;
  if (PyList_Check(from)) {
    for (Py_ssize_t i = 1; i < n; ++i)
      if (!same_value(PyList_GET_ITEM(from, i - 1), PyTuple_GET_ITEM(entry, i))) return false;
    return true;
  }
  Py_ssize_t i = 1;
  for (const auto& item : pybind11::reinterpret_borrow<pybind11::object>(from))
    if (item.ptr() != PyTuple_GET_ITEM(entry, i++)) return false;
  return true;
}

/// `entry` is {tensor, dtype, device, shape, requires_grad}.
inline bool same_tensor(PyObject* entry) {
  const auto told = pybind11::reinterpret_borrow<pybind11::tuple>(entry);
  const auto t = told[0].cast<at::Tensor>();
  return t.scalar_type() == told[1].cast<at::ScalarType>() && t.device() == told[2].cast<at::Device>() &&
         t.sizes() == at::IntArrayRef(told[3].cast<std::vector<int64_t>>()) && t.requires_grad() == told[4].cast<bool>();
}

/// The `__dict__` of an object as `object` keeps it, or None.
inline pybind11::object state_of(const pybind11::handle& o) {
  auto* const held = PyObject_GenericGetDict(o.ptr(), nullptr);
  if (held != nullptr) return pybind11::reinterpret_steal<pybind11::object>(held);
  PyErr_Clear();
  return pybind11::none();
}

/// The dicts of `entries` hold what they held (see `same_dict`).
inline bool same_dicts(const pybind11::list& entries) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(entries.ptr()); ++i)
    if (!same_dict(PyList_GET_ITEM(entries.ptr(), i))) return false;
  return true;
}

/// @param types {object, type}
/// @param states {object, `__dict__`}
inline bool unchanged(const pybind11::list& types, const pybind11::list& states, const pybind11::list& dicts,
                      const pybind11::list& orders, const pybind11::list& tensors) {
  const auto all = [](const pybind11::list& list, const auto& same) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list.ptr()); ++i)
      if (!same(PyList_GET_ITEM(list.ptr(), i))) return false;
    return true;
  };
  return all(types,
             [](PyObject* entry) {
               return reinterpret_cast<PyObject*>(Py_TYPE(PyTuple_GET_ITEM(entry, 0))) == PyTuple_GET_ITEM(entry, 1);
             }) &&
         all(states, [](PyObject* entry) { return state_of(PyTuple_GET_ITEM(entry, 0)).ptr() == PyTuple_GET_ITEM(entry, 1); }) &&
         same_dicts(dicts) && all(orders, same_order) && all(tensors, same_tensor);
}

}  // namespace remat::python
