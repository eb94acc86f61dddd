// SPDX-License-Identifier: Apache-2.0
/// @file
/// The file: a ZIP archive of JSON records and raw storages.
#pragma once

#include <ATen/core/Tensor.h>
#include <caffe2/serialize/inline_container.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "field.hpp"

namespace remat::pytorch::exported {

/// A tensor of the archive, and its bytes in a record.
struct stored_tensor {
  std::string name, record;
  bool parameter = false, requires_grad = false;
  at::ScalarType type = at::kFloat;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;  ///< elements
  at::Device device = at::kCPU;
  at::Tensor tensor;  ///< tied tensors share one object
};

class archive {
 public:
  /// Reads the program and all tensors.
  /// @param device where the tensors go; nothing: the device that the archive names
  /// @throws bad_document, unsupported_program, not_available
  archive(const std::string& path, const std::string& model, std::optional<at::Device> device);

  field program() const { return {program_, place("models/" + model_ + ".json")}; }
  const std::vector<stored_tensor>& weights() const { return weights_; }      ///< parameters and persistent buffers
  const std::vector<stored_tensor>& constants() const { return constants_; }  ///< constants and other buffers
  /// @throws bad_document if there is no such record
  std::pair<at::DataPtr, std::size_t> read(const std::string& record) const;
  std::vector<std::string> records() const;

 private:
  std::string place(const std::string& record) const { return path_ + ": " + record; }
  field::json parse(const std::string& record) const;
  std::vector<stored_tensor> tensors(const std::string& folder, const std::string& config, std::optional<at::Device> device);

  std::string path_, model_;
  /// Stays open: `save` copies unchanged records from the loaded file, even if another file has taken its name.
  std::unique_ptr<caffe2::serialize::PyTorchStreamReader> reader_;
  field::json program_;
  std::vector<stored_tensor> weights_, constants_;
};

/// Conversions from the numbers of the schema.
at::ScalarType scalar_type(const field& f);
at::Layout layout(const field& f);
at::MemoryFormat memory_format(const field& f);
at::Device device(const field& f);

}  // namespace remat::pytorch::exported
