// SPDX-License-Identifier: Apache-2.0
/// @file
/// TorchScript modules as models.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <remat/pytorch/model.hpp>

namespace torch::jit {
struct Module;
}

namespace remat::pytorch {

/// A TorchScript module, trained as it would be eagerly.
///
/// TorchScript's own optimisation is off on the calling thread while the module runs: it would replace operators and derivatives,
/// differently from step to step. Without it the gradients are those of eager mode.
///
/// @code
/// auto module = torch::jit::load("resnet.pt");
/// module.train();
/// auto model = std::make_shared<remat::pytorch::script_model>(module);
/// remat::pytorch::session train(model, {.budget = "512MiB"});
/// train.forward(model->call(), {images})[0].mean().backward();
/// @endcode
class script_model final : public model {
 public:
  /// @param module shared, not copied; what TorchScript optimised in it is forgotten
  explicit script_model(const ::torch::jit::Module& module);

  std::string name() const override;
  std::vector<named_tensor> parameters() override;
  std::vector<named_tensor> buffers() override;
  /// Attributes that are numbers, flags or text, of all modules in it; `training` is one of them.
  std::string signature() override;

  /// A method that takes tensors.
  /// @throws bad_option naming the method, if there is none
  /// The invocation throws not_supported for a result that is neither a tensor nor a tuple, list or dict of what it returns.
  invocation call(const std::string& method = "forward") const;

 private:
  std::shared_ptr<::torch::jit::Module> module_;
};

}  // namespace remat::pytorch
