// SPDX-License-Identifier: Apache-2.0
/// @file
/// Programs that Python's `torch.export.save` wrote, to be trained without Python; weights back to Python.
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

/// A program holds what this process cannot run; `what()` lists all of it.
struct unsupported_program : error {
  unsupported_program(const std::string& what, std::vector<std::string> list) : error(what), reasons(std::move(list)) {}
  std::vector<std::string> reasons;  ///< one per operator or value: its name, why, the line of the user's source
};

/// An input of a program has another type, number of dimensions or size than it was exported for; `what()` names both.
struct bad_input : error {
  using error::error;
};

struct load_options {
  std::string model = "model";  ///< name inside the archive
  /// Where weights and everything that the program makes are to live, instead of where they were when it was exported.
  std::optional<at::Device> device = {};
  std::function<void(const std::string&)> log = {};  ///< told of dropout and batch norm that were exported in eval mode
};

/// A program in a `.pt2` archive: schema 8 of torch.export, training or decomposed operators.
///
/// It runs through the dispatcher with autograd and gives, bit by bit, what `torch.export.load(path).module()` gives in Python.
/// Training flags and arguments that are no tensors are those of the export: export in train mode. Buffers are written in place.
class exported_program final : public model {
 public:
  /// @param path    the archive; stays open, and may be replaced by `save`
  /// @param options which model of it, and where to
  /// @throws bad_document naming the record and the field of an archive that is not what it should be; unsupported_program;
  ///         not_available if this PyTorch has not the device
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
  /// In the order of the program, tied ones once.
  std::vector<named_tensor> parameters() override;
  /// Persistent or not, tied ones once.
  std::vector<named_tensor> buffers() override;
  std::string signature() override { return {}; }

  /// Names of the tensors that `forward` takes.
  const std::vector<std::string>& input_names() const;
  /// Names of the tensors that `forward` gives: the path to each in what the Python module returned, such as `loss` or
  /// `hidden.0`. Numbers and None that it returned are left out.
  const std::vector<std::string>& output_names() const;

  /// @throws bad_input; c10::Error of an operator, with its node and the line of the user's source
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs);
  /// `forward`, for a session.
  invocation call() const;

  /// Parameters and persistent buffers by every name they have, as `state_dict()` in Python, in the order of the names. The
  /// tensors are those of the program.
  std::vector<named_tensor> state_dict();
  /// Writes the archive with the weights, buffers and constants as they are now. Readers see the old file or the whole new one.
  /// @throws error naming the file, or the tensor that was given another size or type since
  void save(const std::string& path);

 private:
  struct state;
  explicit exported_program(std::shared_ptr<state> s) : state_(std::move(s)) {}
  std::shared_ptr<state> state_;
};

/// Writes tensors for `torch.load(path, weights_only=True)`, as a dict. Those that share memory still do when they are read.
/// @throws error naming the file, with the reason why it cannot be written
void save_state_dict(const std::string& path, const std::vector<named_tensor>& tensors);

/// Writes tensors as safetensors. Of those that are the same memory one is written, and the metadata tell its other names, as
/// `safetensors.torch.save_model` does; `load_model` reads that.
/// @throws error naming the file, or the tensor whose type or name the format does not know
void save_safetensors(const std::string& path, const std::vector<named_tensor>& tensors);

}  // namespace remat::pytorch
