// SPDX-License-Identifier: Apache-2.0
#include "hooks.hpp"

#include <remat/pytorch/capture.hpp>

namespace remat::pytorch {
namespace {

std::atomic<int (*)()> lock_python = nullptr;
std::atomic<void (*)(int)> unlock_python = nullptr;

}  // namespace

void when_gradients_move(int (*lock)(), void (*unlock)(int)) {
  unlock_python = unlock;
  lock_python = lock;
}

python_lock::python_lock() {
  if (const auto lock = lock_python.load(); lock != nullptr) state_ = lock();
}
python_lock::~python_lock() {
  if (state_) unlock_python.load()(*state_);
}

}  // namespace remat::pytorch
