// SPDX-License-Identifier: Apache-2.0
#include "cuda.hpp"

namespace remat::pytorch {

device& cuda_device(c10::Device which) {
  throw not_available("steps on " + which.str() + " need a build of remat with the CUDA Toolkit and a PyTorch that has CUDA");
}
far_memory cuda_far_memory(c10::Device which, bytes_t) {
  cuda_device(which);
  return {};
}

}  // namespace remat::pytorch
