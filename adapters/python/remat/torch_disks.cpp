// SPDX-License-Identifier: Apache-2.0
/// @file
/// Bindings of disks: tensors in files, and the traffic to and from them.
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <remat/io/bytes.hpp>
#include <remat/pytorch/disk.hpp>
#include <remat/pytorch/offload.hpp>

#include "bindings.hpp"
#include "translated.hpp"

namespace remat::python {
namespace {

/// Python uses numbers as keys of groups that are fetched together.
rp::disk_traffic::key traffic_key(std::uintptr_t of) { return reinterpret_cast<rp::disk_traffic::key>(of); }

}  // namespace

void bind_disks(py::module_& m) {
  using tensors = std::vector<at::Tensor>;
  m.def("check_disk", [](const std::string& folder, const std::string& bytes) {
    in_folder(folder, [&] { rp::file_memory(folder, bytes.empty() ? remat::max_bytes : remat::parse_bytes(bytes)); });
  });
  py::class_<rp::disk>(m, "Disk")
      .def(py::init(
          [](const std::string& folder) { return in_folder(folder, [&] { return std::make_unique<rp::disk>(folder); }); }))
      .def("reserve", [](rp::disk& d, const tensors& like) { return in_folder(d.folder(), [&] { return d.reserve(like); }); })
      .def("holds", &rp::disk::holds)
      .def("write", [](rp::disk& d, const at::Tensor& to, const at::Tensor& value) { translated([&] { d.write(to, value); }); })
      .def("take_gradient",
           [](rp::disk& d, const at::Tensor& p, const at::Tensor& home) { translated([&] { d.take_gradient(p, home); }); })
      .def_property_readonly("reserved", &rp::disk::reserved)
      .def_property_readonly("fetched", &rp::disk::fetched)
      .def_property_readonly("evicted", &rp::disk::evicted);
  m.def("evict", [](const tensors& list) { translated([&] { rp::disk::evict(list); }); });
  m.def("on_a_disk", &rp::on_a_disk);
  m.def("movable", &rp::movable);
  py::class_<rp::disk_traffic, std::shared_ptr<rp::disk_traffic>>(m, "Traffic")
      .def(py::init([] {
        return std::shared_ptr<rp::disk_traffic>(new rp::disk_traffic, [](rp::disk_traffic* held) {
          py::gil_scoped_release free;  // the destructor waits for threads that may need the GIL to release tensors
          delete held;
        });
      }))
      .def(
          "ahead",
          [](rp::disk_traffic& t, std::uintptr_t of, const tensors& list, const tensors& also) {
            translated([&] { t.ahead(traffic_key(of), list, also); });
          },
          py::arg("key"), py::arg("tensors"), py::arg("also") = tensors())
      .def("ready", [](rp::disk_traffic& t, std::uintptr_t of,
                       const tensors& list) { translated([&] { t.ready(traffic_key(of), list); }); })
      .def("done", [](rp::disk_traffic& t, const tensors& list) { translated([&] { t.done(list); }); })
      .def("wait", [](rp::disk_traffic& t) { translated([&] { t.wait(); }); })
      .def("drain", [](rp::disk_traffic& t) { translated([&] { t.drain(); }); });
}

}  // namespace remat::python
