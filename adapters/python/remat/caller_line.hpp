// SPDX-License-Identifier: Apache-2.0
/// @file
/// The line of the user's model that calls an operator.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace remat::python {

/// Shortens the path of a source file to start at its top-level package: "package/part/model.py" for `package.part.model`.
/// @param module name of the Python module of the file
inline std::string path_in_package(std::string_view file, std::string_view module) {
  auto parts = 1 + std::count(module.begin(), module.end(), '.') + (file.ends_with("/__init__.py") ? 1 : 0);
  auto slash = file.size();
  while (parts-- > 0 && slash != file.npos && slash > 0) slash = file.rfind('/', slash - 1);
  return std::string(slash == file.npos ? file : file.substr(slash + 1));
}

/// Path and owner of a Python code object that has called an operator.
class seen_code {
 public:
  enum class owner { torch, remat, user };

  /// @param folders folders of the packages torch and remat, each with a trailing slash
  seen_code(pybind11::object code, PyFrameObject* frame, const std::pair<std::string, std::string>& folders)
      : code_(std::move(code)) {
    const pybind11::object name = code_.attr("co_filename");
    const char* const text = PyUnicode_AsUTF8(name.ptr());
    if (text == nullptr) PyErr_Clear();
    const std::string_view file(text == nullptr ? "" : text);
    whose = file.starts_with(folders.first) ? owner::torch : file.starts_with(folders.second) ? owner::remat : owner::user;
    const pybind11::object module =
        pybind11::handle(reinterpret_cast<PyObject*>(frame)).attr("f_globals").attr("get")("__name__", "");
    path = path_in_package(file, pybind11::isinstance<pybind11::str>(module) ? module.cast<std::string>() : "");
  }

  owner whose = owner::user;
  std::string path;

 private:
  pybind11::object code_;  ///< held so that no other code object gets the address, which is the key of the cache
};

/// Makes a function that returns "file:line" of the innermost Python frame on this thread that belongs neither to PyTorch nor to
/// remat: a line of the user's model. It returns an empty text if there is no frame of the model.
/// @pre The caller holds the GIL, and the packages torch and remat are imported.
inline auto caller_line() {
  namespace py = pybind11;
  const auto folder = [](const char* package) {
    return py::module_::import(package).attr("__path__").cast<py::list>()[0].cast<std::string>() + "/";
  };
  static std::pair<std::string, std::string> folders;
  folders = {folder("torch"), folder("remat")};
  return +[]() -> std::string {
    constexpr std::size_t most = 1 << 14;
    static auto& seen = *new std::unordered_map<PyObject*, seen_code>;  // outlives Python; the GIL guards it
    const py::gil_scoped_acquire hold;
    auto* frame = PyEval_GetFrame();
    Py_XINCREF(reinterpret_cast<PyObject*>(frame));
    while (frame != nullptr) {
      const auto held = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(frame));
      auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
      auto found = seen.find(code.ptr());
      if (found == seen.end()) {
        if (seen.size() >= most) seen.clear();
        auto* const key = code.ptr();
        found = seen.emplace(key, seen_code(std::move(code), frame, folders)).first;
      }
      const auto& x = found->second;
      if (x.whose == seen_code::owner::remat) return {};  // remat has called the model, so the outer frames are not the model's
      if (x.whose == seen_code::owner::user) return x.path + ":" + std::to_string(PyFrame_GetLineNumber(frame));
      frame = PyFrame_GetBack(frame);
    }
    return {};
  };
}

}  // namespace remat::python
