// SPDX-License-Identifier: Apache-2.0
/// @file
/// Trains programs written by `torch.export.save` without Python, and writes their weights for Python.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include <remat/core/error.hpp>
#include <remat/pytorch/model.hpp>

namespace remat::pytorch {

/// A program has operators or values that this process cannot run; `what()` lists all of them.
struct unsupported_program : error {
  unsupported_program(const std::string& what, std::vector<std::string> list) : error(what), reasons(std::move(list)) {}
  std::vector<std::string> reasons;  ///< one per operator or value: its name, the cause, the line of the user's source
};

/// An input has another type, number of dimensions or size than the exported program expects; `what()` names both.
struct bad_input : error {
  using error::error;
};

struct load_options {
  std::string model = "model";  ///< name inside the archive
  /// Device of the weights and of all tensors that the program makes; nothing: the devices of the export.
  std::optional<at::Device> device = {};
  std::function<void(const std::string&)> log = {};  ///< receives warnings about dropout and batch norm exported in eval mode
};

/// A program in a `.pt2` archive: schema 8 of torch.export, training or decomposed operators.
///
/// It runs through the dispatcher with autograd. Its results equal those of `torch.export.load(path).module()` in Python bit by
/// bit. Training flags and arguments that are no tensors are fixed by the export, so export in train mode. Buffers are written in
/// place.
class exported_program final : public model {
 public:
  /// @param path    the archive; stays open, and may be replaced by `save`
  /// @param options name of the model in the archive, and its device
  /// @throws bad_document naming the record and the field of an archive that is malformed; unsupported_program; not_available if
  ///         this PyTorch lacks the device
  /// Complexity: O(bytes of the archive).
  ///
  /// @code
  /// auto program = remat::pytorch::exported_program::load("gpt.pt2");
  /// remat::pytorch::session train(program, {.budget = "512MiB"});
  /// torch::optim::SGD optimizer(remat::pytorch::tensors_of(program->parameters()), 0.1);
  /// train.forward(program->call(), {tokens})[0].backward();
  /// optimizer.step();
  /// program->save("gpt.pt2");
  /// @endcode
  static std::shared_ptr<exported_program> load(const std::string& path, const load_options& options = {});

  std::string name() const override;
  /// Parameters in the order of the program; tied parameters appear once.
  std::vector<named_tensor> parameters() override;
  /// Buffers, persistent or not; tied buffers appear once.
  std::vector<named_tensor> buffers() override;
  std::string signature() override { return {}; }

  /// Names of the tensors that `forward` takes.
  const std::vector<std::string>& input_names() const;
  /// Names of the tensors that `forward` returns. A name is the path to the tensor in the result of the Python module, such as
  /// `loss` or `hidden.0`. Numbers and None in that result are left out.
  const std::vector<std::string>& output_names() const;

  /// Runs the program.
  /// @param inputs one tensor per name of `input_names`
  /// @return one tensor per name of `output_names`
  /// @throws bad_input; c10::Error of an operator, with its node and the line of the user's source
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs);
  /// `forward`, for a session.
  invocation call() const;

  /// Parameters and persistent buffers under all their names, as `state_dict()` in Python, sorted by name. The tensors share the
  /// memory of the program.
  std::vector<named_tensor> state_dict();
  /// Writes the archive with the current weights, buffers and constants. Readers see the old file or the whole new one.
  /// @throws error naming the file, or a tensor whose size or type has changed since the load
  void save(const std::string& path);

 private:
  struct state;
  explicit exported_program(std::shared_ptr<state> s) : state_(std::move(s)) {}
  std::shared_ptr<state> state_;
};

/// Writes tensors as a dict for `torch.load(path, weights_only=True)`. Tensors that share memory share it again when loaded.
/// @throws error naming the file, with the reason why it cannot be written
void save_state_dict(const std::string& path, const std::vector<named_tensor>& tensors);

/// Writes tensors as safetensors. Tensors with the same memory are written once; the metadata list their other names, as
/// `safetensors.torch.save_model` does for `load_model`.
/// @throws error naming the file, or the tensor whose type or name the format lacks
void save_safetensors(const std::string& path, const std::vector<named_tensor>& tensors);

}  // namespace remat::pytorch
