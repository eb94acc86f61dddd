// SPDX-License-Identifier: Apache-2.0
/// @file
/// Common parts of all tiers and links. Private to the adapter.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include <remat/pytorch/device.hpp>

namespace remat::pytorch {

/// A tier that counts its reserved bytes, up to a limit.
class limited_tier : public tier {
 public:
  /// @throws bad_option
  limited_tier(std::string name, bytes_t limit) : name_(std::move(name)), limit_(limit) {
    if (limit < 0) throw bad_option("the limit of " + name_ + " must be >= 0, got " + std::to_string(limit));
  }
  std::string name() const final { return name_; }
  bytes_t limit() const final { return limit_; }
  std::shared_ptr<region> reserve(bytes_t bytes) final {
    if (bytes < 0) throw bad_option("bytes to reserve in " + name_ + " must be >= 0, got " + std::to_string(bytes));
    if (bytes > available()) free_pending();
    {
      std::lock_guard lock(used_->mutex);
      if (bytes > limit_ - used_->bytes) throw out_of_memory(name_, bytes, limit_ - used_->bytes);
      used_->bytes += bytes;
    }
    std::unique_ptr<region> made;
    try {
      made = make(bytes);
    } catch (const out_of_memory& e) {
      used_->give_back(bytes);
      throw out_of_memory(name_, bytes, e.available, e.why);
    } catch (...) {
      used_->give_back(bytes);
      throw;
    }
    return {made.release(), [used = used_, bytes](const region* held) {
              delete held;
              used->give_back(bytes);
            }};
  }

 private:
  /// @param bytes >= 0, within the limit
  /// @throws out_of_memory
  virtual std::unique_ptr<region> make(bytes_t bytes) = 0;

  /// Low memory: waits for pending copies, which are the only remaining owners of some regions.
  virtual void free_pending() {}
  bytes_t available() const {
    std::lock_guard lock(used_->mutex);
    return limit_ - used_->bytes;
  }

  struct used_bytes {
    void give_back(bytes_t some) {
      std::lock_guard lock(mutex);
      bytes -= some;
    }
    std::mutex mutex;
    bytes_t bytes = 0;
  };
  std::string name_;
  bytes_t limit_;
  std::shared_ptr<used_bytes> used_ = std::make_shared<used_bytes>();
};

/// @throws broken_contract if the blocks differ in size or reach beyond their regions
inline void check_copy(const block& to, const block& from) {
  if (to.bytes != from.bytes)
    throw broken_contract("remat: a copy of " + std::to_string(from.bytes) + " bytes to a block of " + std::to_string(to.bytes));
  for (const auto* b : {&to, &from})
    if (!b->in || b->bytes < 0 || b->offset < 0 || b->bytes > b->in->bytes() - b->offset)
      throw broken_contract("remat: a copy of " + std::to_string(b->bytes) + " bytes at " + std::to_string(b->offset) +
                            " reaches beyond its region");
}

}  // namespace remat::pytorch
