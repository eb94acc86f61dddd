// SPDX-License-Identifier: Apache-2.0
/// @file
/// Checks that Python dicts have the same keys and values as recorded. Compares pointers and runs no Python code.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstring>

namespace remat::python {

/// True if `a` and `b` are the same object, or equal objects of type float (same bits), int or str.
inline bool same_value(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  if (PyFloat_CheckExact(a)) {
    const double x = PyFloat_AS_DOUBLE(a), y = PyFloat_AS_DOUBLE(b);
    return std::memcmp(&x, &y, sizeof x) == 0;
  }
  return (PyLong_CheckExact(a) || PyUnicode_CheckExact(a)) && PyObject_RichCompareBool(a, b, Py_EQ) == 1;
}

/// True if a dict still has its recorded keys and values, in the recorded order.
/// @param entry tuple (dict, key, value, key, value, ...): the dict, and its items when it was recorded
inline bool same_dict(PyObject* entry) {
  auto* const dict = PyTuple_GET_ITEM(entry, 0);
  const auto n = PyTuple_GET_SIZE(entry);
  if (1 + 2 * PyDict_GET_SIZE(dict) != n) return false;
  Py_ssize_t at = 0, i = 1;
  for (PyObject *key = nullptr, *value = nullptr; PyDict_Next(dict, &at, &key, &value); i += 2)
    if (key != PyTuple_GET_ITEM(entry, i) || !same_value(value, PyTuple_GET_ITEM(entry, i + 1))) return false;
  return i == n;
}

/// True if `same_dict` holds for all entries.
inline bool same_dicts(const pybind11::list& entries) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(entries.ptr()); ++i)
    if (!same_dict(PyList_GET_ITEM(entries.ptr(), i))) return false;
  return true;
}

}  // namespace remat::python
