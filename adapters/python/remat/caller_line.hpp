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

/// A path from the folder of its package on, as `package.part.model` lies in package/part/model.py.
/// @param module of Python, by name
inline std::string path_in_package(std::string_view file, std::string_view module) {
  auto parts = 1 + std::count(module.begin(), module.end(), '.') + (file.ends_with("/__init__.py") ? 1 : 0);
  auto slash = file.size();
  while (parts-- > 0 && slash != file.npos && slash > 0) slash = file.rfind('/', slash - 1);
  return std::string(slash == file.npos ? file : file.substr(slash + 1));
}

/// Code of Python that calls of operators were seen in.
class seen_code {
 public:
  enum class owner { torch, remat, user };

  /// @param folders of PyTorch and remat, each with a slash at its end
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
  pybind11::object code_;  ///< held, so that no other code has its address
};

/// A function that tells file and line of the innermost code of the user's model that runs on this thread: code that is neither
/// PyTorch's nor remat's. It gives an empty text where there is none. To be called with the GIL, while both are imported.
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
      if (x.whose == seen_code::owner::remat) return {};  // it has called the model
      if (x.whose == seen_code::owner::user) return x.path + ":" + std::to_string(PyFrame_GetLineNumber(frame));
      frame = PyFrame_GetBack(frame);
    }
    return {};
  };
}

}  // namespace remat::python
