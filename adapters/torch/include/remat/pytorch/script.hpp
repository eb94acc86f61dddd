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

/// A TorchScript module that trains as in eager mode.
///
/// While the module runs, TorchScript's own optimisation is off on the calling thread. It would replace operators and
/// derivatives, differently from step to step. Without it the gradients equal those of eager mode.
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
  /// @param module the module; shared, not copied. Code that TorchScript has optimised in it is dropped
  explicit script_model(const ::torch::jit::Module& module);

  std::string name() const override;
  std::vector<named_tensor> parameters() override;
  std::vector<named_tensor> buffers() override;
  /// Attributes of all submodules that are numbers, flags or text, `training` included.
  std::string signature() override;

  /// A method of the module that takes tensors. The invocation throws not_supported if the method returns anything but tensors,
  /// or tuples, lists or dicts of them, nested or not.
  /// @param method name of the method
  /// @throws bad_option naming the method, if there is none
  invocation call(const std::string& method = "forward") const;

 private:
  std::shared_ptr<::torch::jit::Module> module_;
};

}  // namespace remat::pytorch
