// SPDX-License-Identifier: Apache-2.0
/// @file
/// The module `remat._torch`: bindings of captures, devices and memory. Sessions are in torch_sessions.cpp, disks in
/// torch_disks.cpp.
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <string>
#include <vector>

#include <remat/pytorch/capture.hpp>
#include <remat/pytorch/device.hpp>
#include <remat/pytorch/free_memory.hpp>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/offload.hpp>
#include <remat/pytorch/session.hpp>

#include "bindings.hpp"
#include "caller_line.hpp"
#include "translated.hpp"
#include "unchanged.hpp"

namespace py = pybind11;
namespace rp = remat::pytorch;
using remat::python::translated;

namespace {

/// Counts the references that a set of objects holds. Objects that only this set refers to, such as functions and their closures,
/// join the set.
struct reference_counts {
  std::map<PyObject*, Py_ssize_t> to;
  void look_into(PyObject* first) {
    within_.push_back(first);
    while (!within_.empty()) {
      auto* o = within_.back();
      within_.pop_back();
      if (const auto traverse = Py_TYPE(o)->tp_traverse; traverse != nullptr) traverse(o, &count, this);
    }
  }

 private:
  static int count(PyObject* o, void* self) {
    auto& counts = *static_cast<reference_counts*>(self);
    if (++counts.to[o] == Py_REFCNT(o) && !THPVariable_Check(o) && PyObject_IS_GC(o)) counts.within_.push_back(o);
    return 0;
  }

  std::vector<PyObject*> within_;
};

/// Per tensor: true if Python holds it beside the objects of autograd functions, see `set_holder_query`.
std::vector<bool> held_beside(const std::vector<::torch::autograd::Node*>& functions, const std::vector<at::Tensor>& tensors) {
  const py::gil_scoped_acquire gil;
  reference_counts from_functions;
  for (const auto* f : functions)
    if (auto* o = f->pyobj_slot()->load_pyobj(); o != nullptr) from_functions.look_into(o);
  std::vector<bool> found;
  for (const auto& t : tensors) {
    auto* o = t.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
    found.push_back(o != nullptr && Py_REFCNT(o) > 1 + from_functions.to[o]);  // 1: by the tensor in C++
  }
  return found;
}

/// Describes the side effect of a custom backward in Python, see _effects.py and `set_effect_inspector`.
std::string effect_of(::torch::autograd::Node& node) {
  const py::gil_scoped_acquire gil;
  auto* function = node.pyobj_slot()->load_pyobj();
  if (function == nullptr) return {};
  return py::module_::import("remat._effects").attr("effect_of")(py::handle(function)).cast<std::string>();
}

/// Replaces a method of a class of C++, whose attributes Python code cannot set.
void set_method(const py::type& of, const std::string& name, const py::function& method) {
  auto* const type = reinterpret_cast<PyTypeObject*>(of.ptr());
  if (PyDict_SetItemString(type->tp_dict, name.c_str(), method.ptr()) != 0) throw py::error_already_set();
  PyType_Modified(type);
}

}  // namespace

PYBIND11_MODULE(_torch, m) {
  using tensors = std::vector<at::Tensor>;
  rp::on_exception_caught([] {
    const py::gil_scoped_acquire gil;
    PyErr_Clear();
  });
  rp::on_backward_exception(&remat::python::translate_raised);
  rp::set_holder_query(&held_beside);
  rp::set_effect_inspector(&effect_of);
  rp::when_gradients_move([] { return static_cast<int>(PyGILState_Ensure()); },
                          [](int state) { PyGILState_Release(static_cast<PyGILState_STATE>(state)); });
  rp::set_source_line_callback(remat::python::caller_line());
  rp::set_handler_query([] {
    const py::gil_scoped_acquire gil;
    return py::module_::import("remat._handlers").attr("has_handler")().cast<bool>();
  });
  m.def("capturing", &rp::capturing);
  m.def("weights_disguised", &rp::weights_disguised);
  m.def("about_to_read", &rp::about_to_read, py::arg("tensor"), py::arg("may_write"));
  m.def("observing", [](const at::Tensor& t, const py::function& f, const py::args& args, const py::kwargs& kwargs) {
    const rp::observing_gradient now(t);
    return f(t, *args, **kwargs);
  });
  m.def("about_to_read_generator", [](const at::Generator& g) {
    if (g == at::globalContext().defaultGenerator(g.device())) rp::about_to_read_generator();
  });
  m.def("set_method", &set_method);
  m.def("fall_back_to_eager", &rp::fall_back_to_eager);
  m.def("may_copy", &rp::may_copy);
  m.def("without_recording_keys", [](bool recorded, const py::function& f, const py::args& args, const py::kwargs& kwargs) {
    const rp::without_recording_keys now(recorded);
    return f(*args, **kwargs);
  });
  m.def("calls_until_now", &rp::calls_until_now);
  m.def("repeat_writes", &rp::repeat_writes);
  m.def("without_data", &rp::without_data);
  m.def("without_memory", [](const tensors& list) { return rp::without_memory(list); });
  m.def("pin_weights",
        [](const tensors& list, const std::string& near) { translated([&] { rp::pin_weights(list, c10::Device(near)); }); });
  m.def("check_device", [](const std::string& which) { translated([&] { rp::device_of(c10::Device(which)); }); });
  m.def("same_dicts", &remat::python::same_dicts);
  m.def("devices", [] {
    std::vector<py::dict> list;
    for (const auto& d : translated([] { return rp::devices(); }))
      list.push_back(py::dict(py::arg("device") = d.which.str(), py::arg("name") = d.name, py::arg("total") = d.total,
                              py::arg("free") = d.available, py::arg("problem") = d.problem));
    return list;
  });
  m.def("host_limit", &rp::host_limit);
  m.def("host_free", &rp::host_free);
  m.def("release_sessions", [] { translated([] { rp::session::release_all(); }); });
  m.def("meter_install", &rp::meter::install);
  m.def("meter_reset", [] {
    rp::meter::reset_peak();
    return rp::meter::live();
  });
  m.def("meter_peak", &rp::meter::peak);
  remat::python::bind_disks(m);
  remat::python::bind_sessions(m);
}
